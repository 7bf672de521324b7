"""From a layer's expressions to expressions over tiles: where padding may be left alone, and operations that have no kernel."""

from __future__ import annotations

from collections.abc import Mapping

from ssdgen.ir.constants import FOLD
from ssdgen.ir.expr import Apply, Const, Contract, Expr, Ref, mul, rewrite, walk

LOG2_MIN = -128.0
"""A token's log2 decay is clamped to at least this, so that sums of it keep their accuracy; 2^-128 is 0 beside float32."""


def fold(expr: Expr) -> Expr:
    """`expr` with operations on constants done, and small integer powers as products."""

    def rule(e: Expr) -> Expr | None:
        if not isinstance(e, Apply):
            return None
        args = tuple(fold(a) for a in e.args)
        numbers = [a.value for a in args if isinstance(a, Const)]
        if len(numbers) == len(args) and e.op in FOLD:
            return Const(FOLD[e.op](*numbers))
        if e.op == "pow" and isinstance(args[1], Const) and args[1].value in (2, 3, 4):
            return mul(*(args[0],) * int(args[1].value))
        return Apply(e.op, args, e.span)

    return rewrite(expr, rule)


def inline(expr: Expr, lets: Mapping[str, Expr]) -> Expr:
    """`expr` with references to lets replaced by their values, all the way down."""
    return rewrite(expr, lambda e: inline(lets[e.name], lets) if isinstance(e, Ref) and e.name in lets else None)


def vanishes_on_padding(expr: Expr, axis: str) -> bool:
    """Whether `expr` (lets inlined) is zero wherever its inputs are zero padding, past the end of time and of `axis`.

    False when in doubt; then the tile is masked.
    """
    match expr:
        case Const(value=value):
            return value == 0
        case Ref(axes=axes, per_token=per_token):
            return per_token and axis in axes
        case Apply(op="mul", args=args):
            return any(vanishes_on_padding(a, axis) for a in args) and all(finite_on_padding(a) for a in args)
        case Apply(op="div", args=(top, bottom)):
            return vanishes_on_padding(top, axis) and finite_on_padding(expr) and finite_on_padding(bottom)
        case Apply(op="add" | "sub" | "min" | "max", args=args):
            return all(vanishes_on_padding(a, axis) for a in args)
        case Apply(op="neg" | "abs" | "tanh" | "relu" | "silu" | "sqrt", args=(arg,)):
            return vanishes_on_padding(arg, axis)
        case _:
            return False


def finite_on_padding(expr: Expr) -> bool:
    """Whether `expr` (lets inlined) is surely finite where its inputs are zero: no quotient or logarithm of an input."""
    for e in walk(expr):
        match e:
            case Apply(op="log" | "log2"):
                return False
            case Apply(op="div", args=(_, bottom)) if any(isinstance(b, Ref | Contract) for b in walk(bottom)):
                return False
            case Apply(op="pow", args=(_, Const(value=exponent))) if exponent < 0:
                return False
    return True


def where(condition: Expr, value: Expr) -> Expr:
    """`value` where `condition` holds, else 0."""
    return Apply("where", (condition, value, Const(0)))


def exp2(exponent: Expr) -> Expr:
    """2^exponent; one if the exponent is the constant 0."""
    return Const(1) if exponent == Const(0) else Apply("exp2", (exponent,))


def decay_of(log2: Expr) -> Expr:
    """What one token leaves of a state whose log2 decay is `log2`."""
    return fold(exp2(clamp_log2(log2)))


def at_most_0(expr: Expr) -> Expr:
    """min(expr, 0): a difference of running sums, which rounding can make positive."""
    return Apply("min", (expr, Const(0)))


def minus_abs(expr: Expr) -> Expr:
    """-|expr|: a difference of running sums as well, or of tokens in the wrong order anything finite that is at most 0. Signs
    cost a kernel nothing, a minimum an instruction an element."""
    return Apply("neg", (Apply("abs", (expr,)),))


def clamp_log2(expr: Expr) -> Expr:
    """A token's log2 decay, clamped to [LOG2_MIN, 0]."""
    return fold(Apply("clamp", (expr, Const(LOG2_MIN), Const(0))))


def float32(expr: Expr) -> Expr:
    """`expr` widened to float32."""
    return Apply("float32", (expr,))


def plus_term(total: Expr, rest: Expr, factor: Expr) -> Expr:
    """total + rest * factor; where a term of `total` has that factor too, as (rest + ...) * factor."""
    match total:
        case Apply(op="add", args=(left, right)) if factor in _factors(right):
            return Apply("add", (left, _with(right, rest, factor)))
        case Apply(op="add", args=(left, right)):
            return Apply("add", (plus_term(left, rest, factor), right))
        case _ if factor in _factors(total):
            return _with(total, rest, factor)
        case _:
            return Apply("add", (total, mul(rest, factor)))


def _factors(product: Expr) -> tuple[Expr, ...]:
    match product:
        case Apply(op="mul", args=(left, right)):
            return (*_factors(left), *_factors(right))
        case _:
            return (product,)


def _with(product: Expr, rest: Expr, factor: Expr) -> Expr:
    """product + rest * factor, where `factor` is one of the product's."""
    others = list(_factors(product))
    others.remove(factor)
    return mul(Apply("add", (rest, mul(*others))), factor)


def retime(expr: Expr, old: str, new: str) -> Expr:
    """`expr` with the axis `old` of its tiles called `new`."""

    def rule(e: Expr) -> Expr | None:
        if isinstance(e, Ref) and old in e.axes:
            return Ref(e.name, tuple(new if a == old else a for a in e.axes), e.per_token, e.lag, e.span)
        return None

    return rewrite(expr, rule)
