"""A kernel that the compiler takes apart: cuda-tile 1.7.0 with tileiras 13.4.92, for sm_90. What it reads of `cache` serves two
layouts of registers; the compiler makes a second load of it for the other, which it puts behind the stores."""

from __future__ import annotations

import cuda.tile as ct


@ct.kernel
def rolling(
    x: ct.Array, weight: ct.Array, taps: ct.Array, y: ct.Array, cache: ct.Array,
    TILE_K: ct.Constant[int], TILE_O: ct.Constant[int], WIDTH: ct.Constant[int],
) -> None:  # fmt: skip
    """Products of a row with those of a matrix, through a convolution whose cache rolls on."""
    rows = ct.bid(0) * TILE_O + ct.arange(TILE_O, dtype=ct.int32)  # [O]
    place = ct.arange(TILE_K, dtype=ct.int32)  # [K]
    matrix = ct.gather(weight, (rows[:, None], place[None, :]), padding_value=0)  # [O, K]
    inputs: tuple[ct.Tile, ...] = ()
    for k in ct.static_iter(range(WIDTH - 1)):
        inputs = (*inputs, ct.gather(cache, (0, rows, k), padding_value=0))  # [O]
    row = ct.gather(x, (0, place), padding_value=0)  # [K]
    inputs = (*inputs, ct.sum(matrix * row[None, :], axis=1))
    total = ct.zeros((TILE_O,), dtype=ct.float32)
    for k in ct.static_iter(range(WIDTH)):
        total = total + ct.gather(taps, (rows, k), padding_value=0) * inputs[k]
    for k in ct.static_iter(range(WIDTH - 1)):
        ct.scatter(cache, (0, rows, k), inputs[k + 1])
    ct.scatter(y, (0, rows), total)
