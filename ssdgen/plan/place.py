"""Where a block stands: in a batch by the grid alone, in packed sequences by a row of a table that the host made.

Inputs and outputs are read at (`batch`, chunk); packed, they are cut to the sequence first, so that its chunks are counted
from its own first token. States have an entry a `sequence`; those that are kept at the ends of its blocks of tokens have
places from its `first` on. Workspaces have a `lane` with a `slot` for every chunk: a batch entry's chunks, or, packed, those
of all sequences in one lane.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ssdgen.ir.plan import CHUNKS, Parameter, Slot
from ssdgen.plan.builder import KernelBuilder, Unsupported
from ssdgen.plan.names import ENDS, EVERY, KEPT, PACKED

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


def chunk_position(builder: KernelBuilder, guarded: bool = False) -> list[str]:
    """The assignments that place a block in one chunk, of one batch entry or sequence; `guarded` says in `present` whether
    there is a chunk at all, for blocks that store more than workspaces."""
    tokens, at = _tokens(builder)
    return [
        f"chunks = ct.cdiv({tokens}.shape[{at}], CHUNK)",
        "batch, chunk = ct.bid(0) // chunks, ct.bid(0) % chunks",
        "lane, slot = batch, chunk",
        *(["present = True"] if guarded else []),
        f"if {PACKED}:",
        f"    batch, start, stop = chunk_at({CHUNK_TABLE}, ct.bid(0))",
        "    lane, slot, chunk = 0, ct.bid(0), 0",
        *([f"    present = has_chunk({CHUNK_TABLE}, ct.bid(0))"] if guarded else []),
        *_sliced(builder),
        *([length_line(builder)] if "length" in builder.used else []),
    ]


def walk_position(builder: KernelBuilder, heads: str, segmented: bool, ends: bool, back: bool = False) -> list[str]:
    """The assignments that place a block that walks a segment (or all) of a batch entry or sequence, at one head.

    With `ends` the block walks to the end of its segment only to make a state, which the last segment is spared; the first
    one where it walks `back`.
    """
    time, arrays = builder.layer.time, builder.parameters.values()
    sequence = "sequence" if any(p.role in ("initial", "final") for p in arrays) else "_"
    slots = (p for p in arrays if p.role == "workspace" and {time, CHUNKS} & set(p.axes))
    slot = "slot" if any(slots) else "_"
    final = not ends and not back and any(p.role == "final" for p in arrays)
    index = f"segment, {'last' if final or (ends and not back) else '_'}" if segmented else "_, _"
    found = f"{sequence}, batch, start, stop, {slot}, {index}"
    every = next((p.name for p in arrays if (p.role, p.argument) == ("scalar", EVERY)), "")
    kept = f"{KEPT} or {ENDS}" if ENDS in builder.parameters else KEPT
    blocks = [f"    if {kept}:", f"        first = start // {every}  # rounded down: see `_blocks`"] if every else []
    skip = []
    if ends:
        spared, why = ("segment == 0", "before the first") if back else ("last", "after the last")
        skip = [f"    stop = ct.where({spared}, start, stop)  # nothing enters a segment {why}"]
    placed = {"sequence": "batch", "lane": "batch", "slot": "0", "first": "0"}
    named = ("lane", sequence, slot, "first" if every else "")
    placed = {name: value for name, value in placed.items() if name in named}
    return [
        f"heads = {heads}",
        "batch, head = ct.bid(0) // heads, ct.bid(0) % heads",
        f"{', '.join(placed)} = {', '.join(placed.values())}",
        *([f"segment, origin = ct.bid(1){' + 1' if ends and back else ''}, 0"] if segmented else []),
        *(["last = segment == ct.num_blocks(1) - 1"] if segmented and final else []),
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
    cut = ("input", "output", "arriving", "gradient")
    arrays = [p for p in builder.ordered_parameters() if p.role in cut and time in p.axes]
    optional = [p for p in arrays if p.role in ("input", "gradient") and layer.tensor(p.argument).optional]
    optional.sort(key=lambda p: p.argument)
    always = [p for p in arrays if p not in optional]
    lines = [f"    {_cut(time, always[i : i + 2])}" for i in range(0, len(always), 2)]
    for name, group in itertools.groupby(optional, key=lambda p: p.argument):
        lines += [f"    if {builder.presence(name)}:", f"        {_cut(time, list(group))}"]
    return lines


def _cut(time: str, arrays: Sequence[Parameter]) -> str:
    """The assignment that cuts arrays to a sequence."""
    cuts = ", ".join(f"{p.name}.slice({p.axes.index(time)}, start, stop)" for p in arrays)
    return f"{', '.join(p.name for p in arrays)} = {cuts}"


def _tokens(builder: KernelBuilder) -> tuple[str, int]:
    """The first per-token input that no call lacks (or gradient of one), and its dimension along time."""
    layer, time = builder.layer, builder.layer.time
    arrays = sorted(builder.parameters.values(), key=lambda p: p.role == "gradient")
    given = (p for p in arrays if p.role in ("input", "gradient") and time in p.axes)
    tokens = next((p for p in given if not layer.tensor(p.argument).optional), None)
    if tokens is None:
        raise Unsupported("a state whose rows and columns are the same at every token")
    return tokens.name, tokens.axes.index(time)
