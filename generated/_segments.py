"""How many segments a sequence is cut into: the one rule, of calls at run time and of what is said of them before.

Copied verbatim beside the modules that ssdgen emits; it imports nothing of ssdgen, and no torch.
"""

from __future__ import annotations

import functools

BLOCKS = 2
"""Blocks of a walk that run on a multiprocessor at once."""

ALONE = 0.62
"""Time of a chunk where one block has a multiprocessor to itself, relative to where two share it (measured on an H200)."""

STATE_PASS = 0.45
"""Work of making a segment's end state, relative to walking it for outputs (measured on an H200)."""

LAUNCH = 3.0
"""Time of a block's prologue, of a launch more and of the jump over a segment, in chunks of a walk."""


def segments(wanted: int, chunks: int, walks: int, multiprocessors: int) -> tuple[int, int]:
    """(segments, chunks a segment) for `walks` walks of `chunks` chunks each: about as many segments as wanted, or if that
    is 0 those that a model of the GPU finds fastest."""
    count = min(wanted, chunks) if wanted else _fastest(chunks, walks, multiprocessors)
    per_segment = _ceil_div(chunks, max(1, count))
    return _ceil_div(chunks, per_segment), per_segment


@functools.lru_cache(maxsize=1024)
def _fastest(chunks: int, walks: int, multiprocessors: int) -> int:
    """The number of segments that takes least time by `_cost`."""
    lengths = {_ceil_div(chunks, n) for n in range(1, min(chunks, 64) + 1)}
    return min((_ceil_div(chunks, per) for per in lengths), key=lambda n: (_cost(n, chunks, walks, multiprocessors), n))


def _cost(pieces: int, chunks: int, walks: int, multiprocessors: int) -> float:
    """The time of walks cut into `pieces` segments, in chunks of a walk on a full multiprocessor."""
    slots = BLOCKS * multiprocessors
    waves, rest = divmod(walks * pieces, slots)
    last = 0.0 if not rest else ALONE if rest <= multiprocessors else 1.0
    walk = (_ceil_div(chunks, pieces) + LAUNCH) * (waves + last)
    states = STATE_PASS * chunks * walks * (pieces - 1) / pieces / slots
    return walk + states + (LAUNCH + pieces / 8 if pieces > 1 else 0.0)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
