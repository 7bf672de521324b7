"""Compiling before the backward pass is timed: which jobs there are, what each calls, and what becomes of one that fails.

Kernels of peers are stood in for by functions that note their calls; ours run in the emulator.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ssdgen import pipeline
from ssdgen.run.bench import backward as study
from ssdgen.run.bench import warm
from ssdgen.run.bench.forward import Effort
from ssdgen.run.bench.others import MAMBA_SSM
from ssdgen.run.bench.ours import differentiable_module
from ssdgen.run.bench.rows import OURS, Document
from ssdgen.run.bench.searches import TILEGYM, PartSearch, part_of, search_part
from ssdgen.run.bench.shapes import SHAPES, Shape
from ssdgen.run.bench.warm import Job, Setting
from ssdgen.run.verify import running
from tests.run.bench.fakes import FakeMeter
from tests.run.bench.made import ENVIRONMENT

SHAPE = Shape(2, 128, 4, 2, 32, 32)
SPACES = {"state": 5, "chunk": 3, "sum": 1}
"""The candidates of each kernel that the stand-in for TileGym's backward pass searches among."""
Calls = list[tuple[str, int, int]]
"""What was called, with how many tokens and with which chunk."""


@pytest.fixture(scope="module")
def module(cache: None) -> ModuleType:
    form, _ = pipeline.derive("mamba2")
    return differentiable_module(pipeline.emit(pipeline.plan(form, {})))


@pytest.fixture
def setting(module: ModuleType) -> Setting:
    return Setting({"mamba2": folder(module)}, "", "gpu", again=False)


def folder(module: ModuleType) -> str:
    return str(Path(str(module.__file__)).parent)


def mamba_ssm(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls: Calls = []
    kernels: Any = ModuleType("mamba_ssm.ops.triton.ssd_combined")

    def forward(x: Any, dt: Any, A: Any, B: Any, C: Any, chunk: int, **named: Any) -> tuple[Any, ...]:
        calls.append(("forward", x.shape[1], chunk))
        return x, None, None, None, None, dt

    def backward(dy: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, y: Any, chunk: int, **named: Any) -> tuple[Any, ...]:
        assert y is x
        calls.append(("backward", x.shape[1], chunk))
        return x, dt, A, B, C, named["D"], None

    kernels._mamba_chunk_scan_combined_fwd, kernels._mamba_chunk_scan_combined_bwd = forward, backward
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    return calls


def tilegym(monkeypatch: pytest.MonkeyPatch) -> tuple[Calls, dict[str, list[int]]]:
    """Its calls, and the candidates that each kernel has tried. Like TileGym it searches once for a shape."""
    calls: Calls = []
    tried: dict[str, list[int]] = {name: [] for name in SPACES}
    kernels: Any = ModuleType("tilegym.ops.cutile.mamba2")

    def search(configs: list[int], kernel: str) -> Any:
        tried[kernel] += configs
        return SimpleNamespace(best=SimpleNamespace(config=configs[0]))

    def forward(x: Any, a: Any, b: Any, c: Any, d: Any, dt: Any, start: Any, chunk_size: int) -> tuple[Any, ...]:
        calls.append(("forward", x.shape[1], chunk_size))
        return x, start

    def backward(x: Any, a: Any, b: Any, c: Any, d: Any, dt: Any, *rest: Any, chunk_size: int) -> tuple[Any, ...]:
        calls.append(("backward", x.shape[1], chunk_size))
        for name, count in SPACES.items():
            if (name, x.shape) not in kernels._state_tune_cache:
                kernels._state_tune_cache[name, x.shape] = kernels.exhaustive_search(range(count), name).best.config
        return x, a, b, c, d, dt, None

    kernels._state_tune_cache = {}
    kernels.exhaustive_search, kernels.mamba2_chunk_forward, kernels.mamba2_chunk_backward = search, forward, backward
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    return calls, tried


def test_jobs_are_made_once_for_what_is_compiled_alike() -> None:
    """mamba_ssm's chunks each for a class of shapes, TileGym for a class and the heads of a group too, ours at every shape."""
    first, longer, wider = SHAPES[0], replace(SHAPES[0], t=32768), SHAPES[4]
    jobs = study.jobs_of("ours", [first, longer, wider], study.VARIANTS, workers=1)
    assert {j.direction for j in jobs} == {"backward"}
    assert [(j.family, j.name, j.shape, j.part) for j in jobs] == [
        (MAMBA_SSM, "chunk 128", str(first), None), (MAMBA_SSM, "chunk 256", str(first), None),
        (TILEGYM, "chunk 64", str(first), None), (TILEGYM, "chunk 64", str(wider), None),
        (OURS, "ours", str(first), None), (OURS, "ours", str(longer), None), (OURS, "ours", str(wider), None),
    ]  # fmt: skip


def test_parts_share_the_workers() -> None:
    def parts(shapes: list[Shape], workers: int) -> list[tuple[str, tuple[int, int] | None]]:
        jobs = study.jobs_of("ours", shapes, study.VARIANTS, workers)
        return [(j.shape, j.part) for j in jobs if j.family == TILEGYM]

    first, wider = str(SHAPES[0]), str(SHAPES[4])
    assert parts([SHAPES[0]], 3) == [(first, (0, 3)), (first, (1, 3)), (first, (2, 3))]
    assert parts([SHAPES[0], SHAPES[4]], 5) == [(shape, (i, 2)) for shape in (first, wider) for i in range(2)]


def test_only_peers_that_are_measured_have_jobs() -> None:
    ragged = replace(SHAPES[0], t=16400)
    assert {j.family for j in study.jobs_of("ours", [SHAPES[0]], (), 4)} == {OURS}
    assert TILEGYM not in {j.family for j in study.jobs_of("ours", [ragged], study.VARIANTS, 4)}
    stands_for_both = study.jobs_of("ours", [ragged, SHAPES[0]], study.VARIANTS, 1)
    assert [j.shape for j in stands_for_both if j.family == TILEGYM] == [str(SHAPES[0])]


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_parts_cover_every_candidate_once(
    module: ModuleType, setting: Setting, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """In one process too, where TileGym remembers what it has searched for. A part that is left with none tries the first."""
    calls, tried = tilegym(monkeypatch)
    for i in range(count):
        warm._do(Job(TILEGYM, "chunk 64", str(SHAPE), part=(i, count), direction="backward"), setting, "cpu")
    assert calls == [("forward", 128, 64), ("backward", 128, 64)] * count
    for name, size in SPACES.items():
        assert sorted(tried[name]) == sorted([*range(size), *[0] * (count - size)]), name


def test_a_part_does_not_divide_a_part() -> None:
    kernels: Any = SimpleNamespace(exhaustive_search=lambda configs: configs)
    search_part(kernels, (0, 2))
    search_part(kernels, (1, 2))
    assert isinstance(kernels.exhaustive_search, PartSearch)
    assert kernels.exhaustive_search(range(5)) == [1, 3] == part_of(list(range(5)), (1, 2))


def test_a_job_calls_both_passes_once(module: ModuleType, setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a long sequence cut."""
    calls = mamba_ssm(monkeypatch)
    job = Job(MAMBA_SSM, "chunk 128", str(SHAPE), direction="backward")
    warm._do(job, setting, "cpu")
    assert calls == [("forward", 128, 128), ("backward", 128, 128)]
    calls.clear()
    monkeypatch.setattr(warm, "BYTES_AT_MOST", SHAPE.compulsory_bytes - 1)
    warm._do(replace(job, name="chunk 256"), setting, "cpu")
    assert calls == [("forward", 64, 256), ("backward", 64, 256)]


def test_what_is_cut_to_no_whole_chunk_is_not_called(
    module: ModuleType, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, _ = tilegym(monkeypatch)
    monkeypatch.setattr(warm, "BYTES_AT_MOST", 1)
    warm._do(Job(TILEGYM, "chunk 64", str(SHAPE), direction="backward"), setting, "cpu")
    assert calls == []


def test_ours_is_called_once(module: ModuleType, setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module of the job's folder, and that of its gradients."""
    gradients: Any = importlib.import_module(f"{module.__name__}_gradients")
    real, called = gradients.GRADIENTS, []

    class Counted:
        keeps = real.keeps

        def __call__(self, *arguments: Any, **kept: Any) -> Any:
            called.append("backward")
            return real(*arguments, **kept)

    def keeping(*arguments: Any, passed: Callable[..., Any] = module.OPERATOR.keeping) -> Any:
        called.append("forward")
        return passed(*arguments)

    monkeypatch.setattr(gradients, "GRADIENTS", Counted())
    monkeypatch.setattr(module.OPERATOR, "keeping", keeping)
    job = Job(OURS, folder(module), str(SHAPE), direction="backward")
    running("emulation", module)(lambda: warm._do(job, setting, "cpu"))
    assert called == ["forward", "backward"]


WORKER = """
import json, os, sys
for line in sys.stdin:
    job = json.loads(line)["job"]
    assert job["direction"] == "backward"
    if job["name"] == "chunk 256": os._exit(3)
    print("ANSWER " + ("ValueError: no kernel" if job["family"] == "TileGym" else ""), flush=True)
"""


def run(module: ModuleType, monkeypatch: pytest.MonkeyPatch, device: str) -> tuple[Document, list[str]]:
    """A run whose workers are stood in for; its document, and the shapes that are measured, once a pass."""
    measured: list[str] = []

    def measure(shape: Shape, contenders: list[Any], *rest: Any, **named: Any) -> list[Any]:
        measured.append(f"{shape} {named['axis']} {len(contenders)}")
        return []

    layer, input_sets = pipeline.derive("mamba2")[0].recurrence.layer, study.input_sets
    monkeypatch.setattr(study, "warm", partial(warm.warm, command=(sys.executable, "-c", WORKER)))
    monkeypatch.setattr(study, "measure", measure)
    monkeypatch.setattr(study, "input_sets", lambda layer, shape, device, l2: input_sets(layer, shape, "cpu", 1))
    shapes, effort = (SHAPE, replace(SHAPE, t=192)), Effort(5, 60.0, workers=2)
    document = study.backward(module, layer, shapes, FakeMeter(), ENVIRONMENT, effort, device=device)
    return document, measured


def test_a_job_that_fails_is_a_note_and_the_run_goes_on(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    mamba_ssm(monkeypatch)
    tilegym(monkeypatch)
    document, measured = run(module, monkeypatch, "cuda")
    assert sorted(document.notes) == [
        f"TileGym chunk 64 at {SHAPE}: ValueError: no kernel",
        f"mamba_ssm chunk 256 at {SHAPE}: its process ended with exit code 3",
    ]
    assert measured == [f"{shape} {what} 4" for shape in (SHAPE, replace(SHAPE, t=192)) for what in study.PASSES]


def test_a_peer_that_is_not_here_is_one_note_and_no_job(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    mamba_ssm(monkeypatch)
    for name in ("tilegym.ops.cutile.mamba2", "peers"):
        monkeypatch.setitem(sys.modules, name, None)
    document, measured = run(module, monkeypatch, "cuda")
    assert [n.partition(" (")[0] for n in document.notes if n.startswith(TILEGYM)] == ["TileGym is not here"]
    assert measured[0] == f"{SHAPE} {study.ALONE} 3"


def test_nothing_is_compiled_first_on_the_cpu(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    mamba_ssm(monkeypatch)
    tilegym(monkeypatch)
    document, measured = run(module, monkeypatch, "cpu")
    assert document.notes == ()
    assert len(measured) == 4


def test_what_a_peer_searched_for_serves_both_passes(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """TileGym without its package is a new module each time it is loaded, which has searched for nothing."""
    tilegym(monkeypatch)
    kernels, loads = sys.modules["tilegym.ops.cutile.mamba2"], []
    monkeypatch.setattr(study, "tilegym_kernels", lambda quick: loads.append(quick) or kernels)
    peers, given = study.Peers(module), study.Given({})
    for what in study.PASSES:
        peers.contender(SHAPE, study.VARIANTS[0], given, what)
    assert loads == [True]
