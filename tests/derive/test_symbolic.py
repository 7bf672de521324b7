"""The door to sympy: nothing is lost on the way, and derivatives come back as expressions of the language."""

from __future__ import annotations

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st

from ssdgen.derive.recurrence import LOG2E
from ssdgen.derive.symbolic import freeze, sigmoid, thaw
from ssdgen.ir.expr import OPS, Apply, Const, Contract, Expr, Index, Ref, Size
from ssdgen.run.reference import OPERATIONS

X = Ref("x", ("b", "h", "p"), True)
LEAVES: list[Expr] = [X, Ref("dt", ("b", "h"), True, lag=1), Ref("A", ("h",)), Size("n"), Index("h"), Const(2), LOG2E]
ORDINARY = [op for op in OPS if op not in ("pow", "div", "log", "log2", "sqrt")]

trees = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        *(st.tuples(*[inner] * OPS[op]).map(lambda args, op=op: Apply(op, args)) for op in ORDINARY),
        st.tuples(inner, inner).map(lambda two: Contract(*two, axis="n")),
    ),
    max_leaves=8,
)


@given(trees)
def test_freezing_what_was_thawed_keeps_its_meaning(expr: Expr) -> None:
    symbolic = thaw(expr)
    assert sympy.expand(thaw(freeze(symbolic)) - symbolic) == 0


@pytest.mark.parametrize(
    ("text", "expr"),
    [
        ("x / sqrt(size(n))", Apply("div", (X, Apply("sqrt", (Size("n"),))))),
        ("-x", Apply("neg", (X,))),
        ("x^2", Apply("mul", (X, X))),
        (f"x * {LOG2E}", Apply("mul", (LOG2E, X))),
        ("dt + x - 2", Apply("sub", (Apply("add", (X, Ref("dt", ("b",), True))), Const(2)))),
        ("exp2(-x)", Apply("exp2", (Apply("neg", (X,)),))),
        ("1 / x", Apply("div", (Const(1), X))),
        ("clamp(x, 0, inf)", Apply("clamp", (X, Const(0), Const(float("inf"))))),
    ],
)
def test_the_order_of_terms_is_ours(text: str, expr: Expr) -> None:
    assert str(freeze(thaw(expr))) == text


SMOOTH = ["exp", "exp2", "log", "log2", "log1p", "sqrt", "sigmoid", "logsigmoid", "softplus", "silu", "tanh"]


@pytest.mark.parametrize("op", SMOOTH)
def test_derivatives_agree_with_autograd(op: str) -> None:
    derivative = freeze(sympy.diff(thaw(Apply(op, (X,))), thaw(X)))
    x = torch.tensor([0.1, 0.7, 3.0], dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(OPERATIONS[op](x).sum(), x)
    torch.testing.assert_close(value(derivative, x), expected)


def value(expr: Expr, x: torch.Tensor) -> torch.Tensor:
    match expr:
        case Const(value=number):
            return torch.tensor(number, dtype=torch.float64)
        case Apply(op=op, args=args):
            return OPERATIONS[op](*(value(a, x) for a in args))
    assert expr == X
    return x


def test_signs_are_known() -> None:
    x = thaw(X)
    assert thaw(Apply("softplus", (X,))).is_positive
    assert thaw(Apply("logsigmoid", (X,))).is_negative
    assert sigmoid(-x) == 1 - sigmoid(x)


def test_what_the_language_cannot_say_is_refused() -> None:
    with pytest.raises(TypeError, match="no expression of the language"):
        freeze(sympy.erf(thaw(X)))
