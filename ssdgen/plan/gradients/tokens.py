"""The kernel of the gradients of per-token scalars, for a tile of heads: the adjoint of `chunk_cumsum`."""

from __future__ import annotations

from ssdgen.ir.adjoint import Adjoint, Gradient
from ssdgen.ir.chunkform import ChunkState
from ssdgen.ir.expr import ONE, Apply, Const, Contract, Expr, Ref, add
from ssdgen.ir.gradients import Result, TokenGradientKernel
from ssdgen.ir.plan import CHUNKS, Config, Cumsum, Let, Parameter, Slot, Statement, Store, When
from ssdgen.plan.builder import KernelBuilder
from ssdgen.plan.gradients.chunk import (
    flat_flag,
    flat_gradients,
    flat_name,
    met_axes,
    met_name,
    sum_name,
    written_name,
)
from ssdgen.plan.gradients.results import declare_part, store_gradient
from ssdgen.plan.gradients.sort import Sorted
from ssdgen.plan.lower import LOG2_MIN, where
from ssdgen.plan.place import CHUNK_TABLE, chunk_position, declare_packed
from ssdgen.plan.reads import shared_axes
from ssdgen.plan.walk import tile_constant

NAME = "token_gradients"


def token_gradient_kernel(
    adjoint: Adjoint, config: Config, gradients: Sorted
) -> tuple[TokenGradientKernel | None, tuple[Result, ...]]:
    """The kernel, and where it leaves the gradients of inputs; None if there are none to compute."""
    if not gradients.scalars:
        return None, ()
    layer = adjoint.form.recurrence.layer
    batch, time, head = layer.batch, layer.time, layer.head
    place = {
        batch: Slot(batch, "batch", "1"),
        time: Slot(time, "chunk", "CHUNK"),
        head: Slot(head, "head_tile", f"TILE_{head.upper()}"),
        CHUNKS: Slot(CHUNKS, "slot", "1"),
    }
    row, _ = shared_axes(adjoint.form)
    assert row is not None
    place[row] = Slot(row, "0", tile_constant(row))
    builder = KernelBuilder(adjoint.form, config, place, (time, head, row))
    declare_packed(builder, CHUNK_TABLE)
    body: list[Statement] = []
    valid = Ref("valid", (time,))
    for weight in adjoint.weights:
        builder.known[weight.name] = _load(builder, body, weight.name)
    for decay in adjoint.decays:
        sums = _load(builder, body, sum_name(decay))
        written = _load(builder, body, written_name(decay))
        target = Ref(builder.names.of("gradient", f"{decay.name}_tile"), (time, head))
        before = Ref(builder.names.fresh("written_before"), (time, head))
        body += [Cumsum(target, sums, back=True), Cumsum(before, written)]
        total: list[Expr] = [target, Apply("sub", (before, written))]
        for state in (adjoint.form.state(name) for name in decay.states):
            total.append(_met(builder, body, state))
        log2 = builder.tile(body, adjoint.form.decay(decay.decay).log2)
        name = f"{decay.decay}_log2"
        kept = Apply("ge", (builder.name_value(body, name, log2, "of one token", axes=(time, head)), Const(LOG2_MIN)))
        note = "of the natural logarithm: all that goes past; nothing where clamped"
        body.append(Let(target, where(Apply("and", (valid, kept)), add(*total)), None, note))
        builder.known[decay.name] = target
    results = [result for gradient in gradients.scalars for result in store_gradient(builder, body, gradient)]
    for gradient in flat_gradients(adjoint, gradients):
        body.append(_flat(builder, gradient, row))
    body.insert(0, Let(valid, Apply("lt", (Ref("token", (time,)), Ref("length"))), None, "false past the end"))
    builder.constant("chunk")
    builder.constant(f"tile_{head}")
    builder.finish(body)
    position = [
        *chunk_position(builder, guarded=True),
        "head_tile = ct.bid(1)",
        "token = chunk * CHUNK + ct.arange(CHUNK, dtype=ct.int32)",
        *builder.position,
    ]
    kernel = TokenGradientKernel(
        name=NAME,
        role=NAME,
        doc="From the gradients of a chunk's per-token scalars to those of their inputs, for a tile of heads.",
        parameters=builder.ordered_parameters(),
        grid=("cut.lanes * cut.slots", f"_rt.ceil_div(size_{head}, config.tile_{head})"),
        position=tuple(position),
        occupancy=f"occupancy_{NAME}",
        body=tuple(body),
    )
    return kernel, tuple(results)


def _load(builder: KernelBuilder, body: list[Statement], name: str) -> Ref:
    layer = builder.layer
    axes = (layer.batch, layer.head, layer.time)
    array = builder.declare(Parameter(name, "workspace", name, axes, "f32"))
    return builder.load(body, array, key=f"scalar {name}")


def _flat(builder: KernelBuilder, gradient: Gradient, row: str) -> When:
    """Add up what tokens add to the gradient of an input that is one number all along the rows, where it is passed so."""
    layer = builder.layer
    body: list[Statement] = []
    found = _load(builder, body, flat_name(gradient))
    target = Ref(builder.names.of("gradient", f"{gradient.name}_tile"), (layer.head,))
    part = declare_part(builder, gradient)
    slots = tuple(Slot(row, "0", "1") if s.axis == row else s for s in builder.slots(part))
    body += [Let(target, Contract(found, ONE, layer.time)), Store(part, slots, target, (layer.head,))]
    return When(flat_flag(builder, gradient), tuple(body))


def _met(builder: KernelBuilder, body: list[Statement], state: ChunkState) -> Expr:
    """What reaches through the whole chunk."""
    if state.row_axis is not None:
        builder.constant(f"tile_{state.row_axis}", f"size_{state.row_axis}")
    name = met_name(state)
    array = builder.declare(Parameter(name, "workspace", name, met_axes(builder.form, state), "f32"))
    met = builder.load(body, array, key=f"scalar {name}")
    return met if state.row_axis is None else Contract(met, ONE, state.row_axis)
