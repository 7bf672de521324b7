"""What the user's page shows is what happens: its commands and programs run, top to bottom, in one empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import blocks, same, steps

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "README.md").read_text(encoding="utf-8")


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    return subprocess.run(
        arguments, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=600
    )


@pytest.mark.slow
def test_the_page_runs(tmp_path: Path) -> None:
    ran = 0
    for block in blocks(PAGE):
        if block.language == "console":
            for step in steps(block):
                if step.command.split()[0] not in RUN:
                    continue
                result = run(
                    ["bash", "-c", f'ssdgen() {{ "{sys.executable}" -m ssdgen "$@"; }}; {step.command}'], tmp_path
                )
                where = f"README.md:{block.line}: $ {step.command}"
                assert same(step.shown, result.stdout + result.stderr), f"{where}\n{result.stdout}{result.stderr}"
                ran += 1
        elif block.language == "python":
            result = run([sys.executable, "-c", block.text], tmp_path)
            assert result.returncode == 0, f"README.md:{block.line}\n{result.stderr}"
            ran += 1
    assert ran >= 6


RUN = ("ssdgen", "sed")
"""The commands of the page that a test runs; those that set up an environment are what CI does."""


def test_make_targets_exist() -> None:
    """The two commands of the page are targets of the Makefile."""
    targets = {line.split(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if line[:1].isalpha()}
    commands = [s.command.partition("#")[0].split() for b in blocks(PAGE) for s in steps(b)]
    named = {word for command in commands if command[0] == "make" for word in command[1:]}
    assert named
    assert named <= targets


def test_every_link_leads_somewhere() -> None:
    for page in ("README.md", "ssdgen/README.md", "CHANGELOG.md"):
        folder = (ROOT / page).parent
        text = (ROOT / page).read_text(encoding="utf-8")
        links = [part.split(")")[0] for part in text.split("](")[1:]]
        assert [x for x in links if "://" not in x and not (folder / x.split("#")[0]).exists()] == [], page


def test_a_page_that_is_wrong_is_noticed() -> None:
    """The comparison can fail: another word, a missing line, a line too many."""
    assert same("a\n...\nd\n", "a\nb\nc\nd\n")
    assert same("ok  error 1.0e-07  bound 1e-5\n", "ok  error 3.2e-08  bound 1e-5\n")
    assert not same("ok  error 1.0e-07  bound 1e-5\n", "ok  error 1.0e-07  bound 1e-3\n")
    assert not same("a\nb\n", "a\nc\n")
    assert not same("a\nb\n", "a\n")
    assert not same("a\n", "a\nb\n")
