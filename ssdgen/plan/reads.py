"""What a token reads, and the outputs made of it: shared by every kernel that computes outputs.

A kernel gathers its statements in `Parts`: `contract` sums over the column axis into `accumulators`, `combine` weighs them
and adds what tokens of the chunk read from each other, `outputs` are the epilogues and their stores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ssdgen.ir.chunkform import ChunkForm, Interaction, Read, Score
from ssdgen.ir.expr import ONE, Apply, Axes, Contract, Expr, Ref, add, mul, walk
from ssdgen.ir.layer import Gate, Output
from ssdgen.ir.plan import KEY, NUMBERS, Dot, Let, Parameter, Rows, Slot, Statement, Store, When, Zeros
from ssdgen.plan.builder import Unsupported
from ssdgen.plan.decays import Sums, decay_sums, decayed, grown, weight_tile
from ssdgen.plan.lower import plus_term, retime, where
from ssdgen.plan.names import SHARED
from ssdgen.plan.shared import (
    group_of,
    masked_once,
    numbers,
    product_key,
    product_name,
    scores_parameter,
    token_parameter,
)
from ssdgen.plan.walk import WalkBuilder, widen


@dataclass
class Parts:
    """A kernel in the making: its builder, the axes its states share, and statements by section.

    `before` is what no loop of the kernel changes. A walk over chunks puts there what is the same in every chunk too.
    `products`, and the scores of tokens with themselves that are kept apart (`own`), are by product. `apart` has, by read, what
    a token reads of itself if that is left to the output: its weight [L], and the row it is of.
    """

    builder: WalkBuilder
    row: str | None
    column: str
    walks: bool = False
    before: list[Statement] = field(default_factory=list)
    contract: list[Statement] = field(default_factory=list)
    combine: list[Statement] = field(default_factory=list)
    outputs: list[Statement] = field(default_factory=list)
    accumulators: list[Ref] = field(default_factory=list)
    products: dict[str, Ref] = field(default_factory=dict)
    own: dict[str, Ref] = field(default_factory=dict)
    apart: dict[str, tuple[Expr, Expr]] = field(default_factory=dict)

    @property
    def constant(self) -> list[Statement]:
        """The section of what depends on neither the chunk nor the tile of the column axis."""
        return self.before if self.walks else self.combine


def shared_axes(form: ChunkForm) -> tuple[str | None, str]:
    """The row and the column axis that all states share."""
    rows = {s.row_axis for s in form.states} - {None}
    columns = {s.column_axis for s in form.states}
    if len(rows) > 1 or len(columns) > 1:
        raise Unsupported("states with different channel axes")
    outputs = {a for o in form.outputs for a in o.axes}
    return next((r for r in rows if r in outputs), None), next(iter(columns))


def contract(parts: Parts, read: Read, state_tile: Callable[[], Expr]) -> Ref:
    """Append to `contract` what a read needs summed over the column axis: vector . column tiles, and vector . state, whose
    accumulator is returned. `state_tile` makes the tile of the state that enters the chunk."""
    builder, time, column = parts.builder, parts.builder.layer.time, parts.column
    form, swap = builder.form, builder.config.swap
    vector = builder.row(parts.contract, read.vector, column, "vector")
    for name in (i.score for i in read.interactions):
        score = form.score(name)
        if product_key(score) not in parts.products:
            axes = (KEY, time) if "scores" in swap else (time, KEY)
            target = Ref(builder.names.of("value", product_name(form, score)), axes)
            parts.products[product_key(score)] = target
            _product(parts, score, vector, target)
    state, entered = form.state(read.state), state_tile()
    name = builder.names.of("carried", f"{read.name}_carried")
    if state.row_axis is None:
        total = Ref(name, (time,))
        parts.contract.append(Let(total, Apply("add", (total, Contract(widen(vector), widen(entered), column)))))
    elif parts.row is None:
        raise Unsupported(f"an output that reads `{state.name}` but lacks the axis `{state.row_axis}`")
    else:
        total = Ref(name, (parts.row, time) if "carried" in swap else (time, parts.row))
        parts.contract.append(Dot(total, (vector, entered), column, total, builder.constant("carried")))
    parts.accumulators.append(total)
    return total


def _product(parts: Parts, score: Score, vector: Expr, target: Ref) -> None:
    """Append the product vector . column of every two tokens: in a walk, what a group shares may come from a buffer."""
    builder, column = parts.builder, parts.column
    keys = retime(builder.column(parts.contract, score.column, column), builder.layer.time, KEY)
    dot = Dot(target, (vector, keys), column, target, builder.constant("scores"))
    if not parts.walks or group_of(builder.form, score) is None:
        parts.accumulators.append(target)
        parts.contract.append(dot)
        return
    time = builder.layer.time
    buffer = builder.declare(scores_parameter(builder.form, score))
    stored: list[Statement] = [replace(builder.load_tile(buffer, target), latency=builder.latency("scores"), cast=True)]
    found = {what: Ref(builder.names.fresh(f"{target.name}_{what}"), (time,)) for what in numbers(builder.form, score)}
    stored += _numbers(builder, score, target, tuple(found.values()))
    stored.append(Let(target, mul(target, found["scale"])))
    if "own" in found:
        parts.own[product_key(score)] = found["own"]
    here: list[Statement] = [Zeros(target), dot]
    if masked_once(builder.form, score):
        here.append(Let(target, where(builder.causal(parts.constant, score.at, target.axes), target)))
    parts.contract.append(When(builder.flag(SHARED, "shared"), tuple(stored), tuple(here)))


def _numbers(builder: WalkBuilder, score: Score, product: Ref, targets: tuple[Ref, ...]) -> list[Statement]:
    """Load what is stored for each token beside a shared product, one number or two: in one tile, since every load is waited
    for by itself."""
    array = builder.declare(token_parameter(builder.form, score))
    builder.place[NUMBERS] = Slot(NUMBERS, "0", str(len(targets)))
    if len(targets) == 1:
        return [builder.load_tile(array, targets[0])]
    first, second = targets
    tile = Ref(builder.names.fresh(f"{product.name}_token"), (NUMBERS, builder.layer.time))
    return [builder.load_tile(array, tile), Rows((first, second), tile)]


def combine(parts: Parts, read: Read, carried: Ref) -> Ref:
    """Append to `combine` the value of a read: the carried term, decayed, plus its interactions."""
    builder, time = parts.builder, parts.builder.layer.time
    decay, earlier = builder.form.decay(read.decay), read.at == -1
    sums = decay_sums(builder, parts.constant, parts.combine, decay, earlier=earlier, end=parts.walks)
    total: Expr = mul(carried, grown(sums.before if earlier else sums.through))
    axes = _oriented(parts, tuple(a for a in (time, parts.row) if a in carried.axes))
    target = Ref(builder.names.of("read", read.name), axes)
    itself: list[tuple[Expr, Expr]] = []
    for interaction in read.interactions:
        itself += _own(parts, interaction)
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
    if len(itself) == 1 and _a_term(builder.form, read):
        parts.apart[read.name] = itself[0]
    elif itself:
        whole = Let(target, add(target, *(mul(*factors) for factors in itself)))
        parts.combine.append(When(builder.flag(SHARED, "shared"), (whole,)))
    return target


def _a_term(form: ChunkForm, read: Read) -> bool:
    """Whether a read is used once, as a term of an output."""
    values = [value for o in form.outputs for value in (o.value, *(g.value for g in o.gates))]
    used = [e for value in values for e in walk(value) if isinstance(e, Ref) and e.name == read.name]
    return len(used) == 1 and any(read.name in _terms(o.value) for o in form.outputs)


def _terms(total: Expr) -> tuple[str, ...]:
    """The names among the terms of a sum."""
    match total:
        case Apply(op="add", args=args):
            return tuple(name for a in args for name in _terms(a))
        case Ref(name=name):
            return (name,)
        case _:
            return ()


def _own(parts: Parts, interaction: Interaction) -> list[tuple[Expr, Expr]]:
    """What a token reads of itself, where shared scores leave that out: its weight [L], and the row."""
    builder = parts.builder
    score = builder.form.score(interaction.score)
    own = parts.own.get(product_key(score))
    if own is None:
        return []
    weight = weight_tile(builder, parts.constant, parts.combine, builder.form.weight(score.weight))
    if interaction.row is None:
        return [(mul(own, weight), ONE)]
    assert parts.row is not None
    return [(mul(own, weight), widen(builder.row(parts.combine, interaction.row, parts.row)))]


def _oriented(parts: Parts, axes: Axes) -> Axes:
    """The order of a tile (time, row) of a read or an output: that of the `intra` product."""
    return axes[::-1] if "intra" in parts.builder.config.swap else axes


def _score(parts: Parts, score: Score, sums: Sums) -> Ref:
    """The weighted, decayed, causal scores [i, j] of a Score; computed once."""
    builder, time = parts.builder, parts.builder.layer.time
    key = f"score {score.name}"
    if key not in builder.known:
        if score.lag:
            raise Unsupported("an input of the token before")
        product = parts.products[product_key(score)]
        weight = weight_tile(builder, parts.constant, parts.combine, builder.form.weight(score.weight))
        value = mul(product, _left(parts, score, sums, product.axes), retime(weight, time, KEY))
        if not (parts.walks and masked_once(builder.form, score)):
            value = where(builder.causal(parts.constant, score.at, product.axes), value)
        if value == product:
            return product
        builder.known[key] = builder.name_value(parts.combine, score.name, value, axes=product.axes)
    return builder.known[key]


def _left(parts: Parts, score: Score, sums: Sums, axes: Axes) -> Expr:
    """What is left at token i of the input of token j; one without decay."""
    builder, time = parts.builder, parts.builder.layer.time
    later = sums.before if score.at == -1 else sums.through
    left = decayed(later, retime(sums.through, time, KEY))
    if left == ONE:
        return ONE
    key = f"left {score.decay} {score.at}"
    if key not in builder.known:
        name = f"{score.decay}_left" if score.at == 0 else f"{score.decay}_left_before"
        note = "what is left of token j at token i, and at most 1 above the diagonal"
        builder.known[key] = builder.name_value(parts.combine, name, left, note, axes=axes)
    return builder.known[key]


def output(parts: Parts, declared: Output) -> None:
    """Append to `outputs` an epilogue and its store."""
    builder, time, row = parts.builder, parts.builder.layer.time, parts.row
    form = next(o for o in builder.form.outputs if o.name == declared.name)
    stray = [a for a in declared.axes if a not in builder.place or a == parts.column]
    if stray:
        raise Unsupported(f"the output `{declared.name}` has the axis `{stray[0]}`")
    if row is not None and row not in declared.axes:
        raise Unsupported(f"the output `{declared.name}` lacks the axis `{row}` of another output")
    tile_axes = builder.tile_axes((time,) if row is None else (time, row))
    tile = Ref(builder.names.of("output", f"{declared.name}_tile"), _oriented(parts, tile_axes))
    value, line = widen(builder.tile(parts.outputs, form.value)), declared.value.span.line
    whole, shared = value, list[Statement]()
    for weight, of in (parts.apart[name] for name in _terms(form.value) if name in parts.apart):
        own = builder.name_value(shared, "own", weight, "weight of what a token reads of itself")
        whole = plus_term(whole, own, of)
    if shared:
        shared.append(Let(tile, whole, line))
        parts.outputs.append(When(builder.flag(SHARED, "shared"), tuple(shared), (Let(tile, value),)))
    else:
        parts.outputs.append(Let(tile, value, line))
    builder.known[declared.name] = tile
    for gate in form.gates:
        parts.outputs.append(_gate(builder, gate, tile))
    axes = dict(builder.config.layouts).get(declared.name, declared.axes)
    dtype = declared.dtypes[0] if declared.like is None else f"like {declared.like}"
    parameter = builder.declare(Parameter(declared.name, "output", declared.name, axes, dtype))
    latency = builder.latency(declared.name)
    slots, stored = builder.slots(parameter), builder.tile_axes(axes)
    parts.outputs.append(Store(parameter, slots, tile, stored, latency, builder.whole))


def _gate(builder: WalkBuilder, gate: Gate, tile: Ref) -> When:
    """What an optional input changes an output to, and nothing else: its tiles are not known outside."""
    body: list[Statement] = []
    with builder.apart():
        body.append(Let(tile, builder.tile(body, gate.value), gate.span.line))
    return When(builder.presence(gate.tensor), tuple(body))
