"""Other points of a built-in spec's schedule, emitted where they are measured."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from ssdgen import pipeline
from ssdgen.files import write_all

VARIANTS: dict[str, tuple[str, dict[str, str]]] = {
    "mamba2 three_kernel": ("mamba2", {"plan": "three_kernel", "swap": "carried,intra"}),
    "mamba2 single_walk": ("mamba2", {"plan": "single_walk"}),
}
"""Their names in the tables, with the spec and the knobs that differ from its defaults."""

FOLDER = Path(__file__).resolve().parent.parent / "build" / "variants"
"""Where they are written; the compiler's cache knows kernels by this path."""


def spec_of(name: str) -> str:
    """The built-in spec that `name`, a spec or a variant, is of."""
    return VARIANTS[name][0] if name in VARIANTS else name


def module_of(name: str) -> ModuleType:
    """The committed module of a built-in spec, or the one emitted for a variant of it."""
    if name not in VARIANTS:
        return importlib.import_module(f"generated.{name}")
    spec, settings = VARIANTS[name]
    form, _ = pipeline.derive(spec)
    files = pipeline.package([pipeline.emit(pipeline.plan(form, settings))])
    package = name.replace(" ", "_")
    folder = FOLDER / package
    folder.mkdir(parents=True, exist_ok=True)
    if any(not (folder / f).exists() or (folder / f).read_text() != text for f, text in files.items()):
        write_all(folder, files)
    if package not in sys.modules:
        found = importlib.util.spec_from_file_location(
            package, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert found is not None
        assert found.loader is not None
        sys.modules[package] = importlib.util.module_from_spec(found)
        found.loader.exec_module(sys.modules[package])
    return importlib.import_module(f"{package}.{spec}")
