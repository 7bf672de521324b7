from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from ssdgen import pipeline
from ssdgen.ir.chunkform import ChunkForm
from ssdgen.run.recorded import Call
from ssdgen.run.tune.space import Space
from tests.run.tune.fake import only_tiles_by_rule

SIZES = {"b": 2, "t": 4096, "h": 8, "g": 1, "p": 64, "n": 128}


@cache
def form_of(spec: str) -> ChunkForm:
    return pipeline.derive(spec)[0]


@pytest.fixture(scope="session")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where modules are emitted, once for all tests."""
    return tmp_path_factory.mktemp("emitted")


@pytest.fixture
def space(emitted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Space:
    """The space of a spec with groups, an optional input and several plans; the user's folder is empty."""
    monkeypatch.setenv("SSDGEN_CACHE_DIR", str(tmp_path))
    only_tiles_by_rule(monkeypatch)
    return Space(form_of("mamba2"), "bf16", SIZES, emitted)


@pytest.fixture
def call() -> Call:
    return Call(SIZES, "bf16", forms=(("D", 1),))
