"""A cache of their own: a test neither reads what another left behind nor writes into the user's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A temporary cache for each test file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSDGEN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield
