"""The kernels of `segmented` and `single_walk`: one walk computes the outputs with the states in registers.

A sequence is cut into segments. `segment_states` computes, for all but the last at once, the state each would end with if
it began at zero, and the sum of its log2 decays. `walk_out` starts from the state that enters its segment, by the jump
formula over the segments before it, and writes nothing but outputs. With one segment only the walk is left.
"""

from __future__ import annotations

from functools import partial

from ssdgen.ir.chunkform import ChunkForm, ChunkState
from ssdgen.ir.expr import Apply, Axes, Expr, Ref, mul
from ssdgen.ir.plan import (
    KEY,
    SEGMENTS,
    Config,
    Let,
    Load,
    Parameter,
    Slot,
    StateKernel,
    Statement,
    Store,
    WalkKernel,
    Workspace,
    Zeros,
)
from ssdgen.plan.lower import exp2
from ssdgen.plan.place import SEGMENT_TABLE, declare_packed, walk_position
from ssdgen.plan.reads import Parts, combine, contract, output, shared_axes
from ssdgen.plan.states import advance, keep
from ssdgen.plan.walk import WalkBuilder, channels_of, tile_constant

STATES, WALK = "segment_states", "walk_out"
RANGE = "segment * per_segment, ct.minimum(ct.cdiv(length, CHUNK), (segment + 1) * per_segment)"


def segment_kernel(form: ChunkForm, config: Config, state: ChunkState) -> StateKernel:
    """The kernel that ends each segment from zero."""
    layer = form.recurrence.layer
    channels = channels_of(state)
    builder = WalkBuilder(form, config, channels)
    builder.place[SEGMENTS] = Slot(SEGMENTS, "origin + segment", "1")
    declare_packed(builder, SEGMENT_TABLE)
    builder.latencies = "state_latency"
    carried = Ref(builder.names.of("state", f"{state.name}_tile"), channels)
    before: list[Statement] = [Zeros(carried)]
    step: list[Statement] = []
    builder.hoist = (layer.time, before)
    advance(builder, state, carried, before, step)

    part = builder.declare(_part(form, config, state))
    after: list[tuple[str, tuple[Statement, ...]]] = []
    ends = builder.known.get(f"end {state.decay}")
    if ends is not None:
        left = Ref(builder.names.fresh(f"{state.name}_left_tile"))
        before.append(Zeros(left))
        step.append(Let(left, Apply("add", (left, ends))))
        total = builder.declare(_left(form, state))
        after.append(("ct.bid(2) == 0", (Store(total, builder.slots(total), left, ()),)))
    axes = builder.parameters[part].axes
    store = Store(part, builder.slots(part), carried, builder.tile_axes(axes), builder.latency(state.name))
    after.insert(0, ("", (store,)))
    builder.declare(Parameter("per_segment", "scalar", "cut.per_segment", dtype="i32"))
    builder.constant("chunk")
    for axis in channels:
        builder.constant(f"tile_{axis}", f"state_tile_{axis}")
    builder.finish(before, step)
    tiled = f"{channels[-1]}_tiles"
    place = [f"{channels[-1]}_tile = ct.bid(2)"]
    if len(channels) == 2:
        at = axes.index(channels[1])
        place = [
            f"{tiled} = ct.cdiv({part}.shape[{at}], {tile_constant(channels[1])})",
            f"{channels[0]}_tile, {channels[1]}_tile = ct.bid(2) // {tiled}, ct.bid(2) % {tiled}",
        ]
    heads = f"{part}.shape[{axes.index(layer.head)}]"
    position = [
        *walk_position(builder, heads, segmented=True, ends=True), *place, *builder.position_lines("heads")
    ]  # fmt: skip
    grid = " * ".join(f"_rt.ceil_div(size_{a}, config.state_tile_{a})" for a in channels)
    return StateKernel(
        name=STATES if len(form.states) == 1 else f"{STATES}_{state.name}",
        role="fwd_pass_state",
        doc=f"The state {state.name} that a segment would end with if it began at zero, and the sum of its log2 decays.",
        parameters=builder.ordered_parameters(),
        grid=(f"cut.walks * size_{layer.head}", "cut.inner", grid),
        position=tuple(position),
        occupancy="occupancy_fwd_pass_state",
        chunks=RANGE,
        before=tuple(before),
        enter=(),
        step=tuple(step),
        after=tuple(after),
    )


def walk_kernel(form: ChunkForm, config: Config, segmented: bool) -> WalkKernel:
    """The kernel that walks a segment, or the sequence."""
    layer = form.recurrence.layer
    row, column = shared_axes(form)
    channels = (column,) if row is None else (row, column)
    builder = WalkBuilder(form, config, channels)
    builder.place[column] = Slot(column, "0", tile_constant(column))
    builder.place[SEGMENTS] = Slot(SEGMENTS, "origin + before", "1")
    declare_packed(builder, SEGMENT_TABLE)
    builder.places["workspace"][KEY] = Slot(KEY, "0", "CHUNK")
    parts = Parts(builder, row, column, walks=True)

    carried = {s.name: Ref(builder.names.of("state", f"{s.name}_tile"), _layout(config, s)) for s in form.states}
    entered: list[Statement] = [builder.initial(s, carried[s.name]) for s in form.states]
    jump = [s for state in form.states for s in _jump(builder, state, carried[state.name])] if segmented else []

    builder.hoist = (layer.time, parts.before)
    totals = [contract(parts, r, partial(carried.__getitem__, r.state)) for r in form.reads]
    for read, total in zip(form.reads, totals, strict=True):
        builder.known[read.name] = combine(parts, read, total)
    for declared in layer.outputs:
        output(parts, declared)
    moves: list[Statement] = []
    for state in form.states:
        advance(builder, state, carried[state.name], parts.before, moves)
    owned = {s.name: _owned(form, s) for s in form.states}
    moves.append(keep(builder, *((s, carried[s.name], owned[s.name]) for s in form.states)))
    ends = ("last",) if segmented else ()
    after = tuple(_final(builder, s, carried[s.name], *ends, *owned[s.name]) for s in form.states)
    if segmented:
        builder.declare(Parameter("per_segment", "scalar", "cut.per_segment", dtype="i32"))
    builder.constant("chunk")
    builder.constant(f"tile_{column}", f"size_{column}")
    if row is not None:
        builder.constant(f"tile_{row}")
    builder.finish(parts.before, parts.contract, parts.combine, parts.outputs, moves, jump)
    first = next(p for p in builder.parameters.values() if p.role == "final")
    rows = [f"{row}_tile = ct.bid({2 if segmented else 1})"] if row is not None else []
    heads = f"{first.name}.shape[{first.axes.index(layer.head)}]"
    position = [*walk_position(builder, heads, segmented, ends=False), *rows, *builder.position_lines("heads")]
    row_tiles = () if row is None else (f"_rt.ceil_div(size_{row}, config.tile_{row})",)
    return WalkKernel(
        name=WALK,
        role="compute_out",
        doc="The outputs of a segment: a block walks its chunks with the states in registers." if segmented else
        "The outputs of a sequence: a block walks its chunks with the states in registers.",
        parameters=builder.ordered_parameters(),
        grid=(f"cut.walks * size_{layer.head}", *(("cut.segments",) if segmented else ()), *row_tiles),
        position=tuple(position),
        occupancy="occupancy_compute_out",
        before=(*parts.before, *entered),
        jump=tuple(jump),
        chunks=RANGE if segmented else "ct.cdiv(length, CHUNK)",
        accumulators=tuple(parts.accumulators),
        contract=tuple(parts.contract),
        combine=tuple(parts.combine),
        outputs=tuple(parts.outputs),
        advance=tuple(moves),
        after=after,
    )  # fmt: skip


def segment_workspaces(form: ChunkForm, config: Config) -> tuple[Workspace, ...]:
    """The end states of segments, and the sums of their decays: for all segments but the last, which nothing enters."""
    out = []
    for state in form.states:
        part = _part(form, config, state)
        lengths = {SEGMENTS: "cut.parts", form.recurrence.layer.batch: "cut.lanes"}
        shape = tuple(lengths.get(a, f"size_{a}") for a in part.axes)
        doc = f"the state {state.name} that each segment would end with if it began at zero"
        out.append(Workspace(part.name, part.axes, shape, "f32", doc))
        if form.decay(state.decay).kind != "none":
            left = _left(form, state)
            doc = f"the sum of the log2 decays of {state.name} over each segment"
            shape = tuple(lengths.get(a, f"size_{a}") for a in left.axes)
            out.append(Workspace(left.name, left.axes, shape, "f32", doc))
    return tuple(out)


def _layout(config: Config, state: ChunkState) -> Axes:
    """The axes of a carried tile: (column, row), an operand of the `carried` product as it stands, unless swapped."""
    channels = channels_of(state)
    return channels if "state" in config.swap else channels[::-1]


def _walks(form: ChunkForm) -> Axes:
    layer = form.recurrence.layer
    return (layer.batch, layer.head, SEGMENTS)


def _part(form: ChunkForm, config: Config, state: ChunkState) -> Parameter:
    name = f"{state.name}_part"
    return Parameter(name, "workspace", name, (*_walks(form), *_layout(config, state)), "f32")


def _left(form: ChunkForm, state: ChunkState) -> Parameter:
    """Segments come first: with them last, its strides would be of another class, to be compiled for, from length to length."""
    name, layer = f"{state.name}_left", form.recurrence.layer
    return Parameter(name, "workspace", name, (SEGMENTS, layer.batch, layer.head), "f32")


def _jump(builder: WalkBuilder, state: ChunkState, carried: Ref) -> list[Statement]:
    """S = 2^left S + part: over one segment before this one."""
    form = builder.form
    statements: list[Statement] = []
    kept: Expr = carried
    if form.decay(state.decay).kind != "none":
        left = builder.declare(_left(form, state))
        tile = Ref(builder.names.fresh(f"{left}_tile"))
        statements.append(Load(tile, left, builder.slots(left)))
        kept = mul(exp2(tile), carried)
    part = builder.declare(_part(form, builder.config, state))
    tile = Ref(builder.names.fresh(f"{part}_tile"), carried.axes)
    statements.append(Load(tile, part, builder.slots(part), builder.latency(state.name)))
    statements.append(Let(carried, Apply("add", (kept, tile))))
    return statements


def _owned(form: ChunkForm, state: ChunkState) -> tuple[str, ...]:
    """Which blocks store a state: of a vector state, which those of all rows have, those of the first rows."""
    row, _ = shared_axes(form)
    return (f"{row}_tile == 0",) if state.row_axis is None and row is not None else ()


def _final(
    builder: WalkBuilder, state: ChunkState, carried: Ref, *conditions: str
) -> tuple[str, tuple[Statement, ...]]:
    """The store of a final state."""
    name = f"{state.name}_final"
    final = builder.declare(Parameter(name, "final", name, state.axes, "f32"))
    store = Store(final, builder.slots(final), carried, builder.tile_axes(state.axes))
    return " and ".join(conditions), (store,)
