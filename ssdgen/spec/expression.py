"""An expression's syntax -> `Expr`: names resolved, axes and numbers of arguments checked."""

from __future__ import annotations

from dataclasses import dataclass

from ssdgen.diagnostics import Span
from ssdgen.ir.constants import evaluate
from ssdgen.ir.expr import OPS, Apply, Const, Contract, Expr, Index, Ref, Size, axes_of
from ssdgen.spec.problems import closest, listing
from ssdgen.spec.scope import FUNCTIONS, Scope
from ssdgen.spec.syntax import Call, Name, Number, Term, Word


@dataclass(frozen=True, slots=True)
class Place:
    """Where an expression stands: `let`, `state`, `output` or `gate`; of which name; inside `when` of which input."""

    kind: str
    name: str
    when: str = ""


def resolve(term: Term, scope: Scope, place: Place) -> Expr | None:
    """`term` as an expression, or None after reporting everything that is wrong with it."""
    match term:
        case Number(value=value, span=span):
            return _finite(Const(value, span), scope)
        case Name():
            return _name(term, scope, place)
        case Call():
            called = _call(term, scope, place)
            return None if called is None else _finite(called, scope)


def _finite(expr: Expr, scope: Scope) -> Expr | None:
    """`expr`, unless it is made of numbers only and is none itself, or divides by 0."""
    try:
        evaluate(expr)
        if isinstance(expr, Apply) and expr.op == "div" and evaluate(expr.args[1]) == 0:
            raise ZeroDivisionError
    except (ArithmeticError, ValueError):
        scope.problems.add(
            "E048", expr.span, f"{scope.show(expr)} is no finite number", "write the number that is meant"
        )
        return None
    return expr


def _name(term: Name, scope: Scope, place: Place) -> Expr | None:
    name, span, add = term.name.text, term.span, scope.problems.add
    if name not in scope.declared:
        _unknown(term.name, scope, place)
        return None
    scope.used.add(name)
    if name not in scope.names():
        return None  # its declaration has been reported
    if term.axis is not None and term.axis.text != scope.time:
        if scope.time:
            message = f"`[{term.axis.text}]` is no token: only `{scope.time}` counts them"
            add("E042", term.axis.span, message, f"write `{name}[{scope.time}-1]` for the token before")
        return None
    lag = term.lag
    if name in scope.state_axes:
        return _state(term, scope, place)
    if lag not in (0, 1):
        add(
            "E042",
            span,
            f"`{name}[{scope.time}-{lag:g}]` is more than one token back",
            f"write `{name}[{scope.time}-1]`",
        )
        return None
    if name in scope.output_axes:
        if place.kind != "gate" or name != place.name:
            add(
                "E062", span, f"`{name}` is an output and cannot be read here", "give the common part a name with `let`"
            )
            return None
    elif lag and name in scope.inputs:
        if place.kind == "let":
            add("E042", span, "a `let` is a value of one token", f"use `{name}[{scope.time}-1]` in the state's update")
            return None
        if scope.time not in scope.inputs[name].axes:
            add("E042", span, f"`{name}` has no time axis, so no token before", f"write `{name}`")
            return None
    elif lag:
        kind = "param" if name in scope.params else "let"
        hint = f"only inputs with a time axis have one; write the equation of `{name}` out with lagged inputs"
        add(
            "E042",
            span,
            f"`{name}` is a {kind}, and has no value of the token before",
            hint if kind == "let" else f"write `{name}`",
        )
        return None
    if name in scope.inputs and scope.inputs[name].optional and place.when != name:
        what = next(iter(scope.output_axes), "y")
        add("E046", span, f"`{name}` is optional: it may be absent here", f"use it in `when {name}: {what} = ...`")
        return None
    return scope.ref(name, int(lag), span)


def _unknown(word: Word, scope: Scope, place: Place) -> None:
    name = word.text
    if name in scope.forgiven:
        return
    if name in scope.later:
        hint = "a `let` uses what stands above it: move its line down"
        scope.problems.add("E020", word.span, f"`{name}` is used before it is defined", hint)
        return
    if name == "inf":
        hint = "`inf` may stand in ranges and defaults"
        scope.problems.add("E020", word.span, "`inf` is no value of an equation", hint)
    elif name in FUNCTIONS:
        scope.problems.add("E020", word.span, f"`{name}` is a function", f"write `{name}(...)`")
    elif name in scope.axes:
        hint = f"write `index({name})` for the position along it, `size({name})` for its length"
        scope.problems.add("E020", word.span, f"`{name}` is an axis", hint)
    else:
        scope.forgiven.add(name)
        hint = closest(name, scope.names(), "declare it under `inputs`, or name it with `let` before its use")
        scope.problems.add("E020", word.span, f"unknown name `{name}`", hint)


def _state(term: Name, scope: Scope, place: Place) -> Expr | None:
    name, t = term.name.text, scope.time
    add = scope.problems.add
    if place.kind in ("let", "gate"):
        what = "a `let`" if place.kind == "let" else "a `when`"
        hint = f"read it in the output's equation, `{name}[{t}] . q`"
        add("E062", term.span, f"state `{name}` cannot be read in {what}", hint)
        return None
    if place.kind == "state" and name != place.name:
        hint = "states that feed each other have no chunked form; each may read inputs, lets and itself"
        add("E054", term.span, f"the update of `{place.name}` reads another state, `{name}`", hint)
        return None
    if term.axis is None:
        both = f"`{name}[{t}-1]`" if place.kind == "state" else f"`{name}[{t}]` or `{name}[{t}-1]`"
        add("E042", term.span, f"a state has a value at each token: which one of `{name}`?", f"write {both}")
        return None
    if place.kind == "state" and term.lag != 1:
        if term.lag == 0:
            add(
                "E042",
                term.span,
                f"`{name}[{t}]` is what this equation defines",
                f"the token before is `{name}[{t}-1]`",
            )
        else:
            _too_far_back(term, scope)
        return None
    if term.lag not in (0, 1):
        _too_far_back(term, scope)
        return None
    return scope.ref(name, int(term.lag), term.span)


def _too_far_back(term: Name, scope: Scope) -> None:
    name, t = term.name.text, scope.time
    hint = f"only the state of the token before is kept: `{name}[{t}-1]`"
    scope.problems.add("E042", term.span, f"`{name}[{t}-{term.lag:g}]` is more than one token back", hint)


def _call(term: Call, scope: Scope, place: Place) -> Expr | None:
    function, args, span = term.function, term.args, term.span
    name = function.text
    if not term.operator:
        if name not in FUNCTIONS:
            hint = closest(name, FUNCTIONS, f"the functions are {', '.join(sorted(FUNCTIONS))}")
            if name in scope.declared:
                hint = f"`{name}` is a tensor: a product needs its `*`"
            else:
                for arg in args:
                    resolve(arg, scope, place)
            scope.problems.add("E040", function.span, f"no function is called `{name}`", hint)
            return None
        if len(args) != FUNCTIONS[name]:
            wanted, got = FUNCTIONS[name], len(args)
            message = f"`{name}` takes {wanted} argument{'s' * (wanted != 1)}, not {got}"
            hint = "write `clamp(x, low, high)`" if name == "clamp" else ""
            scope.problems.add("E041", span, message, hint)
            return None
        if name in ("size", "index"):
            return _of_axis(name, args[0], span, scope)
    resolved = [resolve(a, scope, place) for a in args]
    values = [v for v in resolved if v is not None]
    if len(values) < len(resolved):
        return None
    if name == "pow":
        return _power(values[0], values[1], span, scope)
    if name == "dot":
        return _dot(values[0], values[1], span, scope)
    if name == "outer":
        return _outer(values[0], values[1], span, scope)
    if name == "rsqrt":
        return Apply("div", (Const(1, function.span), Apply("sqrt", tuple(values), span)), span)
    assert name in OPS, name
    return Apply(name, tuple(values), span)


def _of_axis(function: str, arg: Term, span: Span, scope: Scope) -> Expr | None:
    if not isinstance(arg, Name) or arg.axis is not None:
        scope.problems.add(
            "E021", arg.span, f"`{function}` takes the name of an axis", f"the axes are {', '.join(scope.axes)}"
        )
        return None
    axis = scope.axis(arg.name)
    if axis is None:
        return None
    if function == "size":
        return Size(axis, span)
    if axis in (scope.time, scope.batch) or axis in scope.shared:
        hint = "the equations are the same for every sequence and token; `index` is of heads and channels"
        scope.problems.add("E021", arg.span, f"`index({axis})` would make the equations depend on `{axis}`", hint)
        return None
    return Index(axis, span)


def _power(base: Expr, exponent: Expr, span: Span, scope: Scope) -> Expr | None:
    value = evaluate(exponent)
    if value is not None:
        return Apply("pow", (base, Const(value, exponent.span)), span)
    if evaluate(base) == 2:
        return Apply("exp2", (exponent,), span)
    hint = "the exponent is a constant, or the base is 2; any other power is `exp(y * log(x))`"
    scope.problems.add("E045", span, f"the exponent {scope.show(exponent)} varies", hint)
    return None


def _dot(left: Expr, right: Expr, span: Span, scope: Scope) -> Expr | None:
    add = scope.problems.add
    other = axes_of(left)
    declared = list(scope.axes)
    axes = axes_of(right) if isinstance(right, Ref) else tuple(sorted(axes_of(right), key=declared.index))
    channels = scope.channels(axes)
    if not axes or axes[-1] not in channels:
        last = f"its last axis, `{axes[-1]}`, is not one" if axes else "it has no axis"
        add(
            "E044",
            span,
            f"`.` sums over a channel axis of {scope.show(right)}, and {last}",
            "a product that sums nothing is `*`",
        )
        return None
    axis = axes[-1]
    if axis not in other:
        has = f"only {listing(other)}" if other else "no axis"
        needs = f"{scope.show(left)} would need `{axis}`"
        hint = f"`a . b` sums over the last axis of `b`; {needs}, and a product that sums nothing is `*`"
        add(
            "E044",
            span,
            f"`.` sums over `{axis}`, the last axis of {scope.show(right)}, but {scope.show(left)} has {has}",
            hint,
        )
        return None
    if isinstance(right, Ref) and right.name in scope.state_axes and not scope.states_in(left):
        left, right = right, left
    return Contract(left, right, axis, span)


def _outer(left: Expr, right: Expr, span: Span, scope: Scope) -> Expr | None:
    a, b = axes_of(left), axes_of(right)
    both = [axis for axis in scope.channels(a) if axis in b]
    if both:
        hint = "an outer product needs two different channel axes; the product along one axis is `*`"
        scope.problems.add("E043", span, f"both sides of `outer` have the channel axis `{both[0]}`", hint)
        return None
    for side in (left, right):
        if not scope.channels(axes_of(side)):
            message = f"{scope.show(side)} has no channel axis, so this is no outer product"
            scope.problems.add("E043", span, message, "a product by name is `*`")
            return None
    return Apply("mul", (left, right), span)
