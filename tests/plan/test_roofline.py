"""The arithmetic of a plan's floor: that of the design's table, and that of a kernel one can count by hand."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import pytest

from ssdgen.derive import chunk_form, recurrence
from ssdgen.diagnostics import UserError
from ssdgen.emit.support._segments import segments
from ssdgen.ir.chunkform import ChunkForm
from ssdgen.plan import configure, plan
from ssdgen.plan.roofline import H200, Rates, Roofline, Work, compulsory_bytes, roofline
from ssdgen.spec import load_source, read_layer

SHAPES = {
    "A": (4, 16384, 8, 1, 64, 128),
    "B": (1, 8192, 80, 1, 64, 128),
    "C": (8, 2048, 24, 1, 64, 128),
    "D": (1, 131072, 64, 8, 64, 128),
}
COMPULSORY = {"A": 40, "B": 42, "C": 28, "D": 630}
THREE_KERNEL = {"A": 124, "B": 143, "C": 90, "D": 1983}
"""DESIGN section 6: microseconds at 4.3 TB/s."""


@cache
def form_of(name: str) -> ChunkForm:
    return chunk_form(recurrence(read_layer(load_source(name))))


def shape_of(name: str) -> dict[str, int]:
    return dict(zip("bthgpn", SHAPES[name], strict=True))


def floor(
    shape: Mapping[str, int], settings: Mapping[str, str], dtype: str = "bf16", present: tuple[str, ...] = ()
) -> Roofline:
    form = form_of("mamba2")
    return roofline(plan(form, configure(form, settings)), shape, segments, dtype=dtype, present=present)  # type: ignore[arg-type]


def us(count: int, rate: float = H200.bandwidth) -> float:
    return 1e6 * count / rate


def work(of: Roofline, kernel: str) -> Work:
    return next(k for k in of.kernels if k.kernel == kernel)


@pytest.mark.parametrize("name", SHAPES)
def test_compulsory_traffic_is_that_of_the_design(name: str) -> None:
    """The design's numbers are whole microseconds; D's is rounded to ten."""
    layer = form_of("mamba2").recurrence.layer
    assert us(compulsory_bytes(layer, shape_of(name))) == pytest.approx(COMPULSORY[name], abs=1, rel=0.005)


@pytest.mark.parametrize("name", SHAPES)
def test_three_kernels_move_what_the_design_says(name: str) -> None:
    """Entry states, in bf16, written and read are twice the compulsory traffic."""
    of = floor(shape_of(name), {"plan": "three_kernel", "chunk": "64"})
    assert us(of.bytes) == pytest.approx(THREE_KERNEL[name], rel=0.015)
    entries = dict(work(of, "fwd_pass_state").arrays)["S_entry"]
    b, t, h, _, p, n = SHAPES[name]
    assert entries == 2 * b * h * (t // 64) * p * n == dict(work(of, "compute_out").arrays)["S_entry"]


def test_segments_move_what_the_design_says() -> None:
    """75 us at A, in eight segments: the scores that a group shares are stored in two bytes, beside a scale and a score of
    its own for each token; in float32 they would be 79. Where the rule cuts less often than the design assumed (B in 3, C not
    at all) there is less to move; at D, where 8 groups store scores, more (1100 for 960)."""
    of = floor(shape_of("A"), {"plan": "segmented"})
    assert of.segments == 8
    assert us(of.bytes) == pytest.approx(75, abs=1)
    stored = dict(work(of, "group_scores").arrays)["shared_scores"]
    assert stored == 2 * 4 * 16384 * 64 == dict(work(of, "walk_out").arrays)["shared_scores"]
    assert us(of.bytes + 2 * stored) == pytest.approx(79, abs=1)
    assert us(floor(shape_of("A"), {"intra": "tf32"}).bytes) == pytest.approx(79, abs=1)
    assert [floor(shape_of(name), {}).segments for name in "BCD"] == [3, 1, 4]
    assert us(floor(shape_of("D"), {}).bytes) == pytest.approx(1100, rel=0.01)


def test_the_tensor_cores_take_what_the_design_says() -> None:
    """39 us at A, of which the design counts the states of all 8 segments: the last one's end is never made."""
    of = floor(shape_of("A"), {})
    unmade = work(of, "segment_states").operations / 7
    assert us(int(of.operations + unmade), H200.products) == pytest.approx(39, abs=0.5)
    assert of.bf16_operations == of.operations
    own = floor(shape_of("A"), {"share_scores_from": "0"})
    scores = work(of, "group_scores").operations
    assert own.operations == of.operations + 7 * scores, "8 heads of one group"


def test_a_kernel_counted_by_hand() -> None:
    """One head of one chunk in a walk: scores, their product with x, the state read and updated; padding counts."""
    shape = {"b": 1, "t": 50, "h": 1, "g": 1, "p": 40, "n": 30}
    of = floor(shape, {"plan": "single_walk", "share_scores_from": "0"})
    L, P, N = 64, 64, 32
    assert [k.kernel for k in of.kernels] == ["chunk_cumsum", "walk_out"]
    assert work(of, "walk_out").operations == 2 * L * L * N + 2 * L * L * P + 2 * (2 * L * P * N)
    narrow = floor(shape, {"plan": "single_walk", "share_scores_from": "0", "tile_p": "32"})
    assert work(narrow, "walk_out").operations == 2 * (2 * L * L * N) + 2 * L * L * P + 2 * (2 * L * P * N), (
        "each of two blocks along p makes the scores"
    )
    read = {"x": 50 * 40 * 2, "B": 50 * 30 * 2, "C": 50 * 30 * 2, "D": 4, "decay_sum": 64 * 4, "step": 64 * 4}
    assert dict(work(of, "walk_out").arrays) == {**read, "y": 50 * 40 * 2, "S_final": 40 * 30 * 4}


def test_tiles_of_the_column_axis_repeat_what_stands_in_their_loop() -> None:
    """compute_out adds scores and carried states up over tiles of n; the product with x comes once, behind."""
    shape = {"b": 1, "t": 64, "h": 1, "g": 1, "p": 64, "n": 128}
    whole = floor(shape, {"plan": "three_kernel"})
    assert floor(shape, {"plan": "three_kernel", "tile_n": "64"}).operations == whole.operations
    assert work(whole, "compute_out").operations == 2 * 64 * 64 * 128 * 2 + 2 * 64 * 64 * 64


@pytest.mark.parametrize(("precision", "times"), [("bf16", 1), ("bf16x2", 2), ("tf32", 2), ("tf32x3", 6)])
def test_precision_costs(precision: str, times: int) -> None:
    """Weighted scores in two bf16 halves, x as it is: two products."""
    shape = {"b": 1, "t": 64, "h": 1, "g": 1, "p": 64, "n": 128}
    plain, other = (floor(shape, {"intra": p}) for p in ("bf16", precision))
    assert other.operations == plain.operations
    assert other.bf16_operations == plain.operations + (times - 1) * 2 * 64**3


def test_what_is_passed_counts() -> None:
    plain, gated = (floor(shape_of("A"), {}, present=p) for p in ((), ("z", "S0")))
    z, initial = 4 * 16384 * 8 * 64 * 2, 4 * 8 * 64 * 128 * 4
    assert gated.compulsory - plain.compulsory == gated.bytes - plain.bytes == z + initial
    wide = floor(shape_of("A"), {}, dtype="f32")
    dt, scalars, final = 4 * 16384 * 8 * 4, 3 * 8 * 4, 4 * 8 * 64 * 128 * 4
    assert wide.compulsory == 2 * plain.compulsory - dt - scalars - final


def test_a_plan_takes_the_longer_of_bytes_and_products_kernel_by_kernel() -> None:
    a, b = Work("a", (("x", 30),), 10, 20), Work("b", (("x", 5), ("y", 5)), 40, 40)
    both = Roofline({}, "bf16", 1, 1, (a, b))
    assert (both.bytes, both.operations, both.bf16_operations) == (40, 50, 60)
    assert both.seconds(Rates(bandwidth=10, products=10)) == 3 + 4


@pytest.mark.parametrize(
    ("spec", "settings", "shape", "message"),
    [
        ("gla", {}, {"b": 1, "t": 9, "h": 2}, "gla has no kernels: "),
        ("mamba2", {}, {"b": 1, "t": 9, "h": 2, "n": 512}, "registers, 256 at most, and n is 512"),
        ("mamba2", {}, {"b": 1, "t": 9}, "does not say how long h is"),
    ],
)
def test_what_has_no_floor(spec: str, settings: dict[str, str], shape: dict[str, int], message: str) -> None:
    form = form_of(spec)
    with pytest.raises(UserError, match=message):
        roofline(plan(form, configure(form, settings)), shape, segments)
