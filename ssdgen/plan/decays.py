"""How each kind of decay enters a kernel: running sums loaded, closed forms, or nothing at all."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ssdgen.ir.chunkform import ChunkForm, Decay, Weight
from ssdgen.ir.expr import ONE, ZERO, Apply, Axes, Const, Expr, Ref, is_per_token, mul, refs
from ssdgen.ir.layer import Layer
from ssdgen.ir.plan import Config, Last, Parameter, Statement
from ssdgen.plan.builder import KernelBuilder, Unsupported
from ssdgen.plan.lower import clamp_log2, exp2, float32, inline, minus_abs


@dataclass(frozen=True, slots=True)
class Sums:
    """The sums of a decay over a chunk, as tile expressions: through each token, before each token, through the last."""

    through: Expr
    before: Expr
    end: Expr


def stored_weight(layer: Layer, weight: Weight) -> bool:
    """Whether a weight varies from token to token, so that `chunk_cumsum` computes and stores it."""
    return is_per_token(inline(weight.value, {let.name: let.value for let in layer.lets}))


DERIVED = re.compile(r".*_(sum|before|entry|part|left|oldest|newest)")
"""Names of buffers that are made from the name of a decay or a state."""


def scalar_name(weight: Weight) -> str:
    """The name of a stored weight: its own, unless a buffer made from a decay's or a state's name could have that."""
    return f"{weight.name}_" if DERIVED.fullmatch(weight.name) else weight.name


def scalar_axes(form: ChunkForm, config: Config, name: str) -> Axes:
    """The axes of the stored per-token scalar `name`: those the schedule's `internal` gives to a name it is computed from,
    else batch, head, time."""
    layer, used = form.recurrence.layer, scalar_names(form, name)
    chosen = [axes for key, axes in config.internals if key in used]
    return chosen[0] if chosen else (layer.batch, layer.head, layer.time)


def scalar_names(form: ChunkForm, name: str) -> tuple[str, ...]:
    """The inputs and lets that the stored scalar `name` is computed from: any of them may give it its `internal` order."""
    layer, source = form.recurrence.layer, scalar_source(form, name)
    used = {r.name for r in (*refs(source), *refs(inline(source, {let.name: let.value for let in layer.lets})))}
    return tuple(n for n in (*(let.name for let in layer.lets), *(t.name for t in layer.inputs)) if n in used)


def scalar_source(form: ChunkForm, name: str) -> Expr:
    """The weight or log2 decay that the stored scalar `name` holds, or the running sum of."""
    for weight in form.weights:
        if scalar_name(weight) == name:
            return weight.value
    return next(d.log2 for d in form.decays if name in (f"{d.name}_sum", f"{d.name}_before"))


def load_scalar(builder: KernelBuilder, section: list[Statement], name: str) -> Ref:
    """Load a stored per-token scalar [L]."""
    axes = scalar_axes(builder.form, builder.config, name)
    parameter = builder.declare(Parameter(name, "workspace", name, axes, "f32"))
    return builder.load(section, parameter, key=f"scalar {name}")


def weight_tile(builder: KernelBuilder, head: list[Statement], section: list[Statement], weight: Weight) -> Expr:
    """A weight as a tile expression: stored [L], or a number of this head computed in `head`."""
    if weight.value == ONE:
        return ONE
    key = f"scalar {scalar_name(weight)}"
    if stored_weight(builder.layer, weight):
        load_scalar(builder, section, scalar_name(weight))
    elif key not in builder.known:
        builder.known[key] = builder.name_value(head, f"{weight.name}_tile", builder.tile(head, weight.value))
    if isinstance(weight.value, Ref):
        builder.known.setdefault(weight.value.name, builder.known[key])
    return builder.known[key]


def decay_sums(
    builder: KernelBuilder, head: list[Statement], section: list[Statement], decay: Decay, earlier: bool, end: bool
) -> Sums:
    """The sums of a decay; what does not change from chunk to chunk is computed in `head`."""
    match decay.kind:
        case "none":
            return Sums(ZERO, ZERO, ZERO)
        case "channel":
            raise Unsupported("a decay over key channels")
        case "constant":
            return _constant(builder, head, section, decay, earlier, end)
        case "token":
            return _stored(builder, section, decay, earlier, end)


def _stored(builder: KernelBuilder, section: list[Statement], decay: Decay, earlier: bool, end: bool) -> Sums:
    through = load_scalar(builder, section, f"{decay.name}_sum")
    last: Expr = ZERO
    if end:
        key = f"end {decay.name}"
        if key not in builder.known:
            target = Ref(builder.names.of("value", f"{decay.name}_end"))
            section.append(Last(target, through))
            builder.known[key] = target
        last = builder.known[key]
    return Sums(through, load_scalar(builder, section, f"{decay.name}_before") if earlier else ZERO, last)


def _constant(
    builder: KernelBuilder, head: list[Statement], section: list[Statement], decay: Decay, earlier: bool, end: bool
) -> Sums:
    """min(j + 1, valid) log2 a: the sum over j + 1 equal tokens, stopping at the last valid one."""
    time = builder.layer.time
    known, name = builder.known, decay.name
    if f"log2 {name}" not in known:
        value = clamp_log2(builder.tile(head, decay.log2))
        known[f"log2 {name}"] = builder.name_value(head, f"{name}_log2", value, "of one token")
        through = mul(Apply("add", (float32(Ref("token", (time,))), ONE)), known[f"log2 {name}"])
        known[f"sum {name}"] = builder.name_value(head, f"{name}_sum", through)
    rate = known[f"log2 {name}"]
    last: Expr = ZERO
    if end:
        if f"end {name}" not in known:
            valid = Apply("min", (Ref("CHUNK"), Apply("sub", (Ref("length"), mul(Ref("chunk"), Ref("CHUNK"))))))
            known[f"end {name}"] = builder.name_value(section, f"{name}_end", mul(float32(valid), rate))
        last = known[f"end {name}"]
    before = mul(float32(Ref("token", (time,))), rate) if earlier else ZERO
    return Sums(known[f"sum {name}"], before, last)


def decayed(later: Expr, earlier: Expr, bounded: Callable[[Expr], Expr] = minus_abs) -> Expr:
    """2^(later - earlier) for running sums later >= earlier; one if there is no decay.

    `bounded` keeps the difference at most 0: `at_most_0` where it is differentiated.
    """
    if later == ZERO and earlier == ZERO:
        return ONE
    return exp2(bounded(Apply("sub", (later, earlier))))


def grown(total: Expr) -> Expr:
    """2^total: what is left of a state after a running sum `total`."""
    return exp2(total) if total != Const(0) else ONE
