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
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import _cut, _packed, _replay, _segments, _sums, _tuned
from . import _runtime as _rt

CHUNK = 64
"""Tokens of a chunk, at least."""

BLOCKS = 2
"""Blocks of a walk that run on a multiprocessor at once."""

PROLOGUE, JUMP = 2.0, 0.5
"""Chunks of a walk that take as long as all of a block that is no chunk, and as the jump over a segment."""

MOST_SEGMENTS = 32

FLAT = 128
"""Columns of a state, at most, where the gradient of an input that is one number a head is one of the sums over rows: with
256 it takes registers that there are not, and 50 us more at 4,16384,8,1,64,256 on an H200."""

STARTED = 0.75
"""How much of the walks is left where the forward pass kept the states that segments begin with: three in place of four."""

WIDEST = 256
"""The longest axis of a state that a tile holds."""


class Gradients:
    """The gradients of a layer by kernels: `launch` of an emitted module, its Configs by the dtype of the first of `keyed`, the
    inputs whose dtypes a tuning key has, and the dimensions to sum over of what it leaves in parts, by input; `digest` and
    `variant` are those of the module of the forward pass."""

    def __init__(
        self,
        layer: _rt.Layer,
        launch: Callable[..., tuple[Tensor | None, ...]],
        configs: Mapping[torch.dtype, Any],
        keyed: tuple[str, ...],
        parts: Mapping[str, tuple[int, ...]],
        digest: str,
        variant: str,
    ) -> None:
        self.layer, self.configs, self.leader = layer, configs, keyed[0]
        self._launch, self._parts = launch, parts
        self._keyed, self._digest, self._variant = keyed, digest, variant
        self._calls = _replay.Calls(self._launched, configs, len(layer.inputs), len(layer.scalars), absent=6)

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
        starts: Sequence[Tensor | None] = (),
        starts_every: int | None = None,
        decays: Sequence[Tensor] = (),
        decays_chunk: int | None = None,
    ) -> tuple[Tensor | None, ...] | None:
        """The gradients of inputs, then of initial states, from those that arrive at outputs, final states and, with
        `states_every`, those `kept` at the ends of blocks; for arguments as they were passed to a call of `forward` that was
        right. None if int32 does not reach its arrays, or no tile holds its states.

        `starts` are the states at the ends of blocks of `starts_every` tokens, and `decays` the scalars of tokens in chunks of
        `decays_chunk`, if the forward pass kept them (see `keeps`); the result is the same without, but for
        roundings, and takes longer.

        They have the dtypes and shapes of what they are of; None for what is absent. Those of tokens that are in no sequence
        are 0. `seq_idx` and `mask` synchronise with the device once. Raises ValueError for so many sequences that int32 does
        not reach their states.
        """
        between = kept or [None] * len(states)
        begun = starts or [None] * len(states)
        special = cu_seqlens, seq_idx, mask, states_every, starts_every, decays_chunk
        found: tuple[Tensor | None, ...] | None
        found = self._calls(*inputs, *scalars, *states, *outputs, *finals, *between, *begun, *decays, *special, config)
        return found

    def keeps(
        self, inputs: Sequence[Tensor | None], size: Mapping[str, int], forward: Any, config: Any = None
    ) -> tuple[int | None, int | None]:
        """What a forward pass with the Config `forward`, or None, should keep for the gradients of a call of whole sequences:
        its states at the ends of blocks of so many tokens, and the scalars of tokens, weights and running sums of decays, in
        chunks of so many. None for what it should not keep, as where no kernels compute gradients.

        Blocks are the segments that it walks anyway, which cost it a store behind each, unless it has one, or walks back take
        less time in others. Scalars are those that both passes make, where their chunks are the same.
        """
        layer = self.layer
        if not reached(layer, size, inputs) or not size[layer.batch] * size[layer.time]:
            return None, None
        by_name = dict(zip((i.name for i in layer.inputs), inputs, strict=True))
        forward, config = self._chosen_forward(forward, by_name, size), self._chosen(config, by_name, size, None)
        scalars = hasattr(forward, "warps_chunk_cumsum") and forward.chunk == config.chunk
        leader = by_name[self.leader]
        assert leader is not None
        return self._starts_every(leader, size, forward, config), forward.chunk if scalars else None

    def _starts_every(self, leader: Tensor, size: Mapping[str, int], forward: Any, config: Any) -> int | None:
        """Of how many tokens the segments of a forward pass are, if its states there should be kept."""
        if not hasattr(forward, "segments"):
            return None
        layer = self.layer
        walks, processors = size[layer.batch] * size[layer.head], _cut.multiprocessors(leader)
        channels = [a for a in max(layer.states.values(), key=len) if a not in (layer.batch, layer.head)]
        column = max((size[a] for a in channels if not hasattr(forward, f"tile_{a}")), default=1)
        count, per_segment = _segments.segments(
            forward.segments, _rt.ceil_div(size[layer.time], forward.chunk), walks * _tiles(size, channels, forward, "tile"),
            column, processors,
        )  # fmt: skip
        every = per_segment * forward.chunk
        if count == 1 or every % config.chunk or config.segments not in (0, count):
            return None
        chunks = _rt.ceil_div(size[layer.time], config.chunk)
        blocks = walks * _tiles(size, channels, config, "state_tile")
        own = segments(0, chunks, blocks, leader)
        kept, again = (_walk_cost(n, chunks, blocks, BLOCKS * processors) for n in (count, own))
        return every if STARTED * kept <= again else None

    def _wholes(self, inputs: Sequence[Tensor | None], found: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """The gradients of the inputs that are given, from what the kernels leave of each."""
        values: list[Tensor | None] = []
        later: dict[int, tuple[Tensor, Tensor]] = {}
        for at, (spec, gradient, x) in enumerate(zip(self.layer.inputs, found, inputs, strict=True)):
            # of what is absent nobody wants the gradient, whose memory is then but memory between kernels
            if x is not None and gradient is not None and self._parts.get(spec.name) == (0, 1) and _alike(gradient, x):
                later[at] = gradient, x
            values.append(None if x is None or at in later else self._whole(spec, gradient, x))
        for at, total in zip(later, _sums.summed_together(list(later.values())), strict=True):
            values[at] = total
        return tuple(values)

    def _whole(self, spec: _rt.Input, gradient: Tensor | None, x: Tensor) -> Tensor:
        """The gradient of an input by itself."""
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
        *values, cu_seqlens, seq_idx, mask, every, starts_every, decays_chunk, config = arguments
        parts = layer.inputs, layer.scalars, layer.states, layer.outputs, layer.states, layer.states, layer.states
        ends = itertools.accumulate(map(len, parts))
        inputs, scalars, states, outputs, finals, kept, starts, decays = (
            values[a:b] for a, b in itertools.pairwise((0, *ends, len(values)))
        )
        by_name = dict(zip((i.name for i in layer.inputs), inputs, strict=True))
        initial = dict(zip(layer.states, states, strict=True))
        numbers = dict(zip((s.name for s in layer.scalars), scalars, strict=True))
        size, sequences = _packed.check(layer, by_name, initial, numbers, (cu_seqlens, seq_idx, mask))
        if not reached(layer, size, inputs, chunk_of(CHUNK, every)):
            return None
        if sequences is not None and sequences.whole:
            sequences = None
        leader = by_name[self.leader]
        full = [
            x if i.default is None else _rt.expand(i, _unrepeated(i, x), size, leader)
            for i, x in zip(layer.inputs, inputs, strict=True)
        ]
        dtypes = _cut.output_dtypes(layer, full)
        arriving = [
            torch.zeros([size[a] for a in axes], dtype=dtype, device=leader.device) if d is None else d.to(dtype)
            for axes, dtype, d in zip(layer.outputs.values(), dtypes, outputs, strict=True)
        ]
        first = _cut.final_memory(layer, full, [None] * len(states), size, sequences)
        passed = [d if d is None else d.to(_rt.F32) for d in finals]
        between = [None if d is None or not d.numel() else d.to(_rt.F32) for d in kept]
        if not size[layer.batch] or not size[layer.time]:
            for x, d in zip(first, passed, strict=True):
                x.zero_() if d is None else x.copy_(d)
            found: tuple[Tensor | None, ...] = (None,) * len(full)
        else:
            numbered = [float(s) for s in scalars]
            config = self._chosen(config, by_name, size, sequences)
            config = replace(config, chunk=chunk_of(config.chunk, every))
            begun = (*starts, starts_every or 0, decays if decays and decays_chunk == config.chunk else None)
            with torch.no_grad():
                found, first = self._cut(
                    (full, numbered, states), (arriving, passed, between), begun, first, size, sequences, every, config
                )
        whole = self._wholes(inputs, found)
        return (*whole, *(None if s is None else x for s, x in zip(states, first, strict=True)))

    def _chosen(self, config: Any, inputs: Mapping[str, Tensor | None], size: Mapping[str, int], sequences: Any) -> Any:
        """The caller's Config, else what a tuning table has for a call's gradients, else the default."""
        return self._looked_up(config, self.configs, inputs, size, {"packed": sequences, _tuned.GRADIENTS: True}, ())

    def _chosen_forward(self, config: Any, inputs: Mapping[str, Tensor | None], size: Mapping[str, int]) -> Any:
        """The Config of the forward pass: the caller's, else what it chooses itself."""
        module = importlib.import_module(self._launch.__module__.removesuffix("_gradients"))
        return self._looked_up(config, module.CONFIGS, inputs, size, {}, None)

    def _looked_up(
        self,
        config: Any,
        configs: Mapping[torch.dtype, Any],
        inputs: Mapping[str, Tensor | None],
        size: Mapping[str, int],
        modes: Mapping[str, Any],
        rules: Sequence[_tuned.Rule] | None,
    ) -> Any:
        """The Config of a call, by what is keyed of it."""
        keyed = [inputs[name] for name in self._keyed]
        leader = keyed[0]
        assert leader is not None
        optional = {i.name: inputs[i.name] for i in self.layer.inputs if i.optional}
        return _tuned.chosen(
            self.layer, config, configs, digest=self._digest, variant=self._variant,
            present=_tuned.present({**optional, **modes}), size=size,
            dtypes=tuple(x.dtype for x in keyed if x is not None), x=leader, rules=rules,
        )  # fmt: skip

    def _cut(
        self,
        given: tuple[Sequence[Tensor | None], Sequence[float], Sequence[Tensor | None]],
        arriving: tuple[Sequence[Tensor], Sequence[Tensor | None], Sequence[Tensor | None]],
        begun: tuple[Any, ...],
        first: list[Tensor],
        size: Mapping[str, int],
        sequences: _packed.Sequences | None,
        every: int | None,
        config: Any,
    ) -> tuple[tuple[Tensor | None, ...], list[Tensor]]:
        """The gradients of inputs and of initial states, for which `first` is memory, an entry a sequence; `begun` are the
        states that segments begin with, or None, the tokens of a segment, and the scalars of tokens, if they were kept.

        What enters a row's first sequence, and what leaves its last, have their gradients there; what is gathered, at the
        places it came from.
        """
        layer, (full, scalars, states), (outputs, finals, kept) = self.layer, given, arriving
        tail = (every or 0, *begun, *first, sequences, config)
        if sequences is None:
            return self._launch(*full, *scalars, *states, *outputs, *finals, *kept, *tail), first
        if not reached(layer, {**size, _rt.SEQUENCE: sequences.count}, full, config.chunk):
            raise ValueError(
                f"{layer.name}: gradients of {sequences.count} packed sequences, whose states have more than 2**31 - 1"
                " elements; pass fewer at once"
            )
        full = _packed.gather(layer, sequences, full)
        named_outputs = zip(layer.outputs.items(), outputs, strict=True)
        found = self._launch(
            *full, *scalars, *_packed.spread_all(layer, sequences, states),
            *(_packed.gathered(layer, sequences, name, axes, d) for (name, axes), d in named_outputs),
            *_packed.spread_all(layer, sequences, finals, last=True), *kept, *tail,
        )  # fmt: skip
        whole = tuple(
            g if g is None or layer.time not in i.axes
            else _packed.scatter(layer, sequences, i.axes, g.sum(0) if g.dim() > len(i.axes) else g, size[layer.time])
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


def repeated(spec: _rt.Input, x: Tensor) -> list[int]:
    """The dimensions of an input's widest form that the form it was passed in lacks."""
    if x.dim() == len(spec.axes):
        return []
    axes = next(a for a in spec.narrower if len(a) == x.dim())
    return [at for at, axis in enumerate(spec.axes) if axis not in axes]


def _unrepeated(spec: _rt.Input, x: Tensor | None) -> Tensor | None:
    """An input in its widest form as a tensor that repeats nothing: kernels take one that does for a narrower form, of which
    the gradient is a sum."""
    return x if x is None or not spec.narrower or repeated(spec, x) else x.contiguous()


def _alike(gradient: Tensor, x: Tensor) -> bool:
    """Whether the sum of a gradient's parts over their first two dimensions is all of the gradient of `x`."""
    return math.prod(gradient.shape[2:]) == x.numel()


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


def _tiles(size: Mapping[str, int], axes: Sequence[str], config: Any, field: str) -> int:
    """How many tiles a state has along those of `axes` for which a Config has the length of one, in `field`_axis."""
    lengths = ((size[a], getattr(config, f"{field}_{a}", 0)) for a in axes)
    return math.prod(_rt.ceil_div(length, tile) for length, tile in lengths if tile)


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
