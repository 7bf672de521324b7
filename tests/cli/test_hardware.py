"""`ssdgen build` and `ssdgen verify`, without a GPU."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ssdgen import pipeline
from ssdgen.build import compile as compiling
from ssdgen.build.store import cache_folder
from ssdgen.ir.build import Build, CompileFailure, CompileRequest
from ssdgen.ir.plan import Plan
from ssdgen.ir.report import Check, Report
from ssdgen.run import gates
from tests.cli.conftest import Command

GRADIENTS = (
    ("segment_states", "bf16"),
    ("entry_states", "bf16"),
    ("segment_gradients", "bf16"),
    ("state_gradients", "bf16"),
    ("chunk_gradients", "bf16"),
    ("entry_states", "bf16-started"),  # where the states that segments begin with are kept
)
"""The kernels of the gradients of a spec whose decay depends on no input, and the calls that they are for."""


@pytest.fixture
def cache() -> Path:
    """That of all tests, as most of the time here is compiling, and some compile the same."""
    return cache_folder()


@pytest.mark.slow
def test_build_shows_what_kernels_use(ssdgen: Command) -> None:
    result = ssdgen("build", "retnet", "--arch", "sm_90", "--dtype", "bf16", "--jobs", "2", "-o", "cubins")
    assert (result.code, result.err) == (0, "")
    rows = [line.split() for line in result.out.splitlines()]
    assert [row[:4] for row in rows if row[2:3] == ["sm_90"]] == [
        ["retnet", "segment_states", "sm_90", "bf16"],
        ["retnet", "walk_out", "sm_90", "bf16"],
        *(["retnet_gradients", kernel, "sm_90", "bf16"] for kernel, _ in GRADIENTS),
        *[["retnet", "token_step", "sm_90", "bf16"]] * 4,
    ]
    assert "wgmma" in result.out
    assert "failed" not in result.out
    steps = ("bf16-steady", "bf16-with-4-tokens", "bf16-with-bf16-slots", "bf16")
    assert sorted(os.listdir("cubins")) == [
        "retnet.segment_states.sm_90.bf16.cubin",
        *(f"retnet.token_step.sm_90.{label}.cubin" for label in steps),
        "retnet.walk_out.sm_90.bf16.cubin",
        *sorted(f"retnet_gradients.{kernel}.sm_90.{label}.cubin" for kernel, label in GRADIENTS),
    ]
    assert all(Path("cubins", name).read_bytes()[:4] == b"\x7fELF" for name in os.listdir("cubins"))
    data = json.loads(ssdgen("build", "retnet", "--arch", "sm_90", "--dtype", "bf16", "--json").out)
    assert [(r["kernel"], r["ok"], r["cached"]) for r in data["results"]] == [
        *(
            (kernel, True, True)
            for kernel in ("segment_states", "walk_out", *(k for k, _ in GRADIENTS), *["token_step"] * 4)
        )
    ]


@pytest.mark.slow
def test_build_against_another_point(ssdgen: Command) -> None:
    """Swapped operands against not, in one table: the second point's rows say what is different."""
    result = ssdgen("build", "linear_attention", "--arch", "sm_90", "--dtype", "bf16", "--against", "swap=intra")
    assert result.code == 0, result.err
    rows = [line.split()[1:5] for line in result.out.splitlines()]
    assert [r for r in rows if r[:1] == ["walk_out"]] == [
        ["walk_out", "sm_90", "bf16", "wgmma"],
        ["walk_out", "sm_90", "bf16", "swap=intra"],
    ]
    assert ssdgen("build", "retnet", "--against", "swap").err.startswith("ssdgen: --against swap is not KEY=VALUE")


@pytest.mark.slow
def test_build_several(ssdgen: Command) -> None:
    """One table that names the modules, one folder; the second build finds the first one's kernels in the cache."""
    arguments = ("build", "retnet", "linear_attention", "--arch", "sm_90", "--dtype", "bf16", "--jobs", "2")
    result = ssdgen(*arguments, "-o", "cubins")
    assert result.code == 0, result.err
    rows = [line.split()[:3] for line in result.out.splitlines()]
    kernels = [("", k) for k in ("segment_states", "walk_out")]
    kernels += [*(("_gradients", k) for k, _ in GRADIENTS), *[("", "token_step")] * 4]
    expected = [[m + of, k, "sm_90"] for m in ("retnet", "linear_attention") for of, k in kernels]
    assert rows[0][:2] == ["module", "kernel"]
    assert [r for r in rows if r[2:] == ["sm_90"] and "_g" not in r[0]] == [e for e in expected if "_g" not in e[0]]
    assert {f"{m}.{k}.sm_90.bf16.cubin" for m, k, _ in expected} <= set(os.listdir("cubins"))
    assert len(os.listdir("cubins")) == len(expected)
    data = json.loads(ssdgen(*arguments, "--json").out)
    assert [(Path(r["module"]).stem, r["kernel"], r["cached"]) for r in data["results"]] == [
        (m, k, True) for m, k, _ in expected
    ]


@pytest.mark.parametrize(("options", "cache"), [((), True), (("--no-cache",), False)])
def test_build_can_leave_the_cache_alone(
    ssdgen: Command, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], cache: bool
) -> None:
    asked: list[object] = []

    def note(requests: object, jobs: object, progress: object, **named: object) -> Build:
        asked.append(named["cache"])
        return Build(())

    monkeypatch.setattr(compiling, "build", note)
    assert ssdgen("build", "retnet", *options).code == 0
    assert asked == [cache]


def test_build_with_a_failure_is_exit_code_1(ssdgen: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure says which line of which spec it comes from."""

    def failing(requests: Sequence[CompileRequest], *arguments: object, **named: object) -> Build:
        return Build(tuple(CompileFailure(r, "no such cast", "retnet.py:30", "retnet.ssd:21") for r in requests[:1]))

    monkeypatch.setattr(compiling, "build", failing)
    result = ssdgen("build", "retnet", "linear_attention", "--arch", "sm_90", "--dtype", "bf16")
    assert result.code == 1
    assert result.err == "segment_states [sm_90, bf16]: no such cast\n  from retnet.ssd:21\n  at retnet.py:30\n"


def test_a_folder_that_cannot_be_written_is_found_first(ssdgen: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before minutes of compiling."""

    def never(*arguments: object, **named: object) -> None:
        raise AssertionError

    monkeypatch.setattr(compiling, "build", never)
    Path("file").write_text("")
    result = ssdgen("build", "retnet", "-o", "file")
    assert (result.code, result.err.splitlines()[0]) == (
        1,
        "ssdgen: cannot write into file: it is a file, not a folder",
    )


def test_build_has_nothing_for_a_spec_without_kernels(ssdgen: Command) -> None:
    result = ssdgen("build", "gla")
    assert result.code == 1
    assert result.err.startswith("ssdgen: gla has no kernels yet: ")


def test_build_of_a_spec_that_takes_no_such_dtype_is_refused(ssdgen: Command) -> None:
    """It would compile nothing, and an empty table reads like success."""
    ssdgen("new", "mine")
    Path("mine.ssd").write_text(Path("mine.ssd").read_text().replace(": bf16 | f16 | f32 ", ": f16"))
    result = ssdgen("build", "mine.ssd", "--arch", "sm_90")
    assert result.code == 1
    assert result.err == "ssdgen: mine takes no bf16 or f32\n  hint: --dtype f16\n"


def test_verify_says_that_a_gate_has_no_check(ssdgen: Command) -> None:
    """Nothing was checked, so nothing passed."""
    ssdgen("new", "mine")
    result = ssdgen("verify", "mine.ssd", "--gate", "peer")
    assert result.code == 1
    assert result.err == "ssdgen: nothing was checked of mine: it has no peer check\n"


@pytest.mark.slow
def test_a_new_spec_verifies_as_it_is(ssdgen: Command) -> None:
    """What a newcomer does first: every gate of this machine passes."""
    ssdgen("new", "mine")
    result = ssdgen("verify", "mine.ssd", "--device", "cpu")
    assert result.code == 0, result.out
    lines = result.out.splitlines()
    assert lines[0] == "mine on cpu"
    made, failed = re.findall(r"\d+", lines[-1])[:2]
    assert int(made) > 50
    assert failed == "0"
    assert {line.split()[1] for line in lines[1:-1]} >= {"proof", "portable", "emulation"}
    measured = [line for line in lines if "error" in line]
    assert len({line.index("bound") for line in measured}) == 1, "the columns are aligned"


@pytest.mark.slow
def test_verify_in_json(ssdgen: Command) -> None:
    """The same shape for one spec and several; the portable form is enough to be verified."""
    data = json.loads(ssdgen("verify", "gla", "--gate", "portable,proof", "--json").out)
    (report,) = data["reports"]
    assert data["passed"] is report["passed"] is True
    assert report["spec"] == "gla"
    assert report["checks"][0]["gate"] == "proof"
    assert {c["gate"] for c in report["checks"]} == {"proof", "portable"}


def test_a_failed_check_is_exit_code_1(ssdgen: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: object, **named: object) -> Report:
        return Report("retnet", (Check("f32 T=1: y", "portable", 0.5, 1e-5, passed=False),))

    monkeypatch.setattr(gates, "verify", failing)
    result = ssdgen("verify", "retnet", "--gate", "proof,portable")
    assert result.code == 1
    assert re.search(r"(?m)^  FAIL  portable   f32 T=1: y .* error 5\.0e-01  bound 1\.0e-05$", result.out)
    assert result.out.endswith("2 checks, 1 failed\n")


def test_verify_several(ssdgen: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report each, in the order given; one that fails fails them all, and the others are still made."""

    def failing(plan: Plan, *arguments: object, **named: object) -> Report:
        name = plan.form.recurrence.layer.name
        return Report(name, (Check("f32 T=1: y", "portable", 0.5, 1e-5, passed=name != "retnet"),))

    monkeypatch.setattr(gates, "verify", failing)
    result = ssdgen("verify", "retnet", "simple_gla", "--gate", "portable")
    assert result.code == 1
    assert [line for line in result.out.splitlines() if " on " in line] == ["retnet on cpu", "simple_gla on cpu"]
    assert re.findall(r"(?m)^\d checks, \d failed$", result.out) == ["1 checks, 1 failed", "1 checks, 0 failed"]
    data = json.loads(ssdgen("verify", "simple_gla", "retnet", "--gate", "portable", "--json").out)
    assert (data["passed"], [r["passed"] for r in data["reports"]]) == (False, [True, False])
    assert ssdgen("verify", "simple_gla", "linear_attention", "--gate", "portable").code == 0


def test_verify_without_a_spec_takes_those_with_kernels(ssdgen: Command) -> None:
    data = json.loads(ssdgen("verify", "--gate", "proof", "--json").out)
    specs = ["linear_attention", "mamba2", "mlstm", "retnet", "simple_gla", "state_space_duality"]
    assert [r["spec"] for r in data["reports"]] == specs


@pytest.mark.parametrize("command", ["build", "verify"])
def test_a_mistake_is_found_before_the_work_starts(
    ssdgen: Command, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Of several specs the last is wrong: nothing is compiled or computed for the first."""

    def never(*arguments: object, **named: object) -> None:
        raise AssertionError

    monkeypatch.setattr(pipeline, "build", never)
    monkeypatch.setattr(pipeline, "verify", never)
    if command == "build":  # a report of the others is worth having, half a build is not
        Path("bad.ssd").write_text("language 1\nlayer bad\n")
        result = ssdgen(command, "retnet", "bad.ssd")
        assert (result.code, result.out) == (1, "")
        assert result.err.startswith("bad.ssd:")
    ssdgen("new", "retnet")
    result = ssdgen(command, "retnet", "./retnet.ssd")
    assert (result.code, result.err.splitlines()[0]) == (1, "ssdgen: two of the specs describe a layer called retnet")


@pytest.mark.parametrize(("device", "gpu"), [("cpu", False), ("auto", True)])
def test_peers_stay_off_the_gpu_when_the_cpu_is_asked_for(
    ssdgen: Command, monkeypatch: pytest.MonkeyPatch, device: str, gpu: bool
) -> None:
    asked: list[object] = []

    def note(*arguments: object, **named: object) -> Report:
        asked.append(named["gpu"])
        return Report("retnet", ())

    monkeypatch.setattr(pipeline, "has_cuda", lambda: True)
    monkeypatch.setattr(gates, "verify", note)
    ssdgen("verify", "retnet", "--device", device, "--gate", "peer")
    assert asked == [gpu]


@pytest.mark.slow
def test_the_compile_gate(ssdgen: Command) -> None:
    result = ssdgen("verify", "retnet", "--gate", "compile")
    assert result.code == 0, result.out
    assert re.search(
        r"(?m)^  ok    compile    walk_out \[sm_90, bf16\] .*wgmma x\d+, \d+ KB shared, 0 bytes spilled$", result.out
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_cuda_is_refused(ssdgen: Command) -> None:
    result = ssdgen("verify", "retnet", "--device", "cuda")
    assert (result.code, result.out) == (1, "")
    assert "there is no CUDA device here" in result.err


def test_build_against_the_same_point(ssdgen: Command) -> None:
    """A table of one module beside itself would say that a knob changes nothing."""
    result = ssdgen("build", "retnet", "--arch", "sm_90", "--against", "swap=none")
    assert result.code == 1
    assert "--against swap=none is the point that is built anyway" in result.err
