"""The jump formula, ready to print: how a chunk of L tokens reads the state it starts from and moves it to its end.

Within a chunk, s[j] is the running sum of the log2 decay up to and including token j, e[j] the sum before it:

    S_end    = 2^s[L-1] S_start + sum_j 2^(s[L-1] - s[j]) w[j] row[j] (x) column[j]
    read[i]  = 2^s[i] S_start . v[i] + sum_(j<=i) (v[i] . column[j]) 2^(s[i] - s[j]) w[j] row[j]         at = 0
    read[i]  = 2^e[i] S_start . v[i] + sum_(j<i)  (v[i] . column[j]) 2^(e[i] - s[j]) w[j] row[j]         at = -1

Every field below is printed into kernels and is what the proof is about.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ssdgen.ir.expr import ONE, Apply, Axes, Expr, Ref, is_per_token
from ssdgen.ir.recurrence import DecayKind, OutputForm, Recurrence
from ssdgen.ir.step import Step


@dataclass(frozen=True, slots=True)
class Decay:
    """A log2 decay and its running sum, shared by all states that decay alike. `log2` is ZERO for kind none."""

    name: str
    kind: DecayKind
    log2: Expr


@dataclass(frozen=True, slots=True)
class Weight:
    """A term's scalar per token and head (or a constant), shared by all terms that carry it."""

    name: str
    value: Expr


@dataclass(frozen=True, slots=True)
class ChunkTerm:
    """A term of a state, its weight by name. With `lag` 1, row[j] and column[j] are those of token j-1."""

    weight: str
    row: Expr | None
    column: Expr
    lag: int = 0


@dataclass(frozen=True, slots=True)
class ChunkState:
    """A state's jump over a chunk."""

    name: str
    axes: Axes
    row_axis: str | None
    column_axis: str
    decay: str
    terms: tuple[ChunkTerm, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """An [i, j] tile: (vector[i] . column[j]) 2^(s[i] - s[j]) w[j], zero above the diagonal (and on it if at = -1).

    Equal tiles are one Score: a matrix state and its normaliser share it.
    """

    name: str
    vector: Expr
    column: Expr
    axis: str
    decay: str
    weight: str
    at: Literal[0, -1] = 0
    lag: int = 0


@dataclass(frozen=True, slots=True)
class Interaction:
    """What earlier tokens of the chunk add to a read: scores @ row, or the row sum of the scores if row is None."""

    score: str
    row: Expr | None
    lag: int = 0


@dataclass(frozen=True, slots=True)
class Read:
    """A readout at every token of a chunk: the carried term (2^s v . S_start) plus interactions."""

    name: str
    state: str
    vector: Expr
    at: Literal[0, -1]
    decay: str
    interactions: tuple[Interaction, ...]


@dataclass(frozen=True, slots=True)
class ChunkForm:
    """The chunked form of a recurrence; see the module's docstring for the formula its fields fill in. `step` is the same
    for one token, where nothing is summed."""

    recurrence: Recurrence
    decays: tuple[Decay, ...]
    weights: tuple[Weight, ...]
    states: tuple[ChunkState, ...]
    scores: tuple[Score, ...]
    reads: tuple[Read, ...]
    outputs: tuple[OutputForm, ...]
    step: Step

    def decay(self, name: str) -> Decay:
        """The decay called `name`; KeyError if there is none."""
        return {d.name: d for d in self.decays}[name]

    def weight(self, name: str) -> Weight:
        """The weight called `name`; KeyError if there is none."""
        return {w.name: w for w in self.weights}[name]

    def score(self, name: str) -> Score:
        """The score called `name`; KeyError if there is none."""
        return {s.name: s for s in self.scores}[name]

    def state(self, name: str) -> ChunkState:
        """The state called `name`; KeyError if there is none."""
        return {s.name: s for s in self.states}[name]

    def __str__(self) -> str:
        layer = self.recurrence.layer
        lines = [f"{layer.name}: a chunk of L tokens that starts from {', '.join(s.name for s in self.states)}", ""]
        for d in self.decays:
            total = self._sum(d.name, "i")
            if d.kind == "constant":
                lines += [f"{d.name} = {d.log2}    log2, one a head", f"{total} = (i + 1) * {d.name}"]
            elif d.kind != "none":
                per = "one a token and head" if d.kind == "token" else "one a token, head and column channel"
                lines += [f"{d.name}[i] = {d.log2}    log2, {per}", f"{total} = {d.name}[0] + ... + {d.name}[i]"]
        for w in self.weights:
            if w.value != ONE and not (isinstance(w.value, Ref) and w.value.name == w.name):
                lines.append(f"{_at(Ref(w.name, (), is_per_token(w.value)), 'i')} = {w.value}")
        if lines[-1]:
            lines.append("")
        for s in self.states:
            lines.append(f"{s.name}_end = {self._power(s.decay, 'L-1')}{s.name}")
            lines += [f"  + sum_j {self._power(s.decay, 'L-1', 'j')}{self._term(t)}" for t in s.terms]
        for score in self.scores:
            end = "i" if score.at == 0 else "i-1"
            product = f"({_at(score.vector, 'i')} . {_at(score.column, _lagged(score.lag))})"
            factors = (product, self._power(score.decay, end, "j").strip(), self._weight(score.weight))
            lines.append(f"{score.name}[i,j] = {' '.join(f for f in factors if f)}    j <= {end}")
        for r in self.reads:
            end = "i" if r.at == 0 else "i-1"
            lines.append(f"{r.name}[i] = {self._power(r.decay, end)}{r.state} . {_at(r.vector, 'i')}")
            for n in r.interactions:
                row = "" if n.row is None else f" {_at(n.row, _lagged(n.lag))}"
                lines.append(f"  + sum_j {n.score}[i,j]{row}")
        lines.append("")
        for o in self.outputs:
            lines.append(f"{o.name} = {o.value}")
            lines += [f"  when {g.tensor}: {o.name} = {g.value}" for g in o.gates]
        return "\n".join([*lines, "", "one token:", str(self.step)])

    def _sum(self, decay: str, token: str) -> str:
        """The running sum of a decay up to and including a token."""
        alone = sum(d.kind != "none" for d in self.decays) == 1
        return f"s[{token}]" if alone else f"s_{decay}[{token}]"

    def _power(self, decay: str, until: str, after: str = "") -> str:
        """2 to the sum of a decay over the tokens behind `after` until `until`, and a space; nothing if it is none."""
        if self.decay(decay).kind == "none":
            return ""
        end = self._sum(decay, until)
        return f"2^({end} - {self._sum(decay, after)}) " if after else f"2^{end} "

    def _term(self, term: ChunkTerm) -> str:
        vectors = [_at(v, _lagged(term.lag)) for v in (term.row, term.column) if v is not None]
        return " ".join(filter(None, (self._weight(term.weight), " (x) ".join(vectors))))

    def _weight(self, name: str) -> str:
        value = self.weight(name).value
        return "" if value == ONE else _at(Ref(name, (), is_per_token(value)), "j")


def _lagged(lag: int) -> str:
    return f"j-{lag}" if lag else "j"


def _at(expr: Expr, token: str) -> str:
    """`expr` at a token of the chunk."""
    text = f"({expr})" if isinstance(expr, Apply) or (isinstance(expr, Ref) and expr.lag) else str(expr)
    return f"{text}[{token}]" if is_per_token(expr) else text
