"""One token, for decoding: what a recurrence says when a chunk is one token long, and nothing is summed over tokens."""

from __future__ import annotations

from dataclasses import dataclass

from ssdgen.ir.expr import ONE, ZERO, Apply, Axes, Expr, Ref
from ssdgen.ir.recurrence import OutputForm, Readout, Term


@dataclass(frozen=True, slots=True)
class Move:
    """state = 2^log2_decay state + sum of terms, elementwise; the axes are as in `ssdgen.ir.recurrence.LinearState`.

    `log2_decay` is at most 0, and ZERO for no decay.
    """

    state: str
    axes: Axes
    row_axis: str | None
    column_axis: str
    log2_decay: Expr
    terms: tuple[Term, ...]

    def __str__(self) -> str:
        power = "" if self.log2_decay == ZERO else f"2^({self.log2_decay}) "
        return f"{self.state} = {power}{self.state} + {' + '.join(map(_term, self.terms))}"


@dataclass(frozen=True, slots=True)
class Step:
    """The reads of the states before this token (at -1), then the moves, then the other reads, then the outputs."""

    moves: tuple[Move, ...]
    reads: tuple[Readout, ...]
    outputs: tuple[OutputForm, ...]

    def __str__(self) -> str:
        lines = [_read(r) for r in self.reads if r.at == -1]
        lines += map(str, self.moves)
        return "\n".join([*lines, *(_read(r) for r in self.reads if r.at == 0)])


def _read(read: Readout) -> str:
    return f"{read.name} = {read.state} . {factor_text(read.vector)}"


def _term(term: Term) -> str:
    at = "[t-1]" if term.lag else ""
    vectors = " (x) ".join(f"{factor_text(v)}{at}" for v in (term.row, term.column) if v is not None)
    return vectors if term.weight == ONE else f"{factor_text(term.weight)} {vectors}"


def factor_text(expr: Expr) -> str:
    """`expr` in parentheses unless it binds as a name does."""
    return f"({expr})" if isinstance(expr, Apply) or (isinstance(expr, Ref) and expr.lag) else str(expr)
