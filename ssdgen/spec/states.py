"""Lets and states: the values of one token, and what is carried from token to token."""

from __future__ import annotations

from ssdgen.diagnostics import NOWHERE, Span
from ssdgen.ir.expr import ZERO, Axes, Contract, Expr, axes_of, children, refs
from ssdgen.ir.layer import ANY, Let, State
from ssdgen.spec import syntax as s
from ssdgen.spec.affine import NotAffine, split
from ssdgen.spec.bounds import bounds
from ssdgen.spec.declare import dtypes_of
from ssdgen.spec.expression import Place, resolve
from ssdgen.spec.problems import listing
from ssdgen.spec.scope import Scope


def read_lets(statements: list[s.Assign], scope: Scope) -> None:
    """Fill `scope.lets` in order."""
    scope.later = {statement.name.text for statement in statements}
    for statement in statements:
        name = statement.name
        value = resolve(statement.value, scope, Place("let", name.text))
        scope.later.discard(name.text)
        if not scope.declare(name):
            continue
        if value is None:
            scope.forgiven.add(name.text)
            continue
        scope.lets[name.text] = Let(name.text, value, name.span)
        scope.ranges[name.text] = bounds(value, scope.ranges)


def declare_states(declared: list[s.Declare], scope: Scope) -> dict[str, s.Form]:
    """Declare the states of the block, so that their axes are known; returns their forms by name."""
    forms: dict[str, s.Form] = {}
    for statement in declared:
        form, name = statement.form, statement.form.name
        free, axes = scope.declare(name), scope.axes_list(form.axes)
        dtypes = dtypes_of(statement.type.dtypes, scope)
        if dtypes is not None and dtypes != ("f32",):
            scope.problems.add("E030", statement.type.span, "a state is kept in f32", "write `: f32`")
        plain_type(statement.type, "a state", scope)
        if free and axes is not None and _state_axes_fit(form, axes, scope):
            scope.state_axes[name.text] = axes
            forms[name.text] = form
        else:
            scope.forgiven.add(name.text)
    return forms


def read_states(equations: list[s.Assign], forms: dict[str, s.Form], scope: Scope) -> None:
    """Fill `scope.states`: each declared state with its one update, split into decay and input."""
    updates: dict[str, s.Assign] = {}
    for statement in equations:
        name = statement.name
        if name.text not in scope.state_axes:
            if name.text not in scope.forgiven:
                hint = f"declare it above, as in `{name.text}[b h p n] : f32`"
                scope.forgiven.add(name.text)
                scope.problems.add("E052", name.span, f"no state is called `{name.text}`", hint)
        elif name.text in updates:
            hint = "a state has one equation: add the terms up in it"
            scope.problems.add("E052", name.span, f"`{name.text}` has two updates", hint)
        else:
            updates[name.text] = statement
    for state, form in forms.items():
        if state in updates:
            _read_update(state, form, updates[state], scope)
        elif state not in scope.forgiven:
            t = scope.time or "t"
            hint = f"write below it `{state}[{t}] = decay * {state}[{t}-1] + ...`"
            scope.problems.add("E052", form.span, f"state `{state}` has no update", hint)


def plain_type(kind: s.Type, what: str, scope: Scope) -> None:
    """Refuse a range, a default and `optional` where only a dtype makes sense."""
    for part, word in ((kind.range, "range"), (kind.default, "default"), (kind.optional, "`optional`")):
        if part is not None:
            scope.problems.add("E035", part.span, f"{what} has no {word.strip('`')}", "only inputs have one")


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
    check_axes(update, axes, name, f"state `{name}`", statement.value.span, scope)
    try:
        parts = split(update, name)
    except NotAffine as error:
        hint = "the update must be `decay * S[t-1] + input` with a decay and an input free of the state"
        add(
            "E053",
            error.term.span,
            f"{scope.show(error.term)} {error.reason}",
            hint.replace("S[t-1]", f"{name}[{scope.time}-1]"),
        )
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
    known = interval.low > ANY.low or interval.high < ANY.high
    lies = f"its range is {interval}" if known else "nothing is known of its range"
    hint = _range_hint(decay, scope)
    if interval.high > 1:
        scope.problems.add("E055", span, f"the decay {scope.show(decay)} is not provably at most 1: {lies}", hint)
    elif interval.low < 0 or (interval.low == 0 and not interval.low_open):
        scope.problems.add("E056", span, f"the decay {scope.show(decay)} is not provably above 0: {lies}", hint)


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


def check_axes(value: Expr, axes: Axes, name: str, what: str, span: Span, scope: Scope) -> None:
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


def _deepest_with(expr: Expr, axis: str) -> Expr:
    """The smallest part of `expr` that brings in `axis`."""
    for child in children(expr):
        if axis in axes_of(child) and not (isinstance(expr, Contract) and expr.axis == axis):
            return _deepest_with(child, axis)
    return expr
