"""Compiling the kernels of candidates in parallel, into the cache in which `cuda.tile` looks at a launch.

Unlike `ssdgen build`, which keeps cubins of its own, this fills `CUDA_TILE_CACHE_DIR`: what is compiled here without a GPU
is not compiled again by the process that launches it from the same file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from ssdgen.build.pool import Pool
from ssdgen.build.store import compiler_versions
from ssdgen.build.worker import CACHE_VARIABLE, Answer
from ssdgen.ir.build import CompileRequest

TIMEOUT = 30.0
"""Seconds after which a kernel counts as one that does not compile."""


class Compiler:
    """Compiles requests for one architecture, `jobs` at a time, each once in its life. A context: it ends its processes.

    Raises UserError where there is no compiler.
    """

    def __init__(self, arch: str, jobs: int | None, cache: Path | None, timeout: float = TIMEOUT) -> None:
        compiler_versions()
        self._arch = arch
        self._pool = Pool(jobs or len(os.sched_getaffinity(0)), timeout)
        if cache is not None:
            self._pool.environment[CACHE_VARIABLE] = str(cache)
        self._answers: dict[CompileRequest, Answer] = {}
        self._given: dict[str, CompileRequest] = {}

    def __enter__(self) -> Compiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.__exit__(kind, error, trace)

    def compiled(
        self, wanted: Sequence[tuple[CompileRequest, ...]], go_on: Callable[[], bool] = lambda: True
    ) -> Iterator[tuple[int, tuple[Answer, ...]]]:
        """For each set of requests its place in `wanted` and the answers, in the order in which sets are complete.

        Nothing more is waited for once `go_on` is false; sets that are not complete then are left out.
        """
        places: dict[CompileRequest, list[int]] = {}
        for place, requests in enumerate(wanted):
            for request in requests:
                places.setdefault(request, []).append(place)
        missing = {request: None for request in places if request not in self._answers}
        waiting = [sum(r in missing for r in set(requests)) for requests in wanted]
        for place, requests in enumerate(wanted):
            if not waiting[place]:
                yield place, tuple(self._answers[r] for r in requests)
        for request, answer in self._run(missing):
            self._answers[request] = answer
            for place in places.get(request, ()):
                waiting[place] -= 1
                if not waiting[place]:
                    yield place, tuple(self._answers[r] for r in wanted[place])
            if not go_on():
                return

    def _run(self, missing: Iterable[CompileRequest]) -> Iterator[tuple[CompileRequest, Answer]]:
        """The answers as they come; also to what an earlier call gave out and did not wait for, which is not given again."""
        under_way = {self._given[worker.key] for worker in self._pool.busy}
        tasks = []
        for request in missing:
            if request in under_way:
                continue
            self._given[str(len(self._given))] = request
            tasks.append((str(len(self._given) - 1), replace(request, arch=self._arch)))
        for key, answer in self._pool.run(tasks):
            yield self._given[key], answer
