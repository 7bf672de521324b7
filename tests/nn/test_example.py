"""The example that trains: it learns, and draws its curve. That it reaches 99 % takes minutes: the README has the run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "selective_copying.py"


@pytest.fixture
def example() -> ModuleType:
    found = importlib.util.spec_from_file_location("selective_copying", EXAMPLE)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_sequences(example: ModuleType) -> None:
    """What is to be said is what stands between the noise, in its order."""
    tokens, letters = example.sequences(5, torch.Generator().manual_seed(0))
    assert tokens.shape == (5, example.LENGTH + example.REMEMBERED)
    for row, want in zip(tokens, letters, strict=True):
        assert torch.equal(row[row < example.LETTERS], want)
        assert (row[example.LENGTH :] == example.MARKER).all()


def test_it_learns_and_draws(example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two letters of ten places are learned at once."""
    monkeypatch.setattr(example, "LENGTH", 8)
    monkeypatch.setattr(example, "REMEMBERED", 2)
    losses, accuracies = example.train("mamba2", 60, "cpu", batch=32)
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
    assert accuracies[-1][0] == 60
    example.draw("mamba2", losses, accuracies, tmp_path / "pictures" / "curve.png")
    assert (tmp_path / "pictures" / "curve.png").stat().st_size > 5000
