"""What was proved of a chunk form, or what was not.

`prover` proves; it is loaded with sympy when it is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

from ssdgen.ir.chunkform import ChunkForm


class ProofError(Exception):
    """A statement about a chunk form that does not hold: `statement` says which, `detail` where it fails."""

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
