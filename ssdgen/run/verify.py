"""Does an emitted module compute what its spec says? One line a check.

The truth is a float64 loop over tokens made from the Layer alone (`reference`); nothing that the derivation, the plan or
the templates made has a part in it. Each gate can fail on its own: `portable` is about the chunked form in plain torch,
`emulation` and `hardware` about the kernels as emitted, `peer` about the spec. The proof and the compiler are in `gates`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import torch

from ssdgen.ir.plan import Plan
from ssdgen.ir.report import Check, Gate, Report
from ssdgen.plan.names import arguments
from ssdgen.run.cases import Trial, kernel_trials, portable_trials
from ssdgen.run.checks import Expected, bound, compare, one_thread, poisoned_memory, relative_error
from ssdgen.run.continuation import continuation_checks
from ssdgen.run.emulate import EmulationError, launch
from ssdgen.run.gradients import gradient_checks
from ssdgen.run.inputs import DTYPES, Case, Inputs, draw, in_order_of_equations
from ssdgen.run.packing import packed_checks
from ssdgen.run.peers import peer_checks
from ssdgen.run.reference import reference
from ssdgen.run.steps import Steps, step_checks

GATES: tuple[Gate, ...] = ("portable", "emulation", "peer")
"""The gates that `verify` makes by default: those that need neither a GPU nor a compiler."""


def verify(
    plan: Plan,
    module: ModuleType,
    gates: Iterable[Gate] = GATES,
    sizes: Mapping[str, int] | None = None,
    on_check: Callable[[Check], None] = lambda check: None,
    gpu: bool = True,
) -> Report:
    """Compare `module`, emitted from `plan`, with the token loop, by the `gates` asked for, in that order.

    `sizes` overrides lengths of axes in every trial; one for the time axis adds a trial of that length. `on_check` hears
    of each check as it is made. Without `gpu`, peers that need one are left out. Never raises because a check fails.
    """
    made: list[Check] = []
    for gate in gates:
        for check in _checks(gate, plan, module, sizes, gpu):
            made.append(check)
            on_check(check)
    return Report(plan.form.recurrence.layer.name, tuple(made), _device_name(gates))


def _checks(gate: Gate, plan: Plan, module: ModuleType, sizes: Mapping[str, int] | None, gpu: bool) -> Iterator[Check]:
    if gate == "portable":
        for trial in portable_trials(plan, sizes):
            yield from run_trial(gate, plan, module, trial)
        yield from packed(gate, plan, module)
        yield from continued(gate, plan, module)
        yield from stepped(gate, plan, module)
        yield from gradient(gate, plan, module)
    elif gate == "peer":
        yield from peer_checks(plan.form.recurrence.layer, module.forward, gpu)
    elif gate in ("emulation", "hardware"):
        if plan.refused:
            yield _skipped(gate, plan.refused)
        elif gate == "hardware" and not torch.cuda.is_available():
            yield _skipped(gate, "no CUDA device")
        else:
            for trial in kernel_trials(plan, sizes):
                yield from run_trial(gate, plan, module, trial)
            yield from packed(gate, plan, module)
            yield from continued(gate, plan, module)
            yield from stepped(gate, plan, module)
            yield from gradient(gate, plan, module)
    else:
        raise ValueError(f"verify makes no {gate} checks")


def packed(gate: Gate, plan: Plan, module: ModuleType) -> Iterator[Check]:
    """The checks of packed sequences, through the portable path, the emulator or CUDA."""

    def call(keywords: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        with one_thread(), poisoned_memory(), emulated(module) if gate == "emulation" else nullcontext():
            values: tuple[torch.Tensor, ...] = module.forward(**keywords)
        return values

    def uncut(keywords: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        if gate == "portable" or "segments" not in {k.name for k in plan.knobs}:
            return call(keywords)
        dtype = keywords[arguments(plan.form.recurrence.layer)[plan.leader]].dtype
        return call({**keywords, "config": replace(module.CONFIGS[dtype], segments=1)})

    def truth(inputs: Inputs, case: Case) -> dict[str, Expected]:
        return expected(gate, plan, inputs, Trial("packed", case))

    return packed_checks(gate, plan, call, uncut, truth, "cuda" if gate == "hardware" else "cpu")


def continued(gate: Gate, plan: Plan, module: ModuleType) -> Iterator[Check]:
    """The checks of continuation; kernels walk more than one segment, if they can."""
    run = running(gate, module)

    def call(keywords: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        if gate != "portable" and "segments" in {k.name for k in plan.knobs}:
            dtype = keywords[arguments(plan.form.recurrence.layer)[plan.leader]].dtype
            keywords = {**keywords, "config": replace(module.CONFIGS[dtype], segments=2)}
        values: tuple[torch.Tensor, ...] = run(lambda: module.forward(**keywords))
        return values

    def truth(inputs: Inputs, case: Case) -> dict[str, Expected]:
        return expected(gate, plan, inputs, Trial("continued", case))

    return continuation_checks(gate, plan, call, truth, "cuda" if gate == "hardware" else "cpu")


def stepped(gate: Gate, plan: Plan, module: ModuleType) -> Iterator[Check]:
    """The checks of one-token steps, through the portable path, the emulator or CUDA."""

    def truth(inputs: Inputs, case: Case) -> dict[str, Expected]:
        return expected("portable", plan, inputs, Trial("steps", case))

    device = "cuda" if gate == "hardware" else "cpu"
    return step_checks(Steps(gate, plan, module, running(gate, module), device), truth, partial(explained, plan))


def gradient(gate: Gate, plan: Plan, module: ModuleType) -> Iterator[Check]:
    """The checks of gradients, of the portable path, or of calls that kernels compute."""
    device = "cuda" if gate == "hardware" else "cpu"
    return gradient_checks(gate, plan, module.forward, running(gate, module), device)


def running(gate: Gate, module: ModuleType) -> Callable[[Callable[[], Any]], Any]:
    """What runs a call of `module` where `gate` does, on poisoned memory."""

    def run(call: Callable[[], Any]) -> Any:
        here = emulated(module) if gate == "emulation" else nullcontext()
        with one_thread(), torch.no_grad(), poisoned_memory(), here:
            return call()

    return run


def run_trial(gate: Gate, plan: Plan, module: ModuleType, trial: Trial) -> list[Check]:
    """The checks of one call: through the portable path, the emulator or CUDA, whichever `gate` says."""
    layer = plan.form.recurrence.layer
    inputs = draw(layer, trial.case, "cuda" if gate == "hardware" else "cpu")
    names = [o.name for o in layer.outputs] + [s.name for s in layer.states]
    with one_thread():
        try:
            config = configured(plan, module, inputs, trial.config)
            with poisoned_memory(), emulated(module) if gate == "emulation" else nullcontext():
                values = module.forward(**inputs.keywords(), config=config)
        except (EmulationError, ValueError, TypeError, RuntimeError) as error:
            note = " ".join(f"{type(error).__name__}: {error}".split())
            return [Check(trial.name, gate, float("inf"), 0.0, passed=False, note=note)]
        got = dict(zip(names, values, strict=True))
        wanted = expected(gate, plan, inputs, trial)
        return explained(plan, inputs, wanted, compare(gate, trial.name, got, wanted))


NUDGE = 2.0**-9
"""The relative change of inputs that `sensitivity` makes: half a unit in the last place of bf16."""
AMPLIFIES = 4.0


def sensitivity(plan: Plan, inputs: Inputs, wanted: Mapping[str, Expected]) -> list[float]:
    """How much the truth of each value changes if every input and state changes by NUDGE at random, relative to that."""
    layer = plan.form.recurrence.layer
    generator = torch.Generator().manual_seed(0)

    def nudged(x: torch.Tensor) -> torch.Tensor:
        sign = torch.randint(0, 2, x.shape, generator=generator).mul(2).sub(1)
        return x.double().cpu() * (1 + NUDGE * sign)

    tensors = {k: nudged(x) for k, x in in_order_of_equations(layer, inputs.tensors).items()}
    states = {k: nudged(x) for k, x in inputs.states.items()}
    outputs, finals = reference(layer, tensors, inputs.params, states)
    changes = []
    for key, value in {**outputs, **finals}.items():
        truth = wanted[key].value.cpu()
        order = dict(plan.config.layouts).get(key)
        if order is not None:
            axes = next(o.axes for o in layer.outputs if o.name == key)
            value = value.permute([axes.index(a) for a in order])
        changes.append(relative_error(value, truth) / NUDGE)
    return changes


def explained(plan: Plan, inputs: Inputs, wanted: Mapping[str, Expected], checks: list[Check]) -> list[Check]:
    """`checks` of each of `wanted`, in order; the note of one that fails says so if the equations magnify rounding."""
    if all(c.passed for c in checks):
        return checks
    changes = sensitivity(plan, inputs, wanted)
    return [replace(c, note=_explained(c, change)) for c, change in zip(checks, changes, strict=True)]


def _explained(check: Check, change: float) -> str:
    if check.passed or check.note or change < AMPLIFIES:
        return check.note
    return f"ill-conditioned: a relative change of the inputs changes this {change:.0f} times as much"


def configured(plan: Plan, module: ModuleType, inputs: Inputs, changes: Mapping[str, int | str]) -> Any:
    """The module's default Config for the dtype of `inputs` with `changes`; None if there are none."""
    if not changes:
        return None
    default = module.CONFIGS.get(inputs.tensors[plan.leader].dtype)
    return module.Config(**changes) if default is None else replace(default, **changes)


def emulated(module: ModuleType) -> AbstractContextManager[None]:
    """Within, the module's launches run in the emulator, on CPU tensors."""
    runtime = importlib.import_module("._runtime", module.__package__)
    context: AbstractContextManager[None] = runtime.launcher(launch)
    return context


def expected(gate: Gate, plan: Plan, inputs: Inputs, trial: Trial) -> dict[str, Expected]:
    """The truth for `inputs`, as they were rounded, with the dtype and the bound of every output and final state."""
    layer = plan.form.recurrence.layer
    truth, finals = reference(layer, in_order_of_equations(layer, inputs.tensors), inputs.params, inputs.states)
    double = trial.case.dtype == "f64"
    precisions: dict[str, str] = {}
    if gate != "portable":
        precisions = {p: how for d, p, how in plan.config.precision if d == trial.case.dtype}
        precisions |= {k: str(v) for k, v in trial.config.items() if k in precisions}
    out: dict[str, Expected] = {}
    for output in layer.outputs:
        dtype = inputs.tensors[output.like].dtype if output.like else DTYPES[output.dtypes[0]]
        dtype = torch.float64 if double else dtype
        axes = dict(plan.config.layouts).get(output.name, output.axes)
        wanted = truth[output.name].permute([output.axes.index(a) for a in axes])
        out[output.name] = Expected(wanted, dtype, bound(dtype, precisions.values()))
    for state in layer.states:
        dtype = torch.float64 if double else DTYPES[state.dtype]
        update = [precisions["state"]] if "state" in precisions else []
        out[state.name] = Expected(finals[state.name], dtype, bound(dtype, update))
    return out


def _skipped(gate: Gate, why: str) -> Check:
    return Check("kernels", gate, 0.0, 0.0, passed=False, skipped=True, note=why)


def _device_name(gates: Iterable[Gate]) -> str:
    return torch.cuda.get_device_name() if "hardware" in gates and torch.cuda.is_available() else "cpu"
