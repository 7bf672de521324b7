"""Packed sequences: which tokens of a call belong together, from `cu_seqlens`, `seq_idx` or `mask`.

A sequence is (row, start, stop) in the (batch, time) plane; its chunks begin at its own first token, so that it is computed
as it would be on its own. Kernels find sequences by the int32 tables made here; `each` is the same without kernels.

A sequence owns the stretch of the plane from its origin to the next one's. Since no sequence is longer than its stretch,
place `origin // n + number` is the first of enough places for its pieces of n tokens: tables need no sum over lengths,
their sizes are known without asking the device, and nothing here but `seq_idx` and `mask` synchronises with it.

Copied verbatim beside the modules that ssdgen emits; it imports nothing of ssdgen.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import _blocks
from . import _runtime as _rt

Packing = tuple[Any, Any, Any]
"""The arguments `cu_seqlens`, `seq_idx` and `mask` of a call, of which one at most is not None."""

NAMES = ("cu_seqlens", "seq_idx", "mask")
INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Sequences:
    """Sequences in the order of their tokens: sequence i is tokens `starts[i]` to `stops[i]` of row `rows[i]`.

    The tensors are int32 [count]: `origins` is where in the plane, flattened, the stretch of each begins, `numbers` are 0 to
    count - 1; `tokens` is the size of the plane that is walked. With `own_states` a state has an entry a sequence, else an
    entry a row: it enters the row's first sequence and leaves the last. With `gaps` tokens may belong to no sequence; their
    outputs are 0. `whole` says that each row is one sequence, as if nothing had been given. `kept` [b k] are the tokens of
    each row that a mask with holes leaves: what is walked is then what `gather` makes.
    """

    rows: Tensor
    starts: Tensor
    stops: Tensor
    origins: Tensor
    numbers: Tensor
    count: int
    tokens: int
    own_states: bool = False
    gaps: bool = False
    whole: bool = False
    kept: Tensor | None = None


def check(
    layer: _rt.Layer,
    values: Mapping[str, Any],
    states: Mapping[str, Any],
    scalars: Mapping[str, float],
    packing: Packing,
) -> tuple[dict[str, int], Sequences | None]:
    """Check a call (see `_runtime.check`): the size of every axis, and its sequences; None if every row is one.

    Raises TypeError for two packings or a dtype, ValueError for a rank, size, device or value. Values of a tensor on a GPU
    are checked if SSDGEN_DEBUG is set. `seq_idx` and `mask` synchronise with the device once.
    """
    if all(value is None for value in packing):
        return _checked(layer, values, states, scalars), None
    given = [(name, value) for name, value in zip(NAMES, packing, strict=True) if value is not None]
    if len(given) > 1:
        raise TypeError(
            f"{layer.name}: `{given[0][0]}` and `{given[1][0]}` were given; a call takes one of them at most"
        )
    ((name, value),) = given
    plane = _check_packing(layer, name, value, values)
    entries = value.shape[0] - 1 if name == "cu_seqlens" else None
    fits = name == "mask" and plane == tuple(value.shape)
    size = _rt.check(layer, values, states, scalars, entries, value if fits else None)
    rows, length = size[layer.batch], size[layer.time]
    if name == "cu_seqlens":
        if rows != 1:
            raise ValueError(
                f"{layer.name}: `cu_seqlens` cuts axis {layer.time} of a batch of 1 into sequences, but axis"
                f" {layer.batch} is {rows}; flatten the batch into axis {layer.time}, or use `seq_idx`"
            )
        if not value.is_cuda or os.environ.get("SSDGEN_DEBUG"):
            _check_edges(layer, value, length)
        return size, from_cu_seqlens(value, length)
    if tuple(value.shape) != (rows, length):
        raise ValueError(
            f"{layer.name}: `{name}`[{layer.batch} {layer.time}] has shape {list(value.shape)}, but axis {layer.batch} is"
            f" {rows} and axis {layer.time} is {length}"
        )
    return size, from_seq_idx(value) if name == "seq_idx" else from_mask(value)


_KNOWN: dict[tuple[Any, ...], tuple[_rt.Layer, dict[str, int]]] = {}
"""Calls that were right, by all that was checked, with the layer, which keeps its identity from being used again."""

MOST_KNOWN = 4096


def _checked(
    layer: _rt.Layer, values: Mapping[str, Any], states: Mapping[str, Any], scalars: Mapping[str, float]
) -> dict[str, int]:
    """`_runtime.check`, once for calls that do not differ in what it looks at: it takes longer than a launch.

    What torch.compile traces is checked as it is traced.
    """
    found = None if torch.compiler.is_compiling() else _rt.signature(values, states, scalars)
    if found is None:
        return _rt.check(layer, values, states, scalars)
    key = (id(layer), *found)
    try:
        known = key in _KNOWN
    except TypeError:  # sizes that a tracer leaves open
        return _rt.check(layer, values, states, scalars)
    if not known:
        if len(_KNOWN) >= MOST_KNOWN:
            _KNOWN.clear()
        _KNOWN[key] = layer, _rt.check(layer, values, states, scalars)
    return _KNOWN[key][1]


def _check_packing(layer: _rt.Layer, name: str, value: Any, values: Mapping[str, Any]) -> tuple[int, ...]:
    """Check the tensor `name` as far as it does not depend on sizes; the lengths of (batch, time), () if not known yet."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{layer.name}: `{name}` must be a torch.Tensor, got {type(value).__name__}")
    dtypes = (torch.bool,) if name == "mask" else INTEGERS
    if value.dtype not in dtypes:
        expected, got = (" or ".join(str(d).removeprefix("torch.") for d in ds) for ds in (dtypes, (value.dtype,)))
        raise TypeError(f"{layer.name}: `{name}` must be {expected}, got {got}")
    form = "[sequences + 1]" if name == "cu_seqlens" else f"[{layer.batch} {layer.time}]"
    rank = 1 if name == "cu_seqlens" else 2
    if value.dim() != rank or (rank == 1 and not value.numel()):
        raise ValueError(
            f"{layer.name}: `{name}` must be {form} (rank {rank}), got shape {list(value.shape)} (rank {value.dim()})"
        )
    first = next((v for v in values.values() if isinstance(v, Tensor)), value)
    if value.device != first.device:
        raise ValueError(f"{layer.name}: `{name}` is on {value.device}, the first input on {first.device}")
    for spec in layer.inputs:
        tensor = values[spec.name]
        if layer.batch in spec.axes and layer.time in spec.axes and isinstance(tensor, Tensor):
            if tensor.dim() != len(spec.axes):
                break
            return tensor.shape[spec.axes.index(layer.batch)], tensor.shape[spec.axes.index(layer.time)]
    return ()


def _check_edges(layer: _rt.Layer, edges: Tensor, length: int) -> None:
    """`cu_seqlens` begins at 0, never decreases, and ends at the number of tokens."""
    found = edges.tolist()
    problem = ""
    if found[0] != 0:
        problem = f"it begins at {found[0]}"
    elif found[-1] != length:
        problem = f"it ends at {found[-1]}"
    else:
        at = next((i for i, (a, b) in enumerate(itertools.pairwise(found)) if b < a), None)
        problem = "" if at is None else f"{found[at + 1]} follows {found[at]} at entry {at + 1}"
    if problem:
        raise ValueError(
            f"{layer.name}: `cu_seqlens` must begin at 0, never decrease, and end at {length}, the length of axis"
            f" {layer.time}; {problem}"
        )


def zeros(layer: _rt.Layer, state: str, size: Mapping[str, int], like: Tensor) -> Tensor:
    """A zero initial state: float32, or float64 where `like` is."""
    shape = [size.get(_rt.SEQUENCE, size[a]) if a == layer.batch else size[a] for a in layer.states[state]]
    return torch.zeros(shape, dtype=_rt.F64 if like.dtype == _rt.F64 else _rt.F32, device=like.device)


def _numbers(like: Tensor) -> Tensor:
    """0, 1, ... for each entry of `like`."""
    return torch.arange(len(like), dtype=torch.int32, device=like.device)


def from_cu_seqlens(edges: Tensor, length: int) -> Sequences:
    """Sequences that lie one behind the other in one row of `length` tokens; never synchronises.

    Whatever the values are, sequences are inside [0, length) and do not overlap.
    """
    inside = torch.cummax(edges.clamp(0, length).to(torch.int32), 0).values
    starts = inside[:-1]
    rows = torch.zeros_like(starts)
    return Sequences(rows, starts, inside[1:], starts, _numbers(starts), len(starts), length, own_states=True)


def from_seq_idx(seq_idx: Tensor) -> Sequences:
    """Sequences [b t] of equal values in each row; finding how many there are synchronises once."""
    rows, length = seq_idx.shape
    if not seq_idx.numel():
        return _whole(rows, length, seq_idx.device)
    new = torch.ones_like(seq_idx, dtype=torch.bool)
    new[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    origins = new.flatten().nonzero()[:, 0]
    row = origins.div(length, rounding_mode="floor")
    stops = torch.nn.functional.pad(origins, (0, 1), value=seq_idx.numel())[1:] - row * length
    starts = origins - row * length
    row, starts, stops, origins = (x.to(torch.int32) for x in (row, starts, stops, origins))
    return Sequences(
        row, starts, stops, origins, _numbers(origins), len(origins), seq_idx.numel(), whole=len(origins) == rows
    )


def from_mask(mask: Tensor) -> Sequences:
    """A sequence a row, of the tokens where `mask` [b t] is true. Synchronises once.

    Where a row's tokens have holes between them, they are to be gathered.
    """
    rows, length = mask.shape
    if not mask.numel():
        return _whole(rows, length, mask.device)
    place = torch.arange(length, dtype=torch.int32, device=mask.device)
    counts = mask.sum(1, dtype=torch.int32)
    starts = torch.where(mask, place, length).amin(1).to(torch.int32)
    ends = torch.where(mask, place, -1).amax(1).to(torch.int32) + 1
    starts = torch.minimum(starts, ends)  # both 0 in a row without tokens
    holes, least, most = torch.stack(((ends - starts - counts).amax(), counts.amin(), counts.amax())).tolist()
    if not holes:
        gaps = least < length
        return replace(_whole(rows, length, mask.device), starts=starts, stops=ends, gaps=gaps, whole=not gaps)
    kept = torch.argsort((~mask).to(torch.uint8), dim=1, stable=True)[:, :most]
    return replace(_whole(rows, most, mask.device), stops=counts, gaps=True, whole=False, kept=kept)


def _whole(rows: int, length: int, device: torch.device) -> Sequences:
    """Every row is one sequence."""
    row = torch.arange(rows, dtype=torch.int32, device=device)
    starts = torch.zeros_like(row)
    return Sequences(row, starts, starts + length, row * length, row, rows, rows * length, whole=True)


def chunk_table(sequences: Sequences, chunk: int) -> Tensor:
    """The chunks of all sequences, int32 [places, 4]: row, first token, stop token, and the place of its sequence's first
    chunk; all 0 at a place without a chunk. Chunk i of a sequence is i places behind its first.
    """
    first = _first_places(sequences, chunk)
    places, owner = _owners(sequences, first, chunk)
    table = torch.stack((sequences.rows, sequences.starts, sequences.stops, first), 1).index_select(0, owner)
    start, stop = table[:, 1], table[:, 2]
    start.add_(places - table[:, 3], alpha=chunk)
    torch.minimum(stop, start + chunk, out=stop)
    return table.mul_((start < stop).unsqueeze(1))


def segment_table(sequences: Sequences, chunk: int, per_segment: int) -> Tensor:
    """The segments of all sequences, of `per_segment` chunks each, int32 [places, 8]: sequence, row, the sequence's first and
    stop token, place of its first chunk in `chunk_table`, index of the segment in it, 1 if that is the last, and 0.

    Segment i of a sequence is i places behind its first; a sequence without tokens has one segment. At a place without a
    segment the sequence is -1; where there are no tokens, first and stop token are 0.
    """
    span = chunk * per_segment
    first = _first_places(sequences, span)
    places, owner = _owners(sequences, first, span)
    s, chunks = sequences, first if per_segment == 1 else _first_places(sequences, chunk)
    zeros = torch.zeros_like(s.numbers)
    table = torch.stack((s.numbers, s.rows, s.starts, s.stops, chunks, first, zeros, zeros), 1).index_select(0, owner)
    start, stop, index, last = table[:, 2], table[:, 3], table[:, 5], table[:, 6]
    torch.sub(places, index, out=index)
    begin = torch.add(start, index, alpha=span)
    torch.ge(begin + span, stop, out=last)
    filled = begin < stop
    used = filled | (index == 0)
    last.mul_(used)
    table[:, 0].masked_fill_(~used, -1)
    table[:, 2:4].mul_(filled.unsqueeze(1))
    return table


def _first_places(sequences: Sequences, span: int) -> Tensor:
    """The first place of each sequence in a table of pieces of `span` tokens."""
    return sequences.origins.div(span, rounding_mode="floor").add_(sequences.numbers)


def _owners(sequences: Sequences, first: Tensor, span: int) -> tuple[Tensor, Tensor]:
    """All places of a table of pieces of `span` tokens, and whose each is."""
    count = sequences.tokens // span + sequences.count if sequences.count else 0
    places = torch.arange(count, dtype=torch.int32, device=first.device)
    return places, torch.searchsorted(first[1:], places, right=True, out_int32=True)


def spread_states(layer: _rt.Layer, sequences: Sequences, name: str, state: Tensor, last: bool = False) -> Tensor:
    """An initial state with an entry a sequence: the caller's where a row begins, zero elsewhere. With `last` what belongs to
    the final state: the caller's where a row ends."""
    at = layer.states[name].index(layer.batch)
    if sequences.own_states or sequences.count == state.shape[at]:
        return state
    out = state.new_zeros([*state.shape[:at], sequences.count, *state.shape[at + 1 :]])
    return out.index_copy_(at, _of_rows(sequences, state.shape[at], last), state)


def spread_all(
    layer: _rt.Layer, sequences: Sequences, states: Sequence[Tensor | None], last: bool = False
) -> tuple[Tensor | None, ...]:
    """`spread_states` of every state that is given."""
    named = zip(layer.states, states, strict=True)
    return tuple(None if s is None else spread_states(layer, sequences, name, s, last) for name, s in named)


def pick_states(
    layer: _rt.Layer, sequences: Sequences, name: str, state: Tensor, rows: int, last: bool = True
) -> Tensor:
    """The final state of a call of a batch of `rows`, from one with an entry a sequence: each row's last; or its first."""
    at = layer.states[name].index(layer.batch)
    if sequences.own_states or sequences.count == rows:
        return state
    return state.index_select(at, _of_rows(sequences, rows, last))


def _of_rows(sequences: Sequences, rows: int, last: bool) -> Tensor:
    """The number of the first sequence of each row, or of the last."""
    row = torch.arange(rows, dtype=torch.int32, device=sequences.rows.device)
    return torch.searchsorted(sequences.rows, row, right=last) - int(last)


def gather(layer: _rt.Layer, sequences: Sequences, inputs: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The inputs of a layer, of those with a time axis only the tokens that `sequences` keeps, each row's at its front.

    What is behind a row's tokens is undefined. ValueError for an input with a time axis and no batch axis.
    """
    if sequences.kept is None:
        return tuple(inputs)
    return tuple(
        x if x is None or layer.time not in i.axes else gathered(layer, sequences, i.name, i.axes, x)
        for i, x in zip(layer.inputs, inputs, strict=True)
    )


def gathered(layer: _rt.Layer, sequences: Sequences, name: str, axes: _rt.Axes, value: Tensor) -> Tensor:
    """`gather` of one tensor, of these axes, time among them."""
    kept = sequences.kept
    if kept is None:
        return value
    if layer.batch not in axes:
        raise ValueError(f"{layer.name}: `{name}` has no axis {layer.batch}, so its tokens cannot be masked by row")
    places = axes.index(layer.batch), axes.index(layer.time)
    rows = torch.arange(kept.shape[0], device=kept.device)[:, None]
    return value.movedim(places, (0, 1))[rows, kept].movedim((0, 1), places)


def scatter(layer: _rt.Layer, sequences: Sequences, axes: _rt.Axes, value: Tensor, length: int) -> Tensor:
    """A tensor of gathered tokens, with these axes, at the places they came from, 0 elsewhere."""
    kept = sequences.kept
    if kept is None:
        return value
    places = axes.index(layer.batch), axes.index(layer.time)
    tokens = value.movedim(places, (0, 1))
    real = torch.arange(kept.shape[1], device=kept.device) < sequences.stops[:, None]
    out = tokens.new_zeros((tokens.shape[0], length, *tokens.shape[2:]))
    rows = torch.arange(kept.shape[0], device=kept.device)[:, None]
    real = real.view(*real.shape, *[1] * (tokens.dim() - 2))
    return out.index_put((rows, kept), torch.where(real, tokens, 0)).movedim((0, 1), places)


def refuse(layer: _rt.Layer, sequences: Sequences | None) -> None:
    """Refuse packed sequences where a plan has no kernels for them."""
    if sequences is not None and not sequences.whole:
        raise NotImplementedError(
            f"{layer.name}: the plan three_kernel computes whole batches only; emit the module with plan=segmented"
        )


def each(
    layer: _rt.Layer,
    function: Callable[..., tuple[Tensor, ...]],
    sequences: Sequences | None,
    inputs: tuple[Tensor | None, ...],
    scalars: tuple[Tensor, ...],
    states: tuple[Tensor, ...],
    size: Mapping[str, int],
    chunk: int,
    every: int | None = None,
) -> tuple[Tensor, ...]:
    """`function`, a module's portable form, of the whole call, or of its sequences one by one and the results put together.

    With `every` tokens a block, what it gives behind the final states are those at the ends of blocks.
    """
    if sequences is None or not sequences.count:
        return function(*inputs, *scalars, *states, size, chunk, every)
    places = torch.stack((sequences.rows, sequences.starts, sequences.stops), 1).tolist()
    rows: list[list[list[Tensor]]] = [[[] for _ in layer.outputs] for _ in range(size[layer.batch])]
    done = [0] * len(rows)
    finals: dict[int, Sequence[Tensor]] = {}
    kept: list[tuple[int, int, Sequence[Tensor]]] = []
    ends = len(layer.outputs) + len(layer.states)
    for number, (row, start, stop) in enumerate(places):
        tokens: slice | Tensor = slice(start, stop) if sequences.kept is None else sequences.kept[row, start:stop]
        entry = number if sequences.own_states else row
        begins = entry not in finals
        initial = [_entry(layer, axes, s, entry) for axes, s in zip(layer.states.values(), states, strict=True)]
        if not begins:
            initial = [torch.zeros_like(s) for s in initial]
        now = {**size, layer.batch: 1, layer.time: stop - start}
        cut = (_cut(layer, i.axes, x, row, tokens) for i, x in zip(layer.inputs, inputs, strict=True))
        results = function(*cut, *scalars, *initial, now, chunk, every)
        finals[entry] = results[len(layer.outputs) : ends]
        kept.append((row, start, results[ends:]))
        for pieces, axes, value in zip(rows[row], layer.outputs.values(), results, strict=False):
            at = axes.index(layer.time)
            if isinstance(tokens, Tensor):
                pieces.append(_blank(value, at, size[layer.time]).index_copy(at, tokens, value))
            else:
                pieces += [_blank(value, at, start - done[row]), value]
        done[row] = stop if isinstance(tokens, slice) else size[layer.time]
    for pieces_of_row, end in zip(rows, done, strict=True):
        for pieces, axes in zip(pieces_of_row, layer.outputs.values(), strict=True):
            at = axes.index(layer.time)
            pieces.append(_blank(pieces[-1], at, size[layer.time] - end))
    outputs = [
        torch.cat([torch.cat(pieces[i], axes.index(layer.time)) for pieces in rows], axes.index(layer.batch))
        for i, axes in enumerate(layer.outputs.values())
    ]
    last = [
        torch.cat([finals[entry][i] for entry in sorted(finals)], axes.index(layer.batch))
        for i, axes in enumerate(layer.states.values())
    ]
    return (*outputs, *last, *_blocks.joined(kept, size[layer.batch], size[layer.time], every))


def _entry(layer: _rt.Layer, axes: _rt.Axes, state: Tensor, entry: int) -> Tensor:
    return state.narrow(axes.index(layer.batch), entry, 1)


def _cut(layer: _rt.Layer, axes: _rt.Axes, value: Tensor | None, row: int, tokens: slice | Tensor) -> Tensor | None:
    """The part of an input that a sequence in `row` reads."""
    if value is None:
        return None
    if layer.batch in axes:
        value = value.narrow(axes.index(layer.batch), row, 1)
    if layer.time not in axes:
        return value
    at = axes.index(layer.time)
    if isinstance(tokens, Tensor):
        return value.index_select(at, tokens)
    return value.narrow(at, tokens.start, tokens.stop - tokens.start)


def _blank(like: Tensor, at: int, length: int) -> Tensor:
    """Zeros like `like`, `length` of them along dimension `at`."""
    return like.new_zeros([*like.shape[:at], length, *like.shape[at + 1 :]])
