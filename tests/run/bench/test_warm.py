"""Compiling in parallel: which calls are made, and that one that kills its process costs only itself."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from cutile_cache._cache import cache_lookup, cache_store

from ssdgen.run.bench.forward import Subject
from ssdgen.run.bench.rows import OURS
from ssdgen.run.bench.shapes import SHAPES, Shape
from ssdgen.run.bench.tile_cache import merge
from ssdgen.run.bench.warm import BYTES_AT_MOST, Job, Setting, _do, our_jobs, peer_jobs, short, warm, work
from tests.run.bench.standins import install

SETTING = Setting({}, "", "gpu", again=False)
WORKER = """
import json, os, sys, time
for line in sys.stdin:
    name = json.loads(line)["job"]["name"]
    if name == "dies": os._exit(3)
    if name == "hangs": time.sleep(60)
    print("noise")
    print("ANSWER " + ("" if name == "good" else "ValueError: " + name), flush=True)
"""


def done(names: list[str], workers: int = 2, seconds: float = 20.0) -> tuple[list[str], int]:
    count = [0]
    jobs = [Job(OURS, name, "1,1,1,1,1,1") for name in names]
    problems = warm(
        jobs, SETTING, workers, seconds, lambda i, what: count.__setitem__(0, i), (sys.executable, "-c", WORKER)
    )
    return problems, count[0]


def test_all_jobs_are_done() -> None:
    assert done(["good"] * 7) == ([], 7)
    assert done([]) == ([], 0)


def test_a_job_that_fails_or_dies_costs_itself() -> None:
    problems, count = done(["good", "dies", "bad", "good", "dies", "good"], workers=1)
    assert count == 6
    assert [p.partition(": ")[2] for p in problems] == [
        "its process ended with exit code 3", "ValueError: bad", "its process ended with exit code 3",
    ]  # fmt: skip


def test_what_takes_too_long_is_left() -> None:
    problems, count = done(["good", "hangs"], seconds=3.0)
    assert count <= 2
    assert "not all was compiled in 3 s" in problems[-1]


def test_a_worker_answers_each_job() -> None:
    def do(job: Job, setting: Setting) -> None:
        assert setting == SETTING
        assert job.part in ((1, 3), None)
        if job.name == "bad":
            raise RuntimeError("no\nkernel")

    jobs = [Job("TileGym", "chunk 64", "1,1,1,1,1,1", part=(1, 3)), Job(OURS, "bad", "1,1,1,1,1,1")]
    requests = io.StringIO("".join(json.dumps({"job": asdict(j), "setting": asdict(SETTING)}) + "\n" for j in jobs))
    answers = io.StringIO()
    work(requests, answers, do)
    lines = [line for line in answers.getvalue().splitlines() if line]
    assert lines == ["ANSWER ", "ANSWER RuntimeError: no kernel"]


FILLER = """
import json, os, sys
from cutile_cache._cache import cache_store, cache_lookup
folder = os.environ["CUDA_TILE_CACHE_DIR"]
for line in sys.stdin:
    name = json.loads(line)["job"]["name"]
    assert cache_lookup(folder, "known") == b"old"
    cache_store(folder, name, name.encode())
    print("ANSWER ", flush=True)
"""


def test_a_job_of_the_forward_pass_calls_what_it_names_once(
    ours: Subject, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A part of a search tries its candidates alone; a shape that a peer does not take is none of its calls."""
    made = install(monkeypatch, "TileGym")
    setting = ours.setting(tmp_path / "w.json", "gpu", again=True)
    job = Job("TileGym", "chunk 64", "1,64,2,1,16,16", part=(1, 2))
    _do(job, setting, "cpu")
    assert made.searched == [1]
    _do(replace(job, shape="1,80,2,1,16,16"), setting, "cpu")
    assert made.searched == [1]


def test_what_workers_compile_is_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda.tile deletes a cache that many write at once: each worker has a copy of it, and starts with what was known."""
    monkeypatch.setenv("CUDA_TILE_CACHE_DIR", str(tmp_path))
    cache_store(str(tmp_path), "known", b"old")
    jobs = [Job(OURS, f"kernel {i}", "1,1,1,1,1,1") for i in range(8)]
    problems = warm(jobs, SETTING, 3, 20.0, lambda i, what: None, (sys.executable, "-c", FILLER))
    assert problems == []
    found = {job.name: cache_lookup(str(tmp_path), job.name) for job in jobs}
    assert found == {job.name: job.name.encode() for job in jobs}
    assert cache_lookup(str(tmp_path), "known") == b"old"


def test_a_first_cache_is_made_and_a_broken_one_left_out(tmp_path: Path) -> None:
    a, b, into = (tmp_path / name for name in ("a", "b", "into"))
    cache_store(str(a), "x", b"1")
    b.mkdir()
    (b / "cache.db").write_text("no database, and long enough to be taken for one: " + "x" * 200)
    merge([a, b, tmp_path / "none"], into)
    assert cache_lookup(str(into), "x") == b"1"


def test_peers_compile_once_for_shapes_of_a_class() -> None:
    """Lengths are 1, multiples of 16, or others; a state size is a constant. TileGym has a winner for each shape, unless it
    searches: then it compiles all candidates, in parts.
    """
    longer = replace(SHAPES[0], t=32768)
    jobs = peer_jobs([SHAPES[0], longer, SHAPES[2]], [("TileGym", "chunk 64"), ("fla", "simple_gla")])
    assert [(j.family, j.shape) for j in jobs] == [
        ("TileGym", str(SHAPES[0])), ("TileGym", str(longer)), ("TileGym", str(SHAPES[2])),
        ("fla", str(SHAPES[0])), ("fla", str(SHAPES[2])),
    ]  # fmt: skip
    parts = peer_jobs([SHAPES[0], longer], [("TileGym", "chunk 64"), ("fla", "simple_gla")], parts=3)
    assert [j.part for j in parts] == [(0, 3), (1, 3), (2, 3), None]


def test_ours_is_called_at_every_shape_new_classes_first() -> None:
    """How many segments a plan cuts may depend on the very shape."""
    longer = replace(SHAPES[0], t=32768)
    jobs = our_jobs([SHAPES[0], longer, SHAPES[2]], ["a"], tuned=False)
    assert [j.shape for j in jobs] == [str(SHAPES[0]), str(SHAPES[2]), str(longer)]


def test_long_sequences_are_cut_for_many_at_once() -> None:
    assert short(SHAPES[0]) == SHAPES[0]
    cut = short(SHAPES[6])
    assert cut.compulsory_bytes <= BYTES_AT_MOST
    assert SHAPES[6].t % cut.t == 0
    odd = Shape(1, 131071, 64, 8, 64, 128)
    assert short(odd) == odd
