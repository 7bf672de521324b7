"""One technique taken away at a time: what changes in the configuration, and what a table makes of the times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ssdgen.diagnostics import UserError
from ssdgen.ir.chunkform import ChunkForm
from ssdgen.plan.settings import configure
from ssdgen.run.bench.ablation import BEST, Way, ablation, makers, ways, worth
from ssdgen.run.bench.conflicts import METRIC, Conflicts, counted, read_conflicts
from ssdgen.run.bench.forward import Effort
from ssdgen.run.bench.measure import rounds
from ssdgen.run.bench.rows import OURS, Row, Spread
from ssdgen.run.bench.shapes import Shape
from tests.run.bench.fakes import Clock, FakeMeter
from tests.run.bench.made import ENVIRONMENT

SHAPE = Shape(2, 128, 4, 2, 16, 32)
SWAPPED = {"plan": "segmented", "swap": "carried,intra", "latency_x": "4", "intra": "bf16"}


@pytest.fixture(autouse=True)
def no_warming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "__defaults__", (0.0, Clock()))


def test_each_way_changes_one_thing(mamba2: ChunkForm) -> None:
    best = configure(mamba2, SWAPPED)
    made = {name: make(mamba2, SWAPPED)[1] for name, make in makers(best).items()}
    off = made["latency hints off"]
    assert {value for _, value in (*off.latency, *off.state_latency)} == {1}
    assert replace(off, latency=best.latency, state_latency=best.state_latency) == best
    assert made["operand swapping off"] == replace(best, swap=())
    plain = made["transposed layouts off"]
    assert plain.internals == (("step", ("b", "t", "h")),)
    assert replace(plain, internals=best.internals) == best
    assert made["TF32 in intra"] == configure(mamba2, {**SWAPPED, "intra": "tf32"})
    assert made["tuning off"] == configure(mamba2, {"plan": "segmented"})
    own = made["shared C.B off"]
    assert own.share_scores_from == 0
    assert replace(own, share_scores_from=best.share_scores_from) == best


def test_what_the_best_does_not_use_is_added(mamba2: ChunkForm) -> None:
    best = {"plan": "segmented", "swap": "none", "intra": "tf32"}
    made = makers(configure(mamba2, best))
    assert {"operand swapping on", "bf16 in intra"} <= set(made)
    assert made["operand swapping on"](mamba2, best)[1].swap == ("carried", "intra")


def test_every_way_is_another_module(mamba2: ChunkForm) -> None:
    """A way that changed nothing in the text would be measured as worth nothing."""
    found = ways(mamba2, SWAPPED)
    assert "tuning off" in [way.name for way in found if way.folder]
    assert found[0].name == BEST
    folders = [way.folder for way in found if way.folder]
    assert len(folders) >= 6
    assert len({(Path(f) / "mamba2.py").read_text() for f in folders}) == len(folders)
    for way in found:
        assert way.folder or way.note.startswith("not available: ")


def test_what_is_the_best_already_is_not_measured_again(mamba2: ChunkForm) -> None:
    (same,) = [way for way in ways(mamba2, {}) if way.name == "tuning off"]
    assert (same.folder, same.note) == ("", "not available: the best configuration is that")


def test_settings_that_are_wrong_are_the_users(mamba2: ChunkForm) -> None:
    with pytest.raises(UserError):
        ways(mamba2, {"chunk": "65"})


def test_worth_is_over_the_best() -> None:
    def row(name: str, us: float | None, error: float = 1e-3) -> Row:
        return Row(str(SHAPE), OURS, name, error, error, 5e-3, None if us is None else Spread(us, us, us))

    several = [
        Way(BEST, "", "x"),
        Way("slow", "a=1", "y"),
        Way("wrong", "a=2", "z"),
        Way("none", "", note="not available"),
    ]
    found = {t.technique: t for t in worth(several, [row(BEST, 10), row("slow", 15), row("wrong", None, 0.1)])}
    assert [t.worth for t in found.values()] == [1, 1.5, None, None]
    assert found["none"].note == "not available"
    assert found["slow"].settings == "a=1"


def test_a_whole_run(mamba2: ChunkForm) -> None:
    """Each way is compared with float64 and timed; the conflicts are put beside it."""
    asked: list[Mapping[str, Sequence[str]]] = []

    def conflicts(shapes: Sequence[Shape], folders: Mapping[str, Sequence[str]]) -> Conflicts:
        asked.append(folders)
        return Conflicts({(str(SHAPE), folders[str(SHAPE)][1]): 7}, "read in part")

    small = replace(ENVIRONMENT, l2_bytes=1)
    document = ablation(
        mamba2, lambda shape: SWAPPED, [SHAPE], FakeMeter(), small, Effort(rounds=5), conflicts, device="cpu"
    )
    techniques = document.techniques
    assert techniques[0].technique == BEST
    assert all(t.worth == 1 for t in techniques if t.graph_us)
    assert sum(t.graph_us is not None for t in techniques) == len(asked[0][str(SHAPE)]) >= 6
    assert [t.conflicts for t in techniques][:3] == [None, 7, None]
    assert document.notes[-1] == "read in part"


def line(number: int, kernel: str, value: str, metric: str = METRIC) -> str:
    return f'"{number}","python","{kernel}","{metric}","","{value}"'


OUTPUT = "\n".join(
    [
        "==PROF== Connected to process 1",
        '"ID","Process Name","Kernel Name","Metric Name","Metric Unit","Metric Value"',
        line(0, "erfinv_kernel_cuda", "0"),
        line(1, "chunk_cumsum", "1,200"),
        line(2, "compute_out", "34"),
        line(2, "compute_out", "5", "other"),
        line(3, "erfinv_kernel_cuda", "0"),
        line(4, "walk", "6"),
    ]
)


def test_conflicts_are_summed_a_call() -> None:
    assert counted(OUTPUT) == [1234, 6]
    assert counted("==ERROR== no") == []


def test_conflicts_are_read_or_the_reason_is_told() -> None:
    commands: list[Sequence[str]] = []

    def runner(command: Sequence[str], seconds: float) -> tuple[int, str]:
        commands.append(command)
        return 0, OUTPUT

    folders = {str(SHAPE): ["a", "b"]}
    read = read_conflicts([SHAPE], folders, runner=runner, tool="ncu")
    assert (read.of(str(SHAPE), "a"), read.of(str(SHAPE), "b"), read.of("x", "a")) == (1234, 6, None)
    assert list(commands[0][:3]) == ["ncu", "--clock-control", "none"]
    refused = "==PROF== x\n==ERROR== ERR_NVGPUCTRPERM - no permission"
    denied = read_conflicts([SHAPE], folders, runner=lambda c, s: (1, refused), tool="ncu")
    assert "not read: ==ERROR== ERR_NVGPUCTRPERM" in denied.note
    assert denied.counts == {}
    other = read_conflicts([SHAPE], {str(SHAPE): ["a"]}, runner=runner, tool="ncu")
    assert "not read" in other.note
