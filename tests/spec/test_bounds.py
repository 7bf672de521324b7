"""Interval analysis: what it claims of an expression holds for every value its names may have."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations, pairwise, product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ssdgen.ir.expr import OPS, Apply, Const, Contract, Expr, Index, Ref, Size, walk
from ssdgen.ir.layer import ANY, INFINITY, Interval
from ssdgen.spec.bounds import bounds, contains, holds

X, Y, Z = Ref("x"), Ref("y"), Ref("z")


LEAVES: st.SearchStrategy[Expr] = st.sampled_from([X, Y, Const(1), Const(0), Const(2), Const(-0.5)])


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def softplus(x: float) -> float:
    return x if x > 40 else math.log1p(math.exp(x))


FLOAT: dict[str, Callable[..., float]] = {
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
    "sigmoid": sigmoid,
    "logsigmoid": lambda x: -softplus(-x),
    "softplus": softplus,
    "silu": lambda x: x * sigmoid(x),
    "tanh": math.tanh,
    "relu": lambda x: max(x, 0.0),
}


def value(expr: Expr, values: dict[str, float]) -> float:
    match expr:
        case Const(value=number):
            return float(number)
        case Ref(name=name):
            return values[name]
        case Apply(op=op, args=args):
            found = FLOAT[op](*(value(a, values) for a in args))
            if isinstance(found, complex):
                raise ValueError("no real value")
            return found
    raise AssertionError(expr)


numbers = st.one_of(st.integers(-4, 4), st.floats(-5, 5, allow_nan=False))


@st.composite
def intervals(draw: st.DrawFn) -> Interval:
    low, high = sorted([float(draw(numbers)), float(draw(numbers))])
    assume(low < high)
    low, high = draw(st.sampled_from([(low, high), (low, INFINITY), (-INFINITY, high), (-INFINITY, INFINITY)]))
    return Interval(low, high, draw(st.booleans()), draw(st.booleans()))


@st.composite
def members(draw: st.DrawFn, interval: Interval) -> float:
    low, high = max(interval.low, -30.0), min(interval.high, 30.0)
    inside = draw(st.one_of(st.just(low), st.just(high), st.floats(low, high), st.just((low + high) / 2)))
    assume(holds(interval, inside))
    return inside


@st.composite
def exprs(draw: st.DrawFn, depth: int = 3) -> Expr:
    if depth == 0 or draw(st.integers(0, 4)) == 0:
        return draw(LEAVES)
    op = draw(st.sampled_from(sorted(OPS)))
    if op == "pow":
        exponent = draw(st.sampled_from([-2, -1, 0, 1, 2, 3, 0.5, 1.5]))
        return Apply("pow", (draw(exprs(depth - 1)), Const(exponent)))
    return Apply(op, tuple(draw(exprs(depth - 1)) for _ in range(OPS[op])))


def check(expr: Expr, data: st.DataObject) -> None:
    """Draw intervals for the names of `expr` and values in them, and compare."""
    env = {name: data.draw(intervals()) for name in ("x", "y", "z")}
    values = {name: data.draw(members(interval)) for name, interval in env.items()}
    try:
        found = value(expr, values)
    except (ValueError, ZeroDivisionError, OverflowError):
        return  # no real value: the caller's
    assume(math.isfinite(found))
    known = bounds(expr, env)
    slack = 1e-9 * max(1.0, *(abs(value(e, values)) for e in walk(expr)))
    assert known.low - slack <= found <= known.high + slack, f"{expr} = {found} is outside {known}"


def intervals_between(points: list[float]) -> list[tuple[Interval, list[float]]]:
    """Every interval between two of `points`, and some of its numbers, the finite ends among them."""
    found = []
    for low, high in combinations(points, 2):
        inside = [p for p in points if low <= p <= high and math.isfinite(p)]
        inside += [20.0] * (high == INFINITY) + [-20.0] * (low == -INFINITY)
        inside += [(a + b) / 2 for a, b in pairwise(inside)]
        found.append((Interval(low, high), inside))
    return found


GRIDS = {
    1: intervals_between([-INFINITY, -3, -1.5, -0.9, -0.5, 0, 0.5, 0.7, 1, 2, INFINITY]),
    2: intervals_between([-INFINITY, -2, -0.5, 0, 0.5, 3, INFINITY]),
    3: intervals_between([-INFINITY, -1, 0, 2, INFINITY]),
}
POWERS = [Apply("pow", (X, Const(c))) for c in (-2, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4)]


@pytest.mark.parametrize(
    "expr", [*(Apply(op, (X, Y, Z)[:n]) for op, n in OPS.items() if op != "pow"), *POWERS], ids=str
)
def test_bounds_of_one_operation_contain_every_value(expr: Apply) -> None:
    names = ("x", "y", "z")[: len([a for a in expr.args if isinstance(a, Ref)])]
    for chosen in product(GRIDS[len(names)], repeat=len(names)):
        known = bounds(expr, dict(zip(names, (interval for interval, _ in chosen), strict=True)))
        for numbers in product(*(inside for _, inside in chosen)):
            try:
                found = value(expr, dict(zip(names, numbers, strict=True)))
            except (ValueError, ZeroDivisionError):
                continue  # no real value: the caller's
            slack = 1e-12 * max(1.0, abs(found))
            assert known.low - slack <= found <= known.high + slack, f"{expr} of {numbers} is {found}, not in {known}"


@settings(max_examples=100, deadline=None)
@given(exprs(), st.data())
def test_bounds_of_nested_operations_contain_every_value(expr: Expr, data: st.DataObject) -> None:
    check(expr, data)


def test_every_operation_has_a_rule() -> None:
    assert set(FLOAT) == set(OPS)
    for op, arity in OPS.items():
        args = (X, Const(2)) if op == "pow" else (X,) * arity
        assert isinstance(bounds(Apply(op, args), {"x": Interval(1.0, 2.0)}), Interval)


@pytest.mark.parametrize(
    ("op", "x", "expected"),
    [
        ("exp", "(-inf, 0]", "(0, 1]"),
        ("exp", "(-inf, 0)", "(0, 1)"),
        ("exp", "[-1000, 0]", "(0, 1]"),  # exp(-1000) is 0 in float64, and not a zero
        ("exp2", "(-inf, -5]", "(0, 0.03125]"),
        ("sigmoid", "(-inf, inf)", "(0, 1)"),
        ("sigmoid", "[0, 100]", "[0.5, 1)"),
        ("softplus", "(-inf, inf)", "(0, inf)"),
        ("logsigmoid", "(-inf, inf)", "(-inf, 0)"),
        ("tanh", "[0, inf)", "[0, 1)"),
        ("silu", "(-inf, inf)", "[-0.278465, inf)"),
        ("silu", "(-inf, 0]", "[-0.278465, 0]"),
        ("abs", "(-2, 1]", "[0, 2)"),
        ("relu", "(-2, 1)", "[0, 1)"),
        ("sqrt", "(0, 4]", "(0, 2]"),
        ("log", "(0, 1]", "(-inf, 0]"),
        ("neg", "[-1, 2)", "(-2, 1]"),
    ],
)
def test_open_and_closed_ends(op: str, x: str, expected: str) -> None:
    assert str(bounds(Apply(op, (X,)), {"x": interval(x)})) == expected


@pytest.mark.parametrize(
    ("op", "x", "y", "expected"),
    [
        ("mul", "(-inf, 0)", "[0, inf)", "(-inf, 0]"),  # A * step of Mamba-2: an attained 0 closes the end
        ("mul", "(-inf, 0)", "(0, inf)", "(-inf, 0)"),
        ("mul", "(0, 1)", "(0, 1]", "(0, 1)"),
        ("mul", "[0, 1]", "(2, 3)", "[0, 3)"),
        ("sub", "[1, 1]", "(0, 0.5]", "[0.5, 1)"),
        ("div", "[1, 1]", "[1, inf)", "(0, 1]"),
        ("div", "[1, 1]", "(0, 2]", "[0.5, inf)"),
        ("div", "[1, 1]", "[0, 2]", "[-inf, inf]"),
        ("div", "[1, 1]", "(-1, 1)", "[-inf, inf]"),
        ("max", "(0, 1]", "[0, 2)", "(0, 2)"),
        ("min", "(0, 1]", "[0, 1)", "[0, 1)"),
    ],
)
def test_two_arguments(op: str, x: str, y: str, expected: str) -> None:
    assert str(bounds(Apply(op, (X, Y)), {"x": interval(x), "y": interval(y)})) == expected


def test_clamp_between_run_time_limits_keeps_the_sign() -> None:
    step = Apply("clamp", (Apply("softplus", (X,)), Ref("low"), Ref("high")))
    limits = {"low": Interval(low=0.0), "high": Interval(low=0.0)}
    assert str(bounds(step, limits)) == "[0, inf)"


def test_sizes_and_positions() -> None:
    assert str(bounds(Size("n"), {})) == "[1, inf)"
    decay = Apply("sub", (Const(1), Apply("exp2", (Apply("sub", (Const(-5), Index("h"))),))))
    assert str(bounds(decay, {})) == "[0.96875, 1)"


def test_a_value_of_the_token_before_is_zero_before_the_first() -> None:
    env = {"x": Interval(1.0, 2.0)}
    assert str(bounds(Ref("x", per_token=True, lag=1), env)) == "[0, 2]"
    assert str(bounds(Ref("x", per_token=True), env)) == "[1, 2]"


def test_a_sum_over_an_axis_of_unknown_length_keeps_its_sign() -> None:
    product = Contract(Ref("x", ("n",)), Ref("y", ("n",)), "n")
    assert str(bounds(product, {"x": interval("[1, 2]"), "y": interval("[1, 3]")})) == "[1, inf)"
    assert str(bounds(product, {"x": interval("[-1, 2]"), "y": interval("[1, 3]")})) == "(-inf, inf)"


def test_contains_minds_open_ends() -> None:
    unit = interval("(0, 1]")
    assert contains(unit, interval("(0, 1]"))
    assert contains(unit, interval("(0, 1)"))
    assert not contains(unit, interval("[0, 1]"))
    assert not contains(unit, ANY)
    assert contains(ANY, unit)


def interval(text: str) -> Interval:
    low, high = text[1:-1].split(", ")
    return Interval(float(low), float(high), text[0] == "(", text[-1] == ")")
