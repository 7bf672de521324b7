"""How calls are timed: first compared with float64, then captured in CUDA graphs and replayed in turn with the others.

Every graph holds the call on each of several input sets which together do not fit in the L2 cache, so that no replay finds
its inputs there; a time is that of a replay divided by the sets. `Meter` is what needs a GPU; the rest runs without one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Protocol

import torch

from ssdgen.plan.roofline import Rates
from ssdgen.run.bench.others import Contender
from ssdgen.run.bench.rows import Environment, Row, Spread
from ssdgen.run.bench.shapes import Shape
from ssdgen.run.bench.truth import Values, errors
from ssdgen.run.checks import BOUNDS
from ssdgen.run.gpu_peers import Call
from ssdgen.run.inputs import Inputs

Replay = Callable[[], float]
"""Runs a captured call once on every set; the microseconds of one."""

BOUND = BOUNDS["bf16"]
WARM_SECONDS = 0.3
FEWEST_ROUNDS = 5
EAGER_CALLS = 20
HOST_CALLS = 30
FLUSHING = (
    "inputs rotated: the sets of a call hold over 2.5 times the L2 cache together, and every set has its own outputs"
)


class Meter(Protocol):
    """What measures."""

    def capture(self, call: Call, sets: Sequence[Inputs]) -> Replay:
        """Capture `call` on every set."""

    def eager(self, call: Call, sets: Sequence[Inputs]) -> float:
        """Microseconds of a call among many, launched one by one."""

    def host(self, call: Call, sets: Sequence[Inputs]) -> float:
        """Microseconds until a call returns, the GPU idle before it."""

    def extra_bytes(self, call: Call, inputs: Inputs) -> int:
        """Peak memory of a call beyond what was there before and what it returns."""


class CudaMeter:
    """Measures on the current CUDA device."""

    def capture(self, call: Call, sets: Sequence[Inputs]) -> Replay:
        """Capture `call` on every set; it is run on all of them before, so that nothing is compiled or searched within."""
        for inputs in sets:
            call(inputs)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call(sets[0])
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = [call(inputs) for inputs in sets]
        begin, end = _events()

        def replay(keep: Any = (kept, call)) -> float:
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) * 1000 / len(sets)

        return replay

    def eager(self, call: Call, sets: Sequence[Inputs]) -> float:
        """Of three stretches of EAGER_CALLS calls, the middle one."""
        begin, end = _events()
        stretches = []
        for _ in range(3):
            begin.record()
            for i in range(EAGER_CALLS):
                call(sets[i % len(sets)])
            end.record()
            end.synchronize()
            stretches.append(float(begin.elapsed_time(end)) * 1000 / EAGER_CALLS)
        return median(stretches)

    def host(self, call: Call, sets: Sequence[Inputs]) -> float:
        """The median of HOST_CALLS calls."""
        times = []
        for i in range(HOST_CALLS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call(sets[i % len(sets)])
            times.append(1e6 * (time.perf_counter() - start))
        torch.cuda.synchronize()
        return median(times)

    def extra_bytes(self, call: Call, inputs: Inputs) -> int:
        """By torch's allocator, which counts in blocks of 512 bytes."""
        call(inputs)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        values = call(inputs)
        torch.cuda.synchronize()
        returned = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in values}
        return max(0, torch.cuda.max_memory_allocated() - before - sum(returned.values()))


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    return begin, end


def rounds(
    replays: Mapping[str, Replay],
    count: int,
    seconds: float,
    warm_seconds: float = WARM_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Spread]:
    """Every replay in turn, `count` times over, fewer if `seconds` are up but at least FEWEST_ROUNDS; by name its times.

    Before, all run untimed for `warm_seconds`, so that the clocks are up.
    """
    begun = clock()
    while replays and clock() - begun < warm_seconds:
        for replay in replays.values():
            replay()
    times: dict[str, list[float]] = {name: [] for name in replays}
    begun = clock()
    for done in range(count):
        if done >= FEWEST_ROUNDS and clock() - begun > seconds:
            break
        for name, replay in replays.items():
            times[name].append(replay())
    return {name: Spread.of(values) for name, values in times.items() if values}


def measure(
    shape: Shape,
    contenders: Sequence[Contender],
    sets: Sequence[Inputs],
    meter: Meter,
    environment: Environment,
    count: int,
    seconds: float,
    *,
    brief: bool = False,
    axis: str = "",
) -> list[Row]:
    """A row for each contender at a shape; those within the bound are timed in turn. `brief` leaves out all but graph time."""
    truths: dict[str, Values] = {}
    rows: dict[str, Row] = {}
    replays: dict[str, Replay] = {}
    for contender in contenders:
        key = f"{contender.family} {contender.name}"
        rows[key] = checked(shape, contender, sets[-1], truths, len(sets), axis)
        if not rows[key].right:
            continue
        try:
            if not brief:
                rows[key] = _beside(rows[key], shape, contender, sets, meter, environment)
            replays[key] = meter.capture(contender.call, sets)
        except Exception as error:  # code of others and its compiler: what stops them must not stop the rest
            rows[key] = replace(rows[key], note=_joined(rows[key].note, described(error)))
    spreads = rounds(replays, count, seconds)
    return [figures(row.timed(spreads.get(key)), shape, environment) for key, row in rows.items()]


def checked(
    shape: Shape, contender: Contender, inputs: Inputs, truths: dict[str, Values], sets: int, axis: str = ""
) -> Row:
    """A row with the errors of one call; `truths` holds those known by function."""
    error = state_error = None
    try:
        got = contender.values(contender.call(inputs))
        if contender.function not in truths:
            truths[contender.function] = contender.truth(inputs)
        error, state_error = errors(got, truths[contender.function])
        note = contender.note()
    except Exception as failure:  # code of others and its compiler
        note = described(failure)
    row = Row(str(shape), contender.family, contender.name, error, state_error, BOUND, sets=sets, axis=axis, note=note)
    if error is not None and not row.right:
        return replace(row, note=_joined(note, "wrong: over the bound, so not timed"))
    return row


def _beside(
    row: Row, shape: Shape, contender: Contender, sets: Sequence[Inputs], meter: Meter, environment: Environment
) -> Row:
    """`row` with what is measured beside the graph's time, and the floor of ours at the rates measured here."""
    extra = meter.extra_bytes(contender.call, sets[0])
    floor = contender.floor(sets[0]) if contender.floor else None
    rates = Rates(environment.bandwidth, environment.matmul_flops)
    return replace(
        row,
        eager_us=meter.eager(contender.call, sets),
        host_us=meter.host(contender.call, sets),
        launched_bytes=None if floor is None else floor.bytes,
        floor_us=None if floor is None else 1e6 * floor.seconds(rates),
        extra_bytes=extra,
        extra_share=extra / shape.compulsory_bytes,
    )


def figures(row: Row, shape: Shape, environment: Environment) -> Row:
    """`row` with what follows from its time: bytes and operations a second, and fractions of the least time possible, by the
    compulsory traffic and by the plan's floor."""
    if row.graph_us is None:
        return row
    seconds = row.graph_us.median / 1e6
    compulsory = shape.compulsory_bytes / environment.bandwidth
    return replace(
        row,
        bandwidth=shape.compulsory_bytes / seconds,
        flops=shape.operations / seconds,
        of_compulsory=compulsory / seconds,
        of_roofline=None if row.floor_us is None else row.floor_us / row.graph_us.median,
    )


def described(error: Exception) -> str:
    """An error as one line of a table."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
