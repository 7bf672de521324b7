"""Compiling processes that may die: a fixed number at work, each replaced when it crashes or takes too long."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType

from ssdgen.build.worker import Answer, Rejected
from ssdgen.ir.build import CompileRequest

START = "import sys; sys.path[:] = sys.argv[1:]; from ssdgen.build.worker import main; main()"
UNSET = ("CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH")
"""Through these a system toolkit is seen that breaks the compiler which pip installed ("Return code 5")."""


class Pool:
    """At most `jobs` compiling processes, started when needed; leaving the context kills them and their compilers."""

    def __init__(self, jobs: int, timeout: float) -> None:
        self.jobs = jobs
        self.timeout = timeout
        self.idle: list[_Worker] = []
        self.busy: list[_Worker] = []
        self.folder = tempfile.TemporaryDirectory(prefix="ssdgen-")
        self.environment = {name: value for name, value in os.environ.items() if name not in UNSET}
        self.environment["CUDA_TILE_TEMP_DIR"] = self.folder.name
        self.environment["CUDA_TILE_CACHE_DIR"] = "off"  # keyed by paths and lines: it would grow and seldom hit

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self.idle + self.busy:
            worker.stop()
        self.folder.cleanup()

    def run(self, tasks: Iterable[tuple[str, CompileRequest]]) -> Iterator[tuple[str, Answer]]:
        """The answer to each task with the task's key, in the order in which they come."""
        todo = deque(tasks)
        while todo or self.busy:
            while todo and len(self.busy) < self.jobs:
                worker = self.idle.pop() if self.idle else _Worker(Path(self.folder.name), self.environment)
                worker.give(*todo.popleft(), self.timeout)
                self.busy.append(worker)
            patience = min(worker.deadline for worker in self.busy) - time.monotonic()
            ready = wait([worker.connection for worker in self.busy], max(patience, 0))
            for worker in list(self.busy):
                if worker.connection in ready:
                    answer = worker.take()
                elif worker.deadline <= time.monotonic():
                    answer = Rejected(f"not compiled after {self.timeout:g} s; smaller tiles compile faster")
                    worker.stop()
                else:
                    continue
                self.busy.remove(worker)
                if worker.process.returncode is None:
                    self.idle.append(worker)
                yield worker.key, answer


class _Worker:
    """One compiling process and the task it has."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        descriptor, name = tempfile.mkstemp(dir=folder, suffix=".log")
        self.log = Path(name)
        self.connection, theirs = Pipe()
        command = [sys.executable, "-I", "-B", "-c", START, *sys.path]
        with theirs, os.fdopen(descriptor, "wb") as log:
            self.process = (
                subprocess.Popen(  # in a session of its own: Ctrl-C is ours, and killing it kills its compiler
                    command, stdin=theirs.fileno(), stdout=log, stderr=log, env=environment, start_new_session=True
                )
            )
        self.key = ""
        self.deadline = 0.0

    def give(self, key: str, request: CompileRequest, timeout: float) -> None:
        """Start on a task. A process that has died says so when its answer is taken."""
        self.key = key
        self.deadline = time.monotonic() + timeout
        with contextlib.suppress(OSError):
            self.connection.send(request)

    def take(self) -> Answer:
        """The answer to the task, once the connection is ready; stops a process that died of it."""
        try:
            answer: Answer = self.connection.recv()
        except (EOFError, OSError):
            return Rejected(self._last_words())
        return answer

    def stop(self) -> None:
        """Kill the process and all it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()

    def _last_words(self) -> str:
        try:
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            code = 0
        self.stop()
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        if code == -signal.SIGKILL:
            how += ", out of memory?"
        printed = self.log.read_text(errors="replace").strip().splitlines()
        return f"the compiling process died ({how})" + (f": {printed[-1]}" if printed else "")
