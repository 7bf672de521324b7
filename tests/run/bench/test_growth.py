"""Time along an axis: which shapes, who is measured, where it bends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ssdgen.run.bench.forward import Effort, Subject
from ssdgen.run.bench.growth import AXES, bends, growth, shapes_on
from ssdgen.run.bench.measure import rounds
from ssdgen.run.bench.others import CHOICES
from ssdgen.run.bench.rows import ATTENTION, DEFAULT, LOOP, OURS, Row
from ssdgen.run.bench.shapes import SHAPES, Shape
from tests.run.bench.fakes import Clock, FakeMeter
from tests.run.bench.made import ENVIRONMENT, row
from tests.run.bench.standins import install


def test_the_lengths_studied() -> None:
    ends = {axis: (lengths[0], lengths[-1]) for axis, lengths in AXES.items()}
    assert ends == {"t": (1024, 524288), "n": (16, 256), "h": (1, 128), "b": (1, 64)}
    shapes = shapes_on("h", (1, 2))
    assert [s.h for s in shapes] == [1, 2]
    assert {replace(s, h=8) for s in shapes} == {SHAPES[0]}


def along_tokens(us: dict[int, float]) -> list[Row]:
    return [row(replace(SHAPES[0], t=t), OURS, DEFAULT, time, axis="t") for t, time in us.items()]


def test_a_bend_is_where_the_slope_passes_its_middle() -> None:
    """Flat until 4K, then in proportion to the length."""
    rows = along_tokens({1024: 10, 2048: 10, 4096: 10, 8192: 20, 16384: 40})
    (bend,) = bends(rows, AXES)
    assert (bend.axis, bend.shape) == ("t", str(replace(SHAPES[0], t=4096)))
    assert (bend.before, bend.after) == (pytest.approx(0), pytest.approx(1))
    assert "not full" in bend.why


def test_a_smooth_knee_is_one_bend() -> None:
    rows = along_tokens({t: 20 + t / 512 for t in AXES["t"]})
    assert len(bends(rows, AXES)) == 1


def test_no_bend_where_time_grows_evenly_or_others_bend() -> None:
    rows = along_tokens({t: t**0.9 for t in AXES["t"]})
    others = [replace(r, family="mamba_ssm") for r in along_tokens({1024: 1, 2048: 1, 4096: 9})]
    assert bends([*rows, *others], AXES) == ()
    assert bends(along_tokens({1024: 1.0, 2048: 2.0}), AXES) == ()


def test_a_whole_run(ours: Subject, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ours on every axis, the peers along tokens and state alone, for scale a loop over tokens and attention."""
    monkeypatch.setattr(rounds, "__defaults__", (0.0, Clock()))
    install(monkeypatch, "mamba_ssm")
    subject = replace(ours, peers=CHOICES["mamba_ssm"])
    axes = {"t": (64, 128), "h": (2, 4)}
    small = replace(ENVIRONMENT, l2_bytes=1)
    document = growth(
        subject, FakeMeter(), small, Effort(rounds=5), tmp_path / "w.json", axes=axes, base=Shape(1, 64, 2, 1, 16, 16),
        device="cpu",
    )  # fmt: skip
    families = {(r.axis, r.family) for r in document.rows}
    assert families == {("t", OURS), ("t", "mamba_ssm"), ("h", OURS)}
    assert all(r.graph_us for r in document.rows)
    assert {r.name for r in document.rows if r.family == OURS} == {DEFAULT}
    assert {(s.axis, s.name) for s in document.scale} == {("t", LOOP), ("t", ATTENTION)}
    assert {r.axis for r in document.ratios} == {"t"}
