"""Elementwise operations: arithmetic, comparison, masks, and the functions of one argument.

Integers are exact here and wrap on a GPU, so an overflow is a fault. Floats are computed in their own dtype: torch
works bf16 and f16 out in float32 and rounds once, as the hardware does. `ct.maximum` and `ct.minimum` return the
number when the other operand is NaN, as on the GPU, except in a block that has loaded undetermined padding: there NaN
wins, so that what should not be there does not vanish. `ex2.approx` and other rounding modes are not modelled.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import cuda.tile as ct
import torch

from ssdgen.run.emulate.block import answers, here
from ssdgen.run.emulate.dtypes import (
    BINOP_REGISTRY,
    UNARYOP_REGISTRY,
    DType,
    check_range,
    common_dtype,
    constant,
    is_arithmetic,
    is_boolean,
    is_float,
    is_integral,
)
from ssdgen.run.emulate.errors import Fault
from ssdgen.run.emulate.tile import Operand, Scalar, Tile, as_tile, operand, operand_type, tensor

_Numbers = Any  # a tensor or a python number, at least one of an operation's two is a tensor


def _floor_divide(x: _Numbers, y: _Numbers) -> torch.Tensor:
    return torch.floor(x / y)


def _remainder(x: _Numbers, y: _Numbers) -> torch.Tensor:
    return torch.remainder(*_tensors(x, y))


def _tensors(x: _Numbers, y: _Numbers) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(x, torch.Tensor):
        return torch.tensor(x, dtype=y.dtype), y
    return x, y if isinstance(y, torch.Tensor) else torch.tensor(y, dtype=x.dtype)


def _largest(x: _Numbers, y: _Numbers) -> torch.Tensor:
    return (torch.maximum if here().poisoned else torch.fmax)(*_tensors(x, y))


def _smallest(x: _Numbers, y: _Numbers) -> torch.Tensor:
    return (torch.minimum if here().poisoned else torch.fmin)(*_tensors(x, y))


_FLOATS: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "floordiv": _floor_divide,
    "mod": _remainder,
    "pow": operator.pow,
    "max": _largest,
    "min": _smallest,
    "atan2": lambda x, y: torch.atan2(*_tensors(x, y)),
}

_INTEGERS: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "mod": _remainder,
    "max": lambda x, y: torch.maximum(*_tensors(x, y)),
    "min": lambda x, y: torch.minimum(*_tensors(x, y)),
}


def arithmetic(name: str, x: Operand, y: Operand) -> Any:
    """`x` and `y` combined by the operation `name` of cuTile's table; a python number if both are constants."""
    tx, ty = operand_type(x), operand_type(y)
    if isinstance(tx, type) and isinstance(ty, type):
        return fold(name, x, y)
    for dtype in (tx, ty):
        if not isinstance(dtype, type) and not is_arithmetic(dtype):
            raise Fault(f"{name}: {dtype.name} is not arithmetic; cast with .astype first")
    if name == "pow" and is_integral(as_tile(y, name).dtype) and is_float(as_tile(x, name).dtype):
        base = as_tile(x, name)  # an integer exponent does not promote its base
        return Tile(broadcast(torch.pow, base.data, operand(y, base.dtype)), base.dtype)
    dtype = common_dtype(tx, ty, name == "truediv")
    if is_boolean(dtype):
        raise Fault(f"{name} does not take two booleans; cast one to an integer, or use `&` and `|`")
    if is_integral(dtype):
        return _integer(name, x, y, dtype)
    return Tile(broadcast(_FLOATS[name], operand(x, dtype), operand(y, dtype)), dtype)


def fold(name: str, *values: Any) -> Any:
    """A constant computed at compile time, by the function the compiler uses."""
    table = BINOP_REGISTRY if len(values) == 2 else UNARYOP_REGISTRY
    try:
        return table[name].impl(*values)
    except (ArithmeticError, ValueError, TypeError) as e:
        raise Fault(f"{name} of the constants {', '.join(map(repr, values))}: {e}") from e


def broadcast(function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """`function(*args)`, a fault if the shapes do not broadcast."""
    shapes = [tuple(a.shape) for a in args if isinstance(a, torch.Tensor)]
    try:
        return function(*args)
    except RuntimeError as e:
        raise Fault(f"shapes {' and '.join(map(str, shapes))} do not broadcast ({e})") from e


def _integer(name: str, x: Operand, y: Operand, dtype: DType) -> Tile:
    if name not in _INTEGERS:
        raise Fault(f"{name} of two integers is not supported by cuTile; cast one to a float")
    scalars = [_python(v, dtype) for v in (x, y)]
    if not any(isinstance(v, Tile) for v in scalars):
        if name in ("floordiv", "mod") and scalars[1] == 0:
            raise Fault("integer division by zero")
        value = fold(name, *scalars)
        check_range(value, value, dtype)
        return Scalar(value, dtype)
    a, b = tensor(x, dtype).to(torch.int64), tensor(y, dtype).to(torch.int64)
    if name in ("floordiv", "mod") and bool((b == 0).any()):
        raise Fault("integer division by zero")
    return exact(broadcast(_INTEGERS[name], a, b), dtype)


def _python(x: Operand, dtype: DType) -> Any:
    """A scalar or a constant as a python value; any other tile as it is."""
    return x.value if isinstance(x, Scalar) else x if isinstance(x, Tile) else constant(x, dtype)


def exact(wide: torch.Tensor, dtype: DType) -> Tile:
    """The int64 values `wide` as a tile of `dtype`, a fault if one is out of its range (int64 itself is unchecked)."""
    if dtype == ct.int64:
        return Tile(wide, dtype)
    low, high = torch.aminmax(wide)
    check_range(int(low), int(high), dtype)
    return Tile(wide.to(tensor(Scalar(0, dtype), dtype).dtype), dtype)


def _plain(rounding_mode: Any, dtype: DType | None = None) -> None:
    if rounding_mode not in (None, ct.RoundingMode.RN, ct.RoundingMode.FULL, ct.RoundingMode.APPROX):
        raise Fault(f"rounding mode {rounding_mode.value} is not emulated")


def _flush(result: Any, flush_to_zero: bool) -> Any:
    if flush_to_zero and isinstance(result, Tile):
        if result.dtype != ct.float32:
            raise Fault(f"flush_to_zero takes float32, got {result.dtype.name}")
        tiny = torch.finfo(torch.float32).tiny
        return Tile(torch.where(result.data.abs() < tiny, torch.zeros_like(result.data), result.data), ct.float32)
    return result


def _binary(name: str) -> Callable[..., Any]:
    def answer(x: Operand, y: Operand, /, *, rounding_mode: Any = None, flush_to_zero: bool = False) -> Any:
        _plain(rounding_mode)
        return _flush(arithmetic(name, x, y), flush_to_zero)

    return answer


for _function, _name in {
    ct.add: "add",
    ct.sub: "sub",
    ct.mul: "mul",
    ct.truediv: "truediv",
    ct.floordiv: "floordiv",
    ct.mod: "mod",
    ct.pow: "pow",
    ct.atan2: "atan2",
}.items():
    answers(_function)(_binary(_name))


def _extremum(name: str, wins: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def answer(x: Operand, y: Operand, /, *, flush_to_zero: bool = False, propagate_nan: bool = False) -> Any:
        result = arithmetic(name, x, y)
        if propagate_nan and isinstance(result, Tile) and is_float(result.dtype):
            result = Tile(wins(tensor(x, result.dtype), tensor(y, result.dtype)), result.dtype)
        return _flush(result, flush_to_zero)

    return answer


answers(ct.maximum)(_extremum("max", torch.maximum))
answers(ct.minimum)(_extremum("min", torch.minimum))


@answers(ct.divmod)
def divmod_(x: Operand, y: Operand, /) -> tuple[Any, Any]:
    """Quotient and remainder of integers, rounded down as in python; not implemented for floats by cuTile."""
    quotient = arithmetic("floordiv", x, y)
    if isinstance(quotient, Tile) and is_float(quotient.dtype):
        raise Fault("divmod is not implemented for floats by cuTile")
    return quotient, arithmetic("mod", x, y)


def _comparison(name: str, compare: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def answer(x: Operand, y: Operand, /) -> Any:
        tx, ty = operand_type(x), operand_type(y)
        if isinstance(tx, type) and isinstance(ty, type):
            return fold(name, x, y)
        if ct.tfloat32 in (tx, ty):
            raise Fault("tfloat32 is not arithmetic; compare before the cast")
        dtype = common_dtype(tx, ty)
        scalars = [_python(v, dtype) for v in (x, y)]
        if is_integral(dtype) and not any(isinstance(v, Tile) for v in scalars):
            return Scalar(compare(*scalars), ct.bool_)
        return Tile(broadcast(compare, operand(x, dtype), operand(y, dtype)), ct.bool_)

    return answer


for _function, _name in {
    ct.equal: "eq",
    ct.not_equal: "ne",
    ct.greater: "gt",
    ct.greater_equal: "ge",
    ct.less: "lt",
    ct.less_equal: "le",
}.items():
    answers(_function)(_comparison(_name, getattr(operator, _name)))


def _bitwise(name: str, combine: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def answer(x: Operand, y: Operand, /) -> Any:
        tx, ty = operand_type(x), operand_type(y)
        if isinstance(tx, type) and isinstance(ty, type):
            return fold(name, x, y)
        for tile in (as_tile(x, name), as_tile(y, name)):
            if not is_integral(tile.dtype) and not is_boolean(tile.dtype):
                raise Fault(f"bitwise operations take integers or booleans, not {tile.dtype.name}")
        if tx != ty and not isinstance(tx, type) and not isinstance(ty, type):
            raise Fault(f"bitwise operands must have the same dtype, got {tx.name} and {ty.name}")
        dtype = common_dtype(tx, ty)
        scalars = [_python(v, dtype) for v in (x, y)]
        if not any(isinstance(v, Tile) for v in scalars):
            value = combine(*scalars)
            if is_integral(dtype):
                check_range(value, value, dtype)
            return Scalar(value, dtype)
        return Tile(broadcast(combine, operand(x, dtype), operand(y, dtype)), dtype)

    return answer


for _function, _name in {
    ct.bitwise_and: "and_",
    ct.bitwise_or: "or_",
    ct.bitwise_xor: "xor",
    ct.bitwise_lshift: "lshift",
    ct.bitwise_rshift: "rshift",
}.items():
    answers(_function)(_bitwise(_name, getattr(operator, _name)))


@answers(ct.bitwise_not)
def bitwise_not(x: Operand, /) -> Any:
    """`~x` of integers and masks."""
    if not isinstance(x, Tile):
        return fold("bitwise_not", x)
    if is_float(x.dtype):
        raise Fault("bitwise operations take integers or booleans, not floats")
    return Scalar(not x.value, x.dtype) if isinstance(x, Scalar) and is_boolean(x.dtype) else Tile(~x.data, x.dtype)


@answers(ct.negative)
def negative(x: Operand, /) -> Any:
    """`-x`; of a boolean, the negative of 0 or 1 in int32."""
    if not isinstance(x, Tile):
        return fold("neg", x)
    if is_float(x.dtype) and is_arithmetic(x.dtype):
        return Tile(-x.data, x.dtype)
    return arithmetic("sub", 0, x)


def _unary(name: str, function: Callable[[torch.Tensor], torch.Tensor], promotes: bool) -> Callable[..., Any]:
    def answer(x: Operand, /, *, rounding_mode: Any = None, flush_to_zero: bool = False) -> Any:
        if not isinstance(x, Tile):
            return fold(name, x)
        _plain(rounding_mode)
        if is_float(x.dtype):
            if not is_arithmetic(x.dtype):
                raise Fault(f"{name}: {x.dtype.name} is not arithmetic; cast with .astype first")
            return _flush(Tile(function(x.data), x.dtype), flush_to_zero)
        if not promotes:
            raise Fault(f"{name} takes floats, not {x.dtype.name}")
        return _flush(Tile(function(tensor(x, ct.float32)), ct.float32), flush_to_zero)

    return answer


for _function, _name, _torch_function in (
    (ct.exp, "exp", torch.exp),
    (ct.exp2, "exp2", torch.exp2),
    (ct.log, "log", torch.log),
    (ct.log2, "log2", torch.log2),
    (ct.sqrt, "sqrt", torch.sqrt),
    (ct.rsqrt, "rsqrt", torch.rsqrt),
    (ct.tanh, "tanh", torch.tanh),
    (ct.sin, "sin", torch.sin),
    (ct.cos, "cos", torch.cos),
    (ct.tan, "tan", torch.tan),
    (ct.sinh, "sinh", torch.sinh),
    (ct.cosh, "cosh", torch.cosh),
):
    answers(_function)(_unary(_name, _torch_function, promotes=True))

answers(ct.floor)(_unary("floor", torch.floor, promotes=False))
answers(ct.ceil)(_unary("ceil", torch.ceil, promotes=False))


@answers(ct.abs)
def absolute(x: Operand, /) -> Any:
    """`abs(x)`, of any arithmetic dtype."""
    return Tile(x.data.abs(), x.dtype) if isinstance(x, Tile) else fold("abs", x)


@answers(ct.isnan)
def isnan(x: Operand, /) -> Any:
    """Where a float tile is NaN."""
    return Tile(torch.isnan(x.data), ct.bool_) if isinstance(x, Tile) else fold("isnan", x)


@answers(ct.where)
def where(condition: Operand, x: Operand, y: Operand, /) -> Tile:
    """`x` where `condition` holds (is not 0), else `y`, which is not looked at: poison in the other branch is harmless."""
    dtype = common_dtype(operand_type(x), operand_type(y))
    mask = tensor(condition, ct.bool_)
    return Tile(broadcast(torch.where, mask, tensor(x, dtype), tensor(y, dtype)), dtype)
