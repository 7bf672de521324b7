"""ModuleSources -> the files of a package that imports them, whichever they are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable

from ssdgen.emit.gradients import gradients_name
from ssdgen.emit.module import ModuleSource
from ssdgen.resources import resource_dir

INIT = '"""Modules that ssdgen emitted from specs. Do not edit them: change the spec and run `ssdgen generate`."""\n'


def package(modules: Iterable[ModuleSource]) -> dict[str, str]:
    """The text of every file by name. A folder may hold the modules of several calls.

    Tuning tables that come with ssdgen are among them, as far as they are about these modules.
    """
    files = {"__init__.py": INIT, "py.typed": ""}
    digests = set()
    for module in modules:
        files |= {**dict(module.support), f"{module.name}.py": module.text}
        if module.gradients:
            files[f"{gradients_name(module.name)}.py"] = module.gradients
        if module.tuned:
            digests.add(spec_digest(module))
    return files | tables(digests)


def spec_digest(module: ModuleSource) -> str:
    """The digest of the spec that a module was emitted from, as it says itself."""
    return hashlib.sha256(module.plan.form.recurrence.layer.source.text.encode()).hexdigest()


def tables(digests: Collection[str]) -> dict[str, str]:
    """The tuning tables that come with ssdgen, without the entries for specs of other digests; empty ones are left out.

    They are written as `_tuned.to_text` writes them.
    """
    files = {}
    for path in sorted(resource_dir("generated").glob("tuned_*.json")):
        table = json.loads(path.read_text(encoding="utf-8"))
        entries = [entry for entry in table["entries"] if entry["key"]["digest"] in digests]
        if entries:
            files[path.name] = json.dumps({**table, "entries": entries}, indent=1) + "\n"
    return files
