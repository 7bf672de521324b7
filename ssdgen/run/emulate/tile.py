"""Tiles and scalars: the values device code computes with.

`Tile` inherits its operators from `cuda.tile.Tile`, which sends each through the dispatch mode to the function of the
same name (`a + b` is `ct.add(a, b)`), so there is one implementation of every operation.
"""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import cuda.tile as ct
import torch

from ssdgen.run.emulate.dtypes import DType, Number, constant, convert, torch_dtype
from ssdgen.run.emulate.errors import Fault


class Tile(ct.Tile):  # type: ignore[misc]
    """A tile: `data` holds its elements, in float32 when `dtype` is tfloat32. Never written after it was made."""

    dtype: DType = None
    shape: Any = None
    ndim: Any = None

    def __init__(self, data: torch.Tensor, dtype: DType) -> None:
        self.data = data
        self.dtype = dtype
        self.shape = tuple(data.shape)
        self.ndim = data.ndim

    def item(self) -> Tile:
        """The element of a tile that has one, as a scalar tile: `reshape(())`, as in cuTile."""
        result: Tile = self.reshape(())
        return result

    def __bool__(self) -> bool:
        if self.ndim:
            raise Fault(
                f"{self!r} is not a scalar: `if`, `and`, `or`, `not`, min() and max() take scalars; use `&`, `|`, `~`, "
                "ct.where, ct.minimum, ct.maximum"
            )
        return bool(self.data)

    def __index__(self) -> int:
        raise Fault(f"{self!r} is used where a python integer is needed")

    def __int__(self) -> int:
        raise Fault(f"int() expects a constant, not {self!r}")

    def __float__(self) -> float:
        raise Fault(f"float() expects a constant, not {self!r}")

    def __len__(self) -> int:
        raise Fault(f"{self!r} has no len()")

    def __iter__(self) -> Any:
        raise Fault(f"{self!r} cannot be iterated or unpacked")

    def __abs__(self) -> Any:
        return ct.abs(self)

    def __pos__(self) -> Tile:
        return self

    def __repr__(self) -> str:
        return f"Tile[{self.dtype.name},({','.join(map(str, self.shape))})]"


class Scalar(Tile):
    """A run-time integer or boolean of rank 0, kept as a python value: indices need no tensors."""

    shape = ()
    ndim = 0

    def __init__(self, value: int, dtype: DType) -> None:
        self.value = value
        self.dtype = dtype

    @functools.cached_property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The value as a tensor of rank 0."""
        return torch.tensor(self.value, dtype=torch_dtype(self.dtype))

    def __bool__(self) -> bool:
        return bool(self.value)

    def __index__(self) -> int:
        return int(self.value)


def rank_zero(data: torch.Tensor, dtype: DType) -> Tile:
    """A tile of rank 0: of a signed integer dtype a `Scalar`, so that what was loaded may bound a loop or a slice."""
    signed = not data.dtype.is_floating_point and data.dtype not in (torch.bool, torch.uint8)
    return Scalar(int(data), dtype) if signed else Tile(data, dtype)


Operand: TypeAlias = Tile | Number
"""What an elementwise operation takes: a tile, or a constant."""


def operand_type(x: Operand) -> DType | type:
    """What decides promotion: the dtype of a tile, the python type of a constant."""
    if isinstance(x, Tile):
        return x.dtype
    if isinstance(x, bool | int | float):
        return type(x)
    raise Fault(f"expected a tile or a number, got {type(x).__name__}")


def operand(x: Operand, dtype: DType) -> torch.Tensor | Number:
    """`x` as an operand of `dtype`: a tensor for a tile, a python number for a constant."""
    if isinstance(x, Tile):
        return x.data if x.dtype is dtype else convert(x.data, x.dtype, dtype)
    return constant(x, dtype)


def tensor(x: Operand, dtype: DType) -> torch.Tensor:
    """`x` as a tensor of `dtype`, of rank 0 for a constant."""
    if isinstance(x, Tile):
        return x.data if x.dtype is dtype else convert(x.data, x.dtype, dtype)
    value = torch.tensor(constant(x, dtype), dtype=torch_dtype(dtype))
    return convert(value, ct.float32, dtype) if dtype == ct.tfloat32 else value


def as_tile(x: Any, what: str) -> Tile:
    """`x`, which must be a tile; a constant becomes the rank 0 tile cuTile makes of it (i32, f32 or bool)."""
    if isinstance(x, Tile):
        return x
    if isinstance(x, bool | int):
        return Scalar(x, ct.bool_ if isinstance(x, bool) else ct.int32)
    if isinstance(x, float):
        return Tile(torch.tensor(x, dtype=torch.float32), ct.float32)
    raise Fault(f"{what} expected a tile, got {type(x).__name__}")


def require_int(x: Any, what: str) -> int:
    """`x`, which must be a compile-time integer."""
    if isinstance(x, int) and not isinstance(x, bool):
        return x
    kind = "a run-time value" if isinstance(x, Tile) else f"a {type(x).__name__}"
    raise Fault(f"{what} must be a constant integer, not {kind}")


def require_shape(shape: Any, what: str, rank: int | None = None) -> tuple[int, ...]:
    """`shape` as a tuple: constants, powers of two, and `rank` of them when given (or none, for a scalar)."""
    dims = shape if isinstance(shape, tuple) else (shape,)
    for n in dims:
        if type(n) is not int:
            require_int(n, f"every dimension of the shape of {what}")
        if n <= 0 or n & (n - 1):
            raise Fault(f"the shape {dims} of {what} has the dimension {n}, which is not a power of two")
    if rank is not None and len(dims) not in (0, rank):
        raise Fault(f"the shape {dims} of {what} has rank {len(dims)}, expected {rank}")
    return dims


def require_axis(axis: Any, rank: int, what: str) -> int:
    """`axis`, a constant, counted from 0."""
    at = require_int(axis, f"the axis of {what}")
    if not -rank <= at < rank:
        raise Fault(f"axis {at} of {what} is out of range for rank {rank}")
    return at % rank
