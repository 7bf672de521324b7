"""A linear recurrence in the form every chunked algorithm needs: log-space decays and rank-1 inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ssdgen.ir.expr import Axes, Expr
from ssdgen.ir.layer import Gate, Layer

DecayKind = Literal["none", "constant", "token", "channel"]
"""none: 1; constant: the same at every token; token: one a token and head; channel: one a token, head and column channel."""


@dataclass(frozen=True, slots=True)
class Diagonal:
    """Multiplication by 2^log2_decay, elementwise over its axes; `log2_decay` is at most 0."""

    kind: DecayKind
    log2_decay: Expr

    def __str__(self) -> str:
        return f"2^({self.log2_decay})  ({self.kind})"


@dataclass(frozen=True, slots=True)
class Term:
    """A rank-1 input: weight * row * column.

    `weight` varies over (batch, head) at most, `row` and `column` over those and the state's row or column axis; `row` is
    None for a vector state (a normaliser). With `lag` 1 row and column are those of the token before, the weight's is not.
    """

    weight: Expr
    row: Expr | None
    column: Expr
    lag: int = 0

    def __str__(self) -> str:
        at = "[t-1]" if self.lag else ""
        row = "" if self.row is None else f" * row{at}({self.row})"
        return f"({self.weight}){row} * column{at}({self.column})"


@dataclass(frozen=True, slots=True)
class LinearState:
    """S[t] = transition S[t-1] + sum of terms. `axes` = (batch, head, row axis, column axis) or (batch, head, column axis)
    as the caller sees the state; `row_axis` (None for a vector state) and `column_axis` say which is which."""

    name: str
    axes: Axes
    row_axis: str | None
    column_axis: str
    transition: Diagonal
    terms: tuple[Term, ...]


@dataclass(frozen=True, slots=True)
class Readout:
    """read = state . vector over the state's column axis: of the state after this token (at=0) or before it (at=-1)."""

    name: str
    state: str
    vector: Expr
    at: Literal[0, -1] = 0


@dataclass(frozen=True, slots=True)
class OutputForm:
    """An output as a function of readouts (Refs to their names), inputs and lets of its token; gates as in Layer."""

    name: str
    axes: Axes
    value: Expr
    gates: tuple[Gate, ...] = ()


@dataclass(frozen=True, slots=True)
class Recurrence:
    """What a Layer means, in normal form. Expressions still refer to the layer's lets by name."""

    layer: Layer
    states: tuple[LinearState, ...]
    readouts: tuple[Readout, ...]
    outputs: tuple[OutputForm, ...]

    def state(self, name: str) -> LinearState:
        """The state called `name`; KeyError if there is none."""
        return {s.name: s for s in self.states}[name]

    def __str__(self) -> str:
        t = self.layer.time
        lines = []
        for s in self.states:
            lines.append(f"{s.name}[{t}] = {s.transition} * {s.name}[{t}-1]")
            lines += [f"  + {term}" for term in s.terms]
        for r in self.readouts:
            lines.append(f"{r.name} = {r.state}[{t if r.at == 0 else t + '-1'}] . {r.vector}")
        for o in self.outputs:
            lines.append(f"{o.name} = {o.value}")
            lines += [f"  when {g.tensor}: {o.name} = {g.value}" for g in o.gates]
        return "\n".join(lines)
