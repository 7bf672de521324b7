"""The commands. Each asks the pipeline for one stage and prints it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ssdgen import __version__, pipeline
from ssdgen.cli.options import settings
from ssdgen.cli.output import progress, say, show, show_json
from ssdgen.cli.start import start
from ssdgen.files import differing, write_all
from ssdgen.plan.describe import describe

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 done, 1 your mistake or a check that failed, 2 a bug of ours.",
)

Spec = Annotated[str, typer.Argument(metavar="SPEC", help="A spec file, or the name of a built-in one.")]
Config = Annotated[list[str] | None, typer.Option("--config", metavar="KEY=VALUE", help="A knob of the schedule.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for a program.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the details of a bug here instead of in a file.")]


def _version(wanted: bool) -> None:
    if wanted:
        show(f"ssdgen {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def ssdgen(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """From the equations of a linear recurrence to verified GPU kernels."""
    if context.invoked_subcommand is None:
        show(context.get_help())


@app.command()
def check(spec: Spec, json: Json = False, debug: Debug = False) -> None:
    """Read a spec and print the layer it describes, or everything that is wrong with it."""
    _print(pipeline.read(spec), json)


@app.command()
def derive(spec: Spec, json: Json = False, debug: Debug = False) -> None:
    """Derive the chunked form of a spec and prove it."""
    form, proof = pipeline.derive(spec)
    if json:
        show_json({"form": form, "proof": proof})
    else:
        show(f"{form}\n\n{proof}")


@app.command()
def plan(spec: Spec, config: Config = None, json: Json = False, debug: Debug = False) -> None:
    """Print the kernels that compute a spec: what each loads, multiplies and stores."""
    planned = pipeline.plan(spec, settings(config))
    if json:
        show_json(planned)
    else:
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
    """Write the modules of specs as a package that imports without ssdgen."""
    files: dict[str, str] = {}
    with progress("generate") as step:
        chosen = specs or pipeline.built_ins()
        for i, spec in enumerate(chosen):
            step(i, len(chosen), spec)
            files |= pipeline.emit(spec, settings(config)).files
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


@app.command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The layer's name; the file is NAME.ssd.")],
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it exists.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a commented spec to start from; it verifies as it is."""
    path = start(name, Path(), force)
    if json:
        show_json({"file": str(path)})
    else:
        show(f"wrote {path}; next: ssdgen verify {path}")


def _print(stage: object, json: bool) -> None:
    if json:
        show_json(stage)
    else:
        show(str(stage))
