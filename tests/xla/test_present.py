"""That jax is here, without which nothing else of this folder is collected."""

from __future__ import annotations

import pytest


def test_jax_is_installed() -> None:
    pytest.importorskip("jax", reason="the XLA target is not tested without jax: pip install 'ssdgen[jax]'")
