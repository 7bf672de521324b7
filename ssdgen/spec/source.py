"""Finding and reading a spec: a path, or the name of a spec that comes with ssdgen."""

from __future__ import annotations

import os.path
from pathlib import Path

from ssdgen.diagnostics import NOWHERE, Diagnostic, Source, SpecError
from ssdgen.resources import resource_dir
from ssdgen.spec.problems import closest

LARGEST = 1_000_000


def builtin_specs() -> tuple[str, ...]:
    """The names of the specs that come with ssdgen, sorted."""
    return tuple(sorted(path.stem for path in resource_dir("specs").glob("*.ssd")))


def load_source(path_or_name: str) -> Source:
    """The text of a spec, given by path or by a built-in spec's name.

    Anything that ends in `.ssd` or contains a slash is a path. Raises SpecError for what cannot be read as a spec: no such
    file or name, a directory, more than 1 MB, not UTF-8, control characters.
    """
    if not path_or_name.strip():
        hint = f"the built-in specs are {', '.join(builtin_specs())}; a file is given by its path"
        raise _refused(repr(path_or_name), "E006", "no spec has an empty name", hint)
    path = Path(path_or_name)  # asked by os.path, which answers False for names that no file can have
    shown = path_or_name
    is_path = path.suffix == ".ssd" or len(path.parts) > 1 or os.path.exists(path)
    if path_or_name in builtin_specs():
        path = resource_dir("specs") / f"{path_or_name}.ssd"
        shown = path.name
    elif not is_path:
        known = builtin_specs()
        hint = closest(path_or_name, known, f"the built-in specs are {', '.join(known)}; a file is given by its path")
        raise _refused(shown, "E006", f"no built-in spec is called `{path_or_name}`, and no file", hint)
    if os.path.isdir(path):
        raise _refused(shown, "E002", "this is a directory", "give the path of a spec in it")
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except FileNotFoundError:
        near = [str(other) for other in path.parent.glob("*.ssd")]
        raise _refused(shown, "E001", "there is no such file", closest(str(path), near)) from None
    except (OSError, ValueError) as error:
        raise _refused(
            shown, "E001", f"this file cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None
    if len(data) > LARGEST:
        raise _refused(shown, "E003", "this file is larger than 1 MB", "a spec is a page long; is this the right file?")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        hint = "save it as UTF-8"
        raise _refused(
            shown, "E004", f"this file is not UTF-8: byte 0x{data[error.start]:02x} on line {line}", hint
        ) from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise _refused(shown, "E005", f"this is not a text file: a NUL byte on line {line}")
    return Source(shown, text)


def _refused(path: str, code: str, message: str, hint: str = "") -> SpecError:
    return SpecError(Source(path, ""), [Diagnostic(code, message, NOWHERE, hint)])
