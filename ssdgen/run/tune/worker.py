"""The measuring process: it draws inputs, keeps the default's results, and answers with how long a candidate takes.

It is told a `Setup` once and a `Task` for each candidate, and answers a `Timed`, or a `Failed` if the candidate is
wrong or raises. After an error of CUDA the process is of no more use, so it ends itself and the next one goes on.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import torch

from ssdgen.ir.layer import Layer
from ssdgen.run.checks import BOUNDS, poisoned_memory, relative_error
from ssdgen.run.inputs import DTYPES, Case, Inputs, draw
from ssdgen.run.load import load_file
from ssdgen.run.recorded import default_scalars, gradients_of, kept
from ssdgen.run.tune.device import Device, here
from ssdgen.run.tune.remote import serve
from ssdgen.run.tune.space import Values

ROUNDS_FIRST = 5
ROUNDS = 40
HOPELESS = 1.2
"""A candidate whose first rounds take this many times the best is not measured further."""

CANCELS = 8.0
"""How many times the bound a gradient may be off that is a sum over tokens, whose terms cancel."""

SECONDS_CLOCKS = 0.3
"""How long the GPU works before the first measurement, until its clocks are up."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The question which GPU it is."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What every candidate is measured on: a call of the layer, or its `gradients`, and the module whose default Config is the
    reference."""

    layer: Layer
    case: Case
    module: str
    gradients: bool = False


@dataclass(frozen=True, slots=True)
class Task:
    """A candidate: the file of its module and the fields of its Config; the microseconds of the best one so far."""

    module: str
    fields: Values
    best: float = math.inf


@dataclass(frozen=True, slots=True)
class Timed:
    """The median of a candidate in microseconds and the spread (half the distance of the quartiles), how far its results
    are from the default's, and the seconds of its first call, compiles included.
    """

    microseconds: float
    spread: float
    error: float
    first_call: float


@dataclass(frozen=True, slots=True)
class Failed:
    """Why a candidate has no speed."""

    step: str
    why: str


class Bench:
    """The inputs of a call and the default's results on them, on the current GPU; times candidates."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.device = here()
        self.inputs = draw(setup.layer, setup.case, "cuda", "cuda")
        self.flush = torch.empty(2 * self.device.l2_bytes, dtype=torch.uint8, device="cuda")
        call, _ = _call(Task(setup.module, ()), setup, self.inputs)
        self.wanted = tuple(x.clone() for x in call())
        begun = monotonic()
        while monotonic() - begun < SECONDS_CLOCKS:
            call()
            torch.cuda.synchronize()

    def answer(self, task: Task) -> Timed | Failed:
        """Check and time a candidate."""
        begun = perf_counter()
        call, bounds = _call(task, self.setup, self.inputs)
        with poisoned_memory():  # else what a kernel leaves unwritten may be the right result of the one before
            got = call()
        torch.cuda.synchronize()
        first = perf_counter() - begun
        errors = distances(got, self.wanted)
        for error, bound in zip(errors, bounds, strict=True):
            if not error <= bound:  # a nan too
                return Failed("wrong result", f"{error:.1e} from the default's, at most {bound:.1e}")
        median, spread = timed(captured(call), self.flush.zero_, task.best)
        return Timed(median, spread, max(errors), first)


def distances(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> list[float]:
    """The relative error of each value."""
    return [relative_error(x, want) for x, want in zip(got, wanted, strict=True)]


Bounded = tuple[Callable[[], tuple[torch.Tensor, ...]], list[float]]
"""A call, and how far each of its results may be from the default's."""


def _call(task: Task, setup: Setup, inputs: Inputs) -> Bounded:
    """A call of a candidate: each result, of its and of the default, may be off by its bound."""
    module = load_file(Path(task.module))
    if setup.gradients:
        return _gradient_call(module, task, setup, inputs)
    config = replace(module.CONFIGS[DTYPES[setup.case.dtype]], **dict(task.fields))
    results = len(module.LAYER.outputs) + len(module.LAYER.states)
    return lambda: module.forward(**inputs.keywords(), config=config), [_bound(setup, config)] * results


def _gradient_call(module: Any, task: Task, setup: Setup, inputs: Inputs) -> Bounded:
    """The gradients of a call by its inputs, from random ones that arrive at its outputs."""
    gradients, layer = gradients_of(module), module.LAYER
    config = replace(gradients.CONFIGS[DTYPES[setup.case.dtype]], **dict(task.fields))
    tensors = [inputs.tensors.get(i.name) for i in layer.inputs]
    outputs = module.forward(**inputs.keywords())[: len(layer.outputs)]
    generator = torch.Generator(outputs[0].device).manual_seed(0)
    arriving = [torch.randn(y.shape, generator=generator, device=y.device).to(y.dtype) for y in outputs]
    none = [None] * len(layer.states)
    given = (tensors, default_scalars(module), none, None, arriving, none, config)
    before = kept(module, inputs.keywords(), gradients.GRADIENTS.keeps(tensors, setup.case.sizes, None, config))
    present = [x is not None for x in tensors]
    sums = [layer.time not in i.axes for i, here in zip(layer.inputs, present, strict=True) if here]
    bound = _bound(setup, config)

    def call() -> tuple[torch.Tensor, ...]:
        found = gradients.GRADIENTS(*given, **before)
        return tuple(x for x, here in zip(found, present, strict=False) if here)

    return call, [bound * (CANCELS if summed else 1) for summed in sums]


def _bound(setup: Setup, config: Any) -> float:
    products = [v for v in vars(config).values() if isinstance(v, str)]
    return 2 * max(BOUNDS[name] for name in (setup.case.dtype, *products))


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """The replay of a CUDA graph of `call`, which has run before; it keeps all that the graph needs."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()
    return lambda kept=kept: graph.replay()  # type: ignore[misc]


def timed(run: Callable[[], None], flush: Callable[[], Any], best: float) -> tuple[float, float]:
    """Median and spread, in microseconds, of `run` with the L2 cache flushed before each, outside the time."""
    times: list[float] = []
    for limit in (ROUNDS_FIRST, ROUNDS):
        while len(times) < limit:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            flush()
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000)
        if statistics.median(times) > HOPELESS * best:
            break
    low, median, high = statistics.quantiles(times, n=4)
    return median, (high - low) / 2


class Server:
    """Answers tasks with the Bench of the last Setup."""

    def __init__(self) -> None:
        self._bench: Bench | None = None

    def answer(self, task: Probe | Setup | Task) -> Device | Timed | Failed:
        """Set up, or measure. Ends the process where CUDA is of no more use."""
        try:
            if isinstance(task, Probe):
                return here()
            if isinstance(task, Setup):
                self._bench = None  # its memory first, also that of its graphs
                torch.cuda.empty_cache()
                self._bench = Bench(task)
                return self._bench.device
            assert self._bench is not None
            return self._bench.answer(task)
        except torch.cuda.OutOfMemoryError as error:
            return Failed("out of memory", str(error).splitlines()[0])
        except Exception as error:  # whatever a candidate raises, here or in the driver: this process answers for it
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            if _context_is_lost():
                sys.exit(f"it lost its CUDA context: {why}")  # no answer: the end of this process is one
            return Failed("raised", why)


def _context_is_lost() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def main() -> None:
    """The measuring process."""
    serve(Server().answer)
