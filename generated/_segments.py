"""How many segments a sequence is cut into: the one rule, of calls at run time and of what is said of them before.

Copied verbatim beside the modules that ssdgen emits; it imports nothing of ssdgen, and no torch.
"""

from __future__ import annotations

import functools

BLOCKS = 2
"""Blocks of a walk that run on a multiprocessor at once."""

WIDE = 128
"""Columns of a state from which on a multiprocessor holds one walk only."""

PROLOGUE = 1.0
"""Chunks of a walk that take as long as all of a block that is no chunk."""

JUMP = 1.0
"""Chunks of a walk that take as long as the jump over a segment."""

STATE_CHUNK = 0.32
"""Time of a chunk where only a segment's end state is made, relative to a walk's."""

STATE_PROLOGUE = 3.0
"""The same as PROLOGUE, in chunks of a segment that only ends."""


def segments(wanted: int, chunks: int, walks: int, column: int, multiprocessors: int) -> tuple[int, int]:
    """(segments, chunks a segment) for `walks` walks of `chunks` chunks each, with states of `column` columns: about as many
    segments as wanted, or if that is 0 those that a model of the GPU finds fastest."""
    count = min(wanted, chunks) if wanted else _fastest(chunks, walks * _halves(column), multiprocessors)
    per_segment = _ceil_div(chunks, max(1, count))
    return _ceil_div(chunks, per_segment), per_segment


@functools.lru_cache(maxsize=1024)
def _fastest(chunks: int, walks: int, multiprocessors: int) -> int:
    """The number of segments that takes least time by `_cost`."""
    lengths = {_ceil_div(chunks, n) for n in range(1, min(chunks, 64) + 1)}
    return min((_ceil_div(chunks, per) for per in lengths), key=lambda n: (_cost(n, chunks, walks, multiprocessors), n))


def _cost(pieces: int, chunks: int, walks: int, multiprocessors: int) -> float:
    """The time of walks cut into `pieces` segments, in chunks of a walk.

    A chunk takes as long alone on a multiprocessor as beside another block: it waits more than it computes. The constants are
    fitted to calls timed on an H200, 1 to 16 segments each: 11 to 512 chunks, 12 to 48 walks, 64 and 128 columns.
    """
    per = _ceil_div(chunks, pieces)
    walk = (per + PROLOGUE) * _waves(walks * pieces, multiprocessors)
    if pieces == 1:
        return walk
    states = STATE_CHUNK * (per + STATE_PROLOGUE) * _waves(walks * (pieces - 1), multiprocessors)
    return walk + states + JUMP * pieces


def _halves(column: int) -> int:
    """How many of the BLOCKS of a multiprocessor a walk counts for: a state of more columns than WIDE leaves no room beside
    it."""
    return 1 if column <= WIDE else BLOCKS


def _waves(blocks: int, multiprocessors: int) -> int:
    """How many times as long as one block's time `blocks` blocks take."""
    return _ceil_div(blocks, BLOCKS * multiprocessors)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
