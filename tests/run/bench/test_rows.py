"""Which times and ratios count, and that a file holds what was measured."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from ssdgen.diagnostics import UserError
from ssdgen.run.bench.rows import DEFAULT, OURS, Row, Spread, means, ratios, read_document, to_json
from ssdgen.run.bench.shapes import SHAPES
from tests.run.bench import made

A, B = SHAPES[:2]


def ours(us: float, error: float = 1.7e-3, shape: object = A) -> Row:
    return made.row(A if shape is A else B, OURS, DEFAULT, us, error)


def peer(us: float, error: float = 1.7e-3, name: str = "chunk 128", shape: object = A) -> Row:
    return made.row(A if shape is A else B, "mamba_ssm", name, us, error)


@pytest.mark.parametrize("error", [5.1e-3, math.nan, math.inf, None])
def test_a_wrong_result_gets_no_time(error: float | None) -> None:
    row = Row(str(A), OURS, DEFAULT, error, 1e-4, 5e-3)
    assert row.timed(Spread(1, 1, 1)).graph_us is None
    assert replace(row, error=1e-4, state_error=error).timed(Spread(1, 1, 1)).graph_us is None
    assert replace(row, error=5e-3).timed(Spread(1, 1, 1)).graph_us == Spread(1, 1, 1)


def test_a_ratio_is_to_the_peers_better_variant() -> None:
    (ratio,) = ratios([ours(10), peer(30), peer(25, name="chunk 256")], DEFAULT)
    assert (ratio.ratio, ratio.peer, ratio.peer_name) == (2.5, "mamba_ssm", "chunk 256")


def test_a_ratio_counts_only_for_errors_like_the_peers() -> None:
    """1.25 times the peer's error is the most."""
    (fair,) = ratios([ours(10, error=1.25e-3), peer(20, error=1e-3)], DEFAULT)
    assert fair.ratio == 2
    (unfair,) = ratios([ours(10, error=1.26e-3), peer(20, error=1e-3)], DEFAULT)
    assert unfair.ratio is None
    assert "1.25 times" in unfair.reason


def test_no_ratio_without_both_times() -> None:
    (no_ours,) = ratios([ours(10, error=1.0), peer(20)], DEFAULT)
    (no_peer,) = ratios([ours(10), peer(20, error=1.0)], DEFAULT)
    assert (no_ours.ratio, no_ours.reason) == (None, "ours has no time")
    assert (no_peer.ratio, no_peer.reason) == (None, "the peer has no time")


def test_other_rows_of_ours_are_not_the_default() -> None:
    """A faster plan that a user does not get makes no ratio better."""
    rows = [ours(10), made.row(A, OURS, "three_kernel", 1.0), peer(20)]
    assert [r.ratio for r in ratios(rows, DEFAULT)] == [2]


def test_means_are_geometric_over_what_counts() -> None:
    rows = [ours(10), peer(20), ours(10, shape=B), peer(80, shape=B)]
    (mean,) = means(ratios(rows, DEFAULT))
    assert mean.mean == pytest.approx(4)
    assert (mean.count, mean.shapes, mean.smallest, mean.smallest_shape) == (2, 2, 2, str(A))
    (one,) = means(ratios([*rows[:3], peer(80, error=1.0, shape=B)], DEFAULT))
    assert (one.mean, one.count, one.shapes) == (pytest.approx(2), 1, 2)
    assert means(ratios([ours(10)], DEFAULT)) == ()


def test_spread() -> None:
    values = list(range(100, -1, -1))
    assert Spread.of(values) == Spread(50, 10, 90)
    assert Spread.of([3.0]) == Spread(3, 3, 3)


@pytest.mark.parametrize("document", [made.forward(), made.growth(), made.ablation()], ids=lambda d: d.study)
def test_a_file_holds_the_document(tmp_path: Path, document: object) -> None:
    path = tmp_path / "x.json"
    path.write_text(to_json(document))  # type: ignore[arg-type]
    assert read_document(path) == document


def test_what_is_no_number_is_null() -> None:
    """Strict JSON: other programs read it."""
    document = replace(made.forward(), rows=(Row(str(A), OURS, DEFAULT, math.nan, math.inf, 5e-3),))
    row = json.loads(to_json(document), parse_constant=lambda name: pytest.fail(name))["rows"][0]
    assert (row["error"], row["state_error"]) == (None, None)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"format": 1, "study": "forward"}', '{"format": 99, "study": "forward"}']
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"x\.json"):
        read_document(path)
    with pytest.raises(UserError, match="no such file"):
        read_document(tmp_path / "none.json")
