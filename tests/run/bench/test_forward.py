"""A whole run on the CPU: every contender is called and compared for real; only time is told by a table."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ssdgen.run.bench import conflicts, warm
from ssdgen.run.bench.forward import Effort, Subject, forward, subject
from ssdgen.run.bench.measure import rounds
from ssdgen.run.bench.others import CHOICES, Variant, gla_inputs
from ssdgen.run.bench.ours import call_of, config_of, floor_of, load_module
from ssdgen.run.bench.rows import DEFAULT, OURS, Document
from ssdgen.run.bench.shapes import Shape
from ssdgen.run.bench.truth import case_of, input_sets
from ssdgen.run.bench.winners import read_winners
from ssdgen.run.checks import relative_error
from ssdgen.run.inputs import Inputs, draw
from tests.run.bench import standins
from tests.run.bench.fakes import Clock, FakeMeter
from tests.run.bench.made import ENVIRONMENT
from tests.run.bench.standins import install

SHAPE = Shape(2, 128, 4, 2, 16, 32)
EVERYONE: list[Variant] = [v for peer in ("TileGym", "mamba_ssm", "fla") for v in CHOICES[peer]]
SMALL = replace(ENVIRONMENT, l2_bytes=1)


@pytest.fixture(autouse=True)
def no_warming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "__defaults__", (0.0, Clock()))


def run(
    ours: Subject, folder: Path, peers: list[Variant] = EVERYONE, shapes: tuple[Shape, ...] = (SHAPE,), again: bool = False,
    clock: Callable[[], float] = lambda: 0.0, save: Callable[[Document], None] = lambda d: None,
) -> Document:  # fmt: skip
    return forward(
        replace(ours, peers=tuple(peers)), shapes, FakeMeter(), SMALL, Effort(rounds=5, seconds=10), folder / "w.json",
        again=again, device="cpu", scale=False, clock=clock, save=save,
    )  # fmt: skip


def test_all_are_compared_with_float64_and_timed(
    ours: Subject, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ours runs in its portable form here. fla, whose inputs are finished and whose state is the other way round, is held
    to the truth of its own function."""
    install(monkeypatch, "TileGym", "mamba_ssm", "fla")
    document = run(ours, tmp_path)
    rows = {(r.family, r.name): r for r in document.rows}
    assert set(rows) == {
        (OURS, DEFAULT), (OURS, "single_walk"), ("TileGym", "chunk 64"), ("mamba_ssm", "chunk 128"),
        ("mamba_ssm", "chunk 256"), ("fla", "simple_gla"),
    }  # fmt: skip
    for row in rows.values():
        assert row.right, row
        assert 1e-4 < (row.error or 0) < 3e-3
        assert row.graph_us is not None
    assert {r.peer: r.ratio for r in document.ratios} == {"TileGym": 1, "mamba_ssm": 1, "fla": 1}
    assert {m.peer for m in document.means} == {"TileGym", "mamba_ssm", "fla"}


def test_a_wrong_peer_gets_no_speed(ours: Subject, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The right one of its two variants is the peer's; without one there is no ratio."""
    made = install(monkeypatch, "mamba_ssm", "fla")
    made.spoil = lambda peer, y: 1.02 * y if peer in ("mamba_ssm 128", "fla") else y
    document = run(ours, tmp_path, EVERYONE[2:])
    rows = {r.name: r for r in document.rows}
    assert rows["chunk 128"].graph_us is None
    assert {r.peer: (r.peer_name, r.ratio) for r in document.ratios} == {
        "mamba_ssm": ("chunk 256", 1),
        "fla": ("simple_gla", None),
    }


def test_a_peer_that_is_not_here_is_a_note(ours: Subject, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch)
    document = run(ours, tmp_path)
    assert {r.family for r in document.rows} == {OURS}
    for peer in ("TileGym", "mamba_ssm", "fla"):
        (note,) = [n for n in document.notes if n.startswith(peer)]
        assert "pip install tilegym mamba-ssm fla-core" in note


def test_searches_are_recorded_once_and_replayed(
    ours: Subject, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`--search-peers` tries every candidate and writes what won with the versions; the next run tries none."""
    made = install(monkeypatch, "TileGym")
    run(ours, tmp_path, EVERYONE[:1], again=True)
    assert made.searched
    assert set(made.searched) == {2}
    (search,) = read_winners(tmp_path / "w.json", "NVIDIA H200").searches
    assert (search.kernel, search.key, search.winner) == ("chunk_cumsum_kernel", (64, str(SHAPE)), {"occupancy": 4})
    assert {"gpu", "driver", "cuda", "torch", "triton", "cuda_tile"} <= set(search.versions or {})
    assert json.loads((tmp_path / "w.json").read_text())["format"] == 1
    second = install(monkeypatch, "TileGym")
    document = run(ours, tmp_path, EVERYONE[:1])
    assert second.searched == []
    assert document.rows[-1].note == ""


def test_a_chunk_is_measured_only_where_it_was_searched_for(
    ours: Subject, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """TileGym's chunk 128 costs a search of its own, and takes whole chunks alone."""
    install(monkeypatch, "TileGym")
    names = [r.name for r in run(ours, tmp_path, EVERYONE[:2]).rows if r.family == "TileGym"]
    assert names == ["chunk 64"]
    names = [r.name for r in run(ours, tmp_path, EVERYONE[:2], again=True).rows if r.family == "TileGym"]
    assert names == ["chunk 64", "chunk 128"]
    ragged = replace(SHAPE, t=80)
    assert {r.family for r in run(ours, tmp_path, EVERYONE[:2], (ragged,)).rows} == {OURS}


def test_no_shape_is_begun_when_the_time_is_up(ours: Subject, tmp_path: Path) -> None:
    """What was measured before is kept, and saved as it comes."""
    saved: list[Document] = []
    clock = Clock(tick=6.0)
    document = run(ours, tmp_path, [], (SHAPE, replace(SHAPE, t=64)), clock=clock, save=saved.append)
    assert {r.shape for r in document.rows} == {str(SHAPE)}
    assert [len(d.rows) for d in saved] == [2]
    assert document.notes[-1] == f"{replace(SHAPE, t=64)} is not measured: the time was up"


def test_a_plan_that_cannot_be_emitted_is_a_note(ours: Subject) -> None:
    plans = {DEFAULT: {}, "odd": {"no_such_knob": "1"}, "segmented": {"plan": "segmented"}}
    made = subject(ours.mamba2, ours.simple_gla, [], plans)
    assert set(made.folders) == {DEFAULT}
    odd, same = made.notes
    assert odd == "odd is not measured: mamba2 has no knob `no_such_knob`"
    assert same == "segmented is the same module as default"


def test_inputs_are_realistic_and_leave_the_cache(ours: Subject) -> None:
    """Steps between 0.001 and 0.1, A in [-16, -1], nothing zero; the sets together over 2.5 times the cache."""
    layer = ours.mamba2.recurrence.layer
    inputs = draw(layer, case_of(layer, Shape(2, 512, 8, 1, 16, 16), 3)).tensors
    step = torch.nn.functional.softplus(inputs["dt"])
    assert 0.9e-3 < step.min() < 2e-3
    assert 0.05 < step.max() < 0.11
    assert inputs["A"].min() >= -16
    assert inputs["A"].max() <= -1
    assert set(inputs) == {"x", "dt", "A", "B", "C", "D", "dt_bias"}
    assert all((x != 0).float().mean() > 0.99 for x in inputs.values())
    sets = input_sets(layer, SHAPE, "cpu", l2_bytes=40_000)
    size = sum(x.numel() * x.element_size() for x in sets[0].tensors.values())
    assert len(sets) * size > 2.5 * 40_000
    assert not torch.equal(sets[0].tensors["x"], sets[1].tensors["x"])


def test_the_floor_is_that_of_the_module_and_of_the_configuration_it_runs_with(ours: Subject) -> None:
    """What a call is given or chooses itself; the module says itself at which point of the schedule it was emitted."""
    layer, shape = ours.mamba2.recurrence.layer, Shape(1, 4096, 8, 1, 64, 128)
    inputs = draw(layer, case_of(layer, shape, 0))
    whole, walk = (load_module(Path(ours.folders[name]), "mamba2") for name in (DEFAULT, "single_walk"))
    of = floor_of(ours.mamba2, whole, call_of(whole, tuned=False), shape, inputs)
    assert of.compulsory == shape.compulsory_bytes < of.bytes < 3 * of.compulsory
    assert "segment_states" in {k.kernel for k in of.kernels}
    other = floor_of(ours.mamba2, walk, call_of(walk, tuned=True), shape, inputs)
    assert "segment_states" not in {k.kernel for k in other.kernels}
    assert config_of(walk, call_of(walk, tuned=False), inputs).chunk == 128
    given = replace(whole.CONFIGS[torch.bfloat16], chunk=32)
    assert config_of(whole, lambda i: whole.forward(**i.keywords(), config=given), inputs) == given


def test_what_fla_is_given_is_the_same_recurrence(ours: Subject) -> None:
    """With D = 0, Mamba-2 of the inputs is gated linear attention of what is made of them, but for rounding x dt."""
    layer = ours.mamba2.recurrence.layer
    tensors = dict(draw(layer, case_of(layer, SHAPE, 0)).tensors)
    y, S = standins.truth("mamba2", {**tensors, "D": torch.zeros_like(tensors["D"])})
    q, k, v, g = gla_inputs(Inputs(tensors, {}, {}))
    y_gla, S_gla = standins.truth("simple_gla", {"q": q, "k": k, "v": v, "g": g})
    assert relative_error(y_gla * math.sqrt(SHAPE.n), y) < 3e-3
    assert relative_error(S_gla, S) < 3e-3


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls that only a GPU takes do nothing but say that they were made; inputs are drawn on the CPU."""
    said: list[str] = []
    monkeypatch.setattr("ssdgen.run.inputs.draw", lambda layer, case, *devices: draw(layer, case))
    for name in ("synchronize", "empty_cache", "profiler.start", "profiler.stop"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda name=name: said.append(name))
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **named: zeros(*size, **named))
    return said


def test_a_worker_calls_what_a_run_will(
    ours: Subject, on_the_cpu: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ours as it was emitted, a peer with its part of the candidates."""
    made = install(monkeypatch, "TileGym")
    setting = ours.setting(tmp_path / "w.json", "NVIDIA H200", True)
    warm._do(warm.Job(OURS, ours.folders[DEFAULT], str(SHAPE)), setting)
    warm._do(warm.Job(OURS, ours.folders["single_walk"], str(SHAPE), tuned=False), setting)
    warm._do(warm.Job("TileGym", "chunk 64", str(SHAPE), part=(0, 2)), setting)
    assert made.searched == [1]
    assert on_the_cpu.count("synchronize") == 3
    with pytest.raises(ImportError):
        warm._do(warm.Job("fla", "simple_gla", str(SHAPE)), setting)


def test_the_profiler_looks_at_one_call_each(ours: Subject, on_the_cpu: list[str]) -> None:
    conflicts.calls(json.dumps([[str(SHAPE), folder] for folder in ours.folders.values()]))
    assert [s for s in on_the_cpu if s.startswith("profiler")] == ["profiler.start", "profiler.stop"] * 2
