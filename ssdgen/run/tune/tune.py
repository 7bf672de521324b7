"""`tune`: a search for every shape, and its results in a tuning table; `preview`: the same up to the first measurement."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ssdgen.build.store import folder_in_cache
from ssdgen.build.worker import CACHE_VARIABLE
from ssdgen.diagnostics import UserError
from ssdgen.emit.support._tuned import GRADIENTS, Entry, Key, compiler_version, dtype_names, shape_of
from ssdgen.ir.chunkform import ChunkForm
from ssdgen.ir.layer import Dtype, Layer
from ssdgen.plan.names import key_inputs
from ssdgen.plan.shapes import check_dtype, check_optional, sizes_of
from ssdgen.run.inputs import Case, dtype_of
from ssdgen.run.recorded import Call
from ssdgen.run.tune.compile import Compiler
from ssdgen.run.tune.device import H200, Device
from ssdgen.run.tune.measure import Measurer, probed
from ssdgen.run.tune.prune import Estimate, Removed, compiled_badly, estimated
from ssdgen.run.tune.remote import Remote
from ssdgen.run.tune.search import Found, Measured, Search
from ssdgen.run.tune.space import Candidate, GradientSpace, Space, Value
from ssdgen.run.tune.table import add, user_table
from ssdgen.run.tune.worker import Setup

SECONDS = 50.0
"""The default budget of a shape: with the start of the processes, under a minute."""

FOLDER = "tune"
"""Where in the cache candidates are emitted and their kernels kept."""

SECONDS_STRUCTURAL = 30.0
"""With less for a shape structural knobs stay as they are, unless they are asked for: each of their values is another module,
all kernels of which have to be compiled."""

ENOUGH = 5
"""A structural variant of which fewer candidates were measured gets no entry, unless it is the default or the best."""

Heard = Callable[[Measured | Removed, int], None]
"""Told of each result of a search, and how many candidates of its step are still to come."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """What a search found for one shape, and the entries that it left in the table at `path`."""

    sizes: Mapping[str, int]
    device: Device
    found: Found
    entries: tuple[Entry, ...]
    path: Path


@dataclass(frozen=True, slots=True)
class Preview:
    """What a search would begin with: the knobs with their alternatives, how many points that makes, the candidates
    that it would measure first, in their order, and those that fell out.
    """

    sizes: Mapping[str, int]
    device: Device
    structural: Mapping[str, tuple[str, ...]]
    numeric: Mapping[str, tuple[Value, ...]]
    points: int
    considered: int
    candidates: tuple[Estimate, ...]
    removed: tuple[Removed, ...]


def preview(
    form: ChunkForm,
    shape: Mapping[str, int],
    *,
    dtype: Dtype = "bf16",
    optional: Sequence[str] = (),
    only: Sequence[str] = (),
    device: Device = H200,
    compiles: bool = False,
    gradients: bool = False,
    jobs: int | None = None,
    heard: Heard = lambda result, waiting: None,
) -> Preview:
    """What `tune` would begin with at `shape` on `device`: needs no GPU. With `compiles` also what the compiler removes.

    Raises UserError as `tune` does.
    """
    layer = form.recurrence.layer
    case = _case(layer, shape, dtype, optional)
    space = _spaces(gradients)(form, dtype, case.sizes, folder_in_cache(FOLDER), only)
    search = Search(
        space, _call(layer, case, space.dtype), device, _NoCompiler(), _nothing_measured, lambda: 1.0, heard
    )
    start = Candidate()
    _check_kernels([space])
    estimates = search.estimates([start], always=True)
    estimates += search.estimates(space.neighbours(start, structural=False))
    alone = search.estimates(space.varied(start))
    estimates += alone
    for estimate in alone:
        estimates += search.estimates(space.varied(estimate.candidate))
    removed = list(search.found.removed)
    if compiles:
        with Compiler(device.arch, jobs, folder_in_cache(FOLDER) / "kernels") as compiler:
            good = []
            for place, answers in compiler.compiled([e.requests for e in estimates]):
                estimate = estimates[place]
                judged = (compiled_badly(a, r, device) for a, r in zip(answers, estimate.requests, strict=True))
                bad = next(filter(None, judged), None)
                if bad:
                    removed.append(Removed(estimate.candidate, *bad))
                    heard(removed[-1], len(estimates) - place)
                else:
                    good.append(estimate)
        estimates = [e for e in estimates if e in good]
    return Preview(
        case.sizes,
        device,
        space.structural,
        space.numeric(start),
        space.size(),
        search.found.considered,
        tuple(estimates),
        tuple(removed),
    )


def tune(
    form: ChunkForm,
    shapes: Sequence[Mapping[str, int]],
    *,
    dtype: Dtype = "bf16",
    optional: Sequence[str] = (),
    only: Sequence[str] = (),
    seconds: float = SECONDS,
    jobs: int | None = None,
    structural: bool = True,
    gradients: bool = False,
    to: Path | None = None,
    heard: Heard = lambda result, waiting: None,
) -> tuple[Tuned, ...]:
    """Search the fastest configuration of `form` (as `pipeline.derive` gives it) for each of `shapes` on the current GPU.

    A shape is axis lengths by name (`{"b": 4, "t": 16384, "h": 8}`); axes of a declared size and groups may be left out.
    Inputs are `dtype`, with the `optional` ones passed. Each shape takes about `seconds`: candidates are compiled by `jobs`
    processes (one a core if None) and measured in a process of their own, under a CUDA graph and with the L2 cache
    flushed; a result that is wrong, or a process that dies, costs that candidate alone. Without `structural` the module
    stays as the spec's defaults emit it, and so it does in less than SECONDS_STRUCTURAL. With `only` just those knobs move
    that it names (see `searched`), of whatever kind. With `gradients` it is the kernels of the form's gradients that are
    searched, for gradients that arrive at outputs. The best of each structural variant goes into the user's tuning table, or
    into the file `to`, as soon as the search of its shape ends; modules find it at their next call.

    Raises UserError without a GPU or compiler, for a shape, input or knob the layer does not have, and if the default fails.
    """
    layer = form.recurrence.layer
    cases = [_case(layer, shape, dtype, optional) for shape in shapes]
    if not torch.cuda.is_available():
        raise UserError("there is no CUDA device here to measure on", "--dry-run shows the search without one")
    path, kernels = to or user_table(layer.name), folder_in_cache(FOLDER) / "kernels"
    spaces = [_spaces(gradients)(form, dtype, case.sizes, folder_in_cache(FOLDER), only) for case in cases]
    _check_kernels(spaces)
    structural = structural and (seconds >= SECONDS_STRUCTURAL or bool(only))
    results = []
    with Remote({CACHE_VARIABLE: str(kernels)}) as remote:
        device = probed(remote)
        with Compiler(device.arch, jobs, kernels) as compiler:
            for case, space in zip(cases, spaces, strict=True):
                machine = Machine(device, remote, compiler, time.monotonic() + seconds)
                found = _searched(space, case, machine, structural, heard)
                entries = entries_of(space, case, device, found)
                add(path, entries)
                results.append(Tuned(case.sizes, device, found, entries, path))
    return tuple(results)


@dataclass(frozen=True, slots=True)
class Machine:
    """What the searches of several shapes have in common, a GPU with its processes, and when the one at work has to end."""

    device: Device
    remote: Remote
    compiler: Compiler
    until: float

    def time_left(self) -> float:
        """The seconds until then."""
        return self.until - time.monotonic()


def _searched(space: Space, case: Case, machine: Machine, structural: bool, heard: Heard) -> Found:
    """A search on `machine`. Raises UserError if the default has no speed."""
    layer, device, compiler, start = space.form.recurrence.layer, machine.device, machine.compiler, Candidate()
    call = _call(layer, case, space.dtype)
    module = str(space.variant(start).module.__file__)
    measurer = Measurer(machine.remote, Setup(layer, case, module, isinstance(space, GradientSpace)))
    default = estimated(space, start, call, device)
    if isinstance(default, Estimate):  # in parallel, before the setup launches it
        list(compiler.compiled([default.requests]))
    measurer.start()
    found = Search(space, call, device, compiler, measurer, machine.time_left, heard).run(structural)
    if found.default is None:
        why = found.removed[0].why if found.removed else "nothing was measured"
        raise UserError(f"the default configuration has no speed at this shape: {why}", "ssdgen verify the spec")
    return found


def entries_of(space: Space, case: Case, device: Device, found: Found) -> tuple[Entry, ...]:
    """The best candidate of each structural variant, for a table: the default's, the best, and those searched enough."""
    by_variant: dict[str, list[Measured]] = {}
    for measured in found.measured:
        by_variant.setdefault(space.variant(measured.candidate).name, []).append(measured)
    best = found.best
    entries = []
    for variant, several in by_variant.items():
        ours = any(m in (best, found.default) for m in several)
        if len(several) >= ENOUGH or ours:
            fastest = min(several, key=lambda m: m.timed.microseconds)
            entries.append(_entry(space, case, device, found, fastest, variant))
    return tuple(entries)


def _entry(space: Space, case: Case, device: Device, found: Found, fastest: Measured, variant: str) -> Entry:
    module = space.variant(fastest.candidate).module
    layer = space.form.recurrence.layer
    leader = space.variant(fastest.candidate).plan.leader
    dtypes = tuple(dtype_of(layer, layer.tensor(name), case) for name in key_inputs(layer, leader))
    shape, present = shape_of(module.LAYER, case.sizes).text, _call(layer, case, space.dtype).present
    present += (GRADIENTS,) if isinstance(space, GradientSpace) else ()
    key = Key(module.SPEC_DIGEST, variant, present, device.name, compiler_version(), dtype_names(dtypes), shape)
    every, moved = vars(space.config(fastest.candidate)), dict(fastest.candidate.fields)
    config = {name: v for name, v in every.items() if isinstance(v, int) or name in moved}  # precisions if searched
    measured: dict[str, Any] = {"microseconds": round(fastest.timed.microseconds, 2), "sizes": dict(case.sizes)}
    if found.default is not None:
        measured["default_microseconds"] = round(found.default.timed.microseconds, 2)
    return Entry(key, config, measured)


def _spaces(gradients: bool) -> type[Space]:
    return GradientSpace if gradients else Space


def _case(layer: Layer, shape: Mapping[str, int], dtype: Dtype, optional: Sequence[str]) -> Case:
    """The call that is measured: no initial state, what has a narrower form in that one, of optional inputs those named."""
    check_dtype(layer, dtype)
    check_optional(layer, optional)
    names = [t.name for t in layer.inputs if t.optional]
    absent = {name for name in names if name not in optional} | {f"{s.name}0" for s in layer.states}
    forms = {t.name: t.narrower[0] for t in layer.inputs if t.narrower}
    return Case(sizes_of(layer, shape), dtype, absent=frozenset(absent), forms=forms)


def _call(layer: Layer, case: Case, dtype: Dtype) -> Call:
    present = tuple(t.name for t in layer.inputs if t.optional and t.name not in case.absent)
    return Call(case.sizes, dtype, present, tuple((name, len(axes)) for name, axes in case.forms.items()))


def _check_kernels(spaces: Sequence[Space]) -> None:
    for space in spaces:
        try:
            space.variant(Candidate())
        except UserError as error:
            name = space.form.recurrence.layer.name
            raise UserError(f"{name} has no kernels to tune: {error.message}") from error


class _NoCompiler:
    """Compiles nothing: a preview does not get that far in its search."""

    def compiled(self, wanted: object, go_on: object) -> Any:
        """No answers."""
        return iter(())


def _nothing_measured(estimate: Estimate, best: float) -> Removed:
    return Removed(estimate.candidate, "not measured", "a preview")
