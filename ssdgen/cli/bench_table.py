"""The results of `ssdgen bench` as tables."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from ssdgen.run.bench.rows import Document, Ratio, Row, Spread, TrainingStep

NONE = "-"
WIDTH = 190
"""No cell of a table is cut at this width."""


def tables(document: Document) -> Iterator[Table | str]:
    """What a person reads: lines of text and tables, in order."""
    e = document.environment
    yield (
        f"{e.gpu}, driver {e.driver}, CUDA {e.cuda}, torch {e.torch}, cuda-tile {e.cuda_tile}, Triton {e.triton}, {e.date}\n"
        f"copies {e.bandwidth / 1e12:.2f} TB/s, multiplies bf16 at {e.matmul_flops / 1e12:.0f} TFLOP/s; {document.flushing}"
    )
    if document.rows:
        yield _rows(document)
    if document.steps:
        yield _steps(document)
    if document.ratios:
        yield _ratios(document)
    for mean in document.means:
        yield (
            f"{mean.axis + ': ' if mean.axis else ''}ours is {mean.mean:.2f} times as fast as {mean.peer} "
            f"(geometric mean of {mean.count} of {mean.shapes} shapes), "
            f"{mean.smallest:.2f} at least ({mean.smallest_shape})"
        )
    if document.scale:
        yield _scale(document)
    if document.techniques:
        yield _techniques(document)
    for bend in document.bends:
        yield f"bend along {bend.axis} at {bend.shape}: {bend.why}"
    for note in document.notes:
        yield f"note: {note}"


def as_text(parts: Iterable[Table | str]) -> str:
    """Lines and tables as text that no terminal is needed for, a blank line around each table."""
    console = Console(file=io.StringIO(), width=WIDTH, highlight=False, color_system=None)
    for part in parts:
        if isinstance(part, Table):
            console.print("", part, "", sep="\n")
        else:
            console.print(part, soft_wrap=True, markup=False)
    text = console.file.getvalue() if isinstance(console.file, io.StringIO) else ""
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def _table(*columns: str, words: int, caption: str = "") -> Table:
    """The first `words` columns are text, the rest numbers."""
    table = Table(box=None, pad_edge=False, caption=caption or None, caption_justify="left", caption_style="dim")
    for i, name in enumerate(columns):
        left = i < words or "note" in name or name == "errors"
        table.add_column(name, justify="left" if left else "right", no_wrap="note" not in name, overflow="fold")
    return table


def _rows(document: Document) -> Table:
    caption = (
        "us: median under CUDA graphs with p10..p90; eager: a call among many; host: until a call returns; floor: the time of "
        "the compulsory traffic over ours; roof: the same of the plan's floor; extra: peak memory of a call over "
        "inputs and outputs; errors: y and final state, relative norms against float64"
    )
    head = (
        "shape",
        "",
        "us",
        "p10..p90",
        "eager",
        "host",
        "TB/s",
        "TFLOP/s",
        "floor",
        "roof",
        "extra",
        "errors",
        "note",
    )
    table = _table(*head, words=2, caption=caption)
    before = ""
    for row in document.rows:
        place = f"{row.axis + ' ' if row.axis else ''}{row.shape}"
        table.add_row(*_row("" if place == before else place, row))
        before = place
    return table


def _row(place: str, row: Row) -> list[Text]:
    style = "" if row.right else "red"
    cells = [
        place,
        f"{row.family} {row.name}",
        _us(row.graph_us),
        f"{row.graph_us.p10:.1f}..{row.graph_us.p90:.1f}" if row.graph_us else NONE,
        _number(row.eager_us, "{:.0f}"),
        _number(row.host_us, "{:.0f}"),
        _number(row.bandwidth, "{:.2f}", 1e12),
        _number(row.flops, "{:.0f}", 1e12),
        _number(row.of_compulsory, "{:.0%}"),
        _number(row.of_roofline, "{:.0%}"),
        _number(row.extra_share, "{:.0%}"),
        f"{_number(row.error, '{:.1e}')} {_number(row.state_error, '{:.1e}')}",
        row.note,
    ]
    return [Text(cell, style) for cell in cells]


def _steps(document: Document) -> Table:
    caption = (
        "step: forward, loss, backward and AdamW, median with p10..p90; scan: one layer's, forward and backward, by itself; "
        "share: of a step that the scans of all layers take; peak: of memory in a step, parameters and optimizer included; "
        "stored: by one scan for its backward pass, beyond its inputs and y; loss, off: of the first step, and how far its "
        "gradients are from ours"
    )
    head = ("model", "", "step ms", "p10..p90", "tokens/s", "scan us", "share", "peak GB", "stored MB", "loss", "off")
    table = _table(*head, "note", words=2, caption=caption)
    for i, step in enumerate(document.steps):
        place = f"{step.layers} layers of {step.width}, scans of {step.shape}"
        table.add_row("" if i else place, *_step(step))
    return table


def _step(step: TrainingStep) -> list[Text]:
    us = step.step_us
    batch, tokens = map(int, step.shape.split(",")[:2])
    cells = [
        f"{step.family} {step.name}",
        f"{us.median / 1e3:.1f}" if us else NONE,
        f"{us.p10 / 1e3:.1f}..{us.p90 / 1e3:.1f}" if us else NONE,
        f"{1e6 * batch * tokens / us.median:,.0f}" if us else NONE,
        _us(step.scan_us),
        _number(step.share, "{:.0%}"),
        _number(step.peak_bytes, "{:.2f}", 1e9),
        _number(step.stored_bytes, "{:.1f}", 1e6),
        _number(step.loss, "{:.4f}"),
        _number(step.difference, "{:.1e}"),
        step.note,
    ]
    return [Text(cell) for cell in cells]


def _ratios(document: Document) -> Table:
    peers = list(dict.fromkeys(ratio.peer for ratio in document.ratios))
    caption = (
        "how many times as fast ours is as the better of the peer's; - where a ratio does not count: a peer or ours has no "
        "time, or our error is over 1.25 times the peer's"
    )
    table = _table("shape", *(f"{peer} / ours" for peer in peers), words=1, caption=caption)
    places: dict[str, dict[str, Ratio]] = {}
    for ratio in document.ratios:
        place = f"{ratio.axis + ' ' if ratio.axis else ''}{ratio.shape}"
        places.setdefault(place, {})[ratio.peer] = ratio
    for place, by_peer in places.items():
        cells = [f"{r.ratio:.2f} ({r.peer_name})" if (r := by_peer.get(p)) and r.ratio else NONE for p in peers]
        table.add_row(place, *cells)
    return table


def _scale(document: Document) -> Table:
    table = _table("shape", "for scale", "ms", "note", words=2)
    for row in document.scale:
        table.add_row(f"{row.axis + ' ' if row.axis else ''}{row.shape}", row.name, f"{row.us / 1000:.3f}", row.note)
    return table


def _techniques(document: Document) -> Table:
    caption = (
        "worth: time over the best configuration's; conflicts: shared-memory bank conflicts of a call, all kernels"
    )
    head = ("shape", "taken away", "us", "p10..p90", "worth", "conflicts", "error", "settings, note")
    table = _table(*head, words=2, caption=caption)
    before = ""
    for t in document.techniques:
        spread = f"{t.graph_us.p10:.1f}..{t.graph_us.p90:.1f}" if t.graph_us else NONE
        conflicts = NONE if t.conflicts is None else f"{t.conflicts:,}"
        worth, error = _number(t.worth, "{:.2f}"), _number(t.error, "{:.1e}")
        place = "" if t.shape == before else t.shape
        table.add_row(place, t.technique, _us(t.graph_us), spread, worth, conflicts, error, t.note or t.settings)
        before = t.shape
    return table


def _us(spread: Spread | None) -> str:
    return f"{spread.median:.1f}" if spread else NONE


def _number(value: float | None, form: str, unit: float = 1.0) -> str:
    return NONE if value is None else form.format(value / unit)
