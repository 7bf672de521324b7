"""`ssdgen bench`: what it refuses, what it prints of results, and drawing without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ssdgen.cli.bench_table import as_text, tables
from ssdgen.run.bench.rows import OURS, Document, to_json
from ssdgen.run.bench.shapes import SHAPES
from tests.cli.conftest import Command
from tests.run.bench import made

COMMANDS = ("forward", "backward", "training", "ablation", "growth", "decode")


@pytest.mark.parametrize("command", COMMANDS)
def test_without_a_gpu(ssdgen: Command, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = ssdgen("bench", command, "--out", "here")
    assert (result.code, result.out) == (1, "")
    assert "NVIDIA GPU" in result.err
    assert "ssdgen bench draw" in result.err
    assert not Path("here").exists()


@pytest.mark.parametrize("command", ["forward", "ablation"])
def test_a_bad_shape_says_where(ssdgen: Command, command: str) -> None:
    result = ssdgen("bench", command, "--shape", "4,16x,8,1,64,128")
    assert result.code == 1
    assert "--shape 4,16x,8,1,64,128: number 2 (tokens) is `16x`" in result.err
    as_json = ssdgen("bench", command, "--shape", "4", "--json")
    assert "has 1 numbers" in json.loads(as_json.out)["errors"][0]["message"]


@pytest.mark.parametrize("command", ["forward", "growth"])
def test_an_unknown_peer(ssdgen: Command, command: str) -> None:
    result = ssdgen("bench", command, "--peers", "TileGym,cudnn")
    assert result.code == 1
    assert "--peers knows no `cudnn`" in result.err
    assert "mamba_ssm" in result.err


def test_growth_along_some_axes(ssdgen: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    studied: list[str] = []

    def measured(*arguments: Any, axes: dict[str, Any], **keywords: Any) -> Document:
        studied.extend(axes)
        return made.growth()

    monkeypatch.setattr("ssdgen.run.bench.growth.growth", measured)
    monkeypatch.setattr("ssdgen.run.bench.environment.environment", lambda command: made.ENVIRONMENT)
    monkeypatch.setattr("ssdgen.cli.bench._subject", lambda peers, plans: None)
    assert ssdgen("bench", "growth", "--along", "n,h").code == 0
    assert studied == ["n", "h"]
    result = ssdgen("bench", "growth", "--along", "n,q")
    assert result.code == 1
    assert "--along knows no `q`" in result.err
    assert "some of t, n, h, b" in result.err


def test_a_step_is_one_token(ssdgen: Command) -> None:
    result = ssdgen("bench", "decode", "--shape", "1,2,8,1,64,64")
    assert result.code == 1
    assert "--shape 1,2,8,1,64,64: a step is one token, not 2" in result.err


def test_a_bad_knob_of_the_ablation(ssdgen: Command) -> None:
    result = ssdgen("bench", "ablation", "--config", "chunk")
    assert result.code == 1
    assert "--config chunk is not KEY=VALUE" in result.err


def test_winners_have_a_place_before_time_is_spent(ssdgen: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("ssdgen.run.bench.environment.environment", lambda command: pytest.fail("spent"))
    result = ssdgen("bench", "forward", "--search-peers", "--winners", "none/w.json")
    assert result.code == 1
    assert "there is no folder none" in result.err


def test_bench_alone_is_its_help(ssdgen: Command) -> None:
    result = ssdgen("bench")
    assert result.code == 0
    assert all(command in result.out for command in (*COMMANDS, "draw"))


def test_draw(ssdgen: Command) -> None:
    Path("a.json").write_text(to_json(made.forward()))
    Path("b.json").write_text(to_json(made.growth()))
    result = ssdgen("bench", "draw", "a.json", "b.json", "--out", "pictures")
    assert result.code == 0
    assert {p.name for p in Path("pictures").iterdir()} >= {"a_ratios.png", "b_growth.png"}
    assert "wrote pictures/a_ratios.png" in result.out
    listed = ssdgen("bench", "draw", "a.json", "--out", "pictures", "--json")
    assert "pictures/a_ratios.png" in json.loads(listed.out)["written"]


def test_pictures_of_one_name_do_not_overwrite_each_other(ssdgen: Command) -> None:
    Path("other").mkdir()
    for name in ("a.json", "other/a.json"):
        Path(name).write_text(to_json(made.forward()))
    result = ssdgen("bench", "draw", "a.json", "other/a.json", "--out", "pictures")
    assert result.code == 1
    assert "two files have the same name" in result.err
    assert not Path("pictures").exists()


def test_draw_of_something_else(ssdgen: Command) -> None:
    Path("a.json").write_text("{}")
    result = ssdgen("bench", "draw", "a.json")
    assert result.code == 1
    assert "a.json holds no results" in result.err
    assert ssdgen("bench", "draw", "none.json").code == 1


def a_run(monkeypatch: pytest.MonkeyPatch, document: Any) -> None:
    """As if there were a GPU, and this had been measured."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("ssdgen.run.bench.environment.environment", lambda command: made.ENVIRONMENT)
    monkeypatch.setattr("ssdgen.run.bench.forward.forward", lambda *a, **k: document)
    monkeypatch.setattr("ssdgen.run.bench.forward.subject", lambda *a: SimpleNamespace())


def test_a_run_writes_json_text_and_pictures(ssdgen: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    a_run(monkeypatch, made.forward())
    result = ssdgen("bench", "forward", "--out", "here")
    assert result.code == 0
    files = {p.name for p in Path("here").iterdir()}
    assert {"forward.json", "forward.txt", "forward_ratios.png"} <= files
    assert Path("here/forward.txt").read_text().strip() == result.out.strip()
    printed = ssdgen("bench", "forward", "--json")
    assert json.loads(printed.out)["study"] == "forward"


def test_a_wrong_result_of_ours_is_a_failure(ssdgen: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    document = made.forward()
    wrong = replace(document.rows[0], error=0.1, graph_us=None, note="wrong")
    a_run(monkeypatch, replace(document, rows=(wrong, *document.rows[1:])))
    result = ssdgen("bench", "forward")
    assert result.code == 1
    assert "1 results of ours are wrong" in result.err


def test_the_tables_say_everything() -> None:
    """Every row with its error, ratios with the variant, the means, what each technique is worth, bends and notes."""
    text = as_text(tables(made.forward()))
    assert text.count("1.7e-03 1.7e-03") == len(made.forward().rows)
    assert all(str(shape) in text for shape in SHAPES)
    assert "times as fast as TileGym (geometric mean of 7 of 7 shapes)" in text
    assert "(chunk 256)" in text
    assert f"{OURS} three_kernel" in text
    assert "..." not in text
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    ablation = as_text(tables(made.ablation()))
    assert "1.31" in ablation
    assert "1,234,567" in ablation
    assert "not available: no knob" in ablation
    assert "bend along t" in as_text(tables(made.growth()))
