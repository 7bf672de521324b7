"""The kernel of the gradients of what is read, where they depend on it: one chunk and head a block."""

from __future__ import annotations

from ssdgen.ir.adjoint import Adjoint
from ssdgen.ir.expr import Ref
from ssdgen.ir.gradients import ChunkGradientKernel
from ssdgen.ir.plan import Config, Store, Workspace
from ssdgen.plan.gradients.arriving import depends_on_reads, load_arriving, read_array, read_axes, read_gradient
from ssdgen.plan.gradients.parts import Parts
from ssdgen.plan.lower import where
from ssdgen.plan.place import chunk_position

NAME = "read_gradients"


def read_workspaces(adjoint: Adjoint) -> tuple[Workspace, ...]:
    """The buffers of the gradients of what is read."""
    if not depends_on_reads(adjoint):
        return ()
    layer = adjoint.form.recurrence.layer
    lengths = {layer.batch: "cut.lanes", layer.time: "cut.slots * config.chunk"}
    out = []
    for gradient in adjoint.reads:
        axes = read_axes(adjoint, gradient)
        shape = tuple(lengths.get(a, f"size_{a}") for a in axes)
        assert isinstance(gradient.of, Ref)
        doc = f"the gradient of {gradient.of.name}, what each token reads"
        out.append(Workspace(gradient.name, axes, shape, "carried" if len(axes) > 3 else "f32", doc))
    return tuple(out)


def read_kernel(adjoint: Adjoint, config: Config) -> ChunkGradientKernel | None:
    """The kernel that makes again what each token reads, and stores its gradient; None where nobody needs that."""
    if not depends_on_reads(adjoint):
        return None
    parts = Parts.begin(adjoint, config)
    builder, layer = parts.builder, parts.builder.layer
    factors = [g.factor for g in adjoint.gates] + [t.factor for g in adjoint.reads for t in g.terms]
    parts.know(*factors)
    load_arriving(builder, parts.each, adjoint, {t.quantity for g in adjoint.reads for t in g.terms}, reads=())
    inside = builder.before_end()
    for gradient in adjoint.reads:
        value = read_gradient(builder, parts.each, gradient)
        array = read_array(builder, adjoint, gradient)
        axes = builder.tile_axes(builder.parameters[array].axes)
        parts.each.append(Store(array, builder.slots(array), where(inside, builder.widened(value)), axes))

    parts.finish()
    stored = next(p for p in builder.parameters.values() if p.role == "workspace" and layer.head in p.axes)
    heads = [f"heads = {stored.name}.shape[{stored.axes.index(layer.head)}]"] if layer.groups else []
    builder.used |= {"token", "length"}
    return ChunkGradientKernel(
        name=NAME,
        role=NAME,
        doc="The gradients of what the tokens of one chunk and head read, zero past the end.",
        parameters=builder.ordered_parameters(),
        grid=("cut.lanes * cut.slots", f"size_{layer.head}"),
        position=(*chunk_position(builder, guarded=True), "head = ct.bid(1)", *heads, *builder.position_lines("heads")),
        occupancy=f"occupancy_{NAME}",
        once=tuple(parts.once),
        heads="",
        accumulators=(),
        each=tuple(parts.each),
        after=(),
    )
