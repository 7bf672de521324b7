"""`ssdgen new`: the spec that a newcomer starts from."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from typing import Annotated

import typer

from ssdgen.cli.app import app
from ssdgen.cli.options import Debug, Json
from ssdgen.cli.output import show, show_json
from ssdgen.diagnostics import UserError
from ssdgen.files import write

LONGEST = 40


def start(name: str, folder: Path, force: bool) -> Path:
    """Write `folder`/`name`.ssd, a commented spec that verifies as it is; its path.

    UserError for a name no module can have, or a file that is there already unless `force`.
    """
    check_name(name)
    path = folder / f"{name}.ssd"
    if path.exists() and not force:
        raise UserError(f"{path} exists already", "choose another name, or overwrite it with --force")
    write(path, (Path(__file__).parent / "start.ssd").read_text(encoding="utf-8").replace("NAME", name))
    return path


def check_name(name: str) -> None:
    """Raise UserError unless `name` can name a layer and the module emitted for it."""
    if re.fullmatch(r"[a-z][a-z0-9_]*", name) and len(name) <= LONGEST and not keyword.iskeyword(name):
        return
    if keyword.iskeyword(name):
        raise UserError(f"`{name}` is a word of Python, so no module can have that name", f"try `{name}_layer`")
    stem = name.rsplit("/", 1)[-1].removesuffix(".ssd")
    plain = re.sub(r"[^a-z0-9_]+", "_", stem.lower()).strip("_0123456789")[:LONGEST]
    hint = f"try `{plain}`" if plain else "try `mine`"
    raise UserError(
        f"`{name}` cannot name a layer: small letters, digits and _, from a letter, {LONGEST} at most", hint
    )


@app.command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The layer's name; the file is NAME.ssd.")],
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it exists.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a commented spec to start from."""
    path = start(name, Path(), force)
    if json:
        show_json({"file": str(path)})
    else:
        show(f"wrote {path}; next: ssdgen verify {path}")
