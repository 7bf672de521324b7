"""torch.compile traces the whole portable forward pass: no graph break, the same values and gradients."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest
import torch

from ssdgen.run.checks import relative_error
from ssdgen.run.inputs import Case, draw
from ssdgen.spec import load_source, read_layer

SPECS = ("mamba2", "mlstm", "retnet", "linear_attention", "simple_gla", "state_space_duality")
TOKENS = 133
BOUND = 1e-6
"""float32, the same operations in the same order."""


def inputs_of(name: str) -> dict[str, Any]:
    layer = read_layer(load_source(name))
    sizes = {a.name: 16 for a in layer.axes} | {layer.batch: 2, layer.time: TOKENS, layer.head: 4}
    sizes |= {g.axis: 2 for g in layer.groups}
    return draw(layer, Case(sizes, dtype="f32"), "cpu").keywords()


@pytest.mark.parametrize("name", SPECS)
def test_forward_is_one_graph(name: str) -> None:
    module = importlib.import_module(f"generated.{name}")
    inputs = inputs_of(name)
    leader = next(iter(inputs))
    inputs[leader] = inputs[leader].requires_grad_()
    expected = module.forward(**inputs)
    (wanted,) = torch.autograd.grad(expected[0].square().sum(), inputs[leader])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        got = torch.compile(module.forward, fullgraph=True, backend="aot_eager")(**inputs)
    (gradient,) = torch.autograd.grad(got[0].square().sum(), inputs[leader])
    for value, want in zip(got, expected, strict=True):
        assert relative_error(value.detach(), want.detach()) <= BOUND
    assert relative_error(gradient, wanted) <= BOUND
