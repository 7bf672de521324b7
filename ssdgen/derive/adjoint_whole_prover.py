"""The proof from end to end, at a small size: inputs to outputs and end states over two chunks, and all the way back.

It adds nothing that does not follow from the other statements by the chain rule, but nothing is a symbol in it but inputs,
states before the first token and cotangents: what the other parts call the same is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from math import prod
from typing import Any, NoReturn

import sympy  # type: ignore[import-untyped]

from ssdgen.derive.adjoint_around_prover import Around, Point, Token
from ssdgen.derive.adjoint_chunk_prover import COLUMNS, Chunk, Unrolled, chunks
from ssdgen.derive.adjoint_keys import Key, keys, vector_key
from ssdgen.derive.symbolic import Symbolic, equal
from ssdgen.ir.adjoint import Adjoint
from ssdgen.ir.expr import to_text
from ssdgen.ir.recurrence import LinearState

LENGTHS = (1, 1)


class Whole(Around):
    """Reads are those of the recurrence unrolled, gradients within chunks those that the formulas give."""

    tokens = tuple(range(sum(LENGTHS)))

    def __init__(self, adjoint: Adjoint, present: Collection[str], fail: Callable[[str], NoReturn]) -> None:
        rec = adjoint.form.recurrence
        self.single = (rec.layer.batch, rec.layer.head)
        self.unrolled = Unrolled(rec, len(self.tokens), fail)
        self.generators = tuple(self.unrolled.generators)
        self.chunks = chunks(adjoint, self.unrolled, LENGTHS)
        self.channels = keys(rec)
        self.values_of: dict[object, Symbolic] = {}
        """Of generators by their number, of reads and gradients by name or key, token and place."""
        super().__init__(adjoint, present, fail)

    @cached_property
    def item(self) -> dict[Key, Callable[[int, Point], Symbolic]]:
        """What everything in a chunk is."""
        return dict(self.items())

    def summands(self) -> Iterator[Symbolic]:
        """Cotangents times outputs and times the states after the last token."""
        yield from self.outputs()
        for state in self.rec.states:
            last = self.unrolled.before[state.name][len(self.tokens)]
            for place, cotangent in self.unrolled.end(state).items():
                yield self.value(cotangent) * self.value(last[place])

    def at(self, axis: str | None, place: int | None) -> Point:
        """The one batch and head, and a place along an axis if there is one."""
        channel = {} if axis is None or place is None else {axis: place}
        return {**dict.fromkeys(self.single, 0), **channel}

    def place(self, axis: str | None, at: Point) -> int | None:
        """The other way round; fails if the point has no place along the axis."""
        if axis is not None and axis not in at:
            self.fail(f"something varies over `{axis}` where nothing may")
        return None if axis is None else at[axis]

    def value(self, polynomial: Symbolic) -> Symbolic:
        """A polynomial in generators, each with the value that it stands for."""
        total = sympy.Integer(0)
        for monomial, coefficient in polynomial.terms():
            powers = (self.generator(i) ** e for i, e in enumerate(monomial) if e)
            total += prod(powers, start=sympy.Integer(int(coefficient)))
        return total

    def generator(self, number: int) -> Symbolic:
        """What a generator stands for."""
        if number not in self.values_of:
            self.values_of[number] = self._generator(self.generators[number])
        return self.values_of[number]

    def _generator(self, what: tuple[Any, ...]) -> Symbolic:
        match what:
            case ("start" | "end", name, row, column):
                return sympy.Symbol(f"<{what[0]} {name}>_{row}_{column}", real=True)
            case ("read", name, token, row):
                gradient = next(g for g in self.adjoint.reads if to_text(g.of) == name)
                state = next(self.rec.state(r.state) for r in self.rec.readouts if r.name == name)
                return self.total(gradient, token, self.at(state.row_axis, row))
        key, token, place = what
        value = self.item[key](token, self.at(self.channels[key], place))
        return sympy.exp(sympy.expand(value)) if key[0] == "decay" else value

    def read(self, name: str, state: LinearState, token: Token, at: Point) -> Symbolic:
        """A read of the unrolled state."""
        if token is None or token not in self.tokens:
            self.fail(f"`{name}` is read at no token of its own")
        row = self.place(state.row_axis, at)
        if (name, token, row) not in self.values_of:
            readout = next(r for r in self.rec.readouts if r.name == name)
            states = self.unrolled.before[state.name][token + 1 + readout.at]
            vector = self.item[vector_key(state, readout)]
            self.values_of[name, token, row] = sum(
                self.value(states[row, c]) * vector(token, self.at(state.column_axis, c)) for c in COLUMNS
            )
        return self.values_of[name, token, row]

    def d_key(self, key: Key, token: Token, at: Point) -> Symbolic:
        """What the formulas give."""
        channel = self.channels[key]
        place = self.place(channel, at)
        if (key, token, place) not in self.values_of:
            chunk = next(c for c in self.chunks if token in range(c.start, c.stop))
            self.values_of[key, token, place] = self.value(self.formula(key, chunk, token, place))
        return self.values_of[key, token, place]

    def formula(self, key: Key, chunk: Chunk, token: Any, place: Any) -> Symbolic:
        """The gradient of something in a chunk as a polynomial."""
        adjoint = self.adjoint
        name = next(name for name, its_key in self.keys.items() if its_key == key)
        for row in (r for r in adjoint.rows if r.name == name):
            return chunk.d_row(row, token, place)
        for write in (w for w in adjoint.writes if w.name == name):
            return chunk.d_write(write, token, place)
        for vector in (v for v in adjoint.vectors if v.name == name):
            return chunk.d_vector(vector, token, place)
        decay = next(d for d in adjoint.decays if d.name == name)
        columns = COLUMNS if place is None else (place,)
        return sum(chunk.d_decay(decay, c)[token - chunk.start] for c in columns)

    def prove(self) -> None:
        """The gradients of every input and of the states before the first token."""
        self.start()
        for gradient in self.adjoint.inputs:
            self.gradient(gradient)

    def start(self) -> None:
        """The gradient of each state before the first token."""
        for state in self.adjoint.states:
            for (row, column), polynomial in self.chunks[-1].state(state).items():
                names = self.generators.index(("start", state.state, row, column))
                symbol, got = self.generator(names), self.value(polynomial)
                truth = sum(sympy.diff(s, symbol) for s in self.containing.get(symbol, ()))
                if not equal(truth, got):
                    self.fail(f"of {symbol} it is {truth}, not {got}")
