"""Sums of the parts of a gradient, in the emulator, against float64; memory that no part fills is not read."""

from __future__ import annotations

import pytest
import torch

from generated import _runtime, _sums
from ssdgen.run.checks import one_thread, poisoned_memory, relative_error
from ssdgen.run.emulate import launch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "over", "across"),
    [
        ((3, 200, 5), (0, 1), 1),  # A[h]
        ((2, 7, 4, 70), (0, 1), 1),  # D[h p]
        ((2, 130, 4, 70), (0, 1), 70),  # D[h] of parts [h p]
        ((2, 3, 6, 1), (0, 1), 1),
        ((3, 20, 5), (1,), 1),  # w[b h]
        ((9, 2, 40, 2, 30), (0,), 1),  # B[b t g n], of nine blocks that share a group
    ],
)
def test_sums(shape: tuple[int, ...], over: tuple[int, ...], across: int, dtype: torch.dtype) -> None:
    """In float32 to its rounding, in bfloat16 as the float32 sum rounds."""
    parts = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    want = parts.double().sum(over)
    want = want.sum(-1) if across > 1 else want
    with one_thread(), poisoned_memory(), _runtime.launcher(launch):
        got = _sums.summed(parts, over, torch.empty(want.shape, dtype=dtype), across)
    assert got.dtype == dtype
    assert relative_error(got, want) <= (1e-6 if dtype == torch.float32 else 3e-3)
