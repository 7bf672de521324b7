"""The proof that a ChunkForm computes what its Layer says, about the very fields that kernels print.

Values are taken at points: a token, and an index along each channel axis (two of each, so that a sum over channels is
one). An input at a point is a symbol; a state is a symbol or, unrolled, an expression in what came before. Batch and
head carry no index, since nothing sums over them. Two values are equal if their difference expands to zero, every power
of two taken apart into a monomial of positive atoms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import sympy  # type: ignore[import-untyped]

from ssdgen.derive.proof import Proof
from ssdgen.derive.recurrence import names_of
from ssdgen.derive.statements import Statements
from ssdgen.derive.step_prover import Point, StepProver, points
from ssdgen.derive.symbolic import OPERATIONS, Symbolic, equal, pow2, sigmoid, thaw
from ssdgen.ir.chunkform import ChunkForm, ChunkState, ChunkTerm, Read, Score
from ssdgen.ir.expr import ONE, OPS, Apply, Axes, Contract, Expr, Ref, axes_of, refs, to_text, walk
from ssdgen.ir.layer import State
from ssdgen.ir.recurrence import Diagonal, LinearState, OutputForm, Readout, Term

Known = Mapping[str, Callable[[int, Point], Symbolic]]
"""Values of states, reads or outputs by name, at a token and a point."""

TOKENS = (0, 1, 2)


UNFOLDED = {
    **OPERATIONS,
    "exp2": pow2,
    "softplus": lambda x: sympy.log(1 + sympy.exp(x)),
    "logsigmoid": lambda x: sympy.log(sigmoid(x)),
    "silu": lambda x: x * sigmoid(x),
}
"""Operations as their definitions, so that exp(logsigmoid(x)) is sigmoid(x)."""


class Prover(Statements):
    """One proof: `prove` goes through the statements, and the first that fails raises ProofError."""

    def __init__(self, form: ChunkForm) -> None:
        self.form = form
        self.layer = form.recurrence.layer
        self.lets = {let.name: let.value for let in self.layer.lets}
        self.signs = {t.name: t.range for t in self.layer.inputs} | {p.name: p.range for p in self.layer.params}
        self.unrolled: dict[tuple[str, int, Axes, tuple[int, ...]], Symbolic] = {}
        self.varies_in_time: set[Symbolic] = set()

    def prove(self) -> Proof:
        """Every statement, in order."""
        return self.prove_all(self.layer.name)

    def statements(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """What is proved and how; each may assume those before it."""
        form, t = self.form, self.layer.time
        yield "each name is declared once, used, and means what the layer declares", self.names
        for state, written in zip(form.states, self.layer.states, strict=True):
            now, before = f"{state.name}[{t}]", f"{state.name}[{t}-1]"
            terms = " + ".join(map(self._term_text, state.terms))
            decay = form.decay(state.decay)
            power = "" if decay.kind == "none" else f"2^({decay.log2}) "
            yield (
                f"{now} = ({written.decay}) {before} + {written.input}, the parts of its update",
                partial(self.affine, written),
            )
            yield f"{now} = {power}{before} + {terms}", partial(self.one_step, state, written)
            yield f"the decay of {state.name} is of kind {decay.kind}", partial(self.kind, state)
            yield f"the jump of {state.name} over any length, by induction", partial(self.induction, state, written)
        for read in form.reads:
            at = t if read.at == 0 else f"{t}-1"
            text = f"{read.name} = {read.state}[{at}] . {read.vector} is its carried term and interactions"
            yield f"{text}, unrolled over {len(TOKENS)} tokens", partial(self.read, read)
        for output in form.outputs:
            yield (
                f"{output.name} = {output.value} and its gates are the outputs as written",
                partial(self.output, output),
            )
        yield from StepProver(self).statements()
        yield "the recurrence it was made from says the same", self.same_recurrence

    def _term_text(self, term: ChunkTerm) -> str:
        lag = f"[{self.layer.time}-1]" if term.lag else ""
        weight = self.form.weight(term.weight).value
        vectors = " (x) ".join(f"({v}){lag}" for v in (term.row, term.column) if v is not None)
        return vectors if weight == ONE else f"({weight}) {vectors}"

    def require_equal(self, left: Symbolic, right: Symbolic, what: str) -> None:
        """Fail unless two values are equal."""
        if not equal(left, right):
            self.fail(f"{what}: {left} is not {right}")

    # Values

    def value(self, expr: Expr, token: int, at: Point, known: Known) -> Symbolic:
        """`expr` at a token and a point; fails if it varies over an axis that the point has no index for."""

        def leaf(e: Expr) -> Symbolic:
            match e:
                case Contract(left=left, right=right, axis=axis):
                    both = [{**at, **p} for p in points(axis)]
                    return sum(self.value(left, token, p, known) * self.value(right, token, p, known) for p in both)
                case Ref(name=name, lag=lag) if name in known:
                    return known[name](token - lag, at)
                case Ref(name=name, lag=lag) if name in self.lets:
                    return self.value(self.lets[name], token - lag, at, {})
            return self.symbol(e, token, at)

        return thaw(expr, leaf, UNFOLDED)

    def symbol(self, leaf: Expr, token: int, at: Point) -> Symbolic:
        """The symbol of an input, a parameter, a size or an index at a token and a point."""
        name = to_text(leaf)
        in_time = isinstance(leaf, Ref) and leaf.per_token
        if isinstance(leaf, Ref):
            name = f"{leaf.name}[{token - leaf.lag}]" if in_time else leaf.name
        index = self.index(leaf, axes_of(leaf), at)
        sign = self.signs.get(leaf.name) if isinstance(leaf, Ref) else None
        positive = True if sign is not None and (sign.low > 0 or (sign.low == 0 and sign.low_open)) else None
        symbol = sympy.Symbol(name + "".join(f"_{a}{i}" for a, i in index.items()), real=True, positive=positive)
        if in_time:
            self.varies_in_time.add(symbol)
        return symbol

    def index(self, expr: object, axes: Axes, at: Point) -> dict[str, int]:
        """The part of `at` along the channel axes of `axes`."""
        channels = [a for a in axes if a not in (self.layer.batch, self.layer.head)]
        for axis in channels:
            self.require(axis in at, f"`{expr}` varies over `{axis}` where nothing may")
        return {a: at[a] for a in channels}

    def state_symbol(self, state: ChunkState, token: int, at: Point) -> Symbolic:
        """The state after a token as a symbol of its own."""
        index = self.index(state.name, state.axes, at)
        return sympy.Symbol(f"{state.name}<{token}>" + "".join(f"_{a}{i}" for a, i in index.items()), real=True)

    def after(self, name: str, token: int, at: Point) -> Symbolic:
        """The state after a token, unrolled from a symbolic one before token 0 by the update as it was written."""
        state = self.form.state(name)
        if token < 0:
            return self.state_symbol(state, token, at)
        index = self.index(name, state.axes, at)
        key = (name, token, tuple(index), tuple(index.values()))
        if key not in self.unrolled:
            update = next(s.update for s in self.layer.states if s.name == name)
            value = self.value(update, token, index, {name: partial(self.after, name)})
            self.unrolled[key] = sympy.expand(value)
        return self.unrolled[key]

    # Statements

    def names(self) -> None:
        """Names are unique and used, references resolve, expressions refer to what is declared, axes are the declared."""
        form, layer = self.form, self.layer
        declared = Counter(
            item.name for items in (form.decays, form.weights, form.scores, form.reads) for item in items
        )
        own = {w.name for w in form.weights if isinstance(w.value, Ref) and w.value.name == w.name}
        for name, times in declared.items():
            self.require(times == 1, f"`{name}` is declared {times} times")
            self.require(name in own or name not in names_of(layer), f"`{name}` is a name of the layer")
        terms = [t for s in form.states for t in s.terms]
        interactions = [i for r in form.reads for i in r.interactions]
        used_reads = {r.name for o in form.outputs for e in _output_exprs(o) for r in refs(e)}
        self._same("decays", (d.name for d in form.decays), (s.decay for s in form.states))
        self._same("weights", (w.name for w in form.weights), (t.weight for t in terms))
        self._same("scores", (s.name for s in form.scores), (i.score for i in interactions))
        self._same("reads", (r.name for r in form.reads), used_reads - names_of(layer))
        for decay in (*(s.decay for s in form.scores), *(r.decay for r in form.reads)):
            self.require(decay in {d.name for d in form.decays}, f"`{decay}` is no decay")
        for score in form.scores:
            self.require(score.weight in {w.name for w in form.weights}, f"`{score.weight}` is no weight")
        self.require([s.name for s in form.states] == [s.name for s in layer.states], "the states are others")
        self.require([o.name for o in form.outputs] == [o.name for o in layer.outputs], "the outputs are others")
        for state, written in zip(form.states, layer.states, strict=True):
            channels = {state.row_axis, state.column_axis} - {None}
            self.require(state.axes == written.axes, f"`{state.name}` has the axes {state.axes}")
            self.require(channels == set(written.axes[2:]), f"`{state.name}` has the row and column axes {channels}")
            self.require(len(channels) == len(written.axes[2:]), f"`{state.name}` has a row axis too many")
        for read in form.reads:
            self.require(read.state in {s.name for s in form.states}, f"`{read.state}` is no state")
            for i in read.interactions:
                self.require(i.lag == form.score(i.score).lag, f"`{read.name}` takes row and column of two tokens")
        self._well_formed()

    def _same(self, what: str, declared: Iterable[str], used: Iterable[str]) -> None:
        for name in set(declared) ^ set(used):
            self.fail(f"of the {what}, `{name}` is not both declared and used")

    def _well_formed(self) -> None:
        written = [let.value for let in self.layer.lets] + [s.update for s in self.layer.states]
        written += [e for o in self.layer.outputs for e in (o.value, *(g.value for g in o.gates))]
        known = {(r.name, r.axes, r.per_token) for e in written for r in refs(e)}
        states, inputs = {s.name for s in self.layer.states}, {t.name for t in self.layer.inputs}
        tokens = {key for key in known if key[0] not in states}
        reads = set()
        for r in self.form.reads:
            state = self.form.state(r.state)
            reads.add((r.name, tuple(a for a in state.axes if a != state.column_axis), True))
        for expr, allowed in (
            *((e, tokens) for e in _token_exprs(self.form)),
            *((e, tokens | reads) for o in self.form.outputs for e in _output_exprs(o)),
        ):
            for e in walk(expr):
                if isinstance(e, Ref):
                    self.require((e.name, e.axes, e.per_token) in allowed, f"`{e!r}` is not declared")
                    may_lag = e.per_token and e.name in inputs
                    self.require(e.lag == 0 or (e.lag == 1 and may_lag), f"`{e}` looks back {e.lag} tokens")
                if isinstance(e, Apply):
                    self.require(OPS.get(e.op) == len(e.args), f"`{e.op}` of {len(e.args)}")
                if isinstance(e, Contract):
                    both = e.axis in axes_of(e.left) and e.axis in axes_of(e.right)
                    self.require(both, f"`{e}` sums over `{e.axis}`")

    def update(self, written: State, token: int, at: Point, before: Symbolic) -> Symbolic:
        """The update as it was written, of a state that was `before`."""
        return self.value(written.update, token, at, {written.name: lambda _token, _at: before})

    def point(self, state: ChunkState) -> dict[str, int]:
        """A point of a state, its two indices distinct."""
        return {a: i for i, a in enumerate((state.row_axis, state.column_axis)) if a is not None}

    def affine(self, written: State) -> None:
        """f(S) - (a S + u) = 0 with the decay and the input that the layer holds."""
        state = self.form.state(written.name)
        at, before = self.point(state), sympy.Symbol("S", real=True)
        parts = self.value(written.decay, 0, at, {}) * before + self.value(written.input, 0, at, {})
        self.require_equal(self.update(written, 0, at, before), parts, written.name)

    def log2(self, decay: str, token: int, at: Point) -> Symbolic:
        """The log2 decay of one token; only the column axis may be indexed."""
        return self.value(self.form.decay(decay).log2, token, at, {})

    def input(self, state: ChunkState, token: int, at: Point) -> Symbolic:
        """The sum of a state's terms at a token."""
        total = sympy.Integer(0)
        for term in state.terms:
            total += self.summand(state, term, token, at)
        return total

    def summand(self, state: ChunkState, term: ChunkTerm, token: int, at: Point) -> Symbolic:
        """A term of a state at a token."""
        return self.product(self.form.weight(term.weight).value, term, state, token, at)

    def product(self, weight: Expr, term: ChunkTerm | Term, state: ChunkState, token: int, at: Point) -> Symbolic:
        """weight * row * column: the weight of the token, row and column of the token or the one before."""
        value = self.value(weight, token, {}, {})
        value *= self.value(term.column, token - term.lag, {state.column_axis: at[state.column_axis]}, {})
        self.require((term.row is None) == (state.row_axis is None), f"a term of `{state.name}` has the row {term.row}")
        if term.row is not None and state.row_axis is not None:
            value *= self.value(term.row, token - term.lag, {state.row_axis: at[state.row_axis]}, {})
        return value

    def one_step(self, state: ChunkState, written: State) -> None:
        """f(S) - (2^log2 S + sum of terms) = 0: the decay in log space and the factorisation."""
        at, before = self.point(state), sympy.Symbol("S", real=True)
        decay = pow2(self.log2(state.decay, 0, {state.column_axis: at[state.column_axis]}))
        self.require_equal(self.update(written, 0, at, before), decay * before + self.input(state, 0, at), state.name)

    def kind(self, state: ChunkState) -> None:
        """What a decay varies over, from its value: nothing, the sequence and head alone, the token, the column channel."""
        decay = self.form.decay(state.decay)
        value = self.log2(state.decay, 0, {state.column_axis: 1})
        other = self.log2(state.decay, 0, {state.column_axis: 0})
        in_time = bool(value.free_symbols & self.varies_in_time)
        kind = "none" if value == 0 else "channel" if value != other else "token" if in_time else "constant"
        self.require(kind == decay.kind, f"it is of kind {kind}")

    def induction(self, state: ChunkState, written: State) -> None:
        """S(L+1) = a S(L) + u is the formula for L+1 if S(L) is that for L: for the carried term and each summand."""
        length, j = 9, 5  # tokens that stand for any; s is the running sum before token `length`, s_j that of token j
        s, s_j = sympy.symbols("s s_j", real=True)
        at = self.point(state)
        column = {state.column_axis: at[state.column_axis]}
        new = self.update(written, length, at, sympy.Integer(0))
        decay = self.update(written, length, at, sympy.Integer(1)) - new
        longer = s + self.log2(state.decay, length, column)
        self.require_equal(decay * pow2(s), pow2(longer), "the carried term")
        for term in state.terms:
            summand = self.summand(state, term, j, at)
            self.require_equal(decay * pow2(s - s_j) * summand, pow2(longer - s_j) * summand, "the summand of token j")
        self.require_equal(new, self.input(state, length, at), "the last summand")

    def read(self, read: Read) -> None:
        """The carried term and the interactions against the unrolled recurrence, token by token."""
        state = self.form.state(read.state)
        for i in TOKENS:
            for row in points(state.row_axis):
                truth = sum(
                    self.after(state.name, i + read.at, {**row, **c}) * self.value(read.vector, i, c, {})
                    for c in points(state.column_axis)
                )
                self.require_equal(truth, self.read_in_chunk(read, i, row), f"{read.name} at token {i} of the chunk")

    def read_in_chunk(self, read: Read, i: int, row: Point) -> Symbolic:
        """The carried term and the interactions of a read at token i of a chunk."""
        value = sum(self.carried(read, i, row, c) for c in points(self.form.state(read.state).column_axis))
        for interaction in read.interactions:
            score = self.form.score(interaction.score)
            for j in range(i + 1 + score.at):
                added = self.score(score, i, j)
                if interaction.row is not None:
                    added *= self.value(interaction.row, j - interaction.lag, row, {})
                value += added
        return value

    def carried(self, read: Read, i: int, row: Point, column: Point) -> Symbolic:
        """A summand of the carried term: 2^s (or 2^e) times the entry state times the vector."""
        total = sum(self.log2(read.decay, k, column) for k in range(i + 1 + read.at))
        entry = self.state_symbol(self.form.state(read.state), -1, {**row, **column})
        return pow2(total) * entry * self.value(read.vector, i, column, {})

    def score(self, score: Score, i: int, j: int) -> Symbolic:
        """The score of tokens i and j."""
        weight = self.value(self.form.weight(score.weight).value, j, {}, {})
        total = sympy.Integer(0)
        for c in points(score.axis):
            product = self.value(score.vector, i, c, {}) * self.value(score.column, j - score.lag, c, {})
            total += product * pow2(sum(self.log2(score.decay, k, c) for k in range(j + 1, i + 1 + score.at)))
        return total * weight

    def output(self, output: OutputForm) -> None:
        """The value and each gate, as functions of states that are symbols, against the output as written."""
        written = next(o for o in self.layer.outputs if o.name == output.name)
        self.require(output.axes == written.axes, f"its axes are {output.axes}")
        self.require([g.tensor for g in output.gates] == [g.tensor for g in written.gates], "its gates are others")
        at = {a: 1 for a in output.axes if a not in (self.layer.batch, self.layer.time, self.layer.head)}
        itself = {output.name: lambda _token, _at: sympy.Symbol(output.name, real=True)}
        states: Known = {s.name: partial(self.state_symbol, s) for s in self.form.states}
        reads: Known = {r.name: partial(self.read_of_symbols, r) for r in self.form.reads}
        gates = [(g.value, w.value) for g, w in zip(output.gates, written.gates, strict=True)]
        for derived, truth in ((output.value, written.value), *gates):
            left = self.value(truth, 0, at, {**states, **itself})
            self.require_equal(left, self.value(derived, 0, at, {**reads, **itself}), output.name)

    def read_of_symbols(self, read: Read, token: int, at: Point) -> Symbolic:
        """What a read is by definition: its state, a symbol, times its vector."""
        state = self.form.state(read.state)
        return sum(
            self.state_symbol(state, token + read.at, {**at, **c}) * self.value(read.vector, token, c, {})
            for c in points(state.column_axis)
        )

    def same_recurrence(self) -> None:
        """The Recurrence inside the form, which is shown to people, has the values that were proved."""
        form = self.form
        states = []
        for s in form.states:
            decay = form.decay(s.decay)
            terms = tuple(Term(form.weight(t.weight).value, t.row, t.column, t.lag) for t in s.terms)
            transition = Diagonal(decay.kind, decay.log2)
            states.append(LinearState(s.name, s.axes, s.row_axis, s.column_axis, transition, terms))
        readouts = tuple(Readout(r.name, r.state, r.vector, r.at) for r in form.reads)
        self.require(form.recurrence.states == tuple(states), "its states are others")
        self.require(form.recurrence.readouts == readouts, "its readouts are others")
        self.require(form.recurrence.outputs == form.outputs, "its outputs are others")


def _token_exprs(form: ChunkForm) -> Iterator[Expr]:
    """Every expression of a form that may depend on inputs and lets alone."""
    yield from (d.log2 for d in form.decays)
    yield from (w.value for w in form.weights)
    for s in form.states:
        yield from (e for t in s.terms for e in (t.row, t.column) if e is not None)
    for score in form.scores:
        yield from (score.vector, score.column)
    for r in form.reads:
        yield from (r.vector, *(i.row for i in r.interactions if i.row is not None))
    for move in form.step.moves:
        yield move.log2_decay
        yield from (e for term in move.terms for e in (term.weight, term.row, term.column) if e is not None)
    yield from (r.vector for r in form.step.reads)


def _output_exprs(output: OutputForm) -> Iterator[Expr]:
    yield output.value
    yield from (g.value for g in output.gates)
