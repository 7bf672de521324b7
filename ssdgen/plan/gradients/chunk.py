"""The kernel of the gradients of one chunk.

Entry states and what arrives at the end of the chunk are in memory, so chunks are independent. With `pulled` for
d_S_end . column, `carried` for S . vector, `flow` for the decayed d_score and w, f for factors of a token:

    d_row    = w carry pulled + score' d_read                                       carry[j] = 2^(s[L-1] - s[j])
    d_column = (f carry row)' d_S_end + (sum of f flow)' vector
    d_vector = (2^s d_read)' S        + (sum of w flow) column
    d_weight = carry (row . pulled) + sum_i flow scores
    d_s      = 2^s (d_read . carried) + sum_j w flow scores - sum_i w flow scores - w carry (row . pulled)

What tokens read of themselves is left out of both sums of d_s, so that nothing large cancels there. The sums over heads are
made before the products with `vector` and `column`, which the heads of a group share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ssdgen.ir.adjoint import Adjoint, Contribution, DecayAdjoint, Gradient, WeightAdjoint
from ssdgen.ir.chunkform import ChunkForm, ChunkState
from ssdgen.ir.expr import ONE, Apply, Axes, Contract, Expr, Ref, add, mul, refs
from ssdgen.ir.gradients import ChunkGradientKernel, Result
from ssdgen.ir.plan import CHUNKS, KEY, SHARES, Config, Dot, Let, Parameter, Statement, Store, When
from ssdgen.plan.builder import KernelBuilder
from ssdgen.plan.decays import grown
from ssdgen.plan.gradients.arriving import combined, load_arriving
from ssdgen.plan.gradients.parts import Parts, Sum
from ssdgen.plan.gradients.results import store_gradient
from ssdgen.plan.gradients.sort import Sorted, to_name
from ssdgen.plan.gradients.units import unit_of
from ssdgen.plan.lower import retime
from ssdgen.plan.place import chunk_position
from ssdgen.plan.reads import shared_axes
from ssdgen.plan.walk import WalkBuilder

NAME = "chunk_gradients"


def chunk_kernel(adjoint: Adjoint, config: Config, gradients: Sorted) -> tuple[ChunkGradientKernel, tuple[Result, ...]]:
    """The kernel, and where it leaves the gradients of inputs."""
    form = adjoint.form
    unit, parts = unit_of(form), Parts.begin(adjoint, config)
    builder = parts.builder
    for score in form.scores:
        parts.scores(score)
    used = {t.quantity for g in (*gradients.rows, *gradients.gated) for t in g.terms}
    load_arriving(builder, parts.each, adjoint, used)
    for adj in adjoint.rows:
        parts.row_gradient(adj)
    parts.know(*(term.factor for g in gradients.rows for term in g.terms))
    intra = builder.constant("intra")
    flats = flat_gradients(adjoint, gradients)
    plain = [g for g in gradients.rows if g not in flats]
    results = [r for g in plain for r in store_gradient(builder, parts.each, g, intra)]
    added = {g: combined(builder, parts.each, g) for g in flats}
    results += [r for g in gradients.gated for r in _gated(parts, g)]
    results += [_column(parts, g, unit) for g in gradients.columns]
    results += _totals(parts, added)
    for weight in adjoint.weights:
        _store_scalar(parts, weight.name, _weight(parts, weight))
    for decay in adjoint.decays:
        _store_scalar(parts, sum_name(decay), _decay(parts, decay))

    parts.finish()
    token = ["token = ct.arange(CHUNK, dtype=ct.int32)"] if "token" in builder.used | _masks(builder) else []
    heads, place, grid = _unit(parts, unit)
    kernel = ChunkGradientKernel(
        name=NAME,
        role=NAME,
        doc="The gradients of one chunk" + (", of a group's heads one by one." if unit else " and head."),
        parameters=builder.ordered_parameters(),
        grid=("cut.lanes * cut.slots", *grid),
        position=(*chunk_position(builder, guarded=True), *place, *token, *builder.position),
        occupancy=f"occupancy_{NAME}",
        once=tuple(parts.once),
        heads=heads,
        accumulators=tuple(parts.accumulators),
        each=tuple(parts.each),
        after=tuple(parts.after),
    )
    return kernel, tuple(results)


def sum_name(decay: DecayAdjoint) -> str:
    """The buffer of the gradient of a decay's running sum."""
    return f"{decay.name}_sum"


def written_name(decay: DecayAdjoint) -> str:
    """The buffer of what the end of a chunk asks of the decays behind each token."""
    return f"{decay.name}_written"


def met_name(state: ChunkState) -> str:
    """The buffer of what reaches through a whole chunk."""
    return f"{state.name}_met"


def met_axes(form: ChunkForm, state: ChunkState) -> Axes:
    """Its axes: batch, head, chunk, and the row axis if the state has one."""
    layer = form.recurrence.layer
    return (layer.batch, layer.head, CHUNKS, *([state.row_axis] if state.row_axis else []))


def _masks(builder: WalkBuilder) -> set[str]:
    return {"token"} if any(key.startswith("causal ") for key in builder.known) else set()


def _unit(parts: Parts, unit: str | None) -> tuple[str, list[str], tuple[str, ...]]:
    """The range of a block's heads, the lines that find it, and the grid behind chunks."""
    builder, layer = parts.builder, parts.builder.layer
    if unit is None:
        return "", ["head = ct.bid(1)"], (f"size_{layer.head}",)
    arrays = builder.parameters.values()
    stored = next(p for p in arrays if p.role == "workspace" and layer.head in p.axes)
    shared = next(p for p in arrays if p.role == "input" and unit in p.axes)
    heads = f"{stored.name}.shape[{stored.axes.index(layer.head)}]"
    lines = [
        f"group_{unit}, share = ct.bid(1), ct.bid(2)",
        f"heads = {heads} // {shared.name}.shape[{shared.axes.index(unit)}]  # of a group",
        "per_share = ct.cdiv(heads, ct.num_blocks(2))",
        f"start_head = group_{unit} * heads + share * per_share",
        f"stop_head = ct.minimum(start_head + per_share, (group_{unit} + 1) * heads)",
    ]
    return "start_head, stop_head", lines, (f"size_{unit}", "shares")


def _store_scalar(parts: Parts, name: str, value: Expr) -> None:
    """Store a number of each token and head, under a name."""
    target = parts.builder.name_value(parts.each, f"{name}_tile", value, axes=(parts.time,))
    parts.each.append(_scalar_store(parts, name, target))


def _scalar_store(parts: Parts, name: str, value: Expr) -> Store:
    """The store of a number of each token and head in the buffer `name`, which has whole chunks: as few bytes go to memory
    faster from registers than through shared memory."""
    builder, layer = parts.builder, parts.builder.layer
    axes = (layer.batch, layer.head, layer.time)
    array = builder.declare(Parameter(name, "workspace", name, axes, "f32"))
    return Store(array, builder.slots(array), value, builder.tile_axes(axes), whole="True")


def flat_gradients(adjoint: Adjoint, gradients: Sorted) -> tuple[Gradient, ...]:
    """Those of inputs without a time axis whose narrower form is one number all along the rows: where that is passed, what a
    token adds is one number, which is summed with the others of a token and left to the kernel of those."""
    layer = adjoint.form.recurrence.layer
    row, _ = shared_axes(adjoint.form)
    summed = (g for g in gradients.rows if layer.time in g.terms[0].summed and gradients.scalars)
    return tuple(g for g in summed if any(row not in form for form in layer.tensor(to_name(g)).narrower))


def flat_name(gradient: Gradient) -> str:
    """The buffer of what each token adds to the gradient of an input that is one number all along the rows."""
    return f"{gradient.name}_token"


def _totals(parts: Parts, flats: Mapping[Gradient, Expr]) -> list[Result]:
    """The sums that leave one axis; with those of what tokens add to flat gradients, where such a form is passed."""
    builder, sums = parts.builder, parts.missing([*_over_rows(parts), *_over_time(parts)])
    if not flats:
        parts.each += parts.together(sums[: len(sums) // 2 * 2])
        return []
    results: list[Result] = []
    intra = builder.constant("intra")
    for gradient, value in flats.items():
        found = Sum(f"flat {gradient.name}", f"{gradient.name}_token_tile", value, parts.row, (parts.time,))
        body = parts.together(sums)
        with builder.apart():
            stored = store_gradient(builder, body, gradient, intra)
        results += [replace(r, uniform=parts.row) for r in stored]
        flat = parts.together([*sums, found])
        flat.append(_scalar_store(parts, flat_name(gradient), builder.known[found.key]))
        parts.each.append(When(flat_flag(builder, gradient), tuple(flat), tuple(body)))
        sums = []
    return results


def flat_flag(builder: KernelBuilder, gradient: Gradient) -> str:
    """The flag of an input's being one number all along the rows, where its gradient is summed so."""
    return builder.flag(f"{to_name(gradient)}_FLAT".upper(), f"{to_name(gradient)} flat")


def _over_rows(parts: Parts) -> Iterator[Sum]:
    """The sums over rows that gradients of weights and decays are made of. None beside a state without rows, where the compiler
    for sm_80 ends with "Invalid use-def chain in schedule" (tileiras 13.4)."""
    form, adjoint = parts.form, parts.adjoint
    if any(state.row_axis is None for state in form.states):
        return
    of_decays = [name for decay in adjoint.decays for name in decay.writes]
    for write in map(adjoint.write, [name for weight in adjoint.weights for name in weight.writes] + of_decays):
        for term in write.terms:
            assert term.row is not None
            yield parts.pull_of(form.state(term.state), term.row, write.column)
    for vector in (adjoint.vector(name) for adj in adjoint.decays for name in adj.vectors):
        yield from (parts.sight_of(form.read(name)) for name in vector.reads)


def _over_time(parts: Parts) -> Iterator[Sum]:
    """The same over the tokens that read."""
    adjoint = parts.adjoint
    for write in (adjoint.write(name) for adj in adjoint.weights for name in adj.writes):
        yield from map(parts.asked, write.scores)
    for vector in (adjoint.vector(name) for adj in adjoint.decays for name in adj.vectors):
        yield from map(parts.passed, vector.scores)


def _weight(parts: Parts, adj: WeightAdjoint) -> Expr:
    """The gradient of a weight."""
    terms: list[Expr] = []
    for write in map(parts.adjoint.write, adj.writes):
        for term in write.terms:
            state = parts.form.state(term.state)
            terms.append(mul(parts.carry(write.decay), parts.row_pulled(state, term.row, write.column)))
        terms += [parts.at_key(parts.asked(name)) for name in write.scores]
    return add(*terms)


def _decay(parts: Parts, adj: DecayAdjoint) -> Expr:
    """The gradient of a decay's running sum by what tokens read; what is asked for by the end of the chunk is stored apart."""
    form = parts.form
    total: list[Expr] = []
    taken: list[Expr] = []
    written: list[Expr] = []
    for vector in map(parts.adjoint.vector, adj.vectors):
        for read in map(form.read, vector.reads):
            total.append(mul(parts.grown(read.decay), parts.seen(read)))
        for name in vector.scores:
            total.append(Contract(parts.past(name), ONE, KEY))
            taken.append(parts.at_key(parts.passed(name)))
    for write in map(parts.adjoint.write, adj.writes):
        for term in write.terms:
            pulled = parts.row_pulled(form.state(term.state), term.row, write.column)
            written.append(mul(parts.weight(write.weight), parts.carry(write.decay), pulled))
    _store_scalar(parts, written_name(adj), add(*written))
    for state in (form.state(name) for name in adj.states):
        _store_met(parts, state)
    value = add(*total)
    for item in taken:
        value = Apply("sub", (value, item))
    return value


def _store_met(parts: Parts, state: ChunkState) -> None:
    """Store what reaches from before the chunk behind it, S . d_S_end of each row."""
    builder = parts.builder
    name, axes = met_name(state), met_axes(parts.form, state)
    array = builder.declare(Parameter(name, "workspace", name, axes, "f32"))
    target = Ref(builder.names.of("gradient", f"{name}_tile"), builder.tile_axes(axes))
    both = mul(builder.widened(parts.entry(state)), builder.widened(parts.end(state)))
    end = grown(parts.sums(state.decay, end=True).end)
    note = "what reaches from before the chunk behind it"
    parts.each.append(Let(target, mul(end, Contract(both, ONE, parts.column)), None, note))
    parts.each.append(Store(array, builder.slots(array), target, builder.tile_axes(axes)))


def _column(parts: Parts, gradient: Gradient, unit: str | None) -> Result:
    """Sum the gradient of an input along the column axis over the heads of a group, and store it."""
    builder, layer = parts.builder, parts.builder.layer
    assert isinstance(gradient.of, Ref)
    tensor = layer.tensor(gradient.of.name)
    target = Ref(builder.names.of("gradient", f"{gradient.name}_tile"), (parts.time, parts.column))
    parts.accumulators.append(target)
    for term in gradient.terms:
        _add_column(parts, target, term, ONE if term.factor == ONE else builder.arithmetic(parts.each, term.factor))
    shares: Axes = () if unit is None else (SHARES,)
    axes = (*shares, *builder.array_axes(tensor))
    array = builder.declare(Parameter(gradient.name, "gradient", tensor.name, axes, f"like {tensor.name}"))
    parts.after.append(Store(array, builder.slots(array), target, builder.tile_axes(axes)))
    return Result(tensor.name, gradient.name, axes, shares=unit is not None)


def _add_column(parts: Parts, target: Ref, term: Contribution, factor: Expr) -> None:
    """Add a contribution to the gradient `target` [L, N], its share of every two tokens after the last head."""
    builder, time = parts.builder, parts.time
    carried, intra = builder.constant("carried"), builder.constant("intra")
    write = next((w for w in parts.adjoint.writes if w.name == term.quantity), None)
    if write is not None:
        for written in write.terms:
            end = parts.end(parts.form.state(written.state))
            carry = mul(factor, parts.carry(write.decay))
            if written.row is None:
                parts.each.append(Let(target, Apply("add", (target, mul(carry, builder.widened(end))))))
            else:
                weighted = mul(builder.widened(parts.row_tile(written.row)), carry)
                parts.each.append(Dot(target, (weighted, end), parts.row, target, carried))
        for name in write.scores:
            mixed = parts.mix(name, retime(factor, time, KEY))
            score = parts.form.score(parts.adjoint.score(name).score)
            at_key = Ref(target.name, (KEY, parts.column))
            parts.after.append(Dot(at_key, (mixed, parts.vector_tile(score.vector)), time, at_key, intra))
        return
    vector = parts.adjoint.vector(term.quantity)
    for read in map(parts.form.read, vector.reads):
        weighted = mul(builder.widened(parts.read(read.name)), mul(factor, parts.grown(read.decay)))
        state = parts.form.state(read.state)
        if state.row_axis is None:
            outer = mul(weighted, builder.widened(parts.entry(state)))
            parts.each.append(Let(target, Apply("add", (target, outer))))
        else:
            parts.each.append(Dot(target, (weighted, parts.entry(state)), parts.row, target, carried))
    for name in vector.scores:
        score = parts.form.score(parts.adjoint.score(name).score)
        mixed = parts.mix(name, mul(retime(parts.weight(score.weight), time, KEY), factor))
        keys = retime(parts.column_tile(score.column), time, KEY)
        parts.after.append(Dot(target, (mixed, keys), KEY, target, intra))


def _gated(parts: Parts, gradient: Gradient) -> list[Result]:
    """The gradient of an optional input that gates outputs, for which they are computed again as they are before it."""
    builder = parts.builder
    assert isinstance(gradient.of, Ref)
    factors = [term.factor for term in gradient.terms]
    outputs = [o.value for o in parts.form.outputs if any(o.name == r.name for f in factors for r in refs(f))]
    used = {r.name for expr in (*factors, *outputs) for r in refs(expr)}
    for read in (r for r in parts.form.reads if r.name in used):
        parts.carried(read)
        parts.grown(read.decay)
        for interaction in read.interactions:
            parts.score(parts.form.score(interaction.score))
    body: list[Statement] = []
    each, parts.each = parts.each, body
    with builder.apart():
        parts.know(*factors)
        results = store_gradient(builder, body, gradient)
    parts.each = each
    parts.each.append(When(builder.presence(gradient.of.name), tuple(body)))
    return results
