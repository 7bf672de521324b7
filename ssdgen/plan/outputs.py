"""The kernel `compute_out`: carried states, causal interactions inside the chunk and the rest of the outputs, fused."""

from __future__ import annotations

from functools import partial

from ssdgen.ir.chunkform import ChunkForm, ChunkState
from ssdgen.ir.expr import Ref
from ssdgen.ir.plan import CHUNKS, Config, OutputKernel, Parameter
from ssdgen.plan.place import length_line
from ssdgen.plan.reads import Parts, combine, contract, output, shared_axes
from ssdgen.plan.walk import WalkBuilder, entry_axes, entry_dtype, tile_constant

ROLE = "compute_out"


def output_kernel(form: ChunkForm, config: Config) -> OutputKernel:
    """The kernel of the outputs."""
    layer = form.recurrence.layer
    row, column = shared_axes(form)
    channels = (column,) if row is None else (row, column)
    builder = WalkBuilder(form, config, channels)
    parts = Parts(builder, row, column)

    builder.hoist = (column, parts.before)
    carried = [contract(parts, r, partial(_entry, parts, form.state(r.state))) for r in form.reads]
    builder.hoist = None
    for read, accumulator in zip(form.reads, carried, strict=True):
        builder.known[read.name] = combine(parts, read, accumulator)
    for declared in layer.outputs:
        output(parts, declared)
    for name in ("chunk", *(f"tile_{a}" for a in channels)):
        builder.constant(name)
    builder.finish(parts.before, parts.contract, parts.combine, parts.outputs)
    once, count = _sizes(builder, row)
    row_tiles = () if row is None else (f"_rt.ceil_div(size_{row}, config.tile_{row})",)
    return OutputKernel(
        name=ROLE,
        role=ROLE,
        doc="The outputs of one chunk: what tokens read from the state that entered it, what they read from each other, and"
        " the rest, fused; intermediates stay in registers.",
        parameters=builder.ordered_parameters(),
        grid=(" * ".join((f"size_{layer.batch}", "cut.slots", *row_tiles, f"size_{layer.head}")),),
        once=tuple(once),
        places=f"ct.bid(0), {count}, ct.num_blocks(0)" if config.persistent else "",
        position=tuple(_position(builder, row)),
        occupancy=f"occupancy_{ROLE}",
        before=tuple(parts.before),
        accumulators=tuple(parts.accumulators),
        tile=f"{column}_tile",
        tiles=_column_tiles(builder, column),
        contract=tuple(parts.contract),
        combine=tuple(parts.combine),
        outputs=tuple(parts.outputs),
    )


def _entry(parts: Parts, state: ChunkState) -> Ref:
    """Load the tile of the state that entered the chunk."""
    builder, name = parts.builder, f"{state.name}_entry"
    entry = Parameter(name, "workspace", name, entry_axes(builder.form, state), entry_dtype(state))
    return builder.load(parts.contract, builder.declare(entry), builder.latency(state.name))


def _column_tiles(builder: WalkBuilder, column: str) -> str:
    array = next(p for p in builder.parameters.values() if p.is_array and column in p.axes)
    return f"ct.cdiv({array.name}.shape[{array.axes.index(column)}], {tile_constant(column)})"


def _sizes(builder: WalkBuilder, row: str | None) -> tuple[list[str], str]:
    """The assignments of how many heads, chunks and row tiles there are, and how many places to do that makes."""
    layer = builder.layer
    entry = next(p for p in builder.parameters.values() if p.role == "workspace" and CHUNKS in p.axes)
    batch, head, chunks = (f"{entry.name}.shape[{entry.axes.index(a)}]" for a in (layer.batch, layer.head, CHUNKS))
    lines, counts = [f"heads, chunks = {head}, {chunks}"], [batch, "heads", "chunks"]
    if row is not None:
        out = next(p for p in builder.parameters.values() if p.role == "output")
        lines.append(f"{row}_tiles = ct.cdiv({out.name}.shape[{out.axes.index(row)}], {tile_constant(row)})")
        counts.append(f"{row}_tiles")
    return lines, " * ".join(counts)


def _position(builder: WalkBuilder, row: str | None) -> list[str]:
    place = "place" if builder.config.persistent else "ct.bid(0)"
    lines = [f"head, block = {place} % heads, {place} // heads"]
    if row is not None:
        lines.append(f"{row}_tile, block = block % {row}_tiles, block // {row}_tiles")
    lines.append("chunk, batch = block % chunks, block // chunks")
    if "length" in builder.used:
        lines.append(length_line(builder))
    return [*lines, *builder.position_lines("heads")]
