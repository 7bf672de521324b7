"""Inputs that are timed, and the float64 results that everything timed is compared with first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType

import torch

from ssdgen.ir.layer import Layer
from ssdgen.run.bench.ours import portable_float64
from ssdgen.run.bench.shapes import Shape
from ssdgen.run.checks import relative_error
from ssdgen.run.inputs import Case, Inputs, draw

HEADS = 2
"""Heads that are compared: of the last sequence, all its tokens."""
SETS_AT_MOST = 64
L2_TIMES = 2.5


@dataclass(frozen=True, slots=True)
class Values:
    """y [t h p] and the final state [h p n] of the compared heads."""

    y: torch.Tensor
    state: torch.Tensor


def case_of(layer: Layer, shape: Shape, seed: int) -> Case:
    """What is timed: bf16, no gate and no initial state, D of one number a head (TileGym's only form) and a dt_bias.

    Steps are log-uniform between 0.001 and 0.1 and A uniform in [-16, -1]; `draw` takes softplus back.
    """
    absent = {t.name for t in layer.inputs if t.optional} | {f"{s.name}0" for s in layer.states}
    forms = {t.name: t.narrower[0] for t in layer.inputs if t.narrower}
    return Case(shape.sizes, dtype="bf16", absent=frozenset(absent), forms=forms, seed=seed)


def input_sets(layer: Layer, shape: Shape, device: str, l2_bytes: int) -> list[Inputs]:
    """So many different inputs that, used in turn, they do not stay in the L2 cache: together over 2.5 times its size."""
    first = draw(layer, case_of(layer, shape, 0), device, device)
    size = sum(x.numel() * x.element_size() for x in first.tensors.values())
    sets = min(SETS_AT_MOST, max(2, math.ceil(L2_TIMES * l2_bytes / size)))
    return [first] + [draw(layer, case_of(layer, shape, i), device, device) for i in range(1, sets)]


def compared_heads(shape: Shape) -> int:
    """How many heads are compared: those of one group, two at most."""
    return min(HEADS, shape.h // shape.g)


def of_call(shape: Shape, y: torch.Tensor, state: torch.Tensor) -> Values:
    """What is compared of a call's y [b t h p] and final state [b h p n]."""
    heads = compared_heads(shape)
    return Values(y[-1, :, :heads], state[-1, :heads])


def mamba2_truth(module: ModuleType, shape: Shape, inputs: Inputs) -> Values:
    """y and final state in float64 of the inputs of Mamba-2."""
    heads, t = compared_heads(shape), inputs.tensors
    part = {name: t[name][-1:, :, :heads] for name in ("x", "dt")} | {name: t[name][-1:, :, :1] for name in ("B", "C")}
    part |= {name: t[name][:heads] for name in ("A", "D", "dt_bias")}
    y, state = portable_float64(module, Inputs(part, inputs.params, {}))
    return Values(y[0], state[0])


def gla_truth(
    module: ModuleType, shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor
) -> Values:
    """The same of gated linear attention without a scale, for its own inputs [b t h ...]; our spec divides by sqrt(n)."""
    heads = compared_heads(shape)
    part = {name: x[-1:, :, :heads] for name, x in {"q": q, "k": k, "v": v, "g": g}.items()}
    y, state = portable_float64(module, Inputs(part, {}, {}))
    return Values(y[0] * math.sqrt(shape.n), state[0])


def errors(got: Values, want: Values) -> tuple[float, float]:
    """Relative errors of y and of the final state."""
    return relative_error(got.y, want.y), relative_error(got.state, want.state)
