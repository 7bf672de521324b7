"""The gradients around chunks: of reads and inputs, from those of outputs and of what is in a chunk, which are symbols."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import product
from math import prod
from typing import NoReturn

import sympy  # type: ignore[import-untyped]

from ssdgen.derive.adjoint_keys import Key, adjoint_keys, decay_key, keys, row_key, vector_key, write_key
from ssdgen.derive.symbolic import LN2, Symbolic, equal, thaw
from ssdgen.ir.adjoint import Adjoint, Contribution, Gradient
from ssdgen.ir.expr import Axes, Contract, Expr, Ref, axes_of, to_text
from ssdgen.ir.recurrence import LinearState, OutputForm, Term

INDICES = (0, 1)
"""Along every axis but time; the two heads are of one group."""

Point = Mapping[str, int]
"""An index along each axis that a value may vary over, time aside."""

Token = int | None
"""None where nothing may vary in time."""

Known = Mapping[str, Callable[[Token, Point], Symbolic]]
"""Values of reads or outputs by name, at a token and a point."""


def earlier(token: Token, lag: int) -> Token:
    """The token `lag` before."""
    return None if token is None else token - lag


class Values:
    """Expressions at a token and a point, lets opened. Inputs are symbols, zero before the first token."""

    def __init__(self, adjoint: Adjoint, fail: Callable[[str], NoReturn]) -> None:
        self.layer = adjoint.form.recurrence.layer
        self.fail = fail
        self.lets = {let.name: let.value for let in self.layer.lets}
        self.axes = {t.name: tuple(a for a in t.axes if a != self.layer.time) for t in self.layer.inputs}

    def value(self, expr: Expr, token: Token, at: Point, known: Known) -> Symbolic:
        """`expr`, in which `known` says what reads and outputs are; fails if it varies over more than token and point."""

        def leaf(e: Expr) -> Symbolic:
            match e:
                case Contract(left=left, right=right, axis=axis):
                    both = [{**at, axis: i} for i in INDICES]
                    return sum(self.value(left, token, p, known) * self.value(right, token, p, known) for p in both)
                case Ref(name=name, per_token=True) if token is None:
                    self.fail(f"`{name}` varies in time where nothing may")
                case Ref(name=name, lag=lag) if name in known:
                    return known[name](earlier(token, lag), at)
                case Ref(name=name, lag=lag) if name in self.lets:
                    return self.value(self.lets[name], earlier(token, lag), at, known)
                case Ref(name=name, per_token=per_token, lag=lag) if name in self.axes:
                    when = earlier(token, lag) if per_token else None
                    return sympy.Integer(0) if when is not None and when < 0 else self.input(name, when, at)
            return self.symbol(to_text(e), axes_of(e), None, at)

        return thaw(expr, leaf)

    def input(self, name: str, token: Token, at: Point) -> Symbolic:
        """An input; heads of one group share theirs."""
        shared = {g.axis: 0 for g in self.layer.groups}
        return self.symbol(name, self.axes[name], token, {**at, **shared})

    def symbol(self, name: str, axes: Axes, token: Token, at: Point) -> Symbolic:
        """The symbol of something with these axes."""
        for axis in axes:
            if axis not in at:
                self.fail(f"`{name}` varies over `{axis}` where nothing may")
        index = "".join(f"_{a}{at[a]}" for a in axes)
        return sympy.Symbol(name + ("" if token is None else f"[{token}]") + index, real=True)


class Around:
    """Reads and inputs, with the optional inputs `present`. `fail` refuses by the statement that is being proved."""

    tokens: tuple[int, ...] = (0, 1)
    single: Axes = ()
    """Axes along which there is one index alone."""

    def __init__(self, adjoint: Adjoint, present: Collection[str], fail: Callable[[str], NoReturn]) -> None:
        self.adjoint, self.form = adjoint, adjoint.form
        self.rec, self.layer = self.form.recurrence, self.form.recurrence.layer
        self.present, self.fail = present, fail
        self.values = Values(adjoint, fail)
        self.keys, self.numbers = adjoint_keys(adjoint), {key: i for i, key in enumerate(keys(self.rec))}
        self.known: Known = {r.name: partial(self.read, r.name, self.rec.state(r.state)) for r in self.rec.readouts}
        self.gradients = {g.name: g for g in (*adjoint.reads, *adjoint.lets)}
        self.computed: dict[object, Symbolic] = {}
        self.containing: dict[Symbolic, list[Symbolic]] = defaultdict(list)
        """The summands of cotangents times outputs and gradients times what they are of, by the symbols in them."""
        for summand in self.summands():
            for symbol in summand.free_symbols:
                self.containing[symbol].append(summand)

    # The recurrence

    def read(self, name: str, state: LinearState, token: Token, at: Point) -> Symbolic:
        """A read as a symbol of its own."""
        return self.values.symbol(f"<{name}>", tuple(a for a in state.axes if a != state.column_axis), token, at)

    def output(self, output: OutputForm, gate: str | None, token: Token, at: Point) -> Symbolic:
        """An output before a gate, or behind all."""
        tensors = [g.tensor for g in output.gates]
        earlier = output.gates[: tensors.index(gate)] if gate in tensors else output.gates
        last = next((g for g in reversed(earlier) if g.tensor in self.present), None)
        if last is None:
            return self.values.value(output.value, token, at, self.known)
        return self.values.value(last.value, token, at, self.before(last.tensor))

    def before(self, gate: str | None) -> Known:
        """What an expression at a gate may refer to."""
        gated = [o for o in self.rec.outputs if gate in [g.tensor for g in o.gates]]
        return {**self.known, **{o.name: partial(self.output, o, gate) for o in gated}}

    def cotangent(self, output: OutputForm, token: Token, at: Point) -> Symbolic:
        """The gradient of an output that is given."""
        return self.values.symbol(f"<d {output.name}>", self.without_time(output.axes), token, at)

    def d_key(self, key: Key, token: Token, at: Point) -> Symbolic:
        """The gradient of something in a chunk."""
        channel = keys(self.rec)[key]
        axes = (self.layer.batch, self.layer.head, *([channel] if channel else []))
        return self.values.symbol(f"<{self.numbers[key]}>", axes, token, at)

    def without_time(self, axes: Axes) -> Axes:
        """`axes` but the time axis."""
        return tuple(a for a in axes if a != self.layer.time)

    def points(self, axes: Axes) -> list[Point]:
        """Every index along `axes`."""
        indices = ((0,) if a in self.single else INDICES for a in axes)
        return [dict(zip(axes, index, strict=True)) for index in product(*indices)]

    def summands(self) -> Iterator[Symbolic]:
        """Cotangents times outputs, and gradients times what they are of, at every token, batch, head and channel."""
        yield from self.outputs()
        batch_head = (self.layer.batch, self.layer.head)
        items = dict(self.items())
        for token in self.tokens:
            for key, channel in keys(self.rec).items():
                for at in self.points((*batch_head, channel) if channel else batch_head):
                    yield self.d_key(key, token, at) * items[key](token, at)

    def outputs(self) -> Iterator[Symbolic]:
        """Cotangents times outputs."""
        for token in self.tokens:
            for o in self.rec.outputs:
                for at in self.points(self.without_time(o.axes)):
                    yield self.cotangent(o, token, at) * self.output(o, None, token, at)

    def items(self) -> Iterator[tuple[Key, Callable[[int, Point], Symbolic]]]:
        """What everything in a chunk is, as a function of inputs."""

        def at_token(lag: int, *factors: Expr) -> Callable[[int, Point], Symbolic]:
            return lambda token, at: prod(self.values.value(e, token - lag, at, {}) for e in factors)

        def written(term: Term) -> Callable[[int, Point], Symbolic]:
            column = at_token(term.lag, term.column)
            return lambda token, at: self.values.value(term.weight, token, at, {}) * column(token, at)

        def logarithm(log2: Expr) -> Callable[[int, Point], Symbolic]:
            return lambda token, at: LN2 * self.values.value(log2, token, at, {})

        for s in self.rec.states:
            yield decay_key(s.transition), logarithm(s.transition.log2_decay)
            for term in s.terms:
                if term.row is not None:
                    yield row_key(s, term), at_token(term.lag, term.row)
                yield write_key(s, term), written(term)
        for r in self.rec.readouts:
            yield vector_key(self.rec.state(r.state), r), at_token(0, r.vector)

    # The adjoint

    def quantity(self, name: str, token: Token, at: Point) -> Symbolic:
        """A gradient that others are made of, zero behind the last token."""
        if token is not None and token not in self.tokens:
            return sympy.Integer(0)
        place = (name, token, *sorted(at.items()))
        if place not in self.computed:
            self.computed[place] = self._quantity(name, token, at)
        return self.computed[place]

    def _quantity(self, name: str, token: Token, at: Point) -> Symbolic:
        if name in self.gradients:
            return self.total(self.gradients[name], token, at)
        if name in self.keys:
            return self.d_key(self.keys[name], token, at)
        for output in self.adjoint.outputs:
            if output.name == name:
                return self.cotangent(next(o for o in self.rec.outputs if o.name == output.output), token, at)
        for gate in self.adjoint.gates:
            if gate.name == name:
                given = self.quantity(gate.quantity, token, at)
                if gate.tensor not in self.present:
                    return given
                return given * self.values.value(gate.factor, token, at, self.before(gate.tensor))
        weight = next(w for w in self.adjoint.weights if w.name == name)
        total = sympy.Integer(0)
        for write in (w for w in self.adjoint.writes if w.name in weight.writes):
            for c in INDICES:
                point = {**at, write.axis: c}
                column = self.values.value(write.column, earlier(token, write.lag), point, {})
                total += self.d_key(self.keys[write.name], token, point) * column
        return total

    def total(self, gradient: Gradient, token: Token, at: Point) -> Symbolic:
        """The sum of a gradient's contributions."""
        own = {a: at[a] for a in self.without_time(gradient.axes) if a in at}
        terms = (t for t in gradient.terms if t.when is None or t.when in self.present)
        return sum((self.contribution(t, token, own) for t in terms), start=sympy.Integer(0))

    def contribution(self, term: Contribution, token: Token, at: Point) -> Symbolic:
        """A contribution, summed."""
        total = sympy.Integer(0)
        for now in self.tokens if self.layer.time in term.summed else (token,):
            if now is None and term.ahead:
                self.fail(f"`{term.quantity}` is the same at every token")
            then = now if now is None else now + term.ahead
            for summed in self.points(self.without_time(term.summed)):
                point = {**at, **summed}
                quantity = self.quantity(term.quantity, then, point)
                if quantity != 0:
                    total += self.values.value(term.factor, then, point, self.before(term.when)) * quantity
        return total

    def gradient(self, gradient: Gradient) -> None:
        """The gradient of a read or an input at each token and channel of one batch and head."""
        fixed = {self.layer.batch: 0, self.layer.head: 0, **{g.axis: 0 for g in self.layer.groups}}
        axes = self.without_time(gradient.axes)
        name = to_text(gradient.of)
        for channels in self.points(tuple(a for a in axes if a not in fixed)):
            at = {**{a: i for a, i in fixed.items() if a in axes}, **channels}
            for token in self.tokens if self.layer.time in gradient.axes else (None,):
                symbol = self.known[name](token, at) if name in self.known else self.values.input(name, token, at)
                truth = sum(sympy.diff(s, symbol) for s in self.containing.get(symbol, ()))
                got = self.total(gradient, token, at)
                if not equal(sympy.sympify(truth).subs(sympy.log(2), LN2), got):
                    self.fail(f"of {symbol} it is {truth}, not {got}")
