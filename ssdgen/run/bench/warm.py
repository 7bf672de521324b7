"""Compiling before anything is timed: each thing that will run is called once, in parallel processes, which fills the
compilers' caches on disk.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Literal

from ssdgen.run.bench.rows import OURS
from ssdgen.run.bench.searches import TILEGYM
from ssdgen.run.bench.shapes import Shape, read_shape
from ssdgen.run.bench.tile_cache import VARIABLE, cache_dir, copies, merge
from ssdgen.run.gpu_peers import Call

START = "import sys; sys.path[:] = sys.argv[1:]; from ssdgen.run.bench.warm import work; work()"
BYTES_AT_MOST = 512 << 20
"""Longer sequences are cut for this: many processes share the GPU's memory."""

Direction = Literal["forward", "backward"]
"""The pass that a job is of; that of `backward` is called behind the forward pass, so that both are compiled."""


@dataclass(frozen=True, slots=True)
class Job:
    """Call something once. Of ours, `name` is the folder of its module; of a peer, its variant.

    `part` (i, n) makes a peer that searches compile every n-th of its candidates.
    """

    family: str
    name: str
    shape: str
    tuned: bool = True
    part: tuple[int, int] | None = None
    direction: Direction = "forward"


@dataclass(frozen=True, slots=True)
class Setting:
    """What all jobs of a run share: the folders of the modules by layer, and the peers' recorded searches."""

    modules: Mapping[str, str]
    winners: str
    gpu: str
    again: bool


def short(shape: Shape) -> Shape:
    """`shape`, its tokens halved until it is small enough for many to be called at once."""
    while shape.compulsory_bytes > BYTES_AT_MOST and shape.t % 32 == 0:
        shape = replace(shape, t=shape.t // 2)
    return shape


def compiled_alike(shape: Shape) -> tuple[object, ...]:
    """Shapes of the same classes: a length is 1, a multiple of 16 or another; the state size is a constant of kernels."""
    classes = tuple(
        "1" if x == 1 else "16" if x % 16 == 0 else "any" for x in (shape.b, shape.t, shape.h, shape.g, shape.p)
    )
    return classes, shape.p, shape.n


def peer_jobs(
    shapes: Iterable[Shape], variants: Iterable[tuple[str, str]], parts: int = 1, direction: Direction = "forward"
) -> list[Job]:
    """A job for each variant of a peer, once for shapes that are compiled alike; TileGym's candidates in `parts`."""
    jobs: dict[tuple[object, ...], Job] = {}
    for peer, variant in variants:
        for shape in shapes:
            for i in range(parts if peer == TILEGYM else 1):
                part = (i, parts) if parts > 1 and peer == TILEGYM else None
                alike = _tiled_alike(shape, parts, direction) if peer == TILEGYM else compiled_alike(shape)
                job = Job(peer, variant, str(shape), part=part, direction=direction)
                jobs.setdefault((peer, variant, i, alike), job)
    return list(jobs.values())


def _tiled_alike(shape: Shape, parts: int, direction: Direction) -> tuple[object, ...]:
    """What shapes share that TileGym compiles alike. Heads of a group are a constant of its kernels; in one part of the
    forward pass each shape has a recorded winner of its own.
    """
    if direction == "backward":
        return compiled_alike(shape), shape.h // shape.g
    return (str(shape),) if parts == 1 else compiled_alike(shape)


def our_jobs(
    shapes: Iterable[Shape], folders: Iterable[str], *, tuned: bool, direction: Direction = "forward"
) -> list[Job]:
    """A job for each module and shape, those first that are compiled alike with none before them."""
    first: list[Job] = []
    later: list[Job] = []
    seen: set[tuple[object, ...]] = set()
    for folder in folders:
        for shape in shapes:
            key = (folder, compiled_alike(shape))
            (later if key in seen else first).append(Job(OURS, folder, str(shape), tuned, direction=direction))
            seen.add(key)
    return first + later


def warm(
    jobs: Sequence[Job],
    setting: Setting,
    workers: int,
    seconds: float,
    on_done: Callable[[int, str], None],
    command: Sequence[str] = (sys.executable, "-c", START),
) -> list[str]:
    """Do all jobs, at most `workers` at a time, for at most `seconds`; what went wrong, a line each.

    A job that ends its process costs only itself. `command` starts a worker (with `sys.path` as its arguments).
    """
    count = min(workers, len(jobs))
    with tempfile.TemporaryDirectory(prefix="ssdgen-warm-") as folder:
        cache = cache_dir()
        caches = [] if cache is None else copies(cache, Path(folder), count)
        try:
            return _served(jobs, setting, [*map(str, caches)] or [""] * count, seconds, on_done, command)
        finally:
            if cache is not None:
                merge(caches, cache)


def _served(
    jobs: Sequence[Job],
    setting: Setting,
    caches: Sequence[str],
    seconds: float,
    on_done: Callable[[int, str], None],
    command: Sequence[str],
) -> list[str]:
    """`warm` by a worker for each of `caches`."""
    todo: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        todo.put(job)
    problems: list[str] = []
    done = [0]
    lock = threading.Lock()
    alive: list[subprocess.Popen[str]] = []
    end = time.monotonic() + seconds

    def serve(cache: str) -> None:
        process: subprocess.Popen[str] | None = None
        while time.monotonic() < end:
            with suppress(queue.Empty):
                job = todo.get_nowait()
                if process is None or process.poll() is not None:
                    process = _started(command, cache)
                    with lock:
                        alive.append(process)
                answer = _asked(process, job, setting)
                with lock:
                    done[0] += 1
                    on_done(done[0], f"{Path(job.name).name} {job.shape}")
                    if answer and time.monotonic() < end:
                        problems.append(f"{job.family} {Path(job.name).name} at {job.shape}: {answer}")
                continue
            return

    threads = [threading.Thread(target=serve, args=(cache,), daemon=True) for cache in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    late = time.monotonic() >= end
    with lock:
        for process in alive:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if late:
        problems.append(f"not all was compiled in {seconds:.0f} s: {done[0]} of {len(jobs)} jobs were done")
    return problems


def _started(command: Sequence[str], cache: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*command, *sys.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, VARIABLE: cache} if cache else None,
        start_new_session=True,
    )


def _asked(process: subprocess.Popen[str], job: Job, setting: Setting) -> str:
    """The answer of a worker: empty if it did the job."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps({"job": asdict(job), "setting": asdict(setting)}) + "\n")
        process.stdin.flush()
    except OSError:
        return "its process ended before"
    for line in process.stdout:
        if line.startswith(ANSWER):
            return line.removeprefix(ANSWER).strip()
    return f"its process ended with exit code {process.wait()}"


ANSWER = "ANSWER "


def work(
    requests: IO[str] | None = None, answers: IO[str] | None = None, do: Callable[[Job, Setting], None] | None = None
) -> None:
    """Serve jobs from standard input until it ends."""
    requests, answers = requests or sys.stdin, answers or sys.stdout
    for line in requests:
        data = json.loads(line)
        job = Job(**{**data["job"], "part": tuple(data["job"]["part"]) if data["job"]["part"] else None})
        try:
            (do or _do)(job, Setting(**data["setting"]))
            answer = ""
        except Exception as error:  # code of others and its compiler: the parent prints it
            answer = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        answers.write(f"\n{ANSWER}{answer}\n")
        answers.flush()


def _do(job: Job, setting: Setting, device: str = "cuda") -> None:
    """Call what `job` names once on `device`, a long sequence of it cut; nothing of it stays in memory."""
    import torch

    _called(job, setting, device)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _called(job: Job, setting: Setting, device: str) -> None:
    from ssdgen.run.bench.truth import case_of
    from ssdgen.run.inputs import draw
    from ssdgen.spec import load_source, read_layer

    shape = read_shape(job.shape)
    layer = read_layer(load_source("mamba2"))
    inputs = draw(layer, case_of(layer, short(shape), 0), device, device)
    call = _call_of(job, setting, shape)
    if call is not None:
        call(inputs)


def _call_of(job: Job, setting: Setting, shape: Shape) -> Call | None:
    """What the benchmark of the job's pass calls for it; None for a peer's variant that does not take the shape."""
    from ssdgen.run.bench import backward, forward

    warmed = backward.warmed if job.direction == "backward" else forward.warmed
    return warmed(job, setting, shape)
