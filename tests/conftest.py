"""Golden files: `pytest --update-golden` rewrites the expected texts, and git shows what changed. And what all workers of
xdist have in common: threads, one for each worker, of which there is one a core, and a cache."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported, also by commands that tests run
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files instead of comparing with them")


CACHE = "SSDGEN_CACHE_DIR"
MADE = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """One cache for the whole run, empty at first: its entries are addressed by all that a kernel depends on, so that no test
    can tell who compiled one. Workers, and commands that tests run, are processes that begin with this environment."""
    if CACHE not in os.environ:
        config.stash[MADE] = os.environ[CACHE] = tempfile.mkdtemp(prefix="ssdgen-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if folder := config.stash.get(MADE, None):
        del os.environ[CACHE]
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[Path, str], None]:
    """`golden(path, text)` fails unless the file at `path` holds `text`; with --update-golden it writes it."""

    def compare(path: Path, text: str) -> None:
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path} is missing: run pytest --update-golden and read what it wrote"
        assert text == path.read_text(encoding="utf-8"), f"{path.name} changed; pytest --update-golden accepts it"

    return compare
