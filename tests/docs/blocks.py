"""The fenced blocks of a page, and how what a command prints is compared with what the page shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
VARYING = re.compile(r"\b(error) +\S+|\b\d+\.\d+ s\b|(?:[ ]+\d+)?[ ]+\(?\d+\.\d\)?$|[ ]+s$", re.MULTILINE)
"""What differs from machine to machine: measured errors, times, the last columns of a table of kernels, of which the size
has the path of the checkout in it."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the line it starts on."""

    language: str
    text: str
    line: int


@dataclass(frozen=True)
class Step:
    """A command of a `console` block and the output shown below it."""

    command: str
    shown: str


def blocks(page: str) -> Iterator[Block]:
    for match in FENCE.finditer(page):
        yield Block(match[1], match[2], page.count("\n", 0, match.start()) + 1)


def steps(block: Block) -> Iterator[Step]:
    """The commands of a `console` block: lines that start with `$ `."""
    for part in re.split(r"(?m)^\$ ", block.text)[1:]:
        command, _, shown = part.partition("\n")
        yield Step(command, shown)


def same(shown: str, printed: str) -> bool:
    """Whether `printed` is what a page shows, measured numbers aside; a line of `...` stands for any lines."""
    parts = re.split(r"(?m)^ *\.\.\.$\n?", _steady(shown))
    pattern = r"(?:.*\n)*?".join(re.escape(part) for part in parts)
    return re.fullmatch(pattern, _steady(printed)) is not None


def _steady(text: str) -> str:
    return VARYING.sub(lambda match: f"{match[1] or ''} #", text)
