"""The commands that need neither torch nor the compiler: check, derive, plan, generate."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NoReturn, get_args

import typer

from ssdgen import pipeline
from ssdgen.cli.app import app
from ssdgen.cli.chosen import Left, planned
from ssdgen.cli.floors import show_floors
from ssdgen.cli.options import (
    Config,
    Debug,
    Json,
    Optional,
    Shapes,
    Spec,
    Specs,
    folder,
    settings,
    several,
    shapes_of,
    words,
)
from ssdgen.cli.output import progress, say, show, show_json
from ssdgen.cli.target import check_overwritten, check_package_name
from ssdgen.diagnostics import UserError
from ssdgen.files import differing, write_all
from ssdgen.ir.layer import Dtype
from ssdgen.plan.roofline import H200


@app.command()
def check(spec: Spec, json: Json = False, debug: Debug = False) -> None:
    """Read a spec: the layer it describes, or all its mistakes."""
    _print(pipeline.read(spec), json)


@app.command()
def derive(
    spec: Spec,
    adjoint: Annotated[bool, typer.Option("--adjoint", help="Its gradients, and the proof of those.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Derive the chunked form of a spec, and prove it."""
    form, proof = pipeline.derive(spec)
    what, derived = ("adjoint", pipeline.adjoint(form)) if adjoint else ("form", (form, proof))
    if json:
        show_json({what: derived[0], "proof": derived[1]})
    else:
        show("\n\n".join(map(str, derived)))


@app.command()
def plan(
    spec: Spec,
    config: Config = None,
    shape: Shapes = None,
    dtype: Annotated[str, typer.Option(help="With --shape: the dtype of the inputs.")] = "bf16",
    optional: Optional = None,
    gradients: Annotated[bool, typer.Option("--gradients", help="The kernels of the gradients instead.")] = False,
    bandwidth: Annotated[float, typer.Option(min=0.001, max=1e6, help="With --shape: TB/s of a copy.")] = H200.bandwidth
    / 1e12,
    tflops: Annotated[float, typer.Option(min=0.001, max=1e9, help="With --shape: TFLOP/s in bf16.")] = H200.products
    / 1e12,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Print what the kernels of a spec load, multiply and store; for a shape how much, and how long that takes at least."""
    shapes = shapes_of(shape)
    (kind,) = several(dtype, get_args(Dtype), "--dtype", most=1)
    if gradients and (shapes or json):
        other = "--shape" if shapes else "--json"
        raise UserError(f"--gradients prints kernels alone: not with {other}", "ssdgen plan SPEC --gradients")
    form, _ = pipeline.derive(spec)
    kernels = pipeline.plan(form, settings(config))
    if shapes:
        rates = replace(H200, bandwidth=bandwidth * 1e12, products=tflops * 1e12)
        show_floors([pipeline.roofline(kernels, s, kind, words(optional)) for s in shapes], kernels, rates, json)
    elif json:
        show_json(kernels)
    else:
        from ssdgen.plan.describe import describe, describe_gradients

        show(describe_gradients(kernels) if gradients else describe(kernels))


@app.command()
def generate(
    specs: Specs = None,
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="DIR", parser=folder, help="The package to write.")
    ] = Path("generated"),
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if a file is stale.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that ssdgen did not write.")] = False,
    target: Annotated[
        str | None, typer.Option(metavar="cutile,jax", help="What for: cutile, or both if no spec is named.")
    ] = None,
    config: Config = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a package of modules that needs no ssdgen."""
    every = get_args(pipeline.Target)
    targets: tuple[pipeline.Target, ...] = (
        several(target, every, "--target") if target else every[:1] if specs else every
    )
    with progress("generate") as step:
        chosen, left = planned(specs, config, step, portable="jax" in targets, kernels="cutile" in targets)
        pairs = [(plan, t) for _, plan in chosen for t in targets if t == "jax" or not plan.refused]
        modules = [pipeline.emit(plan, t) for plan, t in pairs]
    files = pipeline.package(modules)
    if check:
        _check(out, files, specs, target, left, json)
    if not force:
        check_overwritten(out, files)
    written = write_all(out, files)
    if json:
        show_json({"folder": str(out), "files": sorted(files), "written": written, "errors": left.data()})
    else:
        show("\n".join(f"{'wrote' if name in written else 'as it was'}  {out / name}" for name in sorted(files)))
    check_package_name(out)
    left.end(True, json)


def _check(
    out: Path, files: dict[str, str], specs: list[str] | None, target: str | None, left: Left, json: bool
) -> NoReturn:
    """Say which of `files` are not so in `out`, or, if all specs were asked for, which are there that none emits."""
    stale = sorted(differing(out, files))
    extra = [] if specs or target else sorted({p.name for p in out.glob("*.py")} - set(files))
    if json:
        show_json({"folder": str(out), "stale": stale, "extra": extra, "errors": left.data()})
    elif stale:
        listed = "\n".join(f"  {out / name}" for name in stale)
        command = shlex.join(
            ["ssdgen", "generate", *(specs or ()), *(["--target", target] if target else ()), "-o", str(out)]
        )
        say(f"ssdgen: not what the specs, templates and generator of today give:\n{listed}\n  hint: {command}")
    elif not extra:
        show(f"{out}: {len(files)} files are up to date")
    for name in () if json else extra:
        say(f"ssdgen: {out / name}: no spec emits it\n  hint: remove it")
    left.end(not stale and not extra, json)


def _print(stage: object, json: bool) -> None:
    if json:
        show_json(stage)
    else:
        show(str(stage))
