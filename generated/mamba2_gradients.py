"""The gradients of mamba2: Mamba-2 state space duality (Dao and Gu 2024, arXiv 2405.21060).

Emitted by ssdgen; the gradients of a chunk of L tokens from d_y, d_S_end:

    d_y_z = silu(z) * d_y    when z, else d_y
    d_read_S = d_y_z

    d_S = 2^s[L-1] d_S_end
      + sum_i 2^s[i] d_read_S[i] (x) C[i]
    d_score[i,j] = d_read_S[i] . x[j]    j <= i
    d_row[j] = step[j] 2^(s[L-1] - s[j]) d_S_end . B[j]
      + sum_i score[i,j] d_read_S[i]
    d_write[j] = 2^(s[L-1] - s[j]) x[j] . d_S_end
      + sum_i 2^(s[i] - s[j]) d_score[i,j] C[i]
    d_vector[i] = 2^s[i] d_read_S[i] . S
      + sum_j 2^(s[i] - s[j]) d_score[i,j] step[j] B[j]
    d_weight[j] = d_write[j] . B[j]
    d_s[i] = d_vector[i] . C[i] - step[i] d_write[i] . B[i]; at i = L-1 also + d_S_end . S_end
    d_decay[t] = d_s[t] + ... + d_s[L-1]    of the natural logarithm

    d_step = d_weight
      + A * d_decay

    d_x = D * d_y_z
      + d_row
    d_dt = sigmoid(dt + dt_bias) * within(softplus(dt + dt_bias), dt_min, dt_max) * d_step
    d_A = sum[b t] step * d_decay
    d_B = sum[h in g] step * d_write
    d_C = sum[h in g] d_vector
    d_D = sum[b t] x * d_y_z
    d_dt_bias = sum[b t] sigmoid(dt + dt_bias) * within(softplus(dt + dt_bias), dt_min, dt_max) * d_step
    d_z = ((1 - sigmoid(z)) * silu(z) + sigmoid(z)) * y * d_y    when z

    one token:
    d_S = 2^(A * step * LOG2E) (d_S + d_read_S (x) C)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import cuda.tile as ct
import torch
from torch import Tensor

from . import _cut, _gradients, _packed, _reach
from . import _runtime as _rt
from ._direct import store_direct
from ._tiles import (
    await_previous,
    chunk_at,
    clamp,
    dot,
    exp2,
    has_chunk,
    inner,
    load,
    segment_at,
    sigmoid,
    silu,
    softplus,
    store,
    sum_five,
    sum_four,
    within,
)
from .mamba2 import LAYER, VARIANT, chunk_cumsum

LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Config:
    """How the kernels run. Tiles and chunk are powers of two; each set of values compiles its own kernels."""

    chunk: int = 64  # tokens a chunk
    tile_h: int = 8  # tile of axis h
    state_tile_p: int = 64  # tile of axis p of a state that walks the chunks
    state_tile_n: int = 128  # tile of axis n of a state that walks the chunks
    scores: str = "bf16"  # operands of the `scores` product
    carried: str = "bf16"  # operands of the `carried` product
    intra: str = "bf16"  # operands of the `intra` product
    state: str = "bf16"  # operands of the `state` product
    latency_x: int = 5  # latency hint of x
    latency_d_y: int = 5  # latency hint of d_y
    latency_B: int = 1  # latency hint of B
    latency_C: int = 1  # latency hint of C
    latency_S: int = 3  # latency hint of S
    state_latency_x: int = 3  # latency hint of x where a state walks the chunks
    state_latency_d_y: int = 3  # latency hint of d_y where a state walks the chunks
    state_latency_B: int = 3  # latency hint of B where a state walks the chunks
    state_latency_C: int = 3  # latency hint of C where a state walks the chunks
    state_latency_S: int = 3  # latency hint of S where a state walks the chunks
    segments: int = 0  # pieces of a sequence that are walked at once, 0 to let the size of the GPU choose
    shares: int = 0  # blocks that share the heads of a group, 0 to let the size of the GPU choose
    occupancy_chunk_cumsum: int = 0  # blocks of chunk_cumsum a multiprocessor, 0 to let the compiler choose
    occupancy_entry_states: int = 2  # blocks of segment_states a multiprocessor, 0 to let the compiler choose
    occupancy_state_gradients: int = 2  # blocks of segment_gradients a multiprocessor, 0 to let the compiler choose
    occupancy_chunk_gradients: int = 1  # blocks of chunk_gradients a multiprocessor, 0 to let the compiler choose
    occupancy_token_gradients: int = 4  # blocks of token_gradients a multiprocessor, 0 to let the compiler choose
    warps_chunk_cumsum: int = 0  # worker warps of a block of chunk_cumsum, 0 to let the compiler choose
    warps_entry_states: int = 0  # worker warps of a block of segment_states, 0 to let the compiler choose
    warps_state_gradients: int = 0  # worker warps of a block of segment_gradients, 0 to let the compiler choose
    warps_chunk_gradients: int = 8  # worker warps of a block of chunk_gradients, 0 to let the compiler choose
    warps_token_gradients: int = 0  # worker warps of a block of token_gradients, 0 to let the compiler choose

    def __post_init__(self) -> None:
        _rt.check_config(LAYER, vars(self))


CONFIGS = {
    torch.bfloat16: Config(),
    torch.float16: Config(scores="tf32", carried="tf32", intra="tf32", state="tf32"),
    torch.float32: Config(scores="tf32", carried="tf32", intra="tf32", state="tf32"),
}
"""The default configuration for each dtype of `x`."""


@ct.kernel
def segment_states(
    x: ct.Array, B: ct.Array,
    step: ct.Array, decay_sum: ct.Array, S_part: ct.Array, S_left: ct.Array, decay_oldest: ct.Array,
    segment_table: ct.Array,
    per_segment: int,
    LATENCY_X: ct.Constant[int], LATENCY_B: ct.Constant[int], STATE: ct.Constant[int], LATENCY_S: ct.Constant[int],
    CHUNK: ct.Constant[int], TILE_P: ct.Constant[int], TILE_N: ct.Constant[int],
    PACKED: ct.Constant[bool],
) -> None:
    """The state S that a segment would end with if it began at zero, and the sum of its log2 decays."""
    await_previous()
    heads = S_part.shape[1]
    batch, head = ct.bid(0) // heads, ct.bid(0) % heads
    lane, slot = batch, 0
    segment, origin = ct.bid(1), 0
    if PACKED:
        row = batch
        _, batch, start, stop, slot, segment, last = segment_at(segment_table, batch)
        lane, origin = 0, row - segment
        stop = ct.where(last, start, stop)  # nothing enters a segment after the last
        x, B = x.slice(1, start, stop), B.slice(1, start, stop)
    length = x.shape[1]
    n_tiles = ct.cdiv(S_part.shape[4], TILE_N)
    p_tile, n_tile = ct.bid(2) // n_tiles, ct.bid(2) % n_tiles
    group_g = head // (heads // B.shape[2])
    begin = _reach.chunk_since(decay_oldest, lane, head, origin, segment, per_segment)

    S_tile = ct.zeros((TILE_P, TILE_N), dtype=ct.float32)  # [P, N]
    S_left_tile = ct.zeros((), dtype=ct.float32)
    for chunk in range(begin, ct.minimum(ct.cdiv(length, CHUNK), (segment + 1) * per_segment)):
        x_tile = load(  # [L, P]
            x, (batch, chunk, head, p_tile), (1, CHUNK, 1, TILE_P), latency=LATENCY_X
        ).astype(ct.float32)
        B_tile = load(B, (batch, chunk, group_g, n_tile), (1, CHUNK, 1, TILE_N), latency=LATENCY_B)  # [L, N]
        step_tile = load(step, (lane, head, slot + chunk), (1, 1, CHUNK))  # [L]
        decay_sum_tile = load(decay_sum, (lane, head, slot + chunk), (1, 1, CHUNK))  # [L]
        decay_end = ct.extract(decay_sum_tile, index=(CHUNK - 1,), shape=(1,)).reshape(())
        carry = step_tile * exp2(-ct.abs(decay_end - decay_sum_tile))  # [L]: what is left of a token's input at the end
        S_tile = dot(ct.transpose(x_tile) * carry[None, :], B_tile, exp2(decay_end) * S_tile, STATE)  # [P, N]
        S_left_tile = S_left_tile + decay_end
    store(S_part, (lane, head, origin + segment, p_tile, n_tile), (1, 1, 1, TILE_P, TILE_N), S_tile, latency=LATENCY_S)
    if ct.bid(2) == 0:
        store(S_left, (origin + segment, lane, head), (1, 1, 1), S_left_tile)


@ct.kernel
def entry_states(
    x: ct.Array, B: ct.Array,
    S0: ct.Array,
    decay_oldest: ct.Array, S_left: ct.Array, S_part: ct.Array, step: ct.Array, decay_sum: ct.Array, S_entry: ct.Array,
    segment_table: ct.Array,
    S_starts: ct.Array,
    per_segment: int,
    LATENCY_S: ct.Constant[int], LATENCY_X: ct.Constant[int], LATENCY_B: ct.Constant[int], STATE: ct.Constant[int],
    CHUNK: ct.Constant[int], TILE_P: ct.Constant[int], TILE_N: ct.Constant[int],
    PACKED: ct.Constant[bool], WITH_S0: ct.Constant[bool], STARTED: ct.Constant[bool],
) -> None:
    """The state S that enters each chunk: a block walks the chunks of a segment with a tile of the state in
    registers.
    """
    await_previous()
    heads = S_entry.shape[1]
    batch, head = ct.bid(0) // heads, ct.bid(0) % heads
    sequence, lane, slot = batch, batch, 0
    segment, origin = ct.bid(1), 0
    if PACKED:
        row = batch
        sequence, batch, start, stop, slot, segment, _ = segment_at(segment_table, batch)
        lane, origin = 0, row - segment
        x, B = x.slice(1, start, stop), B.slice(1, start, stop)
    length = x.shape[1]
    n_tiles = ct.cdiv(S_entry.shape[4], TILE_N)
    p_tile, n_tile = ct.bid(2) // n_tiles, ct.bid(2) % n_tiles
    group_g = head // (heads // B.shape[2])
    since = _reach.segment_since(decay_oldest, lane, head, origin, segment, per_segment)

    if WITH_S0:
        S_tile = load(S0, (sequence, head, p_tile, n_tile), (1, 1, TILE_P, TILE_N))  # [P, N]
    else:
        S_tile = ct.zeros((TILE_P, TILE_N), dtype=ct.float32)  # [P, N]
    if STARTED:
        if segment > 0:
            S_tile = load(S_starts, (batch, segment - 1, head, p_tile, n_tile), (1, 1, 1, TILE_P, TILE_N))  # [P, N]
    else:
        for before in range(since, segment):
            S_left_tile = load(S_left, (origin + before, lane, head), (1, 1, 1))
            S_part_tile = load(  # [P, N]
                S_part, (lane, head, origin + before, p_tile, n_tile), (1, 1, 1, TILE_P, TILE_N), latency=LATENCY_S
            )
            S_tile = exp2(S_left_tile) * S_tile + S_part_tile  # [P, N]
    for chunk in range(segment * per_segment, ct.minimum(ct.cdiv(length, CHUNK), (segment + 1) * per_segment)):
        store(S_entry, (lane, head, slot + chunk, p_tile, n_tile), (1, 1, 1, TILE_P, TILE_N), S_tile, latency=LATENCY_S)
        x_tile = load(  # [L, P]
            x, (batch, chunk, head, p_tile), (1, CHUNK, 1, TILE_P), latency=LATENCY_X
        ).astype(ct.float32)
        B_tile = load(B, (batch, chunk, group_g, n_tile), (1, CHUNK, 1, TILE_N), latency=LATENCY_B)  # [L, N]
        step_tile = load(step, (lane, head, slot + chunk), (1, 1, CHUNK))  # [L]
        decay_sum_tile = load(decay_sum, (lane, head, slot + chunk), (1, 1, CHUNK))  # [L]
        decay_end = ct.extract(decay_sum_tile, index=(CHUNK - 1,), shape=(1,)).reshape(())
        carry = step_tile * exp2(-ct.abs(decay_end - decay_sum_tile))  # [L]: what is left of a token's input at the end
        S_tile = dot(ct.transpose(x_tile) * carry[None, :], B_tile, exp2(decay_end) * S_tile, STATE)  # [P, N]


@ct.kernel
def segment_gradients(
    C: ct.Array, z: ct.Array,
    d_y: ct.Array,
    decay_sum: ct.Array, d_S_part: ct.Array, d_S_left: ct.Array, decay_newest: ct.Array,
    segment_table: ct.Array,
    d_S_states: ct.Array,
    every: int, per_segment: int,
    LATENCY_D_Y: ct.Constant[int], LATENCY_C: ct.Constant[int], STATE: ct.Constant[int], CHUNK: ct.Constant[int],
    TILE_P: ct.Constant[int], TILE_N: ct.Constant[int],
    PACKED: ct.Constant[bool], WITH_Z: ct.Constant[bool], KEPT: ct.Constant[bool],
) -> None:
    """The gradient of the state S that a segment passes on if none arrives at its end: a block walks back over its
    chunks with a tile of it in registers.
    """
    await_previous()
    heads = d_S_part.shape[1]
    batch, head = ct.bid(0) // heads, ct.bid(0) % heads
    lane, slot, first = batch, 0, 0
    segment, origin = ct.bid(1) + 1, 0
    if PACKED:
        row = batch
        _, batch, start, stop, slot, segment, _ = segment_at(segment_table, batch)
        lane, origin = 0, row - segment
        stop = ct.where(segment == 0, start, stop)  # nothing enters a segment before the first
        if KEPT:
            first = start // every  # rounded down: see `_blocks`
        C, d_y = C.slice(1, start, stop), d_y.slice(1, start, stop)
        if WITH_Z:
            z = z.slice(1, start, stop)
    length = C.shape[1]
    n_tiles = ct.cdiv(d_S_part.shape[4], TILE_N)
    p_tile, n_tile = ct.bid(2) // n_tiles, ct.bid(2) % n_tiles
    begin = segment * per_segment
    chunks = _reach.chunks_until(decay_newest, lane, head, origin, segment, per_segment, length, CHUNK)
    group_g = head // (heads // C.shape[2])

    d_S_tile = ct.zeros((TILE_P, TILE_N), dtype=ct.float32)  # [P, N]
    d_S_left_tile = ct.zeros((), dtype=ct.float32)
    for turn in range(chunks):
        chunk = begin + chunks - 1 - turn
        if KEPT:
            end = chunk * CHUNK + CHUNK
            if end % every == 0 and end <= length:
                block = first + chunk * CHUNK // every
                d_S_states_tile = load(  # [P, N]
                    d_S_states, (batch, block, head, p_tile, n_tile), (1, 1, 1, TILE_P, TILE_N)
                )
                d_S_tile = d_S_tile + d_S_states_tile  # [P, N]
        d_y_tile = load(d_y, (batch, chunk, head, p_tile), (1, CHUNK, 1, TILE_P), latency=LATENCY_D_Y)  # [L, P]
        if WITH_Z:
            z_tile = load(z, (batch, chunk, head, p_tile), (1, CHUNK, 1, TILE_P)).astype(ct.float32)  # [L, P]
            d_y_z_tile = silu(z_tile) * ct.astype(d_y_tile, ct.float32)  # [L, P]
        else:
            d_y_z_tile = d_y_tile  # [L, P]
        decay_sum_tile = load(decay_sum, (lane, head, slot + chunk), (1, 1, CHUNK))  # [L]
        decay_end = ct.extract(decay_sum_tile, index=(CHUNK - 1,), shape=(1,)).reshape(())
        C_tile = load(C, (batch, chunk, group_g, n_tile), (1, CHUNK, 1, TILE_N), latency=LATENCY_C)  # [L, N]
        weight = exp2(decay_sum_tile)  # [L]: what is left of the state at a token
        d_S_tile = dot(  # [P, N]
            ct.astype(ct.transpose(d_y_z_tile), ct.float32) * weight[None, :], C_tile, exp2(decay_end) * d_S_tile, STATE
        )
        d_S_left_tile = d_S_left_tile + decay_end
    store(d_S_part, (lane, head, origin + segment, p_tile, n_tile), (1, 1, 1, TILE_P, TILE_N), d_S_tile)
    if ct.bid(2) == 0:
        store(d_S_left, (origin + segment, lane, head), (1, 1, 1), d_S_left_tile)


@ct.kernel
def state_gradients(
    C: ct.Array, z: ct.Array,
    d_S_final: ct.Array,
    d_y: ct.Array,
    decay_newest: ct.Array, d_S_left: ct.Array, d_S_part: ct.Array, decay_sum: ct.Array, d_S_end: ct.Array,
    segment_table: ct.Array,
    d_S0: ct.Array,
    d_S_states: ct.Array,
    every: int, per_segment: int,
    LATENCY_S: ct.Constant[int], LATENCY_D_Y: ct.Constant[int], LATENCY_C: ct.Constant[int], STATE: ct.Constant[int],
    CHUNK: ct.Constant[int], TILE_P: ct.Constant[int], TILE_N: ct.Constant[int],
    PACKED: ct.Constant[bool], WITH_D_S: ct.Constant[bool], WITH_Z: ct.Constant[bool], KEPT: ct.Constant[bool],
) -> None:
    """The gradient of the state S at the end of each chunk, and of the initial one: a block walks back over the
    chunks of a segment with a tile of it in registers.
    """
    await_previous()
    heads = d_S_end.shape[1]
    batch, head = ct.bid(0) // heads, ct.bid(0) % heads
    sequence, lane, slot, first = batch, batch, 0, 0
    segment, origin = ct.bid(1), 0
    if PACKED:
        row = batch
        sequence, batch, start, stop, slot, segment, _ = segment_at(segment_table, batch)
        lane, origin = 0, row - segment
        if KEPT:
            first = start // every  # rounded down: see `_blocks`
        C, d_y = C.slice(1, start, stop), d_y.slice(1, start, stop)
        if WITH_Z:
            z = z.slice(1, start, stop)
    length = C.shape[1]
    n_tiles = ct.cdiv(d_S_end.shape[4], TILE_N)
    p_tile, n_tile = ct.bid(2) // n_tiles, ct.bid(2) % n_tiles
    begin = segment * per_segment
    chunks = ct.minimum(ct.cdiv(length, CHUNK), begin + per_segment) - begin
    group_g = head // (heads // C.shape[2])
    until = _reach.segment_until(decay_newest, lane, head, origin, segment, per_segment, length, CHUNK)

    if WITH_D_S:
        d_S_tile = load(d_S_final, (sequence, head, p_tile, n_tile), (1, 1, TILE_P, TILE_N))  # [P, N]
    else:
        d_S_tile = ct.zeros((TILE_P, TILE_N), dtype=ct.float32)  # [P, N]
    for turn in range(until - 1 - segment):
        before = until - 1 - turn
        d_S_left_tile = load(d_S_left, (origin + before, lane, head), (1, 1, 1))
        d_S_part_tile = load(  # [P, N]
            d_S_part, (lane, head, origin + before, p_tile, n_tile), (1, 1, 1, TILE_P, TILE_N), latency=LATENCY_S
        )
        d_S_tile = exp2(d_S_left_tile) * d_S_tile + d_S_part_tile  # [P, N]
    for turn in range(chunks):
        chunk = begin + chunks - 1 - turn
        if KEPT:
            end = chunk * CHUNK + CHUNK
            if end % every == 0 and end <= length:
                block = first + chunk * CHUNK // every
                d_S_states_tile = load(  # [P, N]
                    d_S_states, (batch, block, head, p_tile, n_tile), (1, 1, 1, TILE_P, TILE_N)
                )
                d_S_tile = d_S_tile + d_S_states_tile  # [P, N]
        store(d_S_end, (lane, head, slot + chunk, p_tile, n_tile), (1, 1, 1, TILE_P, TILE_N), d_S_tile)
        d_y_tile = load(d_y, (batch, chunk, head, p_tile), (1, CHUNK, 1, TILE_P), latency=LATENCY_D_Y)  # [L, P]
        if WITH_Z:
            z_tile = load(z, (batch, chunk, head, p_tile), (1, CHUNK, 1, TILE_P)).astype(ct.float32)  # [L, P]
            d_y_z_tile = silu(z_tile) * ct.astype(d_y_tile, ct.float32)  # [L, P]
        else:
            d_y_z_tile = d_y_tile  # [L, P]
        decay_sum_tile = load(decay_sum, (lane, head, slot + chunk), (1, 1, CHUNK))  # [L]
        decay_end = ct.extract(decay_sum_tile, index=(CHUNK - 1,), shape=(1,)).reshape(())
        C_tile = load(C, (batch, chunk, group_g, n_tile), (1, CHUNK, 1, TILE_N), latency=LATENCY_C)  # [L, N]
        weight = exp2(decay_sum_tile)  # [L]: what is left of the state at a token
        d_S_tile = dot(  # [P, N]
            ct.astype(ct.transpose(d_y_z_tile), ct.float32) * weight[None, :], C_tile, exp2(decay_end) * d_S_tile, STATE
        )
    if segment == 0:
        store(d_S0, (sequence, head, p_tile, n_tile), (1, 1, TILE_P, TILE_N), d_S_tile)


@ct.kernel
def chunk_gradients(
    x: ct.Array, B: ct.Array, C: ct.Array, D: ct.Array, z: ct.Array,
    d_y: ct.Array,
    decay_sum: ct.Array, d_S_end: ct.Array, step: ct.Array, S_entry: ct.Array, d_D_part: ct.Array, d_D_token: ct.Array,
    d_weight: ct.Array, d_decay_written: ct.Array, S_met: ct.Array, d_decay_sum: ct.Array,
    chunk_table: ct.Array,
    d_x: ct.Array, d_z: ct.Array, d_B: ct.Array, d_C: ct.Array,
    LATENCY_B: ct.Constant[int], LATENCY_C: ct.Constant[int], SCORES: ct.Constant[int], LATENCY_D_Y: ct.Constant[int],
    LATENCY_S: ct.Constant[int], CARRIED: ct.Constant[int], INTRA: ct.Constant[int], LATENCY_X: ct.Constant[int],
    CHUNK: ct.Constant[int], TILE_P: ct.Constant[int], TILE_N: ct.Constant[int],
    D_UNIFORM_P: ct.Constant[bool], PACKED: ct.Constant[bool], WITH_Z: ct.Constant[bool], D_FLAT: ct.Constant[bool],
) -> None:
    """The gradients of one chunk, of a group's heads one by one."""
    await_previous()
    chunks = ct.cdiv(B.shape[1], CHUNK)
    batch, chunk = ct.bid(0) // chunks, ct.bid(0) % chunks
    lane, slot = batch, chunk
    present = True
    if PACKED:
        batch, start, stop = chunk_at(chunk_table, ct.bid(0))
        lane, slot, chunk = 0, ct.bid(0), 0
        present = has_chunk(chunk_table, ct.bid(0))
        x, B = x.slice(1, start, stop), B.slice(1, start, stop)
        C, d_y = C.slice(1, start, stop), d_y.slice(1, start, stop)
        d_x, d_B = d_x.slice(1, start, stop), d_B.slice(2, start, stop)
        d_C = d_C.slice(2, start, stop)
        if WITH_Z:
            z, d_z = z.slice(1, start, stop), d_z.slice(1, start, stop)
    group_g, share = ct.bid(1), ct.bid(2)
    heads = decay_sum.shape[1] // B.shape[2]  # of a group
    per_share = ct.cdiv(heads, ct.num_blocks(2))
    start_head = group_g * heads + share * per_share
    stop_head = ct.minimum(start_head + per_share, (group_g + 1) * heads)
    token = ct.arange(CHUNK, dtype=ct.int32)

    if present:
        B_tile = load(B, (batch, chunk, group_g, 0), (1, CHUNK, 1, TILE_N), latency=LATENCY_B)  # [L, N]
        C_tile = load(C, (batch, chunk, group_g, 0), (1, CHUNK, 1, TILE_N), latency=LATENCY_C)  # [L, N]
        scores = ct.zeros((CHUNK, CHUNK), dtype=ct.float32)  # [L, L]
        scores = dot(B_tile, ct.transpose(C_tile), scores, SCORES)  # [L, L]
        causal = token[None, :] >= token[:, None]  # [L, L]
        causal_before = token[None, :] > token[:, None]  # [L, L]
        d_B_tile = ct.zeros((CHUNK, TILE_N), dtype=ct.float32)  # [L, N]
        d_score_sum = ct.zeros((CHUNK, CHUNK), dtype=ct.float32)  # [L, L]
        d_C_tile = ct.zeros((CHUNK, TILE_N), dtype=ct.float32)  # [L, N]
        for head in range(start_head, stop_head):
            d_y_tile = load(d_y, (batch, chunk, head, 0), (1, CHUNK, 1, TILE_P), latency=LATENCY_D_Y)  # [L, P]
            if WITH_Z:
                z_tile = load(z, (batch, chunk, head, 0), (1, CHUNK, 1, TILE_P)).astype(ct.float32)  # [L, P]
                d_y_z_tile = silu(z_tile) * ct.astype(d_y_tile, ct.float32)  # [L, P]
            else:
                d_y_z_tile = d_y_tile  # [L, P]
            d_y_z_wide = ct.astype(d_y_z_tile, ct.float32)  # [L, P]
            decay_sum_tile = load(decay_sum, (lane, head, slot), (1, 1, CHUNK))  # [L]
            decay_end = ct.extract(decay_sum_tile, index=(CHUNK - 1,), shape=(1,)).reshape(())
            carry = exp2(-ct.abs(decay_end - decay_sum_tile))  # [L]: what is left of a token's input at the end
            d_S_end_tile = load(  # [P, N]
                d_S_end, (lane, head, slot, 0, 0), (1, 1, 1, TILE_P, TILE_N), latency=LATENCY_S
            )
            pulled = ct.zeros((CHUNK, TILE_P), dtype=ct.float32)  # [L, P]
            pulled = dot(B_tile, ct.transpose(d_S_end_tile), pulled, CARRIED)  # [L, P]
            step_tile = load(step, (lane, head, slot), (1, 1, CHUNK))  # [L]
            decay_left = ct.where(  # [L, L]: what is left of token j at token i
                causal, exp2(-ct.abs(decay_sum_tile[None, :] - decay_sum_tile[:, None])), 0.0
            )
            score = scores * decay_left * step_tile[:, None]  # [L, L]
            d_row_tile = dot(score, d_y_z_tile, pulled * (step_tile * carry)[:, None], INTRA)  # [L, P]
            D_tile = load(D, (head, 0), (1, TILE_P), uniform=(False, D_UNIFORM_P)).astype(ct.float32)  # [P]
            d_x_tile = D_tile[None, :] * d_y_z_wide + d_row_tile  # [L, P]
            store(d_x, (batch, chunk, head, 0), (1, CHUNK, 1, TILE_P), d_x_tile)
            x_tile = load(x, (batch, chunk, head, 0), (1, CHUNK, 1, TILE_P), latency=LATENCY_X)  # [L, P]
            x_wide = ct.astype(x_tile, ct.float32)  # [L, P]
            S_entry_tile = load(  # [P, N]
                S_entry, (lane, head, slot, 0, 0), (1, 1, 1, TILE_P, TILE_N), latency=LATENCY_S
            )
            read_S_carried = ct.zeros((CHUNK, TILE_P), dtype=ct.float32)  # [L, P]
            read_S_carried = dot(C_tile, ct.transpose(S_entry_tile), read_S_carried, CARRIED)  # [L, P]
            kept = exp2(decay_sum_tile)  # [L]: what is left of the entry state at a token
            if WITH_Z:
                read_S = dot(ct.transpose(score), x_tile, read_S_carried * kept[:, None], INTRA)  # [L, P]
                # mamba2.ssd:24  y = S[t] . C + D * x
                y_tile = read_S + D_tile[None, :] * x_wide  # [L, P]
                z_tile = load(z, (batch, chunk, head, 0), (1, CHUNK, 1, TILE_P)).astype(ct.float32)  # [L, P]
                d_z_tile = (  # [L, P]
                    ((1.0 - sigmoid(z_tile)) * silu(z_tile) + sigmoid(z_tile))
                    * y_tile
                    * ct.astype(d_y_tile, ct.float32)
                )
                store(d_z, (batch, chunk, head, 0), (1, CHUNK, 1, TILE_P), d_z_tile)
            d_B_tile = dot(x_wide * (step_tile * carry)[:, None], d_S_end_tile, d_B_tile, CARRIED)  # [L, N]
            d_score_tile = ct.zeros((CHUNK, CHUNK), dtype=ct.float32)  # [L, L]
            d_score_tile = dot(x_tile, ct.transpose(d_y_z_tile), d_score_tile, INTRA)  # [L, L]
            d_score_tile = d_score_tile * decay_left  # [L, L]: decayed
            d_score_sum = d_score_sum + d_score_tile * step_tile[:, None]  # [L, L]
            d_C_tile = dot(d_y_z_wide * kept[:, None], S_entry_tile, d_C_tile, CARRIED)  # [L, N]
            flow = d_score_tile * scores  # [L, L]: what the weight at j is asked for by i
            past = ct.where(causal_before, flow * step_tile[:, None], 0.0)  # [L, L]: between two tokens
            if D_FLAT:
                row_pulled, seen, asked, passed, d_D_token_tile = sum_five(  # [L]
                    x_wide * pulled, d_y_z_wide * read_S_carried, flow, past, x_wide * d_y_z_wide
                )
                store_direct(d_D_token, (lane, head, slot), (1, 1, CHUNK), d_D_token_tile, True)
            else:
                row_pulled, seen, asked, passed = sum_four(  # [L]
                    x_wide * pulled, d_y_z_wide * read_S_carried, flow, past
                )
                d_D_tile = inner(ct.transpose(x_tile), ct.transpose(d_y_z_tile), INTRA)  # [P]
                store(d_D_part, (lane, slot, head, 0), (1, 1, 1, TILE_P), d_D_tile)
            d_weight_tile = carry * row_pulled + asked  # [L]
            store_direct(d_weight, (lane, head, slot), (1, 1, CHUNK), d_weight_tile, True)
            d_decay_written_tile = step_tile * carry * row_pulled  # [L]
            store_direct(d_decay_written, (lane, head, slot), (1, 1, CHUNK), d_decay_written_tile, True)
            S_met_tile = (  # [P]: what reaches from before the chunk behind it
                exp2(decay_end)
                * ct.sum(ct.astype(S_entry_tile, ct.float32) * ct.astype(d_S_end_tile, ct.float32), axis=1)
            )
            store(S_met, (lane, head, slot, 0), (1, 1, 1, TILE_P), S_met_tile)
            d_decay_sum_tile = kept * seen + ct.sum(past, axis=0) - passed  # [L]
            store_direct(d_decay_sum, (lane, head, slot), (1, 1, CHUNK), d_decay_sum_tile, True)

        d_B_tile = dot(d_score_sum, C_tile, d_B_tile, INTRA)  # [L, N]
        store(d_B, (share, batch, chunk, group_g, 0), (1, 1, CHUNK, 1, TILE_N), d_B_tile)
        d_C_tile = dot(ct.transpose(d_score_sum), B_tile, d_C_tile, INTRA)  # [L, N]
        store(d_C, (share, batch, chunk, group_g, 0), (1, 1, CHUNK, 1, TILE_N), d_C_tile)


@ct.kernel
def token_gradients(
    dt: ct.Array, A: ct.Array, dt_bias: ct.Array,
    d_weight: ct.Array, d_decay_sum: ct.Array, d_decay_written: ct.Array, S_met: ct.Array, d_A_part: ct.Array,
    d_dt_bias_part: ct.Array, d_D_token: ct.Array, d_D_part: ct.Array,
    chunk_table: ct.Array,
    d_dt: ct.Array,
    dt_min: float, dt_max: float,
    TILE_P: ct.Constant[int], CHUNK: ct.Constant[int], TILE_H: ct.Constant[int],
    PACKED: ct.Constant[bool], D_FLAT: ct.Constant[bool],
) -> None:
    """From the gradients of a chunk's per-token scalars to those of their inputs, for a tile of heads."""
    await_previous()
    chunks = ct.cdiv(dt.shape[1], CHUNK)
    batch, chunk = ct.bid(0) // chunks, ct.bid(0) % chunks
    lane, slot = batch, chunk
    present = True
    if PACKED:
        batch, start, stop = chunk_at(chunk_table, ct.bid(0))
        lane, slot, chunk = 0, ct.bid(0), 0
        present = has_chunk(chunk_table, ct.bid(0))
        dt, d_dt = dt.slice(1, start, stop), d_dt.slice(1, start, stop)
    length = dt.shape[1]
    head_tile = ct.bid(1)
    token = chunk * CHUNK + ct.arange(CHUNK, dtype=ct.int32)

    if present:
        valid = token < length  # [L]: false past the end
        d_weight_tile = load(d_weight, (lane, head_tile, slot), (1, TILE_H, CHUNK))  # [H, L]
        d_decay_sum_tile = load(d_decay_sum, (lane, head_tile, slot), (1, TILE_H, CHUNK))  # [H, L]
        d_decay_written_tile = load(d_decay_written, (lane, head_tile, slot), (1, TILE_H, CHUNK))  # [H, L]
        d_decay_tile = ct.cumsum(ct.transpose(d_decay_sum_tile), axis=0, reverse=True)  # [L, H]
        written_before = ct.cumsum(ct.transpose(d_decay_written_tile), axis=0)  # [L, H]
        S_met_tile = load(S_met, (lane, head_tile, slot, 0), (1, TILE_H, 1, TILE_P))  # [H, P]
        A_tile = load(A, (head_tile,), (TILE_H,)).astype(ct.float32)  # [H]
        dt_tile = load(dt, (batch, chunk, head_tile), (1, CHUNK, TILE_H)).astype(ct.float32)  # [L, H]
        dt_bias_tile = load(dt_bias, (head_tile,), (TILE_H,)).astype(ct.float32)  # [H]
        # mamba2.ssd:18  step = clamp(softplus(dt + dt_bias), dt_min, dt_max)
        step_tile = clamp(softplus(dt_tile + dt_bias_tile[None, :]), dt_min, dt_max)  # [L, H]
        decay_log2 = A_tile[None, :] * step_tile * LOG2E  # [L, H]: of one token
        d_decay_tile = ct.where(  # [L, H]: of the natural logarithm: all that goes past; nothing where clamped
            valid[:, None] & (decay_log2 >= -128.0),
            d_decay_tile + written_before - ct.transpose(d_decay_written_tile) + ct.sum(S_met_tile, axis=1)[None, :],
            0.0,
        )
        d_step_tile = ct.transpose(d_weight_tile) + A_tile[None, :] * d_decay_tile  # [L, H]
        d_dt_tile = (  # [L, H]
            sigmoid(dt_tile + dt_bias_tile[None, :])
            * within(softplus(dt_tile + dt_bias_tile[None, :]), dt_min, dt_max)
            * d_step_tile
        )
        store(d_dt, (batch, chunk, head_tile), (1, CHUNK, TILE_H), d_dt_tile)
        d_A_tile = ct.sum(step_tile * d_decay_tile, axis=0)  # [H]
        store(d_A_part, (lane, slot, head_tile), (1, 1, TILE_H), d_A_tile)
        d_dt_bias_tile = ct.sum(d_dt_tile, axis=0)  # [H]
        store(d_dt_bias_part, (lane, slot, head_tile), (1, 1, TILE_H), d_dt_bias_tile)
        if D_FLAT:
            d_D_token_tile = load(d_D_token, (lane, head_tile, slot), (1, TILE_H, CHUNK))  # [H, L]
            d_D_tile = ct.sum(d_D_token_tile, axis=1)  # [H]
            store(d_D_part, (lane, slot, head_tile, 0), (1, 1, TILE_H, 1), d_D_tile)


def launch(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor, z: Tensor | None, dt_min: float,
    dt_max: float, S0: Tensor | None, d_y: Tensor, d_S_final: Tensor | None, d_S_states: Tensor | None,
    states_every: int, S_starts: Tensor | None, starts_every: int, decays: Sequence[Tensor] | None, d_S0: Tensor,
    sequences: _packed.Sequences | None, config: Config,
) -> tuple[Tensor | None, ...]:
    """Launch the kernels on tensors that 32-bit indices reach. Returns the gradients of inputs in their order,
    as blocks leave them, None for one that is 0; those of initial states are written in place. Where a forward pass
    kept them, segments of `starts_every` tokens begin with its states, and scalars of tokens are its `decays`.
    """
    size_h, size_p, size_b, size_t, size_n, size_g = (
        x.shape[2], x.shape[3], x.shape[0], x.shape[1], B.shape[3], B.shape[2]
    )
    x, dt, B, C, d_y = (_rt.indexable(v) for v in (x, dt, B, C, d_y))
    state_tiles = _rt.ceil_div(size_p, config.state_tile_p) * _rt.ceil_div(size_n, config.state_tile_n)
    segments = _gradients.segments(
        config.segments, _rt.ceil_div(size_t, config.chunk), size_b * size_h * state_tiles, x
    )
    cut = _cut.cut(size_b, size_t, config.chunk, segments, 1, 1, sequences, x, starts_every // config.chunk)
    stream = _rt.stream(x)
    flat_D = D.stride(1) == 0 and size_n <= _gradients.FLAT
    shares = _gradients.shares(config.shares, cut.lanes * cut.slots * size_g, size_h // size_g, x)
    # step[b h t]: weight step
    # decay_sum[b h t]: running sum of A * step * LOG2E within a chunk
    step, decay_sum = decays or _rt.several(2, (cut.lanes, size_h, cut.slots * config.chunk), x)
    # S_entry[b h chunk p n]: the state S that enters each chunk
    # d_S_end[b h chunk p n]: the gradient of the state S at the end of each chunk
    S_entry, d_S_end = _rt.empty(
        (2, cut.lanes, size_h, cut.slots, size_p, size_n), dtype=_rt.stored(config.carried), device=x.device
    ).unbind()
    # S_part[b h segment p n]: the state S that each segment would end with if it began at zero
    S_part = _rt.empty((cut.lanes, size_h, cut.ends, size_p, size_n), dtype=torch.float32, device=x.device)
    # S_left[segment b h]: the sum of the log2 decays of S over each segment
    # d_S_left[segment b h]: the sum of the log2 decays of S over each segment
    S_left, d_S_left = _rt.empty((2, cut.ends, cut.lanes, size_h), dtype=torch.float32, device=x.device).unbind()
    # d_S_part[b h segment p n]: what each segment adds to the gradient of S that arrives at its end
    d_S_part = _rt.empty((cut.lanes, size_h, cut.ends, size_p, size_n), dtype=torch.float32, device=x.device)
    # d_weight[b h t]: the gradient of the weight step
    # d_decay_sum[b h t]: the gradient of the running sum of decay, by reads
    # d_decay_written[b h t]: what the end of a chunk asks decay for, by each token's input
    # d_D_token[b h t]: what each token adds to the gradient of D, if that is one number a head
    d_weight, d_decay_sum, d_decay_written, d_D_token = _rt.empty(
        (4, cut.lanes, size_h, cut.slots * config.chunk), dtype=torch.float32, device=x.device
    ).unbind()
    # S_met[b h chunk p]: what S passes through each chunk, times what arrives there
    S_met = _rt.empty((cut.lanes, size_h, cut.slots, size_p), dtype=torch.float32, device=x.device)
    d_x = _gradients.memory(x, sequences)
    d_dt = _gradients.memory(dt, sequences)
    d_A_part = _gradients.parts((cut.lanes, cut.slots, size_h), sequences, A)
    d_B = _gradients.memory(B, sequences, shares)
    d_C = _gradients.memory(C, sequences, shares)
    d_D_part = _gradients.parts((cut.lanes, cut.slots, size_h, 1 if flat_D else size_p), sequences, D)
    d_dt_bias_part = _gradients.parts((cut.lanes, cut.slots, size_h), sequences, dt_bias)
    d_z = None if z is None else _gradients.memory(z, sequences)
    if decays is None:
        _rt.launch(
            stream,
            _rt.hinted(chunk_cumsum, config.occupancy_chunk_cumsum, config.warps_chunk_cumsum),
            (cut.lanes * cut.slots, _rt.ceil_div(size_h, config.tile_h)),
            (
                dt, A, dt_bias, step, decay_sum, cut.chunk_table, dt_min, dt_max, config.chunk, config.tile_h,
                sequences is not None,
            ),
        )
    # decay_oldest, decay_newest[segment b h]: the chunks that each segment remembers from and reaches to
    decay_oldest, decay_newest = _reach.reaches(stream, decay_sum, cut, config.chunk, sequences is not None)
    if S_starts is None:
        _rt.launch(
            stream,
            _rt.hinted(segment_states, config.occupancy_entry_states, config.warps_entry_states),
            (cut.walks * size_h, cut.inner, state_tiles),
            (
                x, B, step, decay_sum, S_part, S_left, decay_oldest, cut.segment_table, cut.per_segment,
                config.state_latency_x, config.state_latency_B, _rt.PRECISION[config.state], config.state_latency_S,
                config.chunk, config.state_tile_p, config.state_tile_n, sequences is not None,
            ),
            early=True,
        )
    _rt.launch(
        stream,
        _rt.hinted(entry_states, config.occupancy_entry_states, config.warps_entry_states),
        (cut.walks * size_h, cut.segments, state_tiles),
        (
            x, B, _rt.given(S0, d_S0), decay_oldest, S_left, S_part, step, decay_sum, S_entry, cut.segment_table,
            _rt.given(S_starts, d_S0), cut.per_segment, config.state_latency_S, config.state_latency_x,
            config.state_latency_B, _rt.PRECISION[config.state], config.chunk, config.state_tile_p, config.state_tile_n,
            sequences is not None, S0 is not None, S_starts is not None,
        ),
        early=True,
    )
    _rt.launch(
        stream,
        _rt.hinted(segment_gradients, config.occupancy_state_gradients, config.warps_state_gradients),
        (cut.walks * size_h, cut.inner, state_tiles),
        (
            C, _rt.indexable(_rt.given(z, x)), d_y, decay_sum, d_S_part, d_S_left, decay_newest, cut.segment_table,
            _rt.given(d_S_states, d_S0), states_every, cut.per_segment, config.state_latency_d_y,
            config.state_latency_C, _rt.PRECISION[config.state], config.chunk, config.state_tile_p, config.state_tile_n,
            sequences is not None, z is not None, d_S_states is not None,
        ),
        early=True,
    )
    _rt.launch(
        stream,
        _rt.hinted(state_gradients, config.occupancy_state_gradients, config.warps_state_gradients),
        (cut.walks * size_h, cut.segments, state_tiles),
        (
            C, _rt.indexable(_rt.given(z, x)), _rt.given(d_S_final, d_S0), d_y, decay_newest, d_S_left, d_S_part,
            decay_sum, d_S_end, cut.segment_table, d_S0, _rt.given(d_S_states, d_S0), states_every, cut.per_segment,
            config.state_latency_S, config.state_latency_d_y, config.state_latency_C, _rt.PRECISION[config.state],
            config.chunk, config.state_tile_p, config.state_tile_n, sequences is not None, d_S_final is not None,
            z is not None, d_S_states is not None,
        ),
        early=True,
    )
    _rt.launch(
        stream,
        _rt.hinted(chunk_gradients, config.occupancy_chunk_gradients, config.warps_chunk_gradients),
        (cut.lanes * cut.slots, size_g, shares),
        (
            x, B, C, D, _rt.indexable(_rt.given(z, x)), d_y, decay_sum, d_S_end, step, S_entry, d_D_part, d_D_token,
            d_weight, d_decay_written, S_met, d_decay_sum, cut.chunk_table, d_x, _rt.given(d_z, x), d_B, d_C,
            config.latency_B, config.latency_C, _rt.PRECISION[config.scores], config.latency_d_y, config.latency_S,
            _rt.PRECISION[config.carried], _rt.PRECISION[config.intra], config.latency_x, config.chunk,
            _rt.covering(size_p), _rt.covering(size_n), D.stride(1) == 0, sequences is not None, z is not None, flat_D,
        ),
        early=True,
    )
    _rt.launch(
        stream,
        _rt.hinted(token_gradients, config.occupancy_token_gradients, config.warps_token_gradients),
        (cut.lanes * cut.slots, _rt.ceil_div(size_h, config.tile_h)),
        (
            dt, A, dt_bias, d_weight, d_decay_sum, d_decay_written, S_met, d_A_part, d_dt_bias_part, d_D_token,
            d_D_part, cut.chunk_table, d_dt, dt_min, dt_max, _rt.covering(size_p), config.chunk, config.tile_h,
            sequences is not None, flat_D,
        ),
        early=True,
    )
    return (d_x, d_dt, d_A_part, d_B, d_C, d_D_part, d_dt_bias_part, d_z)


SPEC_DIGEST = "eafb29fc035d5ce53c83a02b255cfaf238a181d66bbc929d18afa7c9e2fe2320"
"""The SHA-256 of the spec's text; emitted by ssdgen 0.1.0."""

SUMMED: dict[str, tuple[int, ...]] = {"A": (0, 1), "D": (0, 1), "dt_bias": (0, 1)}
"""The dimensions to sum over of the gradients that are left in parts, by input."""


GRADIENTS = _gradients.Gradients(LAYER, launch, CONFIGS, ("x", "dt"), SUMMED, SPEC_DIGEST, VARIANT)
"""What `forward` of `mamba2` is differentiated by."""
