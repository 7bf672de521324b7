"""Writing tuning tables: what emitted modules read with `_tuned.py`, in its words. Safe with several writers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from ssdgen.diagnostics import UserError
from ssdgen.emit.support._tuned import Entry, TableError, parse, to_text, user_folder
from ssdgen.files import write

PATIENCE = 60.0


def user_table(layer: str) -> Path:
    """The user's table of a layer."""
    return user_folder() / f"tuned_{layer}.json"


def add(path: Path, entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """Put `entries` into the table at `path`, in the place of those with the same keys; all that it holds then.

    Another writer waits, a reader sees the old table or the new one. A table that cannot be read is replaced if it is a
    user's, which is a cache; modules of this process see the new one at their next call. Raises UserError if `path`
    cannot be written.
    """
    if not path.name.startswith("tuned_") or path.suffix != ".json":
        raise UserError(f"no module would read {path}", f"call it {path.with_name('tuned_NAME.json')}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{path.name}.lock"), timeout=PATIENCE):
            kept = {entry.key: entry for entry in (*_readable(path), *entries)}
            text = to_text(tuple(kept.values()))
            write(path, text)
    except Timeout as error:
        raise UserError(f"cannot write {path}: another process has held its lock for {PATIENCE:.0f} s") from error
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"cannot write {path}: {reason}", "choose a folder that you may write to") from error
    forget()
    return parse(text)


def _readable(path: Path) -> tuple[Entry, ...]:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ()
    except (TableError, UnicodeDecodeError) as error:
        if path.parent == user_folder():
            return ()
        raise UserError(f"{path} is no tuning table: {error}", "remove it, or name another file") from error


def forget() -> None:
    """Make every emitted module that this process has imported read the tables again."""
    for name, module in list(sys.modules.items()):
        if name.endswith("._tuned"):
            module.forget()
