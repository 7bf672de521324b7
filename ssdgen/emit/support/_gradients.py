"""Host side of the modules of gradients: memory for results, and sums of the parts that blocks leave, in a fixed order.

Copied verbatim beside the modules that ssdgen emits; it imports nothing of ssdgen.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _cut, _packed, _replay, _sums
from . import _runtime as _rt

CHUNK = 64
"""Tokens of a chunk, at least."""

BLOCKS = 2
"""Blocks of a walk that run on a multiprocessor at once."""

PROLOGUE, JUMP = 2.0, 0.5
"""Chunks of a walk that take as long as all of a block that is no chunk, and as the jump over a segment."""

MOST_SEGMENTS = 32

WIDEST = 256
"""The longest axis of a state that a tile holds."""


class Gradients:
    """The gradients of a layer by kernels: `launch` of an emitted module, its Configs by the dtype of the input `leader`, and
    the dimensions to sum over of what it leaves in parts, by input."""

    def __init__(
        self,
        layer: _rt.Layer,
        launch: Callable[..., tuple[Tensor | None, ...]],
        configs: Mapping[torch.dtype, Any],
        leader: str,
        parts: Mapping[str, tuple[int, ...]],
    ) -> None:
        self.layer, self.configs, self.leader = layer, configs, leader
        self._launch, self._parts = launch, parts
        self._calls = _replay.Calls(self._launched, configs, len(layer.inputs), len(layer.scalars), absent=1)

    def __call__(
        self,
        inputs: Sequence[Tensor | None],
        scalars: Sequence[float],
        states: Sequence[Tensor | None],
        cu_seqlens: Tensor | None,
        outputs: Sequence[Tensor | None],
        finals: Sequence[Tensor | None],
        config: Any = None,
    ) -> tuple[Tensor | None, ...] | None:
        """The gradients of inputs, then of initial states, from those that arrive at outputs and final states, as they were
        passed to a call of `forward` that was right; None if int32 does not reach its arrays, or no tile holds its states.

        They have the dtypes and shapes of what they are of; None for what is absent.
        """
        found: tuple[Tensor | None, ...] | None
        found = self._calls(*inputs, *scalars, *states, *outputs, *finals, cu_seqlens, config)
        return found

    def _whole(self, spec: _rt.Input, gradient: Tensor | None, x: Tensor) -> Tensor:
        """The gradient of an input, from what the kernels leave of it."""
        if gradient is None:
            return torch.zeros_like(x)
        over = self._parts.get(spec.name, ())
        if not over and gradient.dim() > len(spec.axes):
            if gradient.shape[0] == 1:
                return gradient[0]
            over = (0,)
        missing = repeated(spec, x)
        if not missing:
            return _sums.summed(gradient, over, x) if over else gradient
        if over == (0, 1) and missing == [len(spec.axes) - 1] and gradient.shape[-1] <= WIDEST:
            return _sums.summed(gradient, over, x, gradient.shape[-1])
        kept = [d for d in range(gradient.dim()) if d not in over]
        return gradient.sum((*over, *(kept[at] for at in missing))).to(x.dtype)

    def _launched(self, *arguments: Any) -> tuple[Tensor | None, ...] | None:
        """The gradients of a call: what its kernels leave of each, summed."""
        layer = self.layer
        *values, cu_seqlens, config = arguments
        ends = itertools.accumulate(map(len, (layer.inputs, layer.scalars, layer.states, layer.outputs, layer.states)))
        inputs, scalars, states, outputs, finals = (values[a:b] for a, b in itertools.pairwise((0, *ends)))
        by_name = dict(zip((i.name for i in layer.inputs), inputs, strict=True))
        initial = dict(zip(layer.states, states, strict=True))
        numbers = dict(zip((s.name for s in layer.scalars), scalars, strict=True))
        size, sequences = _packed.check(layer, by_name, initial, numbers, (cu_seqlens, None, None))
        if not reached(layer, size, inputs):
            return None
        leader = by_name[self.leader]
        full = [
            x if i.default is None else _rt.expand(i, x, size, leader)
            for i, x in zip(layer.inputs, inputs, strict=True)
        ]
        dtypes = _cut.output_dtypes(layer, full)
        arriving = [
            torch.zeros([size[a] for a in axes], dtype=dtype, device=leader.device) if d is None else d.to(dtype)
            for axes, dtype, d in zip(layer.outputs.values(), dtypes, outputs, strict=True)
        ]
        first = _cut.final_memory(layer, full, [None] * len(states), size, sequences)
        passed = [d if d is None else d.to(_rt.F32) for d in finals]
        if not size[layer.batch] or not size[layer.time]:
            for x, d in zip(first, passed, strict=True):
                x.zero_() if d is None else x.copy_(d)
            found: tuple[Tensor | None, ...] = (None,) * len(full)
        else:
            numbered = [float(s) for s in scalars]
            config = config or self.configs[leader.dtype]
            with torch.no_grad():
                found = self._launch(*full, *numbered, *states, *arriving, *passed, *first, sequences, config)
        # of what is absent nobody wants the gradient, whose memory is then but memory between kernels
        whole = (
            None if x is None else self._whole(i, g, x) for i, g, x in zip(layer.inputs, found, inputs, strict=True)
        )
        return (*whole, *(None if s is None else x for s, x in zip(states, first, strict=True)))


def reached(layer: _rt.Layer, size: Mapping[str, int], inputs: Sequence[Tensor | None]) -> bool:
    """Whether int32 reaches every array, entry states of chunks of CHUNK tokens among them, and a tile a whole state."""
    channels = (a for axes in layer.states.values() for a in axes if a not in (layer.batch, layer.head))
    if any(size[a] > WIDEST for a in channels):
        return False
    tokens = max(x.numel() for x in inputs if x is not None)
    chunks = (size[layer.time] // CHUNK + 1) * size[layer.batch] + size.get(_rt.SEQUENCE, 0)
    states = max(math.prod(size[a] for a in axes if a != layer.batch) for axes in layer.states.values())
    return max(tokens, chunks * states) <= _rt.LIMIT


def repeated(spec: _rt.Input, x: Tensor) -> list[int]:
    """The dimensions of an input's widest form that the form it was passed in lacks."""
    if x.dim() == len(spec.axes):
        return []
    axes = next(a for a in spec.narrower if len(a) == x.dim())
    return [at for at, axis in enumerate(spec.axes) if axis not in axes]


def memory(x: Tensor, sequences: _packed.Sequences | None, shares: int = 0) -> Tensor:
    """Memory for the gradient of `x`, or for as many parts of it as there are `shares`, in float32 if those are several."""
    make = torch.zeros if sequences is not None and sequences.gaps else _rt.empty
    shape = (shares, *x.shape) if shares else x.shape
    return make(shape, dtype=_rt.F32 if shares > 1 else x.dtype, device=x.device)


def parts(shape: tuple[int, ...], sequences: _packed.Sequences | None, like: Tensor) -> Tensor:
    """Memory for what each chunk adds to a sum, zero where there may be no chunk."""
    return (_rt.empty if sequences is None else torch.zeros)(shape, dtype=_rt.F32, device=like.device)


def segments(wanted: int, chunks: int, blocks: int, like: Tensor) -> int:
    """How many segments `chunks` chunks are cut into: `wanted`, or if that is 0 those that take least time, where `blocks`
    blocks walk each segment, BLOCKS of them on a multiprocessor at once, and all but one segment are walked twice."""
    if wanted:
        return wanted
    room = BLOCKS * _cut.multiprocessors(like)
    most = max(1, min(chunks, MOST_SEGMENTS))
    return min(range(1, most + 1), key=lambda n: _walk_cost(n, chunks, blocks, room))


def _walk_cost(pieces: int, chunks: int, blocks: int, room: int) -> float:
    """The time of a walk in `pieces` segments, in chunks."""
    per = _rt.ceil_div(chunks, pieces) + PROLOGUE
    return (per if pieces == 1 else 2 * per) * max(1.0, blocks * pieces / room) + JUMP * pieces


def shares(wanted: int, blocks: int, heads: int, like: Tensor) -> int:
    """How many blocks share the `heads` of a group: `wanted`, or if that is 0 enough for `blocks` times as many to fill the
    GPU."""
    count = wanted or _rt.ceil_div(_cut.multiprocessors(like), max(1, blocks))
    each = _rt.ceil_div(heads, max(1, min(heads, count)))
    return _rt.ceil_div(heads, each)


@functools.cache
def beside(module: str) -> bool:
    """Whether a module of gradients stands beside the emitted module `module`."""
    return importlib.util.find_spec(f"{module}_gradients") is not None


@functools.cache
def of(module: str) -> Gradients:
    """The gradients of the emitted module `module`, of the module beside it. RuntimeError if that was emitted from another
    spec: one that was edited since, and whose gradients have no kernels any more."""
    beside, found = importlib.import_module(module), importlib.import_module(f"{module}_gradients")
    if found.SPEC_DIGEST != beside.SPEC_DIGEST:
        raise RuntimeError(
            f"{found.__file__} was emitted from another spec than {beside.__file__}; run `ssdgen generate` again, or remove it"
        )
    gradients: Gradients = found.GRADIENTS
    return gradients
