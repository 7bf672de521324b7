"""The specs that a command is given, each taken as far as its plan; one that cannot be does not stop the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import typer

from ssdgen import pipeline
from ssdgen.cli.options import settings
from ssdgen.cli.output import Steps, mistake_text, mistakes_data, say
from ssdgen.diagnostics import SpecError, UserError

if TYPE_CHECKING:
    from ssdgen.derive import Proof
    from ssdgen.ir.plan import Plan

Mistake = SpecError | UserError


class Stopped(Exception):
    """Of several specs none could be taken; carries the mistake of each."""

    def __init__(self, mistakes: Sequence[Mistake]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__(*mistakes)


@dataclass(frozen=True, slots=True)
class Left:
    """What kept some of several specs from being done: the user's mistakes, and bugs of ours, each on a spec."""

    mistakes: list[Mistake]
    bugs: list[tuple[str, Exception]]

    def add(self, spec: str, error: Exception) -> None:
        """Keep what stopped `spec`."""
        if isinstance(error, SpecError | UserError):
            self.mistakes.append(error)
        else:
            self.bugs.append((spec, error))

    def data(self) -> list[dict[str, object]]:
        """The mistakes for a program."""
        return mistakes_data(self.mistakes)

    def end(self, passed: bool, json: bool) -> NoReturn:
        """End the command: exit code 0 if all specs were done and `passed`; the first bug is raised.

        With `json` the mistakes have been printed, as `data`.
        """
        for mistake in () if json else self.mistakes:
            say(mistake_text(mistake))
        for spec, _ in self.bugs:
            say(f"ssdgen: {spec} could not be verified")
        if self.bugs:
            raise self.bugs[0][1]
        raise typer.Exit(0 if passed and not self.mistakes else 1)


def planned(
    specs: list[str] | None,
    config: list[str] | None,
    step: Steps,
    *,
    against: list[str] | None = None,
    verifying: bool = False,
    portable: bool = False,
    kernels: bool = True,
) -> tuple[list[tuple[Proof, Plan]], Left]:
    """Each of `specs` proved and planned, and what kept the others from it.

    If none is named, the built-in ones that have kernels. `against` are knobs that win over those of `config`. A spec
    without kernels is left out, unless its `portable` form is enough; that it has none is a mistake if `kernels` were asked
    for. `verifying`, its portable form is enough, and one that is wrong is left out too. Raises SpecError or UserError for a
    mistake that is not left out and for two layers of one name; Stopped, or the bug, if all specs are left out.
    """
    knobs = settings(config) | settings(against, "--against")
    found: dict[str, tuple[Proof, Plan]] = {}
    left = Left([], [])
    chosen = specs or pipeline.built_ins()
    for i, spec in enumerate(chosen):
        step(i, len(chosen), spec)
        try:
            form, proof = pipeline.derive(spec)
            plan = pipeline.plan(form, knobs)
        except Exception as error:  # a bug too: it is told at the end, when the others have been verified
            if not verifying:
                raise
            left.add(spec, error)
            continue
        if plan.refused and specs and kernels and not verifying:
            hint = f"ssdgen verify {spec} checks its portable form"
            left.add(spec, UserError(f"{spec} has no kernels yet: {plan.refused}", hint))
        if plan.refused and not portable and not (verifying and specs):
            continue
        if proof.layer in found:
            raise UserError(f"two of the specs describe a layer called {proof.layer}", "rename one of them")
        found[proof.layer] = proof, plan
    if not found:
        if left.bugs:
            left.end(False, json=False)
        raise Stopped(left.mistakes)
    return list(found.values()), left
