"""Recurrence -> ChunkForm: how a chunk of tokens moves and reads the states, each equal thing computed once.

The formula is the same for every recurrence and stands in `ssdgen.ir.chunkform`; this stage fills in its fields.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Generic, TypeVar

from ssdgen.derive.recurrence import fresh_name, names_of
from ssdgen.derive.step import step
from ssdgen.ir.chunkform import ChunkForm, ChunkState, ChunkTerm, Decay, Interaction, Read, Score, Weight
from ssdgen.ir.expr import Ref
from ssdgen.ir.recurrence import LinearState, Readout, Recurrence, Term


def chunk_form(rec: Recurrence) -> ChunkForm:
    """The chunked form of `rec`; states that decay alike share a running sum, equal [i, j] tiles are one score.

    Guarantees that every decay, weight and score is distinct and used, and that their names are nobody else's (a weight
    that is a let or an input has its name).
    """
    taken = names_of(rec.layer) | {r.name for r in rec.readouts}

    decays = _Shared[Decay]("decay", taken)
    weights = _Shared[Weight]("weight", taken)
    for s in rec.states:
        decays.add(_decay(s), s.name)
        for term in s.terms:
            weights.add(_weight(term), s.name)
    decay_names, weight_names = decays.names(), weights.names()

    def chunk_state(s: LinearState) -> ChunkState:
        terms = tuple(ChunkTerm(weight_names[_weight(t)], t.row, t.column, t.lag) for t in s.terms)
        return ChunkState(s.name, s.axes, s.row_axis, s.column_axis, decay_names[_decay(s)], terms)

    states = tuple(map(chunk_state, rec.states))
    by_name = {s.name: s for s in states}

    def score(r: Readout, term: ChunkTerm) -> Score:
        s = by_name[r.state]
        return Score("", r.vector, term.column, s.column_axis, s.decay, term.weight, r.at, term.lag)

    scores = _Shared[Score]("score", taken)
    for r in rec.readouts:
        for chunk_term in by_name[r.state].terms:
            scores.add(score(r, chunk_term), r.state)
    score_names = scores.names()

    def read(r: Readout) -> Read:
        s = by_name[r.state]
        interactions = tuple(Interaction(score_names[score(r, t)], t.row, t.lag) for t in s.terms)
        return Read(r.name, r.state, r.vector, r.at, s.decay, interactions)

    return ChunkForm(
        recurrence=rec,
        decays=tuple(replace(d, name=name) for d, name in decay_names.items()),
        weights=tuple(replace(w, name=name) for w, name in weight_names.items()),
        states=states,
        scores=tuple(replace(s, name=name) for s, name in score_names.items()),
        reads=tuple(map(read, rec.readouts)),
        outputs=rec.outputs,
        step=step(rec),
    )


def _decay(state: LinearState) -> Decay:
    return Decay("", state.transition.kind, state.transition.log2_decay)


def _weight(term: Term) -> Weight:
    return Weight("", term.weight)


Named = TypeVar("Named", Decay, Weight, Score)


class _Shared(Generic[Named]):
    """Distinct nameless things, each with the state that needed it first, and then names for them.

    The only one is called `stem`, several after their states; names stay clear of `taken` and are added to it.
    """

    def __init__(self, stem: str, taken: set[str]) -> None:
        self.stem = stem
        self.taken = taken
        self.owners: dict[Named, str] = {}

    def add(self, item: Named, state: str) -> None:
        self.owners.setdefault(item, state)

    def names(self) -> dict[Named, str]:
        own = {item: _own_name(item) for item in self.owners}
        alone = sum(name is None for name in own.values()) == 1
        names = {}
        for item, state in self.owners.items():
            name = own[item] or fresh_name(self.stem if alone else f"{self.stem}_{state}", self.taken)
            self.taken.add(name)
            names[item] = name
        return names


def _own_name(item: Decay | Weight | Score) -> str | None:
    """The name of the let or input that a weight is."""
    match item:
        case Weight(value=Ref(name=name, lag=0)):
            return name
    return None
