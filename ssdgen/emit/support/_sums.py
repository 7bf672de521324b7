"""Sums of the parts of a gradient that blocks leave, in float32 and in a fixed order, rounded once: no atomics, no copies.

Copied verbatim beside the modules that ssdgen emits; it imports nothing of ssdgen.
"""

from __future__ import annotations

import math

import cuda.tile as ct
from torch import Tensor

from . import _runtime as _rt
from ._direct import store_direct
from ._tiles import ZERO, await_previous

FEW = (64, 8192)
"""Columns of a block, and elements that it loads at a time, where rows are many and columns few: there the blocks are few, and
each waits for as much memory at once as it can. Neither depends on the number of rows, which compiles nothing."""

MANY = (256, 2048)
"""The same where columns are many and rows few, as many as blocks share the heads of a group."""

WHOLE = (256, 16384)
"""The same where a line is summed over as well, of which a block has all columns: 9.5 us on an H200 for D's gradient at
4,16384,8,1,64,128, where 8192 elements take 11.2."""


@ct.kernel
def sums(
    parts: ct.Array,
    total: ct.Array,
    TILE_S: ct.Constant[int], TILE_K: ct.Constant[int],
    ACROSS: ct.Constant[bool],
) -> None:  # fmt: skip
    """total[line k] = the sum of parts[row line k] over rows; ACROSS, total[line 0] is that over k too."""
    await_previous()
    tiles = ct.cdiv(parts.shape[2], TILE_K)
    line, tile = ct.bid(0) // tiles, ct.bid(0) % tiles
    found = ct.zeros((TILE_K,), dtype=ct.float32)
    for rows in range(ct.cdiv(parts.shape[0], TILE_S)):
        some = ct.load(parts, (rows, line, tile), (TILE_S, 1, TILE_K), padding_mode=ZERO, allow_tma=False)
        found = found + ct.sum(ct.reshape(some, (TILE_S, TILE_K)), axis=0)  # [K]
    if ACROSS:
        store_direct(total, (line, 0), (1, 1), ct.sum(found, axis=0), False)
    else:
        store_direct(total, (line, tile), (1, TILE_K), found, False)


def summed(parts: Tensor, over: tuple[int, ...], like: Tensor, across: int = 1) -> Tensor:
    """The sum of contiguous float32 `parts` over the dimensions `over`, behind the kernel that made them: new memory of the
    shape and dtype of `like`. The last dimension, of length `across`, 256 at most, is summed over too if that is more than 1.

    `over` are the first dimensions, one or two, or the second one alone.
    """
    total = _rt.empty(like.shape, like.dtype, like.device)
    if over == (1,):
        lines = parts.shape[0]
        view = parts.reshape(lines, parts.shape[1], -1).transpose(0, 1)
    else:
        rows = math.prod(parts.shape[: len(over)])
        lines = math.prod(parts.shape[len(over) :]) // across if across > 1 else 1
        view = parts.reshape(rows, lines, -1)
    most, elements = MANY if over == (0,) else WHOLE if across > 1 else FEW
    columns = min(most, _power_of_two(view.shape[2]))
    _rt.launch(
        _rt.stream(parts),
        sums,
        (lines * _rt.ceil_div(view.shape[2], columns),),
        (view, total.view(lines, -1), elements // columns, columns, across > 1),
        early=True,
    )
    return total


def _power_of_two(n: int) -> int:
    """The least power of two that is not below n, which is positive."""
    return 1 << (n - 1).bit_length()
