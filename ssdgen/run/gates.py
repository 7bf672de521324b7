"""All gates of one spec in one report: the proof and the build beside what `verify` computes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from types import ModuleType

import torch

from ssdgen.build.compile import build
from ssdgen.build.table import mma_text
from ssdgen.derive import Proof
from ssdgen.ir.build import Build, CompiledKernel
from ssdgen.ir.plan import Plan
from ssdgen.ir.report import Check, Gate, Report
from ssdgen.run.launches import compile_requests
from ssdgen.run.verify import verify

ARCHITECTURE = "sm_90"
"""What the compile gate compiles for; `ssdgen build` takes any."""


def has_cuda() -> bool:
    """Whether torch has a CUDA device here."""
    return torch.cuda.is_available()


def every_gate(
    proof: Proof,
    plan: Plan,
    module: ModuleType,
    gates: Collection[Gate],
    on_check: Callable[[Check], None] = lambda check: None,
    gpu: bool = True,
) -> Report:
    """The checks of `gates`, in their order: `proof` was made of the form of `plan`, `module` was emitted from it.

    `on_check` hears of each check as it is made. Without `gpu`, peers that need one are left out. Never raises because a
    check fails.
    """
    report = Report(proof.layer, ())
    for gate in gates:
        checks: Iterable[Check]
        device = report.device
        if gate == "proof":
            checks = (Check(f"{len(proof.statements)} statements about the chunked form", gate, 0.0, 0.0, passed=True),)
        elif gate == "compile":
            checks = compile_checks(plan, module)
        else:
            part = verify(plan, module, [gate], on_check=on_check, gpu=gpu)
            checks, device = part.checks, part.device if gate == "hardware" else device
        if gate in ("proof", "compile"):
            for check in checks:
                on_check(check)
        report = Report(report.spec, (*report.checks, *checks), device)
    return report


def compile_checks(plan: Plan, module: ModuleType) -> tuple[Check, ...]:
    """One check for each kernel that `module` launches, compiled for one architecture; its note says what it uses."""
    if plan.refused:
        return (Check("kernels", "compile", 0.0, 0.0, passed=False, note=plan.refused, skipped=True),)
    return _checks(build(compile_requests(plan, module, [ARCHITECTURE], ["bf16", "f32"], packed=True, states=True)))


def _checks(built: Build) -> tuple[Check, ...]:
    checks = []
    for result in built.results:
        if isinstance(result, CompiledKernel):
            used = result.resources
            note = f"{mma_text(used)}, {used.shared_bytes // 1024} KB shared, {used.spilled_bytes} bytes spilled"
            checks.append(Check(str(result.request), "compile", 0.0, 0.0, passed=True, note=note))
        else:
            checks.append(Check(str(result.request), "compile", 0.0, 0.0, passed=False, note=result.message))
    return tuple(checks)
