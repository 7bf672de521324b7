"""Checks of one-token steps: the token loop, `forward`, slots of a pool of states, and what must be equal bit for bit.

A module's steps are called on the tokens of a short sequence one by one. Where a kernel and the portable form run the same
float32 arithmetic there is no product whose precision could be chosen, so bounds are those of the dtypes alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from ssdgen.ir.layer import Layer
from ssdgen.ir.plan import Plan
from ssdgen.ir.report import Check, Gate
from ssdgen.run.cases import Trial, channels_of, left_out, memories, resized, several_tiles, sizes_for
from ssdgen.run.checks import Expected, compare
from ssdgen.run.inputs import Case, Dtype, Inputs, array_axes, draw, takes

TOKENS = 4
"""Tokens of a sequence that is stepped through."""

LONG, ROUNDED = 64, 2e-2
"""Tokens with states of bfloat16, and how far off outputs and states may be after them. Each token rounds a state by 2^-9 at
most; without any decay 64 such errors make 64^0.5 * 2^-9 = 1.6e-2 of the state, if they are independent."""

NAMES = {torch.float32: "f32", torch.bfloat16: "bf16"}
"""The dtypes of states."""

Within = Callable[[Callable[[], Any]], Any]
"""Runs a call where a gate runs it: as it is, emulated, on poisoned memory."""

Truth = Callable[[Inputs, Case], dict[str, Expected]]
"""What the outputs of all tokens and the final states have to be."""

Explain = Callable[[Inputs, Mapping[str, Expected], list[Check]], list[Check]]
"""Checks of each expected value, with a note at those that fail because the equations magnify rounding."""


@dataclass(frozen=True, slots=True)
class Steps:
    """A module's steps as a gate calls them."""

    gate: Gate
    plan: Plan
    module: ModuleType
    within: Within
    device: str

    @property
    def layer(self) -> Layer:
        """The layer."""
        return self.plan.form.recurrence.layer

    def call(
        self, name: str, states: list[Tensor], tensors: Mapping[str, Tensor], inputs: Inputs, **more: Any
    ) -> list[Tensor]:
        """One call of `step` or `steps`: its outputs; `states` are moved."""
        named = {inputs.arguments.get(n, n): v for n, v in {**tensors, **inputs.params}.items()}
        found = self.within(lambda: getattr(self.module, name)(*states, **named, **more))
        return list(found) if isinstance(found, tuple) else [cast(Tensor, found)]

    def at(self, inputs: Inputs, token: int) -> dict[str, Tensor]:
        """The inputs of one token, without a time axis."""
        return {n: x if at is None else x.select(at, token) for n, x, at in self._in_time(inputs)}

    def among(self, inputs: Inputs, first: int, stop: int) -> dict[str, Tensor]:
        """The inputs of several tokens."""
        return {n: x if at is None else x.narrow(at, first, stop - first) for n, x, at in self._in_time(inputs)}

    def _in_time(self, inputs: Inputs) -> Iterator[tuple[str, Tensor, int | None]]:
        for name, x in inputs.tensors.items():
            declared = self.layer.tensor(name)
            form = next(f for f in (declared.axes, *declared.narrower) if len(f) == x.dim())
            axes = array_axes(self.layer, declared, form)
            yield name, x, axes.index(self.layer.time) if self.layer.time in axes else None

    def walked(self, inputs: Inputs, states: list[Tensor], tokens: int, **more: Any) -> list[Tensor]:
        """The outputs of `tokens` calls of `step`, along the time axis; `states` are moved."""
        pieces = [self.call("step", states, self.at(inputs, token), inputs, **more) for token in range(tokens)]
        return [torch.stack(list(piece), at) for piece, at in zip(zip(*pieces, strict=True), self.times(), strict=True)]

    def times(self) -> list[int]:
        """Where outputs have their time axis."""
        layouts = dict(self.plan.config.layouts)
        return [layouts.get(o.name, o.axes).index(self.layer.time) for o in self.layer.outputs]

    def entering(self, inputs: Inputs, case: Case, dtype: torch.dtype | None = None) -> list[Tensor]:
        """The states before the first token, drawn or zero, in memory of their own."""
        made = []
        for s in self.layer.states:
            given = inputs.states.get(s.name)
            wide = torch.float64 if case.dtype == "f64" else torch.float32
            shape = [case.sizes[a] for a in s.axes]
            state = torch.zeros(shape, dtype=wide, device=self.device) if given is None else given
            made.append(state.to(dtype or state.dtype, copy=True))
        return made

    def drawn(self, case: Case) -> Inputs:
        """The inputs of a case."""
        return draw(self.layer, case, self.device)


def step_checks(steps: Steps, truth: Truth, explain: Explain) -> Iterator[Check]:
    """All checks of steps; one skipped check where there is nothing to check."""
    if steps.plan.step.portable is None:
        yield Check("steps", steps.gate, 0.0, 0.0, passed=False, skipped=True, note=steps.plan.step.refused)
        return
    for trial in step_trials(steps.layer, steps.gate):
        yield from _walk(steps, trial, truth, explain)
    base = Case({**sizes_for(steps.layer, TOKENS), steps.layer.batch: 3}, seed=5)
    yield from _rounded(steps, truth, explain)
    for dtype in NAMES:
        yield from _several(steps, base, dtype)
        yield from _steady(steps, base, dtype)
        yield from _slots(steps, base, dtype)
    yield from _as_forward(steps, base, explain)


def step_trials(layer: Layer, gate: Gate) -> Iterator[Trial]:
    """Every dtype, every way to leave inputs out, awkward memory and sizes."""
    base = Case(sizes_for(layer, TOKENS), seed=5)
    dtypes: tuple[Dtype, ...] = ("f32", "f64", "bf16", "f16") if gate == "portable" else ("f32", "bf16", "f16")
    for dtype in dtypes:
        if takes(layer, dtype):
            yield Trial(f"steps {dtype}", replace(base, dtype=dtype))
    for trial in (*left_out(layer, base), *memories(base)):
        yield Trial(f"steps {trial.name}", trial.case)
    channels = channels_of(layer)
    yield Trial("steps several tiles", resized(base, several_tiles(layer)))
    whole = {a: 64 << i for i, a in enumerate(channels[:2])}
    yield Trial("steps whole tiles", resized(base, {layer.batch: 1} | whole))
    yield Trial("steps every channel axis 1", resized(base, dict.fromkeys(channels, 1)))
    yield Trial("steps three heads, one group", resized(base, {layer.head: 3} | {g.axis: 1 for g in layer.groups}))


def _walk(steps: Steps, trial: Trial, truth: Truth, explain: Explain) -> Iterator[Check]:
    """T steps are the token loop."""
    inputs = steps.drawn(trial.case)
    states = steps.entering(inputs, trial.case)
    try:
        outputs = steps.walked(inputs, states, trial.case.sizes[steps.layer.time])
    except (ValueError, TypeError, RuntimeError) as error:
        note = " ".join(f"{type(error).__name__}: {error}".split())
        yield Check(trial.name, steps.gate, math.inf, 0.0, passed=False, note=note)
        return
    wanted = truth(inputs, trial.case)
    yield from explain(inputs, wanted, compare(steps.gate, trial.name, _named(steps, outputs, states), wanted))


def _named(steps: Steps, outputs: list[Tensor], states: list[Tensor]) -> dict[str, Tensor]:
    names = [o.name for o in steps.layer.outputs] + [s.name for s in steps.layer.states]
    return dict(zip(names, [*outputs, *states], strict=True))


def _rounded(steps: Steps, truth: Truth, explain: Explain) -> Iterator[Check]:
    """States of bfloat16, rounded at every token, stay near those of the token loop, which nobody rounds: many tokens of
    one sequence with two heads in one group and few channels, as sizes have trials of their own."""
    layer = steps.layer
    few = {layer.batch: 1, layer.head: 2} | {g.axis: 1 for g in layer.groups}
    few |= dict(zip(channels_of(layer), (8, 24), strict=False))
    case = resized(Case(sizes_for(layer, LONG), seed=6), few)
    inputs = steps.drawn(case)
    states = steps.entering(inputs, case, torch.bfloat16)
    inputs.states.update({s.name: x.float() for s, x in zip(steps.layer.states, states, strict=True)})
    outputs = steps.walked(inputs, states, LONG)
    wanted = {name: replace(e, bound=ROUNDED) for name, e in truth(inputs, case).items()}
    wanted |= {s.name: replace(wanted[s.name], dtype=torch.bfloat16) for s in steps.layer.states}
    checks = compare(steps.gate, f"steps, bf16 states, T={LONG}", _named(steps, outputs, states), wanted)
    yield from explain(inputs, wanted, checks)


def _several(steps: Steps, case: Case, dtype: torch.dtype) -> Iterator[Check]:
    """`steps` of k tokens is k calls of `step`, and a call repeated is the same call; `before` holds the states between."""
    inputs, kind = steps.drawn(case), NAMES[dtype]
    first = steps.entering(inputs, case, dtype)
    one = [s.clone() for s in first]
    between, outputs = [], []
    for token in range(TOKENS):
        between.append([s.clone() for s in one])
        outputs.append(steps.call("step", one, steps.at(inputs, token), inputs))
    every = [torch.stack(list(x), at) for x, at in zip(zip(*outputs, strict=True), steps.times(), strict=True)]
    for time in ("once", "again"):
        moved = [s.clone() for s in first]
        kept = tuple(torch.full_like(s, math.nan).unsqueeze(1).repeat_interleave(TOKENS, 1) for s in first)
        before = kept if len(kept) > 1 else kept[0]
        found = steps.call("steps", moved, steps.among(inputs, 0, TOKENS), inputs, before=before)
        yield _equal(steps.gate, f"steps at once are steps, {kind}, {time}", [*found, *moved], [*every, *one])
        wanted = [torch.stack(list(x), 1) for x in zip(*between, strict=True)]
        yield _equal(steps.gate, f"states before each token, {kind}, {time}", list(kept), wanted)


def _steady(steps: Steps, case: Case, dtype: torch.dtype) -> Iterator[Check]:
    """With `steady` one token, and several, are what they are without. The promise is kept: between one call and the next
    PyTorch copies the states."""
    inputs, kind = steps.drawn(case), NAMES[dtype]
    first = steps.entering(inputs, case, dtype)
    for name, calls in (
        ("step", [steps.at(inputs, token) for token in range(TOKENS)]),
        ("steps", [steps.among(inputs, 0, 2), steps.among(inputs, 2, TOKENS)]),
    ):
        found = []
        for steady in (False, True):
            states, values = [s.clone() for s in first], []
            for tensors in calls:
                values += [s.clone() for s in states]
                values += steps.call(name, states, tensors, inputs, steady=steady)
            found.append([*values, *states])
        yield _equal(steps.gate, f"steady {name}, {kind}", found[1], found[0])


def _slots(steps: Steps, case: Case, dtype: torch.dtype) -> Iterator[Check]:
    """Slots of a pool in any order: those that are not named, and the outputs of a sequence without one, stay bit for bit.
    Nothing is steady there, whatever the caller promises."""
    inputs, kind = steps.drawn(case), NAMES[dtype]
    tensors = steps.at(inputs, 0)
    alone = steps.entering(inputs, case, dtype)
    first = [s.clone() for s in alone]
    outputs = steps.call("step", alone, tensors, inputs)
    for name, index, reads, writes in (
        ("slots", torch.int32, (4, -1, 0), None),
        ("slots int64", torch.int64, (1, 3, 0), None),
        ("slots to write", torch.int64, (4, 1, -1), (2, -1, 3)),
        ("one slot for all", torch.int32, (2, 2, 2), (0, 4, 5)),
    ):
        where = {"state_indices": torch.tensor(reads, dtype=index, device=steps.device)}
        if writes is not None:
            where["write_indices"] = torch.tensor(writes, dtype=index, device=steps.device)
        caches = [_cache(s, reads) for s in first]
        pools = [c[:, 1] for c in caches]
        moved = [torch.stack([p[max(slot, 0)] for slot in reads]) for p in pools]
        wanted_caches = [c.clone() for c in caches]
        wanted_outputs = steps.call("step", moved, tensors, inputs)
        made = steps.call("step", [p.clone() for p in pools], tensors, inputs, steady=True, **where)
        out = tuple(torch.full_like(y, -7.0) for y in outputs)
        steps.call("step", pools, tensors, inputs, out=out if len(out) > 1 else out[0], **where)
        for cache, state in zip(wanted_caches, moved, strict=True):
            for row, (read, slot) in enumerate(zip(reads, reads if writes is None else writes, strict=True)):
                if read >= 0 and slot >= 0:
                    cache[slot, 1] = state[row]
        yield _equal(steps.gate, f"{name}, {kind}: every slot", caches, wanted_caches)
        for what, got, absent in (("outputs", made, 0.0), ("in `out`", list(out), -7.0)):
            wanted = [y.clone() for y in wanted_outputs]
            for y in wanted:
                for row, slot in enumerate(reads):
                    if slot < 0:
                        y[row] = absent
            yield _equal(steps.gate, f"{name}, {kind}: {what}", got, wanted)


def _cache(state: Tensor, slots: tuple[int, ...]) -> Tensor:
    """A cache of six slots of two layers, one of which is NaN; the other has the rows of `state` where `slots` say."""
    cache = torch.full((6, 2, *state.shape[1:]), math.nan, dtype=state.dtype, device=state.device)
    for slot in range(6):
        cache[slot, 1] = slot
    for row, slot in enumerate(slots):
        if slot >= 0:
            cache[slot, 1] = state[row]
    return cache


def _as_forward(steps: Steps, case: Case, explain: Explain) -> Iterator[Check]:
    """T steps give what `forward` of the same path gives."""
    layer, plan = steps.layer, steps.plan
    inputs = steps.drawn(case)
    states = steps.entering(inputs, case)
    outputs = steps.walked(inputs, states, case.sizes[layer.time])
    products = [k.name for k in plan.knobs if k.kind == "precision"]
    config = replace(steps.module.CONFIGS[torch.float32], **dict.fromkeys(products, "tf32x3"))
    values = steps.within(lambda: steps.module.forward(**inputs.keywords(), config=config))
    names = [o.name for o in layer.outputs] + [s.name for s in layer.states]
    wanted = {n: Expected(v.double(), v.dtype, 2e-5) for n, v in zip(names, values, strict=True)}
    checks = compare(steps.gate, "steps as forward", _named(steps, outputs, states), wanted)
    yield from explain(inputs, wanted, checks)


def _equal(gate: Gate, name: str, got: list[Tensor], want: list[Tensor]) -> Check:
    """Whether tensors are the same bit for bit; NaN, which no step writes, equals NaN."""
    differ = sum(
        got_one.numel()
        if got_one.shape != one.shape
        else int((~torch.isclose(got_one, one, 0, 0, equal_nan=True)).sum())
        for got_one, one in zip(got, want, strict=True)
    )
    note = f"{differ} elements differ" if differ else ""
    return Check(name, gate, math.inf if differ else 0.0, 0.0, passed=not differ, note=note)
