from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ssdgen.cli.outcome import run


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


Command = Callable[..., Result]


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of a command: empty."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def ssdgen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path) -> Command:
    """The command, run in this process, in an empty folder: exit code and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SSDGEN_CACHE_DIR", str(cache))

    def call(*arguments: str) -> Result:
        capsys.readouterr()
        code = run(arguments)
        printed = capsys.readouterr()
        return Result(code, printed.out, printed.err)

    return call
