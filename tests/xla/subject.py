"""Emitted modules for XLA: made from a spec, and called with the arrays that the tests of the other target draw."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from ssdgen import pipeline
from ssdgen.derive import chunk_form, recurrence
from ssdgen.diagnostics import Source
from ssdgen.emit import emit_jax
from ssdgen.emit.package import package
from ssdgen.ir.layer import Layer
from ssdgen.ir.plan import Plan
from ssdgen.plan import plan as plan_of
from ssdgen.run.cases import Trial
from ssdgen.run.checks import compare
from ssdgen.run.inputs import Case, Inputs, draw
from ssdgen.run.load import load
from ssdgen.run.verify import expected
from ssdgen.spec import load_source, read_layer

SPECS = pipeline.built_ins()


@dataclass(frozen=True)
class Subject:
    """What a test is about."""

    plan: Plan
    module: ModuleType

    @property
    def layer(self) -> Layer:
        return self.plan.form.recurrence.layer

    def call(self, inputs: Inputs, chunk: int) -> tuple[jax.Array, ...]:
        """The outputs and final states of one call, compiled."""
        with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
            found = jax.jit(functools.partial(self.module.forward, chunk=chunk))(**arrays(inputs.keywords()))
        return tuple(found)

    def check(self, case: Case, chunk: int = 8) -> None:
        """The call equals the float64 loop over tokens within the bound of its dtype."""
        inputs = draw(self.layer, case)
        names = [o.name for o in self.layer.outputs] + [s.name for s in self.layer.states]
        got = dict(zip(names, map(tensor, self.call(inputs, chunk)), strict=True))
        gate = (
            "hardware" if case.dtype == "bf16" else "portable"
        )  # whose bounds are those of products in the inputs' dtype
        checks = compare(gate, "case", got, expected(gate, self.plan, inputs, Trial("case", case)))
        assert len(checks) == len(names)
        assert all(c.passed for c in checks), "\n".join(f"{c.name} {c.error} > {c.bound} {c.note}" for c in checks)


@functools.cache
def subject(name: str) -> Subject:
    """The built-in spec called `name`."""
    return made(load_source(name))


def made(source: Source) -> Subject:
    """The module of a spec."""
    plan = plan_of(chunk_form(recurrence(read_layer(source))))
    module = emit_jax(plan)
    return Subject(plan, load(module.name, package([module])))


def arrays(values: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors of torch as arrays of jax; numbers as they are."""
    return {name: array(v) if isinstance(v, torch.Tensor) else v for name, v in values.items()}


def array(x: torch.Tensor) -> jax.Array:
    """A tensor as an array of jax, of the same dtype."""
    return (
        jnp.asarray(x.float().numpy(), jnp.bfloat16) if x.dtype == torch.bfloat16 else jnp.asarray(x.detach().numpy())
    )


def tensor(x: jax.Array) -> torch.Tensor:
    """An array of jax as a tensor, of the same dtype."""
    if x.dtype == jnp.bfloat16:
        return torch.from_numpy(np.array(x.astype(jnp.float32))).bfloat16()
    return torch.from_numpy(np.array(x))
