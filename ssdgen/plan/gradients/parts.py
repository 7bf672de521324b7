"""The products and tiles that the gradients of a chunk are made of, each computed once, in the orientation (key, time)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ssdgen.ir.adjoint import Adjoint, RowAdjoint
from ssdgen.ir.chunkform import ChunkForm, ChunkState, Read, Score
from ssdgen.ir.expr import ONE, Apply, Axes, Contract, Expr, Ref, add, axes_of, mul, refs
from ssdgen.ir.plan import CHUNKS, KEY, SHARES, Config, Dot, Let, Parameter, Slot, Statement, SumTogether, Zeros
from ssdgen.plan.decays import Sums, decay_sums, decayed, grown, weight_tile
from ssdgen.plan.gradients.walks import end_name
from ssdgen.plan.lower import retime, where
from ssdgen.plan.place import CHUNK_TABLE, declare_packed
from ssdgen.plan.reads import shared_axes
from ssdgen.plan.shared import product_key, product_name
from ssdgen.plan.walk import WalkBuilder, entry_axes, entry_dtype, tile_constant

TOGETHER = (5, 4, 2, 1)
"""How many sums one statement makes, the most that there are."""


@dataclass(frozen=True, slots=True)
class Sum:
    """The sum of `value` over an axis, which leaves `axes`: computed once for each `key`, under a name."""

    key: str
    name: str
    value: Expr
    over: str
    axes: Axes


@dataclass
class Parts:
    """A chunk kernel in the making: `once` is the same for all heads of a group, `each` is done for every head, `after` once
    with the sums over them, which are the `accumulators`."""

    builder: WalkBuilder
    adjoint: Adjoint
    row: str
    column: str
    once: list[Statement] = field(default_factory=list)
    each: list[Statement] = field(default_factory=list)
    after: list[Statement] = field(default_factory=list)
    accumulators: list[Ref] = field(default_factory=list)
    mixed: dict[tuple[str, Expr], Ref] = field(default_factory=dict)

    @classmethod
    def begin(cls, adjoint: Adjoint, config: Config) -> Parts:
        """Those of a kernel whose blocks have one chunk, and whole rows and columns."""
        row, column = shared_axes(adjoint.form)
        assert row is not None
        builder = WalkBuilder(adjoint.form, config, (row, column))
        builder.place |= {a: Slot(a, "0", tile_constant(a)) for a in (row, column)}
        builder.place |= {a: Slot(a, index, "1") for a, index in ((SHARES, "share"), (CHUNKS, "slot"))}
        declare_packed(builder, CHUNK_TABLE)
        return cls(builder, adjoint, row, column)

    def finish(self) -> None:
        """Declare the constants, and what the statements so far use."""
        self.builder.constant("chunk")
        for axis in (self.row, self.column):
            self.builder.constant(f"tile_{axis}", f"size_{axis}")
        self.builder.finish(self.once, self.each, self.after)
        self.builder.name_widened(self.each)

    @property
    def form(self) -> ChunkForm:
        """The form whose gradients these are."""
        return self.adjoint.form

    @property
    def time(self) -> str:
        """The time axis."""
        return self.builder.layer.time

    def named(self, key: str, name: str, value: Expr, axes: Axes, note: str = "") -> Ref:
        """`value` under a name, computed once for every head."""
        if key not in self.builder.known:
            self.builder.known[key] = self.builder.name_value(self.each, name, value, note, axes=axes)
        return self.builder.known[key]

    def total(self, found: Sum) -> Ref:
        """A sum by itself, unless it is there."""
        return self.named(found.key, found.name, Contract(found.value, ONE, found.over), found.axes)

    def missing(self, sums: Iterable[Sum]) -> list[Sum]:
        """Those of `sums` that are not there, each once."""
        return [s for s in {s.key: s for s in sums}.values() if s.key not in self.builder.known]

    def together(self, sums: Iterable[Sum]) -> list[Statement]:
        """The statements that make sums that leave one axis each, as many in one as there can be; they are `known` then, and
        what is made of a sum twice has the same name."""
        names, known = self.builder.names, self.builder.known
        left = list(sums)
        out: list[Statement] = []
        while left:
            size = next(n for n in TOGETHER if n <= len(left))
            some, left = left[:size], left[size:]
            for s in some:
                if s.key not in known:
                    known[s.key] = Ref(names.fresh(s.name), s.axes)
            targets = tuple(known[s.key] for s in some)
            if size > 1:
                out.append(SumTogether(targets, tuple(s.value for s in some), tuple(s.over for s in some)))
            else:
                out.append(Let(targets[0], Contract(some[0].value, ONE, some[0].over)))
        return out

    def product(
        self, section: list[Statement], key: str, name: str, dot: tuple[Expr, Expr], axes: Axes, how: str
    ) -> Ref:
        """left . right over the axis that `axes` lack, from zero, computed once."""
        known = self.builder.known
        if key not in known:
            over = next(a for a in (self.column, self.row) if a not in axes and all(a in axes_of(f) for f in dot))
            target = Ref(self.builder.names.of("value", name), axes)
            section += [Zeros(target), Dot(target, dot, over, target, self.builder.constant(how))]
            known[key] = target
        return known[key]

    def vector_tile(self, vector: Expr) -> Expr:
        """The tile [L, N] of a read's vector, zero on padding as a column is: its gradient is summed over tokens."""
        return self.builder.column(self.once, vector, self.column)

    def column_tile(self, column: Expr) -> Expr:
        """The tile [L, N] of a column."""
        return self.builder.column(self.once, column, self.column)

    def row_tile(self, row: Expr | None) -> Expr:
        """The tile [L, P] of a row."""
        assert row is not None
        return self.builder.row(self.each, row, self.row)

    def sums(self, decay: str, *, end: bool = False) -> Sums:
        """The sums of a decay, that over the whole chunk if its `end` is asked for."""
        return decay_sums(self.builder, self.each, self.each, self.form.decay(decay), earlier=False, end=end)

    def weight(self, name: str) -> Expr:
        """A weight of every token, or a number."""
        return weight_tile(self.builder, self.each, self.each, self.form.weight(name))

    def carry(self, decay: str) -> Expr:
        """What is left at the end of the chunk of what a token writes."""
        sums = self.sums(decay, end=True)
        value = decayed(sums.end, sums.through)
        if value == ONE:
            return ONE
        return self.named(f"carry {decay}", "carry", value, (self.time,), "what is left of a token's input at the end")

    def grown(self, decay: str) -> Expr:
        """What is left at a token of the state that enters the chunk."""
        value = grown(self.sums(decay).through)
        if value == ONE:
            return ONE
        return self.named(f"kept {decay}", "kept", value, (self.time,), "what is left of the entry state at a token")

    def causal(self, value: Expr, at: int = 0) -> Expr:
        """`value` where token i reads token j, else 0."""
        return where(self.builder.causal(self.once, at, (KEY, self.time)), value)

    def left(self, score: Score) -> Expr:
        """What is left at token i of what token j writes, 0 if i is before j; one without decay, where nothing is masked."""
        through = self.sums(score.decay).through
        value = decayed(through, retime(through, self.time, KEY))
        if value == ONE:
            return ONE
        note = "what is left of token j at token i"
        return self.named(f"left {score.decay}", f"{score.decay}_left", self.causal(value), (KEY, self.time), note)

    def scores(self, score: Score) -> Ref:
        """column . vector of every two tokens."""
        keys = retime(self.column_tile(score.column), self.time, KEY)
        dot, key = (keys, self.vector_tile(score.vector)), f"product {product_key(score)}"
        return self.product(self.once, key, product_name(self.form, score), dot, (KEY, self.time), "scores")

    def score(self, score: Score) -> Expr:
        """The scores, weighted and decayed."""
        weight = retime(self.weight(score.weight), self.time, KEY)
        left = self.left(score)
        value = mul(self.scores(score), left, weight)
        value = self.causal(value) if left == ONE else value
        return self.named(f"score {score.name}", score.name, value, (KEY, self.time))

    def flow(self, name: str) -> Ref:
        """The gradient of scores by name, times what is left: nothing flows from a token to one before."""
        d_score = self.adjoint.score(name)
        score, target = self.form.score(d_score.score), Ref(f"{name}_tile", (KEY, self.time))
        key = f"flow {name}"
        if key not in self.builder.known:
            target = Ref(self.builder.names.of("gradient", f"{name}_tile"), target.axes)
            self.each.append(Zeros(target))
            plain: list[Expr] = [target]
            for part in d_score.parts:
                if part.row is None:
                    plain.append(self.builder.widened(self.read(part.read)))
                    continue
                rows = retime(self.row_tile(part.row), self.time, KEY)
                intra = self.builder.constant("intra")
                self.each.append(Dot(target, (rows, self.read(part.read)), self.row, target, intra))
            left, total = self.left(score), add(*plain)
            value = self.causal(total) if left == ONE else mul(total, left)
            self.each.append(Let(target, value, None, "decayed"))
            self.builder.known[key] = target
        return self.builder.known[key]

    def read(self, name: str) -> Ref:
        """The gradient of a read."""
        return self.builder.known[self.adjoint.of_read(name).name]

    def entry(self, state: ChunkState) -> Ref:
        """The state that enters the chunk."""
        return self._stored(f"{state.name}_entry", state)

    def end(self, state: ChunkState) -> Ref:
        """The gradient of a state that arrives at the end of the chunk."""
        return self._stored(end_name(next(s for s in self.adjoint.states if s.state == state.name)), state)

    def _stored(self, name: str, state: ChunkState) -> Ref:
        axes, dtype = entry_axes(self.form, state), entry_dtype(state)
        array = self.builder.declare(Parameter(name, "workspace", name, axes, dtype))
        return self.builder.load(self.each, array, self.builder.latency(state.name))

    def pulled(self, state: ChunkState, column: Expr) -> Ref:
        """d_S_end . column: what the end of the chunk asks of the row that is written with a column."""
        dot, key = (self.column_tile(column), self.end(state)), f"pulled {state.name} {column}"
        name = "pulled" if len(self.form.states) == 1 else f"pulled_{state.name}"
        if state.row_axis is None:
            return self.named(key, name, self._summed(dot), (self.time,))
        return self.product(self.each, key, name, dot, (self.time, self.row), "carried")

    def row_pulled(self, state: ChunkState, row: Expr | None, column: Expr) -> Ref:
        """row . d_S_end . column of each token."""
        return self.pulled(state, column) if row is None else self.total(self.pull_of(state, row, column))

    def pull_of(self, state: ChunkState, row: Expr, column: Expr) -> Sum:
        """The same of a state with rows, as a sum over them."""
        value = mul(self.builder.widened(self.row_tile(row)), self.pulled(state, column))
        return Sum(f"row pulled {state.name} {row} {column}", "row_pulled", value, self.row, (self.time,))

    def seen(self, read: Read) -> Ref:
        """d_read . S . vector of each token."""
        found = self.sight_of(read)
        if self.form.state(read.state).row_axis is None:
            return self.named(found.key, found.name, found.value, found.axes)
        return self.total(found)

    def sight_of(self, read: Read) -> Sum:
        """The same as a sum over rows."""
        value = mul(self.builder.widened(self.read(read.name)), self.carried(read))
        return Sum(f"seen {read.name}", "seen", value, self.row, (self.time,))

    def carried(self, read: Read) -> Ref:
        """S . vector."""
        dot = (self.vector_tile(read.vector), self.entry(self.form.state(read.state)))
        key = f"carried {read.state} {read.vector}"
        if self.form.state(read.state).row_axis is None:
            return self.named(key, f"{read.name}_carried", self._summed(dot), (self.time,))
        return self.product(self.each, key, f"{read.name}_carried", dot, (self.time, self.row), "carried")

    def _summed(self, factors: tuple[Expr, Expr]) -> Expr:
        """The sum over columns of what a vector state is multiplied with."""
        return Contract(mul(*map(self.builder.widened, factors)), ONE, self.column)

    def value_of(self, read: Read) -> Ref:
        """What every token reads: the entry state, and the tokens of the chunk up to it."""
        has_rows = self.form.state(read.state).row_axis is not None
        target = Ref(self.builder.names.of("read", read.name), (self.time, self.row) if has_rows else (self.time,))
        total: Expr = mul(self.carried(read), self.grown(read.decay))
        for interaction in read.interactions:
            score = self.score(self.form.score(interaction.score))
            if interaction.row is None:
                found = self.named(
                    f"read within {read.name}", f"{read.name}_within", Contract(score, ONE, KEY), (self.time,)
                )
                total = Apply("add", (total, found))
                continue
            rows = retime(self.row_tile(interaction.row), self.time, KEY)
            self.each.append(Dot(target, (score, rows), KEY, total, self.builder.constant("intra")))
            total = target
        if total != target:
            self.each.append(Let(target, total))
        return target

    def know(self, *exprs: Expr) -> None:
        """Make `known` what the expressions refer to of what is read, and of outputs before their gates."""
        known = self.builder.known
        names = {ref.name for expr in exprs for ref in refs(expr)}
        for output in (o for o in self.form.outputs if o.name in names and o.name not in known):
            self.know(output.value)
            target = Ref(self.builder.names.of("output", f"{output.name}_tile"), (self.time, self.row))
            line = next(o for o in self.builder.layer.outputs if o.name == output.name).value.span.line
            self.each.append(Let(target, self.builder.arithmetic(self.each, output.value), line))
            known[output.name] = target
        for read in (r for r in self.form.reads if r.name in names and r.name not in known):
            known[read.name] = self.value_of(read)

    def row_gradient(self, adj: RowAdjoint) -> Ref:
        """The gradient of a row."""
        state = self.form.state(adj.state)
        carry = self.carry(state.decay)
        terms = [mul(self.pulled(state, t.column), mul(self.weight(t.weight), carry)) for t in adj.terms]
        target = Ref(self.builder.names.of("gradient", f"{adj.name}_tile"), (self.time, self.row))
        total: Expr = add(*terms)
        for scored in adj.reads:
            score = self.score(self.form.score(scored.score))
            at_key = Ref(target.name, (KEY, self.row))
            intra = self.builder.constant("intra")
            dot = Dot(at_key, (score, self.read(scored.read)), self.time, retime(total, self.time, KEY), intra)
            self.each.append(dot)
            total = target
        if total != target:
            self.each.append(Let(target, total))
        self.builder.known[adj.name] = target
        return target

    def flowed(self, name: str) -> Ref:
        """flow * scores: what a decay and a weight between two tokens are asked for."""
        score = self.form.score(self.adjoint.score(name).score)
        value = mul(self.flow(name), self.scores(score))
        return self.named(f"flowed {name}", "flow", value, (KEY, self.time), "what the weight at j is asked for by i")

    def asked(self, name: str) -> Sum:
        """What the weights at j are asked for."""
        return Sum(f"asked {name}", "asked", self.flowed(name), self.time, (KEY,))

    def past(self, name: str) -> Ref:
        """The same weighted, of tokens before."""
        weight = self.weight(self.form.score(self.adjoint.score(name).score).weight)
        value = self.causal(mul(self.flowed(name), retime(weight, self.time, KEY)), -1)
        return self.named(f"past {name}", "past", value, (KEY, self.time), "between two tokens")

    def passed(self, name: str) -> Sum:
        """What goes past from j on."""
        return Sum(f"passed {name}", "passed", self.past(name), self.time, (KEY,))

    def at_key(self, found: Sum) -> Ref:
        """A sum [j] at its key's place among the tokens."""
        return Ref(self.total(found).name, (self.time,))

    def mix(self, name: str, factor: Expr) -> Ref:
        """The sum over heads of factor * flow."""
        key = (name, factor)
        if key not in self.mixed:
            target = Ref(self.builder.names.fresh(f"{name}_sum"), (KEY, self.time))
            self.accumulators.append(target)
            self.each.append(Let(target, Apply("add", (target, mul(self.flow(name), factor)))))
            self.mixed[key] = target
        return self.mixed[key]
