"""A process that measures and may die: a candidate that ends it costs only itself.

Whatever a kernel does to its process (a killed CUDA context, a crash, a loop without end) is an answer here: `Died`. The
next task goes to a new process, which is told first what the old one had been told first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from ssdgen.build.pool import UNSET

START = "import sys; sys.path[:] = sys.argv[1:]; from ssdgen.run.tune.worker import main; main()"
PATIENCE_AT_EXIT = 5.0


class Died(Exception):
    """The process that had a task is gone; the message says how. `late` if it was ended because it took too long."""

    def __init__(self, why: str, late: bool = False) -> None:
        super().__init__(why)
        self.late = late


class Remote:
    """One process at a time that answers tasks, started when the first is given. A context: it ends the process.

    `program` is what it runs, ours by default; `environment` is added to this process's own.
    """

    def __init__(self, environment: dict[str, str] | None = None, program: Sequence[str] | None = None) -> None:
        self._program = list(program or [sys.executable, "-I", "-B", "-c", START, *sys.path])
        kept = {name: value for name, value in os.environ.items() if name not in UNSET}
        self._environment = kept | (environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._log = tempfile.NamedTemporaryFile(prefix="ssdgen-", suffix=".log", delete=False)  # noqa: SIM115
        self.started = 0

    def __enter__(self) -> Remote:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._log.close()
        Path(self._log.name).unlink(missing_ok=True)

    @property
    def alive(self) -> bool:
        """Whether there is a process that remembers earlier tasks."""
        return self._process is not None

    def ask(self, task: Any, seconds: float) -> Any:
        """The answer to `task`, which is pickled. Raises Died if the process ends or takes longer than `seconds`."""
        if self._connection is None:
            self._start()
        connection = self._connection
        assert connection is not None
        try:
            connection.send(task)
            if not connection.poll(seconds):
                self.stop()
                raise Died(f"no answer after {seconds:.0f} s", late=True)
            return connection.recv()
        except (EOFError, OSError) as error:
            raise Died(self._last_words()) from error

    def stop(self) -> None:
        """Kill the process and all it started, if there is one."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._forget()

    def _start(self) -> None:
        ours, theirs = Pipe()
        self._log.truncate(0)
        with theirs:  # in a session of its own: killing it kills its compilers
            self._process = subprocess.Popen(
                self._program,
                stdin=theirs.fileno(),
                stdout=self._log,
                stderr=self._log,
                env=self._environment,
                start_new_session=True,
            )
        self._connection = ours
        self.started += 1

    def _forget(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._process, self._connection = None, None

    def _last_words(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(timeout=PATIENCE_AT_EXIT)
        except subprocess.TimeoutExpired:
            code = 0
        self.stop()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        printed = Path(self._log.name).read_text(errors="replace").strip().splitlines()
        return f"the measuring process died ({how})" + (f": {printed[-1][:200]}" if printed else "")


def serve(answer: Callable[[Any], Any]) -> None:
    """Answer tasks that come through the socket given as standard input until its other end closes.

    What is printed goes to standard error. A task that raises is answered with what it raised, in words.
    """
    connection = Connection(os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        try:
            connection.send(answer(task))
        except Exception as error:  # whatever a task raises: the process that asked is told
            connection.send(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
