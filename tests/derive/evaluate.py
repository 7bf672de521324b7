"""The formula of `ssdgen.ir.chunkform` in torch, chunk by chunk, as literally as possible: what a ChunkForm computes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ssdgen.ir.chunkform import ChunkForm, ChunkState, Score
from ssdgen.ir.expr import Expr
from ssdgen.run.reference import Array, Evaluator


def evaluate(
    form: ChunkForm, tensors: Mapping[str, Tensor | None], states: Mapping[str, Tensor], chunk: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(outputs, final states) of `form` in float64, in chunks of `chunk` tokens; arguments as for `reference`."""
    return Chunked(form, tensors, states, chunk).run()


class Chunked:
    """One evaluation; `entries` are the states before each chunk and after the last, in (batch, head, row, column)."""

    def __init__(
        self, form: ChunkForm, tensors: Mapping[str, Tensor | None], states: Mapping[str, Tensor], chunk: int
    ) -> None:
        self.form, self.chunk = form, chunk
        self.layer = form.recurrence.layer
        self.values = Evaluator(self.layer, tensors)
        self.present = {name for name, value in tensors.items() if value is not None}
        self.states = {s.name: self.rows_and_columns(s, states[s.name]) for s in form.states}
        self.tokens = slice(0, 0)
        self.entries = [self.states]

    def rows_and_columns(self, state: ChunkState, given: Tensor) -> Tensor:
        """A state with its dimensions as (batch, head, row, column)."""
        axes = (*state.axes[:2], *([state.row_axis] if state.row_axis else []), state.column_axis)
        data = Array(given.double(), state.axes).over(axes)
        return data if state.row_axis else data[:, :, None]

    def as_declared(self, state: ChunkState) -> Tensor:
        data = self.states[state.name]
        if state.row_axis is None:
            return data[:, :, 0]
        return data if state.axes[2:] == (state.row_axis, state.column_axis) else data.mT

    def at(self, expr: Expr, axis: str | None, lag: int = 0) -> Tensor:
        """`expr` at the tokens of the chunk, [batch, token, head, axis]."""
        array = self.values.value(expr)
        if lag:
            array = self.values.shifted(array)
        layer, sizes = self.layer, self.values.sizes
        axes = (layer.batch, layer.time, layer.head)
        over = array.over((*axes, axis) if axis else axes)
        over = over if axis else over[..., None]
        whole = over.expand(*(sizes[a] for a in axes), sizes[axis] if axis else 1)
        return whole[:, self.tokens]

    def sums(self, decay: str, axis: str) -> tuple[Tensor, Tensor]:
        """The running sums s (with the token) and e (before it)."""
        decays = self.form.decay(decay)
        log2 = self.at(decays.log2, axis if decays.kind == "channel" else None)
        s = log2.cumsum(1)
        return s, s - log2

    def power(self, score: Score) -> Tensor:
        """[batch, i, j, head, column]: the decay of a score, zero where the score is."""
        s, e = self.sums(score.decay, score.axis)
        upto = s if score.at == 0 else e
        length = s.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).tril(score.at)[None, :, :, None, None]
        return torch.exp2((upto[:, :, None] - s[:, None]).masked_fill(~mask, -torch.inf))

    def score(self, score: Score) -> Tensor:
        """[batch, i, j, head]."""
        power = self.power(score)
        vector = self.at(score.vector, score.axis)
        column = self.at(score.column, score.axis, score.lag)
        weight = self.at(self.form.weight(score.weight).value, None)
        return (vector[:, :, None] * column[:, None] * power).sum(-1) * weight[:, None, :, :, 0]

    def run(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        form, layer, sizes = self.form, self.layer, self.values.sizes
        reads: dict[str, list[Tensor]] = {r.name: [] for r in form.reads}
        for start in range(0, sizes[layer.time], self.chunk):
            self.tokens = slice(start, start + self.chunk)
            scores = {s.name: self.score(s) for s in form.scores}
            for r in form.reads:
                state = form.state(r.state)
                s, e = self.sums(r.decay, state.column_axis)
                vector = torch.exp2(s if r.at == 0 else e) * self.at(r.vector, state.column_axis)
                total = torch.einsum("bihc,bhrc->bihr", vector, self.states[r.state])
                for n in r.interactions:
                    row = torch.ones_like(s[..., :1]) if n.row is None else self.at(n.row, state.row_axis, n.lag)
                    total = total + torch.einsum("bijh,bjhr->bihr", scores[n.score], row)
                reads[r.name].append(total)
            self.states = {s.name: self.jump(s) for s in form.states}
            self.entries.append(self.states)
        for r in form.reads:
            row = form.state(r.state).row_axis
            axes = (layer.batch, layer.time, layer.head)
            empty = torch.zeros(*(sizes[a] for a in axes), sizes[row] if row else 1, dtype=torch.float64)
            data = torch.cat(reads[r.name], 1) if reads[r.name] else empty
            self.values.names[r.name] = Array(data, (*axes, row)) if row else Array(data[..., 0], axes)
        return self.outputs(), {s.name: self.as_declared(s) for s in form.states}

    def jump(self, state: ChunkState) -> Tensor:
        s, _ = self.sums(state.decay, state.column_axis)
        end = torch.exp2(s[:, -1])[:, :, None] * self.states[state.name]
        for t in state.terms:
            row = torch.ones_like(s[..., :1]) if t.row is None else self.at(t.row, state.row_axis, t.lag)
            column = torch.exp2(s[:, -1:] - s) * self.at(t.column, state.column_axis, t.lag)
            weight = self.at(self.form.weight(t.weight).value, None)
            end = end + torch.einsum("bjhr,bjhc->bhrc", weight * row, column)
        return end

    def outputs(self) -> dict[str, Tensor]:
        results = {}
        for o in self.form.outputs:
            self.values.names[o.name] = self.values.value(o.value)
            for gate in o.gates:
                if gate.tensor in self.present:
                    self.values.names[o.name] = self.values.value(gate.value)
            whole = self.values.names[o.name].over(o.axes)
            results[o.name] = whole.expand([self.values.sizes[a] for a in o.axes])
        return results
