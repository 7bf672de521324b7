"""Expressions: a small tree with named axes, ours, so that a message can point at what the user wrote.

An expression has no loops and no indices: it is a value at one token, and its *axes* say over what else it varies.
Operands with different axes combine by name, so `A[h] * x[b t h p]` needs no transposes. A group axis reads as the head
axis it is shared by: `axes_of` never returns one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from ssdgen.diagnostics import NOWHERE, Span

Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Const:
    """A number: an int as written, a float, or inf."""

    value: int | float
    span: Span = field(default=NOWHERE, compare=False, repr=False)

    def __str__(self) -> str:
        return to_text(self)


@dataclass(frozen=True, slots=True)
class Ref:
    """A named value at this token, or `lag` tokens before (zero before the first; for a state, its value then).

    `axes` are those of the declaration without the time axis, group axes already read as their head axis.
    `per_token` says whether it varies in time.
    """

    name: str
    axes: Axes = ()
    per_token: bool = False
    lag: int = 0
    span: Span = field(default=NOWHERE, compare=False, repr=False)

    def __str__(self) -> str:
        return to_text(self)


@dataclass(frozen=True, slots=True)
class Size:
    """The length of an axis, `size(n)`."""

    axis: str
    span: Span = field(default=NOWHERE, compare=False, repr=False)

    def __str__(self) -> str:
        return to_text(self)


@dataclass(frozen=True, slots=True)
class Index:
    """The position along an axis, from 0, `index(h)`."""

    axis: str
    span: Span = field(default=NOWHERE, compare=False, repr=False)

    def __str__(self) -> str:
        return to_text(self)


@dataclass(frozen=True, slots=True)
class Apply:
    """An elementwise operation of `OPS` on arguments that broadcast by axis name."""

    op: str
    args: tuple[Expr, ...]
    span: Span = field(default=NOWHERE, compare=False, repr=False)

    def __str__(self) -> str:
        return to_text(self)


@dataclass(frozen=True, slots=True)
class Contract:
    """The sum of `left * right` over `axis`, written `left . right`."""

    left: Expr
    right: Expr
    axis: str
    span: Span = field(default=NOWHERE, compare=False, repr=False)

    def __str__(self) -> str:
        return to_text(self)


Expr = Const | Ref | Size | Index | Apply | Contract

OPS: dict[str, int] = {
    "add": 2,
    "sub": 2,
    "mul": 2,
    "div": 2,
    "neg": 1,
    "pow": 2,
    "exp": 1,
    "exp2": 1,
    "log": 1,
    "log2": 1,
    "log1p": 1,  # log(1 + x), accurate where x is small
    "sqrt": 1,
    "abs": 1,
    "min": 2,
    "max": 2,
    "clamp": 3,  # clamp(x, low, high) = min(max(x, low), high)
    "sigmoid": 1,
    "logsigmoid": 1,
    "softplus": 1,
    "silu": 1,
    "tanh": 1,
    "relu": 1,
}
"""Every operation and its number of arguments. The exponent of `pow` is a constant."""

DERIVATIVE_OPS: dict[str, int] = {
    "sign": 1,  # -1, 0 or 1
    "above": 2,  # 1 where the first is above the second, else 0
    "within": 3,  # within(x, low, high): 1 where low <= x <= high, else 0
}
"""Operations that occur in derivatives alone: those of `abs`, of `max`, `min` and `relu`, and of `clamp`."""

ZERO = Const(0)
ONE = Const(1)


def children(expr: Expr) -> tuple[Expr, ...]:
    """The direct operands of `expr`."""
    match expr:
        case Apply(args=args):
            return args
        case Contract(left=left, right=right):
            return (left, right)
        case _:
            return ()


def walk(expr: Expr) -> Iterator[Expr]:
    """`expr` and everything below it, parents first, left to right."""
    yield expr
    for child in children(expr):
        yield from walk(child)


def rewrite(expr: Expr, rule: Callable[[Expr], Expr | None]) -> Expr:
    """`expr` with every node for which `rule` returns an expression replaced by it, outermost first."""
    replaced = rule(expr)
    if replaced is not None:
        return replaced
    match expr:
        case Apply(args=args):
            return replace(expr, args=tuple(rewrite(a, rule) for a in args))
        case Contract(left=left, right=right):
            return replace(expr, left=rewrite(left, rule), right=rewrite(right, rule))
        case _:
            return expr


def refs(expr: Expr) -> tuple[Ref, ...]:
    """Every reference in `expr`, each once, in the order they are written."""
    return tuple(dict.fromkeys(e for e in walk(expr) if isinstance(e, Ref)))


def outermost(expr: Expr) -> tuple[Ref | Contract, ...]:
    """The references and contractions that `expr` is elementwise in, each once, in the order they are written."""
    if isinstance(expr, Ref | Contract):
        return (expr,)
    return tuple(dict.fromkeys(e for child in children(expr) for e in outermost(child)))


def axes_of(expr: Expr) -> Axes:
    """The axes `expr` varies over, besides time, in the order they are first met."""
    match expr:
        case Ref(axes=axes):
            return axes
        case Index(axis=axis):
            return (axis,)
        case Contract(left=left, right=right, axis=axis):
            return tuple(a for a in merge_axes((axes_of(left), axes_of(right))) if a != axis)
        case Apply(args=args):
            return merge_axes(axes_of(a) for a in args)
        case _:
            return ()


def merge_axes(several: Iterable[Axes]) -> Axes:
    """The union of axes, in the order they are first met."""
    return tuple(dict.fromkeys(axis for axes in several for axis in axes))


def is_per_token(expr: Expr) -> bool:
    """Whether `expr` varies from token to token."""
    return any(isinstance(e, Ref) and e.per_token for e in walk(expr))


def add(*terms: Expr) -> Expr:
    """The sum of `terms`, zeros left out."""
    return _fold("add", tuple(t for t in terms if t != ZERO), ZERO)


def mul(*factors: Expr) -> Expr:
    """The product of `factors`, ones left out; zero if one is zero."""
    if ZERO in factors:
        return ZERO
    return _fold("mul", tuple(f for f in factors if f != ONE), ONE)


def _fold(op: str, args: tuple[Expr, ...], empty: Expr) -> Expr:
    if not args:
        return empty
    total = args[0]
    for arg in args[1:]:
        total = Apply(op, (total, arg), total.span.to(arg.span))
    return total


_INFIX = {
    "add": (1, " + "),
    "sub": (1, " - "),
    "mul": (2, " * "),
    "div": (2, " / "),
    "floordiv": (2, " // "),
    "pow": (4, "^"),
}


def to_text(expr: Expr, time: str = "t") -> str:
    """`expr` in the spec language, with as few parentheses as it takes."""

    def show(e: Expr, level: int) -> str:
        match e:
            case Const(value=value):
                short = f"{value:g}"
                return short if isinstance(value, float) and float(short) == value else repr(value)
            case Ref(name=name, lag=lag):
                return f"{name}[{time}-{lag}]" if lag else name
            case Size(axis=axis):
                return f"size({axis})"
            case Index(axis=axis):
                return f"index({axis})"
            case Contract(left=left, right=right):
                return _wrap(f"{show(left, 3)} . {show(right, 4)}", level > 3)
            case Apply(op="neg", args=(arg,)):
                return _wrap(f"-{show(arg, 3)}", level > 2)
            case Apply(op=op, args=args) if op in _INFIX:
                own, sign = _INFIX[op]
                tighter = own if op in ("add", "mul") else own + 1
                return _wrap(show(args[0], own + (op == "pow")) + sign + show(args[1], tighter), own < level)
            case Apply(op=op, args=args):
                return f"{op}({', '.join(show(a, 0) for a in args)})"

    return show(expr, 0)


def _wrap(text: str, needed: bool) -> str:
    return f"({text})" if needed else text
