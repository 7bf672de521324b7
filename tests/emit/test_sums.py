"""Sums of the parts of a gradient, in the emulator, against float64; memory that no part fills is not read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from generated import _runtime, _sums
from ssdgen.run.checks import one_thread, poisoned_memory, relative_error
from ssdgen.run.emulate import launch


def test_several_sums() -> None:
    """Those of one size in one launch, up to three, each in the dtype it is for; the others apart, and all in their order."""
    shapes = [(3, 200, 5), (3, 200, 5, 1), (2, 30, 70), (3, 200, 5), (3, 200, 5), (3, 200, 5)]
    dtypes = [torch.float32, torch.bfloat16, *[torch.float32] * 4]
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(shape, generator=generator) for shape in shapes]
    likes = [torch.empty(p.shape[2], dtype=dtype) for p, dtype in zip(parts, dtypes, strict=True)]
    grids = []

    def counted(kernel: Any, grid: tuple[int, ...], args: Sequence[Any]) -> None:
        grids.append(grid)
        launch(kernel, grid, args)

    with one_thread(), poisoned_memory(), _runtime.launcher(counted):
        found = _sums.summed_together(list(zip(parts, likes, strict=True)))
    assert grids == [(1, 3), (1, 2), (2,)]
    for p, like, got in zip(parts, likes, found, strict=True):
        assert (got.shape, got.dtype) == (like.shape, like.dtype)
        want = p.double().sum((0, 1)).reshape(like.shape)
        assert relative_error(got, want) <= (1e-6 if like.dtype == torch.float32 else 3e-3)


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
