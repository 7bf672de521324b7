"""The specs that a command is given, each taken as far as its plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ssdgen import pipeline
from ssdgen.cli.options import settings
from ssdgen.cli.output import Steps
from ssdgen.diagnostics import UserError

if TYPE_CHECKING:
    from ssdgen.derive import Proof
    from ssdgen.ir.plan import Plan


def planned(
    specs: list[str] | None,
    config: list[str] | None,
    step: Steps,
    portable: bool = False,
    against: list[str] | None = None,
) -> list[tuple[Proof, Plan]]:
    """Each of `specs` proved and planned; if none is named, all built-in ones that have kernels.

    `against` are knobs that win over those of `config`. Nothing else has been done when a spec is wrong. Raises UserError
    for two that describe a layer of one name, and for one without kernels unless its `portable` form is enough.
    """
    chosen = specs or pipeline.built_ins()
    found: dict[str, tuple[Proof, Plan]] = {}
    for i, spec in enumerate(chosen):
        step(i, len(chosen), spec)
        form, proof = pipeline.derive(spec)
        plan = pipeline.plan(form, settings(config) | settings(against, "--against"))
        if plan.refused and not specs:
            continue
        if plan.refused and not portable:
            raise UserError(
                f"{spec} has no kernels yet: {plan.refused}", f"ssdgen verify {spec} checks its portable form"
            )
        if proof.layer in found:
            raise UserError(f"two of the specs describe a layer called {proof.layer}", "rename one of them")
        found[proof.layer] = proof, plan
    return list(found.values())
