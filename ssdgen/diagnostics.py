"""Where something stands in a user's file, and the one way ssdgen speaks about it.

Every stage that can blame the user raises `SpecError` with one or more `Diagnostic`s; `render` turns them into the text
people see and the tests pin. Nothing else formats a message about a spec.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of the source, 1-based lines and columns; `end_column` is exclusive and on `end_line`."""

    line: int
    column: int
    end_line: int
    end_column: int

    def to(self, other: Span) -> Span:
        """The span from the start of this one to the end of `other`."""
        return Span(self.line, self.column, other.end_line, other.end_column)


NOWHERE = Span(0, 0, 0, 0)
"""The span of what no user wrote; a diagnostic there prints no excerpt."""


@dataclass(frozen=True, slots=True)
class Source:
    """A spec file as it was read: the path as the user gave it, and its text."""

    path: str
    text: str

    def line(self, number: int) -> str:
        """Line `number`, counted from 1, without its end; empty past the end of the file."""
        lines = self.text.splitlines()
        return lines[number - 1] if 0 < number <= len(lines) else ""


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One thing wrong with a spec: what, where, and what to do about it.

    `code` is stable (`E012`) and documented in specs/README.md; `message` is one line without a full stop; `hint` says
    what to write instead.
    """

    code: str
    message: str
    span: Span
    hint: str = ""


class SpecError(Exception):
    """The user's spec is wrong. Carries every diagnostic found, in the order of the file."""

    def __init__(self, source: Source, diagnostics: Iterable[Diagnostic]) -> None:
        ordered = sorted(diagnostics, key=lambda d: (d.span.line, d.span.column))
        self.source = source
        self.diagnostics = tuple(ordered)
        super().__init__(render(source, self.diagnostics))


class UserError(Exception):
    """What the user asked for cannot be done, and no place in a spec is to blame: a file, an option, a folder.

    `message` is one line without a full stop; `hint` says what to do instead.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        self.message = message
        self.hint = hint
        super().__init__(f"{message}\n  hint: {hint}" if hint else message)


def render(source: Source, diagnostics: Iterable[Diagnostic]) -> str:
    """The text of `diagnostics`, blank-line separated, each with file, line, column, excerpt, caret and hint."""
    return "\n\n".join(_render_one(source, d) for d in diagnostics)


def _render_one(source: Source, d: Diagnostic) -> str:
    if d.span == NOWHERE:
        head, excerpt = f"{source.path}: error[{d.code}]: {d.message}", []
    else:
        head = f"{source.path}:{d.span.line}:{d.span.column}: error[{d.code}]: {d.message}"
        excerpt = _excerpt(source.line(d.span.line), d.span)
    return "\n".join([head, *excerpt, *([f"  hint: {d.hint}"] if d.hint else [])])


WIDEST_EXCERPT = 120


def _excerpt(text: str, span: Span) -> list[str]:
    """The line a span starts on, with a caret line below it; a tab becomes one space, a long line is cut."""
    text = "".join(" " if c == "\t" else c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    start = span.column - 1
    end = span.end_column - 1 if span.end_line == span.line else len(text)
    cut = max(0, start - WIDEST_EXCERPT // 2)
    shown = text[cut : cut + WIDEST_EXCERPT]
    carets = max(1, min(end, cut + len(shown)) - start)
    number = str(span.line)
    return [f"  {number} | {shown}", f"  {' ' * len(number)} | {' ' * (start - cut)}{'^' * carets}"]
