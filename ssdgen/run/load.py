"""Importing a module that was just emitted, without writing it where the user keeps theirs."""

from __future__ import annotations

import hashlib
import importlib
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from ssdgen.emit.module import ModuleSource
from ssdgen.emit.package import package
from ssdgen.files import write_all

_folders: list[tempfile.TemporaryDirectory[str]] = []
"""Kept for the life of the process: kernels are compiled from their files when they are first launched."""


def load(name: str, files: Mapping[str, str]) -> ModuleType:
    """The module `name` of an emitted package, whose `files` are written to a temporary folder and imported from there.

    Every call makes a package of its own, so two versions of a module live side by side.
    """
    folder = tempfile.TemporaryDirectory(prefix="ssdgen-")
    _folders.append(folder)
    write_all(Path(folder.name), files)
    return load_file(Path(folder.name) / f"{name}.py")


def kept(parent: Path, source: ModuleSource) -> Path:
    """The file of an emitted module, in a folder of `parent` (which exists) that is named after its text; written if new.

    The compiler's cache knows kernels by their file, so what is emitted again is not compiled again.
    """
    files = package([source])
    digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:16]
    folder = parent / f"{source.name}_{digest}"
    write_all(folder, files)
    return folder / f"{source.name}.py"


def load_file(path: Path) -> ModuleType:
    """The emitted module at `path`, imported from there, its neighbours too, without running the folder's `__init__`.

    The same path gives the same module. Raises what the module raises.
    """
    folder = path.resolve().parent
    package = f"ssdgen_at_{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"
    if package not in sys.modules:
        parent = ModuleType(package)
        parent.__path__ = [str(folder)]
        sys.modules[package] = parent
    return importlib.import_module(f"{package}.{path.stem}")
