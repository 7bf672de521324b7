"""The commands that look ahead of the first call: tune finds configurations, warm compiles what will be launched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer
from rich.text import Text

from ssdgen import pipeline
from ssdgen.cli.app import app
from ssdgen.cli.options import Debug, Json, Optional, Shapes, Spec, several, shape_text, shapes_of, words
from ssdgen.cli.output import plain_table, progress, say, show, show_json, show_table
from ssdgen.diagnostics import UserError
from ssdgen.ir.build import ARCHITECTURES
from ssdgen.ir.layer import Dtype

if TYPE_CHECKING:
    from ssdgen.run.tune import Preview, Tuned
    from ssdgen.run.tune.prune import Removed
    from ssdgen.run.tune.search import Measured
    from ssdgen.run.warm import Kernel, Warmed

Jobs = Annotated[int | None, typer.Option(min=1, help="Compilers at a time; one a core by default.")]
BEST = 10
FAILED = 15
FIRST_CALL_LIMIT = 0.1
"""Seconds that the first call of a process may take more than the second once its kernels are warm."""

WARN_STEPS = ("wrong result", "hangs", "ends its process", "raised", "out of memory", "does not compile")
"""Steps whose candidates are listed with the reason: something went wrong; the others were merely judged."""


@app.command()
def tune(
    spec: Spec,
    shape: Shapes = None,
    dtype: Annotated[str, typer.Option(help="The dtype of the inputs.")] = "bf16",
    optional: Optional = None,
    fields: Annotated[
        str | None,
        typer.Option(help="Only these knobs move, by commas; latency is every latency_NAME.", metavar="KNOB,..."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1.0, help="The time for each shape; under 30 the module stays as it is emitted.")
    ] = 50.0,
    jobs: Jobs = None,
    numeric_only: Annotated[bool, typer.Option("--numeric-only", help="Keep the module as it is emitted.")] = False,
    gradients: Annotated[bool, typer.Option("--gradients", help="The kernels of the gradients instead.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the space and the pruning; needs no GPU.")] = False,
    compile: Annotated[bool, typer.Option("--compile", help="With --dry-run: compile the candidates too.")] = False,
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="FILE", help="The table to write, tuned_NAME.json beside the modules."),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Find the fastest configuration for shapes, and keep it where modules find it."""
    shapes = shapes_of(shape)
    if not shapes:
        raise UserError("--shape is missing", "for example --shape b=4,t=16384,h=8")
    (kind,) = several(dtype, get_args(Dtype), "--dtype", most=1)
    names, only = words(optional), words(fields)
    with progress(f"tune {spec}") as step:
        form, _ = pipeline.derive(spec)

        done = count(1)

        def heard(result: Measured | Removed, waiting: int) -> None:
            number = next(done)
            step(number, number + waiting, str(result.candidate))

        if dry_run:
            previews = [
                pipeline.tune_preview(form, s, kind, names, only, compile, gradients, jobs, heard) for s in shapes
            ]
        else:
            tuned = pipeline.tune(
                form, shapes, kind, names, only, seconds, jobs, not numeric_only, gradients, to, heard
            )
    if dry_run:
        _show_previews(previews, json)
    else:
        _show_tuned(tuned, json)


@app.command()
def warm(
    modules: Annotated[
        list[str],
        typer.Argument(metavar="MODULE...", help="Emitted modules: files or import names; or folders of checkpoints."),
    ],
    shape: Shapes = None,
    dtype: Annotated[str, typer.Option(help="Dtypes of the inputs, by commas.")] = "bf16",
    arch: Annotated[str | None, typer.Option(help="For this architecture instead of the GPU here.")] = None,
    also: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Beside forward and step, by commas: gradients, states, steps."),
    ] = None,
    jobs: Jobs = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Compile all that modules, or whole models, launch, so that first calls are fast."""
    from ssdgen.models.warm import is_model, model_work
    from ssdgen.run.warm import ALSO, filled

    shapes = shapes_of(shape)
    dtypes = several(dtype, get_args(Dtype), "--dtype")
    more = several(also, ALSO, "--also") if also is not None else ()
    target = several(arch, ARCHITECTURES, "--arch", most=1)[0] if arch else None
    warmed = []
    with progress("warm") as step:
        for module in modules:

            def heard(kernel: Kernel, done: int, total: int) -> None:
                step(done, total, kernel.request.kernel)

            if is_model(module):
                folder = Path(module).resolve()
                warmed.append(filled(folder, model_work(folder, shapes, dtypes, more), target, jobs, heard))
            else:
                warmed.append(pipeline.warm(module, shapes, dtypes, target, jobs, heard, more))
    slow = [w for w in warmed if (w.first_call_extra or 0.0) > FIRST_CALL_LIMIT]
    failed = [kernel for w in warmed for kernel in w.kernels if kernel.problem]
    if json:
        show_json([_warmed_json(w) for w in warmed])
    else:
        _show_warmed(warmed, failed)
    for w in slow:
        say(f"ssdgen: the first call of {w.path.name} takes {w.first_call_extra:.1f} s more than the second")
    broken = [w for w in warmed if w.problem]
    for w in broken:
        say(f"ssdgen: a call of {w.path.name} failed: {w.problem}")
    raise typer.Exit(1 if failed or slow or broken else 0)


def _show_previews(previews: list[Preview], json: bool) -> None:
    if json:
        show_json([_preview_json(p) for p in previews])
        return
    for p in previews:
        show(f"{shape_text(p.sizes)} on {p.device.name} ({p.device.arch}), {p.points:,} points")
        for kind, knobs in (("structural", p.structural), ("numeric", p.numeric)):
            for knob, values in knobs.items():
                show(f"  {kind:11}{knob:26}{' | '.join(map(str, values))}")
        show(f"the first rounds look at {p.considered} of them, {len(p.candidates)} are worth measuring")
        _show_removed(p.removed)
        table = plain_table("candidate", "launches", "us by the model")
        for e in p.candidates[:BEST]:
            table.add_row(Text(str(e.candidate)), str(len(e.launches)), f"{e.seconds * 1e6:.0f}")
        show_table(table)
        if len(p.candidates) > BEST:
            show(f"and {len(p.candidates) - BEST} more")


def _show_tuned(tuned: Iterable[Tuned], json: bool) -> None:
    if json:
        show_json([_tuned_json(t) for t in tuned])
        return
    for t in tuned:
        found = t.found
        assert found.default is not None
        ended = "the search is complete" if found.finished else "the time was over before the search was"
        show(f"{shape_text(t.sizes)} on {t.device.name}: {len(found.measured)} measured, {ended}")
        table = plain_table("us", "+-", "of default", "first call s", "candidate")
        default = found.default.timed.microseconds
        for m in sorted(found.measured, key=lambda m: m.timed.microseconds)[:BEST]:
            us = m.timed.microseconds
            cells = (f"{us:.1f}", f"{m.timed.spread:.1f}", f"{us / default:.0%}", f"{m.timed.first_call:.1f}")
            table.add_row(*cells, Text(str(m.candidate)))
        show_table(table)
        if found.heuristic is not None and found.best is not None:
            us = found.heuristic.timed.microseconds
            show(f"without a table: {us:.1f} us, {us / found.best.timed.microseconds:.0%} of the fastest")
        _show_removed(found.removed)
        show(f"wrote {len(t.entries)} {'entry' if len(t.entries) == 1 else 'entries'} to {t.path}")
        best = found.best
        if best is not None and best.candidate.structure:
            knobs = " ".join(f"--config {k}={v}" for k, v in best.candidate.structure)
            show(f"the fastest is another module than the spec's defaults give: ssdgen generate {knobs}")


def _show_removed(removed: Iterable[Removed]) -> None:
    """How many candidates fell out at each step, and of those that went wrong which and why."""
    listed = list(removed)
    for step, times in Counter(r.step for r in listed).most_common():
        show(f"  {times:4} {step}")
    wrong = [r for r in listed if r.step in WARN_STEPS]
    if wrong:
        table = plain_table("failed", "step", "why")
        for r in wrong[:FAILED]:
            table.add_row(Text(str(r.candidate)), Text(r.step, "yellow"), Text(r.why))
        show_table(table)
        if len(wrong) > FAILED:
            show(f"and {len(wrong) - FAILED} more; --json has all")


def _show_warmed(warmed: Iterable[Warmed], failed: Iterable[Kernel]) -> None:
    for w in warmed:
        show(f"{w.path} for {w.device.name} ({w.device.arch}): {w.calls} calls, {len(w.kernels)} kernels in {w.cache}")
        table = plain_table("kernel", "classes", "s", "slowest s")
        names = dict.fromkeys(k.request.kernel for k in w.kernels)
        for name in names:
            seconds = [k.seconds for k in w.kernels if k.request.kernel == name]
            table.add_row(Text(name), str(len(seconds)), f"{sum(seconds):.1f}", f"{max(seconds):.1f}")
        show_table(table)
        if w.first_call_extra is not None:
            show(f"in a fresh process the first call took {w.first_call_extra:.3f} s more than the second")
        else:
            show("not launched: whether a first call is fast is seen on the GPU itself")
    for kernel in failed:
        say(f"ssdgen: {kernel.request.kernel} does not compile: {kernel.problem}")


def _removed_json(removed: Iterable[Removed]) -> list[dict[str, str]]:
    return [{"candidate": str(r.candidate), "step": r.step, "why": r.why} for r in removed]


def _preview_json(p: Preview) -> dict[str, object]:
    candidates = [{"candidate": str(e.candidate), "model_us": e.seconds * 1e6} for e in p.candidates]
    knobs = {"structural": dict(p.structural), "numeric": dict(p.numeric)}
    head = {"sizes": dict(p.sizes), "device": p.device, "points": p.points, "considered": p.considered}
    return {**head, **knobs, "candidates": candidates, "removed": _removed_json(p.removed)}


def _tuned_json(t: Tuned) -> dict[str, object]:
    measured = [
        {"candidate": str(m.candidate), "model_us": m.estimate.seconds * 1e6, "timed": m.timed}
        for m in t.found.measured
    ]
    head = {"sizes": dict(t.sizes), "device": t.device, "table": str(t.path), "finished": t.found.finished}
    others = {"default": t.found.default, "heuristic": t.found.heuristic, "best": t.found.best}
    head |= {name: m and {"candidate": str(m.candidate), "timed": m.timed} for name, m in others.items()}
    return {**head, "entries": t.entries, "measured": measured, "removed": _removed_json(t.found.removed)}


def _warmed_json(w: Warmed) -> dict[str, object]:
    kernels = [{"kernel": k.request.kernel, "seconds": k.seconds, "problem": k.problem} for k in w.kernels]
    head = {"module": str(w.path), "device": w.device, "cache": str(w.cache), "calls": w.calls, "kernels": kernels}
    return {**head, "first_call_extra": w.first_call_extra, "problem": w.problem}
