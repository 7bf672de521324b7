"""The kernel of `norms.py`, and how it is launched. A block computes a row, or a group's part of it, held in registers.

Copied verbatim beside the modules that ssdgen emits; it imports nothing of ssdgen.
"""

from __future__ import annotations

import cuda.tile as ct
from torch import Tensor

from . import _runtime as _rt
from ._tiles import await_previous, silu

LONGEST = 16384
"""The longest part of a row that a block holds."""


@ct.function
def part(array: ct.Array, row: int, group: int, place: ct.Tile) -> ct.Tile:
    """The numbers [D] at `place` of a group's part of a row in float32; 0 behind its end."""
    return ct.gather(array, (row, group, place), padding_value=0).astype(ct.float32)


@ct.kernel
def normalise(
    x: ct.Array, weight: ct.Array, gate: ct.Array, add: ct.Array, y: ct.Array, eps: float,
    TILE: ct.Constant[int], WITH_GATE: ct.Constant[bool], WITH_ADD: ct.Constant[bool],
) -> None:  # fmt: skip
    """One group of a row; `add` is added to x in place."""
    await_previous()
    groups, length = x.shape[1], x.shape[2]
    row, group = ct.bid(0) // groups, ct.bid(0) % groups
    place = ct.arange(TILE, dtype=ct.int32)
    weight_tile = part(weight, 0, group, place)  # [D]
    v = part(x, row, group, place)  # [D]
    if WITH_ADD:
        stored = (v + part(add, row, group, place)).astype(x.dtype)
        ct.scatter(x, (row, group, place), stored)
        v = stored.astype(ct.float32)
    scale = ct.rsqrt(ct.sum(v * v) / length + eps)
    y_tile = v * scale * weight_tile
    if WITH_GATE:
        y_tile = y_tile * silu(part(gate, row, group, place))
    ct.scatter(y, (row, group, place), y_tile.astype(y.dtype))


def launch(
    x: Tensor, weight: Tensor, eps: float, groups: int, gate: Tensor | None, add: Tensor | None, y: Tensor
) -> None:
    """Launch `normalise` on checked tensors that hold something; y, and x with `add`, are written."""
    x, gate, add, y = (None if v is None else _rows(v, groups) for v in (x, gate, add, y))  # type: ignore[assignment]
    length = x.shape[2]
    _rt.launch(
        _rt.stream(x),
        normalise,
        (x.shape[0] * groups,),
        (
            x, weight.reshape(1, groups, length), _rt.given(gate, x), _rt.given(add, x), y, float(eps),
            max(32, 1 << (length - 1).bit_length()), gate is not None, add is not None,
        ),
        early=True,
    )  # fmt: skip


def _rows(x: Tensor, groups: int) -> Tensor:
    """A tensor [... d] as [rows groups d/groups], without a copy where its rows are evenly spaced."""
    return x.reshape(-1, groups, x.shape[-1] // groups)
