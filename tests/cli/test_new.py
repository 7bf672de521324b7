"""`ssdgen new`: a newcomer's first file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Command


def test_new_writes_a_spec_that_is_right(ssdgen: Command) -> None:
    result = ssdgen("new", "mine")
    assert (result.code, result.out) == (0, "wrote mine.ssd; next: ssdgen verify mine.ssd\n")
    assert ssdgen("derive", "mine.ssd").code == 0
    text = Path("mine.ssd").read_text()
    assert "layer mine " in text
    assert "NAME" not in text


def test_new_overwrites_only_when_told(ssdgen: Command) -> None:
    Path("mine.ssd").write_text("my work of a week")
    result = ssdgen("new", "mine")
    assert result.code == 1
    assert result.err == "ssdgen: mine.ssd exists already\n  hint: choose another name, or overwrite it with --force\n"
    assert Path("mine.ssd").read_text() == "my work of a week"
    assert ssdgen("new", "mine", "--force").code == 0
    assert Path("mine.ssd").read_text().startswith("# mine:")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Mine", "mine"),
        ("mine.ssd", "mine"),
        ("folder/mine", "mine"),
        ("2fast", "fast"),
        ("_private", "private"),
        ("a b", "a_b"),
        ("class", "class_layer"),
        ("..", "mine"),
        ("", "mine"),
        ("x" * 41, "x" * 40),
        ("état", "tat"),
    ],
)
def test_a_name_no_module_can_have_is_refused(ssdgen: Command, name: str, hint: str) -> None:
    result = ssdgen("new", name)
    assert result.code == 1
    assert result.err.endswith(f"  hint: try `{hint}`\n")
    assert not list(Path().iterdir())
