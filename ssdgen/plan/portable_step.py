"""One token in plain torch: the states are moved in place, by two passes over each, and read by a product."""

from __future__ import annotations

from ssdgen.ir.chunkform import ChunkForm
from ssdgen.ir.expr import ONE, Axes, Const, Expr, Ref, mul
from ssdgen.ir.plan import Config
from ssdgen.ir.portable import AddProduct, Einsum, PortableStatement, PortableStep, Scale
from ssdgen.ir.recurrence import Readout
from ssdgen.ir.step import Move
from ssdgen.plan.builder import Unsupported
from ssdgen.plan.lower import decay_of
from ssdgen.plan.portable import PortableBuilder


def portable_step(form: ChunkForm, config: Config) -> PortableStep:
    """The portable step of a form; Unsupported for one that looks back at the token before."""
    return _StepBuilder(form, config).step()


class _StepBuilder(PortableBuilder):
    """A PortableBuilder whose tensors have no time axis; what it computes goes to `tokens`, in order."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.order: Axes = tuple(a for a in self.order if a != self.time)

    def step(self) -> PortableStep:
        """The whole step."""
        step, body = self.form.step, self.tokens
        for read in step.reads:
            if read.at == -1:
                self._read_state(body, read)
        for move in step.moves:
            self._move(body, move)
        for read in step.reads:
            if read.at == 0:
                self._read_state(body, read)
        outputs = tuple(self.output(o.name) for o in step.outputs)
        return PortableStep(self.inputs(), tuple(self.sizes), tuple(self.indices), tuple(body), outputs)

    def source(self, ref: Ref, lag: bool) -> Ref:
        """An input, of this token."""
        if lag and self.time in self.layer.tensor(ref.name).axes:
            raise Unsupported(f"`{ref.name}[{self.time}-1]`, which reads the token before")
        return super().source(ref, lag=False)

    def _state(self, name: str) -> Ref:
        return Ref(self.names.of("host", name), self.form.state(name).axes)

    def _read_state(self, body: list[PortableStatement], read: Readout) -> None:
        state = self.form.state(read.state)
        axes = tuple(a for a in state.axes if a != state.column_axis)
        target = Ref(self.names.of("value", read.name), axes)
        body.append(Einsum(target, (self._state(read.state), self.value(body, read.vector))))
        self.known[read.name] = target

    def _move(self, body: list[PortableStatement], move: Move) -> None:
        state = self._state(move.state)
        decay = self._decay_of(body, move.log2_decay)
        if decay != ONE:
            body.append(Scale(state, decay))
        for term in move.terms:
            weight = self.value(body, term.weight, bool(term.lag))
            row = ONE if term.row is None else self.value(body, term.row, bool(term.lag))
            body.append(AddProduct(state, mul(weight, row), self.value(body, term.column, bool(term.lag))))

    def _decay_of(self, body: list[PortableStatement], log2: Expr) -> Expr:
        """What a token leaves of a state, computed once for all states that decay alike."""
        value = decay_of(self.value(body, log2))
        key = f"decay {value}"
        if isinstance(value, Const):
            return value
        if key not in self.known:
            self.known[key] = self.named(body, "decay", value)
        return self.known[key]
