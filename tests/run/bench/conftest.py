from __future__ import annotations

from collections.abc import Iterator

import pytest

from ssdgen import pipeline
from ssdgen.ir.chunkform import ChunkForm
from ssdgen.run.bench.forward import Subject, subject
from ssdgen.run.bench.rows import DEFAULT


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Modules are emitted into a folder of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSDGEN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def mamba2() -> ChunkForm:
    return pipeline.derive("mamba2")[0]


@pytest.fixture(scope="session")
def ours(mamba2: ChunkForm, cache: None) -> Subject:
    """The default module and one other plan, and no peers."""
    plans = {DEFAULT: {}, "single_walk": {"plan": "single_walk", "chunk": "128"}}
    return subject(mamba2, pipeline.derive("simple_gla")[0], [], plans)
