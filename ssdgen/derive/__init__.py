"""Layer -> Recurrence -> ChunkForm, and the proof that they say the same. The only user of sympy, loaded by `prove`."""

from ssdgen.derive.chunk_form import chunk_form
from ssdgen.derive.proof import Proof, ProofError, prove
from ssdgen.derive.recurrence import recurrence

__all__ = ["Proof", "ProofError", "chunk_form", "prove", "recurrence"]
