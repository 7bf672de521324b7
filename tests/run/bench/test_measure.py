"""What is measured of whom, in which order, and what follows from a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from ssdgen.plan.roofline import Roofline, Work
from ssdgen.run.bench.measure import BOUND, FEWEST_ROUNDS, figures, measure, rounds
from ssdgen.run.bench.others import Contender
from ssdgen.run.bench.rows import OURS, Row, Spread
from ssdgen.run.bench.shapes import SHAPES
from ssdgen.run.bench.truth import Values
from ssdgen.run.inputs import Inputs
from tests.run.bench.fakes import Clock, FakeMeter
from tests.run.bench.made import ENVIRONMENT

SHAPE = SHAPES[0]
SETS = [Inputs({"x": torch.ones(1)}, {}, {}), Inputs({"x": torch.ones(1)}, {}, {})]
TRUTH = Values(torch.ones(8, dtype=torch.float64), torch.ones(8, dtype=torch.float64))


def contender(name: str, y: float = 1.0, state: float = 1.0, family: str = OURS, note: str = "") -> Contender:
    def call(inputs: Inputs) -> tuple[torch.Tensor, ...]:
        return torch.full((8,), y), torch.full((8,), state)

    return Contender(family, name, call, "f", lambda inputs: TRUTH, lambda r: Values(r[0], r[1]), lambda: note)


def broken(error: Exception) -> Contender:
    def call(inputs: Inputs) -> tuple[torch.Tensor, ...]:
        raise error

    return Contender("peer", "broken", call, "f", lambda inputs: TRUTH, lambda r: Values(r[0], r[1]))


def measured(*contenders: Contender, meter: FakeMeter | None = None, brief: bool = False) -> dict[str, Row]:
    rows = measure(SHAPE, contenders, SETS, meter or FakeMeter(), ENVIRONMENT, 5, 1.0, brief=brief)
    return {row.name: row for row in rows}


@pytest.fixture(autouse=True)
def no_warming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "__defaults__", (0.0, Clock()))


def test_replays_take_turns() -> None:
    """One of each a round: what drifts, drifts for all."""
    meter, a, b = FakeMeter(), contender("a"), contender("b")
    measured(a, b, meter=meter)
    assert meter.order == [a.call, b.call] * 5


def test_a_wrong_result_is_never_timed() -> None:
    meter, wrong, off = FakeMeter(), contender("wrong", y=1.02), contender("off", state=1.02)
    rows = measured(wrong, off, contender("right"), meter=meter)
    assert wrong.call not in meter.captured
    assert off.call not in meter.captured
    for name in ("wrong", "off"):
        assert rows[name].graph_us is None
        assert rows[name].flops is None
        assert "wrong" in rows[name].note
    assert rows["wrong"].error == pytest.approx(0.02, rel=1e-3)
    assert rows["wrong"].bound == BOUND == 5e-3
    assert rows["right"].graph_us == Spread(10, 10, 10)


@pytest.mark.parametrize("error", [RuntimeError("no\nkernel"), ValueError("bad"), KeyError("x")])
def test_what_stops_one_does_not_stop_the_rest(error: Exception) -> None:
    rows = measured(broken(error), contender("right"))
    assert type(error).__name__ in rows["broken"].note
    assert "\n" not in rows["broken"].note
    assert rows["broken"].error is None
    assert rows["right"].graph_us is not None


def test_a_call_that_cannot_be_captured_keeps_its_error() -> None:
    class Meter(FakeMeter):
        def capture(self, call: Callable[..., object], sets: object) -> Callable[[], float]:  # type: ignore[override]
            raise RuntimeError("operation not permitted when stream is capturing")

    row = measured(contender("a", note="searched"), meter=Meter())["a"]
    assert (row.error, row.graph_us) == (0, None)
    assert row.note == "searched; RuntimeError: operation not permitted when stream is capturing"


def test_what_stands_beside_a_time() -> None:
    row = measured(contender("a"))["a"]
    assert (row.eager_us, row.host_us, row.extra_bytes, row.sets) == (50, 40, 1000, 2)
    assert row.extra_share == 1000 / SHAPE.compulsory_bytes
    brief = measured(contender("a"), brief=True)["a"]
    assert (brief.eager_us, brief.host_us, brief.extra_bytes) == (None, None, None)
    assert brief.graph_us is not None


def test_rounds_stop_when_the_time_is_up_but_not_before_some() -> None:
    spread = rounds({"a": iter(range(1, 100)).__next__}, 50, 10.0, 0.0, Clock(tick=1.0))
    assert spread["a"].p90 < 20
    few = rounds({"a": iter(range(1, 100)).__next__}, 50, 0.0, 0.0, Clock(tick=1.0))
    assert few["a"] == Spread.of(range(1, FEWEST_ROUNDS + 1))


def test_the_clocks_are_up_before_anything_counts() -> None:
    """What runs while warming is not among the times."""
    clock = Clock(tick=0.1)
    spread = rounds({"a": iter(range(1000)).__next__}, 5, 100.0, 1.0, clock)
    assert spread["a"].p10 >= 5


def test_figures() -> None:
    """Compulsory bytes and the plan's floor over the time."""
    at_floor = 1e6 * SHAPE.compulsory_bytes / ENVIRONMENT.bandwidth
    row = Row(str(SHAPE), OURS, "a", 1e-3, 1e-3, BOUND, floor_us=2 * at_floor)
    row = figures(row.timed(Spread(4 * at_floor, 1, 1)), SHAPE, ENVIRONMENT)
    assert row.of_compulsory == pytest.approx(0.25)
    assert row.of_roofline == pytest.approx(0.5)
    assert row.bandwidth == pytest.approx(ENVIRONMENT.bandwidth / 4)
    assert row.flops == pytest.approx(SHAPE.operations / (4e-6 * at_floor))
    peer = replace(row, floor_us=None, of_roofline=None)
    assert figures(peer, SHAPE, ENVIRONMENT).of_roofline is None


def test_the_floor_of_ours_is_at_the_rates_measured_there() -> None:
    """The sum of its kernels', the longer of bytes and products each; peers have none."""
    kernels = (Work("a", (("x", 8000),), 10, 10), Work("b", (("x", 10),), 6000, 6000))
    ours = replace(contender("ours"), floor=lambda inputs: Roofline({}, "bf16", 1, 1, kernels))
    slow = replace(ENVIRONMENT, bandwidth=1e9, matmul_flops=2e9)
    rows = {row.name: row for row in measure(SHAPE, [ours, contender("peer")], SETS, FakeMeter(), slow, 5, 1.0)}
    assert rows["ours"].launched_bytes == 8010
    assert rows["ours"].floor_us == pytest.approx(8 + 3)
    assert rows["ours"].of_roofline == pytest.approx(11 / 10)
    assert (rows["peer"].floor_us, rows["peer"].of_roofline) == (None, None)
