"""Layer -> Recurrence -> ChunkForm -> Adjoint, and the proofs of what they say.

The only user of sympy, which is loaded by `prove`, `prove_adjoint` and `ssdgen.derive.adjoint`.
"""

from ssdgen.derive.chunk_form import chunk_form
from ssdgen.derive.proof import Proof, ProofError, prove, prove_adjoint
from ssdgen.derive.recurrence import recurrence

__all__ = ["Proof", "ProofError", "chunk_form", "prove", "prove_adjoint", "recurrence"]
