"""A whole model of transformers, whose two functions are exchanged for the drop-ins: prefill, then token by token."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import ssdgen.compat.mamba_ssm as ours
from ssdgen.run.checks import relative_error


def test_a_model_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same logits in float32 as from its own torch path; every layer calls them, the prefill once, each token once."""
    theirs = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    torch.manual_seed(0)
    config = theirs.Mamba2Config(
        num_heads=4, head_dim=16, hidden_size=32, state_size=24, n_groups=2, chunk_size=16, num_hidden_layers=2,
        vocab_size=50,
    )  # fmt: skip
    model = theirs.Mamba2ForCausalLM(config).eval()
    tokens = torch.randint(0, 50, (2, 37))
    calls = []

    def logits() -> torch.Tensor:
        with torch.no_grad():
            begun = model(tokens[:, :33], use_cache=True)
            rows, cache = [begun.logits], begun.cache_params
            for i in range(33, 37):
                step = model(tokens[:, i : i + 1], cache_params=cache, use_cache=True)
                rows.append(step.logits)
        return torch.cat(rows, 1)

    def counted(name: str) -> Any:
        def function(*arguments: Any, **named: Any) -> Any:
            calls.append(name)
            return getattr(ours, name)(*arguments, **named)

        return function

    with pytest.MonkeyPatch.context() as plain:
        for name in ("mamba2_chunk_scan", "mamba2_selective_state_update"):
            plain.setattr(theirs, name, inspect.unwrap(getattr(theirs, name)))
        want = logits()
    monkeypatch.setattr(theirs, "mamba2_chunk_scan", counted("mamba_chunk_scan_combined"))
    monkeypatch.setattr(theirs, "mamba2_selective_state_update", counted("selective_state_update"))
    got = logits()
    assert calls == ["mamba_chunk_scan_combined"] * 2 + ["selective_state_update"] * 8
    assert relative_error(got, want) < 1e-5
