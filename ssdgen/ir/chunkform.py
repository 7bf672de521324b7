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

from ssdgen.ir.expr import Axes, Expr
from ssdgen.ir.recurrence import DecayKind, OutputForm, Recurrence


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
    """The chunked form of a recurrence; see the module's docstring for the formula its fields fill in."""

    recurrence: Recurrence
    decays: tuple[Decay, ...]
    weights: tuple[Weight, ...]
    states: tuple[ChunkState, ...]
    scores: tuple[Score, ...]
    reads: tuple[Read, ...]
    outputs: tuple[OutputForm, ...]

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
