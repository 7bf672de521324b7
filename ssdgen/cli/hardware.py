"""The commands that need torch or the compiler: build and verify."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from ssdgen import pipeline
from ssdgen.cli.app import app
from ssdgen.cli.chosen import Left, planned
from ssdgen.cli.options import Config, Debug, Json, Specs, folder, several
from ssdgen.cli.output import REPORT_STYLES, OutputClosed, OutputFailed, progress, say, show, show_json, show_table
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
    from ssdgen.ir.report import Report

Against = Annotated[
    list[str] | None,
    typer.Option(
        "--against", metavar="KEY=VALUE", help="Compile with this knob too, to compare: --against swap=carried,intra."
    ),
]
GATES: tuple[Gate, ...] = get_args(Gate)
CPU_GATES: tuple[Gate, ...] = ("proof", "portable", "emulation", "peer")
CUDA_GATES: tuple[Gate, ...] = ("proof", "portable", "hardware", "peer")


@app.command()
def build(
    specs: Specs = None,
    arch: Annotated[str, typer.Option(help="Architectures, by commas.")] = ",".join(DEFAULT_ARCHITECTURES),
    dtype: Annotated[str, typer.Option(help="Dtypes of the inputs, by commas.")] = "bf16,f32",
    jobs: Annotated[int | None, typer.Option(min=1, help="Compilers at a time; one a core by default.")] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="DIR", parser=folder, help="Write the cubins there.")
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Compile all of it, and keep nothing.")] = False,
    config: Config = None,
    against: Against = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Compile ahead of time, without a GPU; what kernels use."""
    architectures = several(arch, ARCHITECTURES, "--arch")
    dtypes = several(dtype, get_args(Dtype), "--dtype")
    with progress("build") as step:
        chosen, left = planned(specs, config, step)
        modules = [(plan, _loaded(plan), "") for _, plan in chosen]
        _check_dtypes([plan for plan, _, _ in modules], dtypes)
        if against:
            other, _ = planned(specs, config, step, against=against)
            if [plan.config for _, plan in other] == [plan.config for _, plan in chosen]:
                raise UserError(
                    f"--against {' '.join(against)} is the point that is built anyway", "name a knob with another value"
                )
            modules += [(plan, _loaded(plan), " ".join(against)) for _, plan in other]
        if out is not None:
            make_folder(out)
        built = pipeline.build(
            modules,
            architectures,
            dtypes,
            jobs,
            lambda result, done, total: step(done, total, str(result.request)),
            cache=not no_cache,
        )
    if out is not None:
        from ssdgen.build.store import write_cubins

        write_cubins(built, out)
    _print(built, left, json)
    left.end(not built.failures, json)


@app.command()
def verify(
    specs: Specs = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda where there is a GPU.")] = "auto",
    gate: Annotated[str | None, typer.Option(help="Gates, by commas; those that the device has by default.")] = None,
    config: Config = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Check specs by every gate that this machine has."""
    gates, gpu = _gates(device, gate)
    with progress("verify") as step:
        subjects, left = planned(specs, config, step, verifying=True)
    reports: list[Report] = []
    for proof, plan in subjects:
        try:
            report = _verified(proof, plan, gates, gpu)
        except (OutputClosed, OutputFailed):
            raise
        except Exception as error:  # told at the end, when the others have been verified
            left.add(proof.layer, error)
            continue
        reports.append(report)
        if not json:
            show(("\n" if len(reports) > 1 else "") + str(report), REPORT_STYLES)
        if not report.checks:
            say(f"ssdgen: nothing was checked of {report.spec}: it has no {' or '.join(gates)} check")
    passed = all(report.passed for report in reports) and not left.mistakes and not left.bugs
    if json:
        show_json({"passed": passed, "reports": [to_json(report) for report in reports], "errors": left.data()})
    left.end(passed, json)


def _verified(proof: Proof, plan: Plan, gates: tuple[Gate, ...], gpu: bool) -> Report:
    with progress(f"verify {proof.layer}") as step:
        done = count(1)
        return pipeline.verify(
            proof, plan, _loaded(plan), gates, lambda check: step(next(done), None, check.name), gpu=gpu
        )


def _check_dtypes(plans: list[Plan], dtypes: tuple[Dtype, ...]) -> None:
    """UserError for a layer that takes none of `dtypes`: nothing of it would be compiled."""
    from ssdgen.run.inputs import takes

    for layer in (plan.form.recurrence.layer for plan in plans):
        if not any(takes(layer, dtype) for dtype in dtypes):
            taken = ",".join(dtype for dtype in get_args(Dtype) if takes(layer, dtype))
            raise UserError(f"{layer.name} takes no {' or '.join(dtypes)}", f"--dtype {taken}")


def _loaded(plan: Plan) -> ModuleType:
    return pipeline.load(pipeline.emit(plan))


def _gates(device: str, gate: str | None) -> tuple[tuple[Gate, ...], bool]:
    """The gates asked for, in their order, without a wish those that `device` has; whether peers may run on a GPU.

    UserError for what is not there.
    """
    (place,) = several(device, ("auto", "cpu", "cuda"), "--device", most=1)
    wanted = several(gate, GATES, "--gate") if gate is not None else ()
    has_cuda = pipeline.has_cuda() if place != "cpu" else False
    if place == "cuda" and not has_cuda:
        raise UserError(
            "there is no CUDA device here that torch can use", "--device cpu runs the kernels in the emulator"
        )
    return tuple(g for g in GATES if g in (wanted or (CUDA_GATES if has_cuda else CPU_GATES))), has_cuda


def _print(built: Build, left: Left, json: bool) -> None:
    from ssdgen.build.table import resource_table
    from ssdgen.build.table import to_json as build_json

    if json:
        show_json(build_json(built) | {"errors": left.data()})
        return
    show_table(resource_table(built))
    for text in (*map(str, built.failures), *built.notes):
        say(text)
