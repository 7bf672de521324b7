"""The space that a search goes through: every knob of a form with its alternatives, and candidates, which are points of it.

*Structural* knobs change the text of the module and are set as `--config` sets them; *numeric* ones are fields of the
emitted Config. Which there are is asked of the form and of each module: nothing here belongs to one spec. What changes
the accuracy (the precision of a product) is the user's choice and no knob of a search.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from ssdgen.diagnostics import UserError
from ssdgen.emit import emit
from ssdgen.emit.package import package
from ssdgen.emit.support._tuned import heuristic, shape_of
from ssdgen.files import write_all
from ssdgen.ir.chunkform import ChunkForm
from ssdgen.ir.plan import Plan
from ssdgen.plan import configure, knob_space, plan
from ssdgen.plan.settings import structure
from ssdgen.run.inputs import DTYPES, Dtype
from ssdgen.run.load import load_file

Value = int | str
Values = tuple[tuple[str, Value], ...]


def _one_product_apart(here: str, there: str) -> bool:
    """Whether two subsets differ in one product; none at all is near to all of them."""
    return there == "none" or len({*here.split(","), "none"} ^ {*there.split(","), "none"}) == 1


@dataclass(frozen=True, slots=True)
class Candidate:
    """A point: the structural settings that differ from the spec's default, and the fields that differ from those of the
    module's default Config.
    """

    structure: tuple[tuple[str, str], ...] = ()
    fields: Values = ()

    def __str__(self) -> str:
        return " ".join(f"{k}={v}" for k, v in (*self.structure, *self.fields)) or "default"

    def moved(self, knob: str, value: Value, structural: bool) -> Candidate:
        """This point with one knob at another value."""
        if structural:
            changed = tuple((dict(self.structure) | {knob: str(value)}).items())
            return replace(self, structure=tuple(sorted(changed)))
        return replace(self, fields=tuple(sorted((dict(self.fields) | {knob: value}).items())))


@dataclass(frozen=True, slots=True)
class Variant:
    """A module at one point of the structural knobs, written where it stays, so that compiled kernels are found again."""

    plan: Plan
    module: ModuleType
    text: str

    @property
    def name(self) -> str:
        """The structural knobs as a tuning table has them: what the module says itself."""
        return str(self.module.VARIANT)


class Space:
    """The space of a form for inputs of one dtype and one shape. Modules are emitted when they are first asked for."""

    def __init__(self, form: ChunkForm, dtype: Dtype, sizes: Mapping[str, int], folder: Path) -> None:
        self.form = form
        self.dtype = dtype
        self.sizes = sizes
        self._folder = folder
        self._variants: dict[tuple[tuple[str, str], ...], Variant | str] = {}
        knobs = knob_space(form)
        self.structural = {k.name: k.values for k in knobs if k.kind == "structural" and len(k.values) > 1}
        self._numeric = {k.name: tuple(map(int, k.values)) for k in knobs if k.kind == "numeric"}

    def variant(self, candidate: Candidate) -> Variant:
        """The module of a candidate. Raises UserError where the form has no kernels at that point."""
        key = candidate.structure
        if key not in self._variants:
            self._variants[key] = self._emitted(dict(key))
        found = self._variants[key]
        if isinstance(found, str):
            raise UserError(found)
        return found

    def config(self, candidate: Candidate) -> Any:
        """The Config of a candidate. Raises ValueError or TypeError for a field that the module's Config does not take."""
        default = self.variant(candidate).module.CONFIGS[DTYPES[self.dtype]]
        return replace(default, **dict(candidate.fields))

    def numeric(self, candidate: Candidate) -> dict[str, tuple[int, ...]]:
        """The numeric knobs of a candidate's module with their alternatives, those in place included."""
        default = self.variant(candidate).module.CONFIGS[DTYPES[self.dtype]]
        found: dict[str, tuple[int, ...]] = {}
        for name, values in self._numeric.items():
            if hasattr(default, name):
                every = sorted({*values, getattr(default, name)})
                found[name] = tuple(v for v in every if _accepted(default, name, v))
        return {name: values for name, values in found.items() if len(values) > 1}

    def neighbours(self, candidate: Candidate, structural: bool = True) -> Iterator[Candidate]:
        """Every candidate that differs from this one in one knob, the structural ones first if they are to move."""
        if structural:
            yield from self._structural_neighbours(candidate)
        config = self.config(candidate)
        for knob, values in self.numeric(candidate).items():
            yield from (candidate.moved(knob, v, False) for v in values if v != getattr(config, knob))

    def _structural_neighbours(self, candidate: Candidate) -> Iterator[Candidate]:
        here = structure(configure(self.form, dict(candidate.structure)))
        for name, words in self.structural.items():
            for word in words:
                if word == here[name] or (name == "swap" and not _one_product_apart(here[name], word)):
                    continue
                moved = candidate.moved(name, word, structural=True)
                if self._takes(moved):
                    yield self.fitting(moved)

    def guessed(self, multiprocessors: int) -> Candidate:
        """What the default module runs with where no table has the shape."""
        module = self.variant(Candidate()).module
        default = module.CONFIGS[DTYPES[self.dtype]]
        chosen = heuristic(default, shape_of(module.LAYER, self.sizes), multiprocessors)
        changed = {f.name: getattr(chosen, f.name) for f in fields(default)}
        return Candidate(fields=tuple(sorted((k, v) for k, v in changed.items() if v != getattr(default, k))))

    def fitting(self, candidate: Candidate) -> Candidate:
        """A candidate without the fields that its module's Config lacks, as happens when a structural knob has moved."""
        try:
            default = self.variant(candidate).module.CONFIGS[DTYPES[self.dtype]]
        except UserError:
            return candidate
        known = {f.name for f in fields(default)}
        return replace(candidate, fields=tuple((name, v) for name, v in candidate.fields if name in known))

    def size(self) -> int:
        """How many points there are, structural knobs times the numeric ones of the default module."""
        total = 1
        for values in (*self.structural.values(), *self.numeric(Candidate()).values()):
            total *= len(values)
        return total

    def _takes(self, candidate: Candidate) -> bool:
        """Whether the structural settings go together."""
        try:
            configure(self.form, dict(candidate.structure))
        except UserError:
            return False
        return True

    def _emitted(self, settings: dict[str, str]) -> Variant | str:
        planned = plan(self.form, configure(self.form, settings))
        if planned.refused:
            return planned.refused
        source = emit(planned)
        digest = hashlib.sha256(repr(sorted(package([source]).items())).encode()).hexdigest()[:16]
        folder = self._folder / f"{source.name}_{digest}"
        folder.mkdir(parents=True, exist_ok=True)
        write_all(folder, package([source]))
        return Variant(planned, load_file(folder / f"{source.name}.py"), source.text)


def _accepted(config: Any, name: str, value: int) -> bool:
    try:
        replace(config, **{name: value})
    except (ValueError, TypeError):
        return False
    return True
