"""Cutting a file into statements, so that each is parsed on its own and one file shows all its errors.

A word at the start of a line opens a block; what is indented below belongs to it. A statement goes on over lines that are
indented deeper than its own first character, and while a bracket is open.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, replace

from ssdgen.diagnostics import Source, Span
from ssdgen.spec.problems import Problems, closest
from ssdgen.spec.syntax import Word

BLOCKS = ("language", "layer", "axes", "groups", "sizes", "inputs", "let", "state", "output", "schedule")
MOST_CHARACTERS = 10_000
DEEPEST = 50

_LEGAL = frozenset('[](),:=|<>+-*/.^ \t"_')
_WRITE_INSTEAD = {
    "×": "write `*` for a product",
    "·": "write `a . b` for a sum over an axis, `a * b` for a product",
    "⊗": "write `outer(a, b)`",
    "@": "write `a . b` for a sum over the last axis of `b`",
    "−": "write `-`, the hyphen of the keyboard",
    "–": "write `-`, the hyphen of the keyboard",
    "≤": "write `<=`",
    "≥": "write `>=`",
    "²": "write `^2`",
    "“": 'write `"`, the straight quote',
    "”": 'write `"`, the straight quote',
    "'": 'write a title in `"` quotes',
    "∞": "write `inf`",
    "λ": "write `lambda`; names are of letters, digits and `_`",
    "!": "a comment starts with `#`",
    ";": "end a statement with the line, or separate declarations with `,`",
    "%": "a comment starts with `#`",
    "\N{NO-BREAK SPACE}": "write an ordinary space",
}


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement of a block: its text with comments blanked, and where it starts (1-based).

    A `broken` one has been reported and cannot be parsed; the words in it may be declarations.
    """

    block: str
    text: str
    line: int
    column: int
    broken: bool = False


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    text: str
    indent: int
    opened: int = 0  # brackets opened minus closed
    broken: bool = False

    def word(self) -> str:
        return re.split(r"[^\w]", self.text.strip(), maxsplit=1)[0]

    def opens_block(self) -> bool:
        return self.indent == 0 and self.word() in BLOCKS

    def span(self, start: int, end: int) -> Span:
        return Span(self.number, start + 1, self.number, end + 1)


def split(source: Source, problems: Problems) -> tuple[tuple[Word, ...], tuple[Statement, ...]]:
    """The headings of the blocks and the statements of `source`, in order.

    Reports what can be seen without a grammar: illegal characters, brackets and titles that do not end, statements outside
    a block, tabs in an indentation.
    """
    numbered = enumerate(source.text.splitlines(), start=1)
    scanned = [_scan(i, raw, problems) for i, raw in numbered if raw and not raw.isspace()]
    lines = [line for line in scanned if line.text]
    headings: list[Word] = []
    statements: list[Statement] = []
    block = ""
    at = 0
    while at < len(lines):
        line = lines[at]
        column = line.indent
        if line.indent == 0:
            word = line.word()
            block = word if word in BLOCKS else _unknown_block(line, problems)
            headings.append(Word(block, line.span(0, len(word))))
            rest = line.text[len(word) :]
            column = len(word) + len(rest) - len(rest.lstrip())
            if not rest.strip():
                at += 1
                continue
        elif not headings:
            hint = "a block starts with its name at the left margin"
            problems.add("E012", line.span(line.indent, len(line.text)), "this line belongs to no block", hint)
        end, closed = _end_of_statement(lines, at, column, problems)
        text = _join(lines[at:end])[column:]
        fits = _fits(text, line, column, problems)
        broken = not (block and closed and fits) or any(part.broken for part in lines[at:end])
        statements.append(Statement(block, text, line.number, column + 1, broken))
        at = end
    return tuple(headings), tuple(statements)


def _scan(number: int, raw: str, problems: Problems) -> _Line:
    """A line without its comment; reports what is illegal in any statement."""
    text, opened, title = raw, 0, -1
    for i, c in enumerate(raw):
        if c == '"':
            title = -1 if title >= 0 else i
        elif title >= 0:
            continue
        elif c == "#":
            text = raw[:i]
            break
        elif c in "[(":
            opened += 1
        elif c in "])":
            opened -= 1
        elif c not in _LEGAL and not (c.isascii() and c.isalnum()):
            end = i + 1
            while c.isalpha() and end < len(raw) and raw[end].isalpha() and not raw[end].isascii():
                end += 1
            problems.add("E017", Span(number, i + 1, number, end + 1), _meaningless(raw[i:end]), _instead_of(c))
            return _Line(number, raw, len(raw) - len(raw.lstrip()), broken=True)
    text = text.rstrip()
    line = _Line(number, text, len(text) - len(text.lstrip()), opened)
    if title >= 0:
        problems.add("E016", line.span(title, len(text)), "this title does not end on its line", 'close it with `"`')
        return replace(line, opened=0, broken=True)
    if "\t" in text[: line.indent]:
        hint = "indent with spaces: how deep a line stands decides what it belongs to"
        problems.add("E017", line.span(text.index("\t"), line.indent), "a tab in the indentation", hint)
        return replace(line, broken=True)
    return line


def _meaningless(text: str) -> str:
    shown = f"`{text}`" if text.isprintable() else f"U+{ord(text[0]):04X}"
    return f"the character{'s' if len(text) > 1 else ''} {shown} {'have' if len(text) > 1 else 'has'} no meaning here"


def _instead_of(c: str) -> str:
    if c in _WRITE_INSTEAD:
        return _WRITE_INSTEAD[c]
    words = unicodedata.name(c, "").lower().split()
    if words[:1] == ["greek"] and len(words) > 3:
        return f"write `{words[3]}`; names are of letters, digits and `_`"
    return "names are of the letters a to z, digits and `_`" if c.isalpha() else ""


def _unknown_block(line: _Line, problems: Problems) -> str:
    """Report it; the block that was probably meant, so that its statements are read too, else ''."""
    word = line.word() or line.text[0]
    hint = closest(word, BLOCKS, f"the blocks are {', '.join(BLOCKS)}; what belongs to one is indented")
    problems.add("E012", line.span(0, len(word)), f"no block is called `{word}`", hint)
    return hint.split("`")[1] if hint.startswith("did you mean") else ""


def _end_of_statement(lines: list[_Line], at: int, column: int, problems: Problems) -> tuple[int, bool]:
    """The index after the statement that starts at `lines[at]` in `column` (0-based), and whether its brackets close."""
    end, depth = at + 1, lines[at].opened
    while end < len(lines) and not lines[end].opens_block() and (depth > 0 or lines[end].indent > column):
        depth += lines[end].opened
        end += 1
    if depth <= 0:
        return end, True
    end = at + 1
    while end < len(lines) and lines[end].indent > column:
        end += 1
    open_at = [(line, i) for line in lines[at:end] for i in _unclosed(line.text)]
    if open_at:
        line, i = open_at[-1]
        c = line.text[i]
        hint = f"close it with `{')' if c == '(' else ']'}`"
        problems.add("E015", line.span(i, i + 1), f"this `{c}` is never closed", hint)
    return end, False


def _unclosed(text: str) -> list[int]:
    """Where brackets of `text` open that do not close in it."""
    stack: list[int] = []
    for i, c in enumerate(text):
        if c in "[(":
            stack.append(i)
        elif c in "])" and stack:
            stack.pop()
    return stack


def _join(lines: list[_Line]) -> str:
    """The text of a statement; the blank lines inside keep its line numbers right."""
    texts: list[str] = []
    for line in lines:
        texts += [""] * (line.number - lines[0].number - len(texts))
        texts.append(line.text)
    return "\n".join(texts)


def _fits(text: str, line: _Line, column: int, problems: Problems) -> bool:
    """Whether a statement is short and shallow enough to parse."""
    if len(text) > MOST_CHARACTERS:
        hint = f"the longest is {MOST_CHARACTERS:,}; name its parts with `let`"
        problems.add("E019", line.span(column, len(line.text)), f"a statement of {len(text):,} characters", hint)
        return False
    depth = 0
    for i, c in enumerate(text):
        depth += (c in "[(") - (c in "])")
        if depth > DEEPEST:
            start = text.rfind("\n", 0, i) + 1
            row, col = line.number + text.count("\n", 0, i), i - start + (column if start == 0 else 0)
            hint = f"at most {DEEPEST} may be open at once; name the inner part with `let`"
            problems.add("E019", Span(row, col + 1, row, col + 2), "brackets nested too deep", hint)
            return False
    return True
