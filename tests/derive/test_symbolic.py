"""The door to sympy: nothing is lost on the way, and derivatives come back as expressions of the language."""

from __future__ import annotations

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st

from ssdgen.derive.recurrence import LOG2E
from ssdgen.derive.symbolic import freeze, partials, sigmoid, thaw
from ssdgen.ir.expr import OPS, Apply, Const, Contract, Expr, Index, Ref, Size, refs
from ssdgen.run.reference import OPERATIONS
from tests.derive.gradients import DERIVATIVES

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


X_Y = (X, Ref("dt", ("b", "h"), True))


@pytest.mark.parametrize(
    "expr",
    [
        Apply("abs", (X,)),
        Apply("relu", (X,)),
        Apply("max", X_Y),
        Apply("min", X_Y),
        *(Apply("clamp", tuple(X if i == k else Const(c) for i, c in enumerate((0.5, 0.2, 0.8)))) for k in range(3)),
        Apply("exp2", (Apply("mul", X_Y),)),
        Apply("silu", (Apply("abs", (X,)),)),
    ],
    ids=str,
)
def test_partial_derivatives_agree_with_autograd_beside_jumps(expr: Expr) -> None:
    """Protects the derivatives of what is not smooth, and that each reference gets its own."""
    points = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in ([-0.4, 0.3, 1.2], [0.7, -0.1, 0.9])]
    known = dict(zip(X_Y, points, strict=True))
    derivatives = partials(expr)
    assert [leaf for leaf, _ in derivatives] == list(refs(expr))
    expected = torch.autograd.grad(evaluated(expr, known).sum(), [known[leaf] for leaf, _ in derivatives])
    for (_, derivative), truth in zip(derivatives, expected, strict=True):
        torch.testing.assert_close(evaluated(derivative, known).expand_as(truth), truth)


def evaluated(expr: Expr, known: dict[Ref, torch.Tensor]) -> torch.Tensor:
    match expr:
        case Const(value=number):
            return torch.tensor(number, dtype=torch.float64)
        case Apply(op=op, args=args):
            return (OPERATIONS | DERIVATIVES)[op](*(evaluated(a, known) for a in args))
    return known[expr]


def test_a_contraction_is_differentiated_as_a_whole() -> None:
    """Protects the axis it sums over from a sum around it over the same axis: who wants its parts asks for them."""
    both = Contract(X, X, "p")
    assert partials(Apply("mul", (both, X))) == [(both, X), (X, both)]


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
