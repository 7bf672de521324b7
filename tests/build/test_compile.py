"""Real compiles of small kernels, without a GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ssdgen.build.compile import Result, build
from ssdgen.build.pool import Pool
from ssdgen.build.store import write_cubins
from ssdgen.build.worker import Compiled
from ssdgen.ir.build import Build, CompiledKernel, CompileFailure, CompileRequest
from tests.build.requests import EMITTED, arrays, request

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="cuda-tile is for Linux")

REQUESTS = {
    "hopper": request("gram", "sm_90"),
    "ampere": request("gram", "sm_80"),
    "blackwell": request("gram", "sm_100"),
    "hinted": request("scale", hints=(("occupancy", 2),)),
    "crowded": request("gram", "sm_80", hints=(("occupancy", 8),)),
    "twin": request("gram", "sm_90", label="the same again"),
    "narrows": request("narrows"),
    "calls_wrong": request("calls_wrong"),
    "unmarked": request("unmarked"),
    "too_big": request("too_big"),
    "missing": request("nowhere"),
    "not a kernel": request("dot"),
    "renamed": CompileRequest(str(EMITTED / "small.py"), "gram", arrays("x", "z"), (), "sm_90"),
    "bad hint": request("scale", hints=(("occupancy", 99),)),
    "old": request("gram", "sm_75"),
    "no file": request("gram", module=EMITTED / "gone.py"),
    "raises": request("gram", module=EMITTED / "raises.py"),
    "dies": request("gram", module=EMITTED / "dies.py"),
}


@pytest.fixture(scope="module")
def seen() -> list[tuple[str, int, int]]:
    """What the progress callback was told: label of the request, done, total."""
    return []


@pytest.fixture(scope="module")
def built(seen: list[tuple[str, int, int]]) -> Build:
    def progress(result: Result, done: int, total: int) -> None:
        seen.append((str(result.request), done, total))

    return build(list(REQUESTS.values()), jobs=2, progress=progress)


@pytest.fixture(scope="module")
def results(built: Build) -> dict[str, Result]:
    return dict(zip(REQUESTS, built.results, strict=True))


def compiled(result: Result) -> CompiledKernel:
    assert isinstance(result, CompiledKernel), str(result)
    return result


def failed(result: Result) -> CompileFailure:
    assert isinstance(result, CompileFailure)
    return result


def test_results_answer_the_requests_in_their_order(built: Build) -> None:
    assert [r.request for r in built.results] == list(REQUESTS.values())
    assert built.notes == ()


def test_a_product_uses_the_tensor_cores_of_its_architecture(results: dict[str, Result]) -> None:
    kinds = {name: compiled(results[name]).resources.mma[0][0] for name in ("ampere", "hopper", "blackwell")}
    assert kinds == {"ampere": "HMMA", "hopper": "wgmma", "blackwell": "tcgen05"}
    assert compiled(results["blackwell"]).resources.tmem
    assert not compiled(results["hopper"]).resources.tmem


def test_tma_from_hopper_on(results: dict[str, Result]) -> None:
    hopper, ampere = (compiled(results[name]).resources for name in ("hopper", "ampere"))
    assert hopper.tma_loads > 0
    assert hopper.tma_stores > 0
    assert ampere.tma_loads == ampere.tma_stores == 0


def test_registers_and_shared_memory_are_read(results: dict[str, Result]) -> None:
    for name in ("hopper", "ampere", "blackwell"):
        used = compiled(results[name]).resources
        assert 16 < used.registers <= 255
        assert 64 * 64 * 2 <= used.shared_bytes < 228 * 1024
        assert used.spilled_bytes == used.spill_loads == used.spill_stores == 0


def test_spills_are_read(results: dict[str, Result]) -> None:
    """Eight blocks on a multiprocessor leave 64 registers a thread: the frame and the instructions must both say so."""
    used = compiled(results["crowded"]).resources
    assert used.registers <= 64
    assert used.spilled_bytes > 0
    assert used.spill_loads > 0
    assert used.spill_stores > 0


def test_equal_requests_compile_once(results: dict[str, Result]) -> None:
    twin = compiled(results["twin"])
    assert twin.cubin == compiled(results["hopper"]).cubin
    assert twin.request.label == "the same again"


def test_a_type_error_names_the_spec_line_above_it(results: dict[str, Result]) -> None:
    """Not the kernel's first mark, and not the one further down."""
    failure = failed(results["narrows"])
    assert failure.spec == "layer.ssd:21"
    assert failure.emitted == f"small.py:{line_of('tile=wide')}"
    assert "cannot implicitly cast float64 to float32" in failure.message
    assert "Unknown location" not in failure.message
    assert str(failure).startswith("narrows [sm_90, f32, chunk 64]: Stored tile is incompatible")


def test_an_error_in_a_helper_names_the_line_that_calls_it(results: dict[str, Result]) -> None:
    failure = failed(results["calls_wrong"])
    assert failure.spec == "layer.ssd:40"
    assert failure.emitted.startswith("_tiles.py:")
    assert failure.emitted.endswith(f", called at small.py:{line_of('wrong(a)')}")


def test_a_mark_of_another_kernel_is_never_blamed(results: dict[str, Result]) -> None:
    failure = failed(results["unmarked"])
    assert failure.spec == ""
    assert failure.emitted == f"small.py:{line_of('index=(ct.bid(0),)')}"


def test_without_a_place_every_line_of_the_kernel_is_named(results: dict[str, Result]) -> None:
    """The code generator knows no lines: "Return code 3, Unknown location" is not all that a user should see."""
    failure = failed(results["too_big"])
    assert failure.spec == "layer.ssd:50, 51"
    assert failure.message == "tile would exceed the maximum of 16777216 elements"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "small.py has no kernel called nowhere"),
        ("not a kernel", "small.py has no kernel called dot"),
        ("renamed", "the kernel's parameters are (x, y, L), the request's (x, z)"),
        ("bad hint", "ValueError: occupancy should be [1, 32], got 99"),
        ("raises", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("dies", "the compiling process died (exit status 3): about to die"),
    ],
)
def test_what_cannot_be_compiled_says_why(results: dict[str, Result], name: str, message: str) -> None:
    assert failed(results[name]).message == message


def test_an_old_gpu_is_told_what_there_is(results: dict[str, Result]) -> None:
    message = failed(results["old"]).message
    assert message.startswith("cuTile does not compile for sm_75; it does for sm_80, ")


def test_a_missing_file_is_a_failure(results: dict[str, Result]) -> None:
    assert "gone.py" in failed(results["no file"]).message


def test_progress_counts_every_request(built: Build, seen: list[tuple[str, int, int]]) -> None:
    assert sorted(label for label, _, _ in seen) == sorted(str(r) for r in REQUESTS.values())
    assert [done for _, done, _ in seen] == list(range(1, len(REQUESTS) + 1))
    assert {total for _, _, total in seen} == {len(REQUESTS)}


def test_a_second_build_compiles_nothing(built: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no process to start, only what the cache holds can succeed."""
    monkeypatch.setattr(sys, "executable", os.devnull)
    wanted = [k.request for k in built.kernels]
    again = build(wanted)
    assert all(k.cached for k in again.kernels)
    assert again.kernels == built.kernels


@pytest.fixture
def canned(built: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles are answered with a cubin at hand, at once."""
    answer = Compiled(built.kernels[0].cubin, 1.0)
    monkeypatch.setattr(Pool, "run", lambda self, tasks: ((key, answer) for key, _ in tasks))


@pytest.mark.usefixtures("canned")
def test_without_the_cache_nothing_is_read_or_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSDGEN_CACHE_DIR", str(tmp_path / "cache"))
    assert len(build([REQUESTS["hinted"]], cache=False).kernels) == 1
    assert not (tmp_path / "cache").exists()
    assert not build([REQUESTS["hinted"]]).kernels[0].cached
    assert build([REQUESTS["hinted"]]).kernels[0].cached
    assert not build([REQUESTS["hinted"]], cache=False).kernels[0].cached


def test_a_system_toolkit_is_hidden_from_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen through these variables, it breaks the one that pip installed ("Return code 5"); cuTile's cache is off too."""
    monkeypatch.setenv("CUDA_HOME", "/usr/local/cuda")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/cuda/lib64")
    monkeypatch.setenv("CUDA_TILE_CACHE_DIR", "kept")
    with Pool(1, 60) as pool:
        assert not {"CUDA_HOME", "LD_LIBRARY_PATH"} & pool.environment.keys()
        assert pool.environment["CUDA_TILE_CACHE_DIR"] == "off"


@pytest.mark.usefixtures("canned")
def test_a_cache_that_cannot_be_written_costs_only_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SSDGEN_CACHE_DIR", str(tmp_path / "file"))
    result = build([REQUESTS["hinted"]])
    assert len(result.kernels) == 1
    assert len(result.notes) == 1
    assert "not cached" in result.notes[0]


def test_a_cubin_that_cannot_be_read_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pool, "run", lambda self, tasks: ((key, Compiled(b"junk", 1.0)) for key, _ in tasks))
    assert "cannot be read: not a cubin" in failed(build([REQUESTS["hinted"]], cache=False).results[0]).message


def test_a_compile_that_takes_too_long_is_given_up() -> None:
    result = build([request("gram", module=EMITTED / "hangs.py")], timeout=2)
    assert failed(result.results[0]).message.startswith("not compiled after 2 s")


def test_an_interrupt_leaves_no_compiler_running() -> None:
    tasks = [("hangs", request("gram", module=EMITTED / "hangs.py")), ("scale", request("scale"))]
    pool = Pool(2, 60)
    with pytest.raises(KeyboardInterrupt):
        interrupt_after_an_answer(pool, tasks)
    workers = pool.busy + pool.idle
    assert len(workers) == 2
    assert all(worker.process.returncode is not None for worker in workers)


def interrupt_after_an_answer(pool: Pool, tasks: list[tuple[str, CompileRequest]]) -> None:
    with pool:
        key, _ = next(pool.run(tasks))
        assert key == "scale"
        raise KeyboardInterrupt


def test_nothing_is_written_beside_the_emitted_modules(built: Build) -> None:
    assert not (EMITTED / "__pycache__").exists()


def test_cubins_are_written_one_file_a_kernel(built: Build, tmp_path: Path) -> None:
    paths = write_cubins(built, tmp_path / "out")
    assert [p.name for p in paths][:2] == ["small.gram.sm_90.f32-chunk-64.cubin", "small.gram.sm_80.f32-chunk-64.cubin"]
    assert [p.read_bytes() for p in paths] == [k.cubin for k in built.kernels]


def line_of(text: str) -> int:
    """The line of `small.py` that holds `text`."""
    lines: Iterator[tuple[int, str]] = enumerate((EMITTED / "small.py").read_text().splitlines(), 1)
    return next(number for number, line in lines if text in line)
