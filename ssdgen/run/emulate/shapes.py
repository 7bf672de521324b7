"""Making tiles, and giving them another shape, order or dtype."""

from __future__ import annotations

import math
from typing import Any

import cuda.tile as ct
import torch

from ssdgen.run.emulate.array import _index
from ssdgen.run.emulate.block import answers
from ssdgen.run.emulate.dtypes import DType, check_range, convert, is_boolean, is_integral, torch_dtype
from ssdgen.run.emulate.elementwise import arithmetic
from ssdgen.run.emulate.errors import Fault
from ssdgen.run.emulate.tile import (
    Operand,
    Scalar,
    Tile,
    as_tile,
    rank_zero,
    require_axis,
    require_int,
    require_shape,
    tensor,
)


def _require_dtype(dtype: Any, what: str) -> DType:
    if not isinstance(dtype, ct.DType):
        raise Fault(f"{what} takes a cuda.tile dtype, got {dtype!r}")
    torch_dtype(dtype)
    return dtype


@answers(ct.full)
def full(shape: Any, fill_value: Operand, dtype: DType) -> Tile:
    """A tile of `shape` filled with a constant or a scalar tile."""
    dims = require_shape(shape, "ct.full")
    value = tensor(fill_value, _require_dtype(dtype, "ct.full"))
    if value.ndim:
        raise Fault(f"ct.full takes a scalar, got shape {tuple(value.shape)}")
    return Tile(value.expand(dims), dtype)


@answers(ct.zeros)
def zeros(shape: Any, dtype: DType) -> Tile:
    """A tile of zeros."""
    return full(shape, 0, dtype)


@answers(ct.ones)
def ones(shape: Any, dtype: DType) -> Tile:
    """A tile of ones."""
    return full(shape, 1, dtype)


@answers(ct.arange)
def arange(size: int, /, *, dtype: DType, start: Operand = 0, step: Operand = 1) -> Any:
    """`start, start + step, ...`: `size` of them, a power of two."""
    (n,) = require_shape(require_int(size, "the size of ct.arange"), "ct.arange")
    kind = _require_dtype(dtype, "ct.arange")
    if is_integral(kind):
        check_range(0, n - 1, kind)
    result: Any = Tile(torch.arange(n, dtype=torch_dtype(kind)), kind)
    for name, value, neutral in (("mul", step, 1), ("add", start, 0)):
        if isinstance(value, Tile) or value != neutral:
            result = arithmetic(name, result, Tile(tensor(value, kind), kind))
    return result


@answers(ct.reshape)
def reshape(x: Operand, /, shape: Any) -> Tile:
    """`x` in another shape of as many elements; one dimension may be -1."""
    tile = as_tile(x, "reshape")
    if not isinstance(shape, tuple):
        raise Fault(f"reshape takes a tuple, got {shape!r}")
    dims = [require_int(n, "every dimension of reshape") for n in shape]
    known = math.prod(n for n in dims if n != -1)
    count = math.prod(tile.shape)
    if dims.count(-1) == 1 and known and count % known == 0:
        dims[dims.index(-1)] = count // known
    if math.prod(dims) != count or min(dims, default=1) < 1:
        raise Fault(f"shape {tile.shape} cannot be reshaped to {shape}")
    return Tile(tile.data.reshape(dims), tile.dtype) if dims else rank_zero(tile.data.reshape(()), tile.dtype)


@answers(ct.broadcast_to)
def broadcast_to(x: Operand, /, shape: Any) -> Tile:
    """`x` repeated to `shape`."""
    tile = as_tile(x, "ct.broadcast_to")
    dims = require_shape(shape, "ct.broadcast_to")
    ends = list(zip(reversed(tile.shape), reversed(dims), strict=False))
    if tile.ndim > len(dims) or any(old not in (1, new) for old, new in ends):
        raise Fault(f"shape {tile.shape} does not broadcast to {dims}")
    return Tile(tile.data.expand(dims), tile.dtype)


@answers(ct.expand_dims)
def expand_dims(x: Tile, /, axis: Any) -> Tile:
    """`x` with a new axis of size 1 at `axis`; also what `x[:, None]` is, where `axis` is the index."""
    if not isinstance(x, Tile):
        raise Fault(f"a tile is indexed by None, `:` and `...` only, got {x!r}")
    if isinstance(axis, int) and not isinstance(axis, bool):
        return Tile(x.data.unsqueeze(require_axis(axis, x.ndim + 1, "ct.expand_dims")), x.dtype)
    items = axis if isinstance(axis, tuple) else (axis,)
    if not isinstance(axis, tuple) and axis is not None:
        raise Fault(f"a tile is indexed by None, or a tuple of None, `:` and `...`, not by {axis!r}")
    for item in items:
        if not (item is None or item is Ellipsis or (isinstance(item, slice) and item == slice(None))):
            raise Fault(f"a tile is indexed by None, `:` and `...` only, not by {item!r}; use ct.extract")
    if sum(isinstance(item, slice) for item in items) > x.ndim or sum(item is Ellipsis for item in items) > 1:
        raise Fault(f"index {axis} does not fit a tile of shape {x.shape}")
    return Tile(x.data[items], x.dtype)


@answers(ct.permute)
def permute(x: Tile, /, axes: Any) -> Tile:
    """`x` with its axes in the order `axes`."""
    tile = as_tile(x, "permute")
    order = tuple(require_axis(a, tile.ndim, "permute") for a in axes)
    if sorted(order) != list(range(tile.ndim)):
        raise Fault(f"axes {axes} are not a permutation of the {tile.ndim} axes of the tile")
    return Tile(tile.data.permute(order), tile.dtype)


@answers(ct.transpose)
def transpose(x: Tile, /, axis0: int | None = None, axis1: int | None = None) -> Tile:
    """`x` with two axes exchanged, which only a tile of rank 2 may leave unsaid."""
    tile = as_tile(x, "transpose")
    if tile.ndim < 2:
        raise Fault(f"a tile of shape {tile.shape} cannot be transposed")
    if axis0 is None and axis1 is None:
        if tile.ndim != 2:
            raise Fault(f"transpose of a tile of rank {tile.ndim} takes two axes")
        return Tile(tile.data.t(), tile.dtype)
    if axis0 is None or axis1 is None:
        raise Fault("transpose takes two axes or none")
    first, second = (require_axis(a, tile.ndim, "transpose") for a in (axis0, axis1))
    return Tile(tile.data.transpose(first, second), tile.dtype)


@answers(ct.cat)
def cat(tiles: Any, /, axis: int) -> Tile:
    """Two tiles of one dtype joined along `axis`; the result's shape is powers of two."""
    if not isinstance(tiles, tuple) or not 1 <= len(tiles) <= 2 or not all(isinstance(t, Tile) for t in tiles):
        raise Fault(f"ct.cat takes a tuple of one or two tiles, got {tiles!r}")
    if len({t.dtype for t in tiles}) > 1:
        raise Fault(f"ct.cat of {' and '.join(t.dtype.name for t in tiles)}; the dtypes must be the same")
    at = require_axis(axis, tiles[0].ndim, "ct.cat")
    if len({t.shape[:at] + t.shape[at + 1 :] for t in tiles}) > 1 or len({t.ndim for t in tiles}) > 1:
        raise Fault(f"ct.cat along axis {at} of shapes {' and '.join(str(t.shape) for t in tiles)}")
    joined = torch.cat([t.data for t in tiles], at)
    require_shape(tuple(joined.shape), "the result of ct.cat")
    return Tile(joined, tiles[0].dtype)


def _subtile(x: Tile, index: Any, shape: tuple[int, ...], what: str) -> tuple[slice, ...]:
    items = index if isinstance(index, tuple) else (index,)
    if len(items) != x.ndim:
        raise Fault(f"{what}: {len(items)} indices for a tile of rank {x.ndim}")
    cut = []
    for item, size, n in zip(items, x.shape, shape, strict=True):
        at = _index(item, f"the indices of {what}")
        if size % n:
            raise Fault(f"{what}: shape {x.shape} is not divisible by {shape}")
        if not 0 <= at < size // n:
            raise Fault(f"{what}: index {at} is outside [0, {size // n}) (tile {x.shape}, subtile {shape})")
        cut.append(slice(at * n, (at + 1) * n))
    return tuple(cut)


@answers(ct.extract)
def extract(x: Tile, /, index: Any, shape: Any) -> Tile:
    """The subtile of `shape` at `index`, which counts subtiles."""
    tile = as_tile(x, "extract")
    dims = require_shape(shape, "extract", tile.ndim)
    data = tile.data[_subtile(tile, index, dims or (1,) * tile.ndim, "extract")]
    return Tile(data.reshape(dims), tile.dtype)


@answers(ct.insert)
def insert(x: Tile, /, index: Any, value: Tile) -> Tile:
    """A copy of `x` with the subtile at `index` replaced by `value`."""
    tile, new = as_tile(x, "insert"), as_tile(value, "insert")
    if tile.dtype is not new.dtype:
        raise Fault(f"a tile of {new.dtype.name} cannot be inserted into one of {tile.dtype.name}")
    if new.ndim not in (0, tile.ndim):
        raise Fault(f"a tile of rank {new.ndim} cannot be inserted into one of rank {tile.ndim}")
    dims = new.shape or (1,) * tile.ndim
    data = tile.data.clone()
    data[_subtile(tile, index, dims, "insert")] = new.data.reshape(dims)
    return Tile(data, tile.dtype)


@answers(ct.astype)
def astype(x: Operand, dtype: DType, /, *, rounding_mode: Any = None) -> Tile:
    """`x` cast to `dtype`, rounding to nearest even."""
    tile = as_tile(x, "astype")
    if rounding_mode not in (None, ct.RoundingMode.RN):
        raise Fault(f"astype with rounding mode {rounding_mode.value} is not emulated")
    target = _require_dtype(dtype, "astype")
    if isinstance(tile, Scalar) and is_integral(target):
        check_range(tile.value, tile.value, target)
        return Scalar(int(tile.value), target)
    return Tile(convert(tile.data, tile.dtype, target), target)


@answers(ct.bitcast)
def bitcast(x: Operand, /, dtype: DType) -> Tile:
    """The bits of `x` read as `dtype`, of the same width; not for booleans."""
    tile = as_tile(x, "bitcast")
    target = _require_dtype(dtype, "ct.bitcast")
    if is_boolean(tile.dtype) or is_boolean(target) or tile.dtype.bitwidth != target.bitwidth:
        raise Fault(f"ct.bitcast from {tile.dtype.name} to {target.name}")
    return Tile(tile.data.contiguous().view(torch_dtype(target)), target)


@answers(ct.assume_divisible_by)
def assume_divisible_by(x: Operand, divisor: int, /) -> Operand:
    """`x`, a fault if it is not divisible by `divisor`: the compiler believes it without looking."""
    d = require_int(divisor, "the divisor of ct.assume_divisible_by")
    value = _index(x, "the argument of ct.assume_divisible_by")
    if d < 1 or value % d:
        raise Fault(f"ct.assume_divisible_by: {value} is not divisible by {d}")
    return x


@answers(ct.static_eval)
def static_eval(expression: Any, /) -> Any:
    """`expression`, which python has evaluated."""
    return expression


@answers(ct.static_assert)
def static_assert(condition: Any, message: Any = None, /) -> None:
    """A fault unless the compile-time `condition` holds."""
    if not isinstance(condition, bool):
        raise Fault(f"ct.static_assert takes a compile-time boolean, got {condition!r}")
    if not condition:
        raise Fault(f"ct.static_assert failed: {'' if message is None else message}")


@answers(ct.ensure_constant)
def ensure_constant(value: Any, /) -> Any:
    """`value`, a fault if it is known at run time only."""
    if isinstance(value, Tile):
        raise Fault("ct.ensure_constant: the value is not a compile-time constant")
    return value


@answers(ct.assert_)
def assert_(condition: Tile, /, message: str | None = None) -> None:
    """A fault unless every element of the mask `condition` is true."""
    mask = as_tile(condition, "ct.assert_")
    if not is_boolean(mask.dtype):
        raise Fault(f"ct.assert_ takes booleans, got {mask.dtype.name}")
    if not bool(mask.data.all()):
        raise Fault(f"ct.assert_ failed: {message or ''}")


@answers(ct.print)
@answers(ct.printf)
def print_(*args: Any, **kwargs: Any) -> None:
    """Nothing: use a debugger, since kernels run as python."""
