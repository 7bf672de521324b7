"""Without jax, an optional extra, nothing here is collected but a test that says so."""

from __future__ import annotations

import importlib.util
import os

# Small programs that run once: most of the time is XLA's, and half of that its optimisations. Read when a device is first used.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")

collect_ignore = [] if importlib.util.find_spec("jax") else ["test_bench.py", "test_model.py", "test_modules.py"]
