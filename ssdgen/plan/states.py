"""The kernel `fwd_pass_state`, one for each state: walk the chunks with the state in registers, store what enters each."""

from __future__ import annotations

from collections.abc import Sequence

from ssdgen.ir.chunkform import ChunkForm, ChunkState
from ssdgen.ir.expr import ONE, Apply, Contract, Expr, Ref, mul
from ssdgen.ir.plan import (
    BLOCKS,
    CHUNKS,
    Config,
    Dot,
    If,
    Let,
    Parameter,
    Slot,
    StateKernel,
    Statement,
    Store,
    When,
    Workspace,
)
from ssdgen.plan.builder import Unsupported
from ssdgen.plan.decays import decay_sums, decayed, grown, weight_tile
from ssdgen.plan.names import ENDS, EVERY, KEPT, PACKED
from ssdgen.plan.place import length_line
from ssdgen.plan.walk import WalkBuilder, channels_of, entry_axes, entry_dtype

ROLE = "fwd_pass_state"

Carried = tuple[ChunkState, Ref, tuple[str, ...]]
"""A state, the tile that is carried, and the conditions under which a thread block is the one that stores it."""


def state_kernel(form: ChunkForm, config: Config, state: ChunkState) -> StateKernel:
    """The kernel that advances `state` and stores the state that enters each chunk."""
    layer = form.recurrence.layer
    channels = channels_of(state)
    builder = WalkBuilder(form, config, channels)
    builder.latencies = "state_latency"
    swapped = "state" in config.swap
    carried = Ref(builder.names.of("state", f"{state.name}_tile"), channels[::-1] if swapped else channels)
    before: list[Statement] = [builder.initial(state, carried)]
    step: list[Statement] = []
    builder.hoist = (layer.time, before)
    advance(builder, state, carried, before, step)

    entry = f"{state.name}_entry"
    entry = builder.declare(Parameter(entry, "workspace", entry, entry_axes(form, state), entry_dtype(state)))
    final = f"{state.name}_final"
    final = builder.declare(Parameter(final, "final", final, state.axes, "f32"))
    latency = builder.latency(state.name)
    enter: list[Statement] = [Store(entry, builder.slots(entry), carried, channels, latency)]
    step.append(keep(builder, (state, carried, ())))
    kept = builder.tile_axes(state.axes)
    after: list[Statement] = [Store(final, builder.slots(final), carried, kept)]
    builder.constant("chunk")
    for axis in channels:
        builder.constant(f"tile_{axis}", f"state_tile_{axis}")
    builder.finish(before, step)
    tiles = ", ".join(f"{a}_tile" for a in channels)
    position = [
        f"heads = {final}.shape[{state.axes.index(layer.head)}]",
        "batch, head = ct.bid(0) // heads, ct.bid(0) % heads",
        f"{tiles} = {', '.join(f'ct.bid({i + 1})' for i in range(len(channels)))}",
        length_line(builder),
        *builder.position_lines("heads"),
    ]
    return StateKernel(
        name=ROLE if len(form.states) == 1 else f"{ROLE}_{state.name}",
        role=ROLE,
        doc=f"The state {state.name} that enters each chunk, and the final one: a block walks the chunks of one sequence"
        " and head with a tile of the state in registers.",
        parameters=builder.ordered_parameters(),
        grid=(
            f"size_{layer.batch} * size_{layer.head}",
            *(f"_rt.ceil_div(size_{a}, config.state_tile_{a})" for a in channels),
        ),
        position=tuple(position),
        occupancy=f"occupancy_{ROLE}",
        chunks="ct.cdiv(length, CHUNK)",
        before=tuple(before),
        enter=tuple(enter),
        step=tuple(step),
        after=(("", tuple(after)),),
    )


def advance(
    builder: WalkBuilder, state: ChunkState, carried: Ref, before: list[Statement], step: list[Statement]
) -> None:
    """Append to `step` the jump over a chunk: 2^end S + sum over tokens of what is left of each input."""
    form = builder.form
    operands = []
    for term in state.terms:
        if term.lag:
            raise Unsupported("an input of the token before")
        row = None if term.row is None else builder.row(step, term.row, channels_of(state)[0])
        column = builder.column(step, term.column, state.column_axis)
        weight = weight_tile(builder, before, step, form.weight(term.weight))
        operands.append((f"carry {term.weight} {state.decay}", weight, row, column))
    sums = decay_sums(builder, before, step, form.decay(state.decay), earlier=False, end=True)
    total: Expr = mul(grown(sums.end), carried)
    for key, weight, row, column in operands:
        carry = builder.known.get(key, mul(weight, decayed(sums.end, sums.through)))
        if builder.natural(carry) and key not in builder.known:
            note = "what is left of a token's input at the end"
            carry = builder.known[key] = builder.name_value(step, "carry", carry, note)
        step.append(add_input(builder, carried, total, carry, row, column))
        total = carried


def keep(builder: WalkBuilder, *carried: Carried) -> When:
    """Store states at the end of a chunk that is the end of a whole block of tokens, if the caller wants those."""
    every = place_blocks(builder)
    return at_block_end(builder, builder.flag(KEPT, EVERY), every, _kept_stores(builder, carried))


def keep_ends(builder: WalkBuilder, *carried: Carried) -> When:
    """The same behind the walk of a segment, where segments are such blocks: no chunk is asked whether it ends one."""
    every = place_blocks(builder)
    stored = If(f"(segment + 1) * {every} <= length", _kept_stores(builder, carried))
    return When(builder.flag(ENDS, "ends"), (_block(builder, Ref("segment")), stored))


def _kept_stores(builder: WalkBuilder, carried: Sequence[Carried]) -> tuple[Statement, ...]:
    """The stores of states among those that are kept."""
    stores: list[Statement] = []
    for state, tile, conditions in carried:
        name = f"{state.name}_states"
        batch, *rest = state.axes
        kept = builder.declare(Parameter(name, "prefixes", name, (batch, BLOCKS, *rest), "f32"))
        store = Store(kept, builder.slots(kept), tile, builder.tile_axes(state.axes))
        stores.append(If(" and ".join(conditions), (store,)) if conditions else store)
    return tuple(stores)


def place_blocks(builder: WalkBuilder) -> str:
    """Declare the tokens of a block at whose end states are kept, which lie at `block`; the parameter's name."""
    builder.place[BLOCKS] = Slot(BLOCKS, "block", "1")
    return builder.declare(Parameter("every", "scalar", EVERY, dtype="i32"))


def at_block_end(builder: WalkBuilder, flag: str, every: str, statements: tuple[Statement, ...]) -> When:
    """`statements`, under a flag, where a chunk is the last of a whole block of `every` tokens."""
    start = mul(Ref("chunk"), Ref("CHUNK"))
    end = Let(Ref("end"), Apply("add", (start, Ref("CHUNK"))))
    block = _block(builder, Apply("floordiv", (start, Ref(every))))
    return When(flag, (end, If(f"end % {every} == 0 and end <= length", (block, *statements))))


def _block(builder: WalkBuilder, number: Expr) -> Let:
    """The place of a sequence's block: of packed ones each has its own first."""
    packed = PACKED in builder.parameters
    return Let(Ref("block"), Apply("add", (Ref("first"), number)) if packed else number)


def add_input(builder: WalkBuilder, state: Ref, total: Expr, carry: Expr, row: Expr | None, column: Expr) -> Statement:
    """state = total + sum over tokens of carry * row (x) column; `weighted` of the schedule says which bears the carry."""
    time = builder.layer.time
    if row is None:
        return Let(state, Apply("add", (total, Contract(builder.widened(column), carry, time))))
    factors = (row, column)
    if carry != ONE and builder.config.weighted == "row":
        factors = (mul(builder.widened(row), carry), column)
    elif carry != ONE:
        factors = (row, mul(builder.widened(column), carry))
    return Dot(state, factors, time, total, builder.constant("state"))


def entry_workspace(form: ChunkForm, state: ChunkState) -> Workspace:
    """The buffer of the states that enter each chunk, in the dtype that the `carried` product rounds them to."""
    axes = entry_axes(form, state)
    shape = tuple("cut.slots" if a == CHUNKS else f"size_{a}" for a in axes)
    return Workspace(
        f"{state.name}_entry", axes, shape, entry_dtype(state), f"the state {state.name} that enters each chunk"
    )
