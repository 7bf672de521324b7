"""What the names of a spec mean, filled while its blocks are read from top to bottom."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ssdgen.diagnostics import Span
from ssdgen.ir.expr import OPS, Axes, Expr, Ref, axes_of, is_per_token, to_text, walk
from ssdgen.ir.layer import Axis, Interval, Let, Output, Param, State, Tensor
from ssdgen.spec.problems import Problems, closest
from ssdgen.spec.syntax import Word

FUNCTIONS: dict[str, int] = {
    **{op: n for op, n in OPS.items() if op not in ("add", "sub", "mul", "div", "neg", "pow")},
    "outer": 2,
    "size": 1,
    "index": 1,
    "rsqrt": 1,
}
"""Every function that a spec may call, and its number of arguments."""

RESERVED = frozenset(FUNCTIONS) | {"inf", "or", "like", "optional", "param", "when", "in", "shares"}


@dataclass
class Scope:
    """The names declared so far, and which of them have been used.

    `batch`, `time` and `head` are known before the first expression. `forgiven` holds the words of statements that could
    not be read: what they declare is unknown, so a use of them is no further error; an
    unknown name or axis joins them once it is reported. `later` holds the lets still to come.
    """

    problems: Problems
    forgiven: set[str] = field(default_factory=set)
    forgiven_axes: set[str] = field(default_factory=set)
    axes: dict[str, Axis] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)  # group axis -> head axis
    batch: str = ""
    time: str = ""
    head: str = ""
    inputs: dict[str, Tensor] = field(default_factory=dict)
    params: dict[str, Param] = field(default_factory=dict)
    lets: dict[str, Let] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)
    state_axes: dict[str, Axes] = field(default_factory=dict)
    outputs: dict[str, Output] = field(default_factory=dict)
    output_axes: dict[str, Axes] = field(default_factory=dict)
    declared: dict[str, Span] = field(default_factory=dict)
    later: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    ranges: dict[str, Interval] = field(default_factory=dict)

    def declare(self, name: Word) -> bool:
        """Whether `name` is free to stand for something new; reports it if not."""
        if name.text in RESERVED:
            hint = f"`{name.text}_` is free"
            self.problems.add("E024", name.span, f"`{name.text}` is a word of the language, not a name", hint)
            return False
        first = self.declared.get(name.text)
        if first is not None:
            self.problems.add(
                "E023", name.span, f"`{name.text}` is declared twice", f"the other one is on line {first.line}"
            )
            return False
        self.declared[name.text] = name.span
        return True

    def axis(self, word: Word) -> str | None:
        """The declared axis `word`, or None after reporting it."""
        known = list(self.axes)
        if word.text in known:
            return word.text
        if word.text not in self.forgiven_axes:
            self.forgiven_axes.add(word.text)
            otherwise = f"the axes are {', '.join(known)}" if known else "declare it under `axes`"
            self.problems.add("E021", word.span, f"unknown axis `{word.text}`", closest(word.text, known, otherwise))
        return None

    def axes_list(self, words: tuple[Word, ...]) -> Axes | None:
        """Declared, different axes, or None after reporting what is wrong."""
        names = [self.axis(word) for word in words]
        seen: set[str] = set()
        for word in words:
            if word.text in seen:
                self.problems.add(
                    "E022", word.span, f"axis `{word.text}` is used twice", "each axis stands once in a tensor"
                )
                return None
            seen.add(word.text)
        for word in words:
            head = self.shared.get(word.text)
            if head in seen:
                message = f"`{word.text}` and `{head}` both number the heads"
                self.problems.add(
                    "E022", word.span, message, f"`{word.text}` is shared by the heads `{head}`: keep one of them"
                )
                return None
        found = tuple(name for name in names if name is not None)
        return found if len(found) == len(words) else None

    def broadcast(self, axes: Axes) -> Axes:
        """Declared axes as an expression has them: without time, group axes read as their head axis."""
        return tuple(self.shared.get(a, a) for a in axes if a != self.time)

    def channels(self, axes: Axes) -> Axes:
        """Those of `axes` that are neither batch, time nor head."""
        return tuple(a for a in axes if self.shared.get(a, a) not in (self.batch, self.time, self.head))

    def names(self) -> list[str]:
        """Every name that an expression could mean."""
        return [*self.inputs, *self.params, *self.lets, *self.state_axes, *self.output_axes]

    def ref(self, name: str, lag: int, span: Span) -> Ref:
        """The reference to a declared value."""
        if name in self.inputs:
            axes = self.inputs[name].axes
            return Ref(name, self.broadcast(axes), self.time in axes, lag, span)
        if name in self.lets:
            value = self.lets[name].value
            return Ref(name, axes_of(value), is_per_token(value), lag, span)
        if name in self.state_axes:
            return Ref(name, self.state_axes[name], True, lag, span)
        if name in self.output_axes:
            return Ref(name, self.broadcast(self.output_axes[name]), True, lag, span)
        return Ref(name, (), False, lag, span)

    def states_in(self, expr: Expr | None) -> bool:
        """Whether `expr` reads a state."""
        return expr is not None and any(isinstance(e, Ref) and e.name in self.state_axes for e in walk(expr))

    def show(self, expr: Expr) -> str:
        """`expr` in backquotes, in the words of this spec."""
        return f"`{to_text(expr, self.time or 't')}`"

    def forgive(self, text: str) -> None:
        """Take every word of a statement that could not be read as possibly declared."""
        words = re.findall(r"[A-Za-z_]\w*", text)
        self.forgiven.update(words)
        self.forgiven_axes.update(words)
