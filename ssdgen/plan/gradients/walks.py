"""The walks: forward for the states that enter each chunk, back for the gradients that arrive at the end of each.

As in a segmented forward pass a sequence is cut into segments: a first kernel ends each from zero, a second begins with the
jump over the others.
"""

from __future__ import annotations

from dataclasses import replace

from ssdgen.ir.adjoint import Adjoint, StateAdjoint
from ssdgen.ir.chunkform import ChunkForm, ChunkState
from ssdgen.ir.expr import Apply, Axes, Expr, Ref, mul
from ssdgen.ir.gradients import BackKernel, EntryKernel
from ssdgen.ir.plan import (
    CHUNKS,
    SEGMENTS,
    Config,
    Kernel,
    Let,
    Load,
    Parameter,
    Slot,
    Statement,
    Store,
    When,
    Workspace,
    Zeros,
)
from ssdgen.plan.decays import decay_sums, grown
from ssdgen.plan.gradients.arriving import load_arriving
from ssdgen.plan.lower import exp2
from ssdgen.plan.place import SEGMENT_TABLE, declare_packed, walk_position
from ssdgen.plan.segments import RANGE, segment_kernel, segment_workspaces
from ssdgen.plan.states import add_input, advance
from ssdgen.plan.walk import WalkBuilder, channels_of, entry_axes, entry_dtype, tile_constant

ENTRY, BACK = "entry_states", "state_gradients"
SEGMENT_BACK = "segment_gradients"


def end_name(state: StateAdjoint) -> str:
    """The buffer of what arrives at the end of each chunk of a state."""
    return f"{state.name}_end"


def walk_workspaces(adjoint: Adjoint, config: Config) -> tuple[Workspace, ...]:
    """The buffers of entry states, and of gradients at the ends of chunks, in the dtype that products round them to; and what
    segments leave."""
    form, layer = adjoint.form, adjoint.form.recurrence.layer
    out = []
    for adj in adjoint.states:
        state = form.state(adj.state)
        axes, dtype = entry_axes(form, state), entry_dtype(state)
        lengths = {CHUNKS: "cut.slots", SEGMENTS: "cut.ends", layer.batch: "cut.lanes"}
        shape = tuple(lengths.get(a, f"size_{a}") for a in axes)
        out.append(
            Workspace(f"{state.name}_entry", axes, shape, dtype, f"the state {state.name} that enters each chunk")
        )
        doc = f"the gradient of the state {state.name} at the end of each chunk"
        out.append(Workspace(end_name(adj), axes, shape, dtype, doc))
    for buffer in segment_workspaces(form, config):  # never of one segment: a class of its own, to be compiled for
        out.append(
            replace(buffer, shape=tuple("cut.ends" if length == "cut.parts" else length for length in buffer.shape))
        )
    for adj in adjoint.states:
        part, left = _part(form, adj.name, form.state(adj.state)), _left(form, adj.name)
        doc = f"what each segment adds to the gradient of {adj.state} that arrives at its end"
        out.append(Workspace(part.name, part.axes, tuple(lengths.get(a, f"size_{a}") for a in part.axes), "f32", doc))
        if form.decay(form.state(adj.state).decay).kind != "none":
            shape = tuple(lengths.get(a, f"size_{a}") for a in left.axes)
            doc = f"the sum of the log2 decays of {adj.state} over each segment"
            out.append(Workspace(left.name, left.axes, shape, "f32", doc))
    return tuple(out)


def kernels(adjoint: Adjoint, config: Config) -> tuple[list[Kernel], list[Kernel]]:
    """The walks of every state, forward and back."""
    form = adjoint.form
    forward: list[Kernel] = []
    for state in form.states:
        segment = segment_kernel(form, config, state)
        forward += [replace(segment, role=ENTRY, occupancy=f"occupancy_{ENTRY}"), _entry_kernel(form, config, state)]
    back: list[Kernel] = [_back_kernel(adjoint, config, adj, ends) for adj in adjoint.states for ends in (True, False)]
    return forward, back


def _part(form: ChunkForm, name: str, state: ChunkState) -> Parameter:
    """The buffer of a segment's end, from zero."""
    layer = form.recurrence.layer
    axes = (layer.batch, layer.head, SEGMENTS, *channels_of(state))
    return Parameter(f"{name}_part", "workspace", f"{name}_part", axes, "f32")


def _left(form: ChunkForm, name: str) -> Parameter:
    """The buffer of the sum of a segment's log2 decays; segments come first, as in a forward pass."""
    layer = form.recurrence.layer
    return Parameter(f"{name}_left", "workspace", f"{name}_left", (SEGMENTS, layer.batch, layer.head), "f32")


def _builder(form: ChunkForm, config: Config, state: ChunkState, segment: str) -> WalkBuilder:
    builder = WalkBuilder(form, config, channels_of(state))
    declare_packed(builder, SEGMENT_TABLE)
    builder.places["workspace"][CHUNKS] = Slot(CHUNKS, "slot + chunk", "1")
    builder.place[SEGMENTS] = Slot(SEGMENTS, f"origin + {segment}", "1")
    builder.latencies = "state_latency"
    return builder


def _jump(builder: WalkBuilder, name: str, state: ChunkState, carried: Ref) -> tuple[Statement, ...]:
    """The state moved over one segment: 2^left state + part."""
    statements: list[Statement] = []
    kept: Expr = carried
    if builder.form.decay(state.decay).kind != "none":
        left = builder.declare(_left(builder.form, name))
        tile = Ref(builder.names.fresh(f"{left}_tile"))
        statements.append(Load(tile, left, builder.slots(left)))
        kept = mul(exp2(tile), carried)
    part = builder.declare(_part(builder.form, name, state))
    tile = Ref(builder.names.fresh(f"{part}_tile"), carried.axes)
    statements.append(Load(tile, part, builder.slots(part), builder.latency(state.name)))
    return (*statements, Let(carried, Apply("add", (kept, tile))))


def _entry_kernel(form: ChunkForm, config: Config, state: ChunkState) -> EntryKernel:
    """The kernel that stores the state that enters each chunk."""
    builder = _builder(form, config, state, "before")
    channels = channels_of(state)
    carried = Ref(builder.names.of("state", f"{state.name}_tile"), channels)
    before: list[Statement] = [builder.initial(state, carried)]
    jump = _jump(builder, state.name, state, carried)
    step: list[Statement] = []
    builder.hoist = (builder.layer.time, before)
    advance(builder, state, carried, before, step)
    name = f"{state.name}_entry"
    entry = builder.declare(Parameter(name, "workspace", name, entry_axes(form, state), entry_dtype(state)))
    enter = (Store(entry, builder.slots(entry), carried, channels, builder.latency(state.name)),)
    parameters, grid, position = _placed(builder, state, entry, before, step)
    return EntryKernel(
        parameters=parameters,
        grid=grid,
        position=position,
        name=ENTRY if len(form.states) == 1 else f"{ENTRY}_{state.name}",
        role=ENTRY,
        doc=f"The state {state.name} that enters each chunk: a block walks the chunks of a segment with a tile of the state in"
        " registers.",
        occupancy=f"occupancy_{ENTRY}",
        chunks=RANGE,
        before=tuple(before),
        jump=jump,
        enter=enter,
        step=tuple(step),
        after=(),
    )


def _back_kernel(adjoint: Adjoint, config: Config, adj: StateAdjoint, ends: bool) -> BackKernel:
    """The kernel that stores the gradient that arrives at the end of each chunk, and that of the initial state; or, if it only
    `ends`, the gradient that a segment leaves behind if none arrives at its own end."""
    form = adjoint.form
    state = form.state(adj.state)
    builder = _builder(form, config, state, "segment" if ends else "before")
    time, channels = builder.layer.time, channels_of(state)
    carried = Ref(builder.names.of("state", f"{adj.name}_tile"), channels)
    before: list[Statement] = [Zeros(carried)]
    if not ends:
        final = builder.declare(Parameter(f"{adj.name}_final", "initial", f"{adj.name}_final", state.axes, "f32"))
        flag = builder.flag(f"WITH_{adj.name.upper()}", f"{adj.name}_final")
        before = [When(flag, (builder.load_tile(final, carried),), (Zeros(carried),))]
    jump = () if ends else _jump(builder, adj.name, state, carried)
    step: list[Statement] = []
    builder.hoist = (time, before)
    load_arriving(builder, step, adjoint, reads=adj.reads)
    sums = decay_sums(builder, before, step, form.decay(state.decay), earlier=False, end=True)
    total = mul(grown(sums.end), carried)
    for name in adj.reads:
        read = next(r for r in form.reads if r.name == name)
        d_read = builder.known[next(g.name for g in adjoint.reads if isinstance(g.of, Ref) and g.of.name == name)]
        vector = builder.column(step, read.vector, state.column_axis)
        weight = grown(sums.through)
        if builder.natural(weight):
            weight = builder.name_value(step, "weight", weight, "what is left of the state at a token")
        if state.row_axis is None:
            step.append(add_input(builder, carried, total, mul(weight, builder.widened(d_read)), None, vector))
        else:
            step.append(add_input(builder, carried, total, weight, d_read, vector))
        total = carried
    if not adj.reads:
        step.append(Let(carried, total))
    enter: tuple[Statement, ...] = ()
    if ends:
        stored, after = _segment_end(builder, adj, state, carried, before, step)
    else:
        name = end_name(adj)
        stored = builder.declare(Parameter(name, "workspace", name, entry_axes(form, state), entry_dtype(state)))
        enter = (Store(stored, builder.slots(stored), carried, channels),)
        first = builder.declare(Parameter(f"{adj.name}0", "final", f"{adj.name}0", state.axes, "f32"))
        store = Store(first, builder.slots(first), carried, builder.tile_axes(state.axes))
        after = (("segment == 0", (store,)),)
    parameters, grid, position = _placed(builder, state, stored, before, step, back=True, ends=ends)
    name, doc = (
        BACK,
        "at the end of each chunk, and of the initial one: a block walks back over the chunks of a segment",
    )
    if ends:
        name, doc = (
            SEGMENT_BACK,
            "that a segment passes on if none arrives at its end: a block walks back over its chunks",
        )
    return BackKernel(
        parameters=parameters,
        grid=grid,
        position=position,
        name=name if len(form.states) == 1 else f"{name}_{state.name}",
        role=BACK,
        doc=f"The gradient of the state {state.name} {doc} with a tile of it in registers.",
        occupancy=f"occupancy_{BACK}",
        chunks="chunks",
        before=tuple(before),
        jump=jump,
        enter=enter,
        step=tuple(step),
        after=after,
    )


def _segment_end(
    builder: WalkBuilder,
    adj: StateAdjoint,
    state: ChunkState,
    carried: Ref,
    before: list[Statement],
    step: list[Statement],
) -> tuple[str, tuple[tuple[str, tuple[Statement, ...]], ...]]:
    """The stores of a segment's end and of the sum of its decays, which `step` adds up."""
    part = builder.declare(_part(builder.form, adj.name, state))
    axes: Axes = builder.parameters[part].axes
    after: list[tuple[str, tuple[Statement, ...]]] = [
        ("", (Store(part, builder.slots(part), carried, builder.tile_axes(axes)),))
    ]
    ends = builder.known.get(f"end {state.decay}")
    if ends is not None:
        left = Ref(builder.names.fresh(f"{adj.name}_left_tile"))
        before.append(Zeros(left))
        step.append(Let(left, Apply("add", (left, ends))))
        total = builder.declare(_left(builder.form, adj.name))
        after.append(("ct.bid(2) == 0", (Store(total, builder.slots(total), left, ()),)))
    return part, tuple(after)


def _placed(
    builder: WalkBuilder,
    state: ChunkState,
    stored: str,
    before: list[Statement],
    step: list[Statement],
    *,
    back: bool = False,
    ends: bool = False,
) -> tuple[tuple[Parameter, ...], tuple[str, ...], tuple[str, ...]]:
    """What all walks have: parameters, a grid of walks, segments and tiles of the state, and the lines that place a block."""
    layer, channels = builder.layer, channels_of(state)
    column = channels[-1]
    builder.declare(Parameter("per_segment", "scalar", "cut.per_segment", dtype="i32"))
    builder.constant("chunk")
    for axis in channels:
        builder.constant(f"tile_{axis}", f"state_tile_{axis}")
    builder.finish(before, step)
    axes = builder.parameters[stored].axes
    tiles = f"{column}_tiles"
    heads = f"{stored}.shape[{axes.index(layer.head)}]"
    walked = [
        "begin = segment * per_segment",
        "chunks = ct.minimum(ct.cdiv(length, CHUNK), begin + per_segment) - begin",
    ]
    place = [f"{column}_tile = ct.bid(2)"]
    if len(channels) == 2:
        place = [
            f"{tiles} = ct.cdiv({stored}.shape[{axes.index(column)}], {tile_constant(column)})",
            f"{channels[0]}_tile, {column}_tile = ct.bid(2) // {tiles}, ct.bid(2) % {tiles}",
        ]
    position = [
        *walk_position(builder, heads, segmented=True, ends=ends, back=back),
        *place,
        *(walked if back else []),
        *builder.position_lines("heads"),
    ]
    grid = " * ".join(f"_rt.ceil_div(size_{a}, config.state_tile_{a})" for a in channels)
    segments = "cut.inner" if ends else "cut.segments"
    return builder.ordered_parameters(), (f"cut.walks * size_{layer.head}", segments, grid), tuple(position)
