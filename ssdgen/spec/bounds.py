"""What is known of a value's range: interval analysis with open and closed ends, over the real numbers.

Bounds are on exact values: an infinite end is a limit and never attained, so exp of anything is above 0 and a sigmoid is
inside (0, 1), however float32 may round them. Each use of a name is taken as independent of the others, so that the result
contains every value, and may contain more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from ssdgen.ir.expr import Apply, Const, Contract, Expr, Index, Ref, Size
from ssdgen.ir.layer import ANY, INFINITY, Interval

End = tuple[float, bool]
"""A bound and whether it is open."""

NATURAL = Interval(0.0, INFINITY)
SILU_LOWEST = -0.2784645427610739
SILU_LOWEST_AT = -1.2784645427610738


def bounds(expr: Expr, env: Mapping[str, Interval]) -> Interval:
    """An interval that contains `expr` whenever every name lies in its interval of `env` (anything, if it has none).

    A value of the token before is zero before the first token, so its interval is widened to contain 0.
    """
    match expr:
        case Const(value=value):
            return Interval(float(value), float(value))
        case Ref(name=name, lag=lag):
            known = env.get(name, ANY)
            return _interval(*_widened(_ends(known), 0.0) if lag else _ends(known))
        case Size():
            return _interval((1.0, False), (INFINITY, True))
        case Index():
            return _interval((0.0, False), (INFINITY, True))
        case Contract(left=left, right=right):
            return _sum_of_any_number(_mul(bounds(left, env), bounds(right, env)))
        case Apply(op=op, args=args):
            return _RULES[op](*(bounds(a, env) for a in args))


def contains(outer: Interval, inner: Interval) -> bool:
    """Whether every number of `inner` is in `outer`."""
    (low, high), (inner_low, inner_high) = _ends(outer), _ends(inner)
    above = inner_low[0] > low[0] or (inner_low[0] == low[0] and (inner_low[1] or not low[1]))
    below = inner_high[0] < high[0] or (inner_high[0] == high[0] and (inner_high[1] or not high[1]))
    return above and below


def holds(interval: Interval, value: float) -> bool:
    """Whether `value` is in `interval`; an infinite end that is closed holds infinity."""
    above = interval.low < value or (interval.low == value and not interval.low_open)
    below = value < interval.high or (interval.high == value and not interval.high_open)
    return above and below


def _ends(i: Interval) -> tuple[End, End]:
    low, high = (i.low, i.low_open or i.low == -INFINITY), (i.high, i.high_open or i.high == INFINITY)
    return low, high


def _interval(low: End, high: End) -> Interval:
    if math.isnan(low[0]) or math.isnan(high[0]) or low[0] == INFINITY or high[0] == -INFINITY:
        return ANY
    zero = 0.0  # makes -0.0 a 0.0
    return Interval(low[0] + zero, high[0] + zero, low[1] or low[0] == -INFINITY, high[1] or high[0] == INFINITY)


def _widened(ends: tuple[End, End], point: float) -> tuple[End, End]:
    low, high = ends
    return min(low, (point, False)), max(high, (point, False), key=_upper)


def _upper(end: End) -> tuple[float, bool]:
    return end[0], not end[1]


def _add(a: Interval, b: Interval) -> Interval:
    (al, ah), (bl, bh) = _ends(a), _ends(b)
    return _interval((al[0] + bl[0], al[1] or bl[1]), (ah[0] + bh[0], ah[1] or bh[1]))


def _neg(a: Interval) -> Interval:
    low, high = _ends(a)
    return _interval((-high[0], high[1]), (-low[0], low[1]))


def _sub(a: Interval, b: Interval) -> Interval:
    return _add(a, _neg(b))


def _mul(a: Interval, b: Interval) -> Interval:
    corners = [_corner(x, y) for x in _ends(a) for y in _ends(b)]
    return _interval(min(corners), max(corners, key=_upper))


def _corner(x: End, y: End) -> End:
    """The product of two ends. A zero that is attained makes it 0 whatever the other is; 0 times a limit tends to less."""
    if x[0] == 0 or y[0] == 0:
        attained = (x[0] == 0 and not x[1]) or (y[0] == 0 and not y[1])
        return 0.0, not attained
    return x[0] * y[0], x[1] or y[1]


def _reciprocal(a: Interval) -> Interval:
    low, high = _ends(a)
    if low[0] < 0 < high[0] or (low[0] == 0 and not low[1]) or (high[0] == 0 and not high[1]):
        return ANY
    new_low = (-INFINITY if high[0] == 0 else 1 / high[0], high[1])
    new_high = (INFINITY if low[0] == 0 else 1 / low[0], low[1])
    return _interval(new_low, new_high)


def _div(a: Interval, b: Interval) -> Interval:
    inverse = _reciprocal(b)
    return ANY if inverse == ANY else _mul(a, inverse)


def _pow(a: Interval, exponent: Interval) -> Interval:
    c = exponent.low
    if c < 0:
        return _reciprocal(_pow(a, Interval(-c, -c)))
    if c == 0:
        return Interval(1.0, 1.0)
    if c == int(c) and int(c) % 2 == 1:
        return _rising(a, lambda x: _power(x, c))
    base = _abs(a) if c == int(c) else _not_negative(a)
    return _rising(base, lambda x: _power(x, c))


def _power(x: float, c: float) -> float:
    try:
        return float(x**c)
    except OverflowError:
        return math.copysign(INFINITY, x)


def _rising(a: Interval, f: Callable[[float], float], never: tuple[float, ...] = ()) -> Interval:
    """The image under a strictly rising function; it tends to the values `never`, so those are open ends."""
    low, high = _ends(a)
    f_low, f_high = f(low[0]), f(high[0])
    return _interval((f_low, low[1] or f_low in never), (f_high, high[1] or f_high in never))


def _not_negative(a: Interval) -> Interval:
    return _max(a, Interval(0.0, 0.0))


def _max(a: Interval, b: Interval) -> Interval:
    (al, ah), (bl, bh) = _ends(a), _ends(b)
    return _interval(max(al, bl), max(ah, bh, key=_upper))


def _min(a: Interval, b: Interval) -> Interval:
    return _neg(_max(_neg(a), _neg(b)))


def _clamp(x: Interval, low: Interval, high: Interval) -> Interval:
    return _min(_max(x, low), high)


def _abs(a: Interval) -> Interval:
    low, high = _ends(a)
    if low[0] >= 0:
        return a
    if high[0] <= 0:
        return _neg(a)
    return _interval((0.0, False), max((-low[0], low[1]), high, key=_upper))


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return INFINITY


def _exp2(x: float) -> float:
    return _power(2.0, x)


def _log_with(log: Callable[[float], float]) -> Callable[[Interval], Interval]:
    return lambda a: _rising(a, lambda x: log(x) if 0 < x < INFINITY else (INFINITY if x > 0 else -INFINITY))


def _softplus(x: float) -> float:
    return x if x > 700 else math.log1p(math.exp(x))


def _sigmoid(x: float) -> float:
    return 1 / (1 + _exp(-x))


def _silu_at(x: float) -> float:
    return 0.0 if x == -INFINITY else x * _sigmoid(x)


def _silu(a: Interval) -> Interval:
    low, high = _ends(a)
    ends = [(_silu_at(low[0]), low[1]), (_silu_at(high[0]), high[1])]
    if low[0] < SILU_LOWEST_AT < high[0]:
        ends.append((SILU_LOWEST, False))
    return _interval(min(ends), max(ends, key=_upper))


def _sum_of_any_number(a: Interval) -> Interval:
    """The sum of one or more values of `a`."""
    low, high = _ends(a)
    return _interval(low if low[0] >= 0 else (-INFINITY, True), high if high[0] <= 0 else (INFINITY, True))


_RULES: dict[str, Callable[..., Interval]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "neg": _neg,
    "pow": _pow,
    "exp": lambda a: _rising(a, _exp, never=(0.0,)),
    "exp2": lambda a: _rising(a, _exp2, never=(0.0,)),
    "log": _log_with(math.log),
    "log2": _log_with(math.log2),
    "log1p": lambda a: _RULES["log"](_add(a, Interval(1.0, 1.0))),
    "sqrt": lambda a: _rising(_not_negative(a), math.sqrt),
    "abs": _abs,
    "min": _min,
    "max": _max,
    "clamp": _clamp,
    "sigmoid": lambda a: _rising(a, _sigmoid, never=(0.0, 1.0)),
    "logsigmoid": lambda a: _rising(a, lambda x: -_softplus(-x), never=(0.0,)),
    "softplus": lambda a: _rising(a, _softplus, never=(0.0,)),
    "silu": _silu,
    "tanh": lambda a: _rising(a, math.tanh, never=(-1.0, 1.0)),
    "relu": _not_negative,
}
