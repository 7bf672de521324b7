"""Emulated calls are thousands of operations on small tensors: one thread is many times faster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ssdgen.run.checks import one_thread


@pytest.fixture(autouse=True)
def _on_one_thread() -> Iterator[None]:
    with one_thread():
        yield
