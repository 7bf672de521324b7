"""ssdgen/README.md follows one spec through every stage; what it shows is printed by the tool.

`pytest tests/docs --update-golden` prints it anew.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.conftest import Command
from tests.docs.blocks import same

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "ssdgen" / "README.md"
MARKED = re.compile(
    r"(?P<mark><!-- output of: (?P<command>.+?) -->\n+```\w*\n)(?P<shown>.*?)(?=^```$)", re.MULTILINE | re.DOTALL
)


@pytest.mark.slow
def test_every_output_is_what_the_tool_prints(ssdgen: Command, request: pytest.FixtureRequest) -> None:
    update = request.config.getoption("--update-golden")
    wrong: list[str] = []

    def printed(match: re.Match[str]) -> str:
        out = output(match["command"], ssdgen)
        if same(match["shown"], out):
            return match[0]
        wrong.append(match["command"])
        return match["mark"] + out

    page = PAGE.read_text(encoding="utf-8")
    renewed, number = MARKED.subn(printed, page)
    assert number >= 5
    if update:
        PAGE.write_text(renewed, encoding="utf-8")
    else:
        assert not wrong, "pytest tests/docs --update-golden prints these anew"


def output(command: str, ssdgen: Command) -> str:
    """What `command` prints, the first or last lines of it if `| head N` or `| tail N` follows.

    `ssdgen ...` runs in an empty folder; `lines FILE FROM TO` prints a file from a line that starts with FROM to, but not
    with, the next that starts with TO or the file's end.
    """
    whole, _, cut = command.partition(" | ")
    name, *arguments = shlex.split(whole)
    if name == "ssdgen":
        result = ssdgen(*arguments)
        assert result.code == 0, f"{command}\n{result.err}"
        lines = result.out.splitlines()
    else:
        assert name == "lines", f"no such command: {command}"
        path, first, last = (*arguments, "\0")[:3]
        lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
        start = next(i for i, line in enumerate(lines) if line.startswith(first))
        end = next((i for i, line in enumerate(lines) if i > start and line.startswith(last)), len(lines))
        lines = "\n".join(lines[start:end]).rstrip().splitlines()
    if cut:
        end_of, number = cut.split()
        lines = {"head": lines[: int(number)], "tail": lines[-int(number) :]}[end_of]
    return "\n".join(lines) + "\n"
