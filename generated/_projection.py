"""The kernel of `projection.py`: one row times the rows of a matrix, bound by reading that, and how it is launched.

A block has some rows of the matrix, whole, in registers: it asks for all of them, then waits for the kernel before, and only
then reads the vector. So there is always more of the matrix on its way than the memory needs to be kept busy.

Copied verbatim beside the modules that ssdgen emits; it imports nothing of ssdgen.
"""

from __future__ import annotations

import cuda.tile as ct
from torch import Tensor

from . import _cut
from . import _runtime as _rt

BLOCK_BYTES = 81920
"""Of the matrix in a block, at most: 160 registers of each of its 128 threads."""

ROW_BYTES = 40960
"""Of a row, at most, and of the matrix in a block of which a multiprocessor is to hold RESIDENT."""

RESIDENT = 4
"""Blocks: by itself the compiler chooses fewer, which took 17.7 us instead of 15.1 for 10,576 rows of 2,560 on an H200, though
each thread spills 16 bytes for it. Of larger blocks a multiprocessor holds as many as there is room for."""

MOST_ROWS = 8
"""Of the matrix in a block."""

WARPS = 4
"""Of a block."""

BLOCKS = 2
"""Blocks a multiprocessor, at least, where rows are so few that they would be fewer."""


@ct.kernel
def multiply_row(
    x: ct.Array, norm: ct.Array, weight: ct.Array, bias: ct.Array, y: ct.Array, eps: float,
    STEPS: ct.Constant[int], TILE_K: ct.Constant[int], TILE_O: ct.Constant[int],
    WITH_NORM: ct.Constant[bool], WITH_BIAS: ct.Constant[bool], ONTO: ct.Constant[bool],
) -> None:  # fmt: skip
    """Some outputs of the row x[1 k], of its norm if WITH_NORM; with ONTO they are added to what y has."""
    ct.grid_dependency_control_launch_dependents()
    rows = ct.bid(0) * TILE_O + ct.arange(TILE_O, dtype=ct.int32)  # [O]
    place = ct.arange(TILE_K, dtype=ct.int32)  # [K], of a step
    matrix: tuple[ct.Tile, ...] = ()
    factors: tuple[ct.Tile, ...] = ()
    vector: tuple[ct.Tile, ...] = ()
    for step in ct.static_iter(range(STEPS)):
        column = step * TILE_K + place
        matrix = (*matrix, ct.gather(weight, (rows[:, None], column[None, :]), padding_value=0))  # [O, K]
        if WITH_NORM:
            factors = (*factors, ct.gather(norm, column, padding_value=0))  # [K]
    ct.grid_dependency_control_wait()
    for step in ct.static_iter(range(STEPS)):
        vector = (*vector, ct.gather(x, (0, step * TILE_K + place), padding_value=0))  # [K]

    products = ct.zeros((TILE_O, TILE_K), dtype=ct.float32)
    squares = ct.zeros((TILE_K,), dtype=ct.float32)
    for step in ct.static_iter(range(STEPS)):
        v = vector[step].astype(ct.float32)
        if WITH_NORM:
            squares = squares + v * v
            v = v * factors[step].astype(ct.float32)
        products = products + matrix[step].astype(ct.float32) * v[None, :]
    y_tile = ct.sum(products, axis=1)  # [O]
    if WITH_NORM:
        y_tile = y_tile * ct.rsqrt(ct.sum(squares) / x.shape[1] + eps)
    if WITH_BIAS:
        y_tile = y_tile + ct.gather(bias, rows, padding_value=0).astype(ct.float32)
    if ONTO:
        y_tile = y_tile + ct.gather(y, (0, rows), padding_value=0).astype(ct.float32)
    ct.scatter(y, (0, rows), y_tile.astype(y.dtype))


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel takes x[b k] and weight[o k]: one row, not longer than a block holds, a matrix that int32 reaches."""
    reach = (len(weight) - 1) * weight.stride(0) + (weight.shape[1] - 1) * weight.stride(1)
    row_bytes = weight.shape[1] * weight.element_size()
    return len(x) == 1 and len(weight) > 0 and 0 < row_bytes <= ROW_BYTES and reach <= _rt.LIMIT


def launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, eps: float, onto: bool, steady: bool, y: Tensor,
) -> None:  # fmt: skip
    """Launch `multiply_row` on checked tensors that fit; y[1 o] is written, or with `onto` added to.

    It reads `weight` and `norm` before it waits for the kernel before, so it may only begin early if neither that one, nor what
    still runs beside it, writes them.
    """
    length = weight.shape[1]
    step = _step(length)
    rows = _rows(weight, _cut.multiprocessors(x))
    small = rows * length * weight.element_size() <= ROW_BYTES
    _rt.launch(
        _rt.stream(x),
        _rt.hinted(multiply_row, RESIDENT if small else 0, WARPS),
        (_rt.ceil_div(len(weight), rows),),
        (
            x, _rt.given(norm, weight[0]), weight, _rt.given(bias, weight[0]), y, float(eps),
            _rt.ceil_div(length, step), step, rows, norm is not None, bias is not None, onto,
        ),
        early=steady,
    )  # fmt: skip


def _step(length: int) -> int:
    """Columns of a step: as many as cut the row evenly, if those are not too few."""
    even = next((t for t in (1024, 512, 256, 128) if length % t == 0), 0)
    return even or min(256, max(32, 1 << (length - 1).bit_length()))


def _rows(weight: Tensor, multiprocessors: int) -> int:
    """Rows of a block: as many as it holds, fewer where blocks would be too few for the GPU; a power of two."""
    rows = MOST_ROWS
    row_bytes = weight.shape[1] * weight.element_size()
    while rows > 1 and (rows * row_bytes > BLOCK_BYTES or len(weight) < rows * BLOCKS * multiprocessors):
        rows //= 2
    return rows
