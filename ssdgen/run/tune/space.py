"""The space that a search goes through: the knobs of `knob_space` as a search moves them, and candidates, its points.

*Structural* knobs change the text of the module and are set as `--config` sets them; the others are fields of the emitted
Config. What changes the accuracy (the precision of a product) is the user's choice: it moves only if it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from ssdgen.derive.adjoint import adjoint
from ssdgen.diagnostics import UserError
from ssdgen.emit import emit
from ssdgen.emit.support._segments import segments
from ssdgen.emit.support._tuned import heuristic, shape_of
from ssdgen.ir.chunkform import ChunkForm
from ssdgen.ir.layer import Dtype
from ssdgen.ir.plan import Plan
from ssdgen.plan import SpaceKnob, configure, knob_space, plan
from ssdgen.plan.roofline import Work, compulsory_bytes, roofline
from ssdgen.plan.settings import NO_PRODUCT, structure
from ssdgen.plan.space import gradient_space
from ssdgen.run.inputs import DTYPES
from ssdgen.run.load import kept, load_file
from ssdgen.run.recorded import Call, Launch, gradients_of, record, record_gradients, starts_of

Value = int | str
Values = tuple[tuple[str, Value], ...]


def _near(knob: str, here: str, there: str) -> bool:
    """Whether a round tries the value `there` of a structural knob that stands at `here`: any, but of the products that are
    swapped one less or one more, or none.
    """
    if knob != "swap" or there == NO_PRODUCT:
        return True
    return len({*here.split(","), NO_PRODUCT} ^ {*there.split(","), NO_PRODUCT}) == 1


def searched(layer: str, knobs: tuple[SpaceKnob, ...], only: Sequence[str] = ()) -> tuple[SpaceKnob, ...]:
    """The knobs that a search of a layer that has `knobs` moves: all but those of accuracy, or just those that `only` names.

    A word of `only` is a knob's name or the beginning of several (`latency` is every `latency_NAME`). UserError if it is
    neither.
    """
    if not only:
        return tuple(k for k in knobs if k.kind != "accuracy")
    chosen: set[str] = set()
    for word in only if knobs else ():
        exact = {k.name for k in knobs if k.name == word}
        named = exact or {k.name for k in knobs if k.name.startswith(f"{word}_")}
        if not named:
            hint = f"it has {', '.join(k.name for k in knobs)}, and the beginnings of these, as latency"
            raise UserError(f"{layer} has no knob `{word}` to search", hint)
        chosen |= named
    return tuple(k for k in knobs if k.name in chosen)


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
    """The space of a form for inputs of one dtype and one shape, of all knobs or those that `only` names as `searched` has
    it. Modules are emitted when they are first asked for.
    """

    def __init__(
        self, form: ChunkForm, dtype: Dtype, sizes: Mapping[str, int], folder: Path, only: Sequence[str] = ()
    ) -> None:
        self.form = form
        self.dtype = dtype
        self.sizes = sizes
        self._folder = folder
        self._variants: dict[tuple[tuple[str, str], ...], Variant | str] = {}
        every = searched(form.recurrence.layer.name, self.knobs(), only)
        knobs = [k for k in every if len(k.values) > 1]  # a layout of what callers pass has one
        self.structural = {k.name: k.values for k in knobs if k.kind == "structural"}
        self._fields: dict[str, tuple[Value, ...]] = {
            k.name: tuple(map(int, k.values)) if k.kind == "numeric" else k.values
            for k in knobs
            if k.kind != "structural"
        }

    def knobs(self) -> tuple[SpaceKnob, ...]:
        """Every knob, those of accuracy too."""
        return knob_space(self.form)

    def default(self, candidate: Candidate) -> Any:
        """The default Config of a candidate's module. Raises UserError as `variant` does."""
        return self.variant(candidate).module.CONFIGS[DTYPES[self.dtype]]

    def launches(self, candidate: Candidate, call: Call) -> tuple[Launch, ...]:
        """What a candidate launches for a call. Raises what its module raises."""
        return record(self.variant(candidate).module, call, self.config(candidate))

    def works(
        self, candidate: Candidate, call: Call, launches: Sequence[Launch], multiprocessors: int
    ) -> tuple[Work, ...]:
        """What these launches move, by the plan's roofline."""
        knobs, planned = vars(self.config(candidate)), self.variant(candidate).plan
        return roofline(
            planned, call.sizes, segments, dtype=call.dtype, present=call.present, knobs=knobs,
            multiprocessors=multiprocessors,
        ).kernels  # fmt: skip

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
        return replace(self.default(candidate), **dict(candidate.fields))

    def numeric(self, candidate: Candidate) -> dict[str, tuple[Value, ...]]:
        """The knobs that are fields of a candidate's Config with their alternatives, in the order of the search."""
        default = self.default(candidate)
        known = {f.name for f in fields(default)}
        found = {
            name: tuple(v for v in values if _accepted(default, name, v))
            for name, values in self._fields.items()
            if name in known
        }
        return {name: values for name, values in found.items() if len(values) > 1}

    def neighbours(self, candidate: Candidate, structural: bool = True) -> Iterator[Candidate]:
        """Every candidate that differs from this one in one knob, the structural ones first if they are to move."""
        if structural:
            yield from self.varied(candidate)
        config = self.config(candidate)
        for knob, values in self.numeric(candidate).items():
            yield from (candidate.moved(knob, v, False) for v in values if v != getattr(config, knob))

    def varied(self, candidate: Candidate) -> Iterator[Candidate]:
        """Every candidate that differs from this one in one structural knob. There may be no module there: not every
        combination is one.
        """
        here = structure(configure(self.form, dict(candidate.structure)))
        for knob, words in self.structural.items():
            for word in words:
                if word != here[knob] and _near(knob, here[knob], word):
                    yield self.fitting(candidate.moved(knob, word, structural=True))

    def guessed(self, multiprocessors: int) -> Candidate:
        """What the default module runs with where no table has the shape."""
        module, default = self.variant(Candidate()).module, self.default(Candidate())
        chosen = heuristic(default, shape_of(module.LAYER, self.sizes), multiprocessors)
        changed = {f.name: getattr(chosen, f.name) for f in fields(default)}
        return Candidate(fields=tuple(sorted((k, v) for k, v in changed.items() if v != getattr(default, k))))

    def fitting(self, candidate: Candidate) -> Candidate:
        """A candidate without the fields that its module's Config lacks, as happens when a structural knob has moved."""
        try:
            default = self.default(candidate)
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

    def _emitted(self, settings: dict[str, str]) -> Variant | str:
        try:
            planned = self._planned(settings)
        except UserError as error:  # knobs that exclude each other
            return error.message
        if reason := self._refused(planned):
            return reason
        source = emit(planned)
        return Variant(planned, load_file(kept(self._folder, source)), source.text)

    def _planned(self, settings: Mapping[str, str]) -> Plan:
        return plan(self.form, configure(self.form, settings))

    def _refused(self, planned: Plan) -> str:
        """Why a plan has no kernels to search; empty if it has."""
        return planned.refused


class GradientSpace(Space):
    """The space of the kernels of a form's gradients: fields of their Config alone, beside the module that the spec's
    defaults give."""

    def knobs(self) -> tuple[SpaceKnob, ...]:
        """Every knob of the gradients."""
        return gradient_space(self._planned({}))

    def default(self, candidate: Candidate) -> Any:
        """The default Config of the module of gradients."""
        return gradients_of(self.variant(candidate).module).CONFIGS[DTYPES[self.dtype]]

    def launches(self, candidate: Candidate, call: Call) -> tuple[Launch, ...]:
        """What the gradients of a call launch, where none arrive at final states."""
        module, config = self.variant(candidate).module, self.config(candidate)
        return record_gradients(module, call, config, finals=False, starts_every=starts_of(module, call, config))

    def works(
        self, candidate: Candidate, call: Call, launches: Sequence[Launch], multiprocessors: int
    ) -> tuple[Work, ...]:
        """As if each launch moved what every plan of the forward pass has to: it tells grids apart, and nothing finer."""
        moved = compulsory_bytes(self.form.recurrence.layer, call.sizes, call.dtype, call.present)
        return tuple(
            Work(name, (("inputs", moved),), 0, 0) for name in dict.fromkeys(x.request.kernel for x in launches)
        )

    def guessed(self, multiprocessors: int) -> Candidate:
        """The default: no rules are known for gradients."""
        return Candidate()

    def _planned(self, settings: Mapping[str, str]) -> Plan:
        return plan(self.form, configure(self.form, settings), adjoint(self.form))

    def _refused(self, planned: Plan) -> str:
        return planned.refused or (planned.gradients.refused if planned.gradients is not None else "")


def _accepted(config: Any, name: str, value: Value) -> bool:
    try:
        replace(config, **{name: value})
    except (ValueError, TypeError):
        return False
    return True
