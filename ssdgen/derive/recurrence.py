"""Layer -> Recurrence: log-space decays, rank-1 inputs, readouts by name.

The text of what the author wrote is kept wherever it can be (lets by their names, factors in their order), because
these expressions are what the kernels print. What has no chunked form is refused at the term that prevents it:

    D001  an input is not a sum of scalar * row * column
    D002  the decay varies over the axis that reads keep
    D003  two reads of a state sum over different axes
    D004  a state is used other than in `S[t] . vector`
    D005  a read vector varies over more than the axis it is summed over
    D006  a state has no input
    D007  a product sums over the batch or head axis
    D008  the input of a state depends on a state
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NoReturn

from ssdgen.diagnostics import Diagnostic, SpecError
from ssdgen.ir.expr import (
    ZERO,
    Apply,
    Const,
    Contract,
    Expr,
    Ref,
    add,
    axes_of,
    is_per_token,
    mul,
    refs,
    rewrite,
    walk,
)
from ssdgen.ir.layer import Gate, Layer, State
from ssdgen.ir.recurrence import DecayKind, Diagonal, LinearState, OutputForm, Readout, Recurrence, Term

LOG2E = Const(1.4426950408889634)
"""log2(e), as kernels print it: `exp(x)` is `exp2(x * LOG2E)`."""


def recurrence(layer: Layer) -> Recurrence:
    """`layer` in normal form.

    Assumes what `read_layer` guarantees: updates are `decay * S[t-1] + input` with `decay` in (0, 1]. Raises SpecError
    with the first thing that has no chunked form.
    """
    return _Derivation(layer).recurrence()


def fresh_name(wanted: str, taken: Iterable[str]) -> str:
    """`wanted`, or with the first of _2, _3, ... that is not taken."""
    used = set(taken)
    numbered = (f"{wanted}_{i}" for i in range(2, len(used) + 3))
    return next(name for name in (wanted, *numbered) if name not in used)


def names_of(layer: Layer) -> set[str]:
    """Every name a layer declares."""
    declared = (layer.axes, layer.inputs, layer.params, layer.lets, layer.states, layer.outputs)
    return {item.name for items in declared for item in items}


class _Derivation:
    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.lets = {let.name: let.value for let in layer.lets}
        self.state_names = {s.name for s in layer.states}
        self.reads: list[Readout] = []

    def recurrence(self) -> Recurrence:
        layer = self.layer
        self.check_contractions()
        columns = {s.name: self.column_axis(s) for s in layer.states}
        outputs = tuple(
            OutputForm(
                o.name,
                o.axes,
                self.extract_reads(o.value, columns),
                tuple(Gate(g.tensor, self.extract_reads(g.value, columns), g.span) for g in o.gates),
            )
            for o in layer.outputs
        )
        states = tuple(self.linear_state(s, columns[s.name]) for s in layer.states)
        return Recurrence(layer, states, tuple(self.reads), outputs)

    def refuse(self, code: str, message: str, at: Expr | State, hint: str = "") -> NoReturn:
        raise SpecError(self.layer.source, [Diagnostic(code, message, at.span, hint)])

    def inline(self, expr: Expr) -> Expr:
        """`expr` with every let replaced by its value, down to inputs."""

        def rule(e: Expr) -> Expr | None:
            return self.inline(self.lets[e.name]) if isinstance(e, Ref) and e.name in self.lets else None

        return rewrite(expr, rule)

    # Reads

    def output_exprs(self) -> Iterator[Expr]:
        for output in self.layer.outputs:
            yield output.value
            yield from (gate.value for gate in output.gates)

    def check_contractions(self) -> None:
        layer = self.layer
        for expr in (*self.lets.values(), *(s.update for s in layer.states), *self.output_exprs()):
            for e in walk(expr):
                if isinstance(e, Contract) and e.axis in (layer.batch, layer.head):
                    self.refuse("D007", f"this sums over `{e.axis}`, but each batch and head is computed on its own", e)

    def read_of(self, expr: Expr) -> tuple[Ref, Expr, str] | None:
        """(state, vector, axis) if `expr` is a state times a vector."""
        if not isinstance(expr, Contract):
            return None
        for state, vector in ((expr.left, expr.right), (expr.right, expr.left)):
            if isinstance(state, Ref) and state.name in self.state_names:
                return state, vector, expr.axis
        return None

    def column_axis(self, state: State) -> str:
        found = ""
        for expr in self.output_exprs():
            for e in walk(expr):
                read = self.read_of(e)
                if read is None or read[0].name != state.name:
                    continue
                if found and found != read[2]:
                    message = f"`{state.name}` is read over `{read[2]}` here, but over `{found}` before"
                    self.refuse("D003", message, e, "all reads of a state sum over the same axis")
                found = read[2]
        return found or state.axes[-1]

    def extract_reads(self, expr: Expr, columns: dict[str, str]) -> Expr:
        def rule(e: Expr) -> Expr | None:
            read = self.read_of(e)
            if read is not None:
                return self.readout(e, read[0], read[1], columns[read[0].name])
            if isinstance(e, Ref) and e.name in self.state_names:
                hint = f"read it as `{e.name}[{self.layer.time}] . vector`"
                self.refuse("D004", f"the state `{e.name}` is not read by a product with a vector", e, hint)
            return None

        return rewrite(expr, rule)

    def readout(self, at: Expr, state: Ref, vector: Expr, column: str) -> Ref:
        if any(r.name in self.state_names for r in refs(vector)):
            self.refuse("D004", f"the vector that reads `{state.name}` depends on a state", vector)
        extra = [a for a in axes_of(vector) if a not in (*state.axes[:2], column)]
        if extra:
            self.refuse("D005", f"the vector that reads `{state.name}` varies over `{extra[0]}`", vector)
        wanted = Readout("", state.name, vector, -1 if state.lag else 0)
        known = next((r for r in self.reads if replace(r, name="") == wanted), None)
        if known is None:
            name = fresh_name(f"read_{state.name}", names_of(self.layer) | {r.name for r in self.reads})
            known = replace(wanted, name=name)
            self.reads.append(known)
        return Ref(known.name, tuple(a for a in state.axes if a != column), True, span=at.span)

    # States

    def linear_state(self, state: State, column: str) -> LinearState:
        row = next((a for a in state.axes[2:] if a != column), None)
        decay = self.inline(state.decay)
        if row is not None and row in axes_of(decay):
            hint = f"a decay may vary over `{column}`, the axis that reads of `{state.name}` sum over"
            self.refuse("D002", f"the decay of `{state.name}` varies over `{row}`", state.decay, hint)
        log2 = self.log2(state.decay)
        kind = self.kind(log2, decay, column)
        return LinearState(state.name, state.axes, row, column, Diagonal(kind, log2), self.terms(state, row, column))

    def kind(self, log2: Expr, decay: Expr, column: str) -> DecayKind:
        if log2 == ZERO:
            return "none"
        if column in axes_of(decay):
            return "channel"
        return "token" if is_per_token(decay) else "constant"

    def log2(self, expr: Expr) -> Expr:
        """log2 of a positive expression, simplified; lets are opened only where that helps."""
        match expr:
            case Const(value=value) if value > 0 and math.frexp(value)[0] == 0.5:
                return Const(math.frexp(value)[1] - 1, expr.span)
            case Apply(op="exp", args=(arg,)):
                return mul(arg, LOG2E)
            case Apply(op="exp2", args=(arg,)) | Apply(op="pow", args=(Const(value=2), arg)):
                return arg
            case Apply(op="pow", args=(base, exponent)):
                return mul(exponent, self.log2(base))
            case Apply(op="sqrt", args=(arg,)):
                return mul(Const(0.5), self.log2(arg))
            case Apply(op="mul", args=(left, right)):
                return add(self.log2(left), self.log2(right))
            case Apply(op="div", args=(left, right)):
                return _minus(self.log2(left), self.log2(right))
            case Apply(op="sigmoid", args=(arg,)):
                return mul(Apply("logsigmoid", (arg,), expr.span), LOG2E)
            case Apply(op="sub", args=(Const(value=1), Apply(op="sigmoid", args=(arg,)))):
                return mul(Apply("logsigmoid", (_negative(arg),), expr.span), LOG2E)
            case Apply(op="sub", args=(Const(value=1), arg)):
                return mul(Apply("log1p", (_negative(arg),), expr.span), LOG2E)
            case (
                Apply(op="add", args=(Const(value=1), Apply(op="exp", args=(arg,))))
                | Apply(op="add", args=(Apply(op="exp", args=(arg,)), Const(value=1)))
            ):
                return mul(Apply("softplus", (arg,), expr.span), LOG2E)
            case Ref(name=name) if name in self.lets:
                opened = self.log2(self.lets[name])
                is_plain = isinstance(opened, Apply) and opened.op == "log2"
                return Apply("log2", (expr,), expr.span) if is_plain else opened
        return Apply("log2", (expr,), expr.span)

    def terms(self, state: State, row: str | None, column: str) -> tuple[Term, ...]:
        for ref in refs(self.inline(state.input)):
            if ref.name in self.state_names:
                self.refuse("D008", f"the input of `{state.name}` depends on the state `{ref.name}`", ref)
        products = [p for s in self.summands(state.input) for p in self.products(s, state, row, column)]
        terms = tuple(t for t in (_term(p, row, column) for p in products) if t.weight != ZERO)
        if not terms:
            self.refuse("D006", f"the state `{state.name}` has no input", state)
        return terms

    def summands(self, expr: Expr) -> Iterator[Expr]:
        match expr:
            case Apply(op="add", args=(left, right)):
                yield from self.summands(left)
                yield from self.summands(right)
            case Apply(op="sub", args=(left, right)):
                yield from self.summands(left)
                yield from (_negative(e) for e in self.summands(right))
            case _:
                yield expr

    def products(self, expr: Expr, state: State, row: str | None, column: str) -> list[_Product]:
        """`expr` as a sum of products, sums multiplied out only where a factor has both the row and the column axis."""
        axes = axes_of(expr)
        mixed = row in axes and column in axes
        if not mixed and row not in axes and column not in axes:
            return [_Product((expr,))]
        match expr:
            case Apply(op="neg", args=(arg,)):
                return [_Product((Const(-1),)) * p for p in self.products(arg, state, row, column)]
            case Apply(op="mul", args=(left, right)):
                rights = self.products(right, state, row, column)
                return [p * q for p in self.products(left, state, row, column) for q in rights]
            case Apply(op="div", args=(left, right)):
                divisors = self.products(right, state, row, column)
                if len(divisors) == 1:
                    return [p * divisors[0].inverse() for p in self.products(left, state, row, column)]
            case Apply(op="add" | "sub") if mixed:
                return [p for s in self.summands(expr) for p in self.products(s, state, row, column)]
            case Ref(name=name) if mixed and name in self.lets:
                return self.products(self.lets[name], state, row, column)
        if mixed:
            message = f"this input of `{state.name}` is not a product of a `{row}` vector and a `{column}` vector"
            self.refuse("D001", message, expr, "an input is a sum of terms: scalar * outer(row, column)")
        return [_Product((expr,))]


@dataclass(frozen=True)
class _Product:
    """Factors and divisors, in the order they were written."""

    factors: tuple[Expr, ...]
    divisors: tuple[Expr, ...] = ()

    def __mul__(self, other: _Product) -> _Product:
        return _Product(self.factors + other.factors, self.divisors + other.divisors)

    def inverse(self) -> _Product:
        return _Product(self.divisors, self.factors)

    def restricted(self, axes: set[str | None], wanted: str | None) -> Expr:
        """The part whose axes among `axes` are `wanted` alone (None: the part that has none of them)."""

        def belongs(e: Expr) -> bool:
            return set(axes_of(e)) & axes == ({wanted} if wanted else set())

        factors = [f for f in self.factors if belongs(f)]
        part = mul(*(f for f in factors if f != Const(-1)))
        for divisor in filter(belongs, self.divisors):
            part = Apply("div", (part, divisor), part.span.to(divisor.span))
        return _negative(part) if factors.count(Const(-1)) % 2 else part


def _term(product: _Product, row: str | None, column: str) -> Term:
    axes: set[str | None] = {row, column} - {None}
    weight = product.restricted(axes, None)
    column_part = product.restricted(axes, column)
    row_part = None if row is None else product.restricted(axes, row)
    return _with_lag(Term(weight, row_part, column_part))


def _with_lag(term: Term) -> Term:
    """`term` as a lagged one if its row and column are wholly those of the token before, and zero before the first."""
    parts = [e for e in (term.row, term.column) if e is not None]
    lags = {r.lag for e in parts for r in refs(e) if r.per_token}
    if lags != {1} or not any(_vanishes(e) for e in parts):
        return term
    row = None if term.row is None else _without_lag(term.row)
    return Term(term.weight, row, _without_lag(term.column), lag=1)


def _without_lag(expr: Expr) -> Expr:
    return rewrite(expr, lambda e: replace(e, lag=0) if isinstance(e, Ref) and e.lag else None)


def _vanishes(expr: Expr) -> bool:
    """Whether `expr` is zero wherever the inputs of the token before are."""
    match expr:
        case Ref(lag=lag):
            return lag > 0
        case Apply(op="mul", args=args):
            return any(map(_vanishes, args))
        case Apply(op="add" | "sub" | "neg" | "silu" | "tanh" | "relu" | "sqrt" | "abs", args=args):
            return all(map(_vanishes, args))
        case Apply(op="div", args=(numerator, _)):
            return _vanishes(numerator)
        case Contract(left=left, right=right):
            return _vanishes(left) or _vanishes(right)
        case Const(value=value):
            return value == 0
    return False


def _negative(expr: Expr) -> Expr:
    match expr:
        case Const(value=value):
            return Const(-value, expr.span)
        case Apply(op="neg", args=(arg,)):
            return arg
    return Apply("neg", (expr,), expr.span)


def _minus(left: Expr, right: Expr) -> Expr:
    if right == ZERO:
        return left
    if left == ZERO:
        return _negative(right)
    return Apply("sub", (left, right), left.span.to(right.span))
