"""The steps of h200_forward.py, each run in a process of its own; a step yields rows of results."""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from time import monotonic
from types import ModuleType
from typing import Any

import torch
from ragged_once import ragged_inputs
from variants import VARIANTS, module_of, spec_of

from ssdgen import pipeline
from ssdgen.ir.layer import Layer
from ssdgen.run.cases import kernel_trials
from ssdgen.run.checks import BOUNDS, one_thread, relative_error
from ssdgen.run.gpu_peers import Call, gpu_peer_checks, mamba_ssm, tilegym
from ssdgen.run.inputs import Case, Inputs, array_axes, draw
from ssdgen.run.reference import reference
from ssdgen.run.verify import run_trial
from ssdgen.spec import builtin_specs, load_source, read_layer

Row = dict[str, Any]
TOKENS_WARM = 4096
TOKENS_LOOP = 4096
TOKENS_CHECKED = 1024
PIECE_ELEMENTS = 2**27
L2_BYTES = 60e6
SECONDS_CLOCKS = 0.5


def layer_of(name: str) -> Layer:
    """The checked layer of a built-in spec."""
    return read_layer(load_source(spec_of(name)))


def sizes_of(layer: Layer, shape: str) -> dict[str, int]:
    """Axis lengths for `batch,tokens,heads,groups,p,n`: p is the channel axis of the first output, n every other."""
    b, t, h, g, p, n = map(int, shape.split(","))
    sizes = {layer.batch: b, layer.time: t, layer.head: h} | {group.axis: g for group in layer.groups}
    channel = next(a for a in layer.outputs[0].axes if a not in sizes)
    return {axis.name: p if axis.name == channel else n for axis in layer.axes} | sizes


def bench_case(layer: Layer, shape: str, seed: int = 0) -> Case:
    """What is timed: bf16, no optional input and no initial state, everything else present."""
    absent = {t.name for t in layer.inputs if t.optional} | {f"{s.name}0" for s in layer.states}
    forms = {t.name: t.narrower[0] for t in layer.inputs if t.narrower}  # TileGym has D[h] alone
    return Case(sizes_of(layer, shape), dtype="bf16", absent=frozenset(absent), forms=forms, seed=seed)


def axes_given(layer: Layer, name: str, x: torch.Tensor) -> tuple[str, ...]:
    """The axes of the array passed for an input: the declared form of its rank."""
    declared = layer.tensor(name)
    return next(f for f in (array_axes(layer, declared), *declared.narrower) if len(f) == x.dim())


def part(layer: Layer, inputs: Inputs, batch: int, heads: int, tokens: int) -> Inputs:
    """The first `heads` heads (one group) and `tokens` tokens of one sequence, on the CPU."""
    keep = {layer.batch: slice(batch, batch + 1), layer.time: slice(0, tokens), layer.head: slice(0, heads)}
    keep |= {group.axis: slice(0, 1) for group in layer.groups}

    def cut(x: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
        return x[tuple(keep.get(a, slice(None)) for a in axes)].cpu()

    tensors = {name: cut(x, axes_given(layer, name, x)) for name, x in inputs.tensors.items()}
    states = {s.name: cut(inputs.states[s.name], s.axes) for s in layer.states if s.name in inputs.states}
    return Inputs(tensors, inputs.params, states)


def token_loop(layer: Layer, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Outputs, and final states, by the token loop in float64; the inputs are a `part` of a call's."""
    with one_thread():
        outputs, finals = reference(layer, inputs.tensors, inputs.params, inputs.states)
    return outputs | finals


def warm(kind: str, shape: str, quick: bool = False) -> Iterator[Row]:
    """Compile what the other steps need: a short sequence of the same classes of lengths and strides."""
    b, _, *rest = shape.split(",")
    short = ",".join([b, str(TOKENS_WARM), *rest])
    if spec_of(kind) not in builtin_specs():
        inputs = draw(layer_of("mamba2"), bench_case(layer_of("mamba2"), short), "cuda", "cuda")
        peers()[kind](inputs)
    else:
        layer, module = layer_of(kind), module_of(kind)
        everything = replace(bench_case(layer, short), absent=frozenset())
        for case in (bench_case(layer, short), everything):
            module.forward(**draw(layer, case, "cuda", "cuda").keywords())
        module.forward(**ragged_inputs(layer).keywords())
    torch.cuda.synchronize()
    yield from ()


def verify(name: str, shape: str, quick: bool = False) -> Iterator[Row]:
    """One spec at one shape, everything present, against both references."""
    layer, module = layer_of(name), module_of(name)
    case = replace(bench_case(layer, shape, seed=7), absent=frozenset())
    inputs = draw(layer, case, "cuda", "cuda")
    names = [o.name for o in layer.outputs] + [s.name for s in layer.states]
    got = dict(zip(names, module.forward(**inputs.keywords()), strict=True))
    sizes = case.sizes
    tokens, heads = min(sizes[layer.time], TOKENS_LOOP), min(2, sizes[layer.head])
    loop = token_loop(layer, part(layer, inputs, sizes[layer.batch] - 1, heads, tokens))
    axes = {o.name: o.axes for o in layer.outputs} | {s.name: s.axes for s in layer.states}
    keep = {layer.batch: slice(-1, None), layer.head: slice(0, heads), layer.time: slice(0, tokens)}
    for key, want in loop.items():
        if key not in {s.name for s in layer.states} or tokens == sizes[layer.time]:
            piece = got[key][tuple(keep.get(a, slice(None)) for a in axes[key])]
            yield row(name, shape, key, "token loop", relative_error(piece.cpu(), want))
    for key, error in chunked_errors(layer, module, inputs, got).items():
        yield row(name, shape, key, "chunked float64", error)


def gates(name: str, share: str, quick: bool = False) -> Iterator[Row]:
    """The hardware and peer checks of `ssdgen verify`; of a `share` such as 0/3, every third trial."""
    first, step = map(int, share.split("/"))
    layer, module = layer_of(name), module_of(name)
    form, _ = pipeline.derive(name)
    plan = pipeline.plan(form, {})
    trials = islice(kernel_trials(plan), first, None, step)
    hardware = (check for trial in trials for check in run_trial("hardware", plan, module, trial))
    peer = gpu_peer_checks(layer, module.forward, "cuda") if first == 0 else ()
    for check in chain(hardware, peer):
        error = check.error if math.isfinite(check.error) else 1e30
        yield {
            "spec": name, "gate": check.gate, "name": check.name, "error": error, "bound": check.bound,
            "passed": check.passed, "skipped": check.skipped, "note": check.note[:400],
        }  # fmt: skip


def chunked_errors(layer: Layer, module: ModuleType, inputs: Inputs, got: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative errors of whole outputs and final states against the chunked form in float64, piece by piece in time."""
    length = got[layer.outputs[0].name].shape[layer.outputs[0].axes.index(layer.time)]
    widest = max(x.numel() for x in inputs.tensors.values()) // length
    tokens = max(64, PIECE_ELEMENTS // widest // 64 * 64)
    states = {name: x.double() for name, x in inputs.states.items()}
    apart = dict.fromkeys((o.name for o in layer.outputs), 0.0)
    size = dict(apart)
    for start in range(0, length, tokens):
        now = slice(start, start + tokens)
        tensors = {}
        for name, x in inputs.tensors.items():
            axes = axes_given(layer, name, x)
            tensors[name] = x[tuple(now if a == layer.time else slice(None) for a in axes)].double()
        values = portable(module, Inputs(tensors, inputs.params, states))
        for output, want in zip(layer.outputs, values, strict=False):
            piece = got[output.name][tuple(now if a == layer.time else slice(None) for a in output.axes)]
            apart[output.name] += float((piece.double() - want).square().sum())
            size[output.name] += float(want.square().sum())
        states = dict(zip(states, values[len(layer.outputs) :], strict=True))
    errors = {name: math.sqrt(apart[name] / size[name]) for name in apart}
    return errors | {name: relative_error(got[name], want) for name, want in states.items()}


def row(name: str, shape: str, value: str, against: str, error: float) -> Row:
    """A row of the table of errors; a nan does not pass."""
    limit = BOUNDS["bf16"]
    return {
        "spec": name, "shape": shape, "value": value, "against": against,
        "error": error if math.isfinite(error) else 1e30, "bound": limit, "passed": error <= limit,
    }  # fmt: skip


def portable(module: ModuleType, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """The module's chunked form in plain torch on the GPU, in float64; verification compares it with a token loop."""
    runtime: Any = importlib.import_module("._runtime", module.__package__)
    runs_kernels, runtime.runs_kernels = runtime.runs_kernels, lambda x: False
    try:
        values: tuple[torch.Tensor, ...] = module.forward(**inputs.keywords())
    finally:
        runtime.runs_kernels = runs_kernels
    return values


def peers() -> dict[str, Call]:
    """Mamba-2 forwards by others, as far as they can be imported."""
    loaders = {f"mamba_ssm chunk {chunk}": partial(mamba_ssm, chunk) for chunk in (128, 256)}
    loaders["tilegym chunk 64"] = partial(tilegym, 64)
    found: dict[str, Call] = {}
    for name, load in loaders.items():
        try:
            found[name] = load()
        except ImportError as missing:
            print(f"FAILED no {name}: {missing}")
    return found


@dataclass(frozen=True)
class Graph:
    """A captured call on every input set; `keep` holds what must outlive it."""

    graph: torch.cuda.CUDAGraph
    sets: int
    keep: tuple[Any, ...]

    def microseconds(self) -> float:
        """The time of one replay, for one set."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1000 / self.sets


def capture(call: Call, sets: list[Inputs]) -> Graph:
    """Capture `call` on every set; it is run before, so that nothing is compiled or tuned within."""
    for inputs in sets:
        call(inputs)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(sets[0])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call(inputs) for inputs in sets]
    return Graph(graph, len(sets), (kept, sets, call))


def input_sets(layer: Layer, shape: str) -> list[Inputs]:
    """Enough different inputs that, used in turn, they do not stay in the L2 cache; eight at most."""
    first = draw(layer, bench_case(layer, shape), "cuda", "cuda")
    size = sum(x.numel() * x.element_size() for x in first.tensors.values())
    more = min(8, math.ceil(2.5 * L2_BYTES / size))
    return [first] + [draw(layer, bench_case(layer, shape, seed=i), "cuda", "cuda") for i in range(1, more)]


def measured(layer: Layer, shape: str, calls: dict[str, Call], rounds: int) -> Iterator[Row]:
    """Every call checked against the token loop on a part, then timed in turn with the others."""
    sets = input_sets(layer, shape)
    sizes = sizes_of(layer, shape)
    tokens, heads = min(TOKENS_CHECKED, sizes[layer.time]), min(2, sizes[layer.head])
    output = layer.outputs[0]
    want = token_loop(layer, part(layer, sets[0], sizes[layer.batch] - 1, heads, tokens))[output.name]
    keep = {layer.batch: slice(-1, None), layer.head: slice(0, heads), layer.time: slice(0, tokens)}
    errors, graphs = {}, {}
    for name, call in calls.items():
        try:
            y = call(sets[0])[0]
            errors[name] = relative_error(y[tuple(keep.get(a, slice(None)) for a in output.axes)].cpu(), want)
            graphs[name] = capture(call, sets)
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            print(f"FAILED {name} at {shape}: {type(error).__name__}: {' '.join(str(error).split())[:400]}")
    begun = monotonic()
    while graphs and monotonic() - begun < SECONDS_CLOCKS:  # until the clocks are up
        for graph in graphs.values():
            graph.microseconds()
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            times[name].append(graph.microseconds())
    for name, values in times.items():
        yield {
            "spec": layer.name, "shape": shape, "name": name, "median_us": statistics.median(values),
            "fastest_us": min(values), "sets": len(sets), "error": errors[name], "passed": errors[name] <= BOUNDS["bf16"],
        }  # fmt: skip


def own(module: ModuleType, **config: int | str) -> Call:
    """Our forward, with some fields of its default Config for bf16 changed."""
    chosen = {"config": replace(module.CONFIGS[torch.bfloat16], **config)} if config else {}
    return lambda inputs: module.forward(**inputs.keywords(), **chosen)


def time(name: str, *shapes: str, quick: bool = False) -> Iterator[Row]:
    """Our forward at every shape, and beside it the peers'."""
    layer = layer_of(name)
    calls = {"ours": own(module_of(name))} | {v: own(module_of(v)) for v, (spec, _) in VARIANTS.items() if spec == name}
    calls |= peers() if name == "mamba2" else {}
    for shape in shapes:
        yield from measured(layer, shape, calls, 5 if quick else 40)


def sweep(name: str, shape: str, quick: bool = False) -> Iterator[Row]:
    """The alternatives that the spec's schedule names, one changed at a time."""
    layer, module = layer_of(name), module_of(name)
    schedule = layer.schedule
    calls = {"default": own(module)}
    calls |= {f"chunk={c}": own(module, chunk=c) for c in schedule.chunk[1:]}
    for choice in schedule.mma:
        if choice.dtype == "bf16":
            calls |= {f"{choice.product}={p}": own(module, **{choice.product: p}) for p in choice.precisions[1:]}
    for kind, choices in (
        ("tile", schedule.tile),
        ("state_tile", schedule.state_tile),
        ("latency", schedule.latency),
        ("occupancy", schedule.occupancy),
    ):
        for c in choices:
            calls |= {f"{kind}_{c.name}={v}": own(module, **{f"{kind}_{c.name}": v}) for v in c.values[1:]}
    yield from measured(layer, shape, calls, 5 if quick else 40)


STEPS: dict[str, Callable[..., Iterator[Row]]] = {
    "warm": warm, "verify": verify, "gates": gates, "time": time, "sweep": sweep
}  # fmt: skip
