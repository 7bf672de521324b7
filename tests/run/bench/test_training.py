"""The benchmark of a training step on the CPU, at a size of seconds: the models run for real, only time is told by a table."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from ssdgen.cli.bench_table import as_text, tables
from ssdgen.compat.mamba_ssm import mamba_chunk_scan_combined
from ssdgen.nn import Mixer
from ssdgen.run.bench import training as study
from ssdgen.run.bench.measure import rounds
from ssdgen.run.bench.rows import OURS, Document, read_document, to_json
from tests.run.bench.fakes import Clock, FakeMeter
from tests.run.bench.made import ENVIRONMENT

SIZE = study.Size(layers=2, width=32, heads=4, p=16, n=32, vocabulary=64, batch=2, tokens=70)
SMALL = replace(ENVIRONMENT, l2_bytes=1)


class HostTimer:
    """The clock of the host; nobody counts its memory."""

    def microseconds(self, work: Callable[[], object]) -> float:
        begun = time.perf_counter()
        work()
        return 1e6 * (time.perf_counter() - begun)

    def peak_bytes(self, work: Callable[[], object]) -> int | None:
        work()
        return None


@pytest.fixture(autouse=True)
def one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "__defaults__", (0.0, Clock()))


def install(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Tensor], Tensor] = lambda y: y) -> None:
    """mamba_ssm's scan, computed by ours; what it returns goes through `spoil`."""

    class Keeps(torch.autograd.Function):
        """The identity, which keeps something for its backward pass as theirs does: what no gate has touched yet."""

        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            ctx.save_for_backward(torch.zeros_like(y))
            return y.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient

    def scan(*arguments: Any, **named: Any) -> Any:
        assert named["dt_softplus"]
        assert arguments[5] in study.CHUNKS
        return spoil(Keeps.apply(mamba_chunk_scan_combined(*arguments, **named)))

    module: Any = ModuleType("mamba_ssm.ops.triton.ssd_combined")
    module.mamba_chunk_scan_combined = scan
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


def measured(**named: Any) -> Document:
    return study.training(Mixer, FakeMeter(), HostTimer(), SMALL, 5, 1.0, size=SIZE, device="cpu", **named)


def test_steps_of_ours_and_of_a_peer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same model but for its scan: the same loss and gradients, both timed, the scans' share of a step, and what is stored;
    and the file says it all again."""
    install(monkeypatch)
    saved: list[Document] = []
    document = measured(save=saved.append)
    ours, *peers = document.steps
    assert [(s.family, s.name) for s in peers] == [("mamba_ssm", "chunk 128"), ("mamba_ssm", "chunk 256")]
    assert (ours.family, ours.shape, ours.layers) == (OURS, "2,70,4,1,16,32", 2)
    for step in document.steps:
        assert step.step_us is not None
        assert step.scan_us is not None
        assert step.share == pytest.approx(2 * 10.0 / step.step_us.median)
        assert step.loss == pytest.approx(4.16, abs=0.1), "the logarithm of the vocabulary"
        assert step.difference is not None
        assert step.difference < 1e-2
    assert ours.difference == 0
    more = [(s.stored_bytes or 0) - (ours.stored_bytes or 0) for s in peers]
    assert more == [2 * 2 * 70 * 4 * 16] * 2, "of what no gate has touched, in bf16"
    assert {(r.axis, r.ratio is not None) for r in document.ratios} == {(study.STEP, True), (study.SCAN, True)}
    (tmp_path / "d.json").write_text(to_json(document))
    assert read_document(tmp_path / "d.json") == document == saved[-1]
    text = as_text(tables(document))
    assert "2 layers of 32, scans of 2,70,4,1,16,32" in text
    assert "training step 2,70,4,1,16,32" in text


def test_a_peer_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row says so, and ours is measured all the same."""
    monkeypatch.setitem(sys.modules, "mamba_ssm.ops.triton.ssd_combined", None)
    document = measured()
    ours, *peers = document.steps
    assert ours.step_us is not None
    assert all(p.step_us is None and "ssd_combined" in p.note for p in peers)
    assert {r.reason for r in document.ratios} == {"the peer has no time"}


def test_another_model_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours would be compared with something that learns something else."""
    install(monkeypatch, spoil=lambda y: y.roll(1, 1))
    document = measured()
    assert all(p.step_us is None and p.note.startswith("another model") for p in document.steps[1:])


def test_the_default_is_a_model_of_130_million_parameters() -> None:
    with torch.device("meta"):
        model = study.Model(Mixer, replace(study.Size(), layers=1))
        more = study.Model(Mixer, replace(study.Size(), layers=2))
    one, two = (sum(p.numel() for p in m.parameters()) for m in (model, more))
    assert one + 23 * (two - one) == pytest.approx(130e6, rel=0.02)
    assert str(study.Size().shape) == "8,2048,24,1,64,128"


def test_a_step_learns() -> None:
    """The optimizer's parameters are the model's, and its tokens are the same each time."""
    trainer = study.Trainer(Mixer, SIZE, None, "cpu")
    before, _ = trainer.gradients()
    for _ in range(3):
        trainer.step()
    after, _ = trainer.gradients()
    assert after < before
    assert trainer.resident_bytes() > 3 * sum(p.nbytes for p in trainer.model.parameters()) - 1
