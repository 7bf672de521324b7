"""Gradients through a chunk, ready to print: from those of its outputs and of the states at its end to those of its inputs
and of the states at its start.

In the words of `ssdgen.ir.chunkform`, with d_X for the gradient of X, a sum over j for one over the tokens of the chunk,
and everything above a score's diagonal zero (e instead of s where a read is of the state before its token):

    d_S      = 2^s[L-1] d_S_end + sum_i 2^s[i] d_read[i] (x) v[i]
    d_score  [i,j] = d_read[i] . row[j]
    d_row    [j] = w[j] 2^(s[L-1] - s[j]) d_S_end . column[j] + sum_i score[i,j] d_read[i]
    d_write  [j] = 2^(s[L-1] - s[j]) row[j] . d_S_end + sum_i 2^(s[i] - s[j]) d_score[i,j] v[i]        of w[j] column[j]
    d_vector [i] = 2^s[i] d_read[i] . S + sum_j 2^(s[i] - s[j]) d_score[i,j] w[j] column[j]
    d_weight [j] = d_write[j] . column[j]
    d_s      [i] = d_vector[i] . v[i] - d_write[i] . w[i] column[i], at i = L-1 also d_S_end . S_end
    d_decay  [t] = sum_(i>=t) d_s[i]                                                               of ln a = ln 2 log2 a

A decay a channel has the last two without the sums over the column axis. All sums over tokens but the last are products of
tiles. The last is cheap, a dot product a token, but a difference: it rounds like eps times the largest d_vector . v in the
chunk, not like eps times itself, because d_vector[i] . v[i] and d_write[i] . w[i] column[i] have the summand i = j in
common and more of the chunk cancels the stronger the decay. What a summand i >= t > j (and the states on either side)
gives can be added up instead, ln a[t] being in no other:

    d_decay  [t] = 2^s[L-1] d_S_end . S + sum_(i>=t) 2^s[i] d_read[i] . (S . v[i])
                 + sum_(j<t) 2^(s[L-1] - s[j]) w[j] row[j] . (d_S_end . column[j]) + sum_(i>=t>j) d_score[i,j] score[i,j]

which rounds like itself, for a running sum in two directions over an [L, L] tile and one more product with S.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ssdgen.ir.chunkform import ChunkForm, Read, at_token, lagged
from ssdgen.ir.expr import ZERO, Axes, Contract, Expr, Ref, mul, to_text
from ssdgen.ir.step import factor_text


@dataclass(frozen=True, slots=True)
class Contribution:
    """A summand of a gradient: factor * quantity, summed over the axes `summed`.

    `quantity` is the gradient of what `factor` is the derivative of. Both are taken `ahead` tokens later, zero behind the
    last. A sum over heads is one over the heads of a group if the gradient has the group's axis. With `when`, only if that
    optional input is present; the name of an output in `factor` is then its value before that gate.
    """

    factor: Expr
    quantity: str
    summed: Axes = ()
    ahead: int = 0
    when: str | None = None


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of an input, a let, a read or a product that is summed over an axis, with axes as it is declared (the
    time axis among them); zero if it has no terms."""

    name: str
    of: Ref | Contract
    axes: Axes
    terms: tuple[Contribution, ...]


@dataclass(frozen=True, slots=True)
class OutputAdjoint:
    """The gradient of an output that a caller gives."""

    name: str
    output: str


@dataclass(frozen=True, slots=True)
class GateAdjoint:
    """The gradient of an output before a gate: factor * quantity if `tensor` is present, and `quantity` if not."""

    name: str
    output: str
    tensor: str
    factor: Expr
    quantity: str


@dataclass(frozen=True, slots=True)
class StateAdjoint:
    """The gradient of a state before the chunk, to which those of its reads, all of them, add."""

    name: str
    state: str
    reads: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ScorePart:
    """What a read and a row add to the gradient of a score: d_read[i] . row[j], d_read[i] if row is None."""

    read: str
    row: Expr | None


@dataclass(frozen=True, slots=True)
class ScoreAdjoint:
    """The gradient of a score, zero where the score is."""

    name: str
    score: str
    parts: tuple[ScorePart, ...]


@dataclass(frozen=True, slots=True)
class Weighted:
    """weight * column of a term, the weight by name."""

    weight: str
    column: Expr


@dataclass(frozen=True, slots=True)
class Scored:
    """score[i,j] * row[j], which is in `read`."""

    score: str
    read: str


@dataclass(frozen=True, slots=True)
class RowAdjoint:
    """The gradient at token j of the row of those terms of a state that have it: that of token j-1 if `lag` is 1."""

    name: str
    state: str
    row: Expr
    lag: int
    terms: tuple[Weighted, ...]
    reads: tuple[Scored, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """The row by which a state takes a weighted column, None for a vector state."""

    state: str
    row: Expr | None


@dataclass(frozen=True, slots=True)
class WriteAdjoint:
    """The gradient at token j of weight[j] * column[j] of all terms that have both and decay alike: of column[j-1] if `lag`
    is 1. `scores` are the gradients of the scores that have this column."""

    name: str
    weight: str
    column: Expr
    axis: str
    decay: str
    lag: int
    terms: tuple[Written, ...]
    scores: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VectorAdjoint:
    """The gradient of the vector that `reads` of states that decay alike have; `scores` are the gradients of its scores."""

    name: str
    vector: Expr
    axis: str
    decay: str
    at: Literal[0, -1]
    reads: tuple[str, ...]
    scores: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WeightAdjoint:
    """The gradient of a weight: the sum of d_write . column over `writes`, all that carry it."""

    name: str
    weight: str
    writes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DecayAdjoint:
    """The gradient of the natural logarithm of a decay, of whose running sum s `vectors`, `writes` and the ends of `states`
    depend on."""

    name: str
    decay: str
    vectors: tuple[str, ...]
    writes: tuple[str, ...]
    states: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Adjoint:
    """The gradients of a chunk of `form`, each from those before it; see the module's docstring for the formulas.

    `lets` are the gradients of lets and of products summed over an axis; parameters, which are run-time scalars, have none.
    Weights and decays that depend on no input have none either.
    """

    form: ChunkForm
    outputs: tuple[OutputAdjoint, ...]
    gates: tuple[GateAdjoint, ...]
    reads: tuple[Gradient, ...]
    states: tuple[StateAdjoint, ...]
    scores: tuple[ScoreAdjoint, ...]
    rows: tuple[RowAdjoint, ...]
    writes: tuple[WriteAdjoint, ...]
    vectors: tuple[VectorAdjoint, ...]
    weights: tuple[WeightAdjoint, ...]
    decays: tuple[DecayAdjoint, ...]
    lets: tuple[Gradient, ...]
    inputs: tuple[Gradient, ...]

    def of_read(self, name: str) -> Gradient:
        """The gradient of the read called `name`; KeyError if there is none."""
        return {g.of.name: g for g in self.reads if isinstance(g.of, Ref)}[name]

    def score(self, name: str) -> ScoreAdjoint:
        """The gradient of a score called `name`; KeyError if there is none."""
        return {s.name: s for s in self.scores}[name]

    def write(self, name: str) -> WriteAdjoint:
        """The gradient of a write called `name`; KeyError if there is none."""
        return {w.name: w for w in self.writes}[name]

    def vector(self, name: str) -> VectorAdjoint:
        """The gradient of a vector called `name`; KeyError if there is none."""
        return {v.name: v for v in self.vectors}[name]

    def __str__(self) -> str:
        return "\n".join(_Text(self).lines())


class _Text:
    """The lines of an adjoint."""

    def __init__(self, adjoint: Adjoint) -> None:
        self.adjoint = adjoint
        self.form = adjoint.form
        self.layer = adjoint.form.recurrence.layer
        self.d_read = {to_text(g.of): g.name for g in adjoint.reads}
        self.d_state = {s.state: s.name for s in adjoint.states}

    def lines(self) -> list[str]:
        adjoint = self.adjoint
        given = ", ".join([*(o.name for o in adjoint.outputs), *(f"{s.name}_end" for s in adjoint.states)])
        blocks = (
            [f"{self.layer.name}: the gradients of a chunk of L tokens from {given}"],
            [
                *map(self.gate, adjoint.gates),
                *(line for g in adjoint.reads for line in self.gradient(g)),
            ],
            [
                *(line for s in adjoint.states for line in self.state(s)),
                *map(self.score, adjoint.scores),
                *(line for r in adjoint.rows for line in self.row(r)),
                *(line for w in adjoint.writes for line in self.write(w)),
                *(line for v in adjoint.vectors for line in self.vector(v)),
                *map(self.weight, adjoint.weights),
                *(line for d in adjoint.decays for line in self.decay(d)),
            ],
            [line for g in adjoint.lets for line in self.gradient(g)],
            [line for g in adjoint.inputs for line in self.gradient(g)],
            ["one token:", *map(self.token, adjoint.states)],
        )
        return "\n\n".join("\n".join(block) for block in blocks if block).split("\n")

    def gate(self, gate: GateAdjoint) -> str:
        value = to_text(mul(gate.factor, Ref(gate.quantity)))
        return f"{gate.name} = {value}    when {gate.tensor}, else {gate.quantity}"

    def gradient(self, gradient: Gradient) -> list[str]:
        of = to_text(gradient.of)
        title = gradient.name if isinstance(gradient.of, Ref) else f"{gradient.name}, of {of},"
        terms = [self.contribution(term, gradient) for term in gradient.terms] or ["0"]
        return [f"{title} = {terms[0]}", *(f"  + {term}" for term in terms[1:])]

    def contribution(self, term: Contribution, gradient: Gradient) -> str:
        groups = {g.shared: g.axis for g in self.layer.groups if g.axis in gradient.axes}
        summed = " ".join(f"{a} in {groups[a]}" if a in groups else a for a in term.summed)
        value = to_text(mul(term.factor, Ref(term.quantity)))
        later = f"({value})[{self.layer.time}+{term.ahead}]" if term.ahead else value
        when = f"    when {term.when}" if term.when else ""
        return f"{f'sum[{summed}] ' if summed else ''}{later}{when}"

    def power(self, decay: str, at: int, after: str = "") -> str:
        return self.form.power_text(decay, lagged(-at, "i"), after)

    def from_end(self, decay: str) -> str:
        return self.form.power_text(decay, "L-1", "j")

    def state(self, state: StateAdjoint) -> list[str]:
        decay = self.form.state(state.state).decay
        lines = [f"{state.name} = {self.form.power_text(decay, 'L-1')}{state.name}_end"]
        for r in map(self.form.read, state.reads):
            vector = at_token(r.vector, "i")
            lines.append(f"  + sum_i {self.power(decay, r.at)}{self.with_rows(r, '[i]', ' (x)')} {vector}")
        return lines

    def with_rows(self, read: Read, token: str, sign: str) -> str:
        """The gradient of a read, and the sign of its product with something along the row axis, if there is one."""
        return f"{self.d_read[read.name]}{token}{sign if self.form.state(read.state).row_axis else ''}"

    def score(self, score: ScoreAdjoint) -> str:
        of = self.form.score(score.score)
        rows = [(self.d_read[p.read], p.row) for p in score.parts]
        parts = [f"{d}[i]" + ("" if row is None else f" . {at_token(row, lagged(of.lag))}") for d, row in rows]
        return f"{score.name}[i,j] = {' + '.join(parts)}    j <= {lagged(-of.at, 'i')}"

    def row(self, row: RowAdjoint) -> list[str]:
        state = self.form.state(row.state)
        end = f"{self.d_state[row.state]}_end"
        terms = []
        for term in row.terms:
            factors = (self.form.weight_text(term.weight), self.from_end(state.decay).strip(), end)
            terms.append(f"{' '.join(f for f in factors if f)} . {at_token(term.column, lagged(row.lag))}")
        terms += [f"sum_i {scored.score}[i,j] {self.d_read[scored.read]}[i]" for scored in row.reads]
        return [f"{row.name}[j] = {terms[0]}", *(f"  + {term}" for term in terms[1:])]

    def write(self, write: WriteAdjoint) -> list[str]:
        terms = []
        for term in write.terms:
            product = "" if term.row is None else f"{at_token(term.row, lagged(write.lag))} . "
            terms.append(f"{self.from_end(write.decay)}{product}{self.d_state[term.state]}_end")
        for name in write.scores:
            score = self.form.score(self.adjoint.score(name).score)
            terms.append(f"sum_i {self.power(write.decay, score.at, 'j')}{name}[i,j] {at_token(score.vector, 'i')}")
        return [f"{write.name}[j] = {terms[0]}", *(f"  + {term}" for term in terms[1:])]

    def vector(self, vector: VectorAdjoint) -> list[str]:
        terms = []
        for read in map(self.form.read, vector.reads):
            terms.append(f"{self.power(vector.decay, vector.at)}{self.with_rows(read, '[i]', ' .')} {read.state}")
        for name in vector.scores:
            score = self.form.score(self.adjoint.score(name).score)
            factors = (f"{name}[i,j]", self.form.weight_text(score.weight), at_token(score.column, lagged(score.lag)))
            terms.append(f"sum_j {self.power(vector.decay, vector.at, 'j')}{' '.join(f for f in factors if f)}")
        return [f"{vector.name}[i] = {terms[0]}", *(f"  + {term}" for term in terms[1:])]

    def weight(self, weight: WeightAdjoint) -> str:
        writes = [self.adjoint.write(name) for name in weight.writes]
        return f"{weight.name}[j] = {' + '.join(f'{w.name}[j] . {at_token(w.column, lagged(w.lag))}' for w in writes)}"

    def decay(self, decay: DecayAdjoint) -> list[str]:
        of = self.form.decay(decay.decay)
        product = "*" if of.kind == "channel" else "."
        vectors = [(self.adjoint.vector(name), name) for name in decay.vectors]
        writes = [self.adjoint.write(name) for name in decay.writes]
        terms = []
        for v, name in vectors:
            i = "i" if v.at == 0 else "i+1"
            terms.append(f"+ {name}[{i}] {product} {at_token(v.vector, i)}")
        for w in writes:
            factors = ("-", self.form.weight_text(w.weight, "i"), f"{w.name}[i]", product)
            terms.append(f"{' '.join(f for f in factors if f)} {at_token(w.column, lagged(w.lag, 'i'))}")
        ends = " + ".join(f"{self.d_state[s]}_end {product} {s}_end" for s in decay.states)
        sums = f"d_{self.form.sum_text(decay.decay, 'i')}"
        last, now = (f"d_{self.form.sum_text(decay.decay, token)}" for token in ("L-1", "t"))
        return [
            f"{sums} = {' '.join(terms).removeprefix('+ ')}; at i = L-1 also + {ends}",
            f"{decay.name}[t] = {now} + ... + {last}    of the natural logarithm",
        ]

    def token(self, state: StateAdjoint) -> str:
        move = next(m for m in self.form.step.moves if m.state == state.state)
        reads = [self.form.read(name) for name in state.reads]
        after, before = (
            "".join(f" + {self.with_rows(r, '', ' (x)')} {factor_text(r.vector)}" for r in reads if r.at == at)
            for at in (0, -1)
        )
        return f"{state.name} = {_scaled(move.log2_decay, state.name + after)}{before}"


def _scaled(log2_decay: Expr, total: str) -> str:
    """2^log2_decay times a sum."""
    if log2_decay == ZERO:
        return total
    return f"2^({log2_decay}) {f'({total})' if ' ' in total else total}"
