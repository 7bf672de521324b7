"""Expressions over tiles, before they are printed."""

from __future__ import annotations

import pytest

from ssdgen.ir.expr import Expr, Ref, add, mul
from ssdgen.plan.lower import plus_term

A, B, C, X, Y = (
    Ref(name, axes) for name, axes in (("a", ()), ("b", ("t",)), ("c", ("p",)), ("x", ("t", "p")), ("y", ("t", "p")))
)


@pytest.mark.parametrize(
    ("total", "expected"),
    [
        (Y, add(Y, mul(B, X))),
        (add(Y, mul(C, X)), add(Y, mul(add(B, C), X))),
        (add(mul(X, C), Y), add(mul(add(B, C), X), Y)),
        (add(Y, mul(A, X, C)), add(Y, mul(add(B, mul(A, C)), X))),
        (mul(C, Y), add(mul(C, Y), mul(B, X))),
        (add(mul(C, X), mul(A, X)), add(mul(C, X), mul(add(B, A), X))),
    ],
)
def test_a_term_joins_one_with_its_factor(total: Expr, expected: Expr) -> None:
    """b x behind c x takes no product more: y + (b + c) x. Only one of several terms gets it, or the sum would be wrong."""
    assert plus_term(total, B, X) == expected
