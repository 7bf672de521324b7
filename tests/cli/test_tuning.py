"""`ssdgen tune` and `ssdgen warm` as far as a machine without a GPU goes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ssdgen.build.store import cache_folder
from ssdgen.emit.support._tuned import parse
from ssdgen.run.tune import remote
from tests.cli.conftest import Command
from tests.models.folders import SMALL, config_json
from tests.run.tune.fake import only_tiles_by_rule

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def test_a_dry_run_shows_the_space_and_the_pruning(ssdgen: Command) -> None:
    result = ssdgen("tune", "mamba2", "--shape", "b=4,t=16384,h=8", "--dry-run")
    assert result.code == 0, result.err
    for words in (
        "structural plan",
        "numeric    chunk",
        "points",
        "worth measuring",
        "computes padding",
        "us by the model",
    ):
        assert words in result.out


def test_a_dry_run_for_programs(ssdgen: Command) -> None:
    shapes = ("--shape", "b=4,t=16384,h=8", "--shape", "b=1,t=2048,h=64,g=8,n=64")
    result = ssdgen("tune", "mamba2", *shapes, "--dry-run", "--json", "--optional", "z", "--dtype", "f32")
    data = json.loads(result.out)
    assert [d["sizes"]["n"] for d in data] == [128, 64]
    assert all(len(d["candidates"]) + len(d["removed"]) == d["considered"] for d in data)


def test_only_some_fields(ssdgen: Command) -> None:
    shape = ("--shape", "b=4,t=16384,h=8")
    (data,) = json.loads(ssdgen("tune", "mamba2", *shape, "--dry-run", "--json", "--fields", "latency, chunk").out)
    assert data["structural"] == {}
    assert set(data["numeric"]) == {"latency_x", "latency_B", "latency_C", "latency_S", "latency_scores", "chunk"}
    assert data["points"] == 7**5 * 3


def test_a_dry_run_of_gradients(ssdgen: Command) -> None:
    shape = ("--shape", "b=4,t=4096,h=8", "--dry-run", "--json", "--fields", "segments,shares")
    (data,) = json.loads(ssdgen("tune", "mamba2", "--gradients", *shape).out)
    assert data["structural"] == {}
    assert set(data["numeric"]) == {"segments", "shares"}
    assert data["candidates"][0]["candidate"] == "default"


@no_gpu
def test_without_a_gpu_there_is_a_way_to_look(ssdgen: Command) -> None:
    result = ssdgen("tune", "mamba2", "--shape", "b=4,t=16384,h=8")
    assert result.code == 1
    assert "there is no CUDA device here to measure on" in result.err
    assert "--dry-run" in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--shape is missing"),
        (("--shape", "4,16384"), "is not AXIS=N"),
        (("--shape", "b=4,b=5"), "gives b twice"),
        (("--shape", "b=4,t=-1"), "is not AXIS=N"),
        (("--shape", "b=4,t=16,h=8,w=2"), "has no axis `w`"),
        (("--shape", "b=4,t=16,h=8", "--optional", "w"), "has no optional input `w`"),
        (("--shape", "b=4,t=16,h=8", "--dtype", "f64"), "--dtype knows no `f64`"),
        (("--shape", "b=4,t=16,h=8", "--fields", "latencies"), "mamba2 has no knob `latencies` to search"),
    ],
)
def test_mistakes_are_told(ssdgen: Command, arguments: tuple[str, ...], message: str) -> None:
    result = ssdgen("tune", "mamba2", "--dry-run", *arguments)
    assert result.code == 1
    assert message in result.err
    assert "Traceback" not in result.err


def test_a_spec_has_no_kernels_to_warm(ssdgen: Command) -> None:
    result = ssdgen("warm", "specs/mamba2.ssd")
    assert result.code == 1
    assert "ssdgen generate specs/mamba2.ssd -o DIR, then ssdgen warm DIR/mamba2.py" in result.err


def test_a_checkpoint_is_warmed_as_a_model(ssdgen: Command) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(config_json(SMALL, "state-spaces")))
    for arguments, message in (
        (("--shape", "h=8"), "a model has no axis `h` of length 8"),
        (("--also", "steps"), "model is a model, of which nothing else is compiled"),
        ((), "there is no GPU here to warm the cache for"),
    ):
        result = ssdgen("warm", "model", *arguments)
        assert result.code == 1
        assert message in result.err


class Compiler:
    """Compiles nothing, at once."""

    started = 0

    def __init__(self, arch: str, *rest: object) -> None:
        assert arch == "sm_90"
        Compiler.started += 1

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def compiled(self, wanted: Sequence[Any], go_on: Any = None) -> Iterator[tuple[int, tuple[Any, ...]]]:
        yield from ((place, ()) for place in range(len(wanted)))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the GPU and the compiler: the measuring process answers from a formula."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys.modules["ssdgen.run.tune.tune"], "Compiler", Compiler)
    start = "import sys; sys.path[:] = sys.argv[1:]; from tests.run.tune.fake import main; main()"
    monkeypatch.setattr(remote, "START", start)
    only_tiles_by_rule(monkeypatch)


@pytest.mark.usefixtures("gpu")
def test_a_search_ends_with_a_table(ssdgen: Command) -> None:
    shape = "b=4,t=16384,h=8"
    result = ssdgen("tune", "mamba2", "--shape", shape, "--numeric-only", "--to", "tuned_here.json")
    assert result.code == 0, result.err
    assert "the search is complete" in result.out
    first = next(line for line in result.out.splitlines() if "chunk=128" in line)
    assert first.split()[:3] == ["80.0", "0.5", "80%"]
    assert "without a table: 100.0 us, 125% of the fastest" in result.out
    assert "killed by SIGKILL" in result.out
    assert "wrong result" in result.out
    (entry,) = parse(Path("tuned_here.json").read_text())
    assert entry.config["chunk"] == 128
    assert entry.key.gpu == "NVIDIA H200"
    assert entry.key.dtypes == ("bfloat16", "float32")


@pytest.mark.usefixtures("gpu")
def test_a_search_for_programs_goes_to_the_users_table(ssdgen: Command) -> None:
    shapes = ("--shape", "b=4,t=16384,h=8", "--shape", "b=4,t=2048,h=8")
    (first, second) = json.loads(ssdgen("tune", "mamba2", *shapes, "--numeric-only", "--json").out)
    assert first["best"]["timed"]["microseconds"] == 80.0
    assert {m["candidate"] for m in first["measured"]} >= {"default", "chunk=128"}
    assert any(r["step"] == "ends its process" for r in second["removed"])
    table = Path(first["table"])
    assert table.parent == cache_folder()
    assert len(parse(table.read_text())) == 2


@pytest.mark.usefixtures("gpu")
def test_little_time_goes_to_the_module_that_is_shipped(ssdgen: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a shipped table: several shapes in one go share the processes, and no other module is looked at."""
    monkeypatch.setattr(Compiler, "started", 0)
    shapes = ("--shape", "b=4,t=16384,h=8", "--shape", "b=4,t=2048,h=8", "--shape", "b=4,t=2048,h=8,p=32")
    results = json.loads(ssdgen("tune", "mamba2", *shapes, "--seconds", "12", "--json").out)
    assert Compiler.started == 1
    for r in results:
        candidates = {m["candidate"] for m in r["measured"]}
        assert {"default", "segments=2", "latency_x=5"} <= candidates
        assert not any("plan=" in c or "swap=" in c for c in candidates)
    assert results[-1]["heuristic"]["candidate"] == "state_tile_p=32 tile_p=32"
    asked = ("--fields", "plan,latency_x", "--seconds", "12", "--json")
    (result,) = json.loads(ssdgen("tune", "mamba2", *shapes[:2], *asked).out)
    assert "plan=single_walk" in {m["candidate"] for m in result["measured"]}, "it was asked for"


@no_gpu
def test_a_cache_is_warmed_for_a_gpu_that_is_named(ssdgen: Command) -> None:
    """Without a GPU nobody knows which one the deployment has."""
    assert ssdgen("generate", "retnet", "-o", "out").code == 0
    result = ssdgen("warm", "out/retnet.py", "--shape", "b=1,t=64,h=2")
    assert result.code == 1
    assert "there is no GPU here to warm the cache for" in result.err
    assert "--arch sm_90" in result.err
