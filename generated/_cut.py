"""How the tokens of a call are cut for kernels: into pieces that int32 reaches, into segments, into packed sequences.

Copied verbatim beside the modules that ssdgen emits; it imports nothing of ssdgen.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import _blocks, _packed, _tuned
from . import _runtime as _rt
from ._segments import segments


@dataclass(frozen=True)
class Cut:
    """A call cut into chunks and segments.

    Workspaces have `lanes` of `slots` chunks, and `parts` end states in a lane. A walk is a batch entry of `segments`
    segments, of which `inner` have one behind them; or, packed, a segment of a sequence in the tables (see `_packed`).
    """

    lanes: int
    slots: int
    walks: int
    segments: int
    inner: int
    parts: int
    per_segment: int
    chunk_table: Tensor
    segment_table: Tensor

    @property
    def ends(self) -> int:
        """End states in a lane where the last segment has one too."""
        return _one_class(self.parts + 1)


def cut(
    batch: int,
    length: int,
    chunk: int,
    wanted: int,
    blocks: int,
    column: int,
    sequences: _packed.Sequences | None,
    like: Tensor,
    per_segment: int = 0,
) -> Cut:
    """Cut a batch, or packed sequences, into chunks of `chunk` tokens and about `wanted` segments (0 to choose) of a batch
    entry, or those of a batch into segments of `per_segment` chunks if that is not 0; `blocks` blocks walk a segment, with
    states of `column` columns. Of packed sequences all together have about as many segments more than there are sequences."""
    if sequences is None:
        return _whole_cut(batch, length, chunk, wanted, blocks, column, multiprocessors(like), per_segment, like.device)
    chunks = _rt.ceil_div(sequences.tokens, chunk)
    count, per_segment = segments(wanted, chunks, blocks, column, multiprocessors(like))
    chunk_table = _packed.chunk_table(sequences, chunk)
    table = _packed.segment_table(sequences, chunk, per_segment)
    parts = _one_class(len(table))
    return Cut(1, len(chunk_table), len(table), 1, int(count > 1), parts, per_segment, chunk_table, table)


@functools.lru_cache(maxsize=1024)
def _whole_cut(
    batch: int,
    length: int,
    chunk: int,
    wanted: int,
    blocks: int,
    column: int,
    processors: int,
    per_segment: int,
    device: torch.device,
) -> Cut:
    """The cut of a batch; made once for calls that do not differ in it."""
    chunks = _rt.ceil_div(length, chunk)
    if per_segment:
        count = _rt.ceil_div(chunks, per_segment)
    else:
        count, per_segment = segments(wanted, chunks, batch * blocks, column, processors)
    none = _no_table(device)
    parts = _one_class(count - 1) if count > 1 else 1
    return Cut(batch, chunks, batch, count, count - 1, parts, per_segment, none, none)


@functools.cache
def _no_table(device: torch.device) -> Tensor:
    """What kernels of whole batches take for a table and never read."""
    return _rt.lasting(torch.zeros((1, 8), dtype=torch.int32, device=device))


def _one_class(length: int) -> int:
    """At least `length`, and neither 1 nor a multiple of 16: kernels are compiled for each of these classes of lengths."""
    return max(2, length + (length % 16 == 0))


def held(blocks: int, occupancy: int, like: Tensor) -> int:
    """How many of `blocks` blocks to launch for each to run to its end at once: `occupancy` (0 for one) a multiprocessor."""
    return min(blocks, multiprocessors(like) * max(1, occupancy))


def multiprocessors(x: Tensor) -> int:
    """Those of the GPU that `x` is on; an H200's where there is none."""
    gpu = _tuned.gpu_of(x)
    return 132 if gpu is None else gpu.multiprocessors


def pieces(
    layer: _rt.Layer, size: Mapping[str, int], chunk: int, tensors: Sequence[Tensor | None]
) -> Iterator[tuple[slice, slice]]:
    """Cut (batch, time) so that int32 reaches every array of a piece: over batch, then over time in whole chunks, or blocks
    of chunks.

    Pieces of one slice of the batch come in the order of time, so that each continues the state of the one before.
    """
    batch, length = size[layer.batch], size[layer.time]
    chunks = _rt.ceil_div(length, chunk)
    per_token = max(t.numel() for t in tensors if t is not None) // (batch * length)
    per_chunk = max(math.prod(size[a] for a in axes if a != layer.batch) for axes in layer.states.values())
    most = max(1, _rt.LIMIT // max(1, per_chunk, (per_token + 1) * chunk))
    rows, tokens = max(1, most // chunks), min(chunks, most) * chunk
    for first in range(0, batch, rows):
        for start in range(0, length, tokens):
            yield slice(first, min(batch, first + rows)), slice(start, min(length, start + tokens))


def run(
    layer: _rt.Layer,
    launch: Callable[..., tuple[Tensor, ...]],
    sequences: _packed.Sequences | None,
    inputs: tuple[Tensor | None, ...],
    scalars: tuple[float, ...],
    states: tuple[Tensor | None, ...],
    size: Mapping[str, int],
    config: Any,
    every: int | None,
    keep: bool,
) -> tuple[Tensor, ...]:
    """Compute a checked call with kernels: outputs and final states, `launch`ed on tensors that int32 reaches; then, unless
    `every` is None, the states at the ends of blocks of so many tokens; last, of a call of whole sequences in one piece from
    which gradients should `keep` it, what the launch returns."""
    _rt.check_kernels(layer.name, (*inputs, *states))
    if sequences is not None and sequences.whole:
        sequences = None
    length = size[layer.time]
    if sequences is not None and length and size[layer.batch]:
        inputs = _packed.gather(layer, sequences, inputs)
        states = _packed.spread_all(layer, sequences, states)
        if sequences.kept is not None:
            size = {**size, layer.time: sequences.kept.shape[1]}
    outputs = output_memory(layer, inputs, size, sequences)
    finals = final_memory(layer, inputs, states, size, sequences)
    kept = _blocks.memory(layer, size, every, sequences is not None, outputs[0])
    blocks = functools.partial(_blocks.passed, layer, kept, every)
    if not size[layer.batch] or not size[layer.time]:
        for final, state in zip(finals, states, strict=True):
            final.zero_() if state is None else final.copy_(state)
    elif sequences is not None:
        if any(t is not None and t.numel() > _rt.LIMIT for t in (*inputs, *outputs, *finals, *kept)):
            raise ValueError(f"{layer.name}: packed sequences of more than 2**31 - 1 elements; pass fewer at once")
        launch(*inputs, *scalars, *states, *outputs, *finals, *blocks(), sequences, config)
    else:
        cuts = list(pieces(layer, size, every or config.chunk, (*inputs, *outputs)))
        if len(cuts) == 1:
            tokens = launch(*inputs, *scalars, *states, *outputs, *finals, *blocks(), None, config)
            return (*outputs, *finals, *kept, *(tokens if keep else ()))
        for rows, now in cuts:
            initial = (
                [s if s is None else s[rows] for s in states] if not now.start else [f[rows].clone() for f in finals]
            )
            part = functools.partial(piece_of, layer, rows, now)
            launch(
                *(part(i.axes, x) for i, x in zip(layer.inputs, inputs, strict=True)), *scalars, *initial,
                *(part(axes, y) for axes, y in zip(layer.outputs.values(), outputs, strict=True)),
                *(f[rows] for f in finals), *blocks(rows, now), None, config,
            )  # fmt: skip
    if sequences is None:
        return (*outputs, *finals, *kept)
    placed = zip(layer.outputs.values(), outputs, strict=True)
    outputs = [_packed.scatter(layer, sequences, axes, y, length) for axes, y in placed]
    ends = zip(layer.states, finals, strict=True)
    picked = (_packed.pick_states(layer, sequences, name, s, size[layer.batch]) for name, s in ends)
    return (*outputs, *picked, *kept)


def output_memory(
    layer: _rt.Layer, inputs: Sequence[Tensor | None], size: Mapping[str, int], sequences: _packed.Sequences | None
) -> list[Tensor]:
    """Memory for the outputs; zero where tokens may belong to no sequence."""
    device = next(x for x in inputs if x is not None).device
    make = torch.zeros if sequences is not None and sequences.gaps else _rt.empty
    dtypes = output_dtypes(layer, inputs)
    return [
        make([size[a] for a in axes], dtype=dtype, device=device)
        for axes, dtype in zip(layer.outputs.values(), dtypes, strict=True)
    ]


def output_dtypes(layer: _rt.Layer, inputs: Sequence[Tensor | None]) -> list[torch.dtype]:
    """The dtype of each output of kernels."""
    by_name = {spec.name: x for spec, x in zip(layer.inputs, inputs, strict=True)}
    leader = next(x for x in inputs if x is not None)
    out = []
    for name in layer.outputs:
        kind = layer.dtypes[name]
        like = by_name[kind] if isinstance(kind, str) else None
        out.append(kind if isinstance(kind, torch.dtype) else leader.dtype if like is None else like.dtype)
    return out


def final_memory(
    layer: _rt.Layer,
    inputs: Sequence[Tensor | None],
    states: Sequence[Tensor | None],
    size: Mapping[str, int],
    sequences: _packed.Sequences | None,
) -> list[Tensor]:
    """Memory for the final states, an entry a sequence."""
    device = next(x for x in inputs if x is not None).device
    entries = size.get(_rt.SEQUENCE, size[layer.batch]) if sequences is None else sequences.count
    shapes = ([entries if a == layer.batch else size[a] for a in axes] for axes in layer.states.values())
    return [
        _rt.empty(shape if s is None else s.shape, dtype=_rt.F32, device=device)
        for shape, s in zip(shapes, states, strict=True)
    ]


def piece_of(layer: _rt.Layer, rows: slice, now: slice, axes: _rt.Axes, x: Tensor | None) -> Tensor | None:
    """The piece of a tensor: rows of its batch axis, tokens of its time axis."""
    return None if x is None else x[place_of(layer, rows, now, axes)]


def place_of(layer: _rt.Layer, rows: slice, now: slice, axes: _rt.Axes) -> tuple[slice, ...]:
    """The index of a piece in a tensor of these axes."""
    return tuple([rows if a == layer.batch else now if a == layer.time else slice(None) for a in axes])
