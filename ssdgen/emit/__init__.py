"""Plan -> ModuleSource: Python that reads like a hand-written kernel module, printed from templates."""

from ssdgen.emit.jax_module import emit_jax
from ssdgen.emit.module import ModuleSource, emit, support_files

__all__ = ["ModuleSource", "emit", "emit_jax", "support_files"]
