"""Device functions of the kernels of steps: tiles moved straight between memory and registers, and slots of a pool.

Copied verbatim beside the modules that ssdgen emits.
"""

from __future__ import annotations

import cuda.tile as ct

from ._tiles import ZERO


@ct.function
def load_direct(array: ct.Array, index: tuple[int, ...], shape: tuple[int, ...], whole: bool) -> ct.Tile:
    """As `load`, without TMA; `whole` promises that the tile lies inside the array, so that nothing is compared."""
    if whole:
        tile = ct.load(array, index, shape, check_bounds=False, allow_tma=False)
    else:
        tile = ct.load(array, index, shape, padding_mode=ZERO, allow_tma=False)
    return ct.reshape(tile, ct.static_eval(tuple(n for n in shape if n != 1)))


@ct.function
def store_direct(array: ct.Array, index: tuple[int, ...], shape: tuple[int, ...], tile: ct.Tile, whole: bool) -> None:
    """As `store`, without TMA; `whole` as in `load_direct`."""
    ct.store(array, index, ct.astype(ct.reshape(tile, shape), array.dtype), check_bounds=not whole, allow_tma=False)


@ct.function
def slot_at(slots: ct.Array, row: int, count: int) -> ct.Tile:
    """The slot of a row of the batch; -1 if it has none of the `count` slots of its pool."""
    slot = ct.load(slots, (row,), (1,)).item()
    return ct.where((slot >= 0) & (slot < count), slot, -1)
