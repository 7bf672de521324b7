"""`ssdgen bench model`: whole models on the GPU, and beside transformers on the CPU."""

from __future__ import annotations

import json as json_text
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING, Annotated

import typer

from ssdgen.cli.bench import Out, bench, command_line
from ssdgen.cli.options import Debug, Json, several
from ssdgen.cli.output import plain_table, progress, say, show, show_table
from ssdgen.diagnostics import UserError
from ssdgen.files import make_folder, write

if TYPE_CHECKING:
    from rich.table import Table

    from ssdgen.models.bench import Figure, ModelDocument


@bench.command()
def model(
    size: Annotated[str, typer.Option(metavar="NAMES", help="130m, 370m, 780m, 1.3b, 2.7b, by commas.")] = (
        "130m,2.7b,1.3b,780m,370m"
    ),
    out: Out = None,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="transformers on the same GPU.")] = True,
    cpu: Annotated[bool, typer.Option("--cpu/--no-cpu", help="130m on the CPU, beside transformers.")] = True,
    rounds: Annotated[int, typer.Option(min=1, help="Of every measurement.")] = 5,
    seconds: Annotated[float, typer.Option(min=1, help="No part is begun after this.")] = 480.0,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Whole models of the published sizes, random weights: decoding, prefill, memory; and the CPU beside transformers."""
    from ssdgen.models.bench import ModelDocument, gpu_parts, measured, on_the_cpu
    from ssdgen.models.config import SIZES
    from ssdgen.models.place import gpu_environment

    sizes = several(size, SIZES, "--size")
    there = gpu_environment(command_line())
    if there is None and not cpu:
        raise UserError("there is no GPU here, and --no-cpu leaves nothing to measure", "leave --no-cpu out")
    notes = () if there else ("there is no GPU here: only the CPU is measured",)
    if out is not None:
        make_folder(out)

    def save(figures: tuple[Figure, ...]) -> None:
        if out is not None:
            write(out / "model.json", _json(ModelDocument(there, figures, notes)) + "\n")

    on_gpu = () if there is None else gpu_parts(sizes, rounds, peers)
    on_cpu = (("130m", "cpu", lambda: on_the_cpu(rounds=min(rounds, 3))),) if cpu else ()
    parts = chain(on_gpu, on_cpu)
    with progress("bench model") as step:
        figures = measured(parts, seconds, step, save)
    document = ModelDocument(there, figures, notes)
    if json:
        show(_json(document))
    else:
        if there is not None:
            show(f"{there.gpu}, driver {there.driver}, torch {there.torch}, cuda-tile {there.cuda_tile}, {there.date}")
            show(
                f"copies {there.bandwidth / 1e12:.2f} TB/s, multiplies bf16 at {there.matmul_flops / 1e12:.0f} TFLOP/s"
            )
        show_table(_table(document))
        for note in notes:
            show(f"note: {note}")
    failed = [f for f in figures if f.failed]
    if failed:
        say(f"ssdgen: {len(failed)} parts failed; the first: {failed[0].model} {failed[0].part}: {failed[0].note}")
        raise typer.Exit(1)


def _table(document: ModelDocument) -> Table:
    table = plain_table("model", "part", "step", "value", "p10", "p90", "unit", "why")
    for f in document.figures:
        numbers = ["-"] * 3 if f.value is None else [f"{v:.4g}" for v in (f.value.median, f.value.p10, f.value.p90)]
        table.add_row(f.model, f.part, f.name, *numbers, f.unit, f.note)
    return table


def _json(document: ModelDocument) -> str:
    return json_text.dumps(asdict(document), indent=1)
