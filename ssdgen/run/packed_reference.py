"""The loop over tokens of a call that packs sequences and keeps states: every sequence by itself, block by block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ssdgen.ir.expr import Axes
from ssdgen.ir.layer import Layer
from ssdgen.run.inputs import Inputs, array_axes, in_order_of_equations
from ssdgen.run.packing import Packing, own_inputs
from ssdgen.run.reference import reference

Values = dict[str, Tensor]


def packed_reference(
    layer: Layer, inputs: Inputs, packing: Packing, every: int | None = None
) -> tuple[Values, Values, Values]:
    """(outputs, final states, kept states), float64, dimensions in the order of the declared axes; differentiable.

    Outputs are 0 where no sequence is. Kept states, none unless `every` is given, are those after every whole block of so
    many tokens of a sequence, in places from its first token // every of its row on, 0 where there is none.
    """
    rows, length = packing.plane
    lengths = {**_sizes(layer, inputs), layer.batch: rows, layer.time: length}
    like = next(iter(inputs.tensors.values()))

    def blank(axes: Axes, more: Mapping[int, int]) -> Tensor:
        shape = [lengths[a] for a in axes]
        for at, size in more.items():
            shape.insert(at, size)
        return torch.zeros(shape, dtype=torch.float64, device=like.device)

    outputs = {o.name: blank(o.axes, {}) for o in layer.outputs}
    kept = {s.name: blank(s.axes, {1: length // every}) for s in layer.states} if every else {}
    finals: dict[int, Values] = {}
    for part in packing.parts():
        own = own_inputs(layer, inputs, part)
        states = dict(own.states)
        step = every or max(1, len(part.tokens))
        for block, first in enumerate(range(0, len(part.tokens), step)):
            tokens = part.tokens[first : first + step]
            now = _narrowed(layer, own, first, len(tokens))
            found, states = reference(layer, in_order_of_equations(layer, now.tensors), now.params, states)
            for o in layer.outputs:
                places = o.axes.index(layer.batch), o.axes.index(layer.time)
                plane = outputs[o.name].movedim(places, (0, 1))
                plane[part.row, list(tokens)] = found[o.name].movedim(places, (0, 1))[0]
            if len(tokens) == every:
                for name, places_of in kept.items():
                    places_of[part.row, part.tokens[0] // every + block] = states[name][0]
        finals[part.entry] = states
    ends = {s.name: torch.cat([finals[e][s.name] for e in sorted(finals)]) for s in layer.states}
    return outputs, ends, kept


def _sizes(layer: Layer, inputs: Inputs) -> dict[str, int]:
    tensors = in_order_of_equations(layer, inputs.tensors)
    axes = {t.name: next(f for f in (t.axes, *t.narrower) if len(f) == tensors[t.name].dim()) for t in layer.inputs
            if t.name in tensors}  # fmt: skip
    return {a: n for name, form in axes.items() for a, n in zip(form, tensors[name].shape, strict=True)}


def _narrowed(layer: Layer, inputs: Inputs, first: int, count: int) -> Inputs:
    """The inputs of `count` tokens."""
    tensors = {}
    for name, x in inputs.tensors.items():
        axes = array_axes(layer, layer.tensor(name))
        tensors[name] = x.narrow(axes.index(layer.time), first, count) if layer.time in axes else x
    return replace(inputs, tensors=tensors)
