"""The front end: a spec's text -> a checked Layer, or everything that is wrong with it."""

from __future__ import annotations

import keyword
from typing import TypeVar

from ssdgen.diagnostics import NOWHERE, Source
from ssdgen.ir.expr import Index, Size, refs, walk
from ssdgen.ir.layer import Layer
from ssdgen.spec import syntax as s
from ssdgen.spec.declare import declare_axes, declare_groups, declare_inputs, declare_sizes
from ssdgen.spec.outputs import declare_outputs, read_outputs
from ssdgen.spec.parse import parser
from ssdgen.spec.problems import Problems
from ssdgen.spec.schedule import ScheduleReader
from ssdgen.spec.scope import Scope
from ssdgen.spec.split import split
from ssdgen.spec.states import declare_states, read_lets, read_states

LANGUAGE = 1

MODULES_BESIDE = ("causal_conv", "norms", "projection")
"""Modules for users that every package has besides those emitted from specs."""

_REQUIRED = {
    "layer": ("E010", 'give it a name and a title, as in `layer mine "My layer"`'),
    "axes": ("E010", "name the axes of all tensors, as in `axes b t h p n`"),
    "inputs": ("E010", "declare the tensors that a caller passes, as in `x[b t h p] : bf16 | f32`"),
    "state": ("E050", "declare what is carried from token to token, as in `S[b h p n] : f32`"),
    "output": ("E060", "declare what the layer returns, as in `y[b t h p] : like x`"),
}
_P = TypeVar("_P")


def read_layer(source: Source) -> Layer:
    """The layer that `source` describes.

    Every name is resolved, every rank and range checked; each update is affine in its state with a decay provably in
    (0, 1]. Raises SpecError with all diagnostics of the file.
    """
    problems = Problems(source)
    headings, statements = split(source, problems)
    scope = Scope(problems)
    parsed: list[tuple[str, s.Parsed]] = []
    for statement in statements:
        syntax = None if statement.broken else parser().parse(statement, problems)
        if syntax is None:
            scope.forgive(statement.text)
        else:
            parsed.append((statement.block, syntax))
    _check_language(headings, parsed, problems)
    _check_blocks(headings, {statement.block for statement in statements}, problems)
    layer = _layer(parsed, scope, source)
    if not problems:
        _check_used(layer, scope)
    problems.stop_if_any()
    return layer


def _check_language(headings: tuple[s.Word, ...], parsed: list[tuple[str, s.Parsed]], problems: Problems) -> None:
    if headings and headings[0].text not in ("language", ""):
        first = headings[0].span
        problems.add("E011", first, "a spec starts with its language", f"put `language {LANGUAGE}` above this line")
    for _, statement in parsed:
        if isinstance(statement, s.Language) and statement.version.value != LANGUAGE:
            hint = f"this ssdgen reads language {LANGUAGE}"
            problems.add("E011", statement.version.span, f"language {statement.version.value} is not known", hint)


def _check_blocks(headings: tuple[s.Word, ...], filled: set[str], problems: Problems) -> None:
    first: dict[str, s.Word] = {}
    for heading in headings:
        if heading.text in first and heading.text in ("language", "layer"):
            hint = f"the first one is on line {first[heading.text].span.line}"
            problems.add("E013", heading.span, f"`{heading.text}` stands twice", hint)
        first.setdefault(heading.text, heading)
    for name, heading in first.items():
        if name not in filled:
            hint = "indent what belongs to it, or leave it out"
            problems.add("E014", heading.span, f"nothing stands under `{name}`", hint)
    if not first and not problems:
        hint = "`ssdgen new NAME` writes a commented spec to start from"
        problems.add("E010", NOWHERE, "this spec is empty", hint)
    elif "" not in first:  # an unknown block may be the one that is missing
        for name, (code, hint) in _REQUIRED.items():
            if name not in first:
                problems.add(code, NOWHERE, f"this spec has no `{name}`", hint)


def _layer(parsed: list[tuple[str, s.Parsed]], scope: Scope, source: Source) -> Layer:
    def of(block: str, kind: type[_P]) -> list[_P]:
        return [statement for name, statement in parsed if name == block and isinstance(statement, kind)]

    titles = [(p.name.text, p.title) for p in of("layer", s.Title)]
    for title in of("layer", s.Title):
        _check_layer_name(title.name, scope)
    declare_axes(of("axes", s.AxisNames), scope)
    _find_roles(of("state", s.Declare), of("state", s.Assign), scope)
    groups = declare_groups(of("groups", s.Shares), scope)
    declare_sizes(of("sizes", s.Sizes), scope)
    declare_inputs([*of("inputs", s.Inputs), *of("inputs", s.Params)], scope)
    states = declare_states(of("state", s.Declare), scope)
    outputs = declare_outputs(of("output", s.Declare), scope)
    read_lets(of("let", s.Assign), scope)
    read_states(of("state", s.Assign), states, scope)
    read_outputs(of("output", s.Assign), outputs, scope)
    schedule = ScheduleReader(scope)
    for knob in of("schedule", s.Knob):
        schedule.read(knob)
    return Layer(
        name=titles[0][0] if titles else "",
        title=titles[0][1] if titles else "",
        axes=tuple(scope.axes.values()),
        batch=scope.batch,
        time=scope.time,
        head=scope.head,
        groups=groups,
        inputs=tuple(scope.inputs.values()),
        params=tuple(scope.params.values()),
        lets=tuple(scope.lets.values()),
        states=tuple(scope.states.values()),
        outputs=tuple(scope.outputs.values()),
        schedule=schedule.schedule(),
        source=source,
    )


def _check_layer_name(name: s.Word, scope: Scope) -> None:
    """The module emitted for a layer has its name: Python must take it, and some files of the package have theirs."""
    if keyword.iskeyword(name.text):
        message = f"`{name.text}` is a word of Python, so no module can have that name"
        scope.problems.add("E024", name.span, message, f"`{name.text}_layer` is free")
    elif name.text.startswith("_"):
        message = "the name of a layer, and of its module, does not begin with `_`"
        scope.problems.add("E024", name.span, message, f"`{name.text.strip('_') or 'mine'}` is free")
    elif name.text in MODULES_BESIDE:
        message = f"`{name.text}` is a module that stands beside every emitted one"
        scope.problems.add("E024", name.span, message, f"`{name.text}_layer` is free")


def _find_roles(declared: list[s.Declare], updates: list[s.Assign], scope: Scope) -> None:
    """Batch and head are the first two axes of the first state; time is the axis of `S[t] = ...`, or one called `t`."""
    for state in declared:
        words = [w.text for w in state.form.axes[:2]]
        if len(words) == 2 and not scope.batch and all(w in scope.axes for w in words):
            scope.batch, scope.head = words
    for update in updates:
        if len(update.axes) == 1 and not scope.time:
            scope.time = scope.axis(update.axes[0]) or ""
    if not scope.time and "t" in scope.axes:
        scope.time = "t"


def _check_used(layer: Layer, scope: Scope) -> None:
    """Everything declared must matter: what no equation uses is a mistake, or a parameter without effect."""
    add = scope.problems.add
    for name in [*scope.inputs, *scope.params, *scope.lets]:
        if name not in scope.used:
            kind = "input" if name in scope.inputs else "param" if name in scope.params else "`let`"
            add("E025", scope.declared[name], f"{kind} `{name}` is not used", "use it in an equation, or leave it out")
    read = {ref.name for output in layer.outputs for ref in refs(output.value)}
    for state in layer.states:
        if state.name not in read:
            hint = f"read it in an output, as in `{state.name}[{layer.time}] . q`, or leave it out"
            add("E025", state.span, f"no output reads state `{state.name}`", hint)
    _check_lengths(layer, scope)


def _check_lengths(layer: Layer, scope: Scope) -> None:
    """Every axis must occur, and those of states and outputs in an input that a caller always passes."""
    passed = {a for t in layer.inputs if t.required for a in t.axes if all(a in form for form in t.narrower)}
    needed = {a for state in layer.states for a in state.axes} | {a for output in layer.outputs for a in output.axes}
    values = [let.value for let in layer.lets] + [state.update for state in layer.states]
    values += [output.value for output in layer.outputs]
    needed |= {e.axis for value in values for e in walk(value) if isinstance(e, Size | Index)}
    somewhere = needed | {a for t in layer.inputs for a in t.axes}
    for axis in layer.axes:
        if axis.name not in somewhere:
            scope.problems.add("E025", axis.span, f"axis `{axis.name}` is not used", "leave it out")
        elif axis.name in needed - passed:
            hint = "give it to an input without a default: its length is read off there"
            scope.problems.add("E026", axis.span, f"no required input has the axis `{axis.name}`", hint)
