"""What a proof is made of: statements that are checked in order, of which the first that fails ends it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NoReturn

from ssdgen.derive.proof import Proof, ProofError


class Statements:
    """One proof: `prove` goes through the statements, and the first that fails raises ProofError."""

    statement = ""
    """The one that is being proved."""

    def statements(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """What is proved and how; each may assume those before it."""
        raise NotImplementedError

    def prove_all(self, layer: str) -> Proof:
        """Every statement about a layer, in order."""
        proved = []
        for statement, check in self.statements():
            self.statement = statement
            check()
            proved.append(statement)
        return Proof(layer, tuple(proved))

    def fail(self, detail: str) -> NoReturn:
        """Refuse what is proved by the statement that is being proved."""
        raise ProofError(self.statement, detail)

    def require(self, holds: bool, detail: str) -> None:
        """Fail with `detail` unless `holds`."""
        if not holds:
            self.fail(detail)
