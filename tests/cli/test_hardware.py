"""`ssdgen build` and `ssdgen verify`, without a GPU."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch

from ssdgen.ir.report import Check, Report
from ssdgen.run import gates
from tests.cli.conftest import Command


@pytest.mark.slow
def test_build_shows_what_kernels_use(ssdgen: Command) -> None:
    result = ssdgen("build", "retnet", "--arch", "sm_90", "--dtype", "bf16", "--jobs", "2", "-o", "cubins")
    assert (result.code, result.err) == (0, "")
    rows = [line.split() for line in result.out.splitlines()]
    assert [row[:3] for row in rows if row[:2][-1:] == ["sm_90"]] == [
        ["fwd_pass_state", "sm_90", "bf16"],
        ["compute_out", "sm_90", "bf16"],
    ]
    assert "wgmma" in result.out
    assert "failed" not in result.out
    assert sorted(os.listdir("cubins")) == [
        "retnet.compute_out.sm_90.bf16.cubin",
        "retnet.fwd_pass_state.sm_90.bf16.cubin",
    ]
    assert all(Path("cubins", name).read_bytes()[:4] == b"\x7fELF" for name in os.listdir("cubins"))
    data = json.loads(ssdgen("build", "retnet", "--arch", "sm_90", "--dtype", "bf16", "--json").out)
    assert [(r["kernel"], r["ok"], r["cached"]) for r in data["results"]] == [
        ("fwd_pass_state", True, True),
        ("compute_out", True, True),
    ]


def test_build_has_nothing_for_a_spec_without_kernels(ssdgen: Command) -> None:
    result = ssdgen("build", "gla")
    assert result.code == 1
    assert result.err.startswith("ssdgen: gla has no kernels yet: ")


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
    data = json.loads(ssdgen("verify", "gla", "--gate", "portable,proof", "--json").out)
    assert data["passed"] is True
    assert data["checks"][0]["gate"] == "proof"
    assert {c["gate"] for c in data["checks"]} == {"proof", "portable"}


def test_a_failed_check_is_exit_code_1(ssdgen: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: object, **named: object) -> Report:
        return Report("retnet", (Check("f32 T=1: y", "portable", 0.5, 1e-5, passed=False),))

    monkeypatch.setattr(gates, "verify", failing)
    result = ssdgen("verify", "retnet", "--gate", "proof,portable")
    assert result.code == 1
    assert re.search(r"(?m)^  FAIL  portable   f32 T=1: y .* error 5\.0e-01  bound 1\.0e-05$", result.out)
    assert result.out.endswith("2 checks, 1 failed\n")


@pytest.mark.slow
def test_the_compile_gate(ssdgen: Command) -> None:
    result = ssdgen("verify", "retnet", "--gate", "compile")
    assert result.code == 0, result.out
    assert re.search(
        r"(?m)^  ok    compile    compute_out \[sm_90, bf16\] .*wgmma x\d+, \d+ KB shared, 0 bytes spilled$", result.out
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_cuda_is_refused(ssdgen: Command) -> None:
    result = ssdgen("verify", "retnet", "--device", "cuda")
    assert (result.code, result.out) == (1, "")
    assert "there is no CUDA device here" in result.err
