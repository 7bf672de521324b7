"""`ssdgen tune` and `ssdgen warm` as far as a machine without a GPU goes."""

from __future__ import annotations

import json

import pytest
import torch

from tests.cli.conftest import Command

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
