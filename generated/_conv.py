"""The kernels of `causal_conv.py`, and how they are launched.

A block computes a tile of tokens and channels. It gathers its inputs once for each tap, one token later each time: the loads
are as wide as a thread can load, none waits for another, and all but the first are of memory that the block has just read.

Copied verbatim beside the modules that ssdgen emits; it imports nothing of ssdgen.
"""

from __future__ import annotations

import cuda.tile as ct
from torch import Tensor

from . import _packed
from . import _runtime as _rt
from ._tiles import await_previous, segment_at, silu

TILE_D = 128
"""Channels of a block."""

TILE_BYTES = 8192
"""Inputs of a block in bytes: 64 a thread, in registers once for each tap."""

MOST_STEPS = 16
"""Tokens of a block that continues a cache; more of them take several launches."""


@ct.function
def inputs(
    x: ct.Array, cache: ct.Array, row: int, entry: int, tokens: ct.Tile, channels: ct.Tile, CARRIED: bool
) -> ct.Tile:
    """The inputs [T, D] of `tokens` [T] of a row of x; before its first those of an entry of the cache if CARRIED, else 0."""
    if CARRIED:
        return inputs_onto(earlier(cache, entry, tokens, channels), x, row, tokens, channels)
    return inputs_onto(0, x, row, tokens, channels)


@ct.function
def earlier(cache: ct.Array, entry: int, tokens: ct.Tile, channels: ct.Tile) -> ct.Tile:
    """The inputs [T, D] of `tokens` [T] that an entry of the cache has, whose last is that of token -1; else 0."""
    kept = (cache.shape[2] + tokens)[:, None]  # not in the cache for any token of x
    return ct.gather(cache, (entry, channels[None, :], kept), padding_value=0)


@ct.function
def inputs_onto(before: ct.Tile | int, x: ct.Array, row: int, tokens: ct.Tile, channels: ct.Tile) -> ct.Tile:
    """The inputs [T, D] of `tokens` [T] of a row of x; `before` where it has none."""
    real = ((tokens >= 0) & (tokens < x.shape[1]))[:, None] & (channels < x.shape[2])[None, :]
    return ct.gather(x, (row, tokens[:, None], channels[None, :]), mask=real, padding_value=before, check_bounds=False)


@ct.function
def convolved(
    x: ct.Array, cache: ct.Array, weight: ct.Array, bias: ct.Array,
    row: int, entry: int, tokens: ct.Tile, channels: ct.Tile,
    WIDTH: int, WITH_BIAS: bool, SILU: bool, CARRIED: bool,
) -> ct.Tile:  # fmt: skip
    """The outputs [T, D] of `tokens` [T] and `channels` [D] in float32; see `inputs`."""
    total = ct.zeros((tokens.shape[0], channels.shape[0]), dtype=ct.float32)
    if WITH_BIAS:
        total = total + ct.gather(bias, channels).astype(ct.float32)[None, :]
    for k in ct.static_iter(range(WIDTH)):
        tap = ct.gather(weight, (channels, k)).astype(ct.float32)  # [D]
        total = total + tap[None, :] * inputs(x, cache, row, entry, tokens - (WIDTH - 1 - k), channels, CARRIED)
    if SILU:
        total = silu(total)
    return total


@ct.kernel
def convolve(
    x: ct.Array, weight: ct.Array, bias: ct.Array, initial: ct.Array,
    segment_table: ct.Array,
    y: ct.Array, final: ct.Array,
    WIDTH: ct.Constant[int], TILE_T: ct.Constant[int], TILE_D: ct.Constant[int], KEPT: ct.Constant[int],
    SILU: ct.Constant[bool], PACKED: ct.Constant[bool],
    WITH_BIAS: ct.Constant[bool], WITH_INITIAL: ct.Constant[bool], WITH_FINAL: ct.Constant[bool],
) -> None:  # fmt: skip
    """The outputs of a tile of tokens and channels; that of a sequence's end also leaves the final cache."""
    d_tiles = ct.cdiv(x.shape[2], TILE_D)
    place, channels = ct.bid(0) // d_tiles, ct.bid(0) % d_tiles * TILE_D + ct.arange(TILE_D, dtype=ct.int32)
    if PACKED:
        sequence, row, start, stop, _, tile, last = segment_at(segment_table, place)
        x, y = x.slice(1, start, stop), y.slice(1, start, stop)
    else:
        t_tiles = ct.cdiv(x.shape[1], TILE_T)
        row, tile = place // t_tiles, place % t_tiles
        sequence, last = row, tile == t_tiles - 1

    tokens = tile * TILE_T + ct.arange(TILE_T, dtype=ct.int32)  # [T]
    head = ct.arange(KEPT, dtype=ct.int32)  # [K], at least as many as a cache keeps
    begin = 0
    if WITH_INITIAL:  # noqa: SIM102 - a flag of the compiler
        if tile == 0:  # what reads the initial cache is a small tile of its own: the others bear nothing of it
            first = convolved(x, initial, weight, bias, row, sequence, head, channels, WIDTH, WITH_BIAS, SILU, True)
            ct.scatter(y, (row, head[:, None], channels[None, :]), first.astype(y.dtype))
            begin = KEPT
    rest = convolved(x, initial, weight, bias, row, sequence, tokens, channels, WIDTH, WITH_BIAS, SILU, False)
    ct.scatter(y, (row, tokens[:, None], channels[None, :]), rest.astype(y.dtype), mask=(tokens >= begin)[:, None])
    if WITH_FINAL:  # noqa: SIM102 - a flag of the compiler
        if last:
            tail = inputs(x, initial, row, sequence, x.shape[1] - (WIDTH - 1) + head, channels, WITH_INITIAL)  # [K, D]
            ct.scatter(final, (sequence, channels[None, :], head[:, None]), tail)


@ct.kernel
def roll(
    x: ct.Array, weight: ct.Array, bias: ct.Array,
    state_indices: ct.Array,
    cache: ct.Array, y: ct.Array,
    WIDTH: ct.Constant[int], TILE_T: ct.Constant[int], TILE_D: ct.Constant[int], KEPT: ct.Constant[int],
    SILU: ct.Constant[bool], INDEXED: ct.Constant[bool], STEADY: ct.Constant[bool], WITH_BIAS: ct.Constant[bool],
) -> None:  # fmt: skip
    """The outputs of the next tokens, TILE_T at most, of a row; its entry of the cache rolls on over them.

    All that x does not have comes first, and if it is STEADY while the kernel before, which makes x, may still run.
    """
    await_previous(STEADY)
    d_tiles = ct.cdiv(x.shape[2], TILE_D)
    row, channels = ct.bid(0) // d_tiles, ct.bid(0) % d_tiles * TILE_D + ct.arange(TILE_D, dtype=ct.int32)
    entry = row
    if INDEXED:
        entry = ct.load(state_indices, (row,), (1,)).item()
    used = (entry >= 0) & (entry < cache.shape[0])
    tokens = ct.arange(TILE_T, dtype=ct.int32)  # [T]
    kept = ct.arange(KEPT, dtype=ct.int32)  # [K], which may be more than a cache keeps
    last = x.shape[1] - (WIDTH - 1) + kept  # [K], the tokens that it keeps next
    taps: tuple[ct.Tile, ...] = ()
    before: tuple[ct.Tile, ...] = ()
    for k in ct.static_iter(range(WIDTH)):
        taps = (*taps, ct.gather(weight, (channels, k)))  # [D]
        before = (*before, earlier(cache, entry, tokens - (WIDTH - 1 - k), channels))  # [T, D]
    total = ct.zeros((TILE_T, TILE_D), dtype=ct.float32)
    if WITH_BIAS:
        total = total + ct.gather(bias, channels).astype(ct.float32)[None, :]
    rolled = earlier(cache, entry, last, channels)  # [K, D]
    if STEADY:
        ct.grid_dependency_control_wait()
    for k in ct.static_iter(range(WIDTH)):
        now = inputs_onto(before[k], x, row, tokens - (WIDTH - 1 - k), channels)
        total = total + taps[k].astype(ct.float32)[None, :] * now
    if SILU:
        total = silu(total)
    rolled = inputs_onto(rolled, x, row, last, channels)
    ct.scatter(y, (row, tokens[:, None], channels[None, :]), total.astype(y.dtype), mask=used)
    ct.scatter(cache, (entry, channels[None, :], kept[:, None]), rolled)


def launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor | None, sequences: _packed.Sequences | None,
    silu: bool, y: Tensor, final: Tensor | None,
) -> None:  # fmt: skip
    """Launch `convolve` on tensors that hold something; y[b t d] and the final cache are written.

    With `sequences`, both caches have an entry a sequence.
    """
    _check_written(y, x)
    x, weight = _rt.indexable(x), _rt.indexable(weight)
    initial = None if initial is None else _rt.indexable(initial)
    width, tile_t = weight.shape[1], tokens_of_block(x)
    table = None if sequences is None else _packed.segment_table(sequences, tile_t, 1)
    tiles = len(x) * _rt.ceil_div(x.shape[1], tile_t) if table is None else len(table)
    _rt.launch(
        _rt.stream(x),
        convolve,
        (tiles * _rt.ceil_div(x.shape[2], TILE_D),),
        (
            x, weight, _rt.given(bias, x), _rt.given(initial, x), _rt.given(table, x), y, _rt.given(final, y),
            width, tile_t, TILE_D, _power_of_two(width - 1),
            silu, table is not None, bias is not None, initial is not None, final is not None,
        ),
    )  # fmt: skip


def launch_roll(
    cache: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, state_indices: Tensor | None,
    steady: bool, y: Tensor,
) -> None:  # fmt: skip
    """Launch `roll` on tensors that hold something; the cache and y[b t d] are written. Allocates nothing.

    With `steady` the cache, `weight` and `bias` are read before the kernel before has ended, unless this call writes them: a
    copy of `weight`, the cache for the tokens of another launch. Nor if there are slots, which may just have been written.
    """
    _check_written(y, x)
    _check_reach("cache", cache)
    x, taps = _rt.indexable(x), _rt.indexable(weight)
    steady = steady and state_indices is None and taps is weight
    width = taps.shape[1]
    for start in range(0, x.shape[1], MOST_STEPS):
        now = x[:, start : start + MOST_STEPS]
        _rt.launch(
            _rt.stream(x),
            roll,
            (len(x) * _rt.ceil_div(x.shape[2], TILE_D),),
            (
                now, taps, _rt.given(bias, x), _rt.given(state_indices, x), cache, y[:, start : start + MOST_STEPS],
                width, _power_of_two(now.shape[1]), TILE_D, _power_of_two(width - 1),
                silu, state_indices is not None, steady and start == 0, bias is not None,
            ),
            early=True,
        )  # fmt: skip


def tokens_of_block(x: Tensor) -> int:
    """How many tokens of x a block of `convolve` computes."""
    return TILE_BYTES // (TILE_D * x.element_size())


def _power_of_two(n: int) -> int:
    """The least power of two that is not below n, which is positive."""
    return 1 << (n - 1).bit_length()


def _check_written(y: Tensor, x: Tensor) -> None:
    """Blocks write y while others read x; and what is written in place cannot be copied to where 32-bit indices reach it."""
    if y.data_ptr() == x.data_ptr():
        raise ValueError("causal_conv: `out` is the memory of `x`, which kernels still read while they write")
    _check_reach("out", y)


def _check_reach(name: str, value: Tensor) -> None:
    """Check that int32 reaches what is written in place."""
    reach = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
    if reach > _rt.LIMIT:
        raise ValueError(f"causal_conv: the strides of `{name}`, {value.stride()}, reach beyond 2**31 - 1 elements")
