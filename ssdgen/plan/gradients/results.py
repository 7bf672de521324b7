"""The gradient of a let or an input, and where a kernel leaves it."""

from __future__ import annotations

from ssdgen.ir.adjoint import Gradient
from ssdgen.ir.expr import ONE, Apply, Contract, Expr, Ref
from ssdgen.ir.gradients import Result
from ssdgen.ir.plan import CHUNKS, Inner, Let, Parameter, Statement, Store
from ssdgen.plan.builder import KernelBuilder
from ssdgen.plan.gradients.arriving import combined


def store_gradient(
    builder: KernelBuilder, section: list[Statement], gradient: Gradient, precision: str | None = None
) -> list[Result]:
    """Append the gradient of a let or an input from quantities that are `known`, and, of an input, its store: of one without
    tokens the sum over those of the chunk, in a buffer; on the tensor cores if there is a `precision` for it."""
    layer = builder.layer
    assert isinstance(gradient.of, Ref)
    value, over_tokens = combined(builder, section, gradient), layer.time in gradient.terms[0].summed
    factors, key = _factors(value), f"gradient {value}"
    value = builder.known.get(key, value)
    if over_tokens:
        value = Contract(value, ONE, layer.time)
    target = Ref(builder.names.of("gradient", f"{gradient.name}_tile"), builder.natural(value))
    if over_tokens and precision and factors:
        section.append(Inner(target, *factors, layer.time, precision))
    elif value != target:
        section.append(Let(target, value))
    builder.known[gradient.name] = target
    if not over_tokens:
        builder.known[key] = target
    if gradient.of.name not in {t.name for t in layer.inputs}:
        return []
    tensor = layer.tensor(gradient.of.name)
    if over_tokens:
        array = declare_part(builder, gradient)
    else:
        axes = builder.array_axes(tensor)
        array = builder.declare(Parameter(gradient.name, "gradient", tensor.name, axes, f"like {tensor.name}"))
    axes = builder.parameters[array].axes
    section.append(Store(array, builder.slots(array), target, builder.tile_axes(axes)))
    return [Result(tensor.name, part_name(gradient) if over_tokens else gradient.name, axes)]


def part_name(gradient: Gradient) -> str:
    """The buffer of what each chunk adds to a gradient."""
    return f"{gradient.name}_part"


def declare_part(builder: KernelBuilder, gradient: Gradient) -> str:
    """The buffer of what each chunk adds to the gradient of an input without a time axis."""
    layer = builder.layer
    assert isinstance(gradient.of, Ref)
    rest = tuple(a for a in builder.array_axes(layer.tensor(gradient.of.name)) if a not in (layer.batch, layer.time))
    axes = (layer.batch, CHUNKS, *(rest if layer.head in rest else (layer.head, *rest)))
    return builder.declare(Parameter(part_name(gradient), "workspace", part_name(gradient), axes, "f32"))


def _factors(value: Expr) -> tuple[Ref, Ref] | None:
    """The two tiles of which `value` is the product, as they were before they became float32; None if it is another."""
    match value:
        case Apply(op="mul", args=(left, right)):
            bare = [x.args[0] if isinstance(x, Apply) and x.op == "float32" else x for x in (left, right)]
            match bare:
                case [Ref() as a, Ref() as b] if a.axes == b.axes and len(a.axes) == 2:
                    return a, b
    return None
