"""Timing candidates in a process that may die of one of them."""

from __future__ import annotations

import math
from collections.abc import Callable

from ssdgen.diagnostics import UserError
from ssdgen.run.tune.device import Device
from ssdgen.run.tune.prune import Estimate, Removed
from ssdgen.run.tune.remote import Died, Remote
from ssdgen.run.tune.worker import Failed, Probe, Setup, Task, Timed

SECONDS_SETUP = 120.0
SECONDS_EACH = 30.0
"""A candidate that takes longer, its compiles being done, hangs."""

Measure = Callable[[Estimate, float], Timed | Removed]
"""The time of a candidate, given the microseconds of the best one so far, or why it has none."""


class Measurer:
    """Measures on the GPU that `remote` has; after a death the setup is done again in a new process."""

    def __init__(self, remote: Remote, setup: Setup, seconds: float = SECONDS_EACH) -> None:
        self._remote = remote
        self._setup = setup
        self._seconds = seconds

    def device(self) -> Device:
        """The GPU that is measured on. Raises UserError if the process cannot use it."""
        return self._told(Probe())

    def start(self) -> None:
        """Draw the inputs and compute the default's results. Raises UserError if that cannot be done."""
        self._told(self._setup)

    def _told(self, task: Probe | Setup) -> Device:
        try:
            answer = self._remote.ask(task, SECONDS_SETUP)
        except Died as error:
            raise UserError(
                f"the default configuration cannot be measured: {error}", "try a smaller --shape"
            ) from error
        if isinstance(answer, Failed):
            raise UserError(f"the default configuration cannot be measured: {answer.why}", "try a smaller --shape")
        assert isinstance(answer, Device)
        return answer

    def __call__(self, estimate: Estimate, best: float = math.inf) -> Timed | Removed:
        """Check and time a candidate."""
        if not self._remote.alive:
            self.start()
        try:
            answer = self._remote.ask(Task(estimate.module_path, estimate.candidate.fields, best), self._seconds)
        except Died as error:
            return Removed(estimate.candidate, "hangs" if error.late else "ends its process", str(error))
        if isinstance(answer, Failed):
            return Removed(estimate.candidate, answer.step, answer.why)
        assert isinstance(answer, Timed)
        return answer
