"""The equations of a spec: lets, states and outputs, each checked for what the chunked form needs."""

from __future__ import annotations

from ssdgen.diagnostics import NOWHERE, Span
from ssdgen.ir.expr import ZERO, Axes, Contract, Expr, Ref, axes_of, children, is_per_token, refs
from ssdgen.ir.layer import ANY, Dtype, Gate, Interval, Let, Output, State
from ssdgen.spec import syntax as s
from ssdgen.spec.affine import NotAffine, split
from ssdgen.spec.bounds import bounds
from ssdgen.spec.declare import dtypes_of, like_input
from ssdgen.spec.expression import Place, resolve
from ssdgen.spec.problems import listing
from ssdgen.spec.scope import Scope


def read_lets(statements: list[s.Assign], scope: Scope) -> None:
    """Fill `scope.lets` in order."""
    for statement in statements:
        name = statement.name
        free = scope.declare(name)
        value = resolve(statement.value, scope, Place("let", name.text))
        if not free:
            continue
        if value is None:
            scope.forgiven.add(name.text)
            continue
        scope.lets[name.text] = Let(name.text, value, name.span)
        scope.ranges[name.text] = bounds(value, scope.ranges)


def declare_states(statements: list[s.Declare | s.Assign], scope: Scope) -> dict[str, s.Form]:
    """Declare the states of the block, so that their axes are known; returns their forms by name."""
    forms: dict[str, s.Form] = {}
    for statement in statements:
        if not isinstance(statement, s.Declare):
            continue
        form, name = statement.form, statement.form.name
        free, axes = scope.declare(name), scope.axes_list(form.axes)
        dtypes = dtypes_of(statement.type.dtypes, scope)
        if statement.type.dtypes != () and dtypes is not None and dtypes != ("f32",):
            scope.problems.add("E030", statement.type.span, "a state is kept in f32", "write `: f32`")
        _plain_type(statement.type, "a state", scope)
        if free and axes is not None and _state_axes_fit(form, axes, scope):
            scope.state_axes[name.text] = axes
            forms[name.text] = form
        else:
            scope.forgiven.add(name.text)
    return forms


def read_states(statements: list[s.Declare | s.Assign], forms: dict[str, s.Form], scope: Scope) -> None:
    """Fill `scope.states`: each declared state with its one update, split into decay and input."""
    updates: dict[str, s.Assign] = {}
    for statement in statements:
        if not isinstance(statement, s.Assign):
            continue
        name = statement.name
        if name.text not in scope.state_axes:
            if name.text not in scope.forgiven:
                hint = f"declare it above, as in `{name.text}[b h p n] : f32`"
                scope.problems.add("E052", name.span, f"no state is called `{name.text}`", hint)
        elif name.text in updates:
            hint = "a state has one equation: add the terms up in it"
            scope.problems.add("E052", name.span, f"`{name.text}` has two updates", hint)
        else:
            updates[name.text] = statement
    for name, form in forms.items():
        if name in updates:
            _read_update(name, form, updates[name], scope)
        elif name not in scope.forgiven:
            hint = f"write below it `{name}[{scope.time or 't'}] = decay * {name}[{scope.time or 't'}-1] + ...`"
            scope.problems.add("E052", form.span, f"state `{name}` has no update", hint)


def _plain_type(kind: s.Type, what: str, scope: Scope) -> None:
    """Refuse a range, a default and `optional` where only a dtype makes sense."""
    for part, word in ((kind.range, "range"), (kind.default, "default"), (kind.optional, "`optional`")):
        if part is not None:
            scope.problems.add("E035", part.span, f"{what} has no {word.strip('`')}", "only inputs have")


def _state_axes_fit(form: s.Form, axes: Axes, scope: Scope) -> bool:
    add = scope.problems.add
    if not 3 <= len(axes) <= 4:
        hint = "a state is [batch head row column], or [batch head column] for a vector, as in `S[b h p n]`"
        add("E051", form.span, f"a state has 3 or 4 axes, `{form.name.text}` has {len(axes)}", hint)
        return False
    for word in form.axes:
        if word.text == scope.time:
            add(
                "E051",
                word.span,
                f"a state has no time axis `{word.text}`",
                f"its value at a token is `{form.name.text}[{word.text}]`",
            )
            return False
        if word.text in scope.shared:
            add(
                "E051",
                word.span,
                f"a state has no group axis `{word.text}`",
                f"every head has its own: `{scope.shared[word.text]}`",
            )
            return False
    if axes[:2] != (scope.batch, scope.head):
        hint = f"the first two axes of every state are `{scope.batch} {scope.head}`, batch and head"
        add("E051", form.span, f"`{form.name.text}` starts with `{axes[0]} {axes[1]}`", hint)
        return False
    return True


def _read_update(name: str, form: s.Form, statement: s.Assign, scope: Scope) -> None:
    add = scope.problems.add
    if [w.text for w in statement.axes] != [scope.time]:
        add("E052", statement.name.span, f"an update says at which token: `{name}[{scope.time}] = ...`")
        return
    update = resolve(statement.value, scope, Place("state", name))
    if update is None:
        scope.forgiven.add(name)
        return
    axes = scope.state_axes[name]
    _check_axes(update, axes, name, f"state `{name}`", statement.value.span, scope)
    try:
        parts = split(update, name)
    except NotAffine as error:
        hint = "the update must be `decay * S[t-1] + input` with a decay and an input free of the state"
        add("E053", error.term.span, str(error), hint.replace("S[t-1]", f"{name}[{scope.time}-1]"))
        return
    if parts.decay == ZERO:
        hint = f"without `{name}[{scope.time}-1]` this is a value of one token: name it with `let`"
        add("E057", statement.span, f"the update of `{name}` does not read `{name}[{scope.time}-1]`", hint)
        return
    span = parts.decay.span if parts.decay.span != NOWHERE else statement.value.span
    _check_decay(parts.decay, span, scope)
    scope.states[name] = State(name, axes, "f32", update, parts.decay, parts.input, form.span)


def _check_decay(decay: Expr, span: Span, scope: Scope) -> None:
    interval = bounds(decay, scope.ranges)
    lies = f"all that is known is that it lies in {interval}" if interval != ANY else "nothing is known of its range"
    hint = _range_hint(decay, scope)
    if interval.high > 1:
        scope.problems.add("E055", span, f"the decay `{decay}` is not provably at most 1: {lies}", hint)
    elif interval.low < 0 or (interval.low == 0 and not interval.low_open):
        scope.problems.add("E056", span, f"the decay `{decay}` is not provably above 0: {lies}", hint)


def _range_hint(decay: Expr, scope: Scope) -> str:
    """Which ranges a proof would need."""
    free = [r.name for r in refs(decay) if scope.ranges.get(r.name, ANY) == ANY]
    if free:
        what = "the range" if len(free) == 1 else "the ranges"
        example = free[0]
        declared = scope.inputs.get(example)
        form = f"{example}[{' '.join(declared.axes)}]" if declared else example
        return f"declare {what} of {listing(free)}, as in `{form} : f32 < 0` or `in (0, 1]`"
    return "a decay is in (0, 1]: `exp` of something at most 0, a `sigmoid`, or a range that says so"


def _check_axes(value: Expr, axes: Axes, name: str, what: str, span: Span, scope: Scope) -> None:
    """Every axis of the value must be one of `axes`."""
    for axis in axes_of(value):
        if axis not in axes:
            culprit = _deepest_with(value, axis)
            hint = f"sum over it with `a . b`, or declare `{name}` with `{axis}`"
            scope.problems.add(
                "E047",
                culprit.span if culprit.span != NOWHERE else span,
                f"this varies over `{axis}`, which {what} has not",
                hint,
            )
    _ = is_per_token


def _deepest_with(expr: Expr, axis: str) -> Expr:
    """The smallest part of `expr` that brings in `axis`."""
    for child in children(expr):
        if axis in axes_of(child) and not (isinstance(expr, Contract) and expr.axis == axis):
            return _deepest_with(child, axis)
    return expr


def read_outputs(statements: list[s.Declare | s.Assign], scope: Scope) -> None:
    """Fill `scope.outputs`: each declared output with its equation and its gates."""
    kinds: dict[str, s.Declare] = {}
    for statement in statements:
        if isinstance(statement, s.Declare):
            axes = scope.axes_list(statement.form.axes)
            _plain_type(statement.type, "an output", scope)
            name = statement.form.name
            if scope.declare(name) and axes is not None and _output_axes_fit(statement.form, axes, scope):
                scope.output_axes[name.text] = axes
                kinds[name.text] = statement
            else:
                scope.forgiven.add(name.text)
    values: dict[str, Expr] = {}
    gates: dict[str, list[Gate]] = {}
    assigned: dict[str, s.Assign] = {}
    for statement in statements:
        if isinstance(statement, s.Assign):
            _read_equation(statement, assigned, values, gates, scope)
    for name, declared in kinds.items():
        if name not in assigned and name not in scope.forgiven:
            hint = f"write below it `{name} = S[t] . q`"
            scope.problems.add("E061", declared.form.span, f"output `{name}` has no equation", hint)
        dtypes, like = _output_dtypes(declared.type, scope)
        if name in values and dtypes is not None:
            axes, span = scope.output_axes[name], declared.form.span
            found = tuple(gates.get(name, ()))
            scope.outputs[name] = Output(name, axes, like, dtypes, values[name], found, span)


def _output_dtypes(kind: s.Type, scope: Scope) -> tuple[tuple[Dtype, ...] | None, str | None]:
    if kind.like is None:
        dtypes = dtypes_of(kind.dtypes, scope)
        if dtypes is not None and len(dtypes) > 1:
            hint = "write one dtype, or `like x` to follow an input"
            scope.problems.add("E035", kind.span, "an output has one dtype", hint)
        return dtypes, None
    tensor = like_input(kind.like, scope)
    if tensor is None:
        return None, None
    if tensor.optional:
        scope.problems.add(
            "E031", kind.like.span, f"`{tensor.name}` may be absent", "be like an input that always is there"
        )
    return tensor.dtypes, tensor.like or tensor.name


def _output_axes_fit(form: s.Form, axes: Axes, scope: Scope) -> bool:
    for axis, what in ((scope.batch, "batch"), (scope.time, "time")):
        if axis and axis not in axes:
            hint = f"there is one value a token: `{form.name.text}[{scope.batch} {scope.time} ...]`"
            scope.problems.add("E051", form.span, f"output `{form.name.text}` lacks the {what} axis `{axis}`", hint)
            return False
    for word in form.axes:
        if word.text in scope.shared:
            hint = f"every head has its own: `{scope.shared[word.text]}`"
            scope.problems.add("E051", word.span, f"an output has no group axis `{word.text}`", hint)
            return False
    return True


def _read_equation(
    statement: s.Assign,
    assigned: dict[str, s.Assign],
    values: dict[str, Expr],
    gates: dict[str, list[Gate]],
    scope: Scope,
) -> None:
    name, add = statement.name, scope.problems.add
    if name.text not in scope.output_axes:
        if name.text not in scope.forgiven:
            hint = f"declare it above, as in `{name.text}[b t h p] : like x`"
            add("E061", name.span, f"no output is called `{name.text}`", hint)
        return
    if statement.axes:
        add(
            "E061",
            statement.name.span,
            "an output's equation has no brackets on its left",
            f"write `{name.text} = ...`",
        )
        return
    if statement.when is not None:
        _read_gate(statement, statement.when, assigned, gates, scope)
        return
    if name.text in assigned:
        hint = f"line {assigned[name.text].span.line} has the other; a `when` may change it"
        add("E061", name.span, f"output `{name.text}` has two equations", hint)
        return
    assigned[name.text] = statement
    value = resolve(statement.value, scope, Place("output", name.text))
    if value is None:
        return
    axes = scope.broadcast(scope.output_axes[name.text])
    _check_axes(value, axes, name.text, f"output `{name.text}`", statement.value.span, scope)
    for axis in axes:
        if axis not in axes_of(value):
            hint = f"declare `{name.text}` without `{axis}`"
            add("E047", statement.value.span, f"this is the same for every `{axis}`, an axis of `{name.text}`", hint)
    _check_reads(value, scope)
    values[name.text] = value


def _read_gate(
    statement: s.Assign, when: s.Word, assigned: dict[str, s.Assign], gates: dict[str, list[Gate]], scope: Scope
) -> None:
    name, add = statement.name.text, scope.problems.add
    tensor = scope.inputs.get(when.text)
    if tensor is None or not tensor.optional:
        optional = [t.name for t in scope.inputs.values() if t.optional]
        if when.text not in scope.forgiven:
            hint = f"declare it so: `{when.text}[b t h p] : like x optional`"
            if tensor is None:
                hint = f"the optional inputs are {listing(optional)}" if optional else "no input is optional"
            add("E063", when.span, f"`{when.text}` is not an optional input", hint)
        return
    if name not in assigned:
        add("E063", statement.span, f"`when` changes `{name}` before it has a value", f"put `{name} = ...` above it")
        return
    if any(gate.tensor == when.text for gate in gates.get(name, [])):
        add("E063", statement.span, f"`{name}` has two equations for `{when.text}`", "write one")
        return
    scope.used.add(when.text)
    value = resolve(statement.value, scope, Place("gate", name, when.text))
    if value is not None:
        axes = scope.broadcast(scope.output_axes[name])
        _check_axes(value, axes, name, f"output `{name}`", statement.value.span, scope)
        if not any(r.name == name for r in refs(value)):
            add(
                "E063",
                statement.span,
                f"this drops the value of `{name}`",
                f"the new value is one of `{name}` and `{when.text}`",
            )
        gates.setdefault(name, []).append(Gate(when.text, value, statement.span))


def _check_reads(value: Expr, scope: Scope) -> None:
    """States are read by a sum over a channel axis with a vector, nothing else."""
    match value:
        case Contract(left=Ref(name=name), right=right) if name in scope.state_axes:
            if scope.states_in(right):
                add = scope.problems.add
                add(
                    "E062",
                    right.span,
                    "a state is read with a vector that is free of states",
                    "sum one state at a time",
                )
        case Ref(name=name) if name in scope.state_axes:
            hint = f"sum it over its last axis with a vector, as in `{value} . q`; anything else comes after that"
            scope.problems.add("E062", value.span, f"the whole state `{name}` is not a value of an output", hint)
        case _:
            for child in children(value):
                _check_reads(child, scope)


def range_of(name: str, scope: Scope) -> Interval:
    """What is known of a name's range."""
    return scope.ranges.get(name, ANY)
