"""ChunkForm -> Adjoint: the gradients of a chunk, each equal thing computed once.

The formulas within a chunk are the same for every recurrence and stand in `ssdgen.ir.adjoint`; this stage fills in their
fields. What is different for every recurrence are the derivatives of the expressions around them, which are sympy's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from ssdgen.derive.chain_rule import ChainRule
from ssdgen.derive.recurrence import fresh_name, names_of
from ssdgen.derive.symbolic import LN2, partials
from ssdgen.ir.adjoint import (
    Adjoint,
    DecayAdjoint,
    GateAdjoint,
    Gradient,
    OutputAdjoint,
    RowAdjoint,
    ScoreAdjoint,
    Scored,
    ScorePart,
    StateAdjoint,
    VectorAdjoint,
    WeightAdjoint,
    Weighted,
    WriteAdjoint,
    Written,
)
from ssdgen.ir.chunkform import ChunkForm, ChunkState, ChunkTerm, Read
from ssdgen.ir.expr import ZERO, Axes, Expr, Ref


def adjoint(form: ChunkForm) -> Adjoint:
    """The gradients of `form` by its inputs and by the states it starts from.

    Assumes of `form` what `prove` proves. Guarantees that names are nobody else's, that a gradient refers only to those
    before it, and that gradients of lets come in the order in which they can be computed.
    """
    return _Derivation(form).adjoint()


class _Derivation:
    def __init__(self, form: ChunkForm) -> None:
        self.form = form
        self.layer = form.recurrence.layer
        self.chain = ChainRule(self.layer)
        named = (form.decays, form.weights, form.scores, form.reads)
        self.taken = names_of(self.layer) | {item.name for items in named for item in items}
        self.terms = [(s, t) for s in form.states for t in s.terms]
        declared = (self.layer.inputs, self.layer.lets, self.layer.states, self.layer.outputs)
        self.of = {item.name: self.name(item.name) for items in declared for item in items}
        """The gradient of what the layer declares: named first, so that what is derived gives way."""

    def name(self, stem: str) -> str:
        name = fresh_name(f"d_{stem}", self.taken)
        self.taken.add(name)
        return name

    def adjoint(self) -> Adjoint:
        form, chain, layer = self.form, self.chain, self.layer
        outputs = tuple(OutputAdjoint(self.of[o.name], o.name) for o in form.outputs)
        gates = tuple(gate for o in outputs for gate in self.gates(o))
        reads = tuple(
            chain.gradient(self.name(r.name), Ref(r.name, self.read_axes(form.state(r.state)), True))
            for r in form.reads
        )
        states = tuple(
            StateAdjoint(self.of[s.name], s.name, tuple(r.name for r in form.reads if r.state == s.name))
            for s in form.states
        )
        scores = tuple(ScoreAdjoint(self.name("score"), s.name, tuple(self.parts(s.name))) for s in form.scores)
        names = {s.score: s.name for s in scores}
        rows = tuple(self.rows())
        writes, vectors = tuple(self.writes(names)), tuple(self.vectors(names))
        chunk = Adjoint(
            form=form,
            outputs=outputs,
            gates=gates,
            reads=reads,
            states=states,
            scores=scores,
            rows=rows,
            writes=writes,
            vectors=vectors,
            weights=tuple(self.weights(writes)),
            decays=tuple(self.decays(vectors, writes)),
            lets=(),
            inputs=(),
        )
        self.pull(chunk)
        lets = tuple(self.lets())
        inputs = tuple(chain.gradient(self.of[t.name], self.reference(t.name)) for t in layer.inputs)
        return replace(chunk, lets=lets, inputs=inputs)

    def axes(self, *axes: str | None) -> Axes:
        """The axes of something that every token and head has, over channel axes if any."""
        layer = self.layer
        return self.chain.ordered((layer.batch, layer.time, layer.head, *(a for a in axes if a)))

    def read_axes(self, state: ChunkState) -> Axes:
        return tuple(a for a in state.axes if a != state.column_axis)

    def reference(self, name: str) -> Ref:
        """The reference to an input; its axes are those of the layer's own references, in which groups read as heads."""
        tensor = self.layer.tensor(name)
        axes = tuple(self.layer.shared(a) for a in tensor.axes if a != self.layer.time)
        return Ref(name, axes, self.layer.time in tensor.axes)

    def gates(self, output: OutputAdjoint) -> Iterator[GateAdjoint]:
        """The gates of an output from the last to the first; what its equations pass on is pulled."""
        of = next(o for o in self.form.outputs if o.name == output.output)
        quantity = output.name
        for gate in reversed(of.gates):
            passed = next((d for e, d in partials(gate.value) if isinstance(e, Ref) and e.name == of.name), ZERO)
            self.chain.pull(gate.value, quantity, of.axes, when=gate.tensor)
            before = self.name(f"{of.name}_{gate.tensor}")
            yield GateAdjoint(before, of.name, gate.tensor, passed, quantity)
            quantity = before
        self.chain.pull(of.value, quantity, of.axes)

    def parts(self, score: str) -> Iterator[ScorePart]:
        for read in self.form.reads:
            yield from (ScorePart(read.name, i.row) for i in read.interactions if i.score == score)

    def rows(self) -> Iterator[RowAdjoint]:
        """One for each row of each state."""
        for state in self.form.states:
            for row, lag in dict.fromkeys((t.row, t.lag) for t in state.terms):
                if row is None:
                    continue
                terms = tuple(Weighted(t.weight, t.column) for t in state.terms if (t.row, t.lag) == (row, lag))
                reads = tuple(
                    Scored(i.score, read.name)
                    for read in self.form.reads
                    if read.state == state.name
                    for i in read.interactions
                    if (i.row, i.lag) == (row, lag)
                )
                yield RowAdjoint(self.name("row"), state.name, row, lag, terms, reads)

    def writes(self, d_score: dict[str, str]) -> Iterator[WriteAdjoint]:
        """One for each weighted column, shared by states that decay alike."""

        def key(state: ChunkState, term: ChunkTerm) -> tuple[str, Expr, str, str, int]:
            return term.weight, term.column, state.column_axis, state.decay, term.lag

        for shared in dict.fromkeys(key(s, t) for s, t in self.terms):
            terms = tuple(Written(s.name, t.row) for s, t in self.terms if key(s, t) == shared)
            scores = tuple(
                d_score[s.name] for s in self.form.scores if (s.weight, s.column, s.axis, s.decay, s.lag) == shared
            )
            yield WriteAdjoint(self.name("write"), *shared, terms, scores)

    def vectors(self, d_score: dict[str, str]) -> Iterator[VectorAdjoint]:
        """One for each vector, shared by reads of states that decay alike."""

        def key(read: Read) -> tuple[Expr, str, str, Literal[0, -1]]:
            return read.vector, self.form.state(read.state).column_axis, read.decay, read.at

        for shared in dict.fromkeys(map(key, self.form.reads)):
            reads = tuple(r.name for r in self.form.reads if key(r) == shared)
            scores = tuple(d_score[s.name] for s in self.form.scores if (s.vector, s.axis, s.decay, s.at) == shared)
            yield VectorAdjoint(self.name("vector"), *shared, reads, scores)

    def weights(self, writes: tuple[WriteAdjoint, ...]) -> Iterator[WeightAdjoint]:
        for weight in self.form.weights:
            if self.chain.depends_on_inputs(weight.value):
                carried = tuple(w.name for w in writes if w.weight == weight.name)
                yield WeightAdjoint(self.name("weight"), weight.name, carried)

    def decays(self, vectors: tuple[VectorAdjoint, ...], writes: tuple[WriteAdjoint, ...]) -> Iterator[DecayAdjoint]:
        for decay in self.form.decays:
            if self.chain.depends_on_inputs(decay.log2):
                yield DecayAdjoint(
                    self.name("decay"),
                    decay.name,
                    tuple(v.name for v in vectors if v.decay == decay.name),
                    tuple(w.name for w in writes if w.decay == decay.name),
                    tuple(s.name for s in self.form.states if s.decay == decay.name),
                )

    def pull(self, adjoint: Adjoint) -> None:
        """What the expressions of the chunk pass on."""
        form, pull = self.form, self.chain.pull
        for row in adjoint.rows:
            pull(row.row, row.name, self.axes(form.state(row.state).row_axis), row.lag)
        for write in adjoint.writes:
            pull(write.column, write.name, self.axes(write.axis), write.lag, form.weight(write.weight).value)
        for vector in adjoint.vectors:
            pull(vector.vector, vector.name, self.axes(vector.axis))
        for weight in adjoint.weights:
            pull(form.weight(weight.weight).value, weight.name, self.axes())
        for decay in adjoint.decays:
            of = form.decay(decay.decay)
            columns = {s.column_axis for s in form.states if s.decay == of.name} if of.kind == "channel" else set()
            pull(of.log2, decay.name, self.axes(*columns), scale=LN2)

    def lets(self) -> Iterator[Gradient]:
        """Each before those it depends on; what one passes on is pulled as soon as it is known."""
        for target in self.chain.intermediate(token_exprs(self.form)):
            name = self.of[target.name] if isinstance(target, Ref) else self.name("dot")
            yield self.chain.gradient(name, target)
            self.chain.pull_target(target, name)


def token_exprs(form: ChunkForm) -> Iterator[Expr]:
    """Every expression of a form that a gradient passes through, lets aside."""
    for o in form.outputs:
        yield from (o.value, *(g.value for g in o.gates))
    for s in form.states:
        yield from (e for t in s.terms for e in (t.row, t.column) if e is not None)
    yield from (r.vector for r in form.reads)
    yield from (w.value for w in form.weights)
    yield from (d.log2 for d in form.decays)
