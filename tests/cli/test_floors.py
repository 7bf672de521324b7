"""`ssdgen plan --shape`: the table of a plan's traffic and products, and what it says to mistakes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.cli.conftest import Command

A = ("--shape", "b=4,t=16384,h=8")


def test_a_row_for_each_kernel_and_the_sum_beside_the_compulsory(ssdgen: Command) -> None:
    result = ssdgen("plan", "mamba2", *A)
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert lines[0] == "b=4,t=16384,h=8,g=1,p=64,n=128 in bf16: segmented, 8 segments"
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:8]}
    assert list(rows) == ["chunk_cumsum", "segment_states", "group_scores", "walk_out", "all", "compulsory"]
    megabytes, tflop, memory, products, floor = map(float, rows["all"])
    assert (memory, tflop, products) == pytest.approx((75, 0.0301, 37.6), rel=0.02)
    assert megabytes / 4.3 == pytest.approx(memory, abs=0.1)
    assert floor == memory, "none of its kernels is bound by products"
    assert rows["compulsory"] == ["170.9", "39.7", "39.7"]
    assert "4.3 TB/s and 800 TFLOP/s" in lines[-2]


def test_rates_shapes_and_knobs_are_the_users(ssdgen: Command) -> None:
    rates = ("--bandwidth", "1", "--tflops", "0.5", "--dtype", "f32", "--optional", "z")
    result = ssdgen(
        "plan", "mamba2", *A, "--shape", "b=1,t=100,h=2,g=2,n=32", *rates, "--config", "chunk=128", "--json"
    )
    assert result.code == 0, result.err
    first, second = json.loads(result.out)
    assert second["sizes"] == {"b": 1, "t": 100, "h": 2, "g": 2, "p": 64, "n": 32}
    walk = second["kernels"][-1]
    assert walk["arrays"]["z"] == walk["arrays"]["y"] == 100 * 2 * 64 * 4
    assert walk["arrays"]["step"] == 128 * 2 * 4
    assert walk["floor_us"] == pytest.approx(1e6 * walk["bf16_operations"] / 0.5e12), "bound by its TF32 products"
    assert walk["bf16_operations"] == 2 * walk["operations"]
    assert first["compulsory_us"] == pytest.approx(first["compulsory_bytes"] / 1e6)
    assert first["bytes"] == sum(k["bytes"] for k in first["kernels"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mamba2", "--shape", "4,16384"), "is not AXIS=N"),
        (("mamba2", "--shape", "b=4,t=16,h=8,w=2"), "has no axis `w`"),
        (("mamba2", "--shape", "b=4,t=16"), "does not say how long h is"),
        (("mamba2", "--shape", "b=4,t=0,h=8"), "axis t has length 0"),
        (("mamba2", "--shape", "b=4,t=16,h=8,g=3"), "3 groups (g) do not divide 8 heads"),
        (("mamba2", *A, "--dtype", "f64"), "--dtype knows no `f64`"),
        (("mamba2", *A, "--optional", "w"), "has no optional input `w`"),
        (("mamba2", *A, "--bandwidth", "0"), "--bandwidth"),
        (("mamba2", *A, "--bandwidth", "inf"), "--bandwidth"),
        (("mamba2", "--shape", "b=4,t=99999999999999999,h=8"), "longer than any array"),
        (("mamba2", "--shape", "b=4,t=16,h=8,n=512"), "256 at most, and n is 512"),
        (("gla", *A), "gla has no kernels: a decay over key channels"),
    ],
)
def test_mistakes_are_told(ssdgen: Command, arguments: tuple[str, ...], message: str) -> None:
    result = ssdgen("plan", *arguments)
    assert result.code == 1
    assert message in result.err
    assert "Traceback" not in result.err


def test_it_needs_no_torch() -> None:
    program = "import sys; sys.modules['torch'] = None; from ssdgen.cli.outcome import run; sys.exit(run(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "plan", "mamba2", *A]
    assert subprocess.run(command, check=False, capture_output=True, timeout=120).returncode == 0
