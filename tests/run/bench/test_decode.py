"""One-token steps: what is measured, that a wrong one gets no time, and what stands beside them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from generated import mamba2
from ssdgen.run.bench.decode import (
    SHAPES,
    _selective,
    decode,
    moved_bytes,
    on_the_cpu,
    others,
    step_inputs,
    truth,
)
from ssdgen.run.bench.measure import rounds
from ssdgen.run.bench.rows import OURS, read_document, to_json
from ssdgen.run.bench.shapes import Shape
from ssdgen.run.checks import relative_error
from ssdgen.run.reference import reference
from ssdgen.spec import load_source, read_layer
from tests.run.bench.fakes import Clock, FakeMeter
from tests.run.bench.made import ENVIRONMENT

LAYER = read_layer(load_source("mamba2"))
SMALL = Shape(2, 1, 4, 2, 32, 16)
NOTHING_IN_L2 = replace(ENVIRONMENT, l2_bytes=1)


def stand_in(spoil: Callable[[torch.Tensor], torch.Tensor] = lambda y: y) -> Callable[..., torch.Tensor]:
    """mamba_ssm's step, computed by ours from the numbers that it is given repeated."""

    def update(state: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, **named: Any) -> torch.Tensor:
        assert named["dt_softplus"]
        ties = (dt.stride(2), A.stride()[1:], named["D"].stride(1), named["dt_bias"].stride(1))
        assert ties == (0, (0, 0), 0, 0), "one number a head is repeated without a copy, or theirs takes its slow path"
        return spoil(
            mamba2.step(state, x, dt[:, :, 0], A[:, 0, 0], B, C, D=named["D"][:, 0], dt_bias=named["dt_bias"][:, 0])
        )

    return update


@pytest.fixture
def one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "__defaults__", (0.0, Clock()))


def install(monkeypatch: pytest.MonkeyPatch, update: Callable[..., torch.Tensor]) -> None:
    module = ModuleType("selective_state_update")
    module.selective_state_update = update  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mamba_ssm.ops.triton.selective_state_update", module)
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


def measured(**named: Any) -> Any:
    return decode(
        LAYER, mamba2, FakeMeter(), NOTHING_IN_L2, 5, 100.0, shapes=[SMALL], contexts=(3,), device="cpu", **named
    )


def test_a_whole_run(monkeypatch: pytest.MonkeyPatch, one_round: None, tmp_path: Any) -> None:
    """Ours and a peer with states of both dtypes; then a step after a context; and the file says it all again."""
    install(monkeypatch, stand_in())
    saved: list[Any] = []
    document = measured(peers=("mamba_ssm",), save=saved.append)
    assert [(r.shape.rpartition(", ")[2], r.family) for r in document.rows] == [
        ("f32 state", OURS), ("f32 state", "mamba_ssm"), ("bf16 state", OURS), ("bf16 state", "mamba_ssm"),
    ]  # fmt: skip
    assert all(r.right and r.graph_us and r.bandwidth and r.host_us for r in document.rows)
    assert [r.ratio for r in document.ratios] == [1.0, 1.0]
    assert [s.name for s in document.scale][:1] == ["one step"]
    assert "0 bytes allocated" in document.scale[0].note
    file = tmp_path / "decode.json"
    file.write_text(to_json(document))
    assert read_document(file) == document == saved[-1]


def test_nothing_of_the_context_but_its_state_is_there_while_steps_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes away among the steps would count as memory that they give back."""
    forward = mamba2.forward
    outputs: list[weakref.ref[torch.Tensor]] = []

    class Checked(FakeMeter):
        def capture(self, *arguments: Any) -> Any:
            assert all(y() is None for y in outputs)
            return super().capture(*arguments)

    def noted(**named: Any) -> Any:
        y, state = forward(**named)
        outputs.append(weakref.ref(y))
        return y, state

    monkeypatch.setattr(mamba2, "forward", noted)
    decode(LAYER, mamba2, Checked(), NOTHING_IN_L2, 5, 100.0, shapes=(), contexts=(3,), peers=(), device="cpu")
    assert len(outputs) == 1


def test_a_wrong_step_gets_no_time(monkeypatch: pytest.MonkeyPatch, one_round: None) -> None:
    install(monkeypatch, stand_in(lambda y: y * 1.05))
    document = measured(peers=("mamba_ssm",))
    wrong = [r for r in document.rows if r.family != OURS]
    assert wrong
    assert all(r.graph_us is None and "wrong" in r.note for r in wrong)
    assert all(r.ratio is None for r in document.ratios)


def test_a_state_that_is_not_moved_is_wrong(monkeypatch: pytest.MonkeyPatch, one_round: None) -> None:
    """y may be right all the same: the state after the step is compared too."""
    step = mamba2.step
    monkeypatch.setattr(mamba2, "step", lambda S, **named: step(S.clone(), **named))
    document = decode(
        LAYER, mamba2, FakeMeter(), NOTHING_IN_L2, 5, 100.0, shapes=[SMALL], contexts=(), peers=(), device="cpu"
    )
    assert [r.graph_us for r in document.rows] == [None, None]


def test_a_peer_that_is_not_here_is_noted() -> None:
    notes: list[str] = []
    assert others(("FlashInfer",), notes) == []
    assert notes[0].startswith("FlashInfer is not measured")


def test_no_shape_is_begun_after_its_time(one_round: None) -> None:
    document = measured(peers=(), clock=Clock(tick=60.0))
    assert len(document.rows) < 2
    assert any("the time was up" in note for note in document.notes)


def test_the_truth_is_the_token_loop() -> None:
    """The portable form that steps are compared with, held to the loop over tokens that is made from the spec alone."""
    inputs = step_inputs(LAYER, SMALL, torch.float32, "cpu")
    y, state = truth(LAYER, mamba2, inputs)
    tensors = {n: x[:, None] if n in ("x", "dt", "B", "C") else x for n, x in inputs.tensors.items() if n != "out"}
    outputs, finals = reference(LAYER, tensors, {}, inputs.states)
    assert relative_error(y, outputs["y"][:, 0]) < 1e-12
    assert relative_error(state, finals["S"]) < 1e-12


def test_bytes_are_those_of_the_state_read_and_written() -> None:
    """At the shape of the target: 168 MB each way in float32, and little else."""
    state = 64 * 80 * 64 * 128 * 4
    assert 2 * state < moved_bytes(SHAPES[2], torch.float32) < 2.02 * state
    assert moved_bytes(SHAPES[2], torch.bfloat16) < 1.04 * state


def test_on_the_cpu_both_compute_the_same() -> None:
    """transformers' torch path, called as for the GPU, gives the truth too."""
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    inputs = step_inputs(LAYER, SMALL, torch.float32, "cpu")
    inputs = replace(inputs, tensors={name: x.float() for name, x in inputs.tensors.items()})
    y, state = truth(LAYER, mamba2, inputs)
    (got,) = _selective(modeling.mamba2_selective_state_update.__wrapped__, inputs)
    assert relative_error(got, y) < 1e-5
    assert relative_error(inputs.states["S"], state) < 1e-5
    names = [s.name for s in on_the_cpu(LAYER, mamba2)]
    assert names == ["ours on the CPU", "transformers on the CPU"]
