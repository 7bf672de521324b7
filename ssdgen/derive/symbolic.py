"""The one door to sympy: `thaw` takes an expression there, `freeze` brings one back.

The functions of the language that sympy lacks are its functions here, with signs and derivatives, so that what sympy
differentiates comes out ready to print. Which order terms have is decided by `freeze`, never by sympy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]

from ssdgen.derive.recurrence import LOG2E
from ssdgen.ir.expr import DERIVATIVE_OPS, ONE, OPS, Apply, Const, Contract, Expr, Ref, outermost, to_text

Symbolic = Any
"""A sympy expression; sympy has no types that mypy could check."""

LN2 = sympy.Symbol("ln2", positive=True)
"""The natural logarithm of 2, kept apart so that sympy does not rewrite powers that it occurs in."""


class _Real(sympy.Function):  # type: ignore[misc]
    """A real function of real arguments."""

    is_real = True


class sigmoid(_Real):
    """1 / (1 + exp(-x)); of x and -x only one is kept, by sigmoid(-x) = 1 - sigmoid(x)."""

    nargs = 1
    is_positive = True

    @classmethod
    def eval(cls, x: Symbolic) -> Symbolic:
        """Sympy's hook for rewriting a new application."""
        return 1 - cls(-x) if x.could_extract_minus_sign() else None

    def fdiff(self, argindex: int = 1) -> Symbolic:
        """The derivative."""
        return self * (1 - self)


class logsigmoid(_Real):
    """log(sigmoid(x)) = -softplus(-x)."""

    nargs = 1
    is_negative = True

    def fdiff(self, argindex: int = 1) -> Symbolic:
        """The derivative."""
        return 1 - sigmoid(self.args[0])


class softplus(_Real):
    """log(1 + exp(x))."""

    nargs = 1
    is_positive = True

    def fdiff(self, argindex: int = 1) -> Symbolic:
        """The derivative."""
        return sigmoid(self.args[0])


class silu(_Real):
    """x * sigmoid(x)."""

    nargs = 1

    def fdiff(self, argindex: int = 1) -> Symbolic:
        """The derivative."""
        s = sigmoid(self.args[0])
        return s + self * (1 - s)


class _Flat(_Real):
    """A function that is constant but for its jumps."""

    def fdiff(self, argindex: int = 1) -> Symbolic:
        """The derivative, where there is one."""
        return sympy.Integer(0)


class sign(_Flat):
    """-1, 0 or 1."""

    nargs = 1


class above(_Flat):
    """1 where the first argument is above the second, else 0."""

    nargs = 2
    is_nonnegative = True


class within(_Flat):
    """within(x, low, high): 1 where low <= x <= high, else 0."""

    nargs = 3
    is_nonnegative = True


class relu(_Real):
    """max(x, 0)."""

    nargs = 1
    is_nonnegative = True

    def fdiff(self, argindex: int = 1) -> Symbolic:
        """The derivative, 0 at 0."""
        return above(self.args[0], 0)


class clamp(_Real):
    """min(max(x, low), high)."""

    nargs = 3

    def fdiff(self, argindex: int = 1) -> Symbolic:
        """The derivative; at a bound it is all that of x."""
        x, low, high = self.args
        if argindex == 1:
            return within(x, low, high)
        return above(low, x) * (1 - above(low, high)) if argindex == 2 else above(maximum(x, low), high)


class minimum(_Real):
    """The smaller of two; sympy's own Min compares its arguments at length."""

    nargs = 2

    def fdiff(self, argindex: int = 1) -> Symbolic:
        """The derivative; where both are equal it is all that of the second."""
        first = above(self.args[1], self.args[0])
        return first if argindex == 1 else 1 - first


class maximum(_Real):
    """The larger of two."""

    nargs = 2

    def fdiff(self, argindex: int = 1) -> Symbolic:
        """The derivative; where both are equal it is all that of the second."""
        first = above(self.args[0], self.args[1])
        return first if argindex == 1 else 1 - first


class absolute(_Real):
    """The absolute value, not taken apart."""

    nargs = 1
    is_nonnegative = True

    def fdiff(self, argindex: int = 1) -> Symbolic:
        """The derivative, 0 at 0."""
        return sign(self.args[0])


class dot(_Real):
    """The sum of left * right over an axis; the axis is a Symbol."""

    nargs = 3


class Atom(sympy.Symbol):  # type: ignore[misc]
    """A Ref, Size or Index as a real symbol that remembers what it is."""

    __slots__ = ("expr",)
    expr: Expr

    def __new__(cls, expr: Expr, **assumptions: bool) -> Atom:
        """The symbol of `expr`, real and with the further sympy `assumptions`."""
        atom: Atom = sympy.Symbol.__xnew__(cls, to_text(expr), real=True, **assumptions)
        atom.expr = expr
        return atom

    def _hashable_content(self) -> tuple[Any, ...]:
        return (repr(self.expr), *super()._hashable_content())


OPERATIONS: dict[str, Callable[..., Symbolic]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
    "pow": lambda a, b: a**b,
    "exp": sympy.exp,
    "exp2": lambda a: sympy.Integer(2) ** a,
    "log": sympy.log,
    "log2": lambda a: sympy.log(a) / LN2,
    "log1p": lambda a: sympy.log(1 + a),
    "sqrt": sympy.sqrt,
    "tanh": sympy.tanh,
    "abs": absolute,
    "min": minimum,
    "max": maximum,
    "clamp": clamp,
    "sigmoid": sigmoid,
    "logsigmoid": logsigmoid,
    "softplus": softplus,
    "silu": silu,
    "relu": relu,
    "sign": sign,
    "above": above,
    "within": within,
}
assert OPERATIONS.keys() == OPS.keys() | DERIVATIVE_OPS.keys()


def thaw(
    expr: Expr,
    leaf: Callable[[Expr], Symbolic] | None = None,
    operations: Mapping[str, Callable[..., Symbolic]] = OPERATIONS,
) -> Symbolic:
    """`expr` in sympy. `leaf` says what a Ref, Size, Index or Contract becomes; by default an Atom and a `dot`."""
    match expr:
        case Const(value=value):
            return _number(value)
        case Apply(op=op, args=args):
            return operations[op](*(thaw(a, leaf, operations) for a in args))
    if leaf is not None:
        return leaf(expr)
    if isinstance(expr, Contract):
        return dot(thaw(expr.left), thaw(expr.right), sympy.Symbol(expr.axis))
    return Atom(expr)


def partials(expr: Expr, factor: Symbolic = 1) -> list[tuple[Ref | Contract, Expr]]:
    """`factor` times the derivative of `expr` by each reference and each outermost contraction in it, zeros left out."""
    value = factor * thaw(expr, Atom)
    derivatives = [(e, sympy.diff(value, Atom(e)).subs(sympy.log(2), LN2)) for e in outermost(expr)]
    return [(e, freeze(d)) for e, d in derivatives if d != 0]


def pow2(exponent: Symbolic) -> Symbolic:
    """2^exponent, logarithms in the exponent resolved."""
    number, rest = sympy.expand(exponent).as_coeff_Add()
    return sympy.Integer(2) ** number * sympy.exp(sympy.expand(rest * LN2))


def equal(left: Symbolic, right: Symbolic) -> bool:
    """Whether two values are equal: as sums of monomials, or if they have denominators, over a common one."""
    difference = sympy.expand(left - right)
    if difference != 0 and any(power.base.is_Add for power in difference.atoms(sympy.Pow)):
        difference = sympy.expand(sympy.fraction(sympy.together(difference))[0])
    return bool(difference == 0)


def _number(value: float) -> Symbolic:
    """Exactly what was written: 0.1 is a tenth, and the constants that stand for log2(e) and log(2) are those."""
    if value == LOG2E.value:
        return 1 / LN2
    if value == math.log(2):
        return LN2
    return sympy.oo if math.isinf(value) else sympy.Rational(str(value))


def freeze(value: Symbolic) -> Expr:
    """The expression of `value`, its terms in our order; TypeError for what the language cannot say.

    `freeze(thaw(e))` equals `e` up to the order and grouping of sums and products.
    """
    if isinstance(value, Atom):
        return value.expr
    if value == 1 / LN2:
        return LOG2E
    if value.is_Rational:
        return Const(int(value.p) if value.q == 1 else float(value))
    if value in (sympy.oo, -sympy.oo):
        return Const(math.inf if value > 0 else -math.inf)
    if value == LN2:
        return Const(math.log(2))
    if value.is_Add:
        return _freeze_sum(value)
    if value.is_Mul:
        return _freeze_product(value)
    if value.is_Pow and not isinstance(value, sympy.exp):
        return _freeze_power(value)
    if isinstance(value, dot):
        return Contract(freeze(value.args[0]), freeze(value.args[1]), str(value.args[2]))
    for op, function in OPERATIONS.items():
        if value.func is function:
            return Apply(op, tuple(map(freeze, value.args)))
    raise TypeError(f"no expression of the language is {value!r}")


def _rank(expr: Expr) -> tuple[bool, str]:
    """The order of terms and factors: those that are numbers last, and alphabetically as they print."""
    return isinstance(expr, Const), to_text(expr)


def _freeze_sum(value: Symbolic) -> Expr:
    positive = sorted((freeze(a) for a in value.args if not a.could_extract_minus_sign()), key=_rank)
    negative = sorted((freeze(-a) for a in value.args if a.could_extract_minus_sign()), key=_rank)
    total, *added = positive or [Apply("neg", (negative.pop(0),))]
    for term in added:
        total = Apply("add", (total, term))
    for term in negative:
        total = Apply("sub", (total, term))
    return total


def _freeze_product(value: Symbolic) -> Expr:
    if value.could_extract_minus_sign():
        return Apply("neg", (freeze(-value),))
    above = [a for a in value.args if not _is_divisor(a)]
    below = [1 / a for a in value.args if _is_divisor(a)]
    factors = sorted(map(freeze, above), key=_rank) or [ONE]
    total = factors[0]
    for factor in factors[1:]:
        total = Apply("mul", (total, factor))
    for divisor in sorted(map(freeze, below), key=_rank):
        total = Apply("div", (total, divisor))
    return total


def _is_divisor(value: Symbolic) -> bool:
    return bool(value.is_Pow and value.exp.is_negative and value != 1 / LN2 and value.base != 2)


def _freeze_power(value: Symbolic) -> Expr:
    base, exponent = value.base, value.exp
    if base == 2:
        return Apply("exp2", (freeze(exponent),))
    if exponent == sympy.Rational(1, 2):
        return Apply("sqrt", (freeze(base),))
    if exponent.is_negative:
        return Apply("div", (ONE, freeze(1 / value)))
    return Apply("pow", (freeze(base), freeze(exponent)))
