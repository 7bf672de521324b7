"""The command itself; commands register with it."""

from __future__ import annotations

from typing import Annotated

import typer

from ssdgen import __version__
from ssdgen.cli.output import show

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 done, 1 your mistake or a check that failed, 2 a bug of ours.",
)


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
