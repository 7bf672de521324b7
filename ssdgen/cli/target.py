"""The folder that `generate` writes to: whose files are in it, and whether a program can import it."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from pathlib import Path

from ssdgen.cli.output import say
from ssdgen.diagnostics import UserError

EMITTED = re.compile(r'^SPEC_DIGEST = ".*\n""".*emitted by ssdgen', re.MULTILINE)
"""How an emitted module ends."""


def check_overwritten(folder: Path, files: Mapping[str, str]) -> None:
    """Raise UserError if writing `files` to `folder` would overwrite what somebody else wrote there."""
    foreign = [str(folder / name) for name, content in files.items() if not _is_ours(folder / name, content)]
    if foreign:
        raise UserError(
            f"ssdgen did not write {', '.join(sorted(foreign))} and would overwrite it",
            "name another folder with -o, or overwrite it with --force",
        )


def _is_ours(path: Path, content: str) -> bool:
    """Whether the file at `path` is missing, blank, or an older `content`: an emitted module too, or of the same first line."""
    if not path.is_file():
        return True  # a folder in the way is refused when it is written
    try:
        old = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from error
    if not old.strip() or old == content:
        return True
    if EMITTED.search(content):
        return EMITTED.search(old) is not None
    return bool(content) and old.splitlines()[0] == content.splitlines()[0]


def check_package_name(folder: Path) -> None:
    """Warn if no `import` statement can name `folder`."""
    name = folder.resolve().name
    if name.isidentifier() and not keyword.iskeyword(name):
        return
    plain = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_0123456789")
    hint = f"-o {folder.parent / (f'{plain}_package' if keyword.iskeyword(plain) else plain or 'generated')}"
    say(f"ssdgen: warning: no import statement can name the folder {folder}\n  hint: {hint}")
