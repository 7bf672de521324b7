"""The commands that need torch or the compiler: build and verify."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from ssdgen import pipeline
from ssdgen.cli.app import app
from ssdgen.cli.options import Config, Debug, Json, Spec, settings, several, without_kernels
from ssdgen.cli.output import REPORT_STYLES, progress, say, show, show_json, show_table
from ssdgen.diagnostics import UserError
from ssdgen.files import make_folder
from ssdgen.ir.build import ARCHITECTURES, DEFAULT_ARCHITECTURES
from ssdgen.ir.layer import Dtype
from ssdgen.ir.report import Gate, to_json

if TYPE_CHECKING:
    from types import ModuleType

    from ssdgen.derive import Proof
    from ssdgen.ir.build import Build
    from ssdgen.ir.plan import Plan

GATES: tuple[Gate, ...] = get_args(Gate)
CPU_GATES: tuple[Gate, ...] = ("proof", "portable", "emulation", "peer")
CUDA_GATES: tuple[Gate, ...] = ("proof", "portable", "hardware", "peer")


@app.command()
def build(
    spec: Spec,
    arch: Annotated[str, typer.Option(help="Architectures, by commas.")] = ",".join(DEFAULT_ARCHITECTURES),
    dtype: Annotated[str, typer.Option(help="Dtypes of the inputs, by commas.")] = "bf16,f32",
    jobs: Annotated[int | None, typer.Option(min=1, help="Compilers at a time; one a core by default.")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="DIR", help="Write the cubins there.")] = None,
    config: Config = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Compile ahead of time, without a GPU; what kernels use."""
    architectures = several(arch, ARCHITECTURES, "--arch")
    dtypes = several(dtype, get_args(Dtype), "--dtype")
    planned, module = _emitted(spec, config)[1:]
    if planned.refused:
        raise without_kernels(spec, planned)
    if out is not None:
        make_folder(out)
    with progress("build") as step:
        built = pipeline.build(
            planned,
            module,
            architectures,
            dtypes,
            jobs,
            lambda result, done, total: step(done, total, str(result.request)),
        )
    if out is not None:
        _write(built, out)
    _print(built, json)
    raise typer.Exit(1 if built.failures else 0)


@app.command()
def verify(
    spec: Spec,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda where there is a GPU.")] = "auto",
    gate: Annotated[str | None, typer.Option(help="Gates, by commas; those that the device has by default.")] = None,
    config: Config = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Check a spec by every gate that this machine has."""
    gates = _gates(device, gate)
    proof, planned, module = _emitted(spec, config)
    with progress("verify") as step:
        done = count(1)
        report = pipeline.verify(proof, planned, module, gates, lambda check: step(next(done), None, check.name))
    if json:
        show_json(to_json(report))
    else:
        show(str(report), REPORT_STYLES)
    raise typer.Exit(0 if report.passed else 1)


def _emitted(spec: str, config: list[str] | None) -> tuple[Proof, Plan, ModuleType]:
    form, proof = pipeline.derive(spec)
    planned = pipeline.plan(form, settings(config))
    return proof, planned, pipeline.load(pipeline.emit(planned))


def _gates(device: str, gate: str | None) -> tuple[Gate, ...]:
    """The gates asked for, in their order; without a wish those that `device` has. UserError for what is not there."""
    (place,) = several(device, ("auto", "cpu", "cuda"), "--device", most=1)
    wanted = several(gate, GATES, "--gate") if gate is not None else ()
    has_cuda = pipeline.has_cuda() if place != "cpu" else False
    if place == "cuda" and not has_cuda:
        raise UserError(
            "there is no CUDA device here that torch can use", "--device cpu runs the kernels in the emulator"
        )
    return tuple(g for g in GATES if g in (wanted or (CUDA_GATES if has_cuda else CPU_GATES)))


def _write(built: Build, folder: Path) -> None:
    from ssdgen.build.store import write_cubins

    try:
        write_cubins(built, folder)
    except OSError as error:
        raise UserError(
            f"cannot write into {folder}: {error.strerror}", "choose a folder that you may write to"
        ) from error


def _print(built: Build, json: bool) -> None:
    from ssdgen.build.table import resource_table
    from ssdgen.build.table import to_json as build_json

    if json:
        show_json(build_json(built))
        return
    show_table(resource_table(built))
    for text in (*map(str, built.failures), *built.notes):
        say(text)
