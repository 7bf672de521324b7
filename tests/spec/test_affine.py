"""Splitting updates: decay * S[t-1] + input is the update, for any values, or it is refused at a term."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdgen.ir.expr import ZERO, Apply, Const, Contract, Expr, Ref, refs
from ssdgen.spec.affine import NotAffine, split
from tests.spec.test_bounds import value

S, X, Y = Ref("S", per_token=True, lag=1), Ref("x"), Ref("y")


LEAVES: st.SearchStrategy[Expr] = st.sampled_from([X, Y, Const(2), Const(0.5)])


def op(name: str, *args: Expr) -> Expr:
    return Apply(name, args)


@st.composite
def free(draw: st.DrawFn, depth: int = 2) -> Expr:
    if depth == 0 or draw(st.booleans()):
        return draw(LEAVES)
    name = draw(st.sampled_from(["add", "sub", "mul", "tanh", "neg"]))
    return op(name, *(draw(free(depth - 1)) for _ in range(1 if name in ("tanh", "neg") else 2)))


@st.composite
def affine(draw: st.DrawFn, depth: int = 3) -> Expr:
    if depth == 0:
        return draw(st.one_of(st.just(S), free()))
    inner = affine(depth - 1)
    match draw(st.integers(0, 5)):
        case 0:
            return op("add", draw(inner), draw(inner))
        case 1:
            return op("sub", draw(inner), draw(inner))
        case 2:
            return op("mul", draw(free()), draw(inner))
        case 3:
            return op("mul", draw(inner), draw(free()))
        case 4:
            return op("neg", draw(inner))
        case _:
            return op("div", draw(inner), Const(4))


@settings(max_examples=150, deadline=None)
@given(affine(), st.integers(-3, 3), st.integers(-3, 3), st.integers(-3, 3))
def test_the_parts_add_up_to_the_update(update: Expr, s: int, x: int, y: int) -> None:
    parts = split(update, "S")
    assert all(r.name != "S" for part in (parts.decay, parts.input) for r in refs(part))
    values = {"S": float(s), "x": float(x), "y": float(y)}
    whole = value(parts.decay, values) * s + value(parts.input, values)
    assert whole == pytest.approx(value(update, values), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(
    ("update", "term"),
    [
        (op("add", op("tanh", S), X), "`tanh(S[t-1])` is not linear in the state"),
        (op("mul", X, op("max", S, Y)), "`max(S[t-1], y)` is not linear in the state"),
        (op("mul", S, op("mul", X, S)), "`S[t-1] * x * S[t-1]` multiplies the state by itself"),
        (op("div", X, op("add", S, Y)), "`x / (S[t-1] + y)` divides by the state"),
        (op("pow", S, Const(2)), "`S[t-1]^2` is not linear in the state"),
        (op("add", X, op("abs", op("neg", S))), "`abs(-S[t-1])` is not linear in the state"),
        (Contract(S, X, "n"), "`S[t-1] . x` mixes the state's channels over `n`: its transition is not diagonal"),
    ],
)
def test_refused_at_the_term(update: Expr, term: str) -> None:
    with pytest.raises(NotAffine) as error:
        split(update, "S")
    assert str(error.value) == term


def test_an_update_without_its_state_has_no_decay() -> None:
    assert split(X, "S").decay == ZERO


def test_other_names_are_no_state() -> None:
    assert split(op("tanh", Ref("R", lag=1)), "S").input == op("tanh", Ref("R", lag=1))
