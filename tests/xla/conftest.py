"""Without jax, an optional extra, nothing here is collected."""

from __future__ import annotations

import os

import pytest

# Small programs that run once: most of the time is XLA's, and half of that its optimisations. Read when a device is first used.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
pytest.importorskip("jax", reason="needs jax: pip install 'ssdgen[jax]'")
