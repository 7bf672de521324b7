"""Outputs: what a layer returns at each token, and how an optional input changes it."""

from __future__ import annotations

from ssdgen.ir.expr import Axes, Contract, Expr, Ref, axes_of, children, refs
from ssdgen.ir.layer import Dtype, Gate, Output
from ssdgen.spec import syntax as s
from ssdgen.spec.declare import dtype_is_known, dtypes_of, like_input
from ssdgen.spec.expression import Place, resolve
from ssdgen.spec.problems import listing
from ssdgen.spec.scope import Scope
from ssdgen.spec.states import check_axes, plain_type


def declare_outputs(declared: list[s.Declare], scope: Scope) -> dict[str, s.Declare]:
    """Declare the outputs of the block, so that their axes are known; returns their declarations by name."""
    kinds: dict[str, s.Declare] = {}
    for statement in declared:
        name, axes = statement.form.name, scope.axes_list(statement.form.axes)
        plain_type(statement.type, "an output", scope)
        if scope.declare(name) and axes is not None and _output_axes_fit(statement.form, axes, scope):
            scope.output_axes[name.text] = axes
            kinds[name.text] = statement
        else:
            scope.forgiven.add(name.text)
    return kinds


def read_outputs(equations: list[s.Assign], kinds: dict[str, s.Declare], scope: Scope) -> None:
    """Fill `scope.outputs`: each declared output with its equation and its gates."""
    values: dict[str, Expr] = {}
    gates: dict[str, list[Gate]] = {}
    assigned: dict[str, s.Assign] = {}
    for equation in equations:
        _read_equation(equation, assigned, values, gates, scope)
    for name, statement in kinds.items():
        form = statement.form
        if name not in assigned and name not in scope.forgiven:
            hint = f"write below it `{name} = S[{scope.time or 't'}] . q`"
            scope.problems.add("E061", form.span, f"output `{name}` has no equation", hint)
        dtypes, like = _output_dtypes(statement.type, scope)
        if name in values and dtypes is not None:
            axes, found = scope.output_axes[name], tuple(gates.get(name, ()))
            scope.outputs[name] = Output(name, axes, like, dtypes, values[name], found, form.span)


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
    root = tensor.like or tensor.name
    return (tensor.dtypes, root) if dtype_is_known(scope.inputs[root], kind.like, scope) else (None, None)


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
            scope.forgiven.add(name.text)
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
    check_axes(value, axes, name.text, f"output `{name.text}`", statement.value.span, scope)
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
        check_axes(value, axes, name, f"output `{name}`", statement.value.span, scope)
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
            hint = f"sum it over its last axis with a vector, as in `{name}[{scope.time}] . q`; anything else comes after that"
            scope.problems.add("E062", value.span, f"the whole state `{name}` is not a value of an output", hint)
        case _:
            for child in children(value):
                _check_reads(child, scope)
