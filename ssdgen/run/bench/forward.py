"""`ssdgen bench forward`: our plans and the peers at one shape after the other, all in one run on the same inputs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType

import torch

from ssdgen.diagnostics import UserError
from ssdgen.ir.chunkform import ChunkForm
from ssdgen.plan.settings import configure
from ssdgen.run.bench.measure import FLUSHING, Meter, measure
from ssdgen.run.bench.others import INSTALL, Contender, Others, Variant
from ssdgen.run.bench.ours import call_of, floor_of, load_module, write_module
from ssdgen.run.bench.rows import DEFAULT, OURS, Document, Environment, Row, means, ratios
from ssdgen.run.bench.scale import scale_rows
from ssdgen.run.bench.shapes import Shape
from ssdgen.run.bench.truth import input_sets, mamba2_truth, of_call
from ssdgen.run.bench.warm import Job, Setting, our_jobs, peer_jobs, warm
from ssdgen.run.bench.winners import Winners, read_winners, write_winners
from ssdgen.run.gpu_peers import Call

Progress = Callable[[int, int | None, str], None]
ROUND_SECONDS = 4.0
"""The most that the rounds of one shape take."""
WARM_SHARE = 0.5
SEARCH_SHARE = 0.7


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured: the two forms, the modules of ours by name, and the peers."""

    mamba2: ChunkForm
    simple_gla: ChunkForm
    peers: tuple[Variant, ...]
    folders: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def modules(self) -> dict[str, ModuleType]:
        """The default modules of both layers; their portable forms are what results are compared with."""
        return {
            "mamba2": load_module(Path(self.folders[DEFAULT]), "mamba2"),
            "simple_gla": load_module(write_module(self.simple_gla, configure(self.simple_gla, {})), "simple_gla"),
        }

    def setting(self, winners: Path, gpu: str, again: bool) -> Setting:
        """What warming up needs to know of it."""
        gla = write_module(self.simple_gla, configure(self.simple_gla, {}))
        return Setting({"mamba2": self.folders[DEFAULT], "simple_gla": str(gla)}, str(winners), gpu, again)


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure: rounds of replays a shape, and seconds after which no shape is begun."""

    rounds: int = 40
    seconds: float = 540.0
    workers: int = max(1, (os.cpu_count() or 1) - 2)


def subject(
    mamba2: ChunkForm, simple_gla: ChunkForm, peers: Sequence[Variant], plans: Mapping[str, Mapping[str, str]]
) -> Subject:
    """Our `plans` (by name, knobs) emitted, and the peers; one that cannot be emitted, or is another again, is a note."""
    folders: dict[str, str] = {}
    notes: list[str] = []
    for name, settings in plans.items():
        try:
            folder = str(write_module(mamba2, configure(mamba2, settings)))
        except UserError as error:
            if name == DEFAULT:
                raise
            notes.append(f"{name} is not measured: {error.message}")
            continue
        same = next((other for other, known in folders.items() if known == folder), None)
        if same is None:
            folders[name] = folder
        else:
            notes.append(f"{name} is the same module as {same}")
    return Subject(mamba2, simple_gla, tuple(peers), folders, tuple(notes))


def our_contenders(shape: Shape, subject: Subject, *, tuned: bool = True) -> list[Contender]:
    """Ours at a shape, all compared with the portable form of the default module."""
    truth = partial(mamba2_truth, subject.modules()["mamba2"], shape)
    out = []
    for name, folder in subject.folders.items():
        module = load_module(Path(folder), "mamba2")
        values = lambda result: of_call(shape, result[0], result[1])  # noqa: E731
        call = call_of(module, tuned=tuned)
        floor = partial(floor_of, subject.mamba2, module, call, shape)
        out.append(Contender(OURS, name, call, "mamba2", truth, values, floor=floor))
    return out


def jobs_of(subject: Subject, shapes: Sequence[Shape], again: bool, workers: int) -> list[Job]:
    """What to compile first; the peers begin, since their compilers take longest."""
    theirs = peer_jobs(shapes, subject.peers, parts=workers if again else 1)
    return theirs + our_jobs(shapes, subject.folders.values(), tuned=True)


def warmed(job: Job, setting: Setting, shape: Shape) -> Call | None:
    """What `job` calls; None for a peer's variant that does not take `shape`. ImportError if the peer is not here."""
    if job.family == OURS:
        return call_of(load_module(Path(job.name), "mamba2"), tuned=job.tuned)
    modules = {name: load_module(Path(folder), name) for name, folder in setting.modules.items()}
    winners = Winners() if setting.again else read_winners(Path(setting.winners), setting.gpu)
    others = Others(modules, winners, again=setting.again, part=job.part)
    contender = others.contender(shape, job.family, job.name)
    return None if contender is None else contender.call


def forward(
    subject: Subject,
    shapes: Sequence[Shape],
    meter: Meter,
    environment: Environment,
    effort: Effort,
    winners_file: Path,
    *,
    again: bool = False,
    device: str = "cuda",
    scale: bool = True,
    progress: Progress = lambda done, total, what: None,
    save: Callable[[Document], None] = lambda document: None,
    clock: Callable[[], float] = time.monotonic,
) -> Document:
    """The document of a run; `save` gets it after each shape. `again` makes the peers search all they can, and records it."""
    end = clock() + effort.seconds
    notes = list(subject.notes)
    if device == "cuda":
        jobs = jobs_of(subject, shapes, again, effort.workers)
        setting = subject.setting(winners_file, environment.gpu, again)
        share = SEARCH_SHARE if again else WARM_SHARE
        notes += warm(jobs, setting, effort.workers, share * effort.seconds, lambda i, w: progress(i, len(jobs), w))
    known = read_winners(winners_file, environment.gpu)
    others = Others(subject.modules(), known, again)
    document = Document("forward", environment, FLUSHING)
    rows: list[Row] = []
    for number, shape in enumerate(shapes):
        progress(number, len(shapes), str(shape))
        if clock() > end:
            notes.append(f"{shape} is not measured: the time was up")
            continue
        contenders = our_contenders(shape, subject) + others.contenders(shape, subject.peers)
        sets = input_sets(subject.mamba2.recurrence.layer, shape, device, environment.l2_bytes)
        rows += measure(shape, contenders, sets, meter, environment, effort.rounds, ROUND_SECONDS)
        del contenders
        if again:
            known = recorded(others, known, winners_file, environment)
        beside = scale_rows(shape, meter, device) if scale else ()
        document = with_ratios(replace(document, rows=tuple(rows), scale=(*document.scale, *beside)))
        missing = (f"{peer} is not here ({why}): {INSTALL}" for peer, why in others.missing.items())
        document = replace(document, notes=tuple(dict.fromkeys((*notes, *missing))))
        save(document)
        del sets
        if device == "cuda":
            torch.cuda.empty_cache()
    return replace(document, notes=tuple(dict.fromkeys((*document.notes, *notes))))


def with_ratios(document: Document, ours: str = DEFAULT) -> Document:
    """`document` with the ratios of its rows, and their means."""
    found = ratios(document.rows, ours)
    return replace(document, ratios=found, means=means(found))


def recorded(others: Others, known: Winners, file: Path, environment: Environment) -> Winners:
    """`known` with what the peers searched for in this process; written to `file`."""
    versions = {
        name: getattr(environment, name) for name in ("gpu", "driver", "cuda", "torch", "triton", "cuda_tile", "date")
    } | {f"peer {peer}": version for peer, version in environment.peers.items()}
    found = [replace(search, versions=versions) for search in others.searches(Winners() if others.again else known)]
    merged = known.with_all(found)
    write_winners(file, merged, versions)
    return merged
