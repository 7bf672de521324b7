"""What measures the XLA target: on the CPU, where its numbers mean nothing, that it measures what it says."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from ssdgen.diagnostics import UserError
from ssdgen.models import bench_jax
from ssdgen.models.config import SIZES, Config
from ssdgen.run.bench import targets
from ssdgen.run.bench.shapes import Shape

TINY = Config(width=16, layers=1, vocab=24, heads=2, channels=16, state=8)


def test_targets_are_compared_and_timed() -> None:
    """Every target is within the bound of its products before it is timed."""
    found = list(targets.rows(Shape(1, 70, 4, 2, 16, 24), "f32", 0.0, "cpu"))
    assert [(r.target, r.products) for r in found][1:] == [("torch", "f32"), ("xla", "default"), ("xla", "highest")]
    assert all(r.us > 0 and r.error_y < 1e-5 and r.error_state < 1e-5 for r in found), found


def test_a_peer_that_is_absent_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SIZES, "tiny", TINY)
    monkeypatch.setitem(sys.modules, "mamba2_jax", None)
    out = tmp_path / "rows.json"
    assert (
        bench_jax.main(["--sizes", "tiny", "--modes", "bf16", "--tokens", "9", "--seconds", "0", "--json", str(out)])
        == 0
    )
    absent, ours = json.loads(out.read_text())["rows"]
    assert absent["model"] == "mamba2-jax"
    assert "pip install mamba2-jax==1.1.2" in absent["note"]
    assert ours["prefill_ms"] > 0
    assert ours["tokens_per_second"] > 0
    assert math.isclose(ours["tflops"], 2e-9 * TINY.parameters * 9 / ours["prefill_ms"])
    assert "tokens/s" in capsys.readouterr().out


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"--sizes 13b .*: .*sizes: 130m"):
        bench_jax.measured_apart("13b", ["bf16"], 0.0)


def test_rows_of_a_process_are_those_that_it_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    row = bench_jax.Row(
        "ssdgen", "130m", "bf16", prefill_ms=1.5, tokens_per_second=2.0, tflops=3.0, compile_s=5.0, rounds=4
    )

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert bench_jax.main(command[3:]) == 0
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(bench_jax, "rows", lambda *_: iter([row]))
    monkeypatch.setattr(subprocess, "run", run)
    (found,) = bench_jax.measured_apart("130m", ["bf16"], 0.0)
    assert found == row


def test_unknown_sizes_are_named() -> None:
    with pytest.raises(UserError, match="13b is no size or mode"):
        bench_jax.main(["--sizes", "13b"])
