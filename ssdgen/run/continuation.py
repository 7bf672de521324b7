"""Checks of continuation: pieces of a sequence, each from the states that the one before left, are the sequence.

And so are those between that a caller keeps: a state at the end of a block of tokens is the final state of that prefix, no
later token changes it, and a call that begins with it gives the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ssdgen.ir.plan import Plan
from ssdgen.ir.report import Check, Gate
from ssdgen.plan.names import EVERY
from ssdgen.run.cases import several_tiles, sizes_for
from ssdgen.run.checks import Expected, compare
from ssdgen.run.inputs import Case, Dtype, Inputs, array_axes, draw, takes
from ssdgen.run.packing import Call, Packing, Truth, changed, drawn, own_inputs, same


def continuation_checks(gate: Gate, plan: Plan, call: Call, truth: Truth, device: str = "cpu") -> Iterator[Check]:
    """What a module has to show whose states are all that goes on from token to token; one skipped check of another one."""
    if plan.step.portable is None:
        yield Check("continued", gate, 0.0, 0.0, passed=False, skipped=True, note=plan.step.refused)
        return
    layer, chunk = plan.form.recurrence.layer, plan.config.chunk
    dtype: Dtype = "bf16" if gate != "portable" and takes(layer, "bf16") else "f32"
    length = 3 * chunk + 5
    of = _Subject(gate, plan, call, truth)
    case = Case(sizes_for(layer, length), dtype=dtype, seed=9)
    inputs = draw(layer, case, device)
    wanted = truth(inputs, case)
    for cuts in ((1,), (chunk,), (chunk - 1, 2 * chunk + 3), (0, chunk + 1, chunk + 1, length)):
        yield from compare(gate, f"pieces cut at {', '.join(map(str, cuts))}", of.pieces(inputs, cuts), wanted)
    prefixes = [truth(of.tokens(inputs, 0, stop), case) for stop in range(chunk, length, chunk)]
    for every in (chunk, 2 * chunk, 4 * chunk):
        got, kept = of.kept(inputs, {EVERY: every})
        name = f"states every {every}"
        yield from compare(gate, name, got, wanted)
        ends = prefixes[every // chunk - 1 :: every // chunk]
        yield from compare(gate, f"{name}: after a prefix", kept, of.stacked(ends, wanted))
        for i in range(length // every):
            first = (i + 1) * every
            rest = of.tokens(inputs, first, length)
            rest = replace(rest, states={s: x[:, i] for s, x in kept.items()})
            expected = {n: replace(e, value=of.narrowed(n, e.value, first, length)) for n, e in wanted.items()}
            yield from compare(gate, f"{name}: from {first} on", of.run(rest.keywords())[0], expected)
    _, before = of.kept(inputs, {EVERY: chunk})
    _, after = of.kept(changed(layer, inputs, chunk, 2 * chunk), {EVERY: chunk})
    for s in layer.states:
        early, late = (x[s.name][:, :1] for x in (before, after))
        yield same(gate, f"tokens from {chunk} on: {s.name} after {chunk}", late, early)
    wide = Case({**sizes_for(layer, 2 * chunk + 1), **several_tiles(layer)}, dtype=dtype, seed=10)
    inputs = draw(layer, wide, device)
    prefixes = [truth(of.tokens(inputs, 0, stop), wide) for stop in (chunk, 2 * chunk)]
    for every, ends in ((chunk, prefixes), (2 * chunk, prefixes[1:])):  # at the ends of segments or not
        name = f"states every {every}, several tiles"
        yield from compare(gate, name, of.kept(inputs, {EVERY: every})[1], of.stacked(ends, ends[0]))
    yield from _packed(of, device)


class _Subject:
    """Calls of a module, with what they give by name."""

    def __init__(self, gate: Gate, plan: Plan, call: Call, truth: Truth) -> None:
        self.gate, self.plan, self.call, self.truth = gate, plan, call, truth
        self.layer = plan.form.recurrence.layer
        self.states = [s.name for s in self.layer.states]
        self.names = [o.name for o in self.layer.outputs] + self.states

    def run(self, keywords: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Outputs and final states of a call, and the states between if it asks for them."""
        values = self.call(keywords)
        ends = len(self.names)
        between = zip(self.states, values[ends:], strict=True) if values[ends:] else ()
        return dict(zip(self.names, values[:ends], strict=True)), dict(between)

    def kept(self, inputs: Inputs, more: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """`run` of inputs with other arguments besides."""
        return self.run({**inputs.keywords(), **more})

    def pieces(self, inputs: Inputs, cuts: tuple[int, ...]) -> dict[str, Tensor]:
        """Outputs of pieces put together, and the states that the last one leaves."""
        length = self._length(inputs)
        found: list[dict[str, Tensor]] = []
        for first, stop in itertools.pairwise((0, *cuts, length)):
            now = self.tokens(inputs, first, stop)
            if found:
                now = replace(now, states={s: found[-1][s] for s in self.states})
            found.append(self.run(now.keywords())[0])
        joined = {n: torch.cat([f[n] for f in found], at) for n in self.names if (at := self._time(n)) is not None}
        return {**found[-1], **joined}

    def stacked(self, ends: list[dict[str, Expected]], like: dict[str, Expected]) -> dict[str, Expected]:
        """The final states of several runs, along dimension 1; of none, of the shape that those of `like` give."""
        out = {}
        for s in self.states:
            values = torch.stack([e[s].value for e in [*ends, like]], 1)
            out[s] = replace(like[s], value=values[:, : len(ends)])
        return out

    def tokens(self, inputs: Inputs, first: int, stop: int) -> Inputs:
        """The inputs of some tokens."""
        tensors = {}
        for name, x in inputs.tensors.items():
            axes = array_axes(self.layer, self.layer.tensor(name))
            at = axes.index(self.layer.time) if self.layer.time in axes else None
            tensors[name] = x if at is None else x.narrow(at, first, stop - first)
        return replace(inputs, tensors=tensors)

    def narrowed(self, name: str, value: Tensor, first: int, stop: int) -> Tensor:
        """An output of some tokens, or a state as it is."""
        at = self._time(name)
        return value if at is None else value.narrow(at, first, stop - first)

    def _time(self, name: str) -> int | None:
        layouts = dict(self.plan.config.layouts)
        axes = next((layouts.get(o.name, o.axes) for o in self.layer.outputs if o.name == name), ())
        return axes.index(self.layer.time) if axes else None

    def _length(self, inputs: Inputs) -> int:
        layer = self.layer
        name, axes = next((t.name, array_axes(layer, t)) for t in layer.inputs if t.required and layer.time in t.axes)
        return int(inputs.tensors[name].shape[axes.index(layer.time)])


def _packed(of: _Subject, device: str) -> Iterator[Check]:
    """States of packed sequences: from place start // every of a row on, and 0 where none has one."""
    chunk = of.plan.config.chunk
    edges = (0, chunk - 1, 2 * chunk - 2, 2 * chunk - 2, 4 * chunk + 1, 5 * chunk + 3)
    index = (*(0,) * (chunk - 1), *(1,) * (chunk - 1), *(0,) * (chunk + 2))
    for packing in (
        Packing("states of packed sequences", "cu_seqlens", (edges,)),
        Packing("states of an index", "seq_idx", (index, index[::-1])),
    ):
        case, inputs = drawn(of.layer, packing, device)
        try:
            _, kept = of.kept(inputs, {packing.kind: packing.argument(device), EVERY: chunk})
        except NotImplementedError as error:
            yield Check(packing.name, of.gate, 0.0, 0.0, passed=False, skipped=True, note=str(error))
            continue
        rows, length = packing.plane
        wanted: dict[str, Expected] = {}
        for part in packing.parts():
            own, count = own_inputs(of.layer, inputs, part), len(part.tokens) // chunk
            ends = [of.truth(of.tokens(own, 0, (i + 1) * chunk), case) for i in range(count)]
            for name, e in of.stacked(ends, of.truth(of.tokens(own, 0, 0), case)).items():
                shape = (rows, length // chunk, *e.value.shape[2:])
                value = wanted.setdefault(name, replace(e, value=e.value.new_zeros(shape))).value
                place = part.tokens[0] // chunk if count else 0
                value[part.row, place : place + count] = e.value[0]
        yield from compare(of.gate, packing.name, kept, wanted)
        for name, e in wanted.items():
            none = e.value.flatten(2).eq(0).all(-1)
            yield same(of.gate, f"{packing.name}: {name} of none", kept[name][none], e.value[none].to(kept[name]))
