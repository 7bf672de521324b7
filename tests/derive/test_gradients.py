"""What an adjoint computes is what autograd finds for the token loop, which is made from the layer alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdgen.derive import chunk_form, prove_adjoint, recurrence
from ssdgen.derive.adjoint import adjoint
from ssdgen.diagnostics import Source
from ssdgen.ir.layer import Layer
from ssdgen.run.reference import reference
from ssdgen.spec import builtin_specs, load_source, read_layer
from tests.derive.gradients import gradients
from tests.derive.test_random_recurrences import random_inputs, relative_error, specs

SIZES = {"b": 2, "h": 4, "p": 3, "n": 5}


def check(layer: Layer, tokens: int, chunk: int, seed: int, absent: tuple[str, ...] = ()) -> None:
    """The gradient of every input and initial state is autograd's."""
    derived = adjoint(chunk_form(recurrence(layer)))
    prove_adjoint(derived)
    torch.manual_seed(seed)
    inputs = {n: None if n in absent else v for n, v in random_inputs(layer, tokens).items()}
    states = {s.name: torch.randn([SIZES[a] for a in s.axes], dtype=torch.float64) for s in layer.states}
    leaves = {name: value for name, value in (inputs | states).items() if value is not None}
    for leaf in leaves.values():
        leaf.requires_grad_()
    outputs, finals = reference(layer, inputs, {}, states)
    cotangents = {name: torch.randn_like(value) for name, value in (outputs | finals).items()}
    loss = sum((value * cotangents[name]).sum() for name, value in (outputs | finals).items())
    expected = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    with torch.no_grad():
        got = gradients(derived, inputs, states, cotangents, chunk)
    for name, truth in zip(leaves, expected, strict=True):
        assert got[name].shape == truth.shape
        assert relative_error(got[name], truth) < 1e-9 or (got[name] - truth).norm() < 1e-9, name


@pytest.mark.parametrize("name", builtin_specs())
@pytest.mark.parametrize(("tokens", "chunk"), [(7, 3), (4, 4), (1, 2)])
def test_gradients_of_the_built_in_specs_are_autograds(name: str, tokens: int, chunk: int) -> None:
    """Protects the chain from a formula within a chunk to an input's own sum over heads of a group, batch and time."""
    check(read_layer(load_source(name)), tokens, chunk, 0)


@pytest.mark.parametrize("name", ["mamba2", "mamba3"])
def test_an_absent_input_has_no_part_in_any_gradient(name: str) -> None:
    """Protects what `when` leaves out."""
    check(read_layer(load_source(name)), 5, 2, 0, absent=("z",))


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(specs(), st.integers(1, 9), st.integers(1, 5), st.integers(0, 1000))
def test_gradients_of_random_recurrences_are_proved_and_autograds(
    text: str, tokens: int, chunk: int, seed: int
) -> None:
    """Protects what no built-in spec has: two reads, reads of the state before, several decays, terms and lets."""
    check(read_layer(Source("drawn.ssd", text)), tokens, chunk, seed)
