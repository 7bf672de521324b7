"""What was proved of a chunk form or of an adjoint, or what was not.

`prover` and `adjoint_prover` prove; they are loaded with sympy when they are needed.
"""

from __future__ import annotations

from dataclasses import dataclass

from ssdgen.ir.adjoint import Adjoint
from ssdgen.ir.chunkform import ChunkForm


class ProofError(Exception):
    """A statement about a chunk form or an adjoint that does not hold: `statement` says which, `detail` where it fails."""

    def __init__(self, statement: str, detail: str) -> None:
        self.statement = statement
        self.detail = detail
        super().__init__(f"not proved: {statement}\n  {detail}")


@dataclass(frozen=True, slots=True)
class Proof:
    """The statements that were proved, in order."""

    layer: str
    statements: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(
            [f"{self.layer}: {len(self.statements)} statements proved", *(f"  {s}" for s in self.statements)]
        )


def prove(form: ChunkForm) -> Proof:
    """Prove that `form` computes what its layer's updates and outputs say; ProofError with the statement that fails.

    Assumes of `form.recurrence` only its layer.
    """
    from ssdgen.derive.prover import Prover

    return Prover(form).prove()


def prove_adjoint(adjoint: Adjoint) -> Proof:
    """Prove that `adjoint` holds the gradients of its form's recurrence; ProofError with the statement that fails.

    Assumes of the form what `prove` proves.
    """
    from ssdgen.derive.adjoint_prover import AdjointProver

    return AdjointProver(adjoint).prove()
