"""The declarations of a spec: axes, groups, sizes, inputs and params."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from ssdgen.ir.layer import ANY, INFINITY, Axis, Dtype, Group, Interval, Param, Tensor
from ssdgen.spec import syntax as s
from ssdgen.spec.bounds import holds
from ssdgen.spec.problems import closest, listing
from ssdgen.spec.scope import RESERVED, Scope

DTYPES = ("bf16", "f16", "f32")
_SPELT = {
    "float32": "f32",
    "fp32": "f32",
    "float": "f32",
    "tf32": "f32",
    "float16": "f16",
    "fp16": "f16",
    "half": "f16",
    "bfloat16": "bf16",
}
MOST_OPTIONAL = 2


def declare_axes(statements: list[s.AxisNames], scope: Scope) -> None:
    """Fill `scope.axes`."""
    for word in (w for statement in statements for w in statement.names):
        if word.text in RESERVED:
            scope.problems.add("E024", word.span, f"`{word.text}` is a word of the language, not a name")
        elif word.text in scope.axes:
            scope.problems.add("E023", word.span, f"axis `{word.text}` is declared twice")
        else:
            scope.axes[word.text] = Axis(word.text, None, word.span)


def declare_groups(statements: list[s.Shares], scope: Scope) -> tuple[Group, ...]:
    """The groups; fills `scope.shared`."""
    groups: list[Group] = []
    for group, head in (pair for statement in statements for pair in statement.pairs):
        axis, shared = scope.axis(group), scope.axis(head) or scope.head
        if axis is None or not shared:
            continue
        if axis in (scope.batch, scope.time, shared) or axis in scope.shared or shared != (scope.head or shared):
            hint = "write `g shares h`: one axis of groups, one of the heads that share them"
            scope.problems.add("E036", group.span.to(head.span), f"`{axis}` cannot share `{shared}`", hint)
            continue
        scope.shared[axis] = shared
        groups.append(Group(axis, shared, group.span.to(head.span)))
    return tuple(groups)


def declare_sizes(statements: list[s.Sizes], scope: Scope) -> None:
    """Put the declared sizes into `scope.axes`."""
    for word, number in (pair for statement in statements for pair in statement.pairs):
        axis = scope.axis(word)
        if axis is None:
            continue
        if not isinstance(number.value, int) or number.value < 1:
            scope.problems.add("E037", number.span, f"the size of `{axis}` is a whole number of at least 1")
        elif scope.axes[axis].size is not None:
            scope.problems.add(
                "E037", word.span, f"`{axis}` has two sizes", "give one; other sizes compile on first use"
            )
        elif axis in (scope.batch, scope.time):
            hint = "sizes are of heads, groups and channels"
            scope.problems.add("E037", word.span, f"the length of `{axis}` is not fixed by a spec", hint)
        else:
            scope.axes[axis] = replace(scope.axes[axis], size=number.value)
    for group, head in scope.shared.items():
        groups, heads = scope.axes[group].size, scope.axes[head].size
        if groups and heads and heads % groups:
            span = next(w.span for st in statements for w, _ in st.pairs if w.text == group)
            hint = f"the number of heads is a multiple of the number of groups: {groups} does not divide {heads}"
            scope.problems.add("E037", span, f"{heads} heads cannot share {groups} groups evenly", hint)


def declare_inputs(statements: list[s.Inputs | s.Params], scope: Scope) -> None:
    """Fill `scope.inputs` and `scope.params`."""
    likes: dict[str, s.Word] = {}
    for statement in statements:
        if isinstance(statement, s.Params):
            for item in statement.items:
                _param(item, scope)
        else:
            for forms in statement.tensors:
                tensor = _tensor(forms, statement.type, scope)
                if tensor is not None:
                    scope.inputs[tensor.name] = tensor
                    scope.ranges[tensor.name] = tensor.range
                    if statement.type.like is not None:
                        likes[tensor.name] = statement.type.like
    for name, word in likes.items():
        root = _root(name, word, likes, scope)
        if root is not None:
            scope.inputs[name] = replace(scope.inputs[name], like=root, dtypes=scope.inputs[root].dtypes)
    optional = [t for t in scope.inputs.values() if t.optional]
    for tensor in optional[MOST_OPTIONAL:]:
        message = f"`{tensor.name}` is one optional input too many: there may be {MOST_OPTIONAL}"
        hint = "each doubles the number of kernels; a neutral default, `= 0`, costs none"
        scope.problems.add("E034", tensor.span, message, hint)


def like_input(word: s.Word, scope: Scope) -> Tensor | None:
    """The input that `like word` names, or None after reporting it."""
    tensor = scope.inputs.get(word.text)
    if tensor is None and word.text not in scope.forgiven:
        hint = closest(word.text, scope.inputs, f"the inputs are {', '.join(scope.inputs)}" if scope.inputs else "")
        scope.forgiven.add(word.text)
        scope.problems.add("E031", word.span, f"`like {word.text}`: no input is called `{word.text}`", hint)
    return tensor


def dtype_is_known(tensor: Tensor, like: s.Word, scope: Scope) -> bool:
    """Whether `tensor` always has a dtype to be like; reports it at `like` if not."""
    if not tensor.required:
        hint = "be like an input that is always there, or list dtypes"
        scope.problems.add("E031", like.span, f"`{tensor.name}` may be absent, and its dtype with it", hint)
    return tensor.required


def dtypes_of(words: tuple[s.Word, ...], scope: Scope) -> tuple[Dtype, ...] | None:
    """Declared dtypes, or None after reporting an unknown one."""
    found: list[Dtype] = []
    for word in words:
        if word.text not in DTYPES:
            hint = f"write `{_SPELT[word.text]}`" if word.text in _SPELT else f"the dtypes are {listing(DTYPES)}"
            scope.problems.add("E030", word.span, f"unknown dtype `{word.text}`", hint)
        elif word.text in found:
            scope.problems.add("E030", word.span, f"dtype `{word.text}` is listed twice")
        else:
            found.append(cast(Dtype, word.text))
    return tuple(found) if len(found) == len(words) else None


def _root(name: str, word: s.Word, likes: dict[str, s.Word], scope: Scope) -> str | None:
    """The input with declared dtypes at the end of a chain of `like`."""
    seen = {name}
    current = word
    while True:
        if like_input(current, scope) is None:
            return None
        if current.text in seen:
            scope.problems.add(
                "E031", word.span, f"`{name}` is like itself", "one of them needs dtypes: `bf16 | f16 | f32`"
            )
            return None
        seen.add(current.text)
        if current.text not in likes:
            break
        current = likes[current.text]
    return current.text if dtype_is_known(scope.inputs[current.text], word, scope) else None


def _tensor(forms: tuple[s.Form, ...], kind: s.Type, scope: Scope) -> Tensor | None:
    name = forms[0].name
    for other in forms[1:]:
        if other.name.text != name.text:
            hint = "`or` lists the forms of one input; separate inputs with `,`"
            scope.problems.add("E032", other.name.span, f"`{other.name.text}` is not `{name.text}`", hint)
            return None
    free = scope.declare(name)
    listed = [scope.axes_list(form.axes) for form in forms]
    dtypes = dtypes_of(kind.dtypes, scope)
    axes_found = [axes for axes in listed if axes is not None]
    if not free or dtypes is None or len(axes_found) < len(forms):
        scope.forgiven.add(name.text)
        return None
    widest = max(axes_found, key=len)
    narrower = tuple(axes for axes in axes_found if axes is not widest)
    for form, axes in zip(forms, axes_found, strict=True):
        if not set(axes) <= set(widest) or (axes is not widest and len(axes) == len(widest)):
            hint = "the forms of an input leave out axes of its widest one, as in `D[h] or D[h p]`"
            scope.problems.add("E032", form.span, f"this form is no part of `{name.text}[{' '.join(widest)}]`", hint)
    interval = _range(kind.range, scope)
    if interval is None:
        scope.forgiven.add(name.text)
        return None
    default = None if kind.default is None else float(kind.default.value)
    if kind.default is not None:
        _check_default(kind.default, interval, f"`{name.text}`", scope)
        if kind.optional is not None:
            hint = "an absent input is its default, or left out of the equations by `when`; choose one"
            scope.problems.add("E034", kind.optional.span, f"`{name.text}` has a default and is optional", hint)
    if kind.optional is not None and scope.time not in widest:
        hint = "give it a neutral default instead, such as `= 0`: it costs nothing"
        scope.problems.add("E034", kind.optional.span, f"`{name.text}` is optional and has no time axis", hint)
    span = forms[0].span.to(forms[-1].span)
    return Tensor(name.text, widest, dtypes, None, narrower, interval, default, kind.optional is not None, span)


def _param(item: s.ParamItem, scope: Scope) -> None:
    if not scope.declare(item.name):
        return
    if item.dtype is not None and item.dtype.text != "f32":
        scope.problems.add("E030", item.dtype.span, "a param is of dtype f32", "write `f32`, or nothing")
    default = float(item.default.value)
    of_sign = Interval(low=0.0) if default >= 0 else Interval(high=0.0)
    interval = of_sign if item.dtype is None else _range(item.range, scope)
    if interval is None:
        scope.forgiven.add(item.name.text)
        return
    if item.dtype is not None:
        _check_default(item.default, interval, f"`{item.name.text}`", scope)
    scope.params[item.name.text] = Param(item.name.text, default, interval, item.name.span)
    scope.ranges[item.name.text] = interval


def _range(declared: s.Range | None, scope: Scope) -> Interval | None:
    """The declared interval, or None after reporting that it is empty."""
    if declared is None:
        return ANY
    i = declared.interval
    if i.low > i.high or (i.low == i.high and (i.low_open or i.high_open)) or i.low == INFINITY or i.high == -INFINITY:
        scope.problems.add(
            "E038", declared.span, "no number lies in this range", "write it as `in (0, 1]`, low end first"
        )
        return None
    return i


def _check_default(default: s.Number, interval: Interval, name: str, scope: Scope) -> None:
    if not holds(interval, float(default.value)):
        hint = "widen the range or choose another default"
        message = f"the default {default.value:g} of {name} is outside its range {interval}"
        scope.problems.add("E033", default.span, message, hint)
