"""States at the ends of blocks of tokens, which a caller keeps to go on from them: what prefix caches hold.

A block is some chunks, counted from a sequence's own first token; a sequence that begins at token `start` of its row has the
places from start // every of that row on. Since that and (stop - start) // every are together at most stop // every, where
the next one may begin, a row has length // every places whatever its sequences are: their number is known without asking
the device, and so is each sequence's first place. Places that no sequence fills are 0.

Copied verbatim beside the modules that ssdgen emits; it imports nothing of ssdgen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _runtime as _rt


def check(layer: _rt.Layer, every: Any, chunk: int, mask: Any) -> None:
    """Check `states_every` of a call that is computed in chunks of `chunk` tokens; None asks for nothing.

    Raises TypeError for what is no int, ValueError for no multiple of the chunk and beside a `mask`.
    """
    if every is None:
        return
    if type(every) is not int:
        raise TypeError(f"{layer.name}: `states_every` must be a number of tokens, an int, got {type(every).__name__}")
    if every < 1 or every % chunk:
        fits = every & -every if every > 0 else 0  # the largest chunk that divides it
        other = f", or a `config` of that chunk: dataclasses.replace(config, chunk={fits})" if fits >= 16 else ""
        raise ValueError(
            f"{layer.name}: `states_every` must be a multiple of the chunk that this call is computed with, {chunk} tokens,"
            f" got {every}; pass a multiple of {chunk}{other}"
        )
    if mask is not None:
        raise ValueError(
            f"{layer.name}: `states_every` counts tokens, and `mask` leaves some out of each row, not as many of all; pack"
            " the rows with `cu_seqlens`, whose sequences count from their own first tokens"
        )


def memory(layer: _rt.Layer, size: Mapping[str, int], every: int | None, packed: bool, like: Tensor) -> list[Tensor]:
    """Memory for every state at the ends of blocks, float32: behind the batch an axis of blocks; nothing if `every` is None."""
    if every is None:
        return []
    make = torch.zeros if packed else _rt.empty
    shapes = (
        [size[axes[0]], size[layer.time] // every, *(size[a] for a in axes[1:])] for axes in layer.states.values()
    )
    return [make(shape, dtype=_rt.F32, device=like.device) for shape in shapes]


def passed(
    layer: _rt.Layer, kept: Sequence[Tensor], every: int | None, rows: slice = slice(None), now: slice = slice(None)
) -> tuple[Any, ...]:
    """What a launch takes for these rows and tokens: of each state the places of their blocks, None where there are none, and
    the tokens of a block."""
    if every is None:
        return (*(None for _ in layer.states), 0)
    places = slice(*(None if t is None else t // every for t in (now.start, now.stop)))
    return (*(p if p.numel() else None for p in (x[rows, places] for x in kept)), every)


def ends(end: int, every: int | None, length: int) -> bool:
    """Whether a chunk up to token `end` of `length` ends a whole block of `every` tokens; if that is None, none does."""
    return every is not None and end % every == 0 and end <= length


def stacked(found: Sequence[Sequence[Tensor]], states: Sequence[Tensor], every: int | None) -> tuple[Tensor, ...]:
    """Each of `states` at the ends of blocks, along dimension 1, from all of them at each; nothing if `every` is None."""
    if every is None:
        return ()
    if not found:
        return tuple(s.new_zeros((s.shape[0], 0, *s.shape[1:])) for s in states)
    return tuple(torch.stack(values, 1) for values in zip(*found, strict=True))


def joined(
    found: Sequence[tuple[int, int, Sequence[Tensor]]], rows: int, length: int, every: int | None
) -> tuple[Tensor, ...]:
    """Each state of a call from what `stacked` gave for its sequences: (row, first token, states), in their order."""
    if every is None:
        return ()
    out = []
    for i in range(len(found[0][2])):
        lines: list[list[Tensor]] = [[] for _ in range(rows)]
        for row, start, values in found:
            lines[row] += [_empty(values[i], start // every, lines[row]), values[i]]
        whole = [[*line, _empty(line[-1], length // every, line)] for line in lines]
        out.append(torch.cat([torch.cat(line, 1) for line in whole]))
    return tuple(out)


def _empty(like: Tensor, upto: int, before: Sequence[Tensor]) -> Tensor:
    """Zeros for the places from the last of `before` up to `upto`."""
    return like.new_zeros((like.shape[0], upto - sum(x.shape[1] for x in before), *like.shape[2:]))
