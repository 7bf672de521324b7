"""The kernel `compute_out`: carried states, causal interactions inside the chunk and the rest of the outputs, fused."""

from __future__ import annotations

from dataclasses import dataclass, field

from ssdgen.ir.chunkform import ChunkForm, Read, Score
from ssdgen.ir.expr import ONE, Apply, Axes, Contract, Expr, Ref, mul
from ssdgen.ir.layer import Output
from ssdgen.ir.plan import CHUNKS, KEY, Config, Dot, Let, OutputKernel, Parameter, Statement, Store
from ssdgen.plan.builder import Unsupported
from ssdgen.plan.decays import Sums, decay_sums, decayed, grown, weight_tile
from ssdgen.plan.lower import retime, where
from ssdgen.plan.walk import WalkBuilder, entry_axes, entry_dtype, tile_constant, widen

ROLE = "compute_out"


@dataclass
class _Parts:
    """The kernel in the making: its builder, and statements by section."""

    builder: WalkBuilder
    row: str | None
    column: str
    before: list[Statement] = field(default_factory=list)
    contract: list[Statement] = field(default_factory=list)
    combine: list[Statement] = field(default_factory=list)
    outputs: list[Statement] = field(default_factory=list)
    accumulators: list[Ref] = field(default_factory=list)
    products: dict[str, Ref] = field(default_factory=dict)


def output_kernel(form: ChunkForm, config: Config, present: tuple[str, ...]) -> OutputKernel:
    """The kernel of the outputs when the optional inputs `present` are passed."""
    layer = form.recurrence.layer
    row, column = _axes(form)
    channels = (column,) if row is None else (row, column)
    builder = WalkBuilder(form, config, channels)
    parts = _Parts(builder, row, column)

    builder.hoist = (column, parts.before)
    carried = [_contract(parts, read) for read in form.reads]
    builder.hoist = None
    for read, accumulator in zip(form.reads, carried, strict=True):
        builder.known[read.name] = _combine(parts, read, accumulator)
    for output in layer.outputs:
        _output(parts, output, present)
    for name in ("chunk", *(f"tile_{a}" for a in channels)):
        builder.constant(name)
    builder.finish(parts.before, parts.contract, parts.combine, parts.outputs)
    row_tiles = () if row is None else (f"_rt.ceil_div(size_{row}, config.tile_{row})",)
    return OutputKernel(
        name="_".join((ROLE, *present)),
        role=ROLE,
        doc="The outputs of one chunk: what tokens read from the state that entered it, what they read from each other, and"
        " the rest, fused; intermediates stay in registers.",
        parameters=builder.ordered_parameters(),
        grid=(" * ".join((f"size_{layer.batch}", "chunks", *row_tiles, f"size_{layer.head}")),),
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


def _axes(form: ChunkForm) -> tuple[str | None, str]:
    """The row and the column axis that all states share."""
    rows = {s.row_axis for s in form.states} - {None}
    columns = {s.column_axis for s in form.states}
    if len(rows) > 1 or len(columns) > 1:
        raise Unsupported("states with different channel axes")
    outputs = {a for o in form.outputs for a in o.axes}
    return next((r for r in rows if r in outputs), None), next(iter(columns))


def _contract(parts: _Parts, read: Read) -> Ref:
    """Append to `contract` what a read needs summed over the column axis: vector . column tiles, and vector . state, whose
    accumulator is returned."""
    builder, time, column = parts.builder, parts.builder.layer.time, parts.column
    form, swap = builder.form, builder.config.swap
    vector = builder.row(parts.contract, read.vector, column, "vector")
    for name in (i.score for i in read.interactions):
        score = form.score(name)
        if _product_key(score) not in parts.products:
            keys = retime(builder.column(parts.contract, score.column, column), time, KEY)
            count = len(parts.products)
            target = Ref(
                builder.names.of("value", f"scores_{count + 1}" if count else "scores"),
                (KEY, time) if "scores" in swap else (time, KEY),
            )
            parts.products[_product_key(score)] = target
            parts.accumulators.append(target)
            parts.contract.append(Dot(target, (vector, keys), column, target, builder.constant("scores")))
    state = form.state(read.state)
    entry = f"{state.name}_entry"
    entry = builder.declare(Parameter(entry, "workspace", entry, entry_axes(form, state), entry_dtype(state)))
    tile = builder.load(parts.contract, entry, builder.latency(state.name))
    name = builder.names.of("carried", f"{read.name}_carried")
    if state.row_axis is None:
        total = Ref(name, (time,))
        parts.contract.append(Let(total, Apply("add", (total, Contract(widen(vector), widen(tile), column)))))
    elif parts.row is None:
        raise Unsupported(f"an output that reads `{state.name}` but lacks the axis `{state.row_axis}`")
    else:
        total = Ref(name, (parts.row, time) if "carried" in swap else (time, parts.row))
        parts.contract.append(Dot(total, (vector, tile), column, total, builder.constant("carried")))
    parts.accumulators.append(total)
    return total


def _product_key(score: Score) -> str:
    return f"{score.vector} . {score.column}"


def _combine(parts: _Parts, read: Read, carried: Ref) -> Ref:
    """Append to `combine` the value of a read: the carried term, decayed, plus its interactions."""
    builder, time = parts.builder, parts.builder.layer.time
    decay, earlier = builder.form.decay(read.decay), read.at == -1
    sums = decay_sums(builder, parts.combine, parts.combine, decay, earlier=earlier, end=False)
    total: Expr = mul(carried, grown(sums.before if earlier else sums.through))
    axes = _oriented(parts, tuple(a for a in (time, parts.row) if a in carried.axes))
    target = Ref(builder.names.of("read", read.name), axes)
    for interaction in read.interactions:
        scores = _score(parts, builder.form.score(interaction.score), sums)
        if interaction.row is None:
            total = Apply("add", (total, Contract(scores, ONE, KEY)))
        else:
            assert parts.row is not None
            row = retime(builder.row(parts.combine, interaction.row, parts.row), time, KEY)
            parts.combine.append(Dot(target, (scores, row), KEY, total, builder.constant("intra")))
            total = target
    if total != target:
        parts.combine.append(Let(target, total))
    return target


def _oriented(parts: _Parts, axes: Axes) -> Axes:
    """The order of a tile (time, row) of a read or an output: that of the `intra` product."""
    return axes[::-1] if "intra" in parts.builder.config.swap else axes


def _score(parts: _Parts, score: Score, sums: Sums) -> Ref:
    """The weighted, decayed, causal scores [i, j] of a Score; computed once."""
    builder, time = parts.builder, parts.builder.layer.time
    key = f"score {score.name}"
    if key not in builder.known:
        if score.lag:
            raise Unsupported("an input of the token before")
        product = parts.products[_product_key(score)]
        weight = weight_tile(builder, parts.combine, parts.combine, builder.form.weight(score.weight))
        causal, left = _causal(parts, score, product.axes), _left(parts, score, sums, product.axes)
        value = where(causal, mul(product, left, retime(weight, time, KEY)))
        builder.known[key] = builder.name_value(parts.combine, score.name, value, axes=product.axes)
    return builder.known[key]


def _causal(parts: _Parts, score: Score, axes: Axes) -> Expr:
    """The mask of the tokens j that a token i reads: not those after it, nor itself if it reads the state before it."""
    builder, time = parts.builder, parts.builder.layer.time
    key = f"causal {score.at}"
    if key not in builder.known:
        mask = Apply("gt" if score.at == -1 else "ge", (Ref("token", (time,)), Ref("token", (KEY,))))
        name = "causal" if score.at == 0 else "causal_before"
        builder.known[key] = builder.name_value(parts.combine, name, mask, axes=axes)
    return builder.known[key]


def _left(parts: _Parts, score: Score, sums: Sums, axes: Axes) -> Expr:
    """What is left at token i of the input of token j; one without decay."""
    builder, time = parts.builder, parts.builder.layer.time
    later = sums.before if score.at == -1 else sums.through
    left = decayed(later, retime(sums.through, time, KEY))
    if left == ONE:
        return ONE
    key = f"left {score.decay} {score.at}"
    if key not in builder.known:
        name = f"{score.decay}_left" if score.at == 0 else f"{score.decay}_left_before"
        note = "what is left of token j at token i"
        builder.known[key] = builder.name_value(parts.combine, name, left, note, axes=axes)
    return builder.known[key]


def _output(parts: _Parts, output: Output, present: tuple[str, ...]) -> None:
    """Append to `outputs` an epilogue and its store."""
    builder, time, row = parts.builder, parts.builder.layer.time, parts.row
    form = next(o for o in builder.form.outputs if o.name == output.name)
    stray = [a for a in output.axes if a not in builder.place or a == parts.column]
    if stray:
        raise Unsupported(f"the output `{output.name}` has the axis `{stray[0]}`")
    if row is not None and row not in output.axes:
        raise Unsupported(f"the output `{output.name}` lacks the axis `{row}` of another output")
    tile = Ref(
        builder.names.of("output", f"{output.name}_tile"), _oriented(parts, (time,) if row is None else (time, row))
    )
    parts.outputs.append(Let(tile, widen(builder.tile(parts.outputs, form.value)), output.value.span.line))
    builder.known[output.name] = tile
    for gate in form.gates:
        if gate.tensor in present:
            parts.outputs.append(Let(tile, builder.tile(parts.outputs, gate.value), gate.span.line))
    axes = dict(builder.config.layouts).get(output.name, output.axes)
    dtype = output.dtypes[0] if output.like is None else f"like {output.like}"
    parameter = builder.declare(Parameter(output.name, "output", output.name, axes, dtype))
    latency = builder.latency(output.name)
    parts.outputs.append(Store(parameter, builder.slots(axes), tile, builder.tile_axes(axes), latency))


def _column_tiles(builder: WalkBuilder, column: str) -> str:
    array = next(p for p in builder.parameters.values() if p.is_array and column in p.axes)
    return f"ct.cdiv({array.name}.shape[{array.axes.index(column)}], {tile_constant(column)})"


def _position(builder: WalkBuilder, row: str | None) -> list[str]:
    layer = builder.layer
    entry = next(p for p in builder.parameters.values() if p.role == "workspace" and CHUNKS in p.axes)
    out = next(p for p in builder.parameters.values() if p.role == "output")
    lines = [
        f"heads, chunks = {entry.name}.shape[{entry.axes.index(layer.head)}], {entry.name}.shape[{entry.axes.index(CHUNKS)}]",
        "head, block = ct.bid(0) % heads, ct.bid(0) // heads",
    ]
    if row is not None:
        lines.append(f"{row}_tiles = ct.cdiv({out.name}.shape[{out.axes.index(row)}], {tile_constant(row)})")
        lines.append(f"{row}_tile, block = block % {row}_tiles, block // {row}_tiles")
    lines.append("chunk, batch = block % chunks, block // chunks")
    if "length" in builder.used:
        lines.append(builder.length_line())
    return [*lines, *builder.position_lines("heads")]
