"""The proof that a Step is one token of its layer, and a chunk of one token of the form that it stands in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import sympy  # type: ignore[import-untyped]

from ssdgen.derive.symbolic import Symbolic, pow2
from ssdgen.ir.recurrence import Readout
from ssdgen.ir.step import Move

if TYPE_CHECKING:
    from ssdgen.derive.prover import Prover

Point = Mapping[str, int]
"""An index along each channel axis that a value may vary over."""


def points(axis: str | None) -> list[Point]:
    """Two points along a channel axis, so that a sum over it is one; one where there is none."""
    return [{}] if axis is None else [{axis: 0}, {axis: 1}]


class StepProver:
    """The statements about the step of the form that `prover` proves; they assume what it has proved before."""

    def __init__(self, prover: Prover) -> None:
        self.prover = prover
        self.form = prover.form
        self.step = prover.form.step

    def statements(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """What is proved and how."""
        yield "one token moves, reads and gives what the layer declares", self.names
        for move in self.step.moves:
            yield f"one token: {move}, its update and a chunk of 1", partial(self.move, move)
        for read in self.step.reads:
            when = "before" if read.at == -1 else "after"
            text = f"one token: {read.name} = {read.state} . {read.vector} {when} the move"
            yield f"{text}, its read in a chunk of 1", partial(self.read, read)

    def names(self) -> None:
        """The states, reads and outputs are those of the form, with the axes they have there."""
        require, form = self.prover.require, self.form
        moved = [(m.state, m.axes, m.row_axis, m.column_axis) for m in self.step.moves]
        require(moved == [(s.name, s.axes, s.row_axis, s.column_axis) for s in form.states], "its states are others")
        require([r.name for r in self.step.reads] == [r.name for r in form.reads], "its reads are others")
        require(self.step.outputs == form.outputs, "its outputs are others")

    def move(self, move: Move) -> None:
        """2^log2 S + sum of terms is the update as it was written, and S_end of the form for L = 1."""
        prover = self.prover
        state, written = self.form.state(move.state), next(s for s in prover.layer.states if s.name == move.state)
        at, before = prover.point(state), sympy.Symbol("S", real=True)
        column = {move.column_axis: at[move.column_axis]}
        moved = pow2(prover.value(move.log2_decay, 0, column, {})) * before
        for term in move.terms:
            moved += prover.product(term.weight, term, state, 0, at)
        prover.require_equal(moved, prover.update(written, 0, at, before), move.state)
        chunk = pow2(prover.log2(state.decay, 0, column)) * before + prover.input(state, 0, at)
        prover.require_equal(moved, chunk, f"{move.state} in a chunk of 1")

    def read(self, read: Readout) -> None:
        """The state before or after the move times the vector is the form's read of token 0."""
        prover = self.prover
        chunk = next(r for r in self.form.reads if r.name == read.name)
        prover.require(read.state in {s.name for s in self.form.states}, f"`{read.state}` is no state")
        state = self.form.state(read.state)
        for row in points(state.row_axis):
            value: Symbolic = sum(
                prover.after(read.state, read.at, {**row, **c}) * prover.value(read.vector, 0, c, {})
                for c in points(state.column_axis)
            )
            prover.require_equal(value, prover.read_in_chunk(chunk, 0, row), read.name)
