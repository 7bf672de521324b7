"""What a call of one-token steps is: its interface, its arguments, and the checks of them.

Copied verbatim beside the modules that ssdgen emits; it imports nothing of ssdgen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import _runtime as _rt

Tensors = tuple[Tensor | None, ...]
INDEX_DTYPES = (torch.int32, torch.int64)
STATE_DTYPES = (torch.float32, torch.bfloat16)
MOST_KNOWN = 4096


class Step:
    """What a module has for steps: its interface, its StepConfig and the function that launches its kernels (both None if it
    has none), and its portable form of one token."""

    def __init__(
        self,
        layer: _rt.Layer,
        config: Any,
        kernels: Callable[..., None] | None,
        portable: Callable[..., tuple[Tensor, ...]],
    ) -> None:
        self.layer, self.config, self.kernels, self.portable = layer, config, kernels, portable
        self.one, self.several = _interface(layer, with_time=False), _interface(layer, with_time=True)
        self.places = tuple(s.axes.index(layer.time) if layer.time in s.axes else -1 for s in layer.inputs)
        """Where each input has its time axis, -1 without one."""


def _interface(layer: _rt.Layer, with_time: bool) -> _rt.Layer:
    """The inputs of `steps`, or of `step`, which have no time axis; states are checked here."""

    def axes_of(axes: _rt.Axes) -> _rt.Axes:
        return tuple(a for a in axes if with_time or a != layer.time)

    inputs = (replace(i, axes=axes_of(i.axes), narrower=tuple(map(axes_of, i.narrower))) for i in layer.inputs)
    outputs = {name: axes_of(axes) for name, axes in layer.outputs.items()}
    return replace(layer, inputs=tuple(inputs), outputs=outputs, states={})


@dataclass(frozen=True)
class Call:
    """The arguments of a call of `step`, or with `several` of `steps`, in the order of the layer's declarations. `steady`: the
    kernels may read the states and the inputs without a time axis before the kernel before has ended."""

    states: tuple[Tensor, ...]
    inputs: Tensors
    scalars: tuple[float, ...]
    read: Tensor | None
    write: Tensor | None
    before: Tensors
    out: Tensors
    several: bool
    steady: bool


_KNOWN: dict[tuple[Any, ...], tuple[Step, dict[str, int]]] = {}
"""Calls that were right, by all that `check` looks at, with the step, which keeps its identity from being used again."""


def checked(step: Step, call: Call, writes_elsewhere: bool) -> dict[str, int]:
    """`check`, once for calls that do not differ in what it looks at, since it takes longer than a launch; and the values of
    tensors, on the CPU, and on a GPU, where that synchronises, if SSDGEN_DEBUG is set."""
    key = _signature(step, call, writes_elsewhere)
    if key is None or key not in _KNOWN:
        size = check(step, call, writes_elsewhere)
        if key is not None:
            if len(_KNOWN) >= MOST_KNOWN:
                _KNOWN.clear()
            _KNOWN[key] = step, size
    else:
        size = _KNOWN[key][1]
    state = call.states[0]
    if not torch.compiler.is_compiling() and (not state.is_cuda or os.environ.get("SSDGEN_DEBUG")):
        for spec, x in zip(step.layer.inputs, call.inputs, strict=True):
            if x is not None:
                _rt.check_range(step.layer, spec, x, None)
        if call.read is not None and call.write is not None:
            count = state.shape[next(iter(step.layer.states.values())).index(step.layer.batch)]
            _check_slots(step.layer, call.read.tolist(), call.write.tolist(), count, writes_elsewhere)
    return size


def _signature(step: Step, call: Call, writes_elsewhere: bool) -> tuple[Any, ...] | None:
    """All that `check` looks at; None for what is surely wrong, or traced by a compiler."""
    if torch.compiler.is_compiling() or not all(isinstance(s, int | float) for s in call.scalars):
        return None
    parts: list[Any] = [id(step), call.several, writes_elsewhere, call.scalars]
    for x in (*call.states, *call.inputs, call.read, call.write, *call.before, *call.out):
        if x is None:
            parts.append(None)
        elif isinstance(x, Tensor):
            parts.append((x.shape, x.stride(), x.dtype, x.device))
        else:
            return None
    return (*parts, _rt.runs_kernels(call.states[0]))


def check(step: Step, call: Call, writes_elsewhere: bool) -> dict[str, int]:
    """The size of every axis of a call, whatever its tensors hold. Raises TypeError or ValueError, which name the tensor."""
    layer = step.several if call.several else step.one
    values = {spec.name: x for spec, x in zip(layer.inputs, call.inputs, strict=True)}
    _check_ranks(step.layer, values, call.several)
    size = _rt.check(layer, values, {}, dict(zip([s.name for s in layer.scalars], call.scalars, strict=True)))
    size.setdefault(layer.time, 1)
    first = next(x for x in call.inputs if x is not None)
    if call.read is None and writes_elsewhere:
        raise TypeError(f"{layer.name}: `write_indices` goes with `state_indices`, which is missing")
    for name, x in (("state_indices", call.read), ("write_indices", call.write)):
        if x is not None:
            _check_indices(layer, name, x, size[layer.batch], first)
    known = {axis: (length, "the inputs") for axis, length in size.items()}
    pool = {a: s for a, s in known.items() if call.read is None or a != layer.batch}
    dtypes = STATE_DTYPES if _rt.runs_kernels(first) else (*STATE_DTYPES, _rt.F64)
    for (name, axes), state in zip(step.layer.states.items(), call.states, strict=True):
        _check_memory(layer, name, state, axes, pool, dtypes, first)
    known = {**pool, **known}
    for (name, axes), kept in zip(step.layer.states.items(), call.before, strict=True):
        if kept is not None:
            at = axes.index(layer.batch) + 1
            _check_memory(layer, f"before of {name}", kept, (*axes[:at], layer.time, *axes[at:]), known, dtypes, first)
    for (name, axes), dtype, out in zip(layer.outputs.items(), output_dtypes(layer, call), call.out, strict=True):
        if out is not None:
            _check_memory(layer, f"out of {name}", out, axes, known, (dtype,), first)
    for name, x in (*values.items(), *zip(layer.outputs, call.out, strict=True)):
        if x is not None and sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) > _rt.LIMIT:
            raise ValueError(
                f"{layer.name}: `{name}` reaches over more than 2**31 - 1 elements; pass a contiguous copy"
            )
    return size


def _check_ranks(layer: _rt.Layer, values: Mapping[str, Any], several: bool) -> None:
    """A time axis too many or too few is the likely mistake, and has its own message."""
    for spec in layer.inputs:
        x = values[spec.name]
        if isinstance(x, Tensor) and layer.time in spec.axes and x.dim() == len(spec.axes) - several:
            one = " ".join(a for a in spec.axes if a != layer.time)
            raise ValueError(
                f"{layer.name}: `{spec.name}` has shape {list(x.shape)} (rank {x.dim()}): `step` takes one token,"
                f" {spec.name}[{one}]; `steps` takes several, {spec.name}[{' '.join(spec.axes)}]"
            )


def _check_indices(layer: _rt.Layer, name: str, x: Any, batch: int, first: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{layer.name}: `{name}` must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in INDEX_DTYPES:
        raise TypeError(f"{layer.name}: `{name}` must be int32 or int64, got {_name(x.dtype)}")
    if x.device != first.device:
        raise ValueError(f"{layer.name}: `{name}` is on {x.device}, the first input on {first.device}")
    if tuple(x.shape) != (batch,):
        raise ValueError(
            f"{layer.name}: `{name}`[{layer.batch}] has shape {list(x.shape)}, but axis {layer.batch} is {batch} in the inputs"
        )


def _check_memory(
    layer: _rt.Layer,
    name: str,
    x: Any,
    axes: _rt.Axes,
    known: dict[str, tuple[int, str]],
    dtypes: Sequence[torch.dtype],
    first: Tensor,
) -> None:
    """Check what is written in place; the lengths of axes that are not `known` become so."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{layer.name}: `{name}` must be a torch.Tensor, got {type(x).__name__}")
    if x.device != first.device:
        raise ValueError(f"{layer.name}: `{name}` is on {x.device}, the first input on {first.device}")
    form = f"[{' '.join(axes)}]"
    if x.dim() != len(axes):
        raise ValueError(
            f"{layer.name}: `{name}` must be {form} (rank {len(axes)}), got shape {list(x.shape)} (rank {x.dim()})"
        )
    if x.dtype not in dtypes:
        expected = " or ".join(map(_name, dtypes))
        raise TypeError(f"{layer.name}: `{name}` must be {expected}, got {_name(x.dtype)}")
    for axis, length in zip(axes, x.shape, strict=True):
        wanted, owner = known.setdefault(axis, (length, f"`{name}`"))
        if length != wanted:
            raise ValueError(
                f"{layer.name}: `{name}`{form} has shape {list(x.shape)}, but axis {axis} is {wanted} in {owner}"
            )
    reach = 0
    for stride, length in sorted(zip(x.stride(), x.shape, strict=True)):
        if length > 1 and stride <= reach:
            raise ValueError(f"{layer.name}: `{name}` is written to, but some of its elements are the same memory")
        reach += (length - 1) * stride


def _check_slots(layer: _rt.Layer, read: list[int], write: list[int], count: int, writes_elsewhere: bool) -> None:
    """No index is beyond the pool, no slot is written twice, or written by one sequence and read by another."""
    name = "write_indices" if writes_elsewhere else "state_indices"
    writers: dict[int, int] = {}
    for row, (source, target) in enumerate(zip(read, write, strict=True)):
        for what, slot in (("state_indices", source), (name, target)):
            if slot >= count:
                raise ValueError(f"{layer.name}: `{what}` is {slot} at {row}, but the states have {count} slots")
        if source >= 0 and target >= 0:
            if target in writers:
                raise ValueError(
                    f"{layer.name}: `{name}` has slot {target} twice, at {writers[target]} and {row}; one may update it"
                )
            writers[target] = row
    for row, source in enumerate(read):
        if writers.get(source, row) != row:
            raise ValueError(
                f"{layer.name}: slot {source} is read at {row} of `state_indices` and updated at {writers[source]} of"
                f" `{name}`: which comes first is not defined"
            )


def output_dtypes(layer: _rt.Layer, call: Call) -> list[torch.dtype]:
    """The dtype of each output."""
    by_name = {spec.name: x for spec, x in zip(layer.inputs, call.inputs, strict=True) if x is not None}
    leader = next(iter(by_name.values())).dtype
    kinds = layer.dtypes.values()
    return [by_name[k].dtype if isinstance(k, str) else _rt.output_dtype(k, leader) for k in kinds]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
