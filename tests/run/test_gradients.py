"""The checks of gradients pass for what is right, and fail for what is wrong in one of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ssdgen import pipeline
from ssdgen.ir.plan import Plan
from ssdgen.ir.report import Check
from ssdgen.run.gradients import gradient_checks
from ssdgen.run.load import load
from ssdgen.run.verify import gradient
from tests.cases.subject import subject

Forward = Callable[..., tuple[Tensor, ...]]


def plan_of(spec: str) -> Plan:
    return pipeline.plan(pipeline.derive(spec)[0], {})


def checked(spec: str, forward: Forward) -> list[Check]:
    return list(gradient_checks("portable", plan_of(spec), forward, lambda call: call()))


@pytest.mark.parametrize("spec", ["gla", "mamba3"])
def test_specs_without_kernels(spec: str) -> None:
    """Their portable forms are differentiable too: decays of each channel, inputs of the token before."""
    plan = plan_of(spec)
    source = pipeline.emit(plan)
    module = load(spec, {**dict(source.support), f"{spec}.py": source.text})
    checks = list(gradient("portable", plan, module))
    assert len(checks) > 30
    assert all(c.passed for c in checks), [c for c in checks if not c.passed]


@pytest.mark.parametrize("spec", ["mamba2", "state_space_duality", "retnet", "linear_attention", "simple_gla", "mlstm"])
def test_kernels(spec: str) -> None:
    """Those of every spec that has them; a module without those of gradients is checked in the tests of `verify`."""
    checks = list(gradient("emulation", plan_of(spec), importlib.import_module(f"generated.{spec}")))
    assert all(c.passed for c in checks), [c for c in checks if not c.passed]
    assert {c.name.partition(":")[0] for c in checks} >= {
        "gradients of an index",
        "gradients of holes",
        "gradients bf16",
    }


def test_what_is_checked() -> None:
    """Every input and initial state, and that nothing reaches a hidden token."""
    checks = list(gradient("portable", plan_of("simple_gla"), subject("simple_gla").module))
    assert all(c.passed for c in checks), [c for c in checks if not c.passed]
    names = {c.name.partition(":")[2].strip() for c in checks}
    hidden = {f"{name} of hidden tokens" for name in ("q", "k", "v", "g")}
    assert names == {"q", "k", "v", "g", "S0"} | hidden


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "S0"])
def test_a_gradient_that_is_lost(name: str) -> None:
    """The results are right, and one input gets no gradient."""

    def wrong(**named: Any) -> tuple[Tensor, ...]:
        cut = {n: v.detach() if n == name and isinstance(v, Tensor) else v for n, v in named.items()}
        return subject("simple_gla").module.forward(**cut)  # type: ignore[no-any-return]

    failed = {c.name for c in checked("simple_gla", wrong) if not c.passed}
    assert f"gradients: {name}" in failed
    assert all(n.endswith(f": {name}") for n in failed)


class Scaled(torch.autograd.Function):
    """The identity, whose gradient is a hundredth too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 1.01


@pytest.mark.parametrize(("place", "kind"), [(0, "outputs"), (1, "states")])
def test_a_gradient_that_arrives_wrong(place: int, kind: str) -> None:
    """At the output or at the final state alone: the trials of the other still pass."""

    def wrong(**named: Any) -> tuple[Tensor, ...]:
        values = list(subject("simple_gla").module.forward(**named))
        values[place] = Scaled.apply(values[place])
        return tuple(values)

    failed = {c.name for c in checked("simple_gla", wrong) if not c.passed}
    other = {"outputs": "states", "states": "outputs"}[kind]
    assert f"gradients from {kind}: k" in failed
    assert not any(n.startswith(f"gradients from {other}") for n in failed)


def test_a_call_that_is_refused_is_a_failed_check() -> None:
    def refused(**named: Any) -> tuple[Tensor, ...]:
        raise NotImplementedError("no gradients here")

    checks = checked("simple_gla", refused)
    assert not any(c.passed for c in checks)
    assert checks[0].note == "NotImplementedError: no gradients here"
