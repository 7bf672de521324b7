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

from ssdgen.ir.expr import ONE, Axes, Expr, Ref, is_per_token
from ssdgen.ir.recurrence import DecayKind, OutputForm, Recurrence
from ssdgen.ir.step import Step, factor_text


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

    def read(self, name: str) -> Read:
        """The read called `name`; KeyError if there is none."""
        return {r.name: r for r in self.reads}[name]

    def __str__(self) -> str:
        layer = self.recurrence.layer
        lines = [f"{layer.name}: a chunk of L tokens that starts from {', '.join(s.name for s in self.states)}", ""]
        for d in self.decays:
            total = self.sum_text(d.name, "i")
            if d.kind == "constant":
                lines += [f"{d.name} = {d.log2}    log2, one a head", f"{total} = (i + 1) * {d.name}"]
            elif d.kind != "none":
                per = "one a token and head" if d.kind == "token" else "one a token, head and column channel"
                lines += [f"{d.name}[i] = {d.log2}    log2, {per}", f"{total} = {d.name}[0] + ... + {d.name}[i]"]
        for w in self.weights:
            if w.value != ONE and not (isinstance(w.value, Ref) and w.value.name == w.name):
                lines.append(f"{at_token(Ref(w.name, (), is_per_token(w.value)), 'i')} = {w.value}")
        if lines[-1]:
            lines.append("")
        for s in self.states:
            lines.append(f"{s.name}_end = {self.power_text(s.decay, 'L-1')}{s.name}")
            lines += [f"  + sum_j {self.power_text(s.decay, 'L-1', 'j')}{self._term(t)}" for t in s.terms]
        for score in self.scores:
            end = "i" if score.at == 0 else "i-1"
            product = f"({at_token(score.vector, 'i')} . {at_token(score.column, lagged(score.lag))})"
            factors = (product, self.power_text(score.decay, end, "j").strip(), self.weight_text(score.weight))
            lines.append(f"{score.name}[i,j] = {' '.join(f for f in factors if f)}    j <= {end}")
        for r in self.reads:
            end = "i" if r.at == 0 else "i-1"
            lines.append(f"{r.name}[i] = {self.power_text(r.decay, end)}{r.state} . {at_token(r.vector, 'i')}")
            for n in r.interactions:
                row = "" if n.row is None else f" {at_token(n.row, lagged(n.lag))}"
                lines.append(f"  + sum_j {n.score}[i,j]{row}")
        lines.append("")
        for o in self.outputs:
            lines.append(f"{o.name} = {o.value}")
            lines += [f"  when {g.tensor}: {o.name} = {g.value}" for g in o.gates]
        return "\n".join([*lines, "", "one token:", str(self.step)])

    def sum_text(self, decay: str, token: str) -> str:
        """The running sum of a decay up to and including a token."""
        alone = sum(d.kind != "none" for d in self.decays) == 1
        return f"s[{token}]" if alone else f"s_{decay}[{token}]"

    def power_text(self, decay: str, until: str, after: str = "") -> str:
        """2 to the sum of a decay over the tokens behind `after` until `until`, and a space; nothing if it is none."""
        if self.decay(decay).kind == "none":
            return ""
        end = self.sum_text(decay, until)
        return f"2^({end} - {self.sum_text(decay, after)}) " if after else f"2^{end} "

    def _term(self, term: ChunkTerm) -> str:
        vectors = [at_token(v, lagged(term.lag)) for v in (term.row, term.column) if v is not None]
        return " ".join(filter(None, (self.weight_text(term.weight), " (x) ".join(vectors))))

    def weight_text(self, name: str, token: str = "j") -> str:
        """A weight at a token; nothing if it is one."""
        value = self.weight(name).value
        return "" if value == ONE else at_token(Ref(name, (), is_per_token(value)), token)


def lagged(lag: int, token: str = "j") -> str:
    """The name of the token `lag` before one."""
    return f"{token}-{lag}" if lag else token


def at_token(expr: Expr, token: str) -> str:
    """`expr` at a token of the chunk."""
    return f"{factor_text(expr)}[{token}]" if is_per_token(expr) else factor_text(expr)
