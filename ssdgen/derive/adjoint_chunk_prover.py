"""The proof of the gradients within chunks, against the derivatives of the recurrence unrolled over all of them.

At this point a row, a weighted column, a vector and a decay are values of their own at every token, so the outputs' and end
states' cotangents times reads and end states are a polynomial in them, and its derivatives are sympy's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from itertools import accumulate
from math import prod
from typing import NoReturn

from sympy import ZZ  # type: ignore[import-untyped]
from sympy.polys.rings import ring  # type: ignore[import-untyped]

from ssdgen.derive.adjoint_keys import (
    Key,
    decay_key,
    key_of,
    keys,
    row_key,
    score_keys,
    transition_of,
    vector_key,
    write_key,
)
from ssdgen.derive.symbolic import Symbolic
from ssdgen.ir.adjoint import Adjoint, DecayAdjoint, RowAdjoint, ScoreAdjoint, StateAdjoint, VectorAdjoint, WriteAdjoint
from ssdgen.ir.chunkform import Score
from ssdgen.ir.expr import ONE
from ssdgen.ir.recurrence import Diagonal, LinearState, Recurrence

LENGTHS = (2, 3)
"""Two chunks, so that the gradient that leaves one arrives at the other."""

TOKENS = sum(LENGTHS)

Place = int | None
"""An index along a channel axis, None where there is no such axis."""

State = dict[tuple[Place, int], Symbolic]
"""A state, or its gradient, by row and column."""

COLUMNS = (0, 1)


class Unrolled:
    """A recurrence token by token, as polynomials in generators that are asked for by what they stand for."""

    def __init__(self, rec: Recurrence, tokens: int, fail: Callable[[str], NoReturn]) -> None:
        self.rec, self.tokens, self.fail = rec, tokens, fail
        names = list(dict.fromkeys(self._names()))
        self.ring, *generators = ring([f"x{i}" for i in range(len(names))], ZZ)
        self.generators = dict(zip(names, generators, strict=True))
        self.before: dict[str, list[State]] = {s.name: self._walk(s) for s in rec.states}
        self.loss = self._loss()

    def rows(self, state: LinearState) -> tuple[Place, ...]:
        """The indices along a state's row axis."""
        return (0, 1) if state.row_axis else (None,)

    def _names(self) -> Iterator[tuple[object, ...]]:
        for s in self.rec.states:
            for row in self.rows(s):
                for column in COLUMNS:
                    yield "start", s.name, row, column
                    yield "end", s.name, row, column
        for t in range(self.tokens):
            for key, axis in keys(self.rec).items():
                yield from ((key, t, place) for place in (COLUMNS if axis else (None,)))
            for r in self.rec.readouts:
                yield from (("read", r.name, t, row) for row in self.rows(self.rec.state(r.state)))

    def at(self, key: Key, token: int, place: Place) -> Symbolic:
        """A row, a weighted column or a vector at a token; fails if the recurrence has none such."""
        if (key, token, place) not in self.generators:
            self.fail(f"the recurrence has no {key[0]} of {', '.join(map(str, key[1:]))}")
        return self.generators[key, token, place]

    def decay(self, transition: Diagonal, token: int, column: int) -> Symbolic:
        """The factor of a column at a token."""
        if transition.kind == "none":
            return self.ring.one
        return self.at(decay_key(transition), token, column if transition.kind == "channel" else None)

    def d_read(self, name: str, token: int, row: Place) -> Symbolic:
        """The cotangent of a read; fails if it has no such row."""
        if ("read", name, token, row) not in self.generators:
            self.fail(f"`{name}` has another row axis")
        return self.generators["read", name, token, row]

    def end(self, state: LinearState) -> State:
        """The cotangent of a state after the last token."""
        return {(r, c): self.generators["end", state.name, r, c] for r in self.rows(state) for c in COLUMNS}

    def _walk(self, state: LinearState) -> list[State]:
        """The state before each token, and after the last."""
        now = {(r, c): self.generators["start", state.name, r, c] for r in self.rows(state) for c in COLUMNS}
        states = [now]
        for t in range(self.tokens):
            after = {}
            for (r, c), value in now.items():
                after[r, c] = self.decay(state.transition, t, c) * value
                for term in state.terms:
                    row = self.ring.one if term.row is None else self.at(row_key(state, term), t, r)
                    after[r, c] += row * self.at(write_key(state, term), t, c)
            now = after
            states.append(now)
        return states

    def _loss(self) -> Symbolic:
        """Cotangents times all reads and the states after the last token."""
        total = self.ring.zero
        for readout in self.rec.readouts:
            state = self.rec.state(readout.state)
            for t in range(self.tokens):
                for (r, c), value in self.before[state.name][t + 1 + readout.at].items():
                    vector = self.at(vector_key(state, readout), t, c)
                    total += self.d_read(readout.name, t, r) * value * vector
        for state in self.rec.states:
            last = self.before[state.name][self.tokens]
            total += sum(d * last[place] for place, d in self.end(state).items())
        return total


class Chunk:
    """The formulas of `ssdgen.ir.adjoint` over the tokens `start` to `stop`, from the gradients of the states at its end."""

    def __init__(self, adjoint: Adjoint, unrolled: Unrolled, start: int, stop: int, ends: dict[str, State]) -> None:
        self.adjoint, self.form, self.rec = adjoint, adjoint.form, unrolled.rec
        self.unrolled = unrolled
        self.start, self.stop, self.ends = start, stop, ends
        self.reads = {r.name: r for r in self.form.reads}
        self.scores = {s.name: s for s in adjoint.scores}

    def power(self, decay: str, first: int, stop: int, column: int) -> Symbolic:
        """The decay over the tokens from `first` until before `stop`."""
        transition = transition_of(self.form, decay)
        return prod(
            (self.unrolled.decay(transition, k, column) for k in range(first, stop)), start=self.unrolled.ring.one
        )

    def rows(self, state: str) -> tuple[Place, ...]:
        """The indices along the row axis of a state of that name."""
        return self.unrolled.rows(self.rec.state(state))

    def row(self, state: str, row: object, lag: int, token: int, place: Place) -> Symbolic:
        """A row of a state at a token, one if it is None."""
        return self.unrolled.ring.one if row is None else self.unrolled.at(("row", state, row, lag), token, place)

    def state(self, state: StateAdjoint) -> State:
        """The gradient of a state before the chunk."""
        of, result = self.form.state(state.state), {}
        for r in self.rows(of.name):
            for c in COLUMNS:
                total = self.power(of.decay, self.start, self.stop, c) * self.ends[of.name][r, c]
                for read in (self.reads[name] for name in state.reads):
                    key = "vector", read.vector, of.column_axis, transition_of(self.form, read.decay), read.at
                    for i in range(self.start, self.stop):
                        power = self.power(read.decay, self.start, i + 1 + read.at, c)
                        total += power * self.unrolled.d_read(read.name, i, r) * self.unrolled.at(key, i, c)
                result[r, c] = total
        return result

    def pairs(self, score: Score) -> list[tuple[int, int]]:
        """Where a score is not zero: its tokens i and j."""
        return [(i, j) for i in range(self.start, self.stop) for j in range(self.start, i + 1 + score.at)]

    def score(self, score: Score, i: int, j: int, column: int) -> Symbolic:
        """A summand of a score."""
        vector, write = score_keys(score, self.form)
        power = self.power(score.decay, j + 1, i + 1 + score.at, column)
        return power * self.unrolled.at(vector, i, column) * self.unrolled.at(write, j, column)

    def d_score(self, score: ScoreAdjoint, i: int, j: int) -> Symbolic:
        """The gradient of a score where it is not zero."""
        of, total = self.form.score(score.score), self.unrolled.ring.zero
        for part in score.parts:
            state = self.reads[part.read].state
            for r in self.rows(state):
                total += self.unrolled.d_read(part.read, i, r) * self.row(state, part.row, of.lag, j, r)
        return total

    def d_row(self, row: RowAdjoint, j: int, place: Place) -> Symbolic:
        """The gradient of a row."""
        state, total = self.form.state(row.state), self.unrolled.ring.zero
        transition = transition_of(self.form, state.decay)
        for term in row.terms:
            weight = self.form.weight(term.weight).value
            key = "write", weight, term.column, state.column_axis, transition, row.lag
            for c in COLUMNS:
                write = self.unrolled.at(key, j, c) * self.power(state.decay, j + 1, self.stop, c)
                total += write * self.ends[state.name][place, c]
        for scored in row.reads:
            score = self.form.score(scored.score)
            for i in (i for i, k in self.pairs(score) if k == j):
                value = sum(self.score(score, i, j, c) for c in COLUMNS)
                total += value * self.unrolled.d_read(scored.read, i, place)
        return total

    def d_write(self, write: WriteAdjoint, j: int, c: int) -> Symbolic:
        """The gradient of a weighted column."""
        total = self.unrolled.ring.zero
        for term in write.terms:
            power = self.power(write.decay, j + 1, self.stop, c)
            for r in self.rows(term.state):
                total += power * self.row(term.state, term.row, write.lag, j, r) * self.ends[term.state][r, c]
        for score in (self.scores[name] for name in write.scores):
            of = self.form.score(score.score)
            for i in (i for i, k in self.pairs(of) if k == j):
                power = self.power(write.decay, j + 1, i + 1 + of.at, c)
                vector = self.unrolled.at(score_keys(of, self.form)[0], i, c)
                total += power * self.d_score(score, i, j) * vector
        return total

    def d_vector(self, vector: VectorAdjoint, i: int, c: int) -> Symbolic:
        """The gradient of a vector."""
        total = self.unrolled.ring.zero
        for read in (self.reads[name] for name in vector.reads):
            power = self.power(vector.decay, self.start, i + 1 + vector.at, c)
            for r in self.rows(read.state):
                entry = self.unrolled.before[read.state][self.start][r, c]
                total += power * self.unrolled.d_read(read.name, i, r) * entry
        for score in (self.scores[name] for name in vector.scores):
            of = self.form.score(score.score)
            for j in (j for k, j in self.pairs(of) if k == i):
                power = self.power(vector.decay, j + 1, i + 1 + vector.at, c)
                write = self.unrolled.at(score_keys(of, self.form)[1], j, c)
                total += power * self.d_score(score, i, j) * write
        return total

    def d_sums(self, decay: DecayAdjoint, column: int) -> list[Symbolic]:
        """Of the gradient of a decay's running sum at each token, what one column adds."""
        sums = [self.unrolled.ring.zero for _ in range(self.start, self.stop)]
        for vector in (v for v in self.adjoint.vectors if v.name in decay.vectors):
            key = key_of(vector, self.form)
            for i in range(self.start - vector.at, self.stop):
                sums[i + vector.at - self.start] += self.d_vector(vector, i, column) * self.unrolled.at(key, i, column)
        for write in (w for w in self.adjoint.writes if w.name in decay.writes):
            key = key_of(write, self.form)
            for j in range(self.start, self.stop):
                sums[j - self.start] -= self.d_write(write, j, column) * self.unrolled.at(key, j, column)
        sums[-1] += self.whole(decay, column, self.stop)
        return sums

    def whole(self, decay: DecayAdjoint, column: int, token: int) -> Symbolic:
        """The gradients of the states at the chunk's end times the states before `token`."""
        total = self.unrolled.ring.zero
        for name in decay.states:
            state = self.unrolled.before[name][token]
            total += sum(self.ends[name][r, column] * state[r, column] for r in self.rows(name))
        return total

    def d_decay(self, decay: DecayAdjoint, column: int) -> list[Symbolic]:
        """Of the gradient of a decay at each token, what one column adds: the running sums from the end."""
        return list(accumulate(reversed(self.d_sums(decay, column))))[::-1]

    def d_decay_at(self, decay: DecayAdjoint, token: int, column: int) -> Symbolic:
        """The same added up without a difference: what goes from before `token` to it or behind."""
        total = self.power(decay.decay, self.start, self.stop, column) * self.whole(decay, column, self.start)
        for vector in (v for v in self.adjoint.vectors if v.name in decay.vectors):
            for i in range(token - vector.at, self.stop):
                power = self.power(decay.decay, self.start, i + 1 + vector.at, column)
                value = power * self.unrolled.at(key_of(vector, self.form), i, column)
                for read in (self.reads[name] for name in vector.reads):
                    entry = self.unrolled.before[read.state][self.start]
                    rows = self.rows(read.state)
                    total += value * sum(self.unrolled.d_read(read.name, i, r) * entry[r, column] for r in rows)
            for score in (self.scores[name] for name in vector.scores):
                of = self.form.score(score.score)
                for i, j in ((i, j) for i, j in self.pairs(of) if i + of.at >= token > j):
                    total += self.d_score(score, i, j) * self.score(of, i, j, column)
        for write in (w for w in self.adjoint.writes if w.name in decay.writes):
            for j in range(self.start, token):
                power = self.power(decay.decay, j + 1, self.stop, column)
                value = power * self.unrolled.at(key_of(write, self.form), j, column)
                for term in write.terms:
                    for r in self.rows(term.state):
                        row = self.row(term.state, term.row, write.lag, j, r)
                        total += value * row * self.ends[term.state][r, column]
        return total


def chunks(adjoint: Adjoint, unrolled: Unrolled, lengths: tuple[int, ...]) -> list[Chunk]:
    """The chunks from the last to the first, each with the gradients that arrive at its end."""
    ends = {s.name: unrolled.end(s) for s in unrolled.rec.states}
    stop, found = unrolled.tokens, []
    for length in reversed(lengths):
        chunk = Chunk(adjoint, unrolled, stop - length, stop, ends)
        ends = {s.state: chunk.state(s) for s in adjoint.states}
        stop -= length
        found.append(chunk)
    return found


class ChunkProver:
    """The statements about gradients within chunks. `fail` refuses by the statement that is being proved."""

    def __init__(self, adjoint: Adjoint, fail: Callable[[str], NoReturn]) -> None:
        self.adjoint, self.fail = adjoint, fail
        self.unrolled = Unrolled(adjoint.form.recurrence, TOKENS, fail)

    def statements(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """What is proved and how."""
        adjoint, over = self.adjoint, f"{len(LENGTHS)} chunks of {' and '.join(map(str, LENGTHS))} tokens"
        form = adjoint.form
        for s in adjoint.states:
            yield f"{s.name} is the gradient of {s.state} before {over}, and token by token", partial(self.state, s)
        for row in adjoint.rows:
            yield f"{row.name} is the gradient of the row {row.row} of {row.state} in {over}", partial(self.row, row)
        for w in adjoint.writes:
            weight = form.weight(w.weight).value
            text = f"{w.name} is the gradient of the column {w.column}{'' if weight == ONE else f' times {weight}'}"
            yield f"{text} in {over}", partial(self.write, w)
        for v in adjoint.vectors:
            yield f"{v.name} is the gradient of the vector {v.vector} in {over}", partial(self.vector, v)
        for d in adjoint.decays:
            text = f"{d.name} is the gradient of the logarithm of 2^({form.decay(d.decay).log2}) in {over}"
            yield text, partial(self.decay, d)
            yield f"{d.name} is also what goes past each token, without a difference", partial(self.decay_at, d)

    @cached_property
    def two_chunks(self) -> list[Chunk]:
        """Those of `LENGTHS`."""
        return chunks(self.adjoint, self.unrolled, LENGTHS)

    def require_derivative(self, value: Symbolic, generator: Symbolic, what: str) -> None:
        """Fail unless `value` is the derivative of the loss."""
        if value != self.unrolled.loss.diff(generator):
            self.fail(f"{what} is another")

    def state(self, state: StateAdjoint) -> None:
        """The gradient that leaves the first of the chunks, and of chunks of one token."""
        for lengths in (LENGTHS, (1,) * TOKENS):
            start = chunks(self.adjoint, self.unrolled, lengths)[-1].state(state)
            for (r, c), value in start.items():
                generator = self.unrolled.generators["start", state.state, r, c]
                self.require_derivative(value, generator, f"that of row {r} and column {c}")

    def at_tokens(self, key: Key, places: tuple[Place, ...], value: Callable[[Chunk, int, Place], Symbolic]) -> None:
        """A gradient at every token and place."""
        for chunk in self.two_chunks:
            for t in range(chunk.start, chunk.stop):
                for place in places:
                    generator = self.unrolled.at(key, t, place)
                    self.require_derivative(value(chunk, t, place), generator, f"that of token {t}, channel {place}")

    def row(self, row: RowAdjoint) -> None:
        """A row's gradient."""
        self.at_tokens(key_of(row, self.adjoint.form), (0, 1), lambda chunk, t, r: chunk.d_row(row, t, r))

    def write(self, write: WriteAdjoint) -> None:
        """A weighted column's gradient."""
        key = key_of(write, self.adjoint.form)
        self.at_tokens(key, COLUMNS, lambda chunk, t, c: chunk.d_write(write, t, c or 0))

    def vector(self, vector: VectorAdjoint) -> None:
        """A vector's gradient."""
        key = key_of(vector, self.adjoint.form)
        self.at_tokens(key, COLUMNS, lambda chunk, t, c: chunk.d_vector(vector, t, c or 0))

    def decay(self, decay: DecayAdjoint) -> None:
        """A decay's gradient, from the running sums'."""
        self.decays(decay, lambda chunk, c: chunk.d_decay(decay, c))

    def decay_at(self, decay: DecayAdjoint) -> None:
        """The same without a difference."""
        self.decays(decay, lambda chunk, c: [chunk.d_decay_at(decay, t, c) for t in range(chunk.start, chunk.stop)])

    def decays(self, decay: DecayAdjoint, values: Callable[[Chunk, int], list[Symbolic]]) -> None:
        """The gradient of ln a is a times that of a; of a decay that all columns share, the sum over them."""
        transition = transition_of(self.adjoint.form, decay.decay)
        for chunk in self.two_chunks:
            found = [values(chunk, c) for c in COLUMNS]
            for t in range(chunk.start, chunk.stop):
                for columns in [(c,) for c in COLUMNS] if transition.kind == "channel" else [COLUMNS]:
                    a = self.unrolled.decay(transition, t, columns[0])
                    got = sum(found[c][t - chunk.start] for c in columns)
                    if got != a * self.unrolled.loss.diff(a):
                        self.fail(f"that of token {t}, columns {columns} is another")
