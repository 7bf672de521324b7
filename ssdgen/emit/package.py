"""ModuleSources -> the files of a package that imports them, whichever they are."""

from __future__ import annotations

from collections.abc import Iterable

from ssdgen.emit.module import ModuleSource

INIT = '"""Modules that ssdgen emitted from specs. Do not edit them: change the spec and run `ssdgen generate`."""\n'


def package(modules: Iterable[ModuleSource]) -> dict[str, str]:
    """The text of every file by name. A folder may hold the modules of several calls."""
    files = {"__init__.py": INIT, "py.typed": ""}
    for module in modules:
        files |= {**dict(module.support), f"{module.name}.py": module.text}
    return files
