"""What a call of an emitted module would launch, read off its own host code: on tensors that nobody fills, nothing runs.

It needs the module alone and not the plan it was emitted from, so it serves modules that lie somewhere else too.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ssdgen.ir.build import Argument, CompileRequest, ConstantArg, Element, ScalarArg, array_arg
from ssdgen.ir.layer import Dtype
from ssdgen.run.inputs import DTYPES

ELEMENTS: dict[torch.dtype, Element] = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.int32: "i32",
    torch.int64: "i64",
}

HINTS = ("occupancy", "num_ctas", "num_worker_warps")
"""The compiler hints that a kernel may carry, as `cuda.tile` calls them."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch: the kernel to compile for it (`arch` is empty), and its grid."""

    request: CompileRequest
    grid: tuple[int, ...]

    @property
    def blocks(self) -> int:
        """The blocks of the grid."""
        return math.prod(self.grid)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of `forward` up to the values of its tensors.

    `sizes` gives every axis its length and `dtype` that of the inputs that others are like; `present` are optional inputs
    that are passed. `forms` gives inputs without a time axis the number of their dimensions, 0 for an absent one; those
    not in it are passed in the widest form. `initial` says whether initial states are passed, `packed` whether
    `cu_seqlens` is; `states_every` is passed unless it is 0.
    """

    sizes: Mapping[str, int]
    dtype: Dtype
    present: tuple[str, ...] = ()
    forms: tuple[tuple[str, int], ...] = ()
    initial: bool = False
    packed: bool = False
    states_every: int = 0


@dataclass(frozen=True, slots=True)
class StepCall:
    """A call of `steps`, or with one token of `step`, up to the values of its tensors: `call` as for `forward`, the dtype of
    the states, and whether they are a pool with an int32 index for each sequence. Where `keeps`, what they are before each
    token is kept; `steady` is passed on."""

    call: Call
    state: Dtype = "f32"
    pooled: bool = False
    keeps: bool = False
    steady: bool = False


def record(module: Any, call: Call, config: Any, label: str = "") -> tuple[Launch, ...]:
    """The launches of `call` with `config`, a Config of `module`, in their order. Nothing runs, no GPU is needed.

    Raises what `forward` raises: ValueError, TypeError or NotImplementedError for a call or Config it refuses.
    """
    return _recorded(module, label, lambda: module.forward(**blank(module, call), config=config))


def record_step(module: Any, step: StepCall, config: Any = None, label: str = "") -> tuple[Launch, ...]:
    """The launches of a call of steps, as `record` has those of `forward`; `config` is a StepConfig."""
    layer, sizes = module.LAYER, step.call.sizes
    arguments: dict[str, Any] = {**blank(module, step.call), "steady": step.steady}
    dtype, batch = DTYPES[step.state], sizes[layer.batch]
    states = [torch.zeros([sizes[a] for a in axes], dtype=dtype) for axes in layer.states.values()]
    if step.pooled:
        arguments["state_indices"] = torch.arange(batch, dtype=torch.int32)
    if step.keeps:
        kept = tuple(s.unsqueeze(1).expand(-1, sizes[layer.time], *s.shape[1:]).contiguous() for s in states)
        arguments["before"] = kept if len(kept) > 1 else kept[0]
        return _recorded(module, label, lambda: module.steps(*states, **arguments, config=config))
    if sizes[layer.time] != 1:
        return _recorded(module, label, lambda: module.steps(*states, **arguments, config=config))
    names = _argument_names(module)
    for spec in layer.inputs:
        if layer.time in spec.axes and names(spec.name) in arguments:
            name = names(spec.name)
            arguments[name] = arguments[name].squeeze(spec.axes.index(layer.time))
    return _recorded(module, label, lambda: module.step(*states, **arguments, config=config))


def gradients_of(module: Any) -> Any:
    """The module of gradients beside `module`; None if there is none."""
    beside = importlib.import_module("._gradients", module.__package__)
    return importlib.import_module(f"{module.__name__}_gradients") if beside.beside(module.__name__) else None


def record_gradients(
    module: Any, call: Call, config: Any = None, label: str = "", *, finals: bool = True, starts_every: int = 0
) -> tuple[Launch, ...]:
    """The launches of the gradients of `call`, as `record` has its own: none where kernels compute no gradients. With `finals`
    gradients arrive at final states too, and at those that `call` keeps; unless `starts_every` is 0 the forward pass kept the
    states at the ends of blocks of so many tokens for them. `config` is a Config of the module of gradients."""
    gradients = gradients_of(module)
    if gradients is None:
        return ()
    layer, arguments, names = module.LAYER, blank(module, call), _argument_names(module)
    inputs = [arguments.get(names(i.name)) for i in layer.inputs]
    states = [arguments.get(names(f"{s}0")) for s in layer.states]
    dtype = dtype_of(module, call, gradients.GRADIENTS.leader)
    outputs = [torch.empty([call.sizes[a] for a in axes], dtype=dtype) for axes in layer.outputs.values()]
    scalars = default_scalars(module)
    edges = arguments.get("cu_seqlens")
    ends = [torch.empty([call.sizes[a] for a in axes]) if finals else None for axes in layer.states.values()]
    every = call.states_every or None
    kept, starts = (_at_ends(layer, call.sizes, tokens) for tokens in (call.states_every, starts_every))
    return _recorded(
        module, label,
        lambda: gradients.GRADIENTS(
            inputs, scalars, states, edges, outputs, ends, config, states_every=every, kept=kept, starts=starts,
            starts_every=starts_every or None,
        ),
    )  # fmt: skip


def starts_of(module: Any, call: Call, config: Any = None) -> int:
    """Of how many tokens the blocks are at whose ends `call` keeps states for its gradients with the Config `config`, or 0."""
    if call.packed or call.states_every:
        return 0
    arguments, names = blank(module, call), _argument_names(module)
    inputs = [arguments.get(names(i.name)) for i in module.LAYER.inputs]
    return gradients_of(module).GRADIENTS.keeps(inputs, call.sizes, None, config)[0] or 0


def kept(module: Any, arguments: Mapping[str, Any], keeps: tuple[int | None, int | None]) -> dict[str, Any]:
    """What a call of `forward` with these `arguments` keeps for its gradients, as they take it; `keeps` is what their method of
    that name returns."""
    bound = inspect.signature(module.forward).bind(**arguments)
    bound.apply_defaults()
    values = module.OPERATOR.keeping(list(bound.arguments.values()), *keeps)
    found: dict[str, Any] = module.OPERATOR.kept(values[len(module.LAYER.outputs) + len(module.LAYER.states) :], *keeps)
    return found


def _at_ends(layer: Any, sizes: Mapping[str, int], every: int) -> list[torch.Tensor]:
    """Every state at the ends of blocks of `every` tokens, nothing if that is 0."""
    shapes = (
        (sizes[axes[0]], sizes[layer.time] // every, *(sizes[a] for a in axes[1:])) for axes in layer.states.values()
    )
    return [torch.empty(shape) for shape in shapes] if every else []


def default_scalars(module: Any) -> list[float]:
    """What a call of `forward` that names no scalars has for them, in their order."""
    names, parameters = _argument_names(module), inspect.signature(module.forward).parameters
    return [float(parameters[names(s.name)].default) for s in module.LAYER.scalars]


def _recorded(module: Any, label: str, call: Callable[[], Any]) -> tuple[Launch, ...]:
    with recording(module, label) as launches, torch.no_grad():
        call()
    return tuple(launches)


@contextmanager
def recording(module: Any, label: str = "") -> Iterator[list[Launch]]:
    """Within it what `module` and its neighbours launch goes into the list, in order, and does not run."""
    launches: list[Launch] = []

    def note(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        signature = tuple(_arguments(kernel, arguments))
        options = kernel._compiler_options
        hints = tuple((name, int(v)) for name in HINTS if (v := getattr(options, name)) is not None)
        function = kernel._pyfunc
        request = CompileRequest(inspect.getfile(function), function.__name__, signature, hints, arch="", label=label)
        launches.append(Launch(request, grid))

    runtime = importlib.import_module("._runtime", module.__package__)
    with runtime.launcher(note):
        yield launches


def blank(module: Any, call: Call) -> dict[str, Any]:
    """The arguments of `call`: tensors on the CPU whose memory is not touched, unless the declared range asks for values."""
    layer = module.LAYER
    names = _argument_names(module)
    leading = {i.like for i in layer.inputs if i.like} or {i.name for i in layer.inputs}
    arguments: dict[str, Any] = {}
    for spec in layer.inputs:
        rank = dict(call.forms).get(spec.name, len(spec.axes))
        absent = spec.name not in call.present if spec.optional else rank == 0
        if absent:
            continue
        axes = next(form for form in (spec.axes, *spec.narrower) if len(form) == rank)
        leads = spec.like or spec.name in leading
        dtype = DTYPES[call.dtype] if leads and DTYPES[call.dtype] in spec.dtypes else spec.dtypes[0]
        value = torch.empty([call.sizes[a] for a in axes], dtype=dtype)
        arguments[names(spec.name)] = value.fill_(_within(spec)) if _has_range(spec) else value
    if call.initial:
        for state, axes in layer.states.items():
            arguments[names(f"{state}0")] = torch.empty([call.sizes[a] for a in axes])
    if call.packed:
        arguments["cu_seqlens"] = torch.tensor([0, call.sizes[layer.time]], dtype=torch.int32)
    if call.states_every:
        arguments["states_every"] = call.states_every
    return arguments


def dtype_of(module: Any, call: Call, name: str) -> torch.dtype:
    """The dtype of the input `name`, as the spec calls it, in `call`; KeyError if that lacks it."""
    dtype: torch.dtype = blank(module, call)[_argument_names(module)(name)].dtype
    return dtype


def takes_packed(module: Any) -> bool:
    """Whether `forward` of `module` takes packed sequences."""
    return "cu_seqlens" in inspect.signature(module.forward).parameters


def _argument_names(module: Any) -> Any:
    """What `forward` calls a name of the spec: that name, with underscores where Python or the module has it already."""
    parameters = inspect.signature(module.forward).parameters

    def named(name: str) -> str:
        while name not in parameters:
            name += "_"
            if len(name) > 99:
                raise KeyError(f"{module.__name__}.forward has no argument for {name.rstrip('_')}")
        return name

    return named


def _has_range(spec: Any) -> bool:
    return (spec.low, spec.high) != (-math.inf, math.inf)


def _within(spec: Any) -> float:
    """A value inside a declared range, away from its ends where they are finite."""
    low, high = max(spec.low, -1e3), min(spec.high, 1e3)
    if math.isinf(spec.low) or math.isinf(spec.high):
        return float(high - 0.5 if math.isinf(spec.low) else low + 0.5)
    return float((low + high) / 2)


def _arguments(kernel: Any, arguments: tuple[Any, ...]) -> Iterator[Argument]:
    parameters = inspect.signature(kernel._pyfunc).parameters
    for parameter, value in zip(parameters.values(), arguments, strict=True):
        if isinstance(value, torch.Tensor):
            wide = "Int64" in str(parameter.annotation)
            shape, strides, start = tuple(value.shape), value.stride(), int(value.storage_offset())
            yield array_arg(parameter.name, ELEMENTS[value.dtype], shape, strides, wide, start)
        elif "Constant" in str(parameter.annotation):
            yield ConstantArg(parameter.name, value)
        else:
            yield ScalarArg(parameter.name, "i32" if isinstance(value, int) else "f32")
