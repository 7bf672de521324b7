"""Sums of the parts of a gradient that blocks leave, in float32 and in a fixed order, rounded once: no atomics, no copies.

Copied verbatim beside the modules that ssdgen emits; it imports nothing of ssdgen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import cuda.tile as ct
from torch import Tensor

from . import _runtime as _rt
from ._direct import store_direct
from ._tiles import ZERO, await_previous

FEW = (64, 2048)
"""Columns of a block, and elements that it loads at a time, where rows are many and columns few: there the blocks are few, and
each waits for as much memory at once as it can. Neither depends on the number of rows, which compiles nothing."""

MANY = (256, 2048)
"""The same where columns are many and rows few, as many as blocks share the heads of a group."""

WHOLE = (256, 16384)
"""The same where a line is summed over as well, of which a block has all columns: 9.5 us on an H200 for D's gradient at
4,16384,8,1,64,128, where 8192 elements take 11.2."""

TOGETHER = 3
"""Sums of one size that a launch makes, at most."""

WARPS = 8
"""Worker warps of such a launch, whose blocks are as few as there are sums. More elements at a time, or fewer warps, are more
instructions to read than a block runs: A's and D's gradients took 13.7 us on an H200 at 4,16384,8,1,64,128 with 8192 elements
and the compiler's warps, and 8.5 less so."""


@ct.function
def sum_of(parts: ct.Array, line: int, tile: int, TILE_S: int, TILE_K: int) -> ct.Tile:
    """The sum of parts[row line k] over rows, for a tile of k: [K]."""
    found = ct.zeros((TILE_K,), dtype=ct.float32)
    for rows in range(ct.cdiv(parts.shape[0], TILE_S)):
        some = ct.load(parts, (rows, line, tile), (TILE_S, 1, TILE_K), padding_mode=ZERO, allow_tma=False)
        found = found + ct.sum(ct.reshape(some, (TILE_S, TILE_K)), axis=0)  # [K]
    return found


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
    found = sum_of(parts, line, tile, TILE_S, TILE_K)  # [K]
    if ACROSS:
        store_direct(total, (line, 0), (1, 1), ct.sum(found, axis=0), False)
    else:
        store_direct(total, (line, tile), (1, TILE_K), found, False)


@ct.kernel
def several_sums(
    parts: ct.Array, parts_2: ct.Array, parts_3: ct.Array,
    total: ct.Array, total_2: ct.Array, total_3: ct.Array,
    TILE_S: ct.Constant[int], TILE_K: ct.Constant[int],
) -> None:  # fmt: skip
    """The same of two or three, which are of one shape and have a line."""
    await_previous()
    tile = ct.bid(0)
    if ct.bid(1) == 0:
        store_direct(total, (0, tile), (1, TILE_K), sum_of(parts, 0, tile, TILE_S, TILE_K), False)
    elif ct.bid(1) == 1:
        store_direct(total_2, (0, tile), (1, TILE_K), sum_of(parts_2, 0, tile, TILE_S, TILE_K), False)
    else:
        store_direct(total_3, (0, tile), (1, TILE_K), sum_of(parts_3, 0, tile, TILE_S, TILE_K), False)


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


def summed_together(several: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """`summed` over the first two dimensions of every (parts, like), as many of one size in a launch as it makes."""
    totals: dict[int, Tensor] = {}
    sizes = [(parts.shape[:2].numel(), parts.shape[2:].numel()) for parts, _ in several]
    for size in dict.fromkeys(sizes):
        alike = [at for at, own in enumerate(sizes) if own == size]
        for first in range(0, len(alike), TOGETHER):
            some = alike[first : first + TOGETHER]
            totals.update(zip(some, _summed_at_once([several[at] for at in some]), strict=True))
    return [totals[at] for at in range(len(several))]


def _summed_at_once(some: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The same of at most TOGETHER of one size."""
    if len(some) == 1:
        return [summed(some[0][0], (0, 1), some[0][1])]
    parts = [x.reshape(math.prod(x.shape[:2]), 1, -1) for x, _ in some]
    totals = [_rt.empty(like.shape, like.dtype, like.device) for _, like in some]
    views = [x.view(1, -1) for x in totals]
    length, (most, elements) = parts[0].shape[2], FEW
    columns = min(most, _power_of_two(length))
    _rt.launch(
        _rt.stream(parts[0]),
        _rt.hinted(several_sums, 0, WARPS),
        (_rt.ceil_div(length, columns), len(some)),
        (*(*parts, parts[0])[:TOGETHER], *(*views, views[0])[:TOGETHER], elements // columns, columns),
        early=True,
    )
    return totals


def _power_of_two(n: int) -> int:
    """The least power of two that is not below n, which is positive."""
    return 1 << (n - 1).bit_length()
