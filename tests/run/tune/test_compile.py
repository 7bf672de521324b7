"""The compiler of candidates compiles a request once, also when an earlier search did not wait for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from ssdgen.build.worker import Answer, Rejected
from ssdgen.ir.build import CompileRequest
from ssdgen.run.tune import compile as compiling
from ssdgen.run.tune.compile import Compiler


@dataclass
class OneWorker:
    """A pool of one worker, which gives its answers in order; what a caller left running is answered to the next one."""

    busy: list[SimpleNamespace] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    compiled: list[str] = field(default_factory=list)

    def run(self, tasks: Iterable[tuple[str, CompileRequest]]) -> Iterator[tuple[str, Answer]]:
        todo = deque(tasks)
        while todo or self.busy:
            if not self.busy:
                key, request = todo.popleft()
                self.busy.append(SimpleNamespace(key=key, request=request))
            done = self.busy.pop()
            self.compiled.append(done.request.kernel)
            if todo:
                key, request = todo.popleft()
                self.busy.append(SimpleNamespace(key=key, request=request))
            yield done.key, Rejected(done.request.kernel)


def request(kernel: str) -> CompileRequest:
    return CompileRequest("module.py", kernel, (), (), "", "")


def test_what_an_earlier_search_left_running_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two answers to one request would end the wait for a set that lacks another of its kernels."""
    pool = OneWorker()
    monkeypatch.setattr(compiling, "Pool", lambda jobs, timeout: pool)
    monkeypatch.setattr(compiling, "compiler_versions", lambda: None)
    a, b, c = request("a"), request("b"), request("c")
    compiler = Compiler("sm_90", 1, None)
    assert [place for place, _ in compiler.compiled([(a,), (b,)], lambda: False)] == [0]
    assert pool.busy, "the second request is under way when the first search stops"
    later = dict(compiler.compiled([(b, c), (a,)]))
    assert later == {0: (Rejected("b"), Rejected("c")), 1: (Rejected("a"),)}
    assert pool.compiled == ["a", "b", "c"]
