"""`ssdgen bench growth`: time a token along one axis after the other, the rest as in the example shape; where it bends."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch

from ssdgen.run.bench.forward import WARM_SHARE, Effort, Progress, Subject, our_contenders, with_ratios
from ssdgen.run.bench.measure import FLUSHING, Meter, measure
from ssdgen.run.bench.others import Others
from ssdgen.run.bench.rows import DEFAULT, OURS, Bend, Document, Environment, Row, Scale
from ssdgen.run.bench.scale import scale_rows
from ssdgen.run.bench.shapes import SHAPES, Shape
from ssdgen.run.bench.truth import input_sets
from ssdgen.run.bench.warm import our_jobs, peer_jobs, warm
from ssdgen.run.bench.winners import read_winners

AXES: Mapping[str, tuple[int, ...]] = {
    "t": tuple(1 << k for k in range(10, 20)),
    "n": (16, 32, 64, 128, 256),
    "h": tuple(1 << k for k in range(8)),
    "b": tuple(1 << k for k in range(7)),
}
"""Lengths of each axis that is studied."""
BESIDE = ("t", "n")
"""Axes on which the peers are measured too: those of the published comparison."""
SECONDS = 1.5
BENDS = 0.3
"""A difference of slopes, in log time over log length, below which an axis has no bend."""


def shapes_on(axis: str, lengths: Sequence[int], base: Shape = SHAPES[0]) -> list[Shape]:
    """`base` with other lengths of one axis."""
    return [replace(base, **{axis: length}) for length in lengths]


def growth(
    subject: Subject,
    meter: Meter,
    environment: Environment,
    effort: Effort,
    winners_file: Path,
    *,
    axes: Mapping[str, Sequence[int]] = AXES,
    base: Shape = SHAPES[0],
    device: str = "cuda",
    progress: Progress = lambda done, total, what: None,
    save: Callable[[Document], None] = lambda document: None,
    clock: Callable[[], float] = time.monotonic,
) -> Document:
    """The document of a run: ours on every axis, the peers on those of BESIDE, scale along the tokens."""
    end = clock() + effort.seconds
    notes = list(subject.notes)
    points = [(axis, shape) for axis, lengths in axes.items() for shape in shapes_on(axis, lengths, base)]
    if device == "cuda":
        jobs = peer_jobs([s for axis, s in points if axis in BESIDE], subject.peers)
        jobs += our_jobs(list(dict.fromkeys(s for _, s in points)), [subject.folders[DEFAULT]], tuned=True)
        setting = subject.setting(winners_file, environment.gpu, again=False)
        seconds = WARM_SHARE * effort.seconds
        notes += warm(jobs, setting, effort.workers, seconds, lambda i, w: progress(i, len(jobs), w))
    others = Others(subject.modules(), read_winners(winners_file, environment.gpu))
    ours_alone = replace(subject, folders={DEFAULT: subject.folders[DEFAULT]})
    document = Document("growth", environment, FLUSHING)
    rows: list[Row] = []
    beside: list[Scale] = []
    for number, (axis, shape) in enumerate(points):
        progress(number, len(points), f"{axis} {shape}")
        if clock() > end:
            notes.append(f"{axis} at {shape} is not measured: the time was up")
            continue
        contenders = our_contenders(shape, ours_alone)
        contenders += others.contenders(shape, subject.peers) if axis in BESIDE else []
        sets = input_sets(subject.mamba2.recurrence.layer, shape, device, environment.l2_bytes)
        rows += measure(shape, contenders, sets, meter, environment, effort.rounds, SECONDS, brief=True, axis=axis)
        beside += scale_rows(shape, meter, device, axis) if axis == "t" else []
        document = with_ratios(replace(document, rows=tuple(rows), scale=tuple(beside)))
        document = replace(document, bends=bends(rows, axes), notes=tuple(notes))
        save(document)
        del contenders, sets
        if device == "cuda":
            torch.cuda.empty_cache()
    return replace(document, notes=tuple(dict.fromkeys(notes)))


def length_on(axis: str, shape: str) -> int:
    """The length of an axis in a shape's text."""
    return int(shape.split(",")["bthgpn".index(axis)])


def bends(rows: Sequence[Row], axes: Mapping[str, Sequence[int]]) -> tuple[Bend, ...]:
    """Where our time's slope passes the middle between its least and its greatest on an axis, if these differ by BENDS."""
    out = []
    for axis in axes:
        timed = [
            (length_on(axis, row.shape), row.graph_us.median, row)
            for row in rows
            if row.axis == axis and row.family == OURS and row.graph_us is not None
        ]
        timed.sort(key=lambda point: point[0])
        slopes = [math.log(c[1] / a[1]) / math.log(c[0] / a[0]) for a, c in pairwise(timed)]
        if not slopes or max(slopes) - min(slopes) < BENDS:
            continue
        middle = (max(slopes) + min(slopes)) / 2
        for (_, _, row), before, after in zip(timed[1:], slopes, slopes[1:], strict=False):
            if (before < middle) != (after < middle):
                out.append(Bend(axis, row.shape, before, after, why(before, after, timed[0][2], row, timed[-1][2])))
    return tuple(out)


def why(before: float, after: float, first: Row, here: Row, last: Row) -> str:
    """What the numbers say of a bend: how near the least traffic's time is at the first length, here and at the last."""
    shares = [f"{row.of_compulsory:.0%}" if row.of_compulsory is not None else "?" for row in (first, here, last)]
    grows = f"slope {before:.2f} before, {after:.2f} after"
    if after > before:
        reason = "before it more work fits in the same time (the GPU is not full)"
    else:
        reason = "after it more work fits in the same time"
    return (
        f"{reason}; {grows}; fraction of the compulsory traffic {', '.join(shares)} at the first length, here, the last"
    )
