"""One-token steps at run time: checks, slots of a pool of states, and the loop over tokens where there are no kernels.

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
    """The arguments of a call of `step`, or with `several` of `steps`, in the order of the layer's declarations."""

    states: tuple[Tensor, ...]
    inputs: Tensors
    scalars: tuple[float, ...]
    read: Tensor | None
    write: Tensor | None
    before: Tensors
    out: Tensors
    several: bool


def run(
    step: Step,
    states: tuple[Tensor, ...],
    inputs: Tensors,
    scalars: tuple[float, ...],
    indices: tuple[Tensor | None, Tensor | None],
    before: Any,
    out: Any,
    config: Any,
    several: bool,
) -> Any:
    """Move the states by a token, or several: the outputs. They are checked first, and nothing is written if they are wrong.

    `before` and `out` are None, a tensor, or a tuple where there are several states or outputs.
    """
    layer = step.layer
    read, write = indices
    call = Call(
        states, inputs, scalars, read, read if write is None else write,
        _each(layer, "before", before, tuple(layer.states)), _each(layer, "out", out, tuple(layer.outputs)), several,
    )  # fmt: skip
    size = _checked(step, call, write is not None)
    specs = (step.several if several else step.one).inputs
    expanded = [
        x if spec.default is None else _rt.expand(spec, x, size, states[0])
        for spec, x in zip(specs, inputs, strict=True)
    ]
    config = step.config if config is None else config
    if not isinstance(config, type(step.config)):
        expected = type(step.config).__name__
        raise TypeError(f"{layer.name}: `config` must be a {layer.name}.{expected}, got {type(config).__name__}")
    if not _rt.runs_kernels(states[0]):
        outputs = _portable(step, call, expanded, size)
    elif step.kernels is None:
        raise NotImplementedError(f"{layer.name}: no kernels are emitted for its steps; compute on the CPU")
    else:
        outputs = _launched(step, call, expanded, size, config)
    return outputs[0] if len(outputs) == 1 else outputs


def _each(layer: _rt.Layer, name: str, given: Any, names: Sequence[str]) -> Tensors:
    """A tensor for each of `names`: None for all, one alone, or a tuple."""
    if given is None:
        return (None,) * len(names)
    tensors = given if isinstance(given, tuple | list) else (given,)
    if len(tensors) != len(names) or (len(names) > 1 and given is tensors[0]):
        expected = "a tensor" if len(names) == 1 else f"a tuple of {len(names)} tensors, for {', '.join(names)}"
        raise TypeError(f"{layer.name}: `{name}` must be {expected}, got {type(given).__name__} of {len(tensors)}")
    return tuple(tensors)


def tile(most: int, size: int) -> int:
    """The tile of an axis of `size`, `most` at most: the largest that cuts it evenly, else one that covers it."""
    even = next((t for t in (256, 128, 64, 32, 16) if t <= most and size % t == 0), 0)
    return even or min(most, 1 << max(4, (size - 1).bit_length()))


def columns(size: int) -> int:
    """The tile of all columns of a state, a power of two from 32 to 256. ValueError for more columns."""
    if size > 256:
        raise ValueError(f"steps keep whole state columns in registers, 256 at most, got {size}; compute on the CPU")
    return _rt.covering(size)


def check_config(layer: _rt.Layer, values: Mapping[str, Any]) -> None:
    """Check the fields of a StepConfig; ValueError names the field, what it may be, and what came."""
    for name, value in values.items():
        if name.startswith("tile_"):
            good, expected = value in (16, 32, 64, 128, 256), "a power of two from 16 to 256"
        elif name == "warps":
            good, expected = value in (0, 4, 8), "0, 4 or 8"
        else:
            good, expected = value in range(33), "an integer from 0 to 32"
        if not good or type(value) is not int:
            raise ValueError(f"{layer.name}: step config field `{name}` must be {expected}, got {value!r}")


_KNOWN: dict[tuple[Any, ...], tuple[Step, dict[str, int]]] = {}
"""Calls that were right, by all that `check` looks at, with the step, which keeps its identity from being used again."""


def _checked(step: Step, call: Call, writes_elsewhere: bool) -> dict[str, int]:
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
    for (name, axes), dtype, out in zip(layer.outputs.items(), _output_dtypes(layer, call), call.out, strict=True):
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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _output_dtypes(layer: _rt.Layer, call: Call) -> list[torch.dtype]:
    """The dtype of each output."""
    by_name = {spec.name: x for spec, x in zip(layer.inputs, call.inputs, strict=True) if x is not None}
    leader = next(iter(by_name.values())).dtype
    kinds = layer.dtypes.values()
    return [by_name[k].dtype if isinstance(k, str) else _rt.output_dtype(k, leader) for k in kinds]


def _launched(
    step: Step, call: Call, inputs: list[Tensor | None], size: Mapping[str, int], config: Any
) -> tuple[Tensor, ...]:
    """Launch the kernels, on inputs that all have a token axis."""
    layer, kernels = step.several if call.several else step.one, step.kernels
    assert kernels is not None
    _rt.check_kernels(layer.name, (*call.inputs, *call.states))
    make = torch.empty if call.read is None else torch.zeros
    device = call.states[0].device
    outputs = tuple(
        [
            make([size[a] for a in axes], dtype=dtype, device=device) if out is None else out
            for axes, dtype, out in zip(layer.outputs.values(), _output_dtypes(layer, call), call.out, strict=True)
        ]
    )
    written = outputs
    if not call.several:
        inputs = [x if at < 0 or x is None else x.unsqueeze(at) for x, at in zip(inputs, step.places, strict=True)]
        places = [axes.index(layer.time) for axes in step.layer.outputs.values()]
        written = tuple([y.unsqueeze(at) for y, at in zip(outputs, places, strict=True)])
    if size[layer.batch] and size[layer.time]:
        scalars = [float(s) for s in call.scalars]
        kernels(*inputs, *scalars, *call.states, *call.before, *written, call.read, call.write, config)
    return outputs


def _portable(step: Step, call: Call, inputs: list[Tensor | None], size: dict[str, int]) -> tuple[Tensor, ...]:
    """Token by token in plain torch. States in the dtype that is computed in are moved where they are, unless somebody
    differentiates the outputs, or they are slots of a pool."""
    layer = step.layer
    rows = None if call.read is None else (call.read >= 0).nonzero()[:, 0]
    interface = step.several if call.several else step.one
    inputs = [_rows(layer, spec.axes, x, rows) for spec, x in zip(interface.inputs, inputs, strict=True)]
    dtype = _rt.widest((*inputs, *call.states))
    tracked = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*inputs, *call.states))
    held = list(call.states)
    if rows is not None and call.read is not None:
        named = zip(layer.states.values(), held, strict=True)
        held = [s.index_select(axes.index(layer.batch), call.read[rows]) for axes, s in named]
    scalars = [_rt.scalar(s, call.states[0]) for s in call.scalars]
    pieces: list[list[Tensor]] = [[] for _ in layer.outputs]
    for token in range(size[layer.time]):
        now = inputs
        if call.several:
            now = [x if at < 0 or x is None else x.select(at, token) for x, at in zip(inputs, step.places, strict=True)]
        for axes, kept, state in zip(layer.states.values(), call.before, held, strict=True):
            if kept is not None:
                at = axes.index(layer.batch)
                _put(kept.select(at + 1, token), at, rows, state)
        moved = [s if s.dtype == dtype and not tracked else s.to(dtype, copy=True) for s in held]
        outputs = step.portable(*now, *scalars, *moved, size)
        held = [_stored(s, m) for s, m in zip(held, moved, strict=True)]
        for piece, y in zip(pieces, outputs, strict=True):
            piece.append(y)
    for axes, state, new in zip(layer.states.values(), call.states, held, strict=True):
        at = axes.index(layer.batch)
        if rows is not None and call.write is not None:
            targets = call.write[rows]
            kept = (targets >= 0).nonzero()[:, 0]
            _put(state, at, targets[kept], new.index_select(at, kept))
        elif new is not state:
            _put(state, at, None, new)
    return tuple([_output(step, call, size, i, piece, rows) for i, piece in enumerate(pieces)])


def _rows(layer: _rt.Layer, axes: _rt.Axes, x: Tensor | None, rows: Tensor | None) -> Tensor | None:
    """The rows of a tensor along the batch axis; all of one without it, or where `rows` is None."""
    return x if x is None or rows is None or layer.batch not in axes else x.index_select(axes.index(layer.batch), rows)


def _put(target: Tensor, at: int, rows: Tensor | None, value: Tensor) -> None:
    """Write `value` to `rows` of `target` along dimension `at`, to all if None; rounded, and not differentiated."""
    with torch.no_grad():
        value = value.detach().to(target.dtype)
        if rows is None:
            target.copy_(value)
        else:
            target.index_copy_(at, rows.long(), value)


def _stored(state: Tensor, moved: Tensor) -> Tensor:
    """A moved state in the dtype that it is kept in."""
    return state if moved is state else moved.to(state.dtype)


def _output(
    step: Step, call: Call, size: Mapping[str, int], number: int, pieces: list[Tensor], rows: Tensor | None
) -> Tensor:
    """An output of all tokens, in the caller's memory if there is some."""
    layer, out = step.several if call.several else step.one, call.out[number]
    axes = list(layer.outputs.values())[number]
    if not call.several:
        value = pieces[0]
    elif pieces:
        value = torch.stack(pieces, axes.index(layer.time))
    else:
        value = call.states[0].new_zeros([size[a] for a in axes], dtype=_output_dtypes(layer, call)[number])
    at = axes.index(layer.batch)
    if out is None:
        if rows is None or not pieces:
            return value
        whole = value.new_zeros([size[a] for a in axes])
        return whole.index_copy(at, rows, value)
    if rows is None or not pieces:
        return out.copy_(value)
    return out.index_copy_(at, rows, value)
