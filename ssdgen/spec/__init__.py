"""Text -> Layer: reading, parsing and checking a spec, with messages that say where, what was expected and what to do."""

from ssdgen.spec.read import read_layer
from ssdgen.spec.source import builtin_specs, load_source

__all__ = ["builtin_specs", "load_source", "read_layer"]
