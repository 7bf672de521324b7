"""The kernel `token_step`: a few tokens one by one, for decoding, with a tile of every state in registers.

It reads and writes each state once, whatever the number of tokens, and a decode step is nothing but that memory traffic:
so no tensor cores, and no TMA, whose pipeline costs more warps than it saves on one tile. States may be the slots of a
pool of any size, so they are indexed with int64.

A block asks for its states and what no token changes, and only then for what the kernel before wrote: if it is STEADY it waits
for that one in between, so that the memory is already busy while that one ends, and else at its beginning.

A block has one tile of the row axis and all of the column axis. A vector state beside a matrix state would be written by
one such block while others still read it: a kernel of its own, behind the first, moves it.
"""

from __future__ import annotations

from dataclasses import replace

from ssdgen.ir.chunkform import ChunkForm
from ssdgen.ir.expr import ONE, Apply, Axes, Const, Contract, Expr, Ref, is_per_token, mul
from ssdgen.ir.plan import Config, Knob, Let, Parameter, Round, Slot, Statement, StepKernel, StepPlan, Store, When
from ssdgen.ir.recurrence import Readout
from ssdgen.ir.step import Move
from ssdgen.plan.builder import Unsupported
from ssdgen.plan.config import DTYPES
from ssdgen.plan.lower import decay_of, finite_on_padding, inline
from ssdgen.plan.names import KEPT
from ssdgen.plan.place import length_line
from ssdgen.plan.portable_step import portable_step
from ssdgen.plan.reads import Parts, output, shared_axes
from ssdgen.plan.walk import WalkBuilder, tile_constant, widen

NAME = "token_step"
ROLE = "step"
TILE, OCCUPANCY, WARPS = 64, 2, 8
"""Of a state of 64 by 128 a thread then holds 32 elements, loaded 16 bytes at a time, and spills none on any architecture. Of
13 settings the fastest on an H200 where states are float32 and fill it; `fitted` of `_step.py` has the others."""

READ, WRITE = "state_indices", "write_indices"


def step_plan(form: ChunkForm, config: Config, kernels: bool) -> StepPlan:
    """How a token is computed: with kernels if the chunked form has some, and in plain torch.

    `refused` says why there is nothing, of a form that looks back at the token before.
    """
    try:
        portable = portable_step(form, config)
        found = step_kernels(form, config) if kernels else ()
    except Unsupported as reason:
        return StepPlan(refused=str(reason))
    return StepPlan(found, _knobs(form, found), portable)


def step_kernels(form: ChunkForm, config: Config) -> tuple[StepKernel, ...]:
    """The kernels of a step in launch order."""
    moves = form.step.moves
    vectors = [m for m in moves if m.row_axis is None]
    if len(vectors) == len(moves):
        return (_kernel(form, config, NAME, moves, with_outputs=True),)
    first = _kernel(form, config, NAME, tuple(m for m in moves if m not in vectors), with_outputs=True)
    return (first, *(_kernel(form, config, f"{NAME}_{m.state}", (m,), with_outputs=False) for m in vectors))


class StepBuilder(WalkBuilder):
    """A WalkBuilder for tokens one by one: no tile has a time axis; `hoist` has the section of what no token changes."""

    def __init__(self, form: ChunkForm, config: Config, channels: Axes) -> None:
        super().__init__(form, config, channels)
        layer, column = self.layer, channels[-1]
        self.place[layer.time] = Slot(layer.time, "token", "1")
        self.place[column] = Slot(column, "0", tile_constant(column))
        self.places["state"] = {layer.batch: Slot(layer.batch, "slot", "1")}
        self.order = channels
        self.whole = self.flag("WHOLE", "whole")

    def latency(self, name: str) -> str | None:
        """None: a tile is loaded once, there is nothing to overlap it with."""
        return None

    def section(self, section: list[Statement], axes: Axes) -> list[Statement]:
        """`section`: no tile has the axis that the loop is over. `input`, `let` and `operand` choose the section."""
        return section

    def chosen(self, section: list[Statement], expr: Expr) -> list[Statement]:
        """Where what `expr` needs goes: `section`, or before the loop if it is the same for all tokens."""
        if self.hoist is None or is_per_token(inline(expr, self._lets)):
            return section
        return self.hoist[1]

    def input(self, section: list[Statement], name: str) -> Ref:
        """Load the tile of an input, before the loop if it has no time axis."""
        per_token = self.layer.time in self.layer.tensor(name).axes
        return super().input(self.chosen(section, Ref(name, (), per_token)), name)

    def let(self, section: list[Statement], name: str) -> Expr:
        """Compute a let, before the loop if no token changes it."""
        return super().let(self.chosen(section, self._lets[name]), name)

    def operand(self, section: list[Statement], expr: Expr, name: str) -> Expr:
        """As in KernelBuilder, before the loop if no token changes it."""
        return super().operand(self.chosen(section, expr), expr, name)

    def number(self, section: list[Statement], expr: Expr, name: str) -> Expr:
        """`expr` in arithmetic: computed once, an input widened to float32."""
        if expr == ONE:
            return ONE
        tile = self.operand(section, expr, name)
        return widen(tile) if isinstance(expr, Ref) and expr.name not in self._lets else tile

    def vector(self, section: list[Statement], vector: Expr, axis: str) -> Expr:
        """The tile [N] of a read vector: anything finite past the end of its axis, where states are zero."""
        tile = self.operand(section, vector, "vector")
        if finite_on_padding(inline(vector, self._lets)):
            return tile
        return self._masked(section, vector, "vector", tile, self._inside(axis))

    def _inside(self, axis: str) -> Expr:
        size = Ref(self.declare(Parameter(f"size_{axis}", "scalar", f"size_{axis}", dtype="f32")))
        return Apply("lt", (self.index(axis), size))


def _kernel(form: ChunkForm, config: Config, name: str, stored: tuple[Move, ...], with_outputs: bool) -> StepKernel:
    """The kernel that moves `stored`, and every other state that its outputs read."""
    layer = form.recurrence.layer
    row, column = shared_axes(form)
    row = row if any(m.row_axis for m in stored) else None
    builder = StepBuilder(form, config, (column,) if row is None else (row, column))
    before: list[Statement] = []
    token: list[Statement] = []
    builder.hoist = (layer.time, before)
    moves = form.step.moves if with_outputs else stored
    tiles = {m.state: _enter(builder, before, m) for m in moves}
    slots = [builder.declare(Parameter(n, "slots", n, (layer.batch,), "i32")) for n in (READ, WRITE)]
    indexed = builder.flag("INDEXED", READ)
    builder.flag("STEADY", "steady")
    for move in stored:
        token.append(_keep(builder, move, tiles[move.state]))
    reads = form.step.reads if with_outputs else ()
    for read in reads:
        if read.at == -1:
            _read(builder, token, read, widen(tiles[read.state]))
    moved = {m.state: _move(builder, token, m, tiles[m.state]) for m in moves}
    for read in reads:
        if read.at == 0:
            _read(builder, token, read, moved[read.state])
    if with_outputs:
        parts = Parts(builder, row, column, walks=True, before=before, outputs=token)
        for declared in layer.outputs:
            output(parts, declared)
    for move in moves:
        token.append(Round(tiles[move.state], moved[move.state], _state(builder, move)))
    after: list[Statement] = [_leave(builder, m, tiles[m.state]) for m in stored]
    if row is not None:
        builder.constant(f"tile_{row}")
    builder.constant(f"tile_{column}", f"size_{column}")
    builder.finish(before, token, after)
    row_tiles = () if row is None else (f"_rt.ceil_div(size_{row}, tile_{row})",)
    return StepKernel(
        name=name,
        role=ROLE,
        doc=_doc(stored, with_outputs),
        parameters=builder.ordered_parameters(),
        grid=(f"size_{layer.batch} * size_{layer.head}", *row_tiles),
        position=tuple(_position(builder, row, stored[0], indexed, slots)),
        occupancy="occupancy",
        before=tuple(before),
        token=tuple(token),
        after=tuple(after),
    )


def _doc(stored: tuple[Move, ...], with_outputs: bool) -> str:
    states = " and ".join(m.state for m in stored)
    if with_outputs:
        return f"Tokens one by one, with a tile of {states} in registers; a sequence without a slot is left out."
    return f"The state {states} after the tokens: written only when no block of the kernel before reads it any more."


def _state(builder: StepBuilder, move: Move) -> str:
    return builder.declare(Parameter(move.state, "state", move.state, move.axes, "state"))


def _enter(builder: StepBuilder, before: list[Statement], move: Move) -> Ref:
    """Load the tile of a state, which is carried in its own dtype: several tokens are then as many calls, bit for bit."""
    array = _state(builder, move)
    target = Ref(builder.names.of("state", f"{move.state}_tile"), builder.tile_axes(move.axes))
    before.append(builder.load_tile(array, target))
    return target


def _keep(builder: StepBuilder, move: Move, tile: Ref) -> When:
    """Store what a state is before a token, if the caller wants it."""
    layer, name = builder.layer, f"{move.state}_before"
    batch, *rest = move.axes
    kept = builder.declare(Parameter(name, "kept", name, (batch, layer.time, *rest), "state"))
    store = Store(kept, builder.slots(kept), tile, tile.axes, whole=builder.whole)
    return When(builder.flag(KEPT, "before"), (store,))


def _leave(builder: StepBuilder, move: Move, tile: Ref) -> Store:
    """Store the tile of a state where it goes."""
    array = _state(builder, move)
    slots = tuple(replace(s, index="into") if s.index == "slot" else s for s in builder.slots(array))
    return Store(array, slots, tile, tile.axes, whole=builder.whole)


def _read(builder: StepBuilder, token: list[Statement], read: Readout, tile: Expr) -> None:
    column = builder.form.state(read.state).column_axis
    value = Contract(tile, widen(builder.vector(token, read.vector, column)), column)
    target = Ref(builder.names.of("read", read.name), builder.natural(value))
    token.append(Let(target, value))
    builder.known[read.name] = target


def _move(builder: StepBuilder, token: list[Statement], move: Move, tile: Ref) -> Ref:
    """Append the move of a state, in float32: its decay is computed once for all states that have it."""
    decay = decay_of(move.log2_decay)
    if not isinstance(decay, Const):
        decay = builder.operand(token, decay, "decay")
    total: Expr = mul(decay, widen(tile))
    for term in move.terms:
        if term.lag:
            raise Unsupported("an input of the token before")
        row = ONE if term.row is None else builder.number(token, term.row, "row")
        scale = mul(builder.number(token, term.weight, "weight"), row)
        total = Apply("add", (total, mul(scale, widen(builder.column(token, term.column, move.column_axis)))))
    return builder.name_value(token, f"{move.state}_now", total, axes=tile.axes)


def _position(builder: StepBuilder, row: str | None, move: Move, indexed: str, slots: list[str]) -> list[str]:
    """The assignments that place a block: which sequence, head and tile, and where its state is and goes."""
    layer = builder.layer
    arrays = [p for p in builder.ordered_parameters() if layer.head in p.axes]
    optional = {t.name for t in layer.inputs if t.optional}  # for an absent one another tensor is passed
    array = next((p for p in arrays if p.role in ("output", "input") and p.argument not in optional), arrays[-1])
    pool = f"{_state(builder, move)}.shape[{move.axes.index(layer.batch)}]"
    return [
        f"heads = {array.name}.shape[{array.axes.index(layer.head)}]",
        "batch, head = ct.bid(0) // heads, ct.bid(0) % heads",
        *([] if row is None else [f"{row}_tile = ct.bid(1)"]),
        length_line(builder),
        "slot, into = batch, batch",
        f"if {indexed}:",
        *(f"    {name} = slot_at({array}, batch, {pool})" for name, array in zip(("slot", "into"), slots, strict=True)),
        *builder.position_lines("heads"),
    ]


def _knobs(form: ChunkForm, kernels: tuple[StepKernel, ...]) -> tuple[Knob, ...]:
    """The fields of the emitted StepConfig."""
    if not kernels:
        return ()
    row, _ = shared_axes(form)
    fields = [] if row is None else [(f"tile_{row}", TILE, f"tile of axis {row}, at most")]
    fields.append(("occupancy", OCCUPANCY, "blocks a multiprocessor, 0 to let the compiler choose"))
    fields.append(("warps", WARPS, "worker warps of a block, 0 to let the compiler choose"))
    return tuple(Knob(name, doc, tuple((d, value) for d in DTYPES)) for name, value, doc in fields)
