"""Host side of the emitted modules: checks of what a caller passes, launches, and small tensor helpers.

Copied verbatim beside the modules that ssdgen emits; it imports nothing of ssdgen.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ._launch import empty as empty
from ._launch import hinted as hinted
from ._launch import lasting as lasting
from ._launch import launch as launch
from ._launch import launcher as launcher
from ._launch import portable as portable
from ._launch import portable_wanted as portable_wanted
from ._launch import runs_kernels as runs_kernels
from ._launch import several as several
from ._launch import stream as stream

Axes = tuple[str, ...]

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
PRECISION = {"bf16": 0, "tf32": 1, "tf32x3": 2, "bf16x2": 3}
"""Precisions of a product, as `_tiles.dot` takes them."""

PRODUCTS = ("scores", "carried", "intra", "state")
"""The fields of a Config that are precisions."""

LIMIT = 2**31 - 1
"""Kernels index with int32: no array, nor the reach of its strides, may have more elements."""

SEQUENCE = "<sequence>"
"""The axis that states have instead of the batch where `cu_seqlens` cuts a row into sequences."""


@dataclass(frozen=True)
class Input:
    """What is known of an input: axes in the order of its array's dimensions, dtypes, and the range of its values.

    `narrower` are accepted forms with fewer axes; `default` stands for an absent input; `optional` ones may be None.
    """

    name: str
    axes: Axes
    dtypes: tuple[torch.dtype, ...]
    like: str = ""
    narrower: tuple[Axes, ...] = ()
    default: float | None = None
    optional: bool = False
    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False


@dataclass(frozen=True)
class Scalar:
    """A run-time scalar and the range it must be in."""

    name: str
    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False


@dataclass(frozen=True)
class Layer:
    """The interface of a layer: its name for messages, inputs, scalars, groups {axis: shared by}, values {name: axes},
    and the dtype of each output, or the name of the input that has it."""

    name: str
    batch: str
    time: str
    head: str
    inputs: tuple[Input, ...]
    scalars: tuple[Scalar, ...]
    groups: Mapping[str, str]
    states: Mapping[str, Axes]
    outputs: Mapping[str, Axes]
    dtypes: Mapping[str, torch.dtype | str]


def given(x: Tensor | None, stand_in: Tensor) -> Tensor:
    """`x`, or for an absent one any tensor: what a kernel takes and, compiled without its flag, never reads."""
    return stand_in if x is None else x


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def check(
    layer: Layer,
    values: Mapping[str, Any],
    states: Mapping[str, Any],
    scalars: Mapping[str, float],
    entries: int | None = None,
    mask: Tensor | None = None,
) -> dict[str, int]:
    """Check every input, initial state and scalar of a call; the size of every axis.

    States have `entries`, counted as axis SEQUENCE, instead of the batch; the range of what `mask` [batch time] hides is free.
    Raises TypeError for a missing input, what is no tensor, or a dtype; ValueError for a rank, size, device or range.
    """
    sizes: dict[str, tuple[int, str]] = {}
    first = next((v for v in values.values() if isinstance(v, Tensor)), None)
    for spec in layer.inputs:
        value = values[spec.name]
        if value is None:
            if spec.default is None and not spec.optional:
                raise TypeError(f"{layer.name}: `{spec.name}`[{' '.join(spec.axes)}] is missing")
            continue
        axes = _check_tensor(layer.name, spec.name, value, (spec.axes, *spec.narrower), first)
        _check_dtype(layer.name, spec, value, values)
        _check_sizes(layer.name, spec.name, axes, value, sizes)
        check_range(layer, spec, value, mask)
    if entries is not None:
        sizes[SEQUENCE] = entries, "cu_seqlens"
    for name, axes in layer.states.items():
        value = states[name]
        if value is not None:
            _check_tensor(layer.name, f"{name}0", value, (axes,), first)
            wide = (F32,) if runs_kernels(value) else (F32, F64)
            if value.dtype not in wide:
                raise TypeError(f"{layer.name}: `{name}0` must be {_names(wide)}, got {_names((value.dtype,))}")
            counted = axes if entries is None else tuple(SEQUENCE if a == layer.batch else a for a in axes)
            _check_sizes(layer.name, f"{name}0", counted, value, sizes)
    lengths = {axis: size for axis, (size, _) in sizes.items()}
    for group, shared in layer.groups.items():
        if group in lengths and (lengths[group] < 1 or lengths[shared] % lengths[group]):
            raise ValueError(
                f"{layer.name}: {lengths[group]} groups (axis {group}, of `{sizes[group][1]}`) do not divide"
                f" {lengths[shared]} heads (axis {shared}, of `{sizes[shared][1]}`)"
            )
    for scalar in layer.scalars:
        _check_scalar(layer.name, scalar, scalars[scalar.name])
    return lengths


def signature(
    values: Mapping[str, Any], states: Mapping[str, Any], scalars: Mapping[str, Any]
) -> tuple[Any, ...] | None:
    """All that `check` looks at; None where it also looks at what tensors hold."""
    parts: list[Any] = []
    for value in (*values.values(), *states.values()):
        if value is None:
            parts.append(None)
        elif isinstance(value, Tensor) and value.is_cuda:
            parts.append((value.shape, value.dtype, value.get_device()))
        else:
            return None
    if os.environ.get("SSDGEN_DEBUG") or not all(isinstance(s, int | float) for s in scalars.values()):
        return None
    return (*parts, *scalars.values())


def _check_tensor(layer: str, name: str, value: Any, forms: Sequence[Axes], first: Tensor | None) -> Axes:
    """The form whose rank `value` has; it must be a tensor on the device of the first one."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{layer}: `{name}` must be a torch.Tensor, got {type(value).__name__}")
    if first is not None and value.device != first.device:
        raise ValueError(f"{layer}: `{name}` is on {value.device}, the first input on {first.device}")
    for axes in forms:
        if len(axes) == value.dim():
            return axes
    expected = " or ".join(f"[{' '.join(a)}] (rank {len(a)})" for a in forms)
    raise ValueError(f"{layer}: `{name}` must be {expected}, got shape {list(value.shape)} (rank {value.dim()})")


def _check_dtype(layer: str, spec: Input, value: Tensor, values: Mapping[str, Any]) -> None:
    kernels = runs_kernels(value)
    if spec.like:
        leader = values[spec.like]
        if isinstance(leader, Tensor) and value.dtype != leader.dtype:
            raise TypeError(
                f"{layer}: `{spec.name}` must have the dtype of `{spec.like}`, {_names((leader.dtype,))},"
                f" got {_names((value.dtype,))}; convert it with `.to({spec.like}.dtype)`"
            )
        return
    allowed = spec.dtypes if kernels else (*spec.dtypes, F64)
    if value.dtype not in allowed:
        where = "" if kernels else " on the CPU"
        raise TypeError(f"{layer}: `{spec.name}` must be {_names(allowed)}{where}, got {_names((value.dtype,))}")


def _check_sizes(layer: str, name: str, axes: Axes, value: Tensor, sizes: dict[str, tuple[int, str]]) -> None:
    for axis, size in zip(axes, value.shape, strict=True):
        known, owner = sizes.setdefault(axis, (size, name))
        if known != size:
            raise ValueError(
                f"{layer}: `{name}`[{' '.join(axes)}] has shape {list(value.shape)}, but axis {axis} is {known} in `{owner}`"
            )


def check_range(layer: Layer, spec: Input, value: Tensor, mask: Tensor | None) -> None:
    """Declared ranges are checked on the CPU; on a GPU, where it costs a synchronisation, if SSDGEN_DEBUG is set; while a
    program is compiled, whose tensors have no values, not at all."""
    if (spec.low, spec.high) == (-math.inf, math.inf):
        return
    if torch.compiler.is_compiling() or portable_wanted() or (value.is_cuda and not os.environ.get("SSDGEN_DEBUG")):
        return
    if mask is not None and layer.batch in spec.axes and layer.time in spec.axes:
        value = value.movedim((spec.axes.index(layer.batch), spec.axes.index(layer.time)), (0, 1))[mask]
    if value.numel():
        low, high = (float(v) for v in torch.aminmax(value.detach()))
        _in_range(layer.name, spec.name, spec, low, high)


def _check_scalar(layer: str, spec: Scalar, value: float) -> None:
    if isinstance(value, Tensor) or not isinstance(value, int | float):
        raise TypeError(f"{layer}: `{spec.name}` must be a number, got {type(value).__name__}")
    _in_range(layer, spec.name, spec, float(value), float(value))


def _in_range(layer: str, name: str, spec: Input | Scalar, low: float, high: float) -> None:
    above = low > spec.low if spec.low_open else low >= spec.low
    below = high < spec.high if spec.high_open else high <= spec.high
    if not (above and below):
        bounds = f"{'(' if spec.low_open else '['}{spec.low:g}, {spec.high:g}{')' if spec.high_open else ']'}"
        found = f"{low:g}" if low == high else f"values from {low:g} to {high:g}"
        raise ValueError(f"{layer}: `{name}` must be in {bounds}, got {found}")


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(d).removeprefix("torch.") for d in dtypes)


def check_kernels(layer: str, tensors: Sequence[Tensor | None]) -> None:
    """Refuse what kernels cannot do: gradients by themselves, and a GPU older than compute capability 8.0."""
    given = [t for t in tensors if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        raise NotImplementedError(
            f"{layer}: kernels of steps have no gradient; call them under torch.no_grad(), detach the inputs, or use `forward`"
        )
    if given[0].is_cuda:
        _check_device(layer, given[0].get_device())


@functools.cache
def _check_device(layer: str, device: int) -> None:
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise ValueError(
            f"{layer}: {torch.cuda.get_device_name(device)} has compute capability {major}.{minor}; the kernels need 8.0"
            " or newer (Ampere, Ada, Hopper, Blackwell)"
        )


def check_flag(name: str, argument: str, value: object) -> None:
    """TypeError unless the argument of a call of `name` is True or False."""
    if type(value) is not bool:
        raise TypeError(f"{name}: `{argument}` must be True or False, got {value!r}")


def expand(spec: Input, value: Tensor | None, sizes: Mapping[str, int], like: Tensor) -> Tensor:
    """An input without a time axis in its widest form: absent, its default; narrower, repeated. Both without a copy."""
    shape = [sizes[a] for a in spec.axes]
    if value is None:
        filled = _filled if torch.compiler.is_compiling() else _constant  # a compiler looks into no cache
        return filled(spec.default or 0.0, like.device).expand(shape)
    if value.dim() == len(shape):
        return value
    axes = next(a for a in spec.narrower if len(a) == value.dim())
    for at, axis in enumerate(spec.axes):
        if axis not in axes:
            value = value.unsqueeze(at)
    return value.expand(shape)


def _filled(value: float, device: torch.device) -> Tensor:
    """A number on a device."""
    return torch.full((), value, dtype=F32, device=device)


@functools.cache
def _constant(value: float, device: torch.device) -> Tensor:
    """A number on a device, made once: filling it would cost a kernel a call. Gradients may be taken of what is computed with
    it, also if the first call is made under `torch.inference_mode`."""
    with torch.inference_mode(False):
        return lasting(_filled(value, device))


def indexable(x: Tensor) -> Tensor:
    """`x`, or a contiguous copy if its strides reach beyond what int32 can index."""
    if x.is_contiguous() and x.numel() <= LIMIT:
        return x
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.contiguous() if reach > LIMIT else x


def stored(precision: str) -> torch.dtype:
    """The dtype of a buffer whose only reader is a product of this precision."""
    return BF16 if precision == "bf16" else F32


def stored_scores(precision: str) -> torch.dtype:
    """The dtype of scores, over their scales, that are stored for products of this precision."""
    return F16 if precision in ("bf16", "bf16x2") else F32


def covering(size: int) -> int:
    """The tile that holds a whole axis: a power of two from 32 to 256. ValueError for a longer axis."""
    if size > 256:
        raise ValueError(f"this plan keeps whole state columns in registers, 256 at most, got {size}; use three_kernel")
    return max(32, 1 << max(0, size - 1).bit_length())


def check_config(layer: Layer, values: Mapping[str, Any]) -> None:
    """Check the fields of a Config; ValueError names the field, what it may be, and what came."""
    for name, value in values.items():
        if name in PRODUCTS:
            good, expected = value in PRECISION, f"one of {', '.join(PRECISION)}"
        elif type(value) is not int:
            good, expected = False, "an integer"
        elif name in ("segments", "share_scores_from"):
            good, expected = 0 <= value <= 1024, "an integer from 0 to 1024"
        elif name == "chunk" or name.startswith(("tile_", "state_tile_")):
            low = {"chunk": 16, f"tile_{layer.head}": 2}.get(name, 32)
            good = low <= value <= 256 and value & (value - 1) == 0
            expected = f"a power of two from {low} to 256"
        elif name.startswith("warps_"):
            good, expected = value in (0, 4, 8), "0, 4 or 8"
        elif name.startswith(("latency_", "state_latency_")):
            good, expected = 1 <= value <= 10, "an integer from 1 to 10"
        else:
            good, expected = 0 <= value <= 32, "an integer from 0 to 32"
        if not good:
            raise ValueError(f"{layer.name}: config field `{name}` must be {expected}, got {value!r}")


Function = TypeVar("Function", bound=Callable[..., Any])


def without_autocast(function: Function) -> Function:
    """`function`, whose products keep their dtype under torch.autocast too: what is computed in float32 stays so."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if not torch.is_autocast_enabled(args[0].device.type):
            return function(*args)
        with torch.autocast(args[0].device.type, enabled=False):
            return function(*args)

    return cast(Function, call)


def widest(tensors: Sequence[Tensor | None]) -> torch.dtype:
    """The dtype the portable path computes in: float32, or float64 if an input is."""
    return F64 if any(t is not None and t.dtype == F64 for t in tensors) else F32


def scalar(value: float, like: Tensor) -> Tensor:
    """A number as a tensor of the dtype that the portable path computes in."""
    return torch.tensor(float(value), dtype=widest((like,)), device=like.device)


def joined(chunks: list[Tensor], at: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """The chunks of an output along dimension `at`; empty, of `shape`, if there are none."""
    return torch.cat(chunks, at) if chunks else torch.empty(shape, dtype=F32, device=like.device)


def output_dtype(declared: torch.dtype, leader: torch.dtype) -> torch.dtype:
    """The dtype of an output that is not like the leading input: as declared, but float64 where that input is."""
    return F64 if leader == F64 else declared


def per_head(x: Tensor, at: int, heads: int) -> Tensor:
    """`x` with its group axis (dimension `at`) repeated to one entry a head; of a single group without a copy."""
    shared = x.unsqueeze(at + 1)
    return shared.expand(*x.shape[: at + 1], heads // x.shape[at], *x.shape[at + 1 :]).flatten(at, at + 1)


def shifted(x: Tensor, at: int) -> Tensor:
    """`x` one token later along dimension `at`, zero at the first."""
    length = x.shape[at]
    return torch.cat((torch.zeros_like(x.narrow(at, 0, min(1, length))), x.narrow(at, 0, max(0, length - 1))), at)


def minimum(a: Tensor | float, b: Tensor | float) -> Tensor:
    """The smaller of two values, of which one may be a number; where they are equal the gradient is the tensor's."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.minimum(a, b)
    tensor, number = _tensor_first(a, b)
    return tensor.clamp(max=number)


def maximum(a: Tensor | float, b: Tensor | float) -> Tensor:
    """The larger of two values, of which one may be a number; where they are equal the gradient is the tensor's."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.maximum(a, b)
    tensor, number = _tensor_first(a, b)
    return tensor.clamp(min=number)


def _tensor_first(a: Tensor | float, b: Tensor | float) -> tuple[Tensor, float]:
    if isinstance(a, Tensor):
        assert not isinstance(b, Tensor)
        return a, b
    assert isinstance(b, Tensor)
    return b, a


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), exact for large and very negative x."""
    return torch.nn.functional.softplus(x, threshold=40.0)  # beyond which it is x in float64 too
