"""`ssdgen bench decode`: one token of Mamba-2 on the GPU beside the steps of others, after how long a context, and on the CPU.

The first step from a set's state is compared with float64; replays then go on from where it left the state. The sets of a
call do not fit in the L2 cache together, so that a small state is not found there: as in a model, whose layers take turns.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from types import ModuleType

import torch

from ssdgen.ir.layer import Layer
from ssdgen.run.bench.measure import FLUSHING, Meter, described, rounds
from ssdgen.run.bench.ours import portable_float64
from ssdgen.run.bench.rows import DEFAULT, OURS, Document, Environment, Row, Scale, means, ratios
from ssdgen.run.bench.shapes import Shape
from ssdgen.run.bench.truth import L2_TIMES, case_of
from ssdgen.run.checks import BOUNDS, relative_error
from ssdgen.run.gpu_peers import Call
from ssdgen.run.inputs import Inputs, draw

SHAPES = (
    Shape(1, 1, 80, 1, 64, 128),
    Shape(16, 1, 80, 1, 64, 128),
    Shape(64, 1, 80, 1, 64, 128),
    Shape(64, 1, 64, 8, 64, 128),
    Shape(256, 1, 24, 1, 64, 128),
)
"""One token each."""
STATE_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
CONTEXTS = (1024, 131072)
"""Tokens before the step whose time and memory should not depend on them."""
CPU_SHAPE = Shape(1, 1, 24, 1, 64, 128)
"""A layer of a 130M model."""
STEPS = 100
CPU_CALLS, CPU_ROUNDS = 50, 7
PEERS = ("mamba_ssm", "FlashInfer")
BOUND = BOUNDS["bf16"]


@dataclass(frozen=True, slots=True)
class Stepper:
    """A step that is measured: who wrote it, and its call, which moves the state of its inputs and returns y."""

    family: str
    name: str
    call: Call


def decode(
    layer: Layer,
    module: ModuleType,
    meter: Meter,
    environment: Environment,
    count: int,
    seconds: float,
    *,
    shapes: Sequence[Shape] = SHAPES,
    contexts: Sequence[int] = CONTEXTS,
    peers: Sequence[str] = PEERS,
    device: str = "cuda",
    save: Callable[[Document], None] = lambda document: None,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
    clock: Callable[[], float] = time.monotonic,
) -> Document:
    """The document of a run of `module`, emitted from `layer`, mamba2: every shape and dtype, then contexts, then the CPU."""
    end = clock() + seconds
    notes: list[str] = []
    steppers = [Stepper(OURS, DEFAULT, partial(_ours, module)), *others(peers, notes)]
    document = Document("decode", environment, FLUSHING)
    points = [(shape, dtype) for shape in shapes for dtype in STATE_DTYPES]
    rows: list[Row] = []
    for number, (shape, dtype) in enumerate(points):
        progress(number, len(points), f"{shape} {dtype} state")
        if clock() > end:
            notes.append(f"{shape} with a {dtype} state is not measured: the time was up")
            continue
        rows += _measured(layer, module, steppers, shape, dtype, meter, environment, count, device)
        found = ratios(rows, DEFAULT)
        document = replace(document, rows=tuple(rows), ratios=found, means=means(found), notes=tuple(notes))
        save(document)
    scale = [_after(layer, module, meter, environment, t, device) for t in contexts] + on_the_cpu(layer, module)
    document = replace(document, scale=tuple(scale), notes=tuple(notes))
    save(document)
    return document


def others(peers: Sequence[str], notes: list[str]) -> list[Stepper]:
    """The steps of others that are installed here; a note for each that is not."""
    places = {"mamba_ssm": "mamba_ssm.ops.triton.selective_state_update", "FlashInfer": "flashinfer.mamba"}
    out = []
    for peer in peers:
        try:
            update = importlib.import_module(places[peer]).selective_state_update
        except (ImportError, AttributeError) as error:
            notes.append(f"{peer} is not measured: {' '.join(str(error).split())}")
            continue
        out.append(Stepper(peer, "selective_state_update", partial(_selective, update)))
    return out


def _ours(module: ModuleType, i: Inputs) -> tuple[torch.Tensor, ...]:
    return (module.step(i.states["S"], **i.tensors),)


def _selective(update: Callable[..., torch.Tensor], i: Inputs) -> tuple[torch.Tensor, ...]:
    """A call as Mamba-2's layers make it: what is one number a head, repeated without a copy."""
    t, state = i.tensors, i.states["S"]
    _, h, p, n = state.shape
    y = update(
        state, t["x"], t["dt"][:, :, None].expand(-1, h, p), t["A"][:, None, None].expand(h, p, n), t["B"], t["C"],
        D=t["D"][:, None].expand(h, p), dt_bias=t["dt_bias"][:, None].expand(h, p), dt_softplus=True,
    )  # fmt: skip
    return (y,)


def step_inputs(layer: Layer, shape: Shape, dtype: torch.dtype, device: str, seed: int = 0) -> Inputs:
    """One token of what `bench forward` draws, without its time axis, and a state; y's memory as `out`."""
    case = case_of(layer, shape, seed)
    drawn = draw(layer, replace(case, absent=case.absent - {"S0"}), device, device)
    tensors = {name: x.squeeze(1) if name in _per_token(layer) else x for name, x in drawn.tensors.items()}
    states = {name: x.to(dtype) for name, x in drawn.states.items()}
    return Inputs({**tensors, "out": torch.empty_like(tensors["x"])}, {}, states)


def truth(layer: Layer, module: ModuleType, i: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """y and the state after the token, by the portable form of a sequence of one token in float64."""
    tensors = {n: x.unsqueeze(1) if n in _per_token(layer) else x for n, x in i.tensors.items() if n != "out"}
    y, state = portable_float64(module, Inputs(tensors, {}, i.states))
    return y[:, 0], state


def _per_token(layer: Layer) -> set[str]:
    """The inputs with a time axis, which is their second."""
    return {t.name for t in layer.inputs if layer.time in t.axes}


def moved_bytes(shape: Shape, dtype: torch.dtype) -> int:
    """The state read and written once, each input read and y written once."""
    state = shape.b * shape.h * shape.p * shape.n * dtype.itemsize
    vectors = 2 * (2 * shape.b * shape.h * shape.p + 2 * shape.b * shape.g * shape.n)
    return 2 * state + vectors + 4 * (shape.b * shape.h + 3 * shape.h)


def _sets(shape: Shape, dtype: torch.dtype, environment: Environment) -> int:
    """How many sets of inputs it takes that none is found in the L2 cache when its turn comes again."""
    return max(1, math.ceil(L2_TIMES * environment.l2_bytes / moved_bytes(shape, dtype)))


def _measured(
    layer: Layer,
    module: ModuleType,
    steppers: Sequence[Stepper],
    shape: Shape,
    dtype: str,
    meter: Meter,
    environment: Environment,
    count: int,
    device: str,
) -> list[Row]:
    moved = moved_bytes(shape, STATE_DTYPES[dtype])
    number = _sets(shape, STATE_DTYPES[dtype], environment)
    sets = [step_inputs(layer, shape, STATE_DTYPES[dtype], device, seed) for seed in range(number)]
    first = _copied(sets[0])  # measuring moves the states of the sets
    wanted = truth(layer, module, first)
    rows: dict[str, Row] = {}
    replays = {}
    for stepper in steppers:
        row = _checked(stepper, first, wanted, f"{shape}, {dtype} state", number)
        if row.right:
            try:
                row = replace(row, eager_us=meter.eager(stepper.call, sets), host_us=meter.host(stepper.call, sets))
                replays[stepper.family] = meter.capture(stepper.call, sets)
            except Exception as error:  # code of others and its compiler: what stops them must not stop the rest
                row = replace(row, note=described(error))
        rows[stepper.family] = row
    for family, spread in rounds(replays, count, seconds=math.inf).items():
        seconds = spread.median / 1e6
        rows[family] = replace(
            rows[family].timed(spread),
            bandwidth=moved / seconds,
            of_compulsory=moved / environment.bandwidth / seconds,
        )
    return list(rows.values())


def _copied(inputs: Inputs) -> Inputs:
    """The inputs, with a state of their own."""
    return replace(inputs, states={name: x.clone() for name, x in inputs.states.items()})


def _checked(stepper: Stepper, inputs: Inputs, wanted: tuple[torch.Tensor, torch.Tensor], place: str, sets: int) -> Row:
    """A row with the errors of one step from a copy of the state; `wanted` are y and the state after it."""
    fresh = _copied(inputs)
    row = Row(place, stepper.family, stepper.name, None, None, BOUND, sets=sets)
    try:
        (y,) = stepper.call(fresh)
        row = replace(row, error=relative_error(y, wanted[0]), state_error=relative_error(fresh.states["S"], wanted[1]))
    except Exception as error:  # code of others and its compiler
        return replace(row, note=described(error))
    return row if row.right else replace(row, note="wrong: over the bound, so not timed")


def _after(layer: Layer, module: ModuleType, meter: Meter, environment: Environment, tokens: int, device: str) -> Scale:
    """The step after a context of so many tokens: its time, with sets as in the rows above, and what STEPS of them allocate."""
    shape = replace(SHAPES[0], t=tokens)
    state = module.forward(**draw(layer, case_of(layer, shape, 0), device, device).keywords())[1]
    number = _sets(SHAPES[0], torch.float32, environment)
    one = step_inputs(layer, SHAPES[0], torch.float32, device)
    sets = [replace(one, states={"S": state.clone()}) for _ in range(number)]
    replay = meter.capture(partial(_ours, module), sets)
    us = median(replay() for _ in range(STEPS))
    gc.collect()  # what earlier measurements left must not be freed while this counts
    before = torch.cuda.memory_allocated() if state.is_cuda else 0
    for _ in range(STEPS):
        _ours(module, sets[0])
    grown = (torch.cuda.memory_allocated() if state.is_cuda else 0) - before
    return Scale(str(shape), "one step", us, f"{grown} bytes allocated by {STEPS} steps; state {state.nbytes} bytes")


def on_the_cpu(layer: Layer, module: ModuleType) -> list[Scale]:
    """Ours and transformers' own torch path in float32, in turn, at a 130M model's layer; empty without transformers."""
    try:
        theirs = importlib.import_module("transformers.models.mamba2.modeling_mamba2").mamba2_selective_state_update
    except (ImportError, AttributeError):
        return []
    theirs = inspect.unwrap(theirs)  # where mamba_ssm is installed too, the outer function asks its GPU kernels
    inputs = step_inputs(layer, CPU_SHAPE, torch.float32, "cpu")
    inputs = replace(inputs, tensors={name: x.float() for name, x in inputs.tensors.items()})
    calls = {"ours on the CPU": partial(_ours, module), "transformers on the CPU": partial(_selective, theirs)}
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for _ in range(CPU_ROUNDS):
            for name, call in calls.items():
                begun = time.perf_counter()
                for _ in range(CPU_CALLS):
                    call(inputs)
                times[name].append(1e6 * (time.perf_counter() - begun) / CPU_CALLS)
    note = f"float32, {torch.get_num_threads()} threads, median of {CPU_ROUNDS} times {CPU_CALLS} calls"
    return [Scale(str(CPU_SHAPE), name, median(values), note) for name, values in times.items()]
