"""A Plan as a person reads it: what every kernel loads, multiplies and stores. `t'` is the time of tokens looked back at."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from textwrap import wrap

from ssdgen.ir.expr import Axes, Expr, Ref, rewrite, to_text
from ssdgen.ir.gradients import BackKernel, ChunkGradientKernel, EntryKernel, TokenGradientKernel
from ssdgen.ir.plan import (
    KEY,
    AnyKernel,
    Cumsum,
    Dot,
    GroupKernel,
    HalfScale,
    If,
    Inner,
    Kernel,
    Knob,
    Last,
    Let,
    Load,
    OutputKernel,
    Parameter,
    Plan,
    Reach,
    Round,
    Rows,
    Slot,
    StateKernel,
    Statement,
    StepKernel,
    Store,
    SumTogether,
    TokenKernel,
    WalkKernel,
    When,
    Zeros,
)
from ssdgen.plan.settings import variant

WIDTH = 110
GLUE = "\N{NO-BREAK SPACE}"


def describe(plan: Plan) -> str:
    """The text of `plan`: its knobs, its buffers, its kernels in launch order and who launches which."""
    name = plan.form.recurrence.layer.name
    if plan.refused:
        return f"{name}: no kernels, the portable form only: {plan.refused}"
    lines = [f"{name}: {plan.config.plan}, {len(plan.kernels)} kernels", variant(plan.config), "", "knobs"]
    lines += _columns((k.name, _defaults(k), k.doc) for k in plan.knobs)
    if plan.workspaces:
        lines += ["", "buffers between kernels"]
        lines += _columns((f"{w.name}{_of(w.axes)}", w.dtype, w.doc) for w in plan.workspaces)
    for kernel in plan.kernels:
        lines += ["", *_kernel(kernel)]
    first, *rest = (_launched(k) for k in plan.kernels)
    lines += ["", "launches", f"  {', '.join((first, *map(_found, plan.reaches), *rest))}"]
    if plan.step.kernels:
        lines += ["", "knobs of a step", *_columns((k.name, _defaults(k), k.doc) for k in plan.step.knobs)]
    for step in plan.step.kernels:
        lines += ["", *_kernel(step)]
    return "\n".join(lines)


def describe_gradients(plan: Plan) -> str:
    """The text of the plan of a plan's gradients: buffers, and kernels in launch order."""
    name, gradients = plan.form.recurrence.layer.name, plan.gradients
    if plan.refused or gradients is None:
        return f"{name}: no kernels, and so none of gradients: {plan.refused}"
    if gradients.refused:
        return f"{name}: gradients are those of the portable form, for want of kernels: {gradients.refused}"
    lines = [f"{name}: gradients, {len(gradients.kernels)} kernels", "", "knobs"]
    lines += _columns((k.name, _defaults(k), k.doc) for k in gradients.plan.knobs)
    lines += ["", "buffers between kernels"]
    lines += _columns((f"{w.name}{_of(w.axes)}", w.dtype, w.doc) for w in gradients.plan.workspaces)
    for kernel in gradients.kernels:
        lines += ["", *_kernel(kernel)]
    lines += [f"\nbehind the first, {_found(r)}" for r in gradients.plan.reaches]
    return "\n".join(lines)


def _found(reach: Reach) -> str:
    """What finds how far the ends of segments reach, and where it is stored."""
    return f"segment_reach of {reach.sums} for {' and '.join(n for n in (reach.oldest, reach.newest) if n)}"


def _launched(kernel: AnyKernel) -> str:
    return f"{kernel.name} if {kernel.condition}" if isinstance(kernel, GroupKernel) else kernel.name


def _kernel(kernel: Kernel) -> Iterator[str]:
    yield f"kernel {kernel.name}, blocks: {' x '.join(map(_host, kernel.grid))}"
    yield from (f"  {line}" for line in wrap(kernel.doc, WIDTH))
    arrays = ", ".join(_array(p) for p in kernel.parameters if p.is_array)
    yield from (f"  {line}".replace(GLUE, " ") for line in wrap(f"arrays: {arrays}", WIDTH, subsequent_indent="  "))
    match kernel:
        case TokenKernel(body=body) | GroupKernel(body=body) | TokenGradientKernel(body=body):
            yield from _statements(body)
        case BackKernel() | EntryKernel():
            back = isinstance(kernel, BackKernel)
            yield from _statements(kernel.before)
            if kernel.jump:
                yield "  for before of the segments behind, the last first" if back else "  for before of segment"
                yield from _statements(kernel.jump, "    ")
            yield "  for chunk of the segment, the last first" if back else f"  for chunk of {_host(kernel.chunks)}"
            yield from _statements((*kernel.enter, *kernel.step), "    ")
            yield from _after(kernel.after)
        case ChunkGradientKernel():
            yield from _statements(kernel.once)
            yield from (f"  {_named(a)} = 0" for a in kernel.accumulators)
            if kernel.heads:
                yield f"  for head of {_host(kernel.heads)}"
            yield from _statements(kernel.each, "    " if kernel.heads else "  ")
            yield from _statements(kernel.after)
        case StateKernel():
            yield from _statements(kernel.before)
            yield f"  for chunk of {_host(kernel.chunks)}"
            yield from _statements((*kernel.enter, *kernel.step), "    ")
            yield from _after(kernel.after)
        case WalkKernel():
            yield from _statements(kernel.before)
            if kernel.jump:
                yield "  for before of segment"
                yield from _statements(kernel.jump, "    ")
            yield f"  for chunk of {_host(kernel.chunks)}"
            yield from (f"    {_named(a)} = 0" for a in kernel.accumulators)
            yield from _statements((*kernel.contract, *kernel.combine, *kernel.outputs, *kernel.advance), "    ")
            yield from _after(kernel.after)
        case StepKernel():
            yield from _statements(kernel.before)
            yield "  for token of length"
            yield from _statements(kernel.token, "    ")
            yield "  if into >= 0"
            yield from _statements(kernel.after, "    ")
        case OutputKernel():
            yield from (
                ["  as many blocks as the GPU holds, each of which takes these in turn"] if kernel.places else []
            )
            yield from _statements(kernel.before)
            yield from (f"  {_named(a)} = 0" for a in kernel.accumulators)
            yield f"  for {kernel.tile} of {_host(kernel.tiles)}"
            yield from _statements(kernel.contract, "    ")
            yield from _statements((*kernel.combine, *kernel.outputs))


def _after(after: Iterable[tuple[str, tuple[Statement, ...]]]) -> Iterator[str]:
    for condition, stores in after:
        yield from ([f"  if {_host(condition)}"] if condition else [])
        yield from _statements(stores, "    " if condition else "  ")


def _statements(statements: Iterable[Statement], indent: str = "  ") -> Iterator[str]:
    for statement in statements:
        if isinstance(statement, If):
            yield f"{indent}if {_host(statement.condition)}"
            yield from _statements(statement.body, f"{indent}  ")
        elif isinstance(statement, When):
            yield f"{indent}if {statement.flag}"
            yield from _statements(statement.body, f"{indent}  ")
            if statement.otherwise:
                yield f"{indent}else"
                yield from _statements(statement.otherwise, f"{indent}  ")
        else:
            yield indent + _statement(statement)


def _statement(
    statement: Load | Zeros | Let | Cumsum | Last | Rows | HalfScale | Dot | Inner | SumTogether | Round | Store,
) -> str:
    match statement:
        case Load(target=target, array=array, slots=slots, latency=latency):
            return f"{_named(target)} = load {array}{_slots(slots)}" + (f"  {latency}" if latency else "")
        case Zeros(target=target):
            return f"{_named(target)} = 0"
        case Let(target=target, value=value, note=note):
            return f"{_named(target)} = {_text(value)}" + (f"  # {note}" if note else "")
        case Cumsum(target=target, value=value):
            return f"{_named(target)} = cumsum({_text(value)})"
        case Rows(targets=targets, value=value):
            return f"{', '.join(map(_named, targets))} = rows of {_text(value)}"
        case HalfScale(target=target, value=value, over=over):
            return f"{_named(target)} = float16 scale of {_text(value)} over {over}"
        case Round(target=target, value=value, array=array):
            return f"{_named(target)} = {_text(value)} in the dtype of {array}"
        case Last(target=target, value=value):
            return f"{_named(target)} = last({_text(value)})"
        case Dot(target=target, factors=(left, right), over=over, accumulator=total, precision=precision):
            product = f"{_factor(left)} . {_factor(right)} over {over}, {precision}"
            return f"{_named(target)} = {_text(total)} + {product}"
        case Inner(target=target, left=left, right=right, over=over, precision=precision):
            return f"{_named(target)} = {_text(left)} . {_text(right)} over {over}, {precision}"
        case SumTogether(targets=targets, values=values, over=over):
            axes = " and ".join(dict.fromkeys(over))
            return f"{', '.join(map(_named, targets))} = sums of {', '.join(map(_factor, values))} over {axes}"
        case Store(array=array, slots=slots, value=value):
            return f"store {array}{_slots(slots)} = {_text(value)}"


def _text(value: Expr) -> str:
    """`value`, a tile of the tokens looked back at marked: `s - s'`."""

    def mark(e: Expr) -> Expr | None:
        return replace(e, name=f"{e.name}'") if isinstance(e, Ref) and e.axes[:1] == (KEY,) else None

    return to_text(rewrite(value, mark))


def _factor(value: Expr) -> str:
    return _text(value) if isinstance(value, Ref) else f"({_text(value)})"


def _host(code: str) -> str:
    """A host expression without the modules that its names come from."""
    return re.sub(r"\bcdiv\b", "ceil_div", re.sub(r"\b(?:_rt|ct|config)\.", "", code))


def _named(target: Ref) -> str:
    return f"{target.name}{_of(target.axes)}"


def _of(axes: Axes) -> str:
    return f"[{' '.join(axes)}]" if axes else ""


def _slots(slots: Iterable[Slot]) -> str:
    return f"[{', '.join(s.index if s.extent == '1' else f'{s.index}:{s.extent}' for s in slots)}]"


def _array(parameter: Parameter) -> str:
    return f"{parameter.name}{_of(parameter.axes)} {parameter.role}".replace(" ", GLUE)


def _defaults(knob: Knob) -> str:
    """The default; where dtypes differ, each value with the dtypes of the inputs that it is for."""
    by_value: dict[str, list[str]] = {}
    for dtype, value in knob.defaults:
        by_value.setdefault(str(value), []).append(dtype)
    if len(by_value) == 1:
        return next(iter(by_value))
    return ", ".join(f"{value} ({' '.join(dtypes)})" for value, dtypes in by_value.items())


def _columns(rows: Iterable[tuple[str, str, str]]) -> list[str]:
    table = list(rows)
    first, second = (max(len(row[i]) for row in table) for i in (0, 1))
    return [f"  {a:{first}}  {b:{second}}  {c}".rstrip() for a, b, c in table]
