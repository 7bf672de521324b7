"""One-token steps at run time: launches, slots of a pool of states, and the loop over tokens where there are no kernels.

Copied verbatim beside the modules that ssdgen emits; it imports nothing of ssdgen.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from . import _cut, _replay
from . import _runtime as _rt
from ._step_call import Call, Tensors, checked, output_dtypes
from ._step_call import Step as Step

HALF = (64, 4, 8)
"""Tile, blocks a multiprocessor and warps a block for states of bfloat16: as many bytes on their way as of float32."""

NARROW = (32, 4, 8)
"""The same where a module's own config would make fewer than SOME blocks a multiprocessor."""

FEW = (8, 4, 4)
"""The same where those are fewer than two a multiprocessor."""

SOME = 16


def run(
    step: Step,
    states: tuple[Tensor, ...],
    inputs: Tensors,
    scalars: tuple[float, ...],
    indices: tuple[Tensor | None, Tensor | None],
    before: Any,
    out: Any,
    steady: bool,
    config: Any,
    several: bool,
) -> Any:
    """Move the states by a token, or several: the outputs. They are checked first, and nothing is written if they are wrong.

    `before` and `out` are None, a tensor, or a tuple where there are several states or outputs.
    """
    layer = step.layer
    _rt.check_flag(layer.name, "steady", steady)
    kept, memory = _each(layer, "before", before, tuple(layer.states)), _each(layer, "out", out, tuple(layer.outputs))
    arguments = (*inputs, *scalars, *states, *indices, *kept, *memory, config)
    traced = step.kernels is None or torch.compiler.is_compiling()
    outputs = (functools.partial(_run, step, several, steady) if traced else _calls(step, several, steady))(*arguments)
    return outputs[0] if len(outputs) == 1 else outputs


@functools.cache
def _calls(step: Step, several: bool, steady: bool) -> _replay.Calls:
    """Steps that come again, by the same memory of states or other."""
    inputs, scalars = len(step.layer.inputs), len(step.layer.scalars)
    function = functools.partial(_run, step, several, steady)
    return _replay.Calls(function, {_rt.F32: step.config}, inputs, scalars, absent=0)


def _run(step: Step, several: bool, steady: bool, *arguments: Any) -> tuple[Tensor, ...]:
    """What `run` does, of all its arguments one behind the other."""
    layer = step.layer
    *values, config = arguments
    counts = (len(layer.inputs), len(layer.scalars), len(layer.states), 2, len(layer.states), len(layer.outputs))
    ends = (0, *itertools.accumulate(counts))
    inputs, scalars, states, (read, write), before, out = (tuple(values[a:b]) for a, b in itertools.pairwise(ends))
    specs = (step.several if several else step.one).inputs
    # Slots may just have been written, and so may a default, where this call makes it.
    given = all(x is not None or spec.default is None for spec, x in zip(specs, inputs, strict=True))
    steady = steady and read is None and given
    call = Call(states, inputs, scalars, read, read if write is None else write, before, out, several, steady)
    size = checked(step, call, write is not None)
    expanded = [
        x if spec.default is None else _rt.expand(spec, x, size, states[0])
        for spec, x in zip(specs, inputs, strict=True)
    ]
    if config is not None and not isinstance(config, type(step.config)):
        expected = type(step.config).__name__
        raise TypeError(f"{layer.name}: `config` must be a {layer.name}.{expected}, got {type(config).__name__}")
    if not _rt.runs_kernels(states[0]):
        outputs = _portable(step, call, expanded, size)
    elif step.kernels is None:
        raise NotImplementedError(f"{layer.name}: no kernels are emitted for its steps; compute on the CPU")
    else:
        outputs = _launched(step, call, expanded, size, config or fitted(step.config, layer, states[0], size))
    return outputs


def _each(layer: _rt.Layer, name: str, given: Any, names: Sequence[str]) -> Tensors:
    """A tensor for each of `names`: None for all, one alone, or a tuple."""
    if given is None:
        return (None,) * len(names)
    tensors = given if isinstance(given, tuple | list) else (given,)
    if len(tensors) != len(names) or (len(names) > 1 and given is tensors[0]):
        expected = "a tensor" if len(names) == 1 else f"a tuple of {len(names)} tensors, for {', '.join(names)}"
        raise TypeError(f"{layer.name}: `{name}` must be {expected}, got {type(given).__name__} of {len(tensors)}")
    return tuple(tensors)


def fitted(config: Any, layer: _rt.Layer, state: Tensor, size: Mapping[str, int]) -> Any:
    """The `config` of a module, or what was faster on an H200: with states of bfloat16, or where its blocks would be too few
    for the GPU."""
    tiles = _tiles_of(config)
    blocks = size[layer.batch] * size[layer.head]
    for name in tiles:
        blocks *= _rt.ceil_div(size[name.removeprefix("tile_")], getattr(config, name))
    multiprocessors = _cut.multiprocessors(state)
    if blocks < 2 * multiprocessors:
        return _changed(config, tiles, *FEW)
    if blocks < SOME * multiprocessors:
        return _changed(config, tiles, *NARROW)
    return _changed(config, tiles, *HALF) if state.dtype == _rt.BF16 else config


@functools.cache
def _tiles_of(config: Any) -> tuple[str, ...]:
    return tuple(f.name for f in fields(config) if f.name.startswith("tile_"))


@functools.cache
def _changed(config: Any, tiles: tuple[str, ...], tile: int, occupancy: int, warps: int) -> Any:
    return replace(config, occupancy=occupancy, warps=warps, **dict.fromkeys(tiles, tile))


def tile(most: int, size: int) -> int:
    """The tile of an axis of `size`, `most` at most: the largest that cuts it evenly, else one that covers it."""
    even = next((t for t in (256, 128, 64, 32, 16, 8, 4) if t <= most and size % t == 0), 0)
    return even or min(most, 1 << max(2, (size - 1).bit_length()))


def columns(size: int) -> int:
    """The tile of all columns of a state, a power of two from 32 to 256. ValueError for more columns."""
    if size > 256:
        raise ValueError(f"steps keep whole state columns in registers, 256 at most, got {size}; compute on the CPU")
    return _rt.covering(size)


def check_config(layer: _rt.Layer, values: Mapping[str, Any]) -> None:
    """Check the fields of a StepConfig; ValueError names the field, what it may be, and what came."""
    for name, value in values.items():
        if name.startswith("tile_"):
            good, expected = value in (4, 8, 16, 32, 64, 128, 256), "a power of two from 4 to 256"
        elif name == "warps":
            good, expected = value in (0, 4, 8), "0, 4 or 8"
        else:
            good, expected = value in range(33), "an integer from 0 to 32"
        if not good or type(value) is not int:
            raise ValueError(f"{layer.name}: step config field `{name}` must be {expected}, got {value!r}")


def _launched(
    step: Step, call: Call, inputs: list[Tensor | None], size: Mapping[str, int], config: Any
) -> tuple[Tensor, ...]:
    """Launch the kernels, on inputs that all have a token axis."""
    layer, kernels = step.several if call.several else step.one, step.kernels
    assert kernels is not None
    _rt.check_kernels(layer.name, (*call.inputs, *call.states))
    make = _rt.empty if call.read is None else torch.zeros
    device = call.states[0].device
    outputs = tuple(
        [
            make([size[a] for a in axes], dtype=dtype, device=device) if out is None else out
            for axes, dtype, out in zip(layer.outputs.values(), output_dtypes(layer, call), call.out, strict=True)
        ]
    )
    written = outputs
    if not call.several:
        inputs = [x if at < 0 or x is None else x.unsqueeze(at) for x, at in zip(inputs, step.places, strict=True)]
        places = [axes.index(layer.time) for axes in step.layer.outputs.values()]
        written = tuple([y.unsqueeze(at) for y, at in zip(outputs, places, strict=True)])
    if size[layer.batch] and size[layer.time]:
        scalars = [float(s) for s in call.scalars]
        kernels(*inputs, *scalars, *call.states, *call.before, *written, call.read, call.write, call.steady, config)
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
        value = call.states[0].new_zeros([size[a] for a in axes], dtype=output_dtypes(layer, call)[number])
    at = axes.index(layer.batch)
    if out is None:
        if rows is None or not pieces:
            return value
        whole = value.new_zeros([size[a] for a in axes])
        return whole.index_copy(at, rows, value)
    if rows is None or not pieces:
        return out.copy_(value)
    return out.index_copy_(at, rows, value)
