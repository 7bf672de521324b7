"""The calls that verification makes of a module: what to pass, and with which configuration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ssdgen.ir.layer import Layer
from ssdgen.ir.plan import Plan
from ssdgen.ir.schedule import PRECISIONS
from ssdgen.run.inputs import Case, Dtype, Memory, may_be_zero, takes


@dataclass(frozen=True, slots=True)
class Trial:
    """One call: inputs, and the fields of the module's Config that differ from their defaults."""

    name: str
    case: Case
    config: Mapping[str, int | str] = field(default_factory=dict)


def sizes_for(layer: Layer, tokens: int, given: Mapping[str, int] | None = None) -> dict[str, int]:
    """Small, awkward lengths: two sequences, four heads in two groups, channel axes of 40, 24, 20 (no power of two)."""
    sizes = {layer.batch: 2, layer.time: tokens, layer.head: 4} | {g.axis: 2 for g in layer.groups}
    channels = iter((40, 24, 20, 12, 9, 7))
    for axis in layer.axes:
        if axis.name not in sizes:
            sizes[axis.name] = next(channels, 5)
    return sizes | {k: v for k, v in (given or {}).items() if k != layer.time}


def portable_trials(plan: Plan, given: Mapping[str, int] | None = None) -> Iterator[Trial]:
    """Every length around a chunk in float32 and float64, every term on its own, every way to leave inputs out."""
    layer, chunk = plan.form.recurrence.layer, plan.config.chunk
    base = Case(sizes_for(layer, chunk + 3, given))
    wide: tuple[Dtype, ...] = ("f32", "f64")
    for dtype in wide:
        for tokens in _lengths(layer, (0, 1, chunk - 1, chunk, chunk + 1, 3 * chunk + 5), given):
            yield Trial(f"{dtype} T={tokens}", resized(base, {layer.time: tokens}, dtype))
    for name in _can_be_zero(layer):
        yield Trial(f"f64 {name}=0", replace(base, dtype="f64", zero=frozenset({name}), seed=1))
    yield from left_out(layer, replace(base, dtype="f64", seed=2))
    narrow: tuple[Dtype, ...] = ("bf16", "f16")
    for dtype in narrow:
        if takes(layer, dtype):
            yield Trial(f"{dtype} T={chunk + 3}", replace(base, dtype=dtype, seed=3))
    yield from memories(replace(base, seed=4))


def kernel_trials(plan: Plan, given: Mapping[str, int] | None = None) -> Iterator[Trial]:
    """Every kernel at every input dtype and precision: ragged tails, padded sizes, groups, each term on its own."""
    layer, chunk = plan.form.recurrence.layer, plan.config.chunk
    base = Case(sizes_for(layer, 2 * chunk + 5, given))
    every: tuple[Dtype, ...] = ("bf16", "f16", "f32")
    dtypes = [d for d in every if takes(layer, d)]
    products = [k.name for k in plan.knobs if k.kind == "precision"]
    for dtype in dtypes:
        for tokens in _lengths(layer, (1, chunk, 2 * chunk + 5), given):
            yield Trial(f"{dtype} T={tokens}", resized(base, {layer.time: tokens}, dtype))
        if dtype != "f32":
            yield Trial(f"{dtype} in every input", replace(base, dtype=dtype, uniform=True, seed=1))
        for precision in PRECISIONS:
            config = dict.fromkeys(products, precision)
            yield Trial(f"{dtype} all {precision}", replace(base, dtype=dtype, seed=1), config)
    exact = dict.fromkeys(products, "tf32x3")
    accurate = replace(base, dtype=dtypes[-1], seed=2)
    for product in products:
        yield Trial(f"{dtypes[0]} {product} alone bf16", replace(base, dtype=dtypes[0]), {**exact, product: "bf16"})
    for knob, value in _other_ways(plan):
        yield Trial(f"{knob}={value}", accurate, {**exact, knob: value})
        yield Trial(f"{dtypes[0]} {knob}={value}", replace(base, dtype=dtypes[0], seed=2), {knob: value})
    yield Trial("T=0", resized(accurate, {layer.time: 0}), exact)
    for name in _can_be_zero(layer):
        yield Trial(f"{name}=0", replace(accurate, zero=frozenset({name})), exact)
    for trial in left_out(layer, accurate):
        yield replace(trial, config=exact)
    for trial in memories(accurate):
        yield replace(trial, config=exact)
    channels = channels_of(layer)
    yield Trial("every channel axis 1", resized(accurate, dict.fromkeys(channels, 1)), exact)
    yield Trial("several tiles", resized(accurate, several_tiles(layer)), exact)
    odd = {layer.head: 3} | {g.axis: 1 for g in layer.groups}
    yield Trial("three heads, one group", resized(accurate, odd), exact)
    single = {layer.batch: 1, layer.head: 1} | {g.axis: 1 for g in layer.groups}
    yield Trial("one sequence, one head", resized(accurate, single), exact)


def several_tiles(layer: Layer) -> dict[str, int]:
    """One sequence, whose channel axes are longer than a tile, and no multiple of one."""
    return {layer.batch: 1} | {a: 136 - 64 * i for i, a in enumerate(channels_of(layer)[:2])}


def channels_of(layer: Layer) -> list[str]:
    """The axes of channels: all but batch, time, heads and groups, in the order they are declared in."""
    outer = {layer.batch, layer.time, layer.head, *(g.axis for g in layer.groups)}
    return [a.name for a in layer.axes if a.name not in outer]


def resized(case: Case, sizes: Mapping[str, int], dtype: Dtype | None = None) -> Case:
    """`case` with other lengths of some axes, and perhaps another dtype."""
    return replace(case, dtype=dtype or case.dtype, sizes={**case.sizes, **sizes})


def _lengths(layer: Layer, lengths: tuple[int, ...], given: Mapping[str, int] | None) -> list[int]:
    more = [given[layer.time]] if given and layer.time in given else []
    return sorted({*lengths, *more})


def _can_be_zero(layer: Layer) -> list[str]:
    """Inputs and initial states that may be zero: with one of them zero the other terms stand alone."""
    return [t.name for t in layer.inputs if may_be_zero(t.range)] + [f"{s.name}0" for s in layer.states]


def can_be_absent(layer: Layer) -> list[str]:
    """Inputs and initial states that a caller may leave out."""
    return [t.name for t in layer.inputs if not t.required] + [f"{s.name}0" for s in layer.states]


def _other_ways(plan: Plan) -> Iterator[tuple[str, int]]:
    """Fields of the Config that send a call this small through other kernels, or other parts of them, than it takes itself."""
    names = {k.name for k in plan.knobs}
    ways = (("share_scores_from", 1), ("segments", 3))
    yield from (way for way in ways if way[0] in names)


def left_out(layer: Layer, case: Case) -> Iterator[Trial]:
    """Every input and initial state left out, all of them, every narrower form, and other scalars."""
    names = can_be_absent(layer)
    for name in names:
        yield Trial(f"no {name}", replace(case, absent=frozenset({name})))
    if len(names) > 1:
        yield Trial(f"no {', '.join(names)}", replace(case, absent=frozenset(names)))
    for tensor in layer.inputs:
        for form in tensor.narrower:
            yield Trial(f"{tensor.name}[{' '.join(form)}]", replace(case, forms={tensor.name: form}))
    if layer.params:
        yield Trial("other scalars", replace(case, params=other_params(layer)))


def other_params(layer: Layer) -> dict[str, float]:
    """A value for each run-time scalar that is not its default: 0.01 for 0, 0.05 for inf, half as much again else."""
    values = {0.0: 0.01, math.inf: 0.05}
    return {p.name: values.get(p.default, 1.5 * p.default) for p in layer.params}


def memories(case: Case) -> Iterator[Trial]:
    """The same values in awkward memory."""
    kinds: tuple[Memory, ...] = ("slices", "transposed", "expanded", "surrounded")
    for memory in kinds:
        yield Trial(f"{memory} memory", replace(case, memory=memory))


def combinations(layer: Layer) -> Iterator[frozenset[str]]:
    """Every set of inputs and initial states that may be absent together."""
    names = can_be_absent(layer)
    for bits in range(2 ** len(names)):
        yield frozenset(n for i, n in enumerate(names) if bits >> i & 1)
