"""Where a block stands: in a batch by the grid alone, in packed sequences by a row of a table that the host made.

Inputs and outputs are read at (`batch`, chunk); packed, they are cut to the sequence first, so that its chunks are counted
from its own first token. States have an entry a `sequence`; those that are kept at the ends of its blocks of tokens have
places from its `first` on. Workspaces have a `lane` with a `slot` for every chunk: a batch entry's chunks, or, packed, those
of all sequences in one lane.
"""

from __future__ import annotations

from collections.abc import Sequence

from ssdgen.ir.plan import Parameter, Slot
from ssdgen.plan.builder import KernelBuilder, Unsupported
from ssdgen.plan.names import EVERY, KEPT, PACKED

CHUNK_TABLE, SEGMENT_TABLE = "chunk_table", "segment_table"


def declare_packed(builder: KernelBuilder, table: str) -> None:
    """Declare the flag of packed sequences and their table, and where arrays of each role are read."""
    batch, time = builder.layer.batch, builder.layer.time
    builder.flag(PACKED, "sequences")
    axes = {CHUNK_TABLE: ("place'", "chunk'"), SEGMENT_TABLE: ("place'", "segment'")}[table]
    builder.declare(Parameter(table, "table", table, axes, "i32"))
    entry = {batch: Slot(batch, "sequence", "1")}
    slot = "slot" if table == CHUNK_TABLE else "slot + chunk"
    builder.places = {
        "initial": entry,
        "final": entry,
        "workspace": {batch: Slot(batch, "lane", "1"), time: Slot(time, slot, "CHUNK")},
    }


def chunk_position(builder: KernelBuilder) -> list[str]:
    """The assignments that place a block in one chunk, of one batch entry or sequence."""
    tokens, at = _tokens(builder)
    return [
        f"chunks = ct.cdiv({tokens}.shape[{at}], CHUNK)",
        "batch, chunk = ct.bid(0) // chunks, ct.bid(0) % chunks",
        "lane, slot = batch, chunk",
        f"if {PACKED}:",
        f"    batch, start, stop = chunk_at({CHUNK_TABLE}, ct.bid(0))",
        "    lane, slot, chunk = 0, ct.bid(0), 0",
        *_sliced(builder),
        *([length_line(builder)] if "length" in builder.used else []),
    ]


def walk_position(builder: KernelBuilder, heads: str, segmented: bool, ends: bool) -> list[str]:
    """The assignments that place a block that walks a segment (or all) of a batch entry or sequence, at one head.

    With `ends` the block walks to the end of its segment only to make a state, which the last segment is spared.
    """
    time, arrays = builder.layer.time, builder.parameters.values()
    sequence = "sequence" if any(p.role in ("initial", "final") for p in arrays) else "_"
    slot = "slot" if any(p.role == "workspace" and time in p.axes for p in arrays) else "_"
    found = f"{sequence}, batch, start, stop, {slot}, {'segment, last' if segmented else '_, _'}"
    every = next((p.name for p in arrays if (p.role, p.argument) == ("scalar", EVERY)), "")
    blocks = [f"    if {KEPT}:", f"        first = start // {every}  # rounded down: see `_blocks`"] if every else []
    skip = ["    stop = ct.where(last, start, stop)  # nothing enters a segment after the last"] if ends else []
    placed = {"sequence": "batch", "lane": "batch", "slot": "0", "first": "0"}
    named = ("lane", sequence, slot, "first" if every else "")
    placed = {name: value for name, value in placed.items() if name in named}
    return [
        f"heads = {heads}",
        "batch, head = ct.bid(0) // heads, ct.bid(0) % heads",
        f"{', '.join(placed)} = {', '.join(placed.values())}",
        *(["segment, origin = ct.bid(1), 0"] if segmented else []),
        *(["last = segment == ct.num_blocks(1) - 1"] if segmented and not ends else []),
        f"if {PACKED}:",
        *(["    row = batch"] if segmented else []),
        f"    {found} = segment_at({SEGMENT_TABLE}, batch)",
        *(["    lane, origin = 0, row - segment"] if segmented else ["    lane = 0"]),
        *skip,
        *blocks,
        *_sliced(builder),
        length_line(builder),
    ]


def length_line(builder: KernelBuilder) -> str:
    """The assignment of the number of tokens."""
    tokens, at = _tokens(builder)
    return f"length = {tokens}.shape[{at}]"


def _sliced(builder: KernelBuilder) -> list[str]:
    """Cut every array of tokens to the sequence's. An absent input is not cut: another tensor stands in for it."""
    layer, time = builder.layer, builder.layer.time
    arrays = [p for p in builder.ordered_parameters() if p.role in ("input", "output") and time in p.axes]
    optional = [p for p in arrays if p.role == "input" and layer.tensor(p.argument).optional]
    always = [p for p in arrays if p not in optional]
    lines = [f"    {_cut(time, always[i : i + 2])}" for i in range(0, len(always), 2)]
    for p in optional:
        lines += [f"    if {builder.presence(p.argument)}:", f"        {_cut(time, [p])}"]
    return lines


def _cut(time: str, arrays: Sequence[Parameter]) -> str:
    """The assignment that cuts arrays to a sequence."""
    cuts = ", ".join(f"{p.name}.slice({p.axes.index(time)}, start, stop)" for p in arrays)
    return f"{', '.join(p.name for p in arrays)} = {cuts}"


def _tokens(builder: KernelBuilder) -> tuple[str, int]:
    """The first per-token input, and its dimension along time."""
    time = builder.layer.time
    tokens = next((p for p in builder.parameters.values() if p.role == "input" and time in p.axes), None)
    if tokens is None:
        raise Unsupported("a state whose rows and columns are the same at every token")
    return tokens.name, tokens.axes.index(time)
