"""Where a rounding decides which side of a maximum counts, no check asks for a gradient; everywhere else it does."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ssdgen import pipeline
from ssdgen.diagnostics import Source
from ssdgen.ir.layer import Layer
from ssdgen.run.bends import away_from_bends
from ssdgen.run.cases import sizes_for
from ssdgen.run.gradients import Trial, differentiated, truth
from ssdgen.run.inputs import Case, draw
from ssdgen.run.reference import reference
from ssdgen.run.verify import emulated
from ssdgen.spec import load_source, read_layer

SPEC = """
language 1
layer bent "An output with a bend"
axes b t h p n
sizes p = 8, n = 8
inputs
  q[b t h n], k[b t h n] : like v
  v[b t h p]             : f32
state S[b h p n] : f32
      S[t] = S[t-1] + outer(v, k)
output y[b t h p] : like v
       y = {output}
schedule
  chunk = 64
"""


def away(layer: Layer, inputs: dict[str, Tensor], margin: float) -> dict[str, Tensor]:
    return away_from_bends(layer, margin, lambda bent: reference(bent, inputs)[0])


@pytest.mark.parametrize(
    ("output", "meeting"),
    [
        ("max(S[t] . q, 1)", lambda read: [(read, 1.0)]),
        ("min(S[t] . q, 1)", lambda read: [(read, 1.0)]),
        ("abs(S[t] . q)", lambda read: [(read, 0.0)]),
        ("relu(S[t] . q)", lambda read: [(read, 0.0)]),
        ("clamp(S[t] . q, -1, 1)", lambda read: [(read, -1.0), (read, 1.0)]),
        ("1 / max(abs(S[t] . q), 2)", lambda read: [(read.abs(), 2.0), (read, 0.0)]),
    ],
)
def test_every_operation_that_bends(output: str, meeting: Callable[[Tensor], list[tuple[Tensor, float]]]) -> None:
    """Element by element, as this output has the axes of what it reads."""
    layer = read_layer(Source("bent.ssd", SPEC.replace("{output}", output)))
    torch.manual_seed(0)
    inputs = {n: torch.randn(2, 9, 3, 8, dtype=torch.float64) for n in ("q", "k", "v")}
    states = torch.einsum("bthp,bthn->bthpn", inputs["v"], inputs["k"]).cumsum(1)
    read = torch.einsum("bthpn,bthn->bthp", states, inputs["q"])
    expected = torch.ones_like(read, dtype=torch.bool)
    for x, point in meeting(read):
        expected &= (x - point).abs() > 0.1 * (x.abs() + abs(point)).mean()
    assert torch.equal(away(layer, inputs, 0.1)["y"], expected)
    assert 0.1 < expected.double().mean() < 1


def test_what_bends_in_inputs_alone_is_asked_for() -> None:
    """And an output without any bend, and one that is at its bend everywhere: of none is anything left out."""
    for output in ("S[t] . q", "max(v, 1) + S[t] . q", "max(S[t] . q, S[t] . q)"):
        layer = read_layer(Source("bent.ssd", SPEC.replace("{output}", output)))
        assert away(layer, {n: torch.randn(2, 9, 3, 8) for n in ("q", "k", "v")}, 0.1) == {}


def test_the_normaliser_of_mlstm() -> None:
    """It has no channels, and neither has what is left out: all of a token and head."""
    layer = read_layer(load_source("mlstm"))
    inputs = draw(layer, Case(sizes_for(layer, 70), dtype="f32"))
    found = away(layer, dict(inputs.tensors), 0.1)["y"]
    assert found.shape == (2, 70, 4, 1)
    assert 0 < (~found).sum() < found.numel() / 4


def test_a_token_at_its_bend() -> None:
    """Kernels and the loop over tokens come down on different sides of it, and the gradients of all that the token read are
    off. Without it they are right, at all other tokens too."""
    plan = pipeline.plan(pipeline.derive("mlstm")[0], {})
    module = importlib.import_module("generated.mlstm")
    layer = plan.form.recurrence.layer
    trial = Trial("", Case(sizes_for(layer, 70), dtype="f32", seed=21))
    inputs = draw(layer, trial.case)
    q, k = inputs.tensors["q"].double(), inputs.tensors["k"].double()
    forget = torch.sigmoid(inputs.tensors["f"].double())
    write = torch.sigmoid(inputs.tensors["i"].double()) / q.shape[-1] ** 0.5
    normaliser = inputs.states["N"].double()
    for t in range(70):
        normaliser = forget[:, t, :, None] * normaliser + write[:, t, :, None] * k[:, t]
        if t >= 60:
            q[:, t] /= (normaliser * q[:, t]).sum(
                -1, keepdim=True
            )  # what is read is 1 now, but for the rounding to float32
    inputs = replace(inputs, tensors={**inputs.tensors, "q": q.float()})
    smooth = away_from_bends(layer, 1e-3, lambda bent: reference(bent, inputs.tensors, inputs.params, inputs.states)[0])
    assert not smooth["y"][:, 60:].any()
    errors = {}
    for name, left in (("whole", {}), ("smooth", smooth)):
        wanted = truth(plan, inputs, trial, "emulation", left)
        with emulated(module):
            got = differentiated(plan, inputs, trial, module.forward, left)
        errors[name] = {
            n: float((got[n].double() - w.value).norm() / w.value.norm()) / w.bound for n, w in wanted.items()
        }
    assert min(errors["whole"][n] for n in ("q", "k", "i")) > 10
    assert max(errors["smooth"].values()) < 1
