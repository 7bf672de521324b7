"""Arrays in memory: loads and stores of tiles, gathers, scatters and atomic updates.

An index counts tiles. A tile that sticks out of its array is padded on load (undetermined without a padding mode: NaN,
a large integer, True) and clipped on store; one wholly outside is undefined behaviour on a GPU and a fault here. No
memory outside an array is ever touched, and no element is touched by two blocks of a launch (see `memory`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda.tile as ct
import torch

from ssdgen.run.emulate.block import Grid, answers, here
from ssdgen.run.emulate.dtypes import DType, cutile_dtype, implicit, is_boolean, is_float, is_integral, poison
from ssdgen.run.emulate.errors import Fault
from ssdgen.run.emulate.memory import Track, elements, overwrite, whole_storage
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


class Array(ct.Array):  # type: ignore[misc]
    """A tensor as device code sees it, with `name` for messages; `shape` and `strides` are run-time integers.

    `static_shape` and `static_strides` are the dimensions that the kernel's annotation makes compile-time constants.
    """

    dtype: DType = None
    shape: Any = None
    strides: Any = None
    ndim: Any = None

    def __init__(
        self,
        view: torch.Tensor,
        name: str,
        track: Track,
        grid: Grid,
        index_dtype: DType = ct.int32,
        static_shape: tuple[int, ...] = (),
        static_strides: tuple[int, ...] = (),
    ) -> None:
        self.view = view
        self.name = name
        self.track = track
        self.grid = grid
        self.index_dtype = index_dtype
        self.dtype = cutile_dtype(view.dtype)
        self.ndim = view.ndim
        self.sizes = tuple(view.shape)
        self.steps = tuple(view.stride())
        self.offset = int(view.storage_offset())
        self.shape = _lengths(self.sizes, index_dtype, static_shape)
        self.strides = _lengths(self.steps, index_dtype, static_strides)

    def slice(self, axis: int, start: Operand, stop: Operand) -> Array:
        """The array restricted to [start, stop) along `axis`, over the same memory; not outside of it.

        cuTile wants 0 <= start < N and start <= stop <= N: a slice of nothing does not begin at the end.
        """
        at = require_axis(axis, self.ndim, "Array.slice")
        first, last = (_index(v, "the bounds of Array.slice") for v in (start, stop))
        if not (0 <= first <= last <= self.sizes[at] and first < self.sizes[at]):
            raise Fault(
                f"slice [{first}, {last}) of axis {at} of {self.name}, which has {self.sizes[at]} elements there"
            )
        name = f"{self.name}.slice({at}, {first}, {last})"
        return Array(self.view.narrow(at, first, last - first), name, self.track, self.grid, self.index_dtype)

    def __getitem__(self, key: Any) -> Any:
        raise Fault(f"array {self.name} is indexed; use ct.load or ct.gather")

    def __repr__(self) -> str:
        return f"Array[{self.dtype.name}, {self.sizes}] {self.name}"


def _lengths(values: tuple[int, ...], dtype: DType, static: tuple[int, ...]) -> tuple[Any, ...]:
    constants = {axis % len(values) for axis in static}
    return tuple(v if i in constants else Scalar(v, dtype) for i, v in enumerate(values))


def _index(x: Any, what: str) -> int:
    """The value of a scalar of a signed integer dtype, or of a constant one."""
    if type(x) is Scalar and not is_boolean(x.dtype):
        return x.value
    if isinstance(x, int) and not isinstance(x, bool):
        return x
    if isinstance(x, Tile) and x.ndim == 0 and is_integral(x.dtype) and x.dtype != ct.uint8:
        return int(x.data)
    raise Fault(f"{what} must be signed integers or scalar tiles of them, got {x!r}")


def _indices(array: Array, index: Any, what: str) -> tuple[Any, ...]:
    if not isinstance(array, Array):
        raise Fault(f"{what} takes an array, got {array!r}")
    items = index if isinstance(index, tuple) else (index,)
    if len(items) != array.ndim:
        raise Fault(f"{what} of {array.name}: {len(items)} indices for an array of rank {array.ndim}")
    return items


def _axes(order: Any, rank: int) -> tuple[int, ...]:
    """The array axis of each tile axis."""
    if isinstance(order, str):
        if order not in ("C", "F"):
            raise Fault(f"order is 'C', 'F' or a permutation, not {order!r}")
        return tuple(range(rank))[:: 1 if order == "C" else -1]
    axes = tuple(require_axis(a, rank, "order") for a in order)
    if sorted(axes) != list(range(rank)):
        raise Fault(f"order {order} is not a permutation of the {rank} axes")
    return axes


def _hints(latency: Any, allow_tma: Any) -> None:
    if latency is not None and not 1 <= require_int(latency, "latency") <= 10:
        raise Fault(f"latency is between 1 and 10, not {latency}")
    if allow_tma is not None and not isinstance(allow_tma, bool):
        raise Fault(f"allow_tma is a constant bool, not {allow_tma!r}")


def _box(
    array: Array, index: Any, shape: tuple[int, ...], order: Any, check_bounds: Any, what: str
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """The part inside `array` of the tile of `shape` at `index`: sizes and strides in the tile's axes, and the offset."""
    sizes, steps = array.sizes, array.steps
    if order != "C":
        axes = _axes(order, array.ndim)
        sizes, steps = tuple(sizes[a] for a in axes), tuple(steps[a] for a in axes)
    extents = []
    offset = array.offset
    for i, n, size, step in zip(_indices(array, index, what), shape, sizes, steps, strict=True):
        start = _index(i, f"the indices of {what} of {array.name}") * n
        inside = size - start
        if inside <= 0 or start < 0:
            at = tuple(_index(v, what) for v in (index if isinstance(index, tuple) else (index,)))
            raise Fault(
                f"{what} of a tile wholly outside {array.name}: tile index {at}, tile shape {shape}, array shape {sizes}"
            )
        extents.append(n if n <= inside else inside)
        offset += start * step
    box = tuple(extents)
    if not check_bounds and box != shape:
        raise Fault(f"{what} without check_bounds of a tile that sticks out of {array.name}")
    return box, steps, offset


_PADDING: dict[Any, Callable[[DType], bool | int | float]] = {
    ct.PaddingMode.UNDETERMINED: poison,
    ct.PaddingMode.ZERO: lambda dtype: 0,
    ct.PaddingMode.NEG_ZERO: lambda dtype: -0.0,
    ct.PaddingMode.NAN: lambda dtype: float("nan"),
    ct.PaddingMode.POS_INF: lambda dtype: float("inf"),
    ct.PaddingMode.NEG_INF: lambda dtype: -float("inf"),
}


@answers(ct.load)
def load(
    array: Array,
    /,
    index: Any,
    shape: Any,
    *,
    order: Any = "C",
    padding_mode: Any = ct.PaddingMode.UNDETERMINED,
    check_bounds: bool = True,
    latency: int | None = None,
    allow_tma: bool | None = None,
    memory_order: Any = ct.MemoryOrder.WEAK,
    memory_scope: Any = ct.MemoryScope.NONE,
) -> Tile:
    """The tile of `shape` at `index` of `array`; `order` gives the array axis of each tile axis."""
    _hints(latency, allow_tma)
    if memory_order != ct.MemoryOrder.WEAK:
        raise Fault(f"a load of memory order {memory_order.name} is not emulated")
    dims = require_shape(shape, "ct.load", len(_indices(array, index, "ct.load")))
    wanted = dims or (1,) * array.ndim
    box, steps, offset = _box(array, index, wanted, order, check_bounds, "ct.load")
    array.track.read((box, steps, offset), array.grid.number, array.name)
    inside = array.view.as_strided(box, steps, offset)
    if box == wanted:
        data = inside.clone(memory_format=torch.contiguous_format)
    else:
        mode = ct.PaddingMode[padding_mode] if isinstance(padding_mode, str) else padding_mode
        if mode not in (ct.PaddingMode.UNDETERMINED, ct.PaddingMode.ZERO) and not is_float(array.dtype):
            raise Fault(f"padding {mode.name} of {array.name}, which holds {array.dtype.name}")
        if mode == ct.PaddingMode.UNDETERMINED:
            array.grid.poisoned = True
        data = torch.full(wanted, _PADDING[mode](array.dtype), dtype=array.view.dtype)
        data[tuple(map(slice, box))] = inside
    return Tile(data, array.dtype) if dims else rank_zero(data.reshape(()), array.dtype)


@answers(ct.store)
def store(
    array: Array,
    /,
    index: Any,
    tile: Operand,
    *,
    order: Any = "C",
    check_bounds: bool = True,
    latency: int | None = None,
    allow_tma: bool | None = None,
    memory_order: Any = ct.MemoryOrder.WEAK,
    memory_scope: Any = ct.MemoryScope.NONE,
) -> None:
    """Store `tile` at `index` of `array`, clipped at the array's edge; the dtype may widen but never narrow."""
    _hints(latency, allow_tma)
    if memory_order != ct.MemoryOrder.WEAK:
        raise Fault(f"a store of memory order {memory_order.name} is not emulated")
    _indices(array, index, "ct.store")
    implicit(tile.dtype if isinstance(tile, Tile) else tile, array.dtype, f"a tile does not store into {array.name}")
    data = tensor(tile, array.dtype)
    if data.ndim == 0:
        data = data.reshape((1,) * array.ndim)
    elif data.ndim != array.ndim:
        raise Fault(f"a tile of shape {tuple(data.shape)} does not store into {array.name}, of rank {array.ndim}")
    box, steps, offset = _box(array, index, tuple(data.shape), order, check_bounds, "ct.store")
    if any(step == 0 and n > 1 for n, step in zip(box, steps, strict=True)):
        raise Fault(f"race: one element of {array.name} is written from several of a tile (a stride is 0)")
    array.track.write((box, steps, offset), array.grid.number, array.name)
    if box != tuple(data.shape):
        data = data[tuple(map(slice, box))]
    array.view.as_strided(box, steps, offset).copy_(data)


@answers(ct.num_tiles)
def num_tiles(array: Array, /, axis: int, shape: Any, order: Any = "C") -> Scalar:
    """How many tiles of `shape` cover `array` along tile axis `axis`."""
    if not isinstance(array, Array):
        raise Fault(f"ct.num_tiles takes an array, got {array!r}")
    dims = require_shape(shape, "ct.num_tiles", array.ndim) or (1,) * array.ndim
    at = require_axis(axis, array.ndim, "ct.num_tiles")
    return Scalar(-(-array.sizes[_axes(order, array.ndim)[at]] // dims[at]), ct.int32)


@answers(ct.bid)
def bid(axis: int) -> Scalar:
    """The index of the running block along `axis`, int32."""
    if require_int(axis, "the axis of ct.bid") not in (0, 1, 2):
        raise Fault(f"the axis of ct.bid is 0, 1 or 2, not {axis}")
    return Scalar(here().block[axis], ct.int32)


@answers(ct.grid_dependency_control_wait)
def grid_dependency_control_wait() -> None:
    """Nothing, as launches run one after the other here; but all blocks wait, or none: see `Grid.leave`."""
    grid = here()
    grid.dependent = True
    if grid.waited == grid.number:
        grid.waited += 1


@answers(ct.grid_dependency_control_launch_dependents)
def grid_dependency_control_launch_dependents() -> None:
    """Nothing, as launches run one after the other here; but who lets the one behind begin has to wait for the one before."""
    here().dependent = True


@answers(ct.num_blocks)
def num_blocks(axis: int) -> Scalar:
    """The size of the grid along `axis`, int32."""
    if require_int(axis, "the axis of ct.num_blocks") not in (0, 1, 2):
        raise Fault(f"the axis of ct.num_blocks is 0, 1 or 2, not {axis}")
    return Scalar(here().shape[axis], ct.int32)


def _positions(
    array: Array, indices: Any, mask: Any, check_bounds: Any, what: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions in the storage that `indices` mean, and which of them are inside and wanted: int64 and bool."""
    items = _indices(array, indices, what)
    position = torch.tensor(array.offset)
    inside = torch.tensor(True)
    for item, size, step in zip(items, array.sizes, array.steps, strict=True):
        at = as_tile(item, f"an index of {what}")
        if not is_integral(at.dtype):
            raise Fault(f"an index of {what} has dtype {at.dtype.name}")
        index = at.data.to(torch.int64)
        inside = inside & (index >= 0) & (index < size)
        position = position + index * step
    outside = ~inside
    if mask is not None:
        wanted = as_tile(mask, f"the mask of {what}")
        if not is_boolean(wanted.dtype):
            raise Fault(f"the mask of {what} is boolean, not {wanted.dtype.name}")
        inside = inside & wanted.data
        outside = outside & wanted.data
    if not check_bounds and bool(outside.any()):
        raise Fault(f"{what} without check_bounds of an element outside {array.name}, of shape {array.sizes}")
    if inside.shape != position.shape:
        raise Fault(f"{what}: a mask of shape {tuple(inside.shape)} for indices of shape {tuple(position.shape)}")
    return position, inside


@answers(ct.gather)
def gather(
    array: Array,
    indices: Any,
    /,
    *,
    mask: Any = None,
    padding_value: Operand = 0,
    check_bounds: bool = True,
    latency: int | None = None,
) -> Tile:
    """The elements of `array` at `indices`, `padding_value` where they are outside of it or not in `mask`."""
    _hints(latency, None)
    position, wanted = _positions(array, indices, mask, check_bounds, "ct.gather")
    padding = padding_value.dtype if isinstance(padding_value, Tile) else padding_value
    implicit(padding, array.dtype, "the padding value of ct.gather")
    data = tensor(padding_value, array.dtype).expand(position.shape).clone()
    array.track.read(position[wanted], array.grid.number, array.name)
    data[wanted] = elements(whole_storage(array.view), position[wanted])
    return Tile(data, array.dtype)


def _repeats(positions: torch.Tensor) -> bool:
    return int(torch.bincount(positions - positions.min()).max()) > 1 if positions.numel() else False


def _values(array: Array, value: Operand, position: torch.Tensor) -> torch.Tensor:
    implicit(
        value.dtype if isinstance(value, Tile) else value, array.dtype, f"a value does not store into {array.name}"
    )
    return tensor(value, array.dtype).expand(position.shape)


@answers(ct.scatter)
def scatter(
    array: Array,
    indices: Any,
    value: Operand,
    /,
    *,
    mask: Any = None,
    check_bounds: bool = True,
    latency: int | None = None,
) -> None:
    """Store `value` at `indices` of `array`, where they are inside of it and in `mask`, each element at most once."""
    _hints(latency, None)
    position, wanted = _positions(array, indices, mask, check_bounds, "ct.scatter")
    where = position[wanted]
    if _repeats(where):
        raise Fault(f"race: ct.scatter writes one element of {array.name} more than once")
    values = _values(array, value, position)[wanted]
    array.track.write(where, array.grid.number, array.name)
    overwrite(whole_storage(array.view), where, values)


def _atomic(name: str, combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., Tile]:
    def answer(
        array: Array,
        indices: Any,
        update: Operand,
        /,
        *,
        check_bounds: bool = True,
        memory_order: Any = ct.MemoryOrder.ACQ_REL,
        memory_scope: Any = ct.MemoryScope.DEVICE,
    ) -> Tile:
        position, wanted = _positions(array, indices, None, check_bounds, f"ct.{name}")
        if name in ("atomic_max", "atomic_min") and is_float(array.dtype):
            raise Fault(f"ct.{name} of {array.name}, which holds {array.dtype.name}: cuTile takes integers")
        where, values = position[wanted], _values(array, update, position)[wanted]
        array.track.update(where, array.grid.number, array.name)
        flat = whole_storage(array.view)
        old = flat[where]
        if not _repeats(where):
            flat[where] = combine(old, values)
        else:
            for i, at in enumerate(where.tolist()):
                old[i] = flat[at]
                flat[at] = combine(flat[at], values[i])
        before = torch.zeros(position.shape, dtype=array.view.dtype)
        before[wanted] = old
        return Tile(before, array.dtype)

    return answer


for _function, _name, _combine in (
    (ct.atomic_add, "atomic_add", torch.add),
    (ct.atomic_max, "atomic_max", torch.maximum),
    (ct.atomic_min, "atomic_min", torch.minimum),
    (ct.atomic_xchg, "atomic_xchg", lambda old, new: new),
):
    answers(_function)(_atomic(_name, _combine))
