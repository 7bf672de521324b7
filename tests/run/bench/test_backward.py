"""The benchmark of the backward pass on the CPU: kernels in the emulator, compared for real; only time is told by a table."""

from __future__ import annotations

import math
from dataclasses import astuple, replace
from pathlib import Path

import pytest
import torch

from ssdgen import pipeline
from ssdgen.run.bench import backward as study
from ssdgen.run.bench.forward import Effort
from ssdgen.run.bench.measure import rounds
from ssdgen.run.bench.ours import differentiable_module
from ssdgen.run.bench.rows import DEFAULT, OURS, read_document, to_json
from ssdgen.run.bench.shapes import SHAPES, Shape
from ssdgen.run.verify import running
from tests.run.bench.fakes import Clock, FakeMeter
from tests.run.bench.made import ENVIRONMENT

SHAPE = Shape(2, 130, 4, 2, 32, 32)
SMALL = replace(ENVIRONMENT, l2_bytes=1)


def test_gradients_are_compared_with_float64_and_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both passes have rows of their own, which a file gives back; peers that are not here are notes."""
    monkeypatch.setattr(rounds, "__defaults__", (0.0, Clock()))
    monkeypatch.setenv("SSDGEN_CACHE_DIR", str(tmp_path))
    form, _ = pipeline.derive("mamba2")
    module = differentiable_module(pipeline.emit(pipeline.plan(form, {})))
    document = running("emulation", module)(
        lambda: study.backward(
            module, form.recurrence.layer, (SHAPE,), FakeMeter(), SMALL, Effort(5, 10), device="cpu", clock=lambda: 0.0
        )
    )
    rows = {(r.axis, r.family, r.name): r for r in document.rows}
    assert set(rows) == {(study.ALONE, OURS, DEFAULT), (study.BOTH, OURS, DEFAULT)}
    for row in rows.values():
        assert row.right, row
        assert 1e-4 < (row.error or 0) < 5e-3
        assert 1e-4 < (row.state_error or 0) < 5e-3
        assert row.graph_us is not None
    assert any("mamba_ssm" in note for note in document.notes)
    (tmp_path / "d.json").write_text(to_json(document))
    assert read_document(tmp_path / "d.json") == document


def test_a_wrong_gradient_gets_no_speed() -> None:
    """What is compared moves with each of the gradients that are: those of x, dt, B and C."""
    shape = replace(SHAPE, t=8)
    sizes = {"x": (2, 8, 4, 32), "dt": (2, 8, 4), "A": (4,), "B": (2, 8, 2, 32), "C": (2, 8, 2, 32), "D": (4,)}
    result = [torch.randn(sizes[name], dtype=torch.float64) for name in study.NAMES]
    before = study.compared(shape, result)
    for at, name in enumerate(study.NAMES):
        spoiled = [x + torch.randn(x.shape, dtype=x.dtype) if i == at else x for i, x in enumerate(result)]
        after = study.compared(shape, spoiled)
        moved = not (torch.allclose(before.y, after.y) and torch.equal(before.state, after.state))
        assert moved == (name in ("x", "dt", "B", "C")), name


def test_both_passes_move_what_each_of_them_does() -> None:
    """At the example shape every input once and y's gradient are 0.27 GB in, the inputs' gradients 0.14 GB out of it."""
    shape = SHAPES[0]
    alone, both = (kind(*astuple(shape)) for kind in (study.BackwardShape, study.BothShape))
    assert str(alone) == str(both) == str(shape)
    assert both.compulsory_bytes == alone.compulsory_bytes + shape.compulsory_bytes
    assert both.operations == alone.operations + shape.operations
    x = 2 * shape.tokens * shape.h * shape.p
    assert math.isclose(
        alone.compulsory_bytes, 3 * x + 8 * shape.tokens * shape.n + 8 * shape.tokens * shape.h, rel_tol=1e-3
    )
