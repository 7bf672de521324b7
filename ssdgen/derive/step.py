"""Recurrence -> Step: the update of one token, for decoding."""

from __future__ import annotations

from ssdgen.ir.recurrence import Recurrence
from ssdgen.ir.step import Move, Step


def step(rec: Recurrence) -> Step:
    """What one token does to the states of `rec` and reads of them."""
    moves = (
        Move(s.name, s.axes, s.row_axis, s.column_axis, s.transition.log2_decay, s.terms) for s in rec.states
    )  # fmt: skip
    return Step(tuple(moves), rec.readouts, rec.outputs)
