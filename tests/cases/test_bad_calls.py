"""A wrong call is refused before anything runs: by a message that names the tensor, what was expected in the spec's
axis letters, and what came. The same through the portable path and in front of the kernels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ssdgen.ir.report import Gate
from ssdgen.run.inputs import Case, Inputs, draw
from tests.cases.subject import BOTH, Subject, mamba2_sizes, subject

both = pytest.mark.parametrize("gate", BOTH)


@pytest.fixture
def mamba2() -> Subject:
    return subject("mamba2")


def call(mamba2: Subject, gate: Gate, **changed: Any) -> None:
    """A right call but for `changed`; None leaves an input out."""
    inputs = draw(mamba2.layer, Case(mamba2_sizes(t=5)))
    tensors = {k: v for k, v in (inputs.tensors | changed).items() if v is not None or k not in changed}
    mamba2.call(gate, Inputs(tensors, {}, inputs.states if "S0" not in changed else {}))


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "rank": ({"x": torch.randn(2, 5, 160)}, ValueError, r"`x`.*\[b t h p\].*\[2, 5, 160\]"),
    "rank of a tensor with two forms": ({"D": torch.randn(2, 3, 4)}, ValueError, r"`D`.*\[h p\].*\[h\].*\[2, 3, 4\]"),
    "batch": ({"dt": torch.randn(3, 5, 4)}, ValueError, r"`dt`\[b t h\].*\[3, 5, 4\].*\bb is 2\b.*`x`"),
    "time": ({"B": torch.randn(2, 6, 2, 24)}, ValueError, r"`B`\[b t g n\].*\bt is 5\b"),
    "heads": ({"A": -torch.ones(5)}, ValueError, r"`A`\[h\].*\[5\].*\bh is 4\b"),
    "groups that differ": ({"C": torch.randn(2, 5, 1, 24)}, ValueError, r"`C`.*\bg is 2\b.*`B`"),
    "groups that do not divide": (
        {"B": torch.randn(2, 5, 3, 24), "C": torch.randn(2, 5, 3, 24)}, ValueError, r"3 groups.*`B`.*4 heads.*`x`",
    ),
    "no groups": ({"B": torch.randn(2, 5, 0, 24), "C": torch.randn(2, 5, 0, 24)}, ValueError, "0 groups"),
    "integers": ({"x": torch.ones(2, 5, 4, 40, dtype=torch.int32)}, TypeError, r"`x`.*bfloat16.*int32"),
    "complex": ({"dt": torch.ones(2, 5, 4, dtype=torch.complex64)}, TypeError, r"`dt`.*float32.*complex64"),
    "mixed": ({"B": torch.randn(2, 5, 2, 24).half()}, TypeError, r"`B`.*dtype of `x`.*float32.*float16"),
    "optional mixed": ({"z": torch.randn(2, 5, 4, 40).half()}, TypeError, r"`z`.*dtype of `x`"),
    "no tensor": ({"A": [-1.0] * 4}, TypeError, r"`A`.*torch\.Tensor.*list"),
    "device": ({"dt": torch.empty(2, 5, 4, device="meta")}, ValueError, r"`dt`.*meta.*cpu"),
    "sign": ({"A": torch.ones(4)}, ValueError, r"`A`.*-inf, 0\).*1"),
    "nan in a signed input": ({"A": torch.full((4,), math.nan)}, ValueError, r"`A`.*nan"),
    "state rank": ({"S0": torch.randn(2, 4, 960)}, ValueError, r"`S0`.*\[b h p n\]"),
    "state size": ({"S0": torch.randn(2, 4, 24, 40)}, ValueError, r"`S0`\[b h p n\].*\bp is 40\b"),
    "state dtype": ({"S0": torch.randn(2, 4, 40, 24).half()}, TypeError, r"`S0`.*float32.*float16"),
    "missing": ({"C": None}, TypeError, r"\bC\b"),
    "unexpected keyword": ({"q": torch.randn(2, 5, 4, 40)}, TypeError, r"\bq\b"),
    "negative limit": ({"dt_min": -1.0}, ValueError, r"`dt_min`.*\[0, inf\].*-1"),
    "tensor for a scalar": ({"dt_max": torch.ones(())}, TypeError, r"`dt_max`.*number"),
}  # fmt: skip


@both
@pytest.mark.parametrize("what", WRONG)
def test_wrong_call(mamba2: Subject, gate: Gate, what: str) -> None:
    changed, error, message = WRONG[what]
    with pytest.raises(error, match=message):
        call(mamba2, gate, **changed)


BAD_CONFIGS: dict[str, Any] = {
    "chunk": 40, "scores": "fp8", "intra": "f32", "tile_p": 48, "tile_n": 24, "latency_x": 0, "latency_B": 11,
    "occupancy_compute_out": 33,
}  # fmt: skip


@pytest.mark.parametrize("knob", [*BAD_CONFIGS, "chunk_zero", "chunk_negative", "chunk_text"])
def test_bad_config(mamba2: Subject, knob: str) -> None:
    """A knob of a value that no kernel takes is refused by name, when the Config is made or used."""
    name = knob.split("_")[0] if knob.startswith("chunk") else knob
    value = BAD_CONFIGS.get(knob, {"chunk_zero": 0, "chunk_negative": -64, "chunk_text": "64"}.get(knob))
    inputs = draw(mamba2.layer, Case(mamba2_sizes(t=5)))
    with pytest.raises((ValueError, TypeError), match=name):
        mamba2.call("emulation", inputs, **{name: value})


def test_unknown_knob(mamba2: Subject) -> None:
    with pytest.raises(TypeError, match="blocksize"):
        mamba2.module.Config(blocksize=64)


def test_old_gpu(mamba2: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """cutile-python 43: sm_75 fails obscurely. The message names the device and what is supported."""
    import importlib

    runtime = importlib.import_module("._runtime", mamba2.module.__package__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(ValueError, match=r"Tesla T4.*7\.5.*8\.0"):
        runtime._check_device.__wrapped__("mamba2", 0)


@pytest.mark.parametrize("sizes", [{"p": -1}, {"n": 0.5}])
def test_init_state_sizes(mamba2: Subject, sizes: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        mamba2.module.init_state(2, 4, **sizes)


def test_init_state(mamba2: Subject) -> None:
    """Zeros in float32, of the spec's sizes unless others are given."""
    S = mamba2.module.init_state(2, 4)
    assert (S.shape, S.dtype, S.abs().sum().item()) == ((2, 4, 64, 128), torch.float32, 0.0)
    assert mamba2.module.init_state(1, 3, p=5, n=7).shape == (1, 3, 5, 7)
