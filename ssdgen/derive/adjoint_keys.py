"""What has a gradient within a chunk: every row, weighted column, vector and decay that a recurrence has.

Each is known by its values alone, so that the proof can tell which of them a field of an Adjoint is about: the expressions,
what decays how, and at which token.
"""

from __future__ import annotations

from collections.abc import Iterator

from ssdgen.ir.adjoint import Adjoint, DecayAdjoint, RowAdjoint, VectorAdjoint, WriteAdjoint
from ssdgen.ir.chunkform import ChunkForm, Score
from ssdgen.ir.recurrence import Diagonal, LinearState, Readout, Recurrence, Term

Key = tuple[object, ...]


def row_key(state: LinearState, term: Term) -> Key:
    """The row of a term of a state."""
    return "row", state.name, term.row, term.lag


def write_key(state: LinearState, term: Term) -> Key:
    """The weighted column of a term of a state."""
    return "write", term.weight, term.column, state.column_axis, state.transition, term.lag


def vector_key(state: LinearState, readout: Readout) -> Key:
    """The vector of a readout of a state."""
    return "vector", readout.vector, state.column_axis, state.transition, readout.at


def decay_key(transition: Diagonal) -> Key:
    """A decay."""
    return "decay", transition


def transition_of(form: ChunkForm, decay: str) -> Diagonal:
    """A decay of a form by its name."""
    of = form.decay(decay)
    return Diagonal(of.kind, of.log2)


def key_of(item: RowAdjoint | WriteAdjoint | VectorAdjoint | DecayAdjoint, form: ChunkForm) -> Key:
    """What an adjoint says that it is the gradient of."""
    match item:
        case RowAdjoint():
            return "row", item.state, item.row, item.lag
        case WriteAdjoint():
            weight = form.weight(item.weight).value
            return "write", weight, item.column, item.axis, transition_of(form, item.decay), item.lag
        case VectorAdjoint():
            return "vector", item.vector, item.axis, transition_of(form, item.decay), item.at
    return decay_key(transition_of(form, item.decay))


def score_keys(score: Score, form: ChunkForm) -> tuple[Key, Key]:
    """The vector and the weighted column of a score."""
    transition = transition_of(form, score.decay)
    weight = form.weight(score.weight).value
    return (
        ("vector", score.vector, score.axis, transition, score.at),
        ("write", weight, score.column, score.axis, transition, score.lag),
    )


def keys(rec: Recurrence) -> dict[Key, str | None]:
    """Everything in a chunk of `rec` that has a gradient, with the channel axis along which it has one."""
    return dict(_keys(rec))


def _keys(rec: Recurrence) -> Iterator[tuple[Key, str | None]]:
    for s in rec.states:
        if s.transition.kind != "none":
            yield decay_key(s.transition), s.column_axis if s.transition.kind == "channel" else None
        for term in s.terms:
            if term.row is not None:
                yield row_key(s, term), s.row_axis
            yield write_key(s, term), s.column_axis
    for r in rec.readouts:
        yield vector_key(rec.state(r.state), r), rec.state(r.state).column_axis


def adjoint_keys(adjoint: Adjoint) -> dict[str, Key]:
    """What each gradient within a chunk is of, by its name."""
    found: dict[str, Key] = {}
    for items in (adjoint.rows, adjoint.writes, adjoint.vectors, adjoint.decays):
        found |= {item.name: key_of(item, adjoint.form) for item in items}
    return found
