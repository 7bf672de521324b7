"""Checks of packed sequences: each equals its own run, bit for bit, and no token changes what came before it.

Which tokens make a sequence is worked out here by plain loops over python numbers, apart from the emitted support code.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from ssdgen.ir.expr import Axes
from ssdgen.ir.layer import Layer
from ssdgen.ir.plan import Plan
from ssdgen.ir.report import Check, Gate
from ssdgen.run.cases import sizes_for
from ssdgen.run.checks import Expected, compare
from ssdgen.run.inputs import Case, Inputs, array_axes, draw

Kind = Literal["cu_seqlens", "seq_idx", "mask"]
Call = Callable[[Mapping[str, Any]], tuple[torch.Tensor, ...]]
"""One call of `forward` with keywords, wherever a gate runs it."""

Truth = Callable[[Inputs, Case], dict[str, Expected]]
"""What one call without packing has to give."""


@dataclass(frozen=True, slots=True)
class Part:
    """A sequence: its tokens in a row, the entry of states that is its own, and whether the initial one enters it."""

    row: int
    tokens: tuple[int, ...]
    entry: int
    enters: bool = True


@dataclass(frozen=True, slots=True)
class Packing:
    """One way to cut the tokens of a call: the argument `kind`, and its values row by row (`cu_seqlens` is one row)."""

    name: str
    kind: Kind
    values: tuple[tuple[int, ...], ...]
    narrow: bool = field(default=True)

    @property
    def plane(self) -> tuple[int, int]:
        """Rows and tokens of the inputs."""
        return (1, self.values[0][-1]) if self.kind == "cu_seqlens" else (len(self.values), len(self.values[0]))

    @property
    def entries(self) -> int:
        """Entries of the states."""
        return len(self.values[0]) - 1 if self.kind == "cu_seqlens" else len(self.values)

    def argument(self, device: torch.device | str) -> torch.Tensor:
        """The tensor that a caller passes."""
        dtype = torch.bool if self.kind == "mask" else torch.int32 if self.narrow else torch.int64
        values = torch.tensor(self.values, dtype=dtype, device=device)
        return values[0] if self.kind == "cu_seqlens" else values

    def parts(self) -> list[Part]:
        """Every sequence, in the order of rows and tokens."""
        if self.kind == "cu_seqlens":
            (edges,) = self.values
            return [Part(0, tuple(range(a, b)), i) for i, (a, b) in enumerate(itertools.pairwise(edges))]
        if self.kind == "mask":
            return [Part(r, tuple(t for t, on in enumerate(row) if on), r) for r, row in enumerate(self.values)]
        parts = []
        for r, row in enumerate(self.values):
            begins = [t for t in range(len(row)) if t == 0 or row[t] != row[t - 1]]
            for a, b in zip(begins, [*begins[1:], len(row)], strict=True):
                parts.append(Part(r, tuple(range(a, b)), r, enters=a == 0))
        return parts


def packings(chunk: int) -> Iterator[Packing]:
    """Sequences of every length around a chunk, empty ones, and every way to mask a row."""

    def edges(*lengths: int) -> tuple[tuple[int, ...]]:
        return (tuple(sum(lengths[:i]) for i in range(len(lengths) + 1)),)

    def runs(*lengths: int) -> tuple[int, ...]:
        """0 ... 1 ... 0 ...: so many of each."""
        return tuple(i % 2 for i, n in enumerate(lengths) for _ in range(n))

    several = edges(0, 1, 5, 0, chunk - 1, chunk, chunk + 1, 3 * chunk + 8)
    yield Packing("sequences of 0, 1, ... tokens", "cu_seqlens", several)
    yield Packing("sequences that end empty", "cu_seqlens", edges(chunk + 3, 2, 0, 0), narrow=False)
    yield Packing("one sequence", "cu_seqlens", edges(chunk + 6))
    yield Packing("no tokens", "cu_seqlens", edges(0, 0))
    t = chunk + 9
    yield Packing("an index", "seq_idx", (runs(3, t - 3), runs(t), (7,) * chunk + (-1, 5, 5, 7, 7, 7, 2, 2, 9)))
    yield Packing("an index that never changes", "seq_idx", (runs(t), (4,) * t), narrow=False)
    yield Packing("padding", "mask", (runs(5, t - 5), runs(0, t - 7, 7), runs(t), runs(0, t), runs(chunk, 1, 8)))
    holes = tuple(int(i % 3 != 1) for i in range(t))
    yield Packing("holes", "mask", (holes, runs(2, chunk + 1, 4, 1, 1), runs(t), runs(0, t)))
    yield Packing("nothing masked", "mask", (runs(0, t), runs(0, t)))
    yield Packing("everything masked", "mask", (runs(t), runs(t)))


def packed_checks(
    gate: Gate, plan: Plan, call: Call, uncut: Call, truth: Truth, device: str = "cpu"
) -> Iterator[Check]:
    """What a module that takes packed sequences has to show; one skipped check of one that does not yet.

    `uncut` is `call` with every sequence in one segment: then one of a pack is computed, bit for bit, as it is alone.
    """
    layer, chunk = plan.form.recurrence.layer, plan.config.chunk
    try:
        for packing in packings(chunk):
            yield from _checks(gate, plan, call, uncut, truth, packing, device)
        yield from causality_checks(gate, plan, call, device)
    except NotImplementedError as error:
        yield Check(f"{layer.name} packed", gate, 0.0, 0.0, passed=False, skipped=True, note=str(error))


def _checks(
    gate: Gate, plan: Plan, call: Call, uncut: Call, truth: Truth, packing: Packing, device: str
) -> Iterator[Check]:
    layer = plan.form.recurrence.layer
    case, inputs = drawn(layer, packing, device)
    keywords = {**inputs.keywords(), packing.kind: packing.argument(device)}
    try:
        values = call(keywords)
    except NotImplementedError:
        raise
    except (ValueError, TypeError, RuntimeError) as error:
        note = " ".join(f"{type(error).__name__}: {error}".split())
        yield Check(packing.name, gate, math.inf, 0.0, passed=False, note=note)
        return
    names = [o.name for o in layer.outputs] + [s.name for s in layer.states]
    got = dict(zip(names, values, strict=True))
    runs = [(part, own_inputs(layer, inputs, part)) for part in packing.parts()]
    expected = [(part, truth(own, case)) for part, own in runs]
    wanted = {}
    for name in names:
        value = _together(plan, packing, name, [(part, e[name].value) for part, e in expected])
        wanted[name] = replace(expected[0][1][name], value=value)
    yield from compare(gate, packing.name, got, wanted)
    whole = dict(zip(names, uncut(keywords), strict=True))
    own = [(part, dict(zip(names, uncut(run.keywords()), strict=True))) for part, run in runs]
    for name in names:
        alone = _together(plan, packing, name, [(part, v[name]) for part, v in own])
        yield same(gate, f"{packing.name}: {name} as each alone", whole[name], alone)


def same(gate: Gate, name: str, got: torch.Tensor, want: torch.Tensor) -> Check:
    """Whether two tensors are equal bit for bit."""
    same = got.shape == want.shape and torch.equal(got, want)
    note = "" if same else f"{int((got != want).sum()) if got.shape == want.shape else 'all'} elements differ"
    return Check(name, gate, 0.0 if same else math.inf, 0.0, passed=same, note=note)


def drawn(layer: Layer, packing: Packing, device: str) -> tuple[Case, Inputs]:
    """Inputs of the packing's size; tokens that belong to no sequence are NaN in every floating input."""
    rows, length = packing.plane
    sizes = {**sizes_for(layer, length), layer.batch: rows, layer.head: 2} | {g.axis: 1 for g in layer.groups}
    case = Case(sizes, seed=7)
    inputs = draw(layer, case, device)
    generator = torch.Generator().manual_seed(8)
    for s in layer.states:
        shape = [packing.entries if a == layer.batch else sizes[a] for a in s.axes]
        inputs.states[s.name] = torch.randn(shape, generator=generator).to(device)
    if packing.kind == "mask":
        hidden = ~packing.argument(device)
        for name, x in inputs.tensors.items():
            axes = array_axes(layer, layer.tensor(name))
            if layer.batch in axes and layer.time in axes:
                x.movedim((axes.index(layer.batch), axes.index(layer.time)), (0, 1))[hidden] = math.nan
    return case, inputs


def own_inputs(layer: Layer, inputs: Inputs, part: Part) -> Inputs:
    """The inputs of one sequence as a call of its own, in memory of its own."""
    tensors = {}
    for name, x in inputs.tensors.items():
        axes = array_axes(layer, layer.tensor(name))
        if layer.batch in axes:
            x = _select(x, axes, layer.batch, [part.row])
        if layer.time in axes:
            x = _select(x, axes, layer.time, part.tokens)
        tensors[name] = x
    states = {}
    for s in layer.states:
        state = _select(inputs.states[s.name], s.axes, layer.batch, [part.entry])
        states[s.name] = state if part.enters else torch.zeros_like(state)
    return replace(inputs, tensors=tensors, states=states)


def _select(x: torch.Tensor, axes: Axes, axis: str, places: tuple[int, ...] | list[int]) -> torch.Tensor:
    return x.index_select(axes.index(axis), torch.tensor(places, dtype=torch.int64, device=x.device))


def _together(plan: Plan, packing: Packing, name: str, pieces: list[tuple[Part, torch.Tensor]]) -> torch.Tensor:
    """What a packed call gives of the output or state `name`, from what each sequence gives alone."""
    layer = plan.form.recurrence.layer
    like = pieces[0][1]
    axes = next((s.axes for s in layer.states if s.name == name), None)
    if axes is not None:
        at = axes.index(layer.batch)
        last = {part.entry: value for part, value in pieces}
        return torch.cat([last[entry] for entry in range(packing.entries)], at)
    axes = next(o.axes for o in layer.outputs if o.name == name)
    axes = dict(plan.config.layouts).get(name, axes)
    lengths = dict(zip((layer.batch, layer.time), packing.plane, strict=True))
    out = like.new_zeros([lengths.get(a, n) for a, n in zip(axes, like.shape, strict=True)])
    places = axes.index(layer.batch), axes.index(layer.time)
    plane = out.movedim(places, (0, 1))
    for part, value in pieces:
        plane[part.row, list(part.tokens)] = value.movedim(places, (0, 1))[0]
    return out


def causality_checks(gate: Gate, plan: Plan, call: Call, device: str = "cpu") -> Iterator[Check]:
    """What changes from token t on changes no output before t: within a chunk by other and large values, from the next
    chunk on, and in another sequence, also by NaN where the declared range allows it.
    """
    layer, chunk = plan.form.recurrence.layer, plan.config.chunk
    whole = Packing("one", "cu_seqlens", ((0, 2 * chunk + 5),))
    for first in (1, chunk, chunk + 7):
        inputs = drawn(layer, whole, device)[1]
        before = call(inputs.keywords())
        after = call(changed(layer, inputs, first, -(-first // chunk) * chunk).keywords())
        for o, one, other in zip(layer.outputs, before, after, strict=False):
            at = dict(plan.config.layouts).get(o.name, o.axes).index(layer.time)
            early, late = (v.narrow(at, 0, first) for v in (one, other))
            yield same(gate, f"tokens from {first} on: {o.name} before", late, early)
    packed = Packing("two", "cu_seqlens", ((0, chunk + 3, 2 * chunk + 5),))
    inputs = drawn(layer, packed, device)[1]
    cut: dict[str, Any] = {packed.kind: packed.argument(device)}
    before = call({**inputs.keywords(), **cut})
    after = call({**changed(layer, inputs, chunk + 3, chunk + 3).keywords(), **cut})
    for i, o in enumerate(layer.outputs):
        at = dict(plan.config.layouts).get(o.name, o.axes).index(layer.time)
        early, late = (v[i].narrow(at, 0, chunk + 3) for v in (before, after))
        yield same(gate, f"another sequence: {o.name}", late, early)
    for i, s in enumerate(layer.states, len(layer.outputs)):
        early, late = (v[i].narrow(s.axes.index(layer.batch), 0, 1) for v in (before, after))
        yield same(gate, f"another sequence: {s.name}", late, early)


def changed(layer: Layer, inputs: Inputs, first: int, invalid: int) -> Inputs:
    """`inputs` with other values from token `first` on, and NaN from token `invalid` on where a range allows it."""
    tensors = {}
    for name, x in inputs.tensors.items():
        tensor = layer.tensor(name)
        axes = array_axes(layer, tensor)
        if layer.time not in axes:
            tensors[name] = x
            continue
        at = axes.index(layer.time)
        x = x.clone()
        late = x.narrow(at, first, x.shape[at] - first)
        late.copy_(late.flip(at))
        if math.isinf(tensor.range.low) and math.isinf(tensor.range.high):
            late.mul_(1000)
            x.narrow(at, min(invalid, x.shape[at]), x.shape[at] - min(invalid, x.shape[at])).fill_(math.nan)
        tensors[name] = x
    return replace(inputs, tensors=tensors)
