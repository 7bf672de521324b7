"""The front end: a spec's text -> a checked Layer, or everything that is wrong with it."""

from __future__ import annotations

from ssdgen.diagnostics import NOWHERE, Source, Span
from ssdgen.ir.expr import Expr, Index, Size, walk
from ssdgen.ir.layer import Group, Layer
from ssdgen.spec import syntax as s
from ssdgen.spec.declare import declare_axes, declare_groups, declare_inputs, declare_sizes
from ssdgen.spec.equations import declare_states, read_lets, read_outputs, read_states
from ssdgen.spec.parse import parser
from ssdgen.spec.problems import Problems, closest
from ssdgen.spec.schedule import ScheduleReader
from ssdgen.spec.scope import Scope
from ssdgen.spec.split import split

LANGUAGE = 1
_REQUIRED = {
    "layer": ("E010", "no `layer`", 'give it a name and a title, as in `layer mine "My layer"`'),
    "axes": ("E010", "no `axes`", "name the axes of all tensors, as in `axes b t h p n`"),
    "inputs": ("E010", "no `inputs`", "declare the tensors that a caller passes, as in `x[b t h p] : bf16 | f32`"),
    "state": ("E050", "no `state`", "declare what is carried from token to token, as in `S[b h p n] : f32`"),
    "output": ("E060", "no `output`", "declare what the layer returns, as in `y[b t h p] : like x`"),
}


def read_layer(source: Source) -> Layer:
    """The layer that `source` describes.

    Every name is resolved, every rank and range checked; each update is affine in its state with a decay provably in
    (0, 1]. Raises SpecError with all diagnostics of the file.
    """
    problems = Problems(source)
    headings, statements = split(source, problems)
    scope = Scope(problems)
    blocks: dict[str, list[s.Parsed]] = {heading.text: [] for heading in headings}
    for statement in statements:
        parsed = None if statement.broken else parser().parse(statement, problems)
        if parsed is None:
            scope.forgive(statement.text)
        else:
            blocks.setdefault(statement.block, []).append(parsed)
    incomplete = bool(problems)
    if not headings and not incomplete:
        hint = "`ssdgen new NAME` writes a commented spec to start from"
        problems.add("E010", NOWHERE, "this spec is empty", hint)
        problems.stop_if_any()
    _check_blocks(headings, blocks, incomplete, problems)
    reader = _Reader(scope, blocks)
    layer = reader.layer(source)
    if not problems:
        _check_used(layer, scope)
    problems.stop_if_any()
    return layer


def _check_blocks(
    headings: tuple[s.Word, ...], blocks: dict[str, list[s.Parsed]], incomplete: bool, problems: Problems
) -> None:
    seen: dict[str, s.Word] = {}
    for heading in headings:
        if heading.text in seen and heading.text in ("language", "layer", "schedule"):
            problems.add(
                "E013",
                heading.span,
                f"`{heading.text}` stands twice",
                f"the first one is on line {seen[heading.text].span.line}",
            )
        seen.setdefault(heading.text, heading)
    if incomplete:
        return
    for name, heading in seen.items():
        if not blocks.get(name):
            problems.add(
                "E014",
                heading.span,
                f"nothing is declared under `{name}`",
                "indent what belongs to it, or leave it out",
            )
    for name, (code, message, hint) in _REQUIRED.items():
        if name not in seen:
            problems.add(code, NOWHERE, f"this spec has {message}", hint)


class _Reader:
    """The parsed blocks of one spec."""

    def __init__(self, scope: Scope, blocks: dict[str, list[s.Parsed]]) -> None:
        self.scope = scope
        self.blocks = blocks

    def layer(self, source: Source) -> Layer:
        scope = self.scope
        self._check_language()
        name, title = self._title()
        declare_axes([p for p in self._of("axes") if isinstance(p, s.AxisNames)], scope)
        groups = declare_groups([p for p in self._of("groups") if isinstance(p, s.Shares)], scope)
        states = [p for p in self._of("state") if isinstance(p, s.Declare | s.Assign)]
        self._find_roles(states)
        declare_sizes([p for p in self._of("sizes") if isinstance(p, s.Sizes)], scope)
        declare_inputs([p for p in self._of("inputs") if isinstance(p, s.Inputs | s.Params)], scope)
        read_lets([p for p in self._of("let") if isinstance(p, s.Assign)], scope)
        forms = declare_states(states, scope)
        read_states(states, forms, scope)
        read_outputs([p for p in self._of("output") if isinstance(p, s.Declare | s.Assign)], scope)
        schedule = ScheduleReader(scope)
        for knob in self._of("schedule"):
            if isinstance(knob, s.Knob):
                schedule.read(knob)
        return Layer(
            name=name,
            title=title,
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

    def _of(self, block: str) -> list[s.Parsed]:
        return self.blocks.get(block, [])

    def _check_language(self) -> None:
        stated = [p for p in self._of("language") if isinstance(p, s.Language)]
        add = self.scope.problems.add
        if not stated and "language" not in self.blocks:
            add("E011", Span(1, 1, 1, 2), "the language is not stated", f"start the file with `language {LANGUAGE}`")
        for statement in stated:
            if statement.version.value != LANGUAGE:
                hint = f"this ssdgen reads language {LANGUAGE}"
                add("E011", statement.version.span, f"language {statement.version.value} is not known", hint)

    def _title(self) -> tuple[str, str]:
        for statement in self._of("layer"):
            if isinstance(statement, s.Title):
                return statement.name.text, statement.title
        return "", ""

    def _find_roles(self, states: list[s.Declare | s.Assign]) -> None:
        """Batch and head are the first two axes of the first state; time is the axis of `S[t] = ...`."""
        scope = self.scope
        for statement in states:
            if isinstance(statement, s.Declare) and not scope.batch and len(statement.form.axes) >= 2:
                first, second = (w.text for w in statement.form.axes[:2])
                if first in scope.axes and second in scope.axes:
                    scope.batch, scope.head = first, second
            if isinstance(statement, s.Assign) and not scope.time and len(statement.axes) == 1:
                word = statement.axes[0]
                scope.time = scope.axis(word) or ""


def _check_used(layer: Layer, scope: Scope) -> None:
    """Everything declared must matter: a name that no equation uses is a mistake, or a parameter without effect."""
    add = scope.problems.add
    for name in [*scope.inputs, *scope.params, *scope.lets]:
        if name not in scope.used:
            kind = "input" if name in scope.inputs else "param" if name in scope.params else "`let`"
            add("E025", scope.declared[name], f"{kind} `{name}` is not used", "use it in an equation, or leave it out")
    read = {r for o in layer.outputs for r in _names(o.value)}
    for state in layer.states:
        if state.name not in read:
            hint = f"read it in an output, as in `{state.name}[{layer.time}] . q`, or leave it out"
            add("E025", state.span, f"no output reads state `{state.name}`", hint)
    of_inputs = {layer.shared(a) for t in layer.inputs for a in t.axes if not t.optional} | {
        a for t in layer.inputs for a in t.axes
    }
    for axis in layer.axes:
        if axis.name not in of_inputs:
            add(
                "E026",
                axis.span,
                f"no input has the axis `{axis.name}`, so its length is unknown",
                closest(axis.name, of_inputs, "leave it out"),
            )


def _names(expr: Expr) -> set[str]:
    return {name for e in walk(expr) for name in [getattr(e, "name", None)] if name is not None} | {
        e.axis for e in walk(expr) if isinstance(e, Size | Index) and False
    }


_ = Group
