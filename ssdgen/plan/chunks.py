"""The portable path with its chunks side by side: what a compiler of whole arrays, which loops badly, is given.

The same statements as of `ssdgen.plan.portable`, over tensors with an axis more. Heads of a group share products, so what
varies by head alone, decays and weights, stays out of the operands that a group shares.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ssdgen.ir.chunkform import ChunkForm, ChunkState, Read
from ssdgen.ir.expr import Axes, Expr, Ref, axes_of, merge_axes, mul
from ssdgen.ir.plan import CHUNKS, KEY, Config
from ssdgen.ir.portable import ChunkMove, ChunksForm, PortableInput, PortableStatement, Slice
from ssdgen.plan.portable import PortableBuilder


def chunks_form(form: ChunkForm, config: Config) -> ChunksForm:
    """The portable path of a chunk form over all chunks at once."""
    return _ChunksBuilder(form, config).whole()


@dataclass
class _ChunksBuilder(PortableBuilder):
    """A PortableBuilder whose tensors have their heads split by group, before time; what varies by chunk has CHUNKS first."""

    cut: dict[str, Slice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        layer = self.layer
        groups = [g.axis for g in layer.groups if g.shared == layer.head]
        self.group = groups[0] if len(layer.groups) == len(groups) == 1 else None
        first = (CHUNKS, layer.batch, *((self.group,) if self.group else ()), layer.head, layer.time, KEY)
        self.order = (*first, *(a for a in self.order if a not in first))

    def whole(self) -> ChunksForm:
        """The whole path."""
        form, gains = self.form, self.chunk
        for decay in form.decays:
            self.sums[decay.name] = self._decay(decay)
        moves = tuple(self._moved(gains, state) for state in form.states)
        reads: list[PortableStatement] = []
        self.chunk = reads
        scores = {s.name: self._score(s) for s in form.scores}
        for read in form.reads:
            self.known[read.name] = self._read(read, scores)
        outputs = tuple(self.output(o.name) for o in form.outputs)
        return ChunksForm(
            self.inputs(),
            tuple(self.sizes),
            tuple(self.indices),
            self.group,
            tuple(self.tokens),
            tuple(self.cut.values()),
            tuple(gains),
            moves,
            tuple(reads),
            outputs,
        )

    def inputs(self) -> tuple[PortableInput, ...]:
        """The inputs: with the axis of groups, where heads are split by it, else expanded to heads."""
        found = []
        for t in self.layer.inputs:
            axes = dict(self.config.layouts).get(t.name, t.axes)
            target = tuple(self.shared(a) for a in axes)
            order = self.natural(target)
            found.append(PortableInput(t.name, axes, order, target != axes, self.time in axes))
        return tuple(found)

    def shared(self, axis: str) -> str:
        """A group axis that heads are not split by reads as theirs; any other axis as itself."""
        return axis if axis == self.group else self.layer.shared(axis)

    def natural(self, axes: Axes) -> Axes:
        """`axes` in the builder's order; a head is one of a group."""
        inside = (*axes, self.group) if self.group and self.layer.head in axes else axes
        return tuple(a for a in self.order if a in inside)

    def state_axes(self, state: ChunkState) -> Axes:
        """The axes of a state, in its own order, its head split by group."""
        split = {self.layer.head: (self.group, self.layer.head)} if self.group else {}
        return tuple(a for axis in state.axes for a in split.get(axis, (axis,)))

    def named(self, section: list[PortableStatement], name: str, value: Expr, axes: Axes | None = None) -> Ref:
        """Append name = value, with the axes that the value has: what a group shares has no axis of heads."""
        return super().named(section, name, value)

    def product(
        self, section: list[PortableStatement], kind: str, name: str, factors: tuple[Expr, ...], axes: Axes, over: str
    ) -> Ref:
        """Append name = the product of `factors`, summed over one axis; with the others that they have."""
        found = tuple(a for a in merge_axes(axes_of(f) for f in factors) if a != over)
        return super().product(section, kind, name, factors, self.natural(found), over)

    def output_axes(self, axes: Axes) -> Axes:
        """The axes of an output of every chunk."""
        return self.natural((CHUNKS, *axes))

    def outer(self, row: Expr | None, carry: Expr, column: Expr, axis: str) -> tuple[Expr, ...]:
        """The factors of row (x) column: the row bears what does not vary along the column's axis, which a group may share."""
        if axis in axes_of(carry):
            return super().outer(row, carry, column, axis)
        return (carry if row is None else mul(row, carry), column)

    def _slice(self, section: list[PortableStatement], source: Ref) -> Ref:
        """Its tokens of every chunk, cut once for all that read them."""
        if source.name not in self.cut:
            target = Ref(self.names.of("now", f"{source.name}_now"), self.natural((CHUNKS, *source.axes)))
            self.cut[source.name] = Slice(target, source)
        return self.cut[source.name].target

    def _entry(self, state: ChunkState) -> Ref:
        return Ref(self.names.of("entry", f"{state.name}_entry"), (CHUNKS, *self.state_axes(state)))

    def _moved(self, section: list[PortableStatement], state: ChunkState) -> ChunkMove:
        axes = (CHUNKS, *self.state_axes(state))
        gained = tuple(Ref(g.name, g.axes) for g in self.gained(section, state))
        target = Ref(self.names.of("host", state.name), axes[1:])
        return ChunkMove(target, self._entry(state), self.sums[state.decay].end, gained)

    def _carried(self, section: list[PortableStatement], read: Read, state: ChunkState, axes: Axes) -> Expr:
        """What is read of the states that chunks start from; the product bears the decay, unless that varies along the axis
        that is summed."""
        reach = self.reach(read)
        if state.column_axis in axes_of(reach):
            vector, reach = mul(self.value(section, read.vector), reach), mul()
        else:
            vector = self.value(section, read.vector)
        name, factors = f"{read.name}_carried", (vector, self._entry(state))
        return mul(reach, self.product(section, "carried", name, factors, axes, state.column_axis))
