"""The drop-ins beside the functions that they stand in for, on a GPU with mamba_ssm: the same calls, results and dtypes."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import ssdgen.compat.mamba_ssm as ours
from tests.compat.test_scan import near
from tests.compat.test_update import with_heads
from tests.compat.truth import drawn

APART = 1e-2
"""Each is within 5e-3 of the truth in bf16."""


def same(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> None:
    for got, want in zip(ours, theirs, strict=True):
        assert (got.dtype, got.shape, got.device) == (want.dtype, want.shape, want.device)
        near(got.cpu(), want.cpu(), APART)


def there(x: Tensor, device: str) -> Tensor:
    """`x` on a device with its strides of 0, which `.to` alone does not keep."""
    one = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())
    return x[one].to(device).expand(x.shape)


def compare_scans(theirs: Any, device: str) -> None:
    """Whole rows, then packed sequences, longer than a chunk, from which theirs returns states too."""
    i = {k: v.to(device) for k, v in drawn(2, 300, 8, 2, 64, 128, torch.bfloat16).items()}
    start = torch.randn(2, 8, 64, 128, device=device)
    options: dict[str, Any] = {"chunk_size": 128, "dt_softplus": True, "dt_limit": (0.005, 0.2)}
    options["return_final_states"] = True
    functions = ours.mamba_chunk_scan_combined, theirs.mamba_chunk_scan_combined
    with torch.no_grad():
        same(*(f(**i, **options, initial_states=start) for f in functions))
        seq_idx = (torch.arange(300, device=device)[None] >= torch.tensor([[170], [150]], device=device)).int()
        same(*(f(**i, **options, initial_states=start, seq_idx=seq_idx) for f in functions))
        row = {k: v[:1] if v.dim() > 2 else v for k, v in i.items()}
        packed = {"cu_seqlens": torch.tensor([0, 170, 300], dtype=torch.int32, device=device), "seq_idx": seq_idx[:1]}
        same(*(f(**row, **options, **packed, initial_states=start[:1], return_varlen_states=True) for f in functions))
        finished = i | {"dt": i["dt"] / 20}
        same(*(f(**finished, **options | {"dt_softplus": False}, initial_states=start) for f in functions))


def compare_updates(theirs: Any, device: str) -> None:
    """A head's numbers expanded and one a channel; with slots, of which one row has none."""
    for tie in (True, False):
        state, values = with_heads(4, 512, 128, 2, torch.bfloat16, True, tie, rows=6)
        values = {k: there(v, device) for k, v in values.items()}
        for indices in (None, torch.tensor([5, -1, 0, 3], dtype=torch.int32, device=device)):
            results = []
            for function in (ours.selective_state_update, theirs.selective_state_update):
                moved = state.float().to(device)
                out = function(moved, **values, dt_softplus=True, state_batch_indices=indices)
                results.append((out, moved))
            same(*results)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_scans_of_mamba_ssm() -> None:
    try:
        theirs = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
    except ImportError as missing:
        pytest.skip(f"not compared: {missing}")
    compare_scans(theirs, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_updates_of_mamba_ssm() -> None:
    try:
        theirs = importlib.import_module("mamba_ssm.ops.triton.selective_state_update")
    except ImportError as missing:
        pytest.skip(f"not compared: {missing}")
    compare_updates(theirs, "cuda")


def test_the_comparison_itself() -> None:
    """What the two above call, against ourselves on the CPU, so that they do not fail by their own code where they can run."""
    compare_scans(ours, "cpu")
    compare_updates(ours, "cpu")
    wrong = SimpleNamespace(mamba_chunk_scan_combined=lambda **named: (named["x"], named["initial_states"]))
    with pytest.raises(AssertionError):
        compare_scans(wrong, "cpu")
