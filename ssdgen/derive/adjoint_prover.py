"""The proof that an Adjoint holds the gradients of its recurrence, about the very fields that get printed.

It goes in two parts, which the chain rule joins. Within chunks (`ssdgen.derive.adjoint_chunk_prover`) the recurrence is
unrolled, and the derivatives by its rows, weighted columns, vectors and decays are compared with the formulas over two
chunks. Around them, the sum of those times their gradients, and of the outputs times their cotangents, is differentiated by
every read and input, lets opened down to inputs, and compared with what reads and inputs are said to gain: for two batches
of two heads of one group, two tokens, two indices along every channel axis, and every choice of optional inputs. Batches and
heads are told apart here alone: elsewhere nothing sums over them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, combinations

from ssdgen.derive.adjoint_around_prover import Around
from ssdgen.derive.adjoint_chunk_prover import ChunkProver
from ssdgen.derive.adjoint_keys import adjoint_keys, decay_key, keys
from ssdgen.derive.adjoint_whole_prover import LENGTHS as WHOLE
from ssdgen.derive.adjoint_whole_prover import Whole
from ssdgen.derive.chain_rule import ChainRule, target_of
from ssdgen.derive.proof import Proof
from ssdgen.derive.recurrence import names_of
from ssdgen.derive.statements import Statements
from ssdgen.ir.adjoint import Adjoint, Contribution, Gradient
from ssdgen.ir.expr import DERIVATIVE_OPS, OPS, Apply, Axes, Expr, Ref, refs, to_text, walk


class AdjointProver(Statements):
    """One proof: `prove` goes through the statements, and the first that fails raises ProofError."""

    def __init__(self, adjoint: Adjoint) -> None:
        self.adjoint = adjoint
        self.form = adjoint.form
        self.rec = adjoint.form.recurrence
        self.layer = self.rec.layer

    def prove(self) -> Proof:
        """Every statement, in order."""
        return self.prove_all(self.layer.name)

    def statements(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """What is proved and how; each may assume those before it."""
        yield "each gradient has a name of its own and is of something that is there", self.names
        yield "all that depends on an input has one, in an order in which they can be computed", self.complete
        yield from ChunkProver(self.adjoint, self.fail).statements()
        around = [Around(self.adjoint, present, self.fail) for present in self.choices()]
        gates = dict.fromkeys(g.tensor for o in self.rec.outputs for g in o.gates)
        for gradient in (*self.adjoint.reads, *self.adjoint.inputs):
            choices = "".join(f", with and without {name}" for name in gates)
            yield (
                f"{gradient.name} is the gradient of {gradient.of}{choices}",
                partial(self.everywhere, around, gradient),
            )

        tokens = " and ".join(map(str, WHOLE))
        yield f"all of them at once, from end to end over chunks of {tokens} tokens", self.whole

    def whole(self) -> None:
        """Every gradient with all optional inputs, nothing a symbol but inputs, first states and cotangents."""
        Whole(self.adjoint, self.choices()[-1], self.fail).prove()

    def choices(self) -> list[Axes]:
        """Every choice of the optional inputs that outputs are gated by."""
        tensors = tuple(dict.fromkeys(g.tensor for o in self.rec.outputs for g in o.gates))
        return list(chain.from_iterable(combinations(tensors, n) for n in range(len(tensors) + 1)))

    def everywhere(self, around: list[Around], gradient: Gradient) -> None:
        """The gradient of a read or an input for every choice."""
        for each in around:
            each.gradient(gradient)

    def names(self) -> None:
        """Names say what they are of; what is named by the form or the adjoint is there."""
        form = self.form
        named = (form.decays, form.weights, form.scores, form.reads)
        taken = names_of(self.layer) | {item.name for items in named for item in items}
        stems = list(self._stems())
        for name, times in Counter(name for name, _ in stems).items():
            self.require(times == 1 and name not in taken, f"`{name}` is not its name alone")
        for name, stem in stems:
            self.require(re.fullmatch(rf"d_{re.escape(stem)}(_\d+)?", name) is not None, f"`{name}` is of `{stem}`")
        for what, declared, named_there in self._references():
            self.require(set(named_there) <= set(declared), f"{what}: {set(named_there) - set(declared)}")
            order = [declared.index(name) for name in named_there]
            self.require(order == sorted(set(order)), f"{what}: {named_there} are not in their order, each once")

    def _stems(self) -> Iterator[tuple[str, str]]:
        adjoint = self.adjoint
        yield from ((o.name, o.output) for o in adjoint.outputs)
        yield from ((g.name, f"{g.output}_{g.tensor}") for g in adjoint.gates)
        yield from ((s.name, s.state) for s in adjoint.states)
        for gradient in (*adjoint.reads, *adjoint.lets, *adjoint.inputs):
            yield gradient.name, gradient.of.name if isinstance(gradient.of, Ref) else "dot"
        for items, stem in (
            (adjoint.scores, "score"),
            (adjoint.rows, "row"),
            (adjoint.writes, "write"),
            (adjoint.vectors, "vector"),
            (adjoint.weights, "weight"),
            (adjoint.decays, "decay"),
        ):
            yield from ((item.name, stem) for item in items)

    def _references(self) -> Iterator[tuple[str, list[str], list[str]]]:
        """(where, what there is, what is referred to in this order)."""
        adjoint, form = self.adjoint, self.form
        reads, states = [r.name for r in form.reads], [s.name for s in form.states]
        scores, d_scores = [s.name for s in form.scores], [s.name for s in adjoint.scores]
        weights, decays = [w.name for w in form.weights], [d.name for d in form.decays]
        writes = [w.name for w in adjoint.writes]
        yield "weights", weights, [w.weight for w in adjoint.weights]
        yield "decays", decays, [d.decay for d in adjoint.decays]
        for s in adjoint.states:
            yield s.name, reads, list(s.reads)
        for score in adjoint.scores:
            yield from ((score.name, reads, [p.read]) for p in score.parts)
        for row in adjoint.rows:
            yield row.name, states, [row.state]
            yield from ((row.name, weights, [t.weight]) for t in row.terms)
            yield from ((row.name, reads, [s.read]) for s in row.reads)
            yield from ((row.name, scores, [s.score]) for s in row.reads)
        for w in adjoint.writes:
            yield w.name, weights, [w.weight]
            yield w.name, decays, [w.decay]
            yield from ((w.name, states, [t.state]) for t in w.terms)
            yield w.name, d_scores, list(w.scores)
        for v in adjoint.vectors:
            yield v.name, decays, [v.decay]
            yield v.name, reads, list(v.reads)
            yield v.name, d_scores, list(v.scores)
        for weight in adjoint.weights:
            yield weight.name, writes, list(weight.writes)
        for d in adjoint.decays:
            yield d.name, [v.name for v in adjoint.vectors], list(d.vectors)
            yield d.name, writes, list(d.writes)
            yield d.name, states, list(d.states)

    def complete(self) -> None:
        """There is one gradient of each thing, with its axes, and it refers to those before it."""
        adjoint, rec, layer = self.adjoint, self.rec, self.layer
        rule = ChainRule(layer)
        self.require([o.output for o in adjoint.outputs] == [o.name for o in rec.outputs], "the outputs are others")
        gates = [(o.name, g.tensor) for o in rec.outputs for g in reversed(o.gates)]
        self.require([(g.output, g.tensor) for g in adjoint.gates] == gates, "the gates are others")
        self.require([s.state for s in adjoint.states] == [s.name for s in rec.states], "the states are others")
        self.require([s.score for s in adjoint.scores] == [s.name for s in self.form.scores], "the scores are others")
        found, wanted = adjoint_keys(adjoint), keys(rec)
        constant = {decay_key(s.transition) for s in rec.states} - set(found.values())
        self.require(set(found.values()) == set(wanted) - constant, "rows, columns, vectors or decays are others")
        self.require(len(set(found.values())) == len(found), "two gradients are of the same")
        reads = [Ref(r.name, self.read_axes(r.state), True) for r in rec.readouts]
        self.require([g.of for g in adjoint.reads] == reads, "the reads are others")
        inputs = [g.of for g in adjoint.inputs]
        self.require([to_text(e) for e in inputs] == [t.name for t in layer.inputs], "the inputs are others")
        known = {r for e in self.exprs_and_lets() for r in map(target_of, refs(e))}
        self.require(set(inputs) <= known, "inputs are not as they are declared")
        for weight in adjoint.weights:
            carried = tuple(w.name for w in adjoint.writes if w.weight == weight.weight)
            self.require(weight.writes == carried, f"`{weight.weight}` is carried by others")
        lets = rule.intermediate(self.exprs())
        self.require({g.of for g in adjoint.lets} == set(lets), "the lets and contractions are others")
        self.references()
        self.order(rule)

    def references(self) -> None:
        """Factors are well formed, and refer to what the recurrence refers to, as it is declared."""
        known = {r for e in self.exprs_and_lets() for r in map(target_of, refs(e))}
        gradients = (*self.adjoint.reads, *self.adjoint.lets, *self.adjoint.inputs)
        factors = [g.factor for g in self.adjoint.gates] + [t.factor for g in gradients for t in g.terms]
        for e in (e for factor in factors for e in walk(factor)):
            if isinstance(e, Ref):
                self.require(target_of(e) in known, f"`{e!r}` is not declared")
                self.require(e.per_token or not e.lag, f"`{e}` looks back, but is the same at every token")
            if isinstance(e, Apply):
                self.require((OPS | DERIVATIVE_OPS).get(e.op) == len(e.args), f"`{e.op}` of {len(e.args)}")

    def order(self, rule: ChainRule) -> None:
        """What a gradient is made of is known before it, and its axes are those of what it is of."""
        adjoint = self.adjoint
        before = {o.name for o in adjoint.outputs}
        for gate in adjoint.gates:
            self.require(gate.quantity in before, f"{gate.name}: there is no `{gate.quantity}` yet")
            before.add(gate.name)
        inner = {name for name, _ in self._stems()} - {g.name for g in (*adjoint.reads, *adjoint.lets, *adjoint.inputs)}
        for gradients in (adjoint.reads, adjoint.lets, adjoint.inputs):
            for g in gradients:
                self.require(g.axes == rule.axes(g.of), f"{g.name} has the axes {g.axes}")
                for term in g.terms:
                    self.contribution(g, term, before)
                before.add(g.name)
            before |= inner

    def contribution(self, gradient: Gradient, term: Contribution, before: set[str]) -> None:
        """A contribution is of a gradient that is known, and its sum over other axes."""
        order = [a.name for a in self.layer.axes]
        self.require(term.quantity in before, f"{gradient.name}: there is no `{term.quantity}` yet")
        self.require(set(term.summed) <= set(order) - set(gradient.axes), f"{gradient.name} sums over {term.summed}")
        self.require(sorted(set(term.summed), key=order.index) == list(term.summed), f"{term.summed} have no order")

    def read_axes(self, state: str) -> Axes:
        """The axes of a read of a state."""
        of = self.rec.state(state)
        return tuple(a for a in of.axes if a != of.column_axis)

    def exprs_and_lets(self) -> Iterator[Expr]:
        """Every expression of the recurrence, and lets as they are declared."""
        yield from self.exprs()
        yield from (let.value for let in self.layer.lets)

    def exprs(self) -> Iterator[Expr]:
        """Every expression of the recurrence that may depend on an input."""
        for o in self.rec.outputs:
            yield from (o.value, *(g.value for g in o.gates))
        for s in self.rec.states:
            yield s.transition.log2_decay
            yield from (e for t in s.terms for e in (t.weight, t.row, t.column) if e is not None)
        yield from (r.vector for r in self.rec.readouts)
