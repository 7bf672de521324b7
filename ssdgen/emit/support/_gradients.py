"""Host side of the modules of gradients: memory for results, and sums of the parts that blocks leave, in a fixed order.

Copied verbatim beside the modules that ssdgen emits; it imports nothing of ssdgen.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import _cut, _packed, _tuned
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


@dataclass(frozen=True)
class Gradients:
    """The gradients of a layer by kernels: `launch` of an emitted module, its Configs by the dtype of the first of `keyed`, the
    inputs whose dtypes a tuning key has; `digest` and `variant` are those of the module of the forward pass."""

    layer: _rt.Layer
    launch: Callable[..., tuple[Tensor | None, ...]]
    configs: Mapping[torch.dtype, Any]
    keyed: tuple[str, ...]
    digest: str
    variant: str

    @property
    def leader(self) -> str:
        """The input that others are like."""
        return self.keyed[0]

    def __call__(
        self,
        inputs: Sequence[Tensor | None],
        scalars: Sequence[float],
        states: Sequence[Tensor | None],
        cu_seqlens: Tensor | None,
        outputs: Sequence[Tensor | None],
        finals: Sequence[Tensor | None],
        config: Any = None,
        *,
        seq_idx: Tensor | None = None,
        mask: Tensor | None = None,
        states_every: int | None = None,
        kept: Sequence[Tensor | None] = (),
    ) -> tuple[Tensor | None, ...]:
        """The gradients of inputs, then of initial states, from those that arrive at outputs, final states and, with
        `states_every`, those `kept` at the ends of blocks; for arguments as they were passed to a call of `forward` that was
        right, and that int32 reaches.

        They have the dtypes and shapes of what they are of; None for an absent optional input, and for the default of an
        absent one its own gradient, which nobody wants. Those of tokens that are in no sequence are 0. `seq_idx` and `mask`
        synchronise with the device once. Raises ValueError for so many sequences that int32 does not reach their states.
        """
        layer = self.layer
        by_name = dict(zip((i.name for i in layer.inputs), inputs, strict=True))
        initial = dict(zip(layer.states, states, strict=True))
        numbers = dict(zip((s.name for s in layer.scalars), scalars, strict=True))
        size, sequences = _packed.check(layer, by_name, initial, numbers, (cu_seqlens, seq_idx, mask))
        if sequences is not None and sequences.whole:
            sequences = None
        leader = by_name[self.leader]
        assert leader is not None
        full = [
            x if i.default is None else _rt.expand(i, x, size, leader)
            for i, x in zip(layer.inputs, inputs, strict=True)
        ]
        config = self._chosen(config, by_name, size, sequences)
        config = replace(config, chunk=chunk_of(config.chunk, states_every))
        like = zip(outputs, _cut.output_memory(layer, full, size, None), strict=True)
        arriving = [torch.zeros_like(y) if d is None else d.to(y.dtype) for d, y in like]
        del like
        first = _cut.final_memory(layer, full, [None] * len(states), size, sequences)
        ends, between = ([d if d is None else d.to(_rt.F32) for d in given] for given in (finals, kept))
        between = [x if x is not None and x.numel() else None for x in between or [None] * len(states)]
        if not size[layer.batch] or not size[layer.time]:
            found = tuple(None if x is None else torch.zeros_like(x) for x in full)
            for x, d in zip(first, ends, strict=True):
                x.zero_() if d is None else x.copy_(d)
        else:
            with torch.no_grad():
                found, first = self._launched(
                    (full, scalars, states), (arriving, ends, between), first, size, sequences, states_every, config
                )
        narrow = (narrowed(i, g, x) for i, g, x in zip(layer.inputs, found, inputs, strict=True))
        return (*narrow, *first)

    def _chosen(self, config: Any, inputs: Mapping[str, Tensor | None], size: Mapping[str, int], sequences: Any) -> Any:
        """The caller's Config, else what a tuning table has for a call's gradients, else the default."""
        keyed = [inputs[name] for name in self.keyed]
        dtypes = tuple(x.dtype for x in keyed if x is not None)
        optional = {i.name: inputs[i.name] for i in self.layer.inputs if i.optional}
        present = (*_tuned.present({**optional, "packed": sequences}), _tuned.GRADIENTS)
        leader = keyed[0]
        assert leader is not None
        return _tuned.chosen(
            self.layer, config, self.configs, digest=self.digest, variant=self.variant, present=present, size=size,
            dtypes=dtypes, x=leader, rules=(),
        )  # fmt: skip

    def _launched(
        self,
        given: tuple[Sequence[Tensor | None], Sequence[float], Sequence[Tensor | None]],
        arriving: tuple[Sequence[Tensor], Sequence[Tensor | None], Sequence[Tensor | None]],
        first: list[Tensor],
        size: Mapping[str, int],
        sequences: _packed.Sequences | None,
        every: int | None,
        config: Any,
    ) -> tuple[tuple[Tensor | None, ...], list[Tensor]]:
        """The gradients of inputs and of initial states, for which `first` is memory, an entry a sequence.

        What enters a row's first sequence, and what leaves its last, have their gradients there; what is gathered, at the
        places it came from.
        """
        layer, (full, scalars, states), (outputs, finals, kept) = self.layer, given, arriving
        tail = (every or 0, *first, sequences, config)
        if sequences is None:
            return self.launch(*full, *scalars, *states, *outputs, *finals, *kept, *tail), first
        if not reached(layer, {**size, _rt.SEQUENCE: sequences.count}, full, config.chunk):
            raise ValueError(
                f"{layer.name}: gradients of {sequences.count} packed sequences, whose states have more than 2**31 - 1"
                " elements; pass fewer at once"
            )
        full = _packed.gather(layer, sequences, full)
        named_outputs = zip(layer.outputs.items(), outputs, strict=True)
        found = self.launch(
            *full, *scalars, *_packed.spread_all(layer, sequences, states),
            *(_packed.gathered(layer, sequences, name, axes, d) for (name, axes), d in named_outputs),
            *_packed.spread_all(layer, sequences, finals, last=True), *kept, *tail,
        )  # fmt: skip
        whole = tuple(
            g if g is None or layer.time not in i.axes
            else _packed.scatter(layer, sequences, i.axes, g, size[layer.time])
            for i, g in zip(layer.inputs, found, strict=True)
        )  # fmt: skip
        rows, named = size[layer.batch], zip(layer.states, first, strict=True)
        return whole, [_packed.pick_states(layer, sequences, name, x, rows, last=False) for name, x in named]


def chunk_of(chunk: int, every: int | None) -> int:
    """`chunk`, or fewer tokens where states are kept `every` so many, for a chunk to end wherever one is."""
    return chunk if every is None else min(chunk, every & -every)


def reached(layer: _rt.Layer, size: Mapping[str, int], inputs: Sequence[Tensor | None], chunk: int = CHUNK) -> bool:
    """Whether int32 reaches every array, entry states of chunks of `chunk` tokens among them, and a tile a whole state."""
    channels = (a for axes in layer.states.values() for a in axes if a not in (layer.batch, layer.head))
    if any(size[a] > WIDEST for a in channels):
        return False
    tokens = max(x.numel() for x in inputs if x is not None)
    chunks = (size[layer.time] // chunk + 1) * size[layer.batch] + size.get(_rt.SEQUENCE, 0)
    states = max(math.prod(size[a] for a in axes if a != layer.batch) for axes in layer.states.values())
    return max(tokens, chunks * states) <= _rt.LIMIT


def narrowed(spec: _rt.Input, gradient: Tensor | None, x: Tensor | None) -> Tensor | None:
    """The gradient of an input in its widest form as that of the form it was passed in."""
    if gradient is None or x is None or x.dim() == len(spec.axes):
        return gradient
    axes = next(a for a in spec.narrower if len(a) == x.dim())
    return gradient.sum([at for at, axis in enumerate(spec.axes) if axis not in axes])


def memory(x: Tensor, sequences: _packed.Sequences | None, shares: int = 0) -> Tensor:
    """Memory for the gradient of `x`, or for as many parts of it as there are `shares`, in float32 if those are several."""
    make = torch.zeros if sequences is not None and sequences.gaps else torch.empty
    shape = (shares, *x.shape) if shares else x.shape
    return make(shape, dtype=_rt.F32 if shares > 1 else x.dtype, device=x.device)


def parts(shape: tuple[int, ...], sequences: _packed.Sequences | None, like: Tensor) -> Tensor:
    """Memory for what each chunk adds to a sum, zero where there may be no chunk."""
    return (torch.empty if sequences is None else torch.zeros)(shape, dtype=_rt.F32, device=like.device)


def summed(shared: Tensor, like: Tensor) -> Tensor:
    """The sum of the parts of a gradient that blocks left."""
    return shared[0] if len(shared) == 1 else shared.sum(0).to(like.dtype)


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
