"""Writing files so that an interrupted run leaves the old ones: whole or not at all, and only where they differ."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ssdgen.diagnostics import UserError


def write(path: Path, content: str | bytes) -> bool:
    """Make the file at `path` hold `content` (text as UTF-8) at one stroke; False if it did already.

    The folder must exist. Raises UserError if the file cannot be written there.
    """
    data = content.encode() if isinstance(content, str) else content
    target = Path(os.path.realpath(path))  # a link stays a link
    if target.is_dir():
        raise UserError(f"cannot write {path}: a folder of that name is in the way", "choose another name or remove it")
    if not target.parent.is_dir():
        raise UserError(f"cannot write {path}: there is no folder {path.parent}", f"mkdir -p {path.parent}")
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        if target.is_file() and target.read_bytes() == data:
            return False
        try:
            partial.write_bytes(data)
            if target.exists():
                partial.chmod(target.stat().st_mode & 0o7777)
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {path}: {_reason(error)}", "choose a folder that you may write to") from error
    return True


def make_folder(path: Path) -> None:
    """Make the folder `path` unless it exists; the folder it stands in must. Raises UserError if that fails."""
    if path.exists() and not path.is_dir():
        raise UserError(f"cannot write into {path}: it is a file, not a folder", "name a folder, or remove the file")
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not path.parent.exists():
            reason, hint = f"there is no {path.parent}", f"mkdir -p {path.parent}"
        elif isinstance(error, FileNotFoundError):  # what /proc says
            reason, hint = f"{path.parent} takes no folders", "choose a folder you may write to"
        else:
            reason, hint = _reason(error), "choose a folder you may write to"
        raise UserError(f"cannot make the folder {path}: {reason}", hint) from error


def write_all(folder: Path, files: Mapping[str, str]) -> tuple[str, ...]:
    """Make `folder` and in it every file of `files` (name: content); the names of those that were not so already."""
    make_folder(folder)
    return tuple(name for name, content in files.items() if write(folder / name, content))


def differing(folder: Path, files: Mapping[str, str]) -> tuple[str, ...]:
    """The names in `files` whose content in `folder` is another or missing."""
    return tuple(name for name, content in files.items() if not _holds(folder / name, content))


def _holds(path: Path, content: str) -> bool:
    try:
        return path.read_bytes() == content.encode()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise UserError(f"cannot read {path}: {_reason(error)}") from error


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
