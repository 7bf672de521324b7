"""What verification found: every check with the error it measured beside the bound it was held to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Gate = Literal["proof", "portable", "compile", "emulation", "hardware", "peer"]
"""proof: of the derivation; portable: the chunked form on the CPU against a token loop; compile: every kernel ahead of
time; emulation: the emitted kernels' bodies on the CPU; hardware: the same on a GPU; peer: somebody else's code."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check. `error` and `bound` are relative Frobenius norms; a check without a number has both 0 when it passes.

    A check that could not be made here (`skipped`) neither passes nor fails; `note` says why.
    """

    name: str
    gate: Gate
    error: float
    bound: float
    passed: bool
    note: str = ""
    skipped: bool = False

    @property
    def verdict(self) -> str:
        """`ok`, `FAIL` or `skip`."""
        return "skip" if self.skipped else "ok" if self.passed else "FAIL"


@dataclass(frozen=True, slots=True)
class Report:
    """The checks of one spec on one device, in the order they were made."""

    spec: str
    checks: tuple[Check, ...]
    device: str = "cpu"

    @property
    def passed(self) -> bool:
        """Whether no check failed and at least one was made."""
        return any(not c.skipped for c in self.checks) and all(c.passed or c.skipped for c in self.checks)

    def __str__(self) -> str:
        width = max((len(c.name) for c in self.checks), default=0)
        lines = [f"{self.spec} on {self.device}"]
        lines += [_line(c, width) for c in self.checks]
        failed = sum(1 for c in self.checks if not c.passed and not c.skipped)
        skipped = sum(1 for c in self.checks if c.skipped)
        made = len(self.checks) - skipped
        lines.append(f"{made} checks, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
        return "\n".join(lines)


def _line(check: Check, width: int) -> str:
    measured = f"error {check.error:7.1e}  bound {check.bound:7.1e}" if check.bound and not check.skipped else " " * 28
    line = f"  {check.verdict:4}  {check.gate:9}  {check.name:{width}}  {measured}  {check.note}"
    return line.rstrip()


def to_json(report: Report) -> dict[str, object]:
    """`report` as what `json.dumps` takes; an error that is no number is the text `nan` or `inf`."""

    def number(value: float) -> float | str:
        return value if abs(value) < float("inf") else str(value)

    checks = [
        {
            "name": c.name,
            "gate": c.gate,
            "error": number(c.error),
            "bound": c.bound,
            "passed": c.passed,
            "skipped": c.skipped,
            "note": c.note,
        }
        for c in report.checks
    ]
    return {"spec": report.spec, "device": report.device, "passed": report.passed, "checks": checks}
