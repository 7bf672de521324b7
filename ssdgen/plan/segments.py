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
from ssdgen.plan.reach import remembered, since
from ssdgen.plan.reads import Parts, combine, contract, output, shared_axes
from ssdgen.plan.states import advance, keep, keep_ends
from ssdgen.plan.walk import WalkBuilder, channels_of, tile_constant

STATES, WALK = "segment_states", "walk_out"
END = "ct.minimum(ct.cdiv(length, CHUNK), (segment + 1) * per_segment)"
RANGE = f"segment * per_segment, {END}"


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

    part, after = segment_end(builder, state.name, state, carried, (before, step), builder.latency(state.name))
    declare_segment(builder, channels)
    begin = remembered(builder, state)
    builder.finish(before, step)
    stored = builder.parameters[part]
    heads = f"{part}.shape[{stored.axes.index(layer.head)}]"
    tiles = state_tiles(stored, channels)
    placed = walk_position(builder, heads, segmented=True, ends=True)
    position = [*placed, *tiles, *builder.position_lines("heads"), *begin]
    return StateKernel(
        name=STATES if len(form.states) == 1 else f"{STATES}_{state.name}",
        role="fwd_pass_state",
        doc=f"The state {state.name} that a segment would end with if it began at zero, and the sum of its log2 decays.",
        parameters=builder.ordered_parameters(),
        grid=(f"cut.walks * size_{layer.head}", "cut.inner", state_grid(channels)),
        position=tuple(position),
        occupancy="occupancy_fwd_pass_state",
        chunks=f"begin, {END}",
        before=tuple(before),
        enter=(),
        step=tuple(step),
        after=after,
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
    skipped, jumps = since(builder, form.states) if segmented else ([], "")
    jump: list[Statement] = []
    for state in form.states if segmented else ():
        jump += jump_over(builder, state.name, state, carried[state.name])

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
    ended = [(s, carried[s.name], owned[s.name]) for s in form.states]
    moves.append(keep(builder, *ended))
    ends = ("last",) if segmented else ()
    after = tuple(_final(builder, s, carried[s.name], *ends, *owned[s.name]) for s in form.states)
    if segmented:
        after = (*after, ("", (keep_ends(builder, *ended),)))
        builder.declare(Parameter("per_segment", "scalar", "cut.per_segment", dtype="i32"))
    builder.constant("chunk")
    builder.constant(f"tile_{column}", f"size_{column}")
    if row is not None:
        builder.constant(f"tile_{row}")
    builder.finish(parts.before, parts.contract, parts.combine, parts.outputs, moves, jump)
    first = next(p for p in builder.parameters.values() if p.role == "final")
    rows = [f"{row}_tile = ct.bid({2 if segmented else 1})"] if row is not None else []
    heads = f"{first.name}.shape[{first.axes.index(layer.head)}]"
    placed = walk_position(builder, heads, segmented, ends=False)
    position = [*placed, *rows, *builder.position_lines("heads"), *skipped]
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
        jumps=jumps,
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
    docs = (
        "the state {} that each segment would end with if it began at zero",
        "the sum of the log2 decays of {} over each segment",
    )
    return tuple(w for s in form.states for w in end_workspaces(form, config, s.name, s, "cut.parts", docs))


def end_workspaces(
    form: ChunkForm, config: Config, name: str, state: ChunkState, segments: str, docs: tuple[str, str]
) -> tuple[Workspace, ...]:
    """What a walk called `name` leaves of each segment, `segments` in number: its end, and the sum of the decays of `state` if
    that has any and no state before has the same. `docs` say what each is, with {} for the state."""
    lengths = {SEGMENTS: segments, form.recurrence.layer.batch: "cut.lanes"}
    buffers = [(_part(form, config, name, state), docs[0])]
    if form.decay(state.decay).kind != "none" and _first(form, state) == state:
        buffers.append((_left(form, name, state), docs[1]))
    return tuple(
        Workspace(p.name, p.axes, tuple(lengths.get(a, f"size_{a}") for a in p.axes), "f32", doc.format(state.name))
        for p, doc in buffers
    )


def segment_end(
    builder: WalkBuilder,
    name: str,
    state: ChunkState,
    carried: Ref,
    sections: tuple[list[Statement], list[Statement]],
    latency: str | None = None,
) -> tuple[str, tuple[tuple[str, tuple[Statement, ...]], ...]]:
    """The buffer of the end of a segment that a walk called `name` leaves, and the stores of it and of the sum of the decays of
    `state`, for which statements are appended to `sections`, before the loop and in it."""
    part = builder.declare(_part(builder.form, builder.config, name, state))
    stores = [
        ("", (Store(part, builder.slots(part), carried, builder.tile_axes(builder.parameters[part].axes), latency),))
    ]
    ends = builder.known.get(f"end {state.decay}")
    if ends is not None and _first(builder.form, state) == state:
        before, step = sections
        left = Ref(builder.names.fresh(f"{name}_left_tile"))
        before.append(Zeros(left))
        step.append(Let(left, Apply("add", (left, ends))))
        total = builder.declare(_left(builder.form, name, state))
        stores.append(("ct.bid(2) == 0", (Store(total, builder.slots(total), left, ()),)))
    return part, tuple(stores)


def jump_over(builder: WalkBuilder, name: str, state: ChunkState, carried: Ref) -> list[Statement]:
    """carried = 2^left carried + part: over one segment, whose end a walk called `name` left."""
    form = builder.form
    statements: list[Statement] = []
    kept: Expr = carried
    if form.decay(state.decay).kind != "none":
        left = builder.declare(_left(form, name, state))
        key = f"before {left}"
        if key not in builder.known:
            builder.known[key] = Ref(builder.names.fresh(f"{left}_tile"))
            statements.append(Load(builder.known[key], left, builder.slots(left)))
        kept = mul(exp2(builder.known[key]), carried)
    part = builder.declare(_part(form, builder.config, name, state))
    tile = Ref(builder.names.fresh(f"{part}_tile"), carried.axes)
    statements.append(Load(tile, part, builder.slots(part), builder.latency(state.name)))
    statements.append(Let(carried, Apply("add", (kept, tile))))
    return statements


def declare_segment(builder: WalkBuilder, channels: Axes) -> None:
    """Declare what a walk over a segment with a tile of the state takes besides arrays."""
    builder.declare(Parameter("per_segment", "scalar", "cut.per_segment", dtype="i32"))
    builder.constant("chunk")
    for axis in channels:
        builder.constant(f"tile_{axis}", f"state_tile_{axis}")


def state_tiles(stored: Parameter, channels: Axes) -> list[str]:
    """The assignments that place a block at its tile of the state, which `stored` is an array of."""
    column = channels[-1]
    if len(channels) == 1:
        return [f"{column}_tile = ct.bid(2)"]
    tiles, row = f"{column}_tiles", channels[0]
    return [
        f"{tiles} = ct.cdiv({stored.name}.shape[{stored.axes.index(column)}], {tile_constant(column)})",
        f"{row}_tile, {column}_tile = ct.bid(2) // {tiles}, ct.bid(2) % {tiles}",
    ]


def state_grid(channels: Axes) -> str:
    """The number of tiles of a state."""
    return " * ".join(f"_rt.ceil_div(size_{a}, config.state_tile_{a})" for a in channels)


def _layout(config: Config, state: ChunkState) -> Axes:
    """The axes of a carried tile: (column, row), an operand of the `carried` product as it stands, unless swapped."""
    channels = channels_of(state)
    return channels if "state" in config.swap else channels[::-1]


def _walks(form: ChunkForm) -> Axes:
    layer = form.recurrence.layer
    return (layer.batch, layer.head, SEGMENTS)


def _part(form: ChunkForm, config: Config, name: str, state: ChunkState) -> Parameter:
    return Parameter(f"{name}_part", "workspace", f"{name}_part", (*_walks(form), *_layout(config, state)), "f32")


def _first(form: ChunkForm, state: ChunkState) -> ChunkState:
    """The first state with the decay of `state`, whose walks leave the sums of that decay for all such states."""
    return next(s for s in form.states if s.decay == state.decay)


def _left(form: ChunkForm, name: str, state: ChunkState) -> Parameter:
    """The sums of the decay of `state` that a walk called `name`, after the state or a gradient of it, jumps over segments by.
    Segments come first: with them last, its strides would be of another class, to be compiled for, from length to length."""
    layer = form.recurrence.layer
    own = f"{'' if name == state.name else 'd_'}{_first(form, state).name}_left"
    return Parameter(own, "workspace", own, (SEGMENTS, layer.batch, layer.head), "f32")


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
