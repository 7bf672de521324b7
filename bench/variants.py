"""Other points of a built-in spec's schedule, emitted where they are measured."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

from ssdgen import pipeline
from ssdgen.run.load import kept, load_file

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
    FOLDER.mkdir(parents=True, exist_ok=True)
    return load_file(kept(FOLDER, pipeline.emit(pipeline.plan(form, settings))))
