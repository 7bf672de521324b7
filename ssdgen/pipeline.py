"""The stages in order. Each is imported when it is asked for: reading a spec loads no sympy, emitting it no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    from ssdgen.build.compile import Progress
    from ssdgen.derive import Proof
    from ssdgen.emit import ModuleSource
    from ssdgen.ir.adjoint import Adjoint
    from ssdgen.ir.build import Build
    from ssdgen.ir.chunkform import ChunkForm
    from ssdgen.ir.layer import Dtype, Layer
    from ssdgen.ir.plan import Plan
    from ssdgen.ir.report import Check, Gate, Report
    from ssdgen.plan.roofline import Roofline
    from ssdgen.run.tune import Preview, Tuned
    from ssdgen.run.tune.tune import Heard
    from ssdgen.run.warm import Also, Kernel, Warmed


def built_ins() -> tuple[str, ...]:
    """The names of the specs that come with ssdgen."""
    from ssdgen.spec import builtin_specs

    return builtin_specs()


def read(spec: str) -> Layer:
    """The layer that `spec`, a path or the name of a built-in, describes; SpecError with everything wrong with it."""
    from ssdgen.spec import load_source, read_layer

    return read_layer(load_source(spec))


def derive(spec: str) -> tuple[ChunkForm, Proof]:
    """Its chunked form and what was proved of it; SpecError if it has none, ProofError if ours is wrong."""
    from ssdgen.derive import chunk_form, prove, recurrence

    form = chunk_form(recurrence(read(spec)))
    return form, prove(form)


def adjoint(form: ChunkForm) -> tuple[Adjoint, Proof]:
    """The gradients of a chunked form and what was proved of them; ProofError if ours are wrong."""
    from ssdgen.derive import prove_adjoint
    from ssdgen.derive.adjoint import adjoint as adjoint_of

    gradients = adjoint_of(form)
    return gradients, prove_adjoint(gradients)


def plan(form: ChunkForm, settings: Mapping[str, str]) -> Plan:
    """The kernels that compute `form` and its gradients, at the point of its schedule that `settings` move to from the
    default."""
    from ssdgen.derive.adjoint import adjoint as adjoint_of
    from ssdgen.plan import plan as plan_of
    from ssdgen.plan.settings import check_used, configure

    planned = plan_of(form, configure(form, settings), adjoint_of(form))
    check_used(planned, settings)
    return planned


def roofline(planned: Plan, shape: Mapping[str, int], dtype: Dtype, optional: Sequence[str]) -> Roofline:
    """What the kernels of a plan move and multiply at a shape, cut into the segments that a call on an H200 is cut into."""
    from ssdgen.emit.support._segments import segments
    from ssdgen.plan.roofline import roofline as roofline_of

    return roofline_of(planned, shape, segments, dtype=dtype, present=optional)


def emit(planned: Plan) -> ModuleSource:
    """The module of a plan; of one without kernels, the portable form alone."""
    from ssdgen.emit import emit as emit_module

    return emit_module(planned, portable_only=bool(planned.refused))


def package(modules: Iterable[ModuleSource]) -> dict[str, str]:
    """The files of a package of modules, by name."""
    from ssdgen.emit.package import package as package_of

    return package_of(modules)


def load(module: ModuleSource) -> ModuleType:
    """The module, imported from a folder of its own."""
    from ssdgen.run.load import load as load_module

    return load_module(module.name, package([module]))


def build(
    modules: Iterable[tuple[Plan, ModuleType, str]],
    architectures: Collection[str],
    dtypes: Collection[Dtype],
    jobs: int | None = None,
    progress: Progress | None = None,
    *,
    cache: bool = True,
) -> Build:
    """Every kernel that modules, each emitted from its plan, launch for aligned inputs, compiled ahead of time.

    The string beside a module tells its kernels from those of the same spec at another point of its schedule.
    """
    from ssdgen.build.compile import build as build_all
    from ssdgen.run.launches import compile_requests

    requests = [
        request
        for planned, module, note in modules
        for request in compile_requests(planned, module, architectures, dtypes, note)
    ]
    return build_all(requests, jobs, progress, cache=cache)


def has_cuda() -> bool:
    """Whether torch has a CUDA device here."""
    from ssdgen.run.gates import has_cuda as torch_has_cuda

    return torch_has_cuda()


def verify(
    proof: Proof,
    planned: Plan,
    module: ModuleType,
    gates: Collection[Gate],
    on_check: Callable[[Check], None],
    *,
    gpu: bool,
) -> Report:
    """Whether `module`, emitted from `planned`, computes what the spec says, by every gate asked for.

    `gpu` says whether those peers that need a GPU may have it.
    """
    from ssdgen.run.gates import every_gate

    return every_gate(proof, planned, module, gates, on_check, gpu)


def tune_preview(
    form: ChunkForm,
    shape: Mapping[str, int],
    dtype: Dtype,
    optional: Sequence[str],
    only: Sequence[str],
    compiles: bool,
    gradients: bool,
    jobs: int | None,
    heard: Heard,
) -> Preview:
    """What `tune` would begin with, as far as that can be said without a GPU."""
    from ssdgen.run.tune import preview

    return preview(
        form, shape, dtype=dtype, optional=optional, only=only, compiles=compiles, gradients=gradients, jobs=jobs,
        heard=heard,
    )  # fmt: skip


def tune(
    form: ChunkForm,
    shapes: Sequence[Mapping[str, int]],
    dtype: Dtype,
    optional: Sequence[str],
    only: Sequence[str],
    seconds: float,
    jobs: int | None,
    structural: bool,
    gradients: bool,
    to: Path | None,
    heard: Heard,
) -> tuple[Tuned, ...]:
    """The fastest configurations of a form for shapes, measured on the GPU here and put into a tuning table."""
    from ssdgen.run.tune import tune as tune_all

    return tune_all(
        form,
        shapes,
        dtype=dtype,
        optional=optional,
        only=only,
        seconds=seconds,
        jobs=jobs,
        structural=structural,
        gradients=gradients,
        to=to,
        heard=heard,
    )


def warm(
    module: str,
    shapes: Sequence[Mapping[str, int]],
    dtypes: Sequence[Dtype],
    arch: str | None,
    jobs: int | None,
    heard: Callable[[Kernel, int, int], None],
    also: Collection[Also] = (),
) -> Warmed:
    """All kernels that an emitted module launches for shapes of these classes, compiled into the cache of `cuda.tile`."""
    from ssdgen.run.warm import module_path
    from ssdgen.run.warm import warm as warm_module

    return warm_module(module_path(module), shapes, dtypes, arch, jobs, heard, also)
