"""The pictures of a document: needs matplotlib, and nothing of what measured it.

Colours are those of Okabe and Ito, which people with any colour vision tell apart; lines carry their names, and markers
differ too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssdgen.diagnostics import UserError
from ssdgen.run.bench.curves import (
    Curve,
    at_shapes,
    fastest,
    floor_curve,
    length,
    ratio_curves,
    time_curves,
    usual_shape,
)
from ssdgen.run.bench.rows import ATTENTION, LOOP, OURS, Document

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TRITON = "mamba_ssm"
LOOKS: dict[str, tuple[str, str, str]] = {
    OURS: ("ours", "#0072B2", "o"),
    "TileGym": ("TileGym, cuTile", "#D55E00", "s"),
    TRITON: ("mamba_ssm, Triton", "#009E73", "^"),
    "fla": ("fla simple_gla, Triton", "#CC79A7", "D"),
    "FlashInfer": ("FlashInfer, CUDA", "#56B4E9", "X"),
    LOOP: ("token loop", "#666666", "v"),
    ATTENTION: ("attention", "#B8860B", "P"),
}
"""Name, colour and marker of each line."""
GREY = "#666666"
AXIS_NAMES = {
    "t": "sequence length (tokens)",
    "n": "state size (channels)",
    "h": "heads",
    "b": "batch (sequences)",
}
DPI = 160


def pictures(document: Document, out: Path, name: str = "") -> list[Path]:
    """Draw all that `document` has something for, into the folder `out`, by the `name` of what is drawn, its study if none;
    the files. UserError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("drawing needs matplotlib, which is not installed", "pip install 'ssdgen[bench]'") from error
    matplotlib.use("Agg")
    drawings: dict[str, Callable[[Document], Figure | None]] = {
        "ratios": ratios_by_shape,
        "ratio_to_triton": ratio_to_triton,
        "time_per_token": time_per_token,
        "memory": memory,
        "growth": growth,
        "ablation": ablation,
    }
    if document.study == "decode":  # whose shapes are one token with a state of some dtype
        drawings = {"bandwidth": bandwidth}
    written = []
    with matplotlib.rc_context(STYLE):
        for what, draw in drawings.items():
            figure = draw(document)
            if figure is not None:
                path = out / f"{name or document.study}_{what}.png"
                figure.savefig(path, dpi=DPI, bbox_inches="tight")
                written.append(path)
    return written


STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "legend.frameon": False,
}


def ratios_by_shape(document: Document) -> Figure | None:
    """How many times as fast as each peer ours is, a line a shape."""
    counted = [r for r in document.ratios if r.ratio is not None]
    if document.study != "forward" or not counted:
        return None
    shapes = list(dict.fromkeys(r.shape for r in document.ratios))
    figure, ax = _figure(7.2, 0.42 * len(shapes) + 1.3)
    peers = list(dict.fromkeys(r.peer for r in counted))
    for peer, shift in zip(peers, _shifts(len(peers)), strict=True):
        label, colour, marker = LOOKS[peer]
        points = [(r.ratio, shapes.index(r.shape) + shift) for r in counted if r.peer == peer]
        ax.plot(*zip(*points, strict=True), marker, color=colour, markersize=7, label=f"{label} / ours")
    _log(ax, "x", "{:g}x", [r.ratio for r in counted if r.ratio] + [1.0])
    ax.axvline(1, color=GREY, linewidth=1)
    ax.set_xlabel("time of the peer over ours (log scale; above 1 ours is faster)")
    _line_a_shape(ax, shapes, columns=3)
    _source(figure, document)
    return figure


def ratio_to_triton(document: Document) -> Figure | None:
    """The published claim: how many times as fast as Triton, against sequence length and against state size."""
    panels = [(axis, ratio_curves(document, axis, TRITON)) for axis in "tn"]
    panels = [(axis, curves) for axis, curves in panels if curves]
    if not panels:
        return None
    figure, axes = _figures(1, len(panels), 4.3 * len(panels), 3.3, sharey=True)
    every = [y for _, curves in panels for curve in curves for _, y in curve.points]
    for ax, (axis, curves) in zip(axes, panels, strict=True):
        lengths = sorted({x for curve in curves for x, _ in curve.points})
        _lines(ax, [*curves, Curve(TRITON, tuple((x, 1.0) for x in lengths))])
        _lengths(ax, axis, lengths)
        ax.set_ylim(0, 1.15 * max(1.0, *every))
    axes[0].set_ylabel("times as fast as mamba_ssm (Triton)")
    _source(figure, document)
    return figure


def time_per_token(document: Document) -> Figure | None:
    """Nanoseconds a token against the sequence length, with a loop over tokens and attention for scale."""
    curves = time_curves(document, "t", scale=True)
    if not curves:
        return None
    figure, ax = _figure(6.2, 4.2)
    _lines(ax, curves)
    _lengths(ax, "t", [x for curve in curves for x, _ in curve.points])
    _log(ax, "y", "{:g}", [y for curve in curves for _, y in curve.points])
    ax.set_ylabel("time a token (ns, log scale)")
    _source(figure, document)
    return figure


def memory(document: Document) -> Figure | None:
    """Peak memory of a call beyond its inputs and outputs, over these, a line a shape."""
    if document.study != "forward":
        return None
    rows = {shape: fastest(found) for shape, found in at_shapes(document.rows).items()}
    shares = [(s, f, r.extra_share) for s, found in rows.items() for f, r in found.items() if r.extra_share is not None]
    if not shares:
        return None
    shapes = list(dict.fromkeys(shape for shape, _, _ in shares))
    figure, ax = _figure(7.2, 0.42 * len(shapes) + 1.3)
    families = list(dict.fromkeys(f for _, f, _ in shares))
    for family, shift in zip(families, _shifts(len(families)), strict=True):
        label, colour, marker = LOOKS[family]
        points = [(100 * share, shapes.index(shape) + shift) for shape, f, share in shares if f == family]
        ax.plot(*zip(*points, strict=True), marker, color=colour, markersize=7, label=label)
    ax.set_xlim(0, 1.06 * max(100 * share for _, _, share in shares))
    ax.set_xlabel("peak extra memory of a call (% of inputs and outputs)")
    _line_a_shape(ax, shapes, columns=4)
    _source(figure, document)
    return figure


def bandwidth(document: Document) -> Figure | None:
    """The bandwidth of one-token steps, a line a shape and dtype of the state, beside that of a copy."""
    timed = [r for r in document.rows if r.bandwidth is not None]
    if not timed:
        return None
    shapes = list(dict.fromkeys(r.shape for r in timed))
    figure, ax = _figure(7.2, 0.34 * len(shapes) + 1.3)
    for family in dict.fromkeys(r.family for r in timed):
        label, colour, marker = LOOKS[family]
        points = [(r.bandwidth / 1e12, shapes.index(r.shape)) for r in timed if r.family == family and r.bandwidth]
        ax.plot(*zip(*points, strict=True), marker, color=colour, markersize=7, label=label)
    ax.axvline(document.environment.bandwidth / 1e12, color=GREY, linewidth=1, label="a copy")
    ax.set_xlim(0, 1.06 * max(document.environment.bandwidth, *(r.bandwidth or 0 for r in timed)) / 1e12)
    ax.set_xlabel("TB/s: the state read and written once, inputs and outputs")
    _line_a_shape(ax, shapes, columns=4)
    _source(figure, document)
    return figure


def growth(document: Document) -> Figure | None:
    """Nanoseconds a token along each axis, with the time of the compulsory traffic, and the bends ringed."""
    if document.study != "growth":
        return None
    panels = [(axis, [c for c in time_curves(document, axis, scale=False) if c.name == OURS]) for axis in "tnhb"]
    panels = [(axis, curves) for axis, curves in panels if curves]
    if not panels:
        return None
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = _figures(lines, columns, 4.3 * columns, 3.0 * lines, sharey=False)
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    for ax, (axis, curves) in zip(axes, panels, strict=False):
        floor = floor_curve(document, axis)
        ax.plot(*zip(*floor.points, strict=True), "--", color=GREY, linewidth=1)
        _end_labels(ax, [Curve(OURS, curves[0].points), floor])
        _lines(ax, curves, labels=False)
        _lengths(ax, axis, [x for x, _ in curves[0].points])
        _log(ax, "y", "{:g}", [y for c in (*curves, floor) for _, y in c.points])
        values = dict(curves[0].points)
        for bend in document.bends:
            x = length(bend.shape, axis)
            if bend.axis == axis and x in values:
                ax.plot([x], [values[x]], "o", markersize=13, markerfacecolor="none", markeredgecolor="black")
                rising = values[max(values)] > values[min(values)]
                ax.annotate(
                    f"slope {bend.before:+.1f} to {bend.after:+.1f}", (x, values[x]), ha="right" if rising else "left",
                    xytext=(-9 if rising else 9, 7), textcoords="offset points", fontsize=8,
                )  # fmt: skip
        ax.set_ylabel("time a token (ns, log scale)")
    base = usual_shape(document)
    figure.suptitle(
        f"One axis at a time, the rest as at batch {base.b}, {base.t} tokens, {base.h} heads, {base.p} channels, state "
        f"{base.n}.\nRing: a bend, with the slope of log(time) over log(length) on either side.",
        fontsize=9, x=0.01, ha="left",
    )  # fmt: skip
    _source(figure, document)
    return figure


def ablation(document: Document) -> Figure | None:
    """What taking a technique away does to the time, a panel a shape."""
    timed = [t for t in document.techniques if t.worth is not None and t.technique != "best"]
    if not timed:
        return None
    shapes = list(dict.fromkeys(t.shape for t in timed))
    names = list(dict.fromkeys(t.technique for t in document.techniques if t.technique != "best"))
    figure, axes = _figures(1, len(shapes), 2.2 + 2.3 * len(shapes), 0.36 * len(names) + 1.3, sharey=True)
    changes = [100 * (t.worth - 1) for t in timed if t.worth is not None]
    low, high = min(0.0, *changes), max(0.0, *changes)
    room = 0.28 * (high - low or 1)
    for ax, shape in zip(axes, shapes, strict=True):
        found = {t.technique: 100 * (t.worth - 1) for t in timed if t.shape == shape and t.worth is not None}
        for i, name in enumerate(names):
            change = found.get(name)
            if change is None:
                ax.annotate("not available", (0, i), xytext=(4, -3), textcoords="offset points", color=GREY, fontsize=8)
                continue
            ax.barh(i, change, height=0.6, color=LOOKS[OURS][1] if change >= 0 else LOOKS["TileGym"][1])
            ax.annotate(
                f"{change:+.0f} %", (change, i), xytext=(4 if change >= 0 else -4, -3), textcoords="offset points",
                ha="left" if change >= 0 else "right", fontsize=8,
            )  # fmt: skip
        ax.axvline(0, color="black", linewidth=0.8)
        ax.set_xlim(low - (room if low < 0 else 0), high + room)
        ax.set_title(shape, fontsize=9)
        ax.grid(axis="y", visible=False)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].set_ylim(len(names) - 0.5, -0.5)
    axes[len(axes) // 2].set_xlabel("time added (% of the best configuration's)")
    _source(figure, document)
    return figure


def _shifts(count: int) -> list[float]:
    """How far the markers of one line are set apart, so that equal values show."""
    return [0.1 * (i - (count - 1) / 2) for i in range(count)]


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure, axes = _figures(1, 1, width, height, sharey=False)
    return figure, axes[0]


def _figures(lines: int, columns: int, width: float, height: float, *, sharey: bool) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure as Made

    figure = Made(figsize=(width, height), layout="constrained")
    grid: Any = figure.subplots(lines, columns, sharey=sharey, squeeze=False)
    return figure, list(grid.flat)


def _line_a_shape(ax: Axes, shapes: Sequence[str], columns: int) -> None:
    """Name the lines of a picture that has one for each shape, the first at the top; a legend above it."""
    ax.set_yticks(range(len(shapes)), shapes)
    ax.set_ylim(len(shapes) - 0.5, -0.5)
    ax.set_ylabel("batch, tokens, heads,\ngroups, channels, state")
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=columns, handletextpad=0.2, columnspacing=1.5)


def _lines(ax: Axes, curves: Sequence[Curve], *, labels: bool = True) -> None:
    """Each curve with its marker, and its name at its right end."""
    for curve in curves:
        _, colour, marker = LOOKS[curve.name]
        ax.plot(*zip(*curve.points, strict=True), color=colour, marker=marker, markersize=5, linewidth=1.6)
    if labels:
        _end_labels(ax, curves)


def _end_labels(ax: Axes, curves: Sequence[Curve]) -> None:
    """The names at the right ends, moved apart when all is laid out."""
    for curve in curves:
        name, colour, _ = LOOKS.get(curve.name, (curve.name, GREY, ""))
        text = ax.annotate(
            name, curve.points[-1], xytext=(8, 0), textcoords="offset points", va="center", color=colour, fontsize=8
        )
        text.set_gid("end label")


def _lengths(ax: Axes, axis: str, lengths: Sequence[int]) -> None:
    """A log2 axis with a tick at each length, and room for labels at its right."""
    ticks = sorted(set(lengths))
    ax.set_xscale("log", base=2)
    shown = ticks if len(ticks) <= 6 else ticks[::2] if len(ticks) <= 12 else ticks[::3]
    ax.set_xticks(shown, [f"{x // 1024}K" if x >= 1024 and x % 1024 == 0 else str(x) for x in shown])
    ax.minorticks_off()
    ax.set_xlabel(f"{AXIS_NAMES[axis]}, log scale")


def _log(ax: Axes, which: str, form: str, values: Sequence[float]) -> None:
    """A log axis with plain numbers at 1, 2 and 5 of each decade (at few decades), with room around the values."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = min(values), max(values)
    axis: Any = ax.xaxis if which == "x" else ax.yaxis
    room = (high / low) ** 0.06
    limits = (low / room, high * room)
    if which == "x":
        ax.set_xscale("log")
        ax.set_xlim(limits)
    else:
        ax.set_yscale("log")
        ax.set_ylim(limits)
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 300 else (1,)))
    if high / low < 8:
        axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: form.format(value)))


def _source(figure: Figure, document: Document) -> None:
    """Where it was measured, and labels moved apart now that all limits are known."""
    e = document.environment
    how = "bf16 inputs, medians under CUDA graphs, none of a call's inputs in the L2 cache"
    figure.supxlabel(f"{e.gpu}, {e.date}; {how}", fontsize=7, color=GREY, x=0.01, ha="left")
    _separate(figure)


GAP = 11.0
"""Points between the names of two lines."""


def _separate(figure: Figure) -> None:
    """Move the names at the ends of lines up or down until none lies on another."""
    figure.draw_without_rendering()
    for ax in figure.axes:
        labels: list[Any] = [t for t in ax.texts if t.get_gid() == "end label"]
        place = {id(t): ax.transData.transform(t.xy)[1] * 72 / figure.dpi for t in labels}
        labels.sort(key=lambda t: place[id(t)])
        before = float("-inf")
        for label in labels:
            y = max(place[id(label)], before + GAP)
            label.set_position((8, y - place[id(label)]))
            before = y
