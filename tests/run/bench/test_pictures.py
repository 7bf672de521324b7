"""What the pictures show, that they are written, and that no label lies on another."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ssdgen.diagnostics import UserError
from ssdgen.run.bench.curves import along, fastest, floor_curve, length, ratio_curves, time_curves
from ssdgen.run.bench.pictures import GAP, LOOKS, growth, pictures, ratio_to_triton, ratios_by_shape, time_per_token
from ssdgen.run.bench.rows import LOOP, OURS, Document
from ssdgen.run.bench.shapes import SHAPES
from tests.run.bench import made

NAMES = {
    "forward": {"ratios", "ratio_to_triton", "time_per_token", "memory"},
    "growth": {"ratio_to_triton", "time_per_token", "growth"},
    "ablation": {"ablation"},
    "decode": {"bandwidth"},
}


@pytest.mark.parametrize(
    "document", [made.forward(), made.growth(), made.ablation(), made.decode()], ids=lambda d: d.study
)
def test_pictures_are_written(document: Document, tmp_path: Path) -> None:
    written = pictures(document, tmp_path)
    assert {p.name for p in written} == {f"{document.study}_{name}.png" for name in NAMES[document.study]}
    for path in written:
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG")
        assert len(data) > 8_000


def test_nothing_is_drawn_of_nothing(tmp_path: Path) -> None:
    for document in (made.forward(), made.growth(), made.ablation(), made.decode()):
        empty = replace(document, rows=(), ratios=(), scale=(), techniques=(), bends=())
        assert pictures(empty, tmp_path) == []


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match="matplotlib") as caught:
        pictures(made.forward(), tmp_path)
    assert "pip install" in caught.value.hint


def test_ours_is_the_default_and_a_peer_its_better_variant() -> None:
    rows = fastest(r for r in made.forward().rows if r.shape == str(SHAPES[0]))
    assert {family: row.name for family, row in rows.items()} == {
        OURS: "default", "TileGym": "chunk 64", "mamba_ssm": "chunk 256", "fla": "simple_gla",
    }  # fmt: skip


def test_curves_hold_one_axis() -> None:
    """Of the seven shapes two differ in tokens alone, three in state."""
    forward = made.forward()
    assert [length(s, "t") for s in along(forward, "t")] == [4096, 16384]
    assert [length(s, "n") for s in along(forward, "n")] == [64, 128, 256]
    assert [length(s, "h") for s in along(made.growth(), "h")] == [1 << k for k in range(8)]
    assert along(replace(forward, rows=forward.rows[:3]), "t") == []


def test_ratio_curves() -> None:
    """Over the peer's time at the same shape; ours only where the ratio counts."""
    document = made.growth()
    curves = {c.name: dict(c.points) for c in ratio_curves(document, "n", "mamba_ssm")}
    assert set(curves) == {OURS, "TileGym"}
    assert curves["TileGym"][128] == pytest.approx(8.6 / 5.6)
    unfair = tuple(replace(r, ratio=None) for r in document.ratios)
    assert {c.name for c in ratio_curves(replace(document, ratios=unfair), "n", "mamba_ssm")} == {"TileGym"}


def test_time_curves() -> None:
    """Nanoseconds a token of all sequences; the floor is that of the compulsory traffic."""
    curves = {c.name: dict(c.points) for c in time_curves(made.growth(), "t", scale=True)}
    shape = replace(SHAPES[0], t=4096)
    assert curves[OURS][4096] == pytest.approx(1000 * made.time(shape, 2.6) / shape.tokens)
    assert curves[LOOP][4096] == pytest.approx(1000 * 40 * 4096 / shape.tokens)
    floor = dict(floor_curve(made.growth(), "t").points)
    assert floor[4096] < curves[OURS][4096]


@pytest.mark.parametrize("draw", [ratio_to_triton, time_per_token, growth], ids=lambda f: f.__name__)
def test_labels_are_apart(draw: Any) -> None:
    """Names at the ends of lines that nearly meet are moved apart; axes say what they show, with the unit."""
    figure = draw(made.growth())
    shown = [ax for ax in figure.axes if ax.get_visible()]
    assert shown
    for ax in shown:
        assert ax.get_xlabel()
        labels = [t for t in ax.texts if t.get_gid() == "end label"]
        heights = sorted(ax.transData.transform(t.xy)[1] * 72 / figure.dpi + t.get_position()[1] for t in labels)
        assert all(b - a >= GAP - 1e-6 for a, b in pairwise(heights))
    assert any(unit in shown[0].get_ylabel() for unit in ("ns", "times as fast"))


def test_every_family_looks_different() -> None:
    assert len({colour for _, colour, _ in LOOKS.values()}) == len({m for _, _, m in LOOKS.values()}) == len(LOOKS)


def test_equal_ratios_do_not_hide_each_other() -> None:
    document = made.forward()
    same = replace(document, ratios=tuple(replace(r, ratio=2.0) for r in document.ratios))
    figure: Any = ratios_by_shape(same)
    heights = [tuple(line.get_ydata()) for line in figure.axes[0].lines if len(line.get_ydata()) == len(SHAPES)]
    assert len(heights) == len(set(heights)) == 3
