"""Where gradients jump: where what meets in a maximum, or in an absolute value with zero, is so near that a rounding decides
which side counts. Either gradient is right there, so a check asks for neither."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ssdgen.ir.expr import ZERO, Apply, Axes, Expr, Ref, axes_of, merge_axes, walk
from ssdgen.ir.layer import Layer, Output

Pair = tuple[Output, Output]


def away_from_bends(
    layer: Layer, margin: float, outputs_of: Callable[[Layer], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """For each output that bends in what it reads of a state: whether what meets at a bend is further apart than `margin` times
    its mean size, bool, dimensions in the order of the output's axes, of length 1 for those that do not matter.

    `outputs_of` gives the outputs of a layer for the inputs in question, float64, dimensions in the order of their axes. Bends
    in inputs alone are left out: everyone has the same inputs. So are outputs of which less than half is away from its bends:
    a check that asks for nothing would pass.
    """
    pairs = {o.name: list(_meeting(layer, o)) for o in layer.outputs}
    added = tuple(side for several in pairs.values() for pair in several for side in pair)
    values = outputs_of(replace(layer, outputs=(*layer.outputs, *added))) if added else {}
    found: dict[str, Tensor] = {}
    for output in layer.outputs:
        for left, right in pairs[output.name]:
            a, b = values[left.name], values[right.name]
            apart = _as_in(output.axes, (a - b).abs() > margin * (a.abs() + b.abs()).mean(), left.axes)
            found[output.name] = found.get(output.name, torch.ones_like(apart)) & apart
    return {name: apart for name, apart in found.items() if 2 * apart.sum() >= apart.numel()}


def _meeting(layer: Layer, output: Output) -> Iterator[Pair]:
    """What meets at each bend of `output`, each side as an output of its own, of every token and head."""
    read = {*(s.name for s in layer.states), *(o.name for o in layer.outputs)}
    for n, e in enumerate(walk(output.value)):
        if isinstance(e, Apply) and any(isinstance(r, Ref) and r.name in read for r in walk(e)):
            axes = merge_axes(((layer.batch, layer.time, layer.head), axes_of(e)))
            for m, sides in enumerate(_sides(e)):
                names = (f"{output.name} bend {n} {m} {side}" for side in ("left", "right"))
                left, right = (
                    replace(output, name=name, axes=axes, value=value, gates=())
                    for name, value in zip(names, sides, strict=True)
                )
                yield left, right


def _sides(e: Apply) -> tuple[tuple[Expr, Expr], ...]:
    """Pairs of values, at whose meeting the derivative of `e` jumps."""
    match e.op, e.args:
        case (("max" | "min"), (a, b)):
            return ((a, b),)
        case "clamp", (x, low, high):
            return ((x, low), (x, high))
        case (("abs" | "relu"), (x,)):
            return ((x, ZERO),)
    return ()


def _as_in(axes: Axes, values: Tensor, given: Axes) -> Tensor:
    """`values` of the axes `given` in the order of `axes`, of length 1 where they have none: all along those not there."""
    for axis in [a for a in given if a not in axes]:
        values = values.all(given.index(axis), keepdim=True)
    kept = [a for a in axes if a in given]
    order = [*(given.index(a) for a in kept), *(n for n, a in enumerate(given) if a not in axes)]
    lengths = [values.shape[given.index(a)] if a in given else 1 for a in axes]
    return values.permute(order).reshape(lengths)
