"""The measuring process may die in any way: that costs the candidate it had, is told as what it was, and the next goes on."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ssdgen.diagnostics import UserError
from ssdgen.run.tune.device import H200
from ssdgen.run.tune.measure import Measurer
from ssdgen.run.tune.prune import Estimate, Removed
from ssdgen.run.tune.remote import Died, Remote
from ssdgen.run.tune.space import Candidate
from ssdgen.run.tune.worker import Failed, Setup, Timed

FAKE = """
import sys; sys.path[:] = sys.argv[1:]
import os, signal, subprocess, time
from ssdgen.run.tune.device import H200
from ssdgen.run.tune.remote import serve
from ssdgen.run.tune.worker import Failed, Probe, Timed
def answer(task):
    if isinstance(task, Probe): return H200
    if isinstance(task, str):
        return H200 if task == "setup" else Failed("raised", "no default")
    what = dict(task.fields)["do"]
    if what == "die": os.kill(os.getpid(), signal.SIGSEGV)
    if what == "lose": sys.exit("it lost its CUDA context: illegal address")
    if what == "hang":
        subprocess.Popen(["sleep", "60"])
        time.sleep(60)
    if what == "wrong": return Failed("wrong result", "nan")
    if what == "raise": raise ValueError("not this")
    print("chatter")
    return Timed(10.0, 0.1, 0.0, 1.0)
serve(answer)
"""
"""A measuring process that does what the field `do` of a candidate says."""


@pytest.fixture
def remote() -> Iterator[Remote]:
    with Remote(program=[sys.executable, "-c", FAKE, *sys.path]) as remote:
        yield remote


def candidate(do: str) -> Estimate:
    return Estimate(Candidate(fields=(("do", do),)), "module.py", (), 0.0)


def measurer(remote: Remote, setup: Any = "setup", seconds: float = 30.0) -> Measurer:
    return Measurer(remote, setup, seconds)


def test_a_death_costs_one_candidate(remote: Remote) -> None:
    measure = measurer(remote)
    assert measure.device() == H200
    measure.start()
    results = [measure(candidate(do)) for do in ("time", "die", "time", "lose", "wrong", "time")]
    assert [r.step if isinstance(r, Removed) else r.microseconds for r in results] == [
        10.0, "ends its process", 10.0, "ends its process", "wrong result", 10.0,
    ]  # fmt: skip
    died, lost = (r for r in results if isinstance(r, Removed) and r.step == "ends its process")
    assert "killed by SIGSEGV" in died.why
    assert "it lost its CUDA context: illegal address" in lost.why
    assert remote.started == 3


def test_a_hang_is_ended_with_all_that_it_started(remote: Remote) -> None:
    measure = measurer(remote, seconds=2.0)
    measure.start()
    begun = time.monotonic()
    hung = measure(candidate("hang"))
    assert isinstance(hung, Removed)
    assert hung.step == "hangs"
    assert time.monotonic() - begun < 10
    assert isinstance(measurer(remote)(candidate("time")), Timed)


def test_the_end_leaves_no_process() -> None:
    with Remote(program=[sys.executable, "-c", FAKE, *sys.path]) as remote:
        measurer(remote).start()
        process = remote._process
    assert process is not None
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_without_a_default_there_is_no_search(remote: Remote) -> None:
    with pytest.raises(UserError, match="the default configuration cannot be measured: no default"):
        measurer(remote, "other").start()


def test_a_program_that_does_not_start_says_so() -> None:
    with (
        Remote(program=[sys.executable, "-c", "import no_such_module"]) as remote,
        pytest.raises(Died, match="no_such"),
    ):
        remote.ask("setup", 30.0)


def test_what_goes_over_is_small_and_whole() -> None:
    """A Setup holds a layer with its spans, and is pickled."""
    import pickle

    from ssdgen.run.inputs import Case
    from tests.run.tune.conftest import SIZES, form_of

    setup = Setup(form_of("mamba2").recurrence.layer, Case(SIZES, "bf16"), "module.py")
    assert pickle.loads(pickle.dumps(setup)) == setup
    assert pickle.loads(pickle.dumps(Failed("a", "b"))) == Failed("a", "b")
