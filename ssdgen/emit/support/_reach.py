"""How far the end and the beginning of a segment reach: chunks of which as good as nothing is left there are not read.

A walk that only makes the state at the end of a segment begins at the oldest chunk of which more than 2^-64 is left there, and
one back, that only makes the gradient at the beginning, ends at the newest that reads more than that. Beside an input of now,
of which all is left, float32 resolves 2^-24: one so old would have to be 2^40 times as large to be seen. What is older is not
read at all, not even a NaN. How many chunks that saves is up to the data.

Copied verbatim beside the modules that ssdgen emits; it imports nothing of ssdgen.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct
import torch
from torch import Tensor

from . import _runtime as _rt
from ._cut import Cut
from ._tiles import await_previous, load, segment_at

FORGOTTEN = -64.0
"""The log2 of what is left of a chunk from which on it counts as nothing."""

WINDOW = 128
"""Chunks that are looked at; where all of them are left, so are those beyond, as far as this kernel knows."""


@ct.function
def chunks_left(
    decay_sum: ct.Array, lane: int, head: int, slot: int, near: ct.Tile, chunks: int, chunk: int
) -> ct.Tile:
    """How many of the chunks `near`, in this order, of a walk that has its first at `slot`, are left behind those before them.

    `decay_sum`: [lane, head, token], the running sums of log2 decays within a chunk of `chunk` tokens.
    """
    inside = (near >= 0) & (near < chunks)
    last = (slot + near) * chunk + (chunk - 1)
    decays = ct.gather(decay_sum, (lane, head, last), mask=inside, padding_value=0.0)
    return ct.sum(ct.where(ct.cumsum(decays, axis=0) - decays <= FORGOTTEN, 0, 1), axis=0)  # NaN counts as left


@ct.kernel
def segment_reach(
    decay_sum: ct.Array,
    oldest: ct.Array,
    newest: ct.Array,
    segment_table: ct.Array,
    per_segment: int,
    CHUNK: ct.Constant[int],
    BACK: ct.Constant[bool],
    PACKED: ct.Constant[bool],
) -> None:
    """The oldest chunk of which anything is left at the end of a segment; BACK, the newest that its beginning reaches, too."""
    await_previous()
    heads = decay_sum.shape[1]
    lane, head = ct.bid(0) // heads, ct.bid(0) % heads
    slot, segment, row = 0, ct.bid(1), ct.bid(1)
    chunks = decay_sum.shape[2] // CHUNK
    if PACKED:
        row = lane
        _, _, start, stop, slot, segment, _ = segment_at(segment_table, row)
        lane, chunks = 0, ct.cdiv(stop - start, CHUNK)
    begin = segment * per_segment
    end = ct.minimum(begin + per_segment, chunks)
    place = ct.arange(WINDOW, dtype=ct.int32)

    left = chunks_left(decay_sum, lane, head, slot, end - 1 - place, chunks, CHUNK)
    first = ct.where(left < WINDOW, ct.maximum(end - left, 0), 0)
    ct.store(oldest, (row, lane, head), ct.reshape(first, (1, 1, 1)))
    if BACK:
        left = chunks_left(decay_sum, lane, head, slot, begin + place, chunks, CHUNK)
        last = ct.where(left < WINDOW, ct.minimum(begin + left, chunks), chunks) - 1
        ct.store(newest, (row, lane, head), ct.reshape(last, (1, 1, 1)))


@ct.function
def chunk_since(oldest: ct.Array, lane: int, head: int, origin: int, segment: int, per_segment: int) -> int:
    """The first chunk of `segment` of which anything is left at its end: `oldest` has that, of all chunks, at `origin` and
    behind."""
    since: int = ct.maximum(segment * per_segment, load(oldest, (origin + segment, lane, head), (1, 1, 1)))
    return since


@ct.function
def chunks_until(
    newest: ct.Array, lane: int, head: int, origin: int, segment: int, per_segment: int, length: int, chunk: int
) -> int:
    """How many chunks of `segment`, of a walk over `length` tokens, what it begins with reaches: `newest` has the last of
    those."""
    begin = segment * per_segment
    behind = ct.minimum(ct.cdiv(length, chunk), begin + per_segment)
    reached: int = ct.minimum(behind, load(newest, (origin + segment, lane, head), (1, 1, 1)) + 1) - begin
    return reached


@ct.function
def segment_since(oldest: ct.Array, lane: int, head: int, origin: int, segment: int, per_segment: int) -> int:
    """The first segment of a walk of which anything is left where `segment` begins.

    `oldest` has, at `origin` and behind, the oldest chunk of which anything is left at the end of each segment; the first
    segment begins with none of that, and what is loaded for it may be anything.
    """
    chunk = load(oldest, (origin + ct.maximum(segment - 1, 0), lane, head), (1, 1, 1))
    since: int = ct.minimum(ct.maximum(chunk // per_segment, 0), segment)
    return since


@ct.function
def segment_until(
    newest: ct.Array, lane: int, head: int, origin: int, segment: int, per_segment: int, length: int, chunk: int
) -> int:
    """Behind the last segment, of a walk over `length` tokens, that what `segment` ends with reaches.

    `newest` has, at `origin` and behind, the newest chunk that what each segment begins with reaches; nothing is behind the
    last segment, and what is loaded for it may be anything.
    """
    segments = ct.cdiv(ct.cdiv(length, chunk), per_segment)
    behind = ct.maximum(ct.minimum(segment + 1, segments - 1), 0)  # a sequence without tokens has no segment
    last = load(newest, (origin + behind, lane, head), (1, 1, 1))
    until: int = ct.minimum(ct.maximum(last // per_segment, segment), segments - 1) + 1
    return until


def oldest_chunks(stream: Any, decay_sum: Tensor, cut: Cut, chunk: int, packed: bool) -> Tensor:
    """[segment, lane, head], int32: the oldest chunk of which anything is left at the end of each segment but the last.

    `decay_sum`: [lane, head, token], as `chunk_cumsum` stores it. Without segments nothing is written and nothing read.
    """
    return _launched(stream, decay_sum, cut, chunk, packed, cut.parts, cut.inner, back=False)[0]


def reaches(stream: Any, decay_sum: Tensor, cut: Cut, chunk: int, packed: bool) -> tuple[Tensor, Tensor]:
    """`oldest_chunks`, and the newest chunk at which anything is left of the state that begins each segment."""
    return _launched(stream, decay_sum, cut, chunk, packed, cut.ends, cut.segments if cut.inner else 0, back=True)


def _launched(
    stream: Any, decay_sum: Tensor, cut: Cut, chunk: int, packed: bool, rows: int, segments: int, back: bool
) -> tuple[Tensor, Tensor]:
    lanes, heads, _ = decay_sum.shape
    oldest = _rt.empty((rows, lanes, heads), dtype=torch.int32, device=decay_sum.device)
    newest = _rt.empty((rows, lanes, heads), dtype=torch.int32, device=decay_sum.device) if back else oldest
    args = (decay_sum, oldest, newest, cut.segment_table, cut.per_segment, chunk, back, packed)
    _rt.launch(stream, segment_reach, (cut.walks * heads, segments), args, early=True)
    return oldest, newest
