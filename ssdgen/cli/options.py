"""The options that several commands have, and what their values mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from ssdgen.diagnostics import UserError

W = TypeVar("W", bound=str)

LONGEST = 2**31 - 1
"""The longest axis that `--shape` takes."""

Spec = Annotated[str, typer.Argument(metavar="SPEC", help="A spec file, or the name of a built-in one.")]
Specs = Annotated[
    list[str] | None, typer.Argument(metavar="[SPECS]...", help="All built-in ones that have kernels if none.")
]
Config = Annotated[list[str] | None, typer.Option("--config", metavar="KEY=VALUE", help="A knob of the schedule.")]
Shapes = Annotated[
    list[str] | None,
    typer.Option("--shape", metavar="AXIS=N,...", help="A shape, as b=4,t=16384,h=8; may be repeated."),
]
Optional = Annotated[str | None, typer.Option(help="Optional inputs that are passed, by commas.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for a program.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the details of a bug here instead of in a file.")]


def settings(config: Iterable[str] | None, option: str = "--config") -> dict[str, str]:
    """The pairs of an option that takes KEY=VALUE; UserError for one that is no pair or a key given twice."""
    pairs: dict[str, str] = {}
    for text in config or ():
        key, equals, value = (part.strip() for part in text.partition("="))
        if not (key and equals and value):
            raise UserError(f"{option} {text} is not KEY=VALUE", f"for example {option} chunk=128")
        if key in pairs:
            raise UserError(f"{option} gives {key} twice", "leave one of them out")
        pairs[key] = value
    return pairs


def folder(path: str | Path) -> Path:
    """The folder that `-o` names; UserError for an empty name, which would be the current folder."""
    if not str(path).strip():
        raise UserError("-o is empty", "name a folder; `-o .` is the current one")
    return Path(path)


def several(text: str, allowed: Iterable[W], option: str, most: int | None = None) -> tuple[W, ...]:
    """The comma-separated words of an option, each once, at most `most`, all among `allowed`; UserError otherwise."""
    known = {str(word): word for word in allowed}
    words = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not words:
        raise UserError(f"{option} is empty", f"some of {', '.join(known)}, separated by commas")
    for word in words:
        if word not in known:
            raise UserError(f"{option} knows no `{word}`", f"some of {', '.join(known)}, separated by commas")
    if most is not None and len(words) > most:
        raise UserError(f"{option} takes one of {', '.join(known)}, not {len(words)} of them")
    return tuple(known[word] for word in words)


def words(text: str | None) -> list[str]:
    """The words of an option that takes them by commas."""
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def shapes_of(texts: Iterable[str] | None) -> list[dict[str, int]]:
    """The shapes of `--shape` options; UserError for what is none."""
    shapes = []
    for text in texts or ():
        shape: dict[str, int] = {}
        for pair in text.split(","):
            axis, equals, length = (part.strip() for part in pair.partition("="))
            if not (axis and equals and length.isascii() and length.isdecimal()):
                raise UserError(f"--shape {text} is not AXIS=N,...", "for example --shape b=4,t=16384,h=8")
            if axis in shape:
                raise UserError(f"--shape {text} gives {axis} twice", "leave one of them out")
            shape[axis] = int(length)
            if shape[axis] > LONGEST:
                raise UserError(f"--shape {text}: {axis} is longer than any array", f"at most {LONGEST}")
        shapes.append(shape)
    return shapes


def shape_text(sizes: Mapping[str, int]) -> str:
    """Axis lengths as `--shape` takes them."""
    return ",".join(f"{axis}={length}" for axis, length in sizes.items())
