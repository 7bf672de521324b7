"""Importing a module that was just emitted, without writing it where the user keeps theirs."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import itertools
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from ssdgen.files import write_all

_numbers = itertools.count()
_folders: list[tempfile.TemporaryDirectory[str]] = []
"""Kept for the life of the process: kernels are compiled from their files when they are first launched."""


def load(name: str, files: Mapping[str, str]) -> ModuleType:
    """The module `name` of an emitted package, whose `files` are written to a temporary folder and imported from there.

    Every call makes a package of its own, so two versions of a module live side by side.
    """
    folder = tempfile.TemporaryDirectory(prefix="ssdgen-")
    _folders.append(folder)
    write_all(Path(folder.name), {"__init__.py": "", **files})
    package = f"ssdgen_emitted_{next(_numbers)}"
    spec = importlib.util.spec_from_file_location(
        package, Path(folder.name) / "__init__.py", submodule_search_locations=[folder.name]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules[package] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[package])
    return importlib.import_module(f"{package}.{name}")


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
