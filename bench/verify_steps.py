"""The steps of verify_on_gpu.py, each run in a process of its own; a step yields rows of results."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, islice, product
from types import ModuleType
from typing import Any

import torch
from ragged_once import ragged_inputs
from variants import module_of, spec_of

from ssdgen import pipeline
from ssdgen.ir.layer import Layer
from ssdgen.ir.report import Check
from ssdgen.run.cases import kernel_trials
from ssdgen.run.checks import BOUNDS, one_thread, relative_error
from ssdgen.run.gpu_peers import gpu_peer_checks
from ssdgen.run.inputs import Case, Inputs, array_axes, draw
from ssdgen.run.reference import reference
from ssdgen.run.verify import continued, gradient, packed, run_trial, stepped
from ssdgen.spec import load_source, read_layer

Row = dict[str, Any]
TOKENS_WARM = 4096
TOKENS_LOOP = 4096
PIECE_ELEMENTS = 2**27


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
    """The plainest call: bf16, no optional input and no initial state, everything else present."""
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
    """The hardware and peer checks of `ssdgen verify`; of a `share` such as 0/3, every third trial. The first share has the
    peers, the last one packed sequences, the one before it continuation."""
    first, step = map(int, share.split("/"))
    layer, module = layer_of(name), module_of(name)
    form, _ = pipeline.derive(name)
    plan = pipeline.plan(form, {})
    trials = islice(kernel_trials(plan), first, None, step)
    hardware = (check for trial in trials for check in run_trial("hardware", plan, module, trial))
    peer = gpu_peer_checks(layer, module.forward, "cuda") if first == 0 else ()
    sequences = packed("hardware", plan, module) if first == step - 1 else ()
    pieces = continued("hardware", plan, module) if first == step - 2 else ()
    for check in chain(hardware, peer, sequences, pieces):
        yield check_row(name, check)


def serving(name: str, quick: bool = False) -> Iterator[Row]:
    """The hardware checks of one-token steps."""
    form, _ = pipeline.derive(name)
    for check in stepped("hardware", pipeline.plan(form, {}), module_of(name)):
        yield check_row(name, check)


def gradients(name: str, quick: bool = False) -> Iterator[Row]:
    """The hardware checks of gradients."""
    form, _ = pipeline.derive(name)
    for check in gradient("hardware", pipeline.plan(form, {}), module_of(name)):
        yield check_row(name, check)


def check_row(name: str, check: Check) -> Row:
    """A row of the table of gates."""
    error = check.error if math.isfinite(check.error) else 1e30
    return {
        "spec": name, "gate": check.gate, "name": check.name, "error": error, "bound": check.bound,
        "passed": check.passed, "skipped": check.skipped, "note": check.note[:400],
    }  # fmt: skip


def convolution(name: str, quick: bool = False) -> Iterator[Row]:
    """The causal convolution that lies beside the modules: sequences, packed ones and steps, on slices of wider tensors."""
    conv = importlib.import_module(f"generated.{name}")
    random = torch.Generator().manual_seed(0)

    def inside(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        around = torch.full([n + 3 for n in shape], torch.nan, dtype=dtype)
        return around[tuple(slice(1, n + 1) for n in shape)].copy_(torch.randn(shape, generator=random))

    for dtype, short in ((torch.bfloat16, "bf16"), (torch.float16, "f16"), (torch.float32, "f32")):
        for (b, t, d), taps in product(((2, 70, 130), (1, 1, 1792), (3, 4099, 256)), (2, 4, 8)):
            x, cache = inside(b, t, d, dtype=dtype), inside(b, d, taps - 1, dtype=dtype)
            weight, bias = inside(d, taps, dtype=torch.float32), inside(d, dtype=torch.float32)
            ends = torch.tensor([0, t // 3, t // 3, t])
            slots = torch.tensor([2 * b - 1 - i for i in range(b)], dtype=torch.int32)
            pool = inside(2 * b, d, taps - 1, dtype=dtype)
            calls: dict[str, tuple[str, dict[str, torch.Tensor], dict[str, Any]]] = {
                "forward": ("forward", {"x": x, "initial": cache}, {"return_final": True}),
                "packed": ("forward", {"x": x[:1], "cu_seqlens": ends}, {"return_final": True}),
                "steps": ("steps", {"x": x[:, :3], "cache": pool, "state_indices": slots}, {}),
            }
            for kind, (function, tensors, options) in calls.items():
                tensors = {**tensors, "weight": weight, "bias": bias}
                results = []
                for wide in (True, False):
                    there = {k: v.double() if wide and v.is_floating_point() else v for k, v in tensors.items()}
                    given = {k: v.clone() if wide else on_gpu(v) for k, v in there.items()}
                    with torch.no_grad():
                        value = getattr(conv, function)(**given, **options, activation="silu")
                    results.append((*value, given["cache"])[-2:] if "cache" in given else value)
                for value, want, got in zip(("y", "cache"), *results, strict=True):
                    label = f"{kind}, {short}, {taps} taps, {b} x {t} x {d}: {value}"
                    check = Check(label, "hardware", relative_error(got.cpu(), want), BOUNDS[short], passed=False)
                    yield check_row(name, replace(check, passed=check.error <= check.bound))


def on_gpu(x: torch.Tensor) -> torch.Tensor:
    """A copy on the GPU with the strides of `x`."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda").copy_(x)


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
    with runtime.portable():
        values: tuple[torch.Tensor, ...] = module.forward(**inputs.keywords())
    return values


STEPS: dict[str, Callable[..., Iterator[Row]]] = {
    "warm": warm, "verify": verify, "gates": gates, "serving": serving, "gradients": gradients,
    "convolution": convolution,
}  # fmt: skip
