"""The formulas of `ssdgen.ir.adjoint` in torch, chunk by chunk, as literally as possible: what an Adjoint computes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ssdgen.ir.adjoint import Adjoint, Contribution, DecayAdjoint, Gradient, RowAdjoint, VectorAdjoint, WriteAdjoint
from ssdgen.ir.expr import Apply, Axes, Expr
from ssdgen.run.reference import Array, Evaluator, combine
from tests.derive.evaluate import Chunked

DERIVATIVES: dict[str, Callable[..., Tensor]] = {
    "sign": torch.sign,
    "above": lambda x, y: (x > y).double(),
    "within": lambda x, low, high: ((low <= x) & (x <= high)).double(),
}


def gradients(
    adjoint: Adjoint,
    tensors: Mapping[str, Tensor | None],
    states: Mapping[str, Tensor],
    given: Mapping[str, Tensor],
    chunk: int,
) -> dict[str, Tensor]:
    """The gradients of inputs and initial states by name, from those of outputs and final states, in chunks of `chunk`."""
    return _Gradients(adjoint, tensors, states, chunk).run(given)


class _Evaluator(Evaluator):
    """Knows the operations that derivatives have besides."""

    def value(self, expr: Expr) -> Array:
        match expr:
            case Apply(op=op, args=args) if op in DERIVATIVES:
                return combine(DERIVATIVES[op], *map(self.value, args))
        return super().value(expr)


class _Gradients(Chunked):
    def __init__(
        self, adjoint: Adjoint, tensors: Mapping[str, Tensor | None], states: Mapping[str, Tensor], chunk: int
    ) -> None:
        super().__init__(adjoint.form, tensors, states, chunk)
        super().run()
        self.adjoint = adjoint
        reads = {r.name: self.values.names[r.name] for r in self.form.reads}
        self.values = _Evaluator(self.layer, tensors)
        self.values.names |= reads
        self.time = self.layer.time
        self.length = self.values.sizes[self.time]
        self.d: dict[str, Array] = {}
        self.reads = {r.name: r for r in self.form.reads}
        self.d_read = {r.name: g.name for r, g in zip(self.form.reads, adjoint.reads, strict=True)}
        self.d_score: dict[str, Tensor] = {}

    def run(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        adjoint = self.adjoint
        for output, of in zip(adjoint.outputs, self.form.outputs, strict=True):
            self.d[output.name] = Array(given[output.output], of.axes)
        for gate in adjoint.gates:
            self.d[gate.name] = self.d[gate.quantity]
            if gate.tensor in self.present:
                self.before(gate.tensor)
                factor = self.values.value(gate.factor)
                self.d[gate.name] = combine(torch.mul, factor, self.d[gate.quantity])
        for gradient in adjoint.reads:
            self.d[gradient.name] = self.gradient(gradient)
        starts = self.chunks(given)
        for gradient in (*adjoint.lets, *adjoint.inputs):
            self.d[gradient.name] = self.gradient(gradient)
        self.states = starts
        found = {g.of.name: self.d[g.name].over(g.axes) for g in adjoint.inputs}
        return found | {s.name: self.as_declared(s) for s in self.form.states}

    # Around the chunks

    def before(self, gate: str) -> None:
        """Give the outputs the values that they have before their gate on a tensor."""
        for o in self.form.outputs:
            self.values.names[o.name] = self.values.value(o.value)
            for g in o.gates:
                if g.tensor == gate:
                    break
                if g.tensor in self.present:
                    self.values.names[o.name] = self.values.value(g.value)

    def gradient(self, gradient: Gradient) -> Array:
        groups = {g.shared: g.axis for g in self.layer.groups if g.axis in gradient.axes}
        sizes = self.values.sizes
        total = torch.zeros([sizes[a] for a in gradient.axes], dtype=torch.float64)
        for term in gradient.terms:
            if term.when is None or term.when in self.present:
                total = total + self.contribution(term, gradient.axes, groups)
        return Array(total, gradient.axes)

    def contribution(self, term: Contribution, axes: Axes, groups: Mapping[str, str]) -> Tensor:
        sizes = self.values.sizes
        if term.when:
            self.before(term.when)
        product = combine(torch.mul, self.values.value(term.factor), self.d[term.quantity])
        whole = tuple(next((h for h, g in groups.items() if g == a), a) for a in axes)
        over = (*whole, *(a for a in term.summed if a not in whole))
        data = product.over(over).expand([sizes[a] for a in over])
        if term.ahead:
            data = data.movedim(over.index(self.time), 0)
            data = torch.cat([data[term.ahead :], torch.zeros_like(data[: term.ahead])]).movedim(
                0, over.index(self.time)
            )
        summed = [over.index(a) for a in term.summed if a not in whole]
        data = data.sum(summed) if summed else data
        for head, group in groups.items():
            assert head in term.summed
            position = whole.index(head)
            data = data.unflatten(position, (sizes[group], sizes[head] // sizes[group])).sum(position + 1)
        return data

    # Within a chunk

    def chunks(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Fill in what is within chunks, from the last to the first; the gradients of the initial states."""
        adjoint = self.adjoint
        ends = {s.name: self.rows_and_columns(s, given[s.name]) for s in self.form.states}
        found: dict[str, list[Tensor]] = defaultdict(list)
        starts = range(0, self.length, self.chunk)
        for number in reversed(range(len(starts))):
            self.tokens = slice(starts[number], starts[number] + self.chunk)
            for score in adjoint.scores:
                self.d_score[score.name] = self.score_gradient(score.name)
            here: dict[str, Tensor] = {}
            here |= {r.name: self.row(r, ends) for r in adjoint.rows}
            here |= {w.name: self.write(w, ends) for w in adjoint.writes}
            here |= {v.name: self.vector(v, self.entries[number]) for v in adjoint.vectors}
            here |= {d.name: self.decay(d, here, ends, self.entries[number + 1]) for d in adjoint.decays}
            for w in adjoint.weights:
                writes = [x for x in adjoint.writes if x.name in w.writes]
                here[w.name] = sum((here[x.name] * self.at(x.column, x.axis, x.lag)).sum(-1, True) for x in writes)
            for name, value in here.items():
                found[name].insert(0, value)
            ends = {s.state: self.state(s.state, s.reads, ends) for s in adjoint.states}
        layer = self.layer
        axes = {r.name: self.form.state(r.state).row_axis for r in adjoint.rows}
        axes |= {x.name: x.axis for x in (*adjoint.writes, *adjoint.vectors)}
        axes |= {d.name: self.decay_axis(d) for d in adjoint.decays} | {w.name: None for w in adjoint.weights}
        for name, axis in axes.items():
            shape = (layer.batch, self.time, layer.head, *([axis] if axis else []))
            empty = torch.zeros([*(self.values.sizes[a] for a in shape), *([] if axis else [1])], dtype=torch.float64)
            data = torch.cat(found[name], 1) if found[name] else empty
            self.d[name] = Array(data if axis else data[..., 0], shape)
        return ends

    def decay_axis(self, decay: DecayAdjoint) -> str | None:
        of = self.form.decay(decay.decay)
        return self.form.state(decay.states[0]).column_axis if of.kind == "channel" else None

    def of_read(self, name: str) -> Tensor:
        """[batch, token, head, row]."""
        array = self.d[self.d_read[name]]
        axes = (self.layer.batch, self.time, self.layer.head)
        row = self.form.state(self.reads[name].state).row_axis
        data = array.over((*axes, row) if row else axes)
        return (data if row else data[..., None])[:, self.tokens]

    def row_at(self, row: Expr | None, state: str, lag: int) -> Tensor:
        axis = self.form.state(state).row_axis
        return torch.ones(1, 1, 1, 1, dtype=torch.float64) if row is None else self.at(row, axis, lag)

    def weight_at(self, weight: str) -> Tensor:
        return self.at(self.form.weight(weight).value, None)

    def score_gradient(self, name: str) -> Tensor:
        """[batch, i, j, head]."""
        score = next(s for s in self.adjoint.scores if s.name == name)
        lag = self.form.score(score.score).lag
        total: Tensor = torch.zeros(1, dtype=torch.float64)
        for part in score.parts:
            row = self.row_at(part.row, self.reads[part.read].state, lag)
            total = total + (self.of_read(part.read)[:, :, None] * row[:, None]).sum(-1)
        return total

    def row(self, row: RowAdjoint, ends: Mapping[str, Tensor]) -> Tensor:
        state = self.form.state(row.state)
        s, _ = self.sums(state.decay, state.column_axis)
        total: Tensor = torch.zeros(1, dtype=torch.float64)
        for term in row.terms:
            column = self.weight_at(term.weight) * torch.exp2(s[:, -1:] - s)
            column = column * self.at(term.column, state.column_axis, row.lag)
            total = total + torch.einsum("bhrc,bjhc->bjhr", ends[row.state], column)
        for scored in row.reads:
            score = self.score(self.form.score(scored.score))
            total = total + torch.einsum("bijh,bihr->bjhr", score, self.of_read(scored.read))
        return total

    def write(self, write: WriteAdjoint, ends: Mapping[str, Tensor]) -> Tensor:
        s, _ = self.sums(write.decay, write.axis)
        total: Tensor = torch.zeros(1, dtype=torch.float64)
        for term in write.terms:
            row = self.row_at(term.row, term.state, write.lag).expand(*s.shape[:3], -1)
            total = total + torch.exp2(s[:, -1:] - s) * torch.einsum("bjhr,bhrc->bjhc", row, ends[term.state])
        for name in write.scores:
            score = self.form.score(next(d.score for d in self.adjoint.scores if d.name == name))
            product = self.power(score) * self.d_score[name][..., None]
            total = total + (product * self.at(score.vector, score.axis)[:, :, None]).sum(1)
        return total

    def vector(self, vector: VectorAdjoint, entry: Mapping[str, Tensor]) -> Tensor:
        s, e = self.sums(vector.decay, vector.axis)
        total: Tensor = torch.zeros(1, dtype=torch.float64)
        for name in vector.reads:
            carried = torch.einsum("bihr,bhrc->bihc", self.of_read(name), entry[self.reads[name].state])
            total = total + torch.exp2(s if vector.at == 0 else e) * carried
        for name in vector.scores:
            score = self.form.score(next(d.score for d in self.adjoint.scores if d.name == name))
            column = self.weight_at(score.weight) * self.at(score.column, score.axis, score.lag)
            product = self.power(score) * self.d_score[name][..., None]
            total = total + (product * column[:, None]).sum(2)
        return total

    def decay(
        self, decay: DecayAdjoint, here: Mapping[str, Tensor], ends: Mapping[str, Tensor], last: Mapping[str, Tensor]
    ) -> Tensor:
        channel = self.decay_axis(decay) is not None

        def contracted(value: Tensor) -> Tensor:
            return value if channel else value.sum(-1, True)

        total: Tensor = torch.zeros(1, dtype=torch.float64)
        for v in (v for v in self.adjoint.vectors if v.name in decay.vectors):
            part = contracted(here[v.name] * self.at(v.vector, v.axis))
            if v.at == -1:
                part = torch.cat([part[:, 1:], torch.zeros_like(part[:, :1])], 1)
            total = total + part
        for w in (w for w in self.adjoint.writes if w.name in decay.writes):
            column = self.weight_at(w.weight) * self.at(w.column, w.axis, w.lag)
            total = total - contracted(here[w.name] * column)
        for name in decay.states:
            at_end = torch.zeros_like(total)
            at_end[:, -1] = contracted((ends[name] * last[name]).sum(2))
            total = total + at_end
        return total.flip(1).cumsum(1).flip(1)

    def state(self, name: str, reads: tuple[str, ...], ends: Mapping[str, Tensor]) -> Tensor:
        state = self.form.state(name)
        s, e = self.sums(state.decay, state.column_axis)
        total = torch.exp2(s[:, -1])[:, :, None] * ends[name]
        for read in (self.reads[r] for r in reads):
            vector = torch.exp2(s if read.at == 0 else e) * self.at(read.vector, state.column_axis)
            total = total + torch.einsum("bihr,bihc->bhrc", self.of_read(read.name), vector)
        return total
