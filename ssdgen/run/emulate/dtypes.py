"""cuTile's data types on torch tensors: which promotes to which, what a cast does, and the private rules behind both.

The typing rules are not copied but called: promotion, implicit casts and operand types of `mma` are answered by the
functions the compiler itself uses. They are private to cuda-tile, so everything the emulator takes from behind its
public names is imported here, after a check that it is the version these names were read in.
"""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import cuda.tile as ct
import torch

if not ct.__version__.startswith("1.7."):
    raise ImportError(
        f"the emulator was written against the private interface of cuda-tile 1.7, and {ct.__version__} is installed: "
        "install cuda-tile>=1.7,<1.8, or read cuda.tile._dispatch_mode again and widen this check"
    )

from cuda.tile._datatype import _resolve_mma_supported_dtype as mma_result_dtype
from cuda.tile._datatype import is_arithmetic, is_boolean, is_float, is_integral
from cuda.tile._dispatch_mode import DispatchMode
from cuda.tile._exception import TileError
from cuda.tile._execution import is_stub
from cuda.tile._ir.cast_ops import _is_implicit_cast_ok, check_implicit_cast
from cuda.tile._ir.ops_utils import BINOP_REGISTRY, UNARYOP_REGISTRY, promote_dtypes
from cuda.tile._ir.type import LooselyTypedScalar

from ssdgen.run.emulate.errors import Fault

__all__ = [
    "BINOP_REGISTRY",
    "UNARYOP_REGISTRY",
    "DType",
    "DispatchMode",
    "Number",
    "TileError",
    "check_range",
    "common_dtype",
    "constant",
    "convert",
    "cutile_dtype",
    "implicit",
    "is_arithmetic",
    "is_boolean",
    "is_float",
    "is_integral",
    "is_stub",
    "mma_result_dtype",
    "poison",
    "torch_dtype",
]

DType: TypeAlias = Any
"""A `cuda.tile.DType`; the package has no type information."""

Number: TypeAlias = bool | int | float
"""A compile-time constant: cuTile types it loosely, so that `tile_bf16 * 0.5` stays bf16."""

_TORCH: dict[DType, torch.dtype] = {
    ct.bool_: torch.bool,
    ct.uint8: torch.uint8,
    ct.int8: torch.int8,
    ct.int16: torch.int16,
    ct.int32: torch.int32,
    ct.int64: torch.int64,
    ct.float16: torch.float16,
    ct.bfloat16: torch.bfloat16,
    ct.float32: torch.float32,
    ct.float64: torch.float64,
    ct.tfloat32: torch.float32,
}
_CUTILE = {dtype: name for name, dtype in _TORCH.items() if name != ct.tfloat32}


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch type that holds `dtype`; tfloat32 is held in float32. Faults on a type that is not emulated."""
    if dtype not in _TORCH:
        raise Fault(f"dtype {getattr(dtype, 'name', dtype)} is not emulated")
    return _TORCH[dtype]


def cutile_dtype(dtype: torch.dtype) -> DType:
    """The cuTile type of an array of `dtype`. Faults on a type that is not emulated."""
    if dtype not in _CUTILE:
        raise Fault(f"an array of {dtype} is not emulated")
    return _CUTILE[dtype]


@functools.cache
def _promoted(x: DType | type, y: DType | type, force_float: bool) -> DType:
    loose = [LooselyTypedScalar(t(1)) if isinstance(t, type) else t for t in (x, y)]
    return promote_dtypes(*loose, force_float)


def common_dtype(x: DType | type, y: DType | type, force_float: bool = False) -> DType:
    """The dtype of an operation between `x` and `y`, each a dtype or, for a constant, its python type.

    bf16 with f32 is f32, bf16 with i32 or a python float is bf16, i32 with a python float is f32, and there is none for
    bf16 with f16 (TileTypeError). `force_float` is true division's rule: i32 with i32 gives f32.
    """
    return _promoted(x, y, force_float)


def implicit(source: DType | Number, target: DType, what: str) -> None:
    """Fault unless cuTile casts `source`, a tile's dtype or a constant, to `target` by itself, as a store does.

    The rule is promotion: bf16, f16, i32 and bool store into f32; f32 into bf16, f32 into i32, f16 into bf16 and
    tfloat32 into f32 are type errors; the constant 1.5 stores into bf16, a run-time float does not.
    """
    if isinstance(source, bool | int | float):
        try:
            check_implicit_cast(LooselyTypedScalar(source), target)
        except TileError as e:
            raise Fault(f"{what}: {e}") from e
    elif source is not target and not _castable(source, target):
        raise Fault(f"{what}: cannot implicitly cast {source.name} to {target.name}; write .astype({target.name})")


_castable = functools.cache(_is_implicit_cast_ok)


def constant(value: Number, dtype: DType) -> Number:
    """The constant `value` as an operand of `dtype`: rounded to bf16 or f16 where torch would keep it in float32."""
    if dtype in _NARROW:
        return _rounded(value, _TORCH[dtype]) if value else value
    if is_integral(dtype):
        check_range(value, value, dtype)
    return value


_NARROW = (ct.bfloat16, ct.float16)


@functools.lru_cache(maxsize=4096)
def _rounded(value: Number, dtype: torch.dtype) -> Number:
    return torch.tensor(value, dtype=dtype).item()


def check_range(low: Number, high: Number, dtype: DType) -> None:
    """Fault unless every integer of [low, high] is a value of the integer `dtype`: the GPU would wrap silently."""
    info = torch.iinfo(_TORCH[dtype])
    if low < info.min or high > info.max:
        raise Fault(f"integer overflow: {low if low < info.min else high} is not a value of {dtype.name}")


def convert(data: torch.Tensor, source: DType, target: DType) -> torch.Tensor:
    """`data`, of `source`, cast explicitly to `target`: round to nearest even, floats to integers towards zero.

    The compiler's table of float conversions gives nearest even as the only default, also to tfloat32. A float that no
    integer of `target` is near is a fault.
    """
    if source is target:
        return data
    if target == ct.tfloat32:
        return _to_tf32(data.to(torch.float32))
    if is_integral(target) and is_float(source):
        info = torch.iinfo(torch_dtype(target))
        if not bool(((data >= info.min) & (data <= info.max)).all()):
            raise Fault(f"a {source.name} that is out of range, or NaN, is cast to {target.name}")
    return data.to(torch_dtype(target))


def _to_tf32(data: torch.Tensor) -> torch.Tensor:
    """float32 rounded to TF32's 10 bits of mantissa, ties to even; infinities and NaN stay."""
    bits = data.contiguous().view(torch.int32)
    rounded = ((bits >> 13) & 1).add_(0xFFF).add_(bits).bitwise_and_(~0x1FFF)
    return torch.where(torch.isnan(data), data, rounded.view(torch.float32))


_POISON_BITS = 0x5EADBEEF5EADBEEF


def poison(dtype: DType) -> Number:
    """What fills elements cuTile leaves undetermined: NaN, for integers a large odd number, for bool True."""
    if is_float(dtype):
        return float("nan")
    return True if is_boolean(dtype) else int(_POISON_BITS >> (64 - dtype.bitwidth))
