"""What the pictures show: series of points out of a document's rows, with no drawing in it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import mode

from ssdgen.run.bench.rows import DEFAULT, OURS, Document, Row
from ssdgen.run.bench.shapes import Shape, read_shape

AXES = "bthgpn"
FEWEST = 2


@dataclass(frozen=True, slots=True)
class Curve:
    """Points (length, value) in the order of their lengths, and whose they are."""

    name: str
    points: tuple[tuple[int, float], ...]


def fastest(rows: Iterable[Row]) -> dict[str, Row]:
    """By family the fastest timed row, of ours the default."""
    out: dict[str, Row] = {}
    for row in rows:
        if row.graph_us is None or (row.family == OURS and row.name != DEFAULT):
            continue
        best = out.get(row.family)
        if best is None or best.graph_us is None or row.graph_us.median < best.graph_us.median:
            out[row.family] = row
    return out


def at_shapes(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by shape, in the order in which they come."""
    out: dict[str, list[Row]] = {}
    for row in rows:
        out.setdefault(row.shape, []).append(row)
    return out


def along(document: Document, axis: str) -> list[str]:
    """The shapes that differ along `axis` alone, in its order: of a growth study those on it, else the most there are."""
    if document.study == "growth":
        shapes = dict.fromkeys(row.shape for row in document.rows if row.axis == axis)
        return sorted(shapes, key=lambda text: length(text, axis))
    groups: dict[tuple[int, ...], list[str]] = {}
    for shape in dict.fromkeys(row.shape for row in document.rows):
        rest = tuple(n for a, n in zip(AXES, numbers(shape), strict=True) if a != axis)
        groups.setdefault(rest, []).append(shape)
    best = max(groups.values(), key=len, default=[])
    return sorted(best, key=lambda text: length(text, axis)) if len(best) >= FEWEST else []


def rows_at(document: Document, axis: str, shape: str) -> dict[str, Row]:
    """By family the fastest row at a shape on an axis."""
    wanted = axis if document.study == "growth" else ""
    return fastest(row for row in document.rows if row.shape == shape and row.axis == wanted)


def ratio_curves(document: Document, axis: str, over: str) -> list[Curve]:
    """How many times as fast as `over` each other family is, along an axis. For ours only where the ratio counts."""
    counted = {(r.axis, r.shape) for r in document.ratios if r.peer == over and r.ratio is not None}
    wanted = axis if document.study == "growth" else ""
    points: dict[str, list[tuple[int, float]]] = {}
    for shape in along(document, axis):
        here = rows_at(document, axis, shape)
        base = here.get(over)
        for family, row in here.items():
            if base is None or base.graph_us is None or row.graph_us is None or family == over:
                continue
            if family == OURS and (wanted, shape) not in counted:
                continue
            points.setdefault(family, []).append((length(shape, axis), base.graph_us.median / row.graph_us.median))
    return [Curve(name, tuple(p)) for name, p in points.items()]


def time_curves(document: Document, axis: str, *, scale: bool) -> list[Curve]:
    """Nanoseconds a token of each family along an axis, and with `scale` those of what stands beside for scale."""
    points: dict[str, list[tuple[int, float]]] = {}
    for shape in along(document, axis):
        tokens = read_shape(shape).tokens
        for family, row in rows_at(document, axis, shape).items():
            if row.graph_us is not None:
                points.setdefault(family, []).append((length(shape, axis), 1000 * row.graph_us.median / tokens))
        for other in document.scale if scale else ():
            if other.shape == shape:
                points.setdefault(other.name, []).append((length(shape, axis), 1000 * other.us / tokens))
    return [Curve(name, tuple(dict(p).items())) for name, p in points.items()]


def floor_curve(document: Document, axis: str) -> Curve:
    """Nanoseconds a token of the compulsory traffic along an axis."""
    shapes = [(shape, read_shape(shape)) for shape in along(document, axis)]
    bandwidth = document.environment.bandwidth
    points = [(length(text, axis), 1e9 * s.compulsory_bytes / bandwidth / s.tokens) for text, s in shapes]
    return Curve("compulsory traffic", tuple(points))


def usual_shape(document: Document) -> Shape:
    """The shape whose lengths most rows have: the one that a growth study varies."""
    found = [numbers(row.shape) for row in document.rows]
    return Shape(*(mode(column) for column in zip(*found, strict=True)))


def length(shape: str, axis: str) -> int:
    """The length of an axis in a shape's text."""
    return numbers(shape)[AXES.index(axis)]


def numbers(shape: str) -> tuple[int, ...]:
    """The numbers of a shape's text."""
    s: Shape = read_shape(shape)
    return s.b, s.t, s.h, s.g, s.p, s.n
