"""`ssdgen bench model` where there is no GPU: its parts, what it prints, and what a part that fails costs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ssdgen.models import bench
from ssdgen.models.bench import Figure, OnGpu, measured, on_the_cpu
from ssdgen.run.bench.rows import Spread
from tests.cli.conftest import Command, ssdgen
from tests.models.folders import SMALL
from tests.run.bench import made

__all__ = ["ssdgen"]

TINY = replace(SMALL, tied=True)


def test_the_cpu_beside_transformers() -> None:
    pytest.importorskip("transformers")
    figures = list(on_the_cpu("tiny", 1, TINY, 40))
    assert [f.unit for f in figures] == ["ms", "ms", "times"] * 2
    assert all(f.value is not None and f.value.median > 0 for f in figures)


def test_a_part_that_fails_or_comes_too_late_is_a_line() -> None:
    """The others go on; what was measured before it failed is kept."""
    times = iter([0.0, 1.0, 2.0, 3.0, 11.0])

    def good() -> Iterator[Figure]:
        yield Figure("m", "good", "x", Spread(1.0, 1.0, 1.0), "ms")

    def bad() -> Iterator[Figure]:
        yield from good()
        raise RuntimeError("CUDA out of memory")

    def absent() -> Iterator[Figure]:
        raise ModuleNotFoundError("No module named 'jax'")
        yield

    parts = [("m", "good", good), ("m", "bad", bad), ("m", "absent", absent), ("m", "late", good)]
    figures = measured(parts, 10.0, clock=lambda: next(times))
    assert [f.value is None for f in figures] == [False, False, True, True, True]
    assert figures[2].note == "RuntimeError: CUDA out of memory"
    assert figures[3].note == "not here: ModuleNotFoundError: No module named 'jax'"
    assert [f.failed for f in figures] == [False, False, True, False, False]
    assert figures[4].note == "not measured: the time was up"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        bench, "on_the_cpu", lambda rounds: iter([Figure("130m", "cpu", "a token, ours", Spread(5.0, 4.0, 6.0), "ms")])
    )


@pytest.mark.usefixtures("quick")
def test_without_a_gpu_it_measures_the_cpu(ssdgen: Command) -> None:
    shown = ssdgen("bench", "model")
    assert shown.code == 0
    assert "a token, ours" in shown.out
    assert "note: there is no GPU here: only the CPU is measured" in shown.out
    told = json.loads(ssdgen("bench", "model", "--json", "--out", "here").out)
    assert told == json.loads(Path("here/model.json").read_text())
    assert told["figures"][0]["value"] == {"median": 5.0, "p10": 4.0, "p90": 6.0}


@pytest.mark.usefixtures("quick")
def test_what_fails_is_an_exit_code(ssdgen: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "on_the_cpu", lambda rounds: 1 / 0)
    got = ssdgen("bench", "model")
    assert got.code == 1
    assert "1 parts failed; the first: 130m cpu: ZeroDivisionError" in got.err
    assert ssdgen("bench", "model", "--size", "9b").code == 1
    nothing = ssdgen("bench", "model", "--no-cpu")
    assert (nothing.code, "leaves nothing to measure" in nothing.err) == (1, True)


def test_the_parts_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they compute, on the CPU: clocks, graphs and the memory of a GPU are stood in for."""

    def timed(call: Callable[[], object]) -> Callable[[], float]:
        call()
        return lambda: 5.0

    for name in ("_captured", "_launched"):
        monkeypatch.setattr(bench, name, timed)
    for name, value in {"CONTEXTS": (20, 40), "MADE": 4, "EAGER": 3, "PREFILL": 30, "BATCHES": (1, 2)}.items():
        monkeypatch.setattr(bench, name, value)
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2**21)
    subject = OnGpu("tiny", TINY, 2, "cpu")
    parts = (subject.decode, subject.prefill, subject.pieces, subject.waits_for_nothing, subject.memory)
    figures = measured([("tiny", part.__name__, part) for part in parts], 60.0)
    assert not [f.note for f in figures if f.failed]
    assert modes == ["error", "default"] * 2
    values = {(f.part, f.name, f.unit): f.value.median for f in figures if f.value is not None}
    assert len(values) == len(figures) == 20
    assert values["memory", "40 tokens over 20", "bytes"] == 0
    assert values["pieces", "state", "us a layer"] == 2.5
    assert values["prefill", "30 tokens, launched", "TFLOP/s"] == pytest.approx(2e-6 * TINY.parameters * 30 / 5)


@pytest.mark.usefixtures("quick")
def test_on_a_gpu_it_says_which(ssdgen: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of the sizes that are asked for, and the machine, its paths aside."""
    monkeypatch.setattr(
        "ssdgen.models.place.gpu_environment", lambda command: replace(made.ENVIRONMENT, command=command)
    )
    part = ("130m", "decode", lambda: [Figure("130m", "decode", "batch 1", Spread(3000.0, 2900.0, 3100.0), "tokens/s")])
    asked: list[object] = []
    monkeypatch.setattr(bench, "gpu_parts", lambda *arguments: asked.append(arguments) or [part])
    shown = ssdgen("bench", "model", "--size", "130m,2.7b", "--no-peers", "--no-cpu")
    assert asked == [(("130m", "2.7b"), 5, False)]
    assert made.ENVIRONMENT.gpu in shown.out
    assert "tokens/s" in shown.out
    assert "a token, ours" not in shown.out


def test_through_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two figures of each row; one that was not measured says why."""
    rows = [
        SimpleNamespace(model="ssdgen", mode="bf16", tflops=269.0, tokens_per_second=319.0, note=""),
        SimpleNamespace(model="mamba2-jax", mode="default", tflops=None, tokens_per_second=None, note="not installed"),
    ]
    asked: list[object] = []
    stand_in = SimpleNamespace(measured_apart=lambda *arguments: asked.append(arguments) or rows)
    monkeypatch.setitem(sys.modules, "ssdgen.models.bench_jax", stand_in)
    figures = list(bench.through_xla("2.7b", 2.0))
    assert asked == [("2.7b", ("default", "bf16"), 2.0)]
    assert [(f.name.partition(":")[0], f.value and f.value.median, f.note) for f in figures] == [
        ("ssdgen, bf16", 269.0, ""),
        ("ssdgen, bf16", 319.0, ""),
        ("mamba2-jax, float32", None, "not installed"),
        ("mamba2-jax, float32", None, "not installed"),
    ]


def test_every_size_has_a_row_before_one_has_all() -> None:
    """Where the time ends a run early, what is aimed at has been measured of each."""
    parts = [(name, part) for name, part, _ in bench.gpu_parts(["130m", "2.7b"], 1)]
    aims = [(name, part) for name in ("130m", "2.7b") for part in ("decode", "prefill")]
    assert parts[:4] == aims
    assert parts[-4:] == [(name, part) for part in ("xla", "transformers") for name in ("130m", "2.7b")]
    assert len(parts) == len(set(parts)) == 14
