"""The walks: forward for the states that enter each chunk, back for the gradients that arrive at the end of each.

As in a segmented forward pass a sequence is cut into segments: a first kernel ends each from zero, a second begins with the
jump over the others.
"""

from __future__ import annotations

from dataclasses import replace

from ssdgen.ir.adjoint import Adjoint, StateAdjoint
from ssdgen.ir.chunkform import ChunkForm, ChunkState
from ssdgen.ir.expr import Apply, Ref, mul
from ssdgen.ir.gradients import BackKernel, EntryKernel
from ssdgen.ir.plan import (
    BLOCKS,
    CHUNKS,
    SEGMENTS,
    Config,
    If,
    Kernel,
    Let,
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
from ssdgen.plan.names import KEPT
from ssdgen.plan.place import SEGMENT_TABLE, declare_packed, walk_position
from ssdgen.plan.reach import back_over, since, until
from ssdgen.plan.segments import (
    RANGE,
    declare_segment,
    end_workspaces,
    jump_over,
    segment_end,
    segment_kernel,
    state_grid,
    state_tiles,
)
from ssdgen.plan.states import add_input, advance, at_block_end, place_blocks
from ssdgen.plan.walk import WalkBuilder, channels_of, entry_axes, entry_dtype

ENTRY, BACK = "entry_states", "state_gradients"
SEGMENT_BACK = "segment_gradients"


def end_name(state: StateAdjoint) -> str:
    """The buffer of what arrives at the end of each chunk of a state."""
    return f"{state.name}_end"


def starts_name(state: ChunkState) -> str:
    """The states that segments begin with, but for the first, where the forward pass kept them."""
    return f"{state.name}_starts"


def walk_workspaces(adjoint: Adjoint, config: Config) -> tuple[Workspace, ...]:
    """The buffers of entry states, and of gradients at the ends of chunks, in the dtype that products round them to; and what
    segments leave: of `cut.ends`, never of one, which would be a class of its own to compile for."""
    form, layer = adjoint.form, adjoint.form.recurrence.layer
    lengths = {CHUNKS: "cut.slots", layer.batch: "cut.lanes"}
    log2 = "the sum of the log2 decays of {} over each segment"
    stored: list[Workspace] = []
    ends: list[Workspace] = []
    passed: list[Workspace] = []
    for adj in adjoint.states:
        state = form.state(adj.state)
        axes, dtype = entry_axes(form, state), entry_dtype(state)
        shape = tuple(lengths.get(a, f"size_{a}") for a in axes)
        doc = f"the gradient of the state {state.name} at the end of each chunk"
        stored += [
            Workspace(f"{state.name}_entry", axes, shape, dtype, f"the state {state.name} that enters each chunk"),
            Workspace(end_name(adj), axes, shape, dtype, doc),
        ]
        docs = ("the state {} that each segment would end with if it began at zero", log2)
        ends += end_workspaces(form, config, state.name, state, "cut.ends", docs)
        docs = ("what each segment adds to the gradient of {} that arrives at its end", log2)
        passed += reversed(end_workspaces(form, config, adj.name, state, "cut.ends", docs))  # alike ones side by side
    return (*stored, *ends, *passed)


def kernels(adjoint: Adjoint, config: Config) -> tuple[list[Kernel], list[Kernel]]:
    """The walks of every state, forward and back."""
    form = adjoint.form
    forward: list[Kernel] = []
    for state in form.states:
        segment = replace(segment_kernel(form, config, state), role=ENTRY, occupancy=f"occupancy_{ENTRY}")
        forward += [replace(segment, condition=f"{starts_name(state)} is None"), _entry_kernel(form, config, state)]
    back: list[Kernel] = [_back_kernel(adjoint, config, adj, ends) for adj in adjoint.states for ends in (True, False)]
    return forward, back


def _builder(form: ChunkForm, config: Config, state: ChunkState, segment: str) -> WalkBuilder:
    builder = WalkBuilder(form, config, channels_of(state))
    declare_packed(builder, SEGMENT_TABLE)
    builder.places["workspace"][CHUNKS] = Slot(CHUNKS, "slot + chunk", "1")
    builder.place[SEGMENTS] = Slot(SEGMENTS, f"origin + {segment}", "1")
    builder.latencies = "state_latency"
    return builder


def _entry_kernel(form: ChunkForm, config: Config, state: ChunkState) -> EntryKernel:
    """The kernel that stores the state that enters each chunk."""
    builder = _builder(form, config, state, "before")
    channels = channels_of(state)
    carried = Ref(builder.names.of("state", f"{state.name}_tile"), channels)
    before: list[Statement] = [builder.initial(state, carried)]
    start = _start(builder, state, carried)
    skipped, jumps = since(builder, (state,))
    jump = tuple(jump_over(builder, state.name, state, carried))
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
        position=(*position, *skipped),
        start=start,
        jumps=jumps,
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


def _start(builder: WalkBuilder, state: ChunkState, carried: Ref) -> When:
    """Load what a segment begins with, of all but the first, if the forward pass kept it: the state at the end of a block."""
    name, (batch, *rest) = starts_name(state), state.axes
    builder.place[BLOCKS] = Slot(BLOCKS, "segment - 1", "1")
    starts = builder.declare(Parameter(name, "prefixes", name, (batch, BLOCKS, *rest), "f32"))
    return When(builder.flag("STARTED", name), (If("segment > 0", (builder.load_tile(starts, carried),)),))


def _back_kernel(adjoint: Adjoint, config: Config, adj: StateAdjoint, ends: bool) -> BackKernel:
    """The kernel that stores the gradient that arrives at the end of each chunk, and that of the initial state; or, if it only
    `ends`, the gradient that a segment leaves behind if none arrives at its own end."""
    form = adjoint.form
    state = form.state(adj.state)
    builder = _builder(form, config, state, "segment" if ends else "before")
    time, channels = builder.layer.time, channels_of(state)
    carried = Ref(builder.names.of("state", f"{adj.name}_tile"), channels)
    before: list[Statement] = [Zeros(carried)]
    behind: list[str] = []
    if not ends:
        final = builder.declare(Parameter(f"{adj.name}_final", "initial", f"{adj.name}_final", state.axes, "f32"))
        flag = builder.flag(f"WITH_{adj.name.upper()}", f"{adj.name}_final")
        before = [When(flag, (builder.load_tile(final, carried),), (Zeros(carried),))]
        behind = until(builder, state)
    jump = () if ends else tuple(jump_over(builder, adj.name, state, carried))
    step: list[Statement] = []
    builder.hoist = (time, before)
    load_arriving(builder, step, adjoint, reads=adj.reads)
    sums = decay_sums(builder, before, step, form.decay(state.decay), earlier=False, end=True)
    total = mul(grown(sums.end), carried)
    for name in adj.reads:
        read = form.read(name)
        d_read = builder.known[adjoint.of_read(name).name]
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
    enter: tuple[Statement, ...] = (_kept(builder, adj, state, carried),)
    if ends:
        stored, after = segment_end(builder, adj.name, state, carried, (before, step))
    else:
        name = end_name(adj)
        stored = builder.declare(Parameter(name, "workspace", name, entry_axes(form, state), entry_dtype(state)))
        enter += (Store(stored, builder.slots(stored), carried, channels),)
        first = builder.declare(Parameter(f"{adj.name}0", "final", f"{adj.name}0", state.axes, "f32"))
        store = Store(first, builder.slots(first), carried, builder.tile_axes(state.axes))
        after = (("segment == 0", (store,)),)
    walked = back_over(builder, state, ends)
    parameters, grid, position = _placed(builder, state, stored, before, step, walked, ends)
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
        position=(*position, *behind),
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


def _kept(builder: WalkBuilder, adj: StateAdjoint, state: ChunkState, carried: Ref) -> When:
    """Add what arrives at a state that a caller keeps, at the end of a whole block of tokens."""
    every, name = place_blocks(builder), f"{adj.name}_states"
    batch, *rest = state.axes
    kept = builder.declare(Parameter(name, "prefixes", name, (batch, BLOCKS, *rest), "f32"))
    tile = Ref(builder.names.fresh(f"{kept}_tile"), carried.axes)
    added = (builder.load_tile(kept, tile), Let(carried, Apply("add", (carried, tile))))
    return at_block_end(builder, builder.flag(KEPT, name), every, added)


def _placed(
    builder: WalkBuilder,
    state: ChunkState,
    stored: str,
    before: list[Statement],
    step: list[Statement],
    walked: tuple[str, ...] = (),
    ends: bool = False,
) -> tuple[tuple[Parameter, ...], tuple[str, ...], tuple[str, ...]]:
    """What all walks have: parameters, a grid of walks, segments and tiles of the state, and the lines that place a block,
    of one that walks back with those of `walked`."""
    layer, channels = builder.layer, channels_of(state)
    declare_segment(builder, channels)
    builder.finish(before, step)
    array = builder.parameters[stored]
    heads = f"{stored}.shape[{array.axes.index(layer.head)}]"
    position = [
        *walk_position(builder, heads, segmented=True, ends=ends, back=bool(walked)),
        *state_tiles(array, channels),
        *walked,
        *builder.position_lines("heads"),
    ]
    segments = "cut.inner" if ends else "cut.segments"
    grid = (f"cut.walks * size_{layer.head}", segments, state_grid(channels))
    return builder.ordered_parameters(), grid, tuple(position)
