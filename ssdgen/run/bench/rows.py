"""What `ssdgen bench` measures, as data, and its JSON.

A file is one `Document`, its fields by name; every row is one of the dataclasses here, its fields by name, `null` where
something was not measured. Times are microseconds, sizes bytes, shapes strings (`batch,tokens,heads,groups,p,n`).

    {"format": 1, "study": "forward" | "backward" | "ablation" | "growth" | "decode" | "training", "environment": {...},
     "flushing": "...", "rows": [Row, ...], "ratios": [Ratio, ...], "means": [Mean, ...], "scale": [Scale, ...],
     "techniques": [Technique, ...], "bends": [Bend, ...], "steps": [TrainingStep, ...], "notes": ["...", ...]}

A `forward` has rows, ratios, means and scale, a `backward` the first three; an `ablation` techniques; a `growth` rows, ratios,
scale and bends; a `decode` rows, ratios, means and scale; a `training` steps and ratios.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeVar, get_args

from ssdgen.diagnostics import UserError

FORMAT = 1
Study = Literal["forward", "backward", "ablation", "growth", "decode", "training"]
OURS, DEFAULT = "ours", "default"
"""Our family, and the name of what of it a user gets."""
LOOP, ATTENTION = "token loop", "attention"
"""What stands beside for scale."""
FAIR = 1.25
"""A ratio counts only where our error is at most this many times the peer's."""


@dataclass(frozen=True, slots=True)
class Environment:
    """Where it was measured. Bandwidth (bytes a second, of a copy) and `matmul_flops` (bf16, dense) are measured there too."""

    gpu: str
    multiprocessors: int
    l2_bytes: int
    driver: str
    cuda: str
    torch: str
    triton: str
    cuda_tile: str
    python: str
    date: str
    command: str
    bandwidth: float
    matmul_flops: float
    peers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with the tenth and the ninetieth percentile."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of at least one value."""
        ordered = sorted(values)
        last = len(ordered) - 1
        return cls(median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)])


@dataclass(frozen=True, slots=True)
class Row:
    """One implementation at one shape; without a time if it failed or its error is over the bound, and `note` says which.

    `family` is who wrote it, `name` which of theirs; `axis` in a growth study the axis that the shape lies on, in that of
    the backward pass which passes are timed. `error` and
    `state_error` are relative norms of y and of the final state against float64. `graph_us` is under CUDA graphs with the L2
    cache flushed, `eager_us` a call among many, `host_us` what a call keeps the host busy. `launched_bytes` is what our
    launches move and `floor_us` the least that they take, by the plan's roofline at the rates measured there. `extra_bytes` is
    peak memory beyond inputs and outputs.
    """

    shape: str
    family: str
    name: str
    error: float | None
    state_error: float | None
    bound: float
    graph_us: Spread | None = None
    eager_us: float | None = None
    host_us: float | None = None
    bandwidth: float | None = None
    flops: float | None = None
    of_compulsory: float | None = None
    of_roofline: float | None = None
    launched_bytes: int | None = None
    floor_us: float | None = None
    extra_bytes: int | None = None
    extra_share: float | None = None
    sets: int = 0
    axis: str = ""
    note: str = ""

    @property
    def right(self) -> bool:
        """Whether y and the final state are within the bound; a nan is not."""
        errors = (self.error, self.state_error)
        return all(e is not None and math.isfinite(e) and e <= self.bound for e in errors)

    def timed(self, spread: Spread | None) -> Row:
        """The row with its time; a wrong result gets none."""
        return replace(self, graph_us=spread) if self.right else replace(self, graph_us=None)


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as fast as the fastest of a peer's rows ours is; None, with the reason, where that does not count."""

    shape: str
    ours: str
    peer: str
    peer_name: str
    ratio: float | None
    reason: str = ""
    axis: str = ""


@dataclass(frozen=True, slots=True)
class Mean:
    """The ratios to a peer over all shapes where they count: geometric mean and the smallest, with its shape."""

    peer: str
    count: int
    shapes: int
    mean: float
    smallest: float
    smallest_shape: str
    axis: str = ""


@dataclass(frozen=True, slots=True)
class Scale:
    """What something else takes at a shape, for scale: a naive token loop, or attention of the same heads and channels."""

    shape: str
    name: str
    us: float
    note: str = ""
    axis: str = ""


@dataclass(frozen=True, slots=True)
class Technique:
    """The best configuration with one technique taken away; `worth` is its time over the best one's.

    `conflicts` are shared-memory bank conflicts of one call, all kernels together; None if they were not read.
    """

    shape: str
    technique: str
    settings: str
    error: float | None
    graph_us: Spread | None
    worth: float | None
    conflicts: int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Bend:
    """Where time grows otherwise than before: `slope` is d log(time) / d log(length) on either side of a shape on an axis."""

    axis: str
    shape: str
    before: float
    after: float
    why: str


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """A training step of a model of `layers` mixers whose scans are someone's; without times if `note` says why.

    `shape` is that of each scan. `loss` is that of the first step, `difference` how far the gradients of all parameters are
    there from those of ours, a relative norm. `scan_us` is the time of one layer's scan by itself, forward and backward.
    `peak_bytes` is memory at its peak in a step, parameters and optimizer included; `stored_bytes` what one scan keeps for
    its backward pass beyond its inputs and y.
    """

    shape: str
    layers: int
    width: int
    family: str
    name: str
    loss: float | None = None
    difference: float | None = None
    step_us: Spread | None = None
    scan_us: Spread | None = None
    peak_bytes: int | None = None
    stored_bytes: int | None = None
    note: str = ""

    @property
    def share(self) -> float | None:
        """The part of a step that its scans take."""
        if self.step_us is None or self.scan_us is None:
            return None
        return self.layers * self.scan_us.median / self.step_us.median


@dataclass(frozen=True, slots=True)
class Document:
    """The results of one run."""

    study: Study
    environment: Environment
    flushing: str
    rows: tuple[Row, ...] = ()
    ratios: tuple[Ratio, ...] = ()
    means: tuple[Mean, ...] = ()
    scale: tuple[Scale, ...] = ()
    techniques: tuple[Technique, ...] = ()
    bends: tuple[Bend, ...] = ()
    steps: tuple[TrainingStep, ...] = ()
    notes: tuple[str, ...] = ()
    format: int = FORMAT


def ratios(rows: Iterable[Row], ours: str) -> tuple[Ratio, ...]:
    """Of our row called `ours` to each peer's fastest right row, shape by shape."""
    out = []
    places: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        places.setdefault((row.axis, row.shape), []).append(row)
    for (axis, shape), here in places.items():
        mine = next((r for r in here if (r.family, r.name) == (OURS, ours)), None)
        for peer in dict.fromkeys(r.family for r in here if r.family != OURS):
            theirs = [r for r in here if r.family == peer]
            best = min(
                (r for r in theirs if r.graph_us), key=lambda r: r.graph_us.median if r.graph_us else 0, default=None
            )
            ratio, reason = _ratio(mine, best)
            out.append(Ratio(shape, ours, peer, (best or theirs[0]).name, ratio, reason, axis))
    return tuple(out)


def _ratio(ours: Row | None, peer: Row | None) -> tuple[float | None, str]:
    if ours is None or ours.graph_us is None or ours.error is None:
        return None, "ours has no time"
    if peer is None or peer.graph_us is None or peer.error is None:
        return None, "the peer has no time"
    if ours.error > FAIR * peer.error:
        return None, f"our error {ours.error:.1e} is over {FAIR} times the peer's {peer.error:.1e}"
    return peer.graph_us.median / ours.graph_us.median, ""


def means(found: Iterable[Ratio]) -> tuple[Mean, ...]:
    """One for each peer with a ratio that counts, and each axis."""
    peers: dict[tuple[str, str], list[Ratio]] = {}
    for ratio in found:
        peers.setdefault((ratio.peer, ratio.axis), []).append(ratio)
    out = []
    for (peer, axis), several in peers.items():
        counted = [(r.ratio, r.shape) for r in several if r.ratio is not None]
        if counted:
            smallest, shape = min(counted)
            mean = math.exp(math.fsum(math.log(r) for r, _ in counted) / len(counted))
            out.append(Mean(peer, len(counted), len(several), mean, smallest, shape, axis))
    return tuple(out)


def to_json(document: Document) -> str:
    """The text of a file; a number that is not finite becomes null."""
    return json.dumps(_finite(asdict(document)), indent=1)


def _finite(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {k: _finite(v) for k, v in value.items()}
        case list() | tuple():
            return [_finite(v) for v in value]
    return value


T = TypeVar("T")


def read_document(path: Path) -> Document:
    """The document in a file. UserError if there is none, or of a format this version does not know."""
    hint = "it is written by `ssdgen bench forward --out DIR`, and by `ablation`, `growth` and `decode`"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {(error.strerror or str(error)).lower()}", hint) from error
    except ValueError as error:
        raise UserError(f"{path} is no JSON: {error}", hint) from error
    if not isinstance(data, dict) or data.get("study") not in get_args(Study) or data.get("format") != FORMAT:
        raise UserError(f"{path} holds no results of `ssdgen bench` of format {FORMAT}", hint)
    try:
        return Document(
            data["study"],
            _made(Environment, data["environment"]),
            data["flushing"],
            rows=_all(Row, data["rows"]),
            ratios=_all(Ratio, data["ratios"]),
            means=_all(Mean, data["means"]),
            scale=_all(Scale, data["scale"]),
            techniques=_all(Technique, data["techniques"]),
            bends=_all(Bend, data["bends"]),
            steps=_all(TrainingStep, data.get("steps", ())),
            notes=tuple(data["notes"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} holds no whole results of `ssdgen bench`: {error}", hint) from error


def _all(kind: type[T], rows: Iterable[Mapping[str, Any]]) -> tuple[T, ...]:
    return tuple(_made(kind, row) for row in rows)


def _made(kind: type[T], data: Mapping[str, Any]) -> T:
    """An instance of a dataclass of this file from its fields by name."""
    values = {f.name: data[f.name] for f in fields(kind) if f.name in data}  # type: ignore[arg-type]
    for name in ("graph_us", "step_us", "scan_us"):
        if isinstance(values.get(name), dict):
            values[name] = Spread(**values[name])
    return kind(**values)
