"""The search, on times that a formula gives: it finds what is there to be found, and no wrong candidate has a speed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ssdgen.build.worker import Answer, Compiled, Rejected
from ssdgen.ir.build import CompileRequest, ConstantArg
from ssdgen.run.recorded import Call
from ssdgen.run.tune import prune
from ssdgen.run.tune.device import H200
from ssdgen.run.tune.prune import Estimate, Removed
from ssdgen.run.tune.search import Found, Search
from ssdgen.run.tune.space import Candidate, Space
from ssdgen.run.tune.worker import Timed
from tests.run.tune import test_search

GOOD: dict[str, int] = {"chunk": 128, "latency_B": 5, "occupancy_compute_out": 3}


class Compiler:
    """Compiles everything at once but kernels of chunk 32, the last first unless `ordered`, and counts."""

    def __init__(self, ordered: bool = False) -> None:
        self.sets = 0
        self.step = 1 if ordered else -1

    def compiled(
        self, wanted: Sequence[tuple[CompileRequest, ...]], go_on: Callable[[], bool]
    ) -> Iterator[tuple[int, tuple[Answer, ...]]]:
        for place in range(len(wanted))[:: self.step]:
            self.sets += 1
            yield place, tuple(self._answer(r) for r in wanted[place])

    def _answer(self, request: CompileRequest) -> Answer:
        bad = any(isinstance(a, ConstantArg) and (a.name, a.value) == ("CHUNK", 32) for a in request.signature)
        return Rejected("no") if bad else Compiled(b"", 1.0)


class Measure:
    """100 us, 10 % less for each field that is as in GOOD; single_walk takes half; occupancy 4 is wrong."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.asked: list[Candidate] = []

    def __call__(self, estimate: Estimate, best: float) -> Timed | Removed:
        candidate = estimate.candidate
        again = best == math.inf and bool(self.asked)  # at the end there is no rival
        if not again:
            self.asked.append(candidate)
        config = vars(self.space.config(candidate))
        if config["occupancy_compute_out"] == 4:
            return Removed(candidate, "wrong result", "nan")
        factor = 0.9 ** sum(config.get(name) == value for name, value in GOOD.items())
        factor *= 0.5 if ("plan", "single_walk") in candidate.structure else 1.0
        return Timed(100 * factor, 0.2 if again else 0.1, 0.0, 0.5)


def search(
    space: Space, call: Call, monkeypatch: Any, seconds: float = 1e9, structural: bool = True, ordered: bool = False
) -> tuple[Found, Measure]:
    monkeypatch.setattr(prune, "read_cubin", lambda cubin: _Used)
    measure = Measure(space)
    clock = iter(range(1_000_000))
    found = Search(space, call, H200, Compiler(ordered), measure, lambda: seconds - next(clock)).run(structural)
    return found, measure


class _Used:
    shared_bytes = spilled_bytes = 0


def test_it_finds_the_best_numbers(space: Space, call: Call, monkeypatch: Any) -> None:
    found, measure = search(space, call, monkeypatch, structural=False)
    assert found.best is not None
    assert dict(found.best.candidate.fields) == GOOD
    assert found.best.candidate.structure == ()
    assert found.finished
    assert len(measure.asked) < 200, "of millions of points"


def test_it_finds_a_better_module(space: Space, call: Call, monkeypatch: Any) -> None:
    found, _ = search(space, call, monkeypatch)
    assert found.best is not None
    assert dict(found.best.candidate.structure)["plan"] == "single_walk"
    config = vars(space.config(found.best.candidate))
    assert {name: config[name] for name in GOOD if name in config} == {n: v for n, v in GOOD.items() if n in config}
    assert any(m.candidate.structure == () and dict(m.candidate.fields) == GOOD for m in found.measured), (
        "the shipped one"
    )


def test_nothing_is_measured_twice_or_launched_twice(space: Space, call: Call, monkeypatch: Any) -> None:
    found, measure = search(space, call, monkeypatch)
    assert len(measure.asked) == len(set(measure.asked))
    identities = [m.estimate.identity for m in found.measured]
    assert len(identities) == len(set(identities))
    assert found.considered == len(found.measured) + len(found.removed)


def test_the_wrong_and_the_uncompiled_have_no_speed_and_a_reason(space: Space, call: Call, monkeypatch: Any) -> None:
    found, _ = search(space, call, monkeypatch)
    steps = {str(r.candidate): r.step for r in found.removed}
    assert steps["occupancy_compute_out=4"] == "wrong result"
    assert steps["chunk=32"] == "does not compile"
    fast = {str(m.candidate) for m in found.measured}
    assert not fast & set(steps)
    assert found.steps()["wrong result"] >= 1


def test_what_there_was_no_time_for_is_tried_when_there_is(space: Space, call: Call, monkeypatch: Any) -> None:
    """The half of the time that is the shipped module's ends in the middle of a round: the rest of it is not forgotten."""
    monkeypatch.setattr(test_search, "GOOD", {"warps_compute_out": 4})
    monkeypatch.setattr(Space, "varied", lambda self, candidate: iter(()))
    found, _ = search(space, call, monkeypatch, seconds=130, ordered=True)
    assert found.best is not None
    assert dict(found.best.candidate.fields) == test_search.GOOD
    assert found.considered == len(found.measured) + len(found.removed)


def test_the_default_is_measured_whatever_the_time(space: Space, call: Call, monkeypatch: Any) -> None:
    found, measure = search(space, call, monkeypatch, seconds=0.0)
    assert measure.asked == [Candidate()]
    assert found.default is found.best is not None
    assert not found.finished


def test_what_matters_most_comes_first_where_time_is_short(space: Space, call: Call, monkeypatch: Any) -> None:
    """The model gives most candidates the same time: their order is that of the space, whatever it thinks."""
    found, measure = search(space, call, monkeypatch, seconds=25, structural=False, ordered=True)
    assert not found.finished
    moved = list(dict.fromkeys(c.fields[0][0] for c in measure.asked if len(c.fields) == 1))
    assert 1 < len(moved) < len(space.numeric(Candidate()))
    assert moved == [name for name in space.numeric(Candidate()) if name in moved]
    assert moved[0] == "segments"


def test_a_round_leaves_time_to_join_its_moves(space: Space, call: Call, monkeypatch: Any) -> None:
    """Single moves that helped are of no use if the time is over before any two of them are tried together."""
    monkeypatch.setattr(test_search, "GOOD", {"segments": 2, "latency_x": 5, "latency_B": 5})
    found, measure = search(space, call, monkeypatch, seconds=32, structural=False, ordered=True)
    assert not found.finished
    assert "chunk=128" not in set(map(str, measure.asked)), "the first round was not complete"
    assert found.best is not None
    assert dict(found.best.candidate.fields) == test_search.GOOD


def test_moves_are_joined_side_by_side(space: Space, call: Call, monkeypatch: Any) -> None:
    """What is joined is compiled in one go: one after the other would leave all compilers but one idle."""
    monkeypatch.setattr(prune, "read_cubin", lambda cubin: _Used)
    sizes = []

    class Noting(Compiler):
        def compiled(self, wanted: Any, go_on: Any) -> Iterator[tuple[int, tuple[Answer, ...]]]:
            sizes.append(len(wanted))
            return super().compiled(wanted, go_on)

    found = Search(space, call, H200, Noting(), Measure(space), lambda: 1e9).run(structural=False)
    assert found.best is not None
    assert dict(found.best.candidate.fields) == GOOD
    assert sizes[2] == 3, "of three moves the first two, all, and the first with the third"
    assert len(sizes) == 4, "the default, a round, its moves, a round that finds nothing"


def test_the_heuristics_choice_is_measured_whatever_the_time(space: Space, call: Call, monkeypatch: Any) -> None:
    narrow = Space(space.form, "bf16", {**space.sizes, "p": 32}, space._folder)
    found, measure = search(narrow, replace(call, sizes={**call.sizes, "p": 32}), monkeypatch, seconds=0.0)
    assert len(measure.asked) == 2
    assert found.heuristic is not None


def test_half_of_the_time_is_for_the_module_that_is_shipped(space: Space, call: Call, monkeypatch: Any) -> None:
    _, measure = search(space, call, monkeypatch, seconds=60)
    moved = [bool(c.structure) for c in measure.asked]
    assert True in moved
    assert moved == sorted(moved)
    assert 20 < moved.index(True) < 40


def test_the_hopeless_is_not_compiled(space: Space, call: Call, monkeypatch: Any) -> None:
    compiler = Compiler()
    long = Call({**call.sizes, "b": 1, "h": 1, "t": 131072}, "bf16", forms=call.forms)
    monkeypatch.setattr(prune, "read_cubin", lambda cubin: _Used)
    found = Search(space, long, H200, compiler, Measure(space), lambda: 1e9).run()
    hopeless = [r for r in found.removed if r.step == "slow by the model"]
    assert any(("plan", "single_walk") in r.candidate.structure for r in hopeless)
    assert compiler.sets < found.considered


def test_the_heuristics_choice_is_measured_beside_the_default(space: Space, call: Call, monkeypatch: Any) -> None:
    narrow = Space(space.form, "bf16", {**space.sizes, "p": 32}, space._folder)
    found, _ = search(narrow, replace(call, sizes={**call.sizes, "p": 32}), monkeypatch, structural=False)
    assert found.heuristic is not None
    assert found.default is not None
    assert dict(found.heuristic.candidate.fields) == {"state_tile_p": 32, "tile_p": 32}
    assert found.default.candidate == Candidate()
    assert {found.heuristic, found.default} <= set(found.measured)


def test_a_default_that_the_heuristic_chooses_and_that_is_slow_is_measured_again_once(
    space: Space, call: Call, monkeypatch: Any
) -> None:
    """It is the default and the heuristic's choice, and neither among the fastest: asked for twice, it was lost once."""
    monkeypatch.setattr(Space, "guessed", lambda self, multiprocessors: Candidate())
    found, _ = search(space, call, monkeypatch, structural=False)
    assert found.heuristic is found.default
    assert sum(m.candidate == Candidate() for m in found.measured) == 1
