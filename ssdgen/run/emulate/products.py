"""Matrix products, reductions and prefix scans.

`mma` multiplies in float32 what its operands were rounded to. That is what tensor cores do up to the order of the sum:
the products of two bf16, f16 or tf32 numbers are exact in float32, the sums are not. A float64 product rounded once
would hide cancellation that float32 accumulation has. Operands of float32, which cuTile allows, are a fault: they run
as scalar code. Reductions and scans of bf16 and f16 round after every step, in the tile's own dtype, as on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda.tile as ct
import torch

from ssdgen.run.emulate.block import answers, here
from ssdgen.run.emulate.dtypes import (
    DType,
    TileError,
    implicit,
    is_arithmetic,
    is_boolean,
    is_float,
    is_integral,
    mma_result_dtype,
    torch_dtype,
)
from ssdgen.run.emulate.elementwise import arithmetic, exact
from ssdgen.run.emulate.errors import Fault
from ssdgen.run.emulate.shapes import full
from ssdgen.run.emulate.tile import Operand, Tile, as_tile, operand_type, require_axis, tensor


def _product(x: Tile, y: Tile, acc: torch.Tensor | None, acc_dtype: DType, what: str) -> torch.Tensor:
    if x.dtype == ct.float32:
        raise Fault(f"{what} of float32 operands runs as scalar code; cast them to tfloat32 or bfloat16 first")
    if is_integral(x.dtype):
        raise Fault(f"{what} of {x.dtype.name} operands is not emulated")
    if x.shape[-1] != y.shape[max(-2, -y.ndim)]:
        raise Fault(f"{what} of shapes {x.shape} and {y.shape}")
    wide = torch.float64 if x.dtype == ct.float64 else torch.float32
    a, b = x.data.to(wide), y.data.to(wide)
    if acc is None:
        return torch.matmul(a, b)
    if a.ndim == b.ndim == acc.ndim == 2 and acc.shape == (a.shape[0], b.shape[1]):
        return torch.addmm(acc.to(wide), a, b).to(torch_dtype(acc_dtype))
    result = torch.matmul(a, b)
    if result.shape != acc.shape:
        raise Fault(f"{what}: the accumulator has shape {tuple(acc.shape)}, the product {tuple(result.shape)}")
    return (result + acc).to(torch_dtype(acc_dtype))


@answers(ct.mma)
def mma(x: Tile, y: Tile, /, acc: Tile, *, use_fast_acc: bool = False) -> Tile:
    """`x @ y + acc` in the dtype of `acc`: bf16 and tf32 into f32, f16 into f32 or f16; the operands share a dtype."""
    a, b, c = (as_tile(v, "ct.mma") for v in (x, y, acc))
    try:
        mma_result_dtype(a.dtype, b.dtype, c.dtype)
    except TileError as e:
        raise Fault(f"ct.mma: {e}") from e
    if a.ndim < 2 or b.ndim < 2:
        raise Fault(f"ct.mma takes tiles of rank 2 or 3, got shapes {a.shape} and {b.shape}")
    return Tile(_product(a, b, c.data, c.dtype, "ct.mma"), c.dtype)


@answers(ct.matmul)
def matmul(x: Tile, y: Tile, /) -> Tile:
    """`x @ y`, accumulated as `mma` does and rounded to the promoted dtype of the operands."""
    a, b = as_tile(x, "ct.matmul"), as_tile(y, "ct.matmul")
    dtype = operand_type(arithmetic("add", Tile(a.data.new_zeros(()), a.dtype), Tile(b.data.new_zeros(()), b.dtype)))
    a, b = Tile(tensor(a, dtype), dtype), Tile(tensor(b, dtype), dtype)
    return Tile(_product(a, b, None, dtype, "ct.matmul").to(torch_dtype(dtype)), dtype)


_NARROW = (ct.bfloat16, ct.float16)


def _reduction_axes(axis: Any, rank: int) -> list[int]:
    if axis is None:
        return list(range(rank))
    axes = sorted(require_axis(a, rank, "a reduction") for a in (axis if isinstance(axis, tuple) else (axis,)))
    if len(set(axes)) < len(axes):
        raise Fault(f"axes {axis} of a reduction repeat")
    return axes


def _halving(combine: Callable[[Any, Any], Any], data: torch.Tensor, axis: int) -> torch.Tensor:
    """`data` combined along `axis` in pairs of neighbours, and pairs of pairs; the axis is kept, of size 1."""
    while data.shape[axis] > 1:
        n = data.shape[axis]
        even, odd = (data.index_select(axis, torch.arange(first, n, 2)) for first in (0, 1))
        data = combine(even, odd)
    return data


def _reducible(x: Any, what: str) -> Tile:
    tile = as_tile(x, what)
    if not is_arithmetic(tile.dtype):
        raise Fault(f"{what}: {tile.dtype.name} is not arithmetic")
    return Tile(tile.data.to(torch.int32), ct.int32) if is_boolean(tile.dtype) else tile


def _finish(data: torch.Tensor, axes: list[int], keepdims: bool) -> torch.Tensor:
    return data if keepdims else data.squeeze(axes)


def _sum(what: str, all_at_once: Callable[..., torch.Tensor], step: Callable[[Any, Any], Any]) -> Callable[..., Tile]:
    def answer(
        x: Tile, /, axis: Any = None, *, keepdims: bool = False, rounding_mode: Any = None, flush_to_zero: bool = False
    ) -> Tile:
        tile = _reducible(x, what)
        axes = _reduction_axes(axis, tile.ndim)
        data = tile.data.to(torch.int64) if is_integral(tile.dtype) else tile.data
        for a in axes:
            data = _halving(step, data, a) if tile.dtype in _NARROW else all_at_once(data, a, keepdim=True)
        data = _finish(data, axes, keepdims)
        return exact(data, tile.dtype) if is_integral(tile.dtype) else Tile(data, tile.dtype)

    return answer


answers(ct.sum)(_sum("ct.sum", torch.sum, torch.add))
answers(ct.prod)(_sum("ct.prod", torch.prod, torch.mul))


def _extremum(what: str, nan_wins: Callable[..., torch.Tensor], step: Callable[[Any, Any], Any]) -> Callable[..., Tile]:
    def answer(
        x: Tile,
        /,
        axis: Any = None,
        *,
        keepdims: bool = False,
        flush_to_zero: bool = False,
        propagate_nan: bool = False,
    ) -> Tile:
        tile = _reducible(x, what)
        axes = _reduction_axes(axis, tile.ndim)
        data = nan_wins(tile.data, axes, keepdim=True)
        if is_float(tile.dtype) and not (propagate_nan or here().poisoned) and bool(torch.isnan(data).any()):
            data = tile.data
            for a in axes:
                data = _halving(step, data, a)
        return Tile(_finish(data, axes, keepdims), tile.dtype)

    return answer


answers(ct.max)(_extremum("ct.max", torch.amax, torch.fmax))
answers(ct.min)(_extremum("ct.min", torch.amin, torch.fmin))


def _cumulative(what: str, all_at_once: Callable[..., torch.Tensor], step: Any, neutral: int) -> Callable[..., Tile]:
    def answer(
        x: Tile, /, axis: int = 0, *, reverse: bool = False, rounding_mode: Any = None, flush_to_zero: bool = False
    ) -> Tile:
        tile = _reducible(x, what)
        at = require_axis(axis, tile.ndim, what)
        data = tile.data.flip(at) if reverse else tile.data
        if is_integral(tile.dtype):
            result = exact(all_at_once(data.to(torch.int64), at), tile.dtype)
        elif tile.dtype in _NARROW:
            (scanned,) = _prefixes(lambda a, b: (step(a[0], b[0]),), (data,), (torch.full_like(data, neutral),), at)
            result = Tile(scanned, tile.dtype)
        else:
            result = Tile(all_at_once(data, at), tile.dtype)
        return Tile(result.data.flip(at), tile.dtype) if reverse else result

    return answer


answers(ct.cumsum)(_cumulative("ct.cumsum", torch.cumsum, torch.add, 0))
answers(ct.cumprod)(_cumulative("ct.cumprod", torch.cumprod, torch.mul, 1))

_Tensors = tuple[torch.Tensor, ...]


def _prefixes(
    combine: Callable[[_Tensors, _Tensors], _Tensors], xs: _Tensors, identity: _Tensors, axis: int
) -> _Tensors:
    """All inclusive prefixes along `axis`, in steps of doubling distance; `identity` stands in before the first."""
    n = xs[0].shape[axis]
    distance = 1
    while distance < n:
        earlier = tuple(
            torch.cat([i.narrow(axis, 0, distance), x.narrow(axis, 0, n - distance)], axis)
            for i, x in zip(identity, xs, strict=True)
        )
        xs = combine(earlier, xs)
        distance *= 2
    return xs


def _custom(x: Any, func: Any, identity: Any, what: str) -> tuple[bool, list[Tile], list[Tile], Any]:
    """The tiles of `x` in a common shape, their identities, and `func` on tuples of tensors.

    `func` is called on whole tiles rather than on scalars: it may only hold elementwise operations, so it cannot tell.
    """
    many = isinstance(x, tuple)
    tiles = [as_tile(t, what) for t in (x if many else (x,))]
    constants = identity if many else (identity,)
    if not isinstance(constants, tuple) or len(constants) != len(tiles):
        raise Fault(f"{what}: {len(tiles)} tiles need as many identities, got {identity!r}")
    if any(isinstance(c, Tile) or not isinstance(c, bool | int | float) for c in constants):
        raise Fault(f"{what}: an identity must be a constant, got {identity!r}")
    try:
        shape = torch.broadcast_shapes(*(t.shape for t in tiles))  # type: ignore[no-untyped-call]
    except RuntimeError as e:
        raise Fault(f"{what}: shapes {' and '.join(str(t.shape) for t in tiles)} do not broadcast") from e
    tiles = [Tile(t.data.expand(shape), t.dtype) for t in tiles]
    identities = [full(shape, c, t.dtype) for c, t in zip(constants, tiles, strict=True)]

    def combine(a: _Tensors, b: _Tensors) -> _Tensors:
        wrapped = [Tile(v, t.dtype) for side in (a, b) for v, t in zip(side, tiles, strict=True)]
        result = func(*wrapped)
        results: tuple[Operand, ...] = result if many else (result,)
        if not isinstance(results, tuple) or len(results) != len(tiles):
            raise Fault(f"{what}: the function must return {len(tiles)} values, got {result!r}")
        combined = []
        for r, t, v in zip(results, tiles, b, strict=True):
            implicit(r.dtype if isinstance(r, Tile) else r, t.dtype, f"{what}: what the function returns")
            combined.append(tensor(r, t.dtype).expand(v.shape))
        return tuple(combined)

    return many, tiles, identities, combine


@answers(ct.scan)
def scan(x: Any, /, axis: int, func: Any, identity: Any, *, reverse: bool = False) -> Any:
    """Inclusive prefixes of `x`, a tile or a tuple of them, under the associative `func`."""
    many, tiles, identities, combine = _custom(x, func, identity, "ct.scan")
    at = require_axis(axis, tiles[0].ndim, "ct.scan")
    data = tuple(t.data.flip(at) if reverse else t.data for t in tiles)
    data = _prefixes(combine, data, tuple(i.data for i in identities), at)
    result = tuple(Tile(d.flip(at) if reverse else d, t.dtype) for d, t in zip(data, tiles, strict=True))
    return result if many else result[0]


@answers(ct.reduce)
def reduce(x: Any, /, axis: int, func: Any, identity: Any, *, keepdims: bool = False) -> Any:
    """`x`, a tile or a tuple of them, combined along `axis` by the associative `func`: the last of its prefixes."""
    many, tiles, identities, combine = _custom(x, func, identity, "ct.reduce")
    at = require_axis(axis, tiles[0].ndim, "ct.reduce")
    data = _prefixes(combine, tuple(t.data for t in tiles), tuple(i.data for i in identities), at)
    last = [d.narrow(at, d.shape[at] - 1, 1) for d in data]
    result = tuple(Tile(_finish(d, [at], keepdims), t.dtype) for d, t in zip(last, tiles, strict=True))
    return result if many else result[0]
