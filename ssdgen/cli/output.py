"""What the command prints: text for a person, JSON for a program, progress on the terminal.

Results go to standard output, messages and progress to standard error. Colour and progress only where a person looks.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ssdgen.diagnostics import Source, Span, SpecError, UserError
from ssdgen.ir.expr import Apply, Const, Contract, Index, Ref, Size, to_text

ERROR_STYLES = {
    r"\berror\[\w+\]": "red",
    r"(?m)^ssdgen:": "red",
    r"(?m)^ +\| +(?P<caret>\^+)$": "red",
    r"(?m)^  hint:": "cyan",
}
REPORT_STYLES = {r"(?m)^  ok\b": "green", r"(?m)^  skip\b": "yellow", r"(?m)^  FAIL\b.*$": "red"}
TABLE_WIDTH = 120
WORDS = ("candidate", "kernel", "failed", "step", "why")
"""Columns of words in a table of numbers."""


class OutputClosed(Exception):
    """Whoever read our standard output has stopped (`| head`)."""


class OutputFailed(Exception):
    """Standard output cannot be written: a full disk, or it is closed."""


def show(text: str, styles: Mapping[str, str] | None = None, end: str = "\n") -> None:
    """Print `text`, then `end`, to standard output, matches of `styles` (regular expression: colour) coloured on a terminal."""
    if sys.stdout is None:  # `>&-`
        raise OutputFailed("standard output is closed")
    try:
        _write(sys.stdout, text, styles, end)
    except BrokenPipeError as error:
        raise OutputClosed from error
    except OSError as error:
        raise OutputFailed(error.strerror) from error


def show_json(value: object) -> None:
    """Print `value` as JSON to standard output."""
    show(json.dumps(as_data(value), indent=2, ensure_ascii=False))


def show_table(table: Table) -> None:
    """Print a table to standard output, as wide as the terminal but never so narrow that cells are cut."""
    console = Console(file=sys.stdout, highlight=False)
    console.width = max(console.width, TABLE_WIDTH)
    with console.capture() as capture:
        console.print(table)
    show("\n".join(line.rstrip() for line in capture.get().splitlines()))


def plain_table(*columns: str) -> Table:
    """A table without lines: numbers to the right, words to the left."""
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in WORDS else "right", overflow="fold")
    return table


def say(text: str) -> None:
    """Print a message to standard error, coloured on a terminal; nowhere if that is closed."""
    if sys.stderr is None:
        return
    try:
        _write(sys.stderr, text, ERROR_STYLES)
    except BrokenPipeError as error:
        raise OutputClosed from error


def close_quietly() -> None:
    """Point standard output nowhere: what is still in its buffer has no reader."""
    if sys.stdout is None:
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())


def _write(stream: TextIO, text: str, styles: Mapping[str, str] | None, end: str = "\n") -> None:
    console = Console(file=stream, highlight=False, soft_wrap=True)
    shown = text
    if styles and console.is_terminal:
        styled = Text(text)
        for pattern, style in styles.items():
            styled.highlight_regex(pattern, style)
        with console.capture() as capture:
            console.print(styled, end="")
        shown = capture.get()
    encoding = stream.encoding or "utf-8"
    stream.write(f"{shown}{end}".encode(encoding, "replace").decode(encoding))
    stream.flush()


def as_data(value: object) -> object:
    """`value` as what `json.dumps` takes: dataclasses by field with their kind, expressions as in a spec, no spans."""
    match value:
        case Const() | Ref() | Size() | Index() | Apply() | Contract():
            return to_text(value)
        case float() if not math.isfinite(value):
            return str(value)
        case str() | int() | float() | None:
            return value
        case bytes():
            return len(value)
        case tuple() | list():
            return [as_data(v) for v in value]
        case dict():
            return {str(k): as_data(v) for k, v in value.items()}
        case _ if dataclasses.is_dataclass(value):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            data = {k: as_data(v) for k, v in fields.items() if not isinstance(v, Span | Source)}
            return {"kind": type(value).__name__, **data}
    raise TypeError(f"no JSON for a {type(value).__name__}")


def mistake_text(error: SpecError | UserError) -> str:
    """`error` for a person."""
    return str(error) if isinstance(error, SpecError) else f"ssdgen: {error}"


def mistakes_data(errors: Iterable[SpecError | UserError]) -> list[dict[str, object]]:
    """`errors` for a program, one object a message."""
    return [data for error in errors for data in _mistake_data(error)]


def _mistake_data(error: SpecError | UserError) -> list[dict[str, object]]:
    """Of a spec, its diagnostics; line and column are 0 where the whole file is meant."""
    if isinstance(error, UserError):
        return [{"message": error.message, "hint": error.hint}]
    return [
        {
            "code": d.code,
            "message": d.message,
            "hint": d.hint,
            "file": error.source.path,
            "line": d.span.line,
            "column": d.span.column,
            "end_line": d.span.end_line,
            "end_column": d.span.end_column,
        }
        for d in error.diagnostics
    ]


class Steps:
    """A progress bar on the terminal, or nothing: `total` may be told late, `advance` once a step."""

    def __init__(self, progress: Progress, title: str) -> None:
        self._progress = progress
        self._task = progress.add_task(title, total=None, what="")

    def __call__(self, done: int, total: int | None, what: str = "") -> None:
        """`done` of `total` steps (None if unknown) are done; `what` is the one just done or under way."""
        self._progress.update(self._task, completed=done, total=total, what=what)


@contextmanager
def progress(title: str) -> Iterator[Steps]:
    """Within, a bar on standard error if that is a terminal; it is gone afterwards."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), _what())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield Steps(bar, title)


def _what() -> TextColumn:
    return TextColumn("{task.fields[what]}")
