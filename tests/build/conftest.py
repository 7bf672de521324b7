"""Caches of their own: a test neither reads what another left behind nor writes into the user's."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def caches(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Both caches in temporary folders, one pair for each test file; the value is ssdgen's."""
    folder = tmp_path_factory.mktemp("caches")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSDGEN_CACHE_DIR", str(folder / "ssdgen"))
        patch.setenv("CUDA_TILE_CACHE_DIR", "off")
        yield Path(folder / "ssdgen")
