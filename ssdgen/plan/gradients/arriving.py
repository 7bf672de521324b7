"""What arrives: gradients of outputs, through the gates, to those of what is read of the states.

Where an output is a linear function of what it reads, every kernel computes them anew from the gradients of outputs. Where it
is not, they depend on what was read: then a kernel of its own computes and stores them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ssdgen.ir.adjoint import Adjoint, Gradient
from ssdgen.ir.expr import ONE, Axes, Contract, Expr, Ref, add, mul, refs
from ssdgen.ir.layer import Layer
from ssdgen.ir.plan import Let, Parameter, Statement, When
from ssdgen.plan.builder import KernelBuilder
from ssdgen.plan.walk import WalkBuilder


def depends_on_reads(adjoint: Adjoint) -> bool:
    """Whether gradients of what is read depend on what was."""
    layer = adjoint.form.recurrence.layer
    factors = [g.factor for g in adjoint.gates] + [t.factor for g in adjoint.reads for t in g.terms]
    return not all(_of_inputs(layer, factors)) or any(t.summed for g in adjoint.reads for t in g.terms)


def _of_inputs(layer: Layer, exprs: Iterable[Expr]) -> Iterable[bool]:
    """Whether each expression refers to nothing but inputs, lets and parameters."""
    known = {t.name for t in layer.inputs} | {let.name for let in layer.lets} | {p.name for p in layer.params}
    return (all(ref.name in known for ref in refs(expr)) for expr in exprs)


def read_axes(adjoint: Adjoint, gradient: Gradient) -> Axes:
    """The axes of the buffer of the gradient of what is read: batch, head, time, and the row axis if the state has one."""
    layer = adjoint.form.recurrence.layer
    assert isinstance(gradient.of, Ref)
    row = adjoint.form.state(adjoint.form.read(gradient.of.name).state).row_axis
    return (layer.batch, layer.head, layer.time, *([row] if row else []))


def read_array(builder: KernelBuilder, adjoint: Adjoint, gradient: Gradient) -> str:
    """Declare that buffer: in the dtype that products round it to, where they do."""
    axes = read_axes(adjoint, gradient)
    dtype = "carried" if len(axes) > 3 else "f32"
    return builder.declare(Parameter(gradient.name, "workspace", gradient.name, axes, dtype))


def load_arriving(
    builder: WalkBuilder,
    section: list[Statement],
    adjoint: Adjoint,
    used: Collection[str] = (),
    reads: Collection[str] | None = None,
) -> None:
    """Make `known` by name the gradients of `reads`, of all of them by default, and those of outputs and behind gates that are
    `used`."""
    found = [g for g in adjoint.reads if isinstance(g.of, Ref) and (reads is None or g.of.name in reads)]
    stored = depends_on_reads(adjoint)
    wanted = set(used) | (set() if stored else {t.quantity for g in found for t in g.terms})
    for gate in reversed(adjoint.gates):
        if gate.name in wanted:
            wanted.add(gate.quantity)
    layouts = dict(builder.config.layouts)
    for arriving in adjoint.outputs:
        if arriving.name in wanted:
            declared = next(o for o in builder.layer.outputs if o.name == arriving.output)
            axes = layouts.get(declared.name, declared.axes)
            dtype = declared.dtypes[0] if declared.like is None else f"like {declared.like}"
            array = builder.declare(Parameter(arriving.name, "arriving", arriving.name, axes, dtype))
            builder.known[arriving.name] = builder.load(section, array, builder.latency(arriving.name))
    for gate in adjoint.gates:
        if gate.name in wanted:
            before = builder.known[gate.quantity]
            target = Ref(builder.names.of("gradient", f"{gate.name}_tile"), before.axes)
            body: list[Statement] = []
            with builder.apart():
                value = mul(builder.arithmetic(body, gate.factor), builder.widened(before))
            gated = (*body, Let(target, value))
            section.append(When(builder.presence(gate.tensor), gated, (Let(target, before),)))
            builder.known[gate.name] = builder.known[f"array {gate.name}"] = target
    for gradient in found:
        if stored:
            builder.known[gradient.name] = builder.load(section, read_array(builder, adjoint, gradient))
        else:
            builder.known[gradient.name] = read_gradient(builder, section, gradient)


def read_gradient(builder: KernelBuilder, section: list[Statement], gradient: Gradient) -> Ref:
    """The gradient of what is read, from quantities that are `known`."""
    if [t.factor for t in gradient.terms] == [ONE] and not gradient.terms[0].summed:
        return builder.known[gradient.terms[0].quantity]
    return builder.name_value(section, f"{gradient.name}_tile", combined(builder, section, gradient))


def combined(builder: KernelBuilder, section: list[Statement], gradient: Gradient) -> Expr:
    """The sum of a gradient's contributions at one token and head, from quantities that are `known`; axes of channels that are
    summed over are gone."""
    terms = []
    for term in gradient.terms:
        quantity = builder.widened(builder.known[term.quantity])
        value = quantity if term.factor == ONE else mul(builder.arithmetic(section, term.factor), quantity)
        for axis in (a for a in term.summed if a in builder.natural(value) and a != builder.layer.time):
            value = Contract(value, ONE, axis)
        terms.append(value)
    return add(*terms)
