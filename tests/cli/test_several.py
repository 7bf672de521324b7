"""Of several specs, one that cannot be done does not stop the others."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from ssdgen import pipeline
from ssdgen.build import compile as compiling
from ssdgen.ir.build import Build
from ssdgen.ir.plan import Plan
from ssdgen.ir.report import Check, Report
from ssdgen.run import gates
from tests.cli.conftest import Command


def bug(text: str) -> None:
    """Check what is said of a bug, and remove its report."""
    (path,) = re.findall(r"report it with your spec and (\S+);", text)
    Path(path).unlink()


def test_generate_writes_the_others(ssdgen: Command) -> None:
    result = ssdgen("generate", "gla", "retnet", "-o", "out")
    assert result.code == 1
    assert "wrote  out/retnet.py" in result.out.splitlines()
    assert result.err.startswith("ssdgen: gla has no kernels yet: ")
    assert not Path("out/gla.py").exists()
    data = json.loads(ssdgen("generate", "gla", "retnet", "-o", "out", "--json").out)
    assert [error["message"].partition(":")[0] for error in data["errors"]] == ["gla has no kernels yet"]
    assert ssdgen("generate", "gla", "retnet", "-o", "out", "--check").code == 1


def test_none_of_several_has_kernels(ssdgen: Command) -> None:
    """Both reasons are shown, and nothing is written."""
    result = ssdgen("generate", "gla", "mamba3", "-o", "out")
    assert (result.code, result.out) == (1, "")
    assert re.findall(r"(?m)^ssdgen: (\w+) has no kernels yet", result.err) == ["gla", "mamba3"]
    assert os.listdir() == []
    assert len(json.loads(ssdgen("generate", "gla", "mamba3", "--json").out)["errors"]) == 2


def test_build_compiles_the_others(ssdgen: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def note(requests: list[object], *arguments: object, **named: object) -> Build:
        asked.extend(str(request) for request in requests)
        return Build(())

    monkeypatch.setattr(compiling, "build", note)
    result = ssdgen("build", "gla", "retnet")
    assert result.code == 1
    assert asked
    assert result.err.startswith("ssdgen: gla has no kernels yet: ")


def test_verify_reports_the_others(ssdgen: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A spec that is wrong is exit code 1; one on which we crash is 2, and the specs after it are still verified."""

    def crashing(plan: Plan, *arguments: object, **named: object) -> Report:
        name = plan.form.recurrence.layer.name
        if name == "retnet":
            raise ZeroDivisionError("of ours")
        return Report(name, (Check("f32 T=1: y", "portable", 0.0, 1e-5, passed=True),))

    monkeypatch.setattr(gates, "verify", crashing)
    Path("bad.ssd").write_text("language 1\nlayer bad\n")
    result = ssdgen("verify", "bad.ssd", "simple_gla", "--gate", "portable")
    assert result.code == 1
    assert result.out.endswith("1 checks, 0 failed\n")
    assert result.err.startswith("bad.ssd:")

    result = ssdgen("verify", "retnet", "bad.ssd", "simple_gla", "--gate", "portable")
    assert result.code == 2
    assert result.out.startswith("simple_gla on cpu\n")
    assert result.err.startswith("bad.ssd:")
    assert "ssdgen: retnet could not be verified\nssdgen: this is a bug in ssdgen" in result.err
    assert "ZeroDivisionError: of ours" in result.err
    bug(result.err)

    result = ssdgen("verify", "retnet", "bad.ssd", "simple_gla", "--gate", "portable", "--json")
    bug(result.err)
    data = json.loads(result.out)
    assert (data["passed"], [r["spec"] for r in data["reports"]]) == (False, ["simple_gla"])
    assert {error["file"] for error in data["errors"]} == {"bad.ssd"}


def test_a_crash_before_the_gates_is_one_spec_s(ssdgen: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    derive = pipeline.derive

    def crashing(spec: str) -> object:
        if spec == "retnet":
            raise ZeroDivisionError("of ours")
        return derive(spec)

    monkeypatch.setattr(pipeline, "derive", crashing)
    result = ssdgen("verify", "retnet", "simple_gla", "--gate", "proof")
    assert result.code == 2
    assert result.out.startswith("simple_gla on cpu\n")
    bug(result.err)
