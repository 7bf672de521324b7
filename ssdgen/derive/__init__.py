"""Layer -> Recurrence -> ChunkForm, and the proof that they say the same. The only user of sympy, once it is needed."""

from ssdgen.derive.chunk_form import chunk_form
from ssdgen.derive.recurrence import recurrence

__all__ = ["chunk_form", "recurrence"]
