"""Arithmetic on the constants of an expression."""

from __future__ import annotations

import math
from collections.abc import Callable

from ssdgen.ir.expr import Apply, Const, Expr

FOLD: dict[str, Callable[..., float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
    "pow": lambda a, b: a**b,
    "exp": math.exp,
    "exp2": lambda a: 2.0**a,
    "log": math.log,
    "log2": math.log2,
    "log1p": math.log1p,
    "sqrt": math.sqrt,
    "abs": abs,
    "min": min,
    "max": max,
    "clamp": lambda x, low, high: min(max(x, low), high),
}
"""Operations that are done on constants when a spec is read; the others stay as they are written."""


def evaluate(expr: Expr) -> float | None:
    """The number an expression of constants is; None for any other. Raises ArithmeticError or ValueError for no number."""
    match expr:
        case Const(value=value):
            number: float = value
        case Apply(op=op, args=args) if op in FOLD:
            values = [evaluate(a) for a in args]
            if None in values:
                return None
            number = FOLD[op](*values)
        case _:
            return None
    if isinstance(number, complex) or not math.isfinite(number):
        raise ArithmeticError(f"{number} is no finite number")
    return number
