"""A spec with its plan and its emitted module, and calls of it through the portable path or the emulator."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType

import torch

from ssdgen.derive import chunk_form, recurrence
from ssdgen.emit import emit
from ssdgen.emit.package import package
from ssdgen.ir.layer import Layer
from ssdgen.ir.plan import Plan
from ssdgen.ir.report import Gate
from ssdgen.plan import plan as plan_of
from ssdgen.run.cases import Trial
from ssdgen.run.checks import one_thread, poisoned_memory
from ssdgen.run.inputs import Case, Inputs
from ssdgen.run.load import load
from ssdgen.run.verify import configured, emulated, run_trial
from ssdgen.spec import load_source, read_layer

BOTH: tuple[Gate, ...] = ("portable", "emulation")


@dataclass(frozen=True)
class Subject:
    """What a test is about."""

    plan: Plan
    module: ModuleType

    @property
    def layer(self) -> Layer:
        return self.plan.form.recurrence.layer

    def check(self, gate: Gate, case: Case, config: Mapping[str, int | str] | None = None) -> None:
        """The call equals the float64 token loop within its bound; the failure says by how much it does not."""
        if gate == "emulation" and case.dtype == "f64":
            raise ValueError("kernels take no float64")
        checks = run_trial(gate, self.plan, self.module, Trial("case", case, config or {}))
        assert checks
        assert all(c.passed for c in checks), "\n".join(f"{c.name} {c.error} > {c.bound} {c.note}" for c in checks)

    def call(self, gate: Gate, inputs: Inputs, **config: int | str) -> tuple[torch.Tensor, ...]:
        """The outputs and final states of one call."""
        chosen = configured(self.plan, self.module, inputs, config)
        with one_thread(), poisoned_memory(), emulated(self.module) if gate == "emulation" else nullcontext():
            values: tuple[torch.Tensor, ...] = self.module.forward(**{"config": chosen, **inputs.keywords()})
        return values


@functools.cache
def subject(name: str) -> Subject:
    """The built-in spec called `name`."""
    form = chunk_form(recurrence(read_layer(load_source(name))))
    plan = plan_of(form)
    source = emit(plan)
    return Subject(plan, load(source.name, package([source])))


EXACT: dict[str, int | str] = {"scores": "tf32x3", "carried": "tf32x3", "intra": "tf32x3", "state": "tf32x3"}
"""The Config fields that give every product float32 accuracy."""


def mamba2_sizes(b: int = 2, t: int = 70, h: int = 4, g: int = 2, p: int = 40, n: int = 24) -> dict[str, int]:
    return {"b": b, "t": t, "h": h, "g": g, "p": p, "n": n}
