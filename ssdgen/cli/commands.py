"""The commands that need neither torch nor the compiler: check, derive, plan, generate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ssdgen import pipeline
from ssdgen.cli.app import app
from ssdgen.cli.options import Config, Debug, Json, Spec, settings
from ssdgen.cli.output import progress, say, show, show_json
from ssdgen.diagnostics import UserError
from ssdgen.files import differing, write_all


@app.command()
def check(spec: Spec, json: Json = False, debug: Debug = False) -> None:
    """Read a spec: the layer it describes, or all its mistakes."""
    _print(pipeline.read(spec), json)


@app.command()
def derive(spec: Spec, json: Json = False, debug: Debug = False) -> None:
    """Derive the chunked form of a spec, and prove it."""
    form, proof = pipeline.derive(spec)
    if json:
        show_json({"form": form, "proof": proof})
    else:
        show(f"{form}\n\n{proof}")


@app.command()
def plan(spec: Spec, config: Config = None, json: Json = False, debug: Debug = False) -> None:
    """Print what the kernels of a spec load, multiply and store."""
    form, _ = pipeline.derive(spec)
    planned = pipeline.plan(form, settings(config))
    if json:
        show_json(planned)
    else:
        from ssdgen.plan.describe import describe

        show(describe(planned))


@app.command()
def generate(
    specs: Annotated[list[str] | None, typer.Argument(metavar="[SPECS]...", help="All built-in ones if none.")] = None,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="The package to write.")] = Path("generated"),
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if a file is stale.")] = False,
    config: Config = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a package of modules that needs no ssdgen."""
    knobs = settings(config)
    modules = []
    chosen = specs or pipeline.built_ins()
    with progress("generate") as step:
        for i, spec in enumerate(chosen):
            step(i, len(chosen), spec)
            form, _ = pipeline.derive(spec)
            planned = pipeline.plan(form, knobs)
            if not planned.refused:
                modules.append(pipeline.emit(planned))
            elif specs:
                raise UserError(f"{spec} has no kernels yet: {planned.refused}", f"ssdgen verify {spec}")
    files = pipeline.package(modules)
    if check:
        stale = differing(out, files)
        if json:
            show_json({"folder": str(out), "stale": stale})
        elif stale:
            listed = "\n".join(f"  {out / name}" for name in stale)
            say(f"ssdgen: stale, its spec, template or generator has changed:\n{listed}\n  hint: ssdgen generate")
        else:
            show(f"{out}: {len(files)} files are up to date")
        raise typer.Exit(1 if stale else 0)
    written = write_all(out, files)
    if json:
        show_json({"folder": str(out), "files": sorted(files), "written": written})
    else:
        show("\n".join(f"{'wrote' if name in written else 'as it was'}  {out / name}" for name in sorted(files)))


def _print(stage: object, json: bool) -> None:
    if json:
        show_json(stage)
    else:
        show(str(stage))
