"""Checks of gradients: what autograd gives of a module's `forward`, against autograd through the float64 loop over tokens.

The loss weighs every output and final state, or one kind of them, with random numbers; gradients are of every input and
initial state that is present.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ssdgen.ir.layer import Layer
from ssdgen.ir.plan import Plan
from ssdgen.ir.report import Check, Gate
from ssdgen.plan.names import EVERY
from ssdgen.run.bends import away_from_bends
from ssdgen.run.cases import can_be_absent, sizes_for
from ssdgen.run.checks import BOUNDS, Expected, bound, compare
from ssdgen.run.emulate import EmulationError
from ssdgen.run.inputs import DTYPES, Case, Inputs, array_axes, draw, in_order_of_equations, takes
from ssdgen.run.packed_reference import packed_reference
from ssdgen.run.packing import Packing, drawn, same
from ssdgen.run.reference import reference
from ssdgen.run.steps import Within

BLOCKS = 17
"""Chunks of the longest trial: one more than the portable form takes at a time where kernels run without those of gradients."""

CHUNKS = 4
"""The same where those are: enough for states to go on from chunk to chunk."""

SEGMENTED = 32
"""The same where a walk is cut into segments, whose first states are kept."""

FLOAT32 = 1e-4
"""The bound of a gradient that float32 computes: where steps and decays are summed over all tokens, terms cancel."""

ROUNDING = {"bf16": 2**-9, "bf16x2": 2**-12, "tf32": 2**-12, "tf32x3": 2**-24}
"""By how much rounding an operand of a product moves it, relatively, at most."""

MOVED = 8.0
"""A gradient that is a sum over tokens is small where they cancel, and what rounding does to its terms is not: it may be off by
so many times what it moves by if the operands that a caller passes are off by a rounding. On the way to it there are some ten
more, whose sum is three times one, and luck where terms are few. By as much what an output reads may be off."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A call that is differentiated: `reached` says at which results gradients arrive, at states that are kept `every` so
    many tokens too."""

    name: str
    case: Case
    reached: str = "outputs and states"
    packing: Packing | None = None
    every: int | None = None


def gradient_checks(
    gate: Gate, plan: Plan, forward: Callable[..., Any], within: Within, device: str = "cpu"
) -> Iterator[Check]:
    """The checks of every trial, one a gradient."""
    for trial in trials(gate, plan):
        layer = plan.form.recurrence.layer
        inputs = draw(layer, trial.case, device) if trial.packing is None else drawn(layer, trial.packing, device)[1]
        smooth = _smooth(plan, inputs, trial, gate)
        wanted = truth(plan, inputs, trial, gate, smooth)
        try:
            got = within(partial(differentiated, plan, inputs, trial, forward, smooth))
        except (EmulationError, ValueError, TypeError, RuntimeError) as error:
            note = " ".join(f"{type(error).__name__}: {error}".split())
            yield Check(trial.name, gate, math.inf, 0.0, passed=False, note=note)
            continue
        yield from compare(gate, trial.name, got, wanted)
        if trial.packing is not None and trial.packing.kind == "mask":
            yield from _hidden(gate, layer, trial, got)


def _hidden(gate: Gate, layer: Layer, trial: Trial, got: Mapping[str, Tensor]) -> Iterator[Check]:
    """That the gradients of masked tokens, which hold NaN, are exactly 0."""
    assert trial.packing is not None
    for tensor in layer.inputs:
        axes = array_axes(layer, tensor)
        if tensor.name in got and {layer.batch, layer.time} <= set(axes):
            x = got[tensor.name]
            hidden = ~trial.packing.argument(x.device)
            tokens = x.movedim((axes.index(layer.batch), axes.index(layer.time)), (0, 1))[hidden]
            yield same(gate, f"{trial.name}: {tensor.name} of hidden tokens", tokens, torch.zeros_like(tokens))


def trials(gate: Gate, plan: Plan) -> Iterator[Trial]:
    """Lengths from none to several blocks, dtypes, absent inputs, and where gradients arrive."""
    layer, chunk = plan.form.recurrence.layer, plan.config.chunk
    short = Case(sizes_for(layer, chunk + 9), dtype="f32", seed=21)
    yield Trial("gradients", short)
    yield Trial("gradients from outputs", short, "outputs")
    yield Trial("gradients from states", short, "states")
    for tokens in (0, 1):
        yield Trial(f"gradients T={tokens}", Case(sizes_for(layer, tokens), dtype="f32", seed=22))
    absent = frozenset(can_be_absent(layer)) | {f"{s.name}0" for s in layer.states}
    yield Trial("gradients, all absent", Case(short.sizes, dtype="f32", absent=absent, seed=23))
    if gate != "portable":
        kernels = plan.gradients is not None and not plan.gradients.refused
        tokens = (CHUNKS if kernels else BLOCKS) * chunk + 3
        yield Trial("gradients, several blocks", Case(sizes_for(layer, tokens), dtype="f32", seed=24))
    if gate == "hardware":
        yield Trial("gradients, several segments", Case(sizes_for(layer, SEGMENTED * chunk + 3), dtype="f32", seed=26))
    if takes(layer, "bf16"):
        yield Trial("gradients bf16", Case(short.sizes, dtype="bf16", seed=25))
    keeps = plan.step.portable is not None  # states are all that goes on from token to token
    yield from packed_trials(chunk, chunk if keeps else None)


def packed_trials(chunk: int, every: int | None) -> Iterator[Trial]:
    """Sequences of a chunk and a few tokens, states kept `every` so many; rows that a mask cuts off, and with holes."""
    t = chunk + 6
    edges = (0, 3, 3, t - 1, 2 * t)
    runs = ((0,) * 5 + (1,) * (t - 5), (0,) * t)
    cut = ((0,) * 4 + (1,) * (t - 4), (1,) * 9 + (0,) * (t - 9))
    holes = (tuple(int(i % 3 != 1) for i in range(t)), (0,) * t)
    packings = {
        "sequences": Packing("", "cu_seqlens", (edges,)),
        "an index": Packing("", "seq_idx", runs),
        "an index that never changes": Packing("", "seq_idx", ((0,) * (2 * chunk + 3),) * 2),
        "padding": Packing("", "mask", cut),
        "holes": Packing("", "mask", holes),
    }
    for name, packing in packings.items():
        kept = None if packing.kind == "mask" else every
        yield Trial(f"gradients of {name}", Case({}, dtype="f32"), packing=packing, every=kept)


def _smooth(plan: Plan, inputs: Inputs, trial: Trial, gate: Gate) -> Mapping[str, Tensor]:
    """Where outputs that bend are further from that than what kernels compute may be off."""
    margin = MOVED * max([FLOAT32, *(ROUNDING[p] for p in _precisions(plan, trial, gate))])
    given = {**inputs.tensors, **_initials(inputs)}
    with torch.no_grad():
        return away_from_bends(
            plan.form.recurrence.layer, margin, lambda layer: _values(layer, inputs, trial, given)[0]
        )


def _precisions(plan: Plan, trial: Trial, gate: Gate) -> list[str]:
    """How the products of the case are made; none but in kernels."""
    return [how for d, _, how in plan.config.precision if d == trial.case.dtype and gate != "portable"]


def _loss(
    outputs: Mapping[str, Tensor],
    finals: Mapping[str, Tensor],
    kept: Mapping[str, Tensor],
    trial: Trial,
    smooth: Mapping[str, Tensor],
) -> Tensor:
    """A weighted sum in float64 of what is reached, of outputs where they are `smooth`. Weights are the same for everyone, and
    numbers that outputs of the case's dtype have, so that the gradients which arrive there are not rounded."""
    generator = torch.Generator().manual_seed(3)
    total = torch.zeros((), dtype=torch.float64)
    for values, kind in ((outputs, "outputs"), (finals, "states"), (kept, "states")):
        for name, value in values.items():
            weight = torch.randn(value.shape, generator=generator).to(DTYPES[trial.case.dtype]).to(value.device)
            if kind == "outputs" and name in smooth:
                weight = weight * smooth[name]
            if kind in trial.reached:
                total = total.to(value.device) + (value.double() * weight.double()).sum()
    return total


def _gradients(leaves: Mapping[str, Tensor], loss: Tensor) -> dict[str, Tensor]:
    """The gradient of each leaf, zero where the loss does not depend on it."""
    if not loss.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def differentiated(
    plan: Plan, inputs: Inputs, trial: Trial, forward: Callable[..., Any], smooth: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The gradients that a module gives, by the names of inputs and of states as `S0`; `smooth` as for `truth`."""
    layer = plan.form.recurrence.layer
    leaves = {k: v.detach().clone().requires_grad_() for k, v in (*inputs.tensors.items(), *_initials(inputs).items())}
    states = {s: leaves[f"{s}0"] for s in inputs.states}
    tensors = {name: leaves[name] for name in inputs.tensors}
    options: dict[str, Any] = {} if trial.every is None else {EVERY: trial.every}
    if trial.packing is not None:
        options[trial.packing.kind] = trial.packing.argument(next(iter(tensors.values())).device)
    with torch.enable_grad():
        values = forward(**Inputs(tensors, inputs.params, states, inputs.arguments).keywords(), **options)
        layouts = dict(plan.config.layouts)
        outputs = {}
        for output, value in zip(layer.outputs, values, strict=False):
            order = layouts.get(output.name, output.axes)
            outputs[output.name] = value.permute([order.index(a) for a in output.axes])
        rest = values[len(layer.outputs) :]
        finals, kept = (
            {s.name: v for s, v in zip(layer.states, found, strict=True)} if found else {}
            for found in (rest[: len(layer.states)], rest[len(layer.states) :])
        )
        return _gradients(leaves, _loss(outputs, finals, kept, trial, smooth))


def truth(plan: Plan, inputs: Inputs, trial: Trial, gate: Gate, smooth: Mapping[str, Tensor]) -> dict[str, Expected]:
    """The gradients through the loop over tokens, with the dtype and the bound of each; none arrives where an output that bends
    is not `smooth`."""
    given = {**inputs.tensors, **_initials(inputs)}
    gradients = _true(plan, inputs, trial, dict(given), smooth)
    precisions = _precisions(plan, trial, gate)
    least = max([FLOAT32, *(BOUNDS[p] for p in precisions)])
    bounds = {name: max(least, bound(x.dtype, ())) for name, x in given.items()}
    sensitive = _sensitive(plan, given) if precisions else []
    if sensitive:
        moved = _true(plan, inputs, trial, _nudged(plan, given, max(ROUNDING[p] for p in precisions)), smooth)
        for name in sensitive:
            change = (moved[name] - gradients[name]).norm() / gradients[name].norm().clamp_min(1e-30)
            bounds[name] = max(bounds[name], MOVED * float(change))
    return {name: Expected(value, given[name].dtype, bounds[name]) for name, value in gradients.items()}


def _true(
    plan: Plan, inputs: Inputs, trial: Trial, values: Mapping[str, Tensor], smooth: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The gradients through the loop over tokens at `values`, in float64."""
    leaves = {name: x.detach().double().requires_grad_() for name, x in values.items()}
    with torch.enable_grad():
        outputs, finals, kept = _values(plan.form.recurrence.layer, inputs, trial, leaves)
        return _gradients(leaves, _loss(outputs, finals, kept, trial, smooth))


def _values(
    layer: Layer, inputs: Inputs, trial: Trial, values: Mapping[str, Tensor]
) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Outputs, final and kept states of the loop over tokens, with `values` for the tensors and initial states of `inputs`."""
    tensors = {name: values[name] for name in inputs.tensors}
    states = {s: values[f"{s}0"] for s in inputs.states}
    if trial.packing is None:
        return *reference(layer, in_order_of_equations(layer, tensors), inputs.params, states), {}
    whole = Inputs(tensors, inputs.params, states, inputs.arguments)
    return packed_reference(layer, whole, trial.packing, trial.every)


def _sensitive(plan: Plan, given: Mapping[str, Tensor]) -> list[str]:
    """Whose gradients are no sums of a few products but over all tokens: inputs that those have in common."""
    layer = plan.form.recurrence.layer
    return [t.name for t in layer.inputs if layer.time not in t.axes and t.name in given]


def _nudged(plan: Plan, given: Mapping[str, Tensor], least: float) -> dict[str, Tensor]:
    """What products multiply, each element off by up to a relative `least`, as rounding it would."""
    layer = plan.form.recurrence.layer
    generator = torch.Generator().manual_seed(4)
    channels = {a for s in plan.form.states for a in (s.row_axis, s.column_axis) if a}
    values = dict(given)
    operands = [t.name for t in layer.inputs if layer.time in t.axes and channels & set(t.axes)]
    for name in (*operands, *(f"{s.name}0" for s in layer.states)):
        if name in given:
            x = given[name].double()
            noise = 2 * torch.rand(x.shape, generator=generator, dtype=torch.float64) - 1
            values[name] = x * (1 + least * noise.to(x.device))
    return values


def _initials(inputs: Inputs) -> dict[str, Tensor]:
    return {f"{name}0": x for name, x in inputs.states.items()}
