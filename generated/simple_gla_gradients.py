"""The gradients of simple_gla: Gated linear attention with one gate a token and head (Yang et al. 2023, arXiv
2312.06635, as fla's simple GLA).

Emitted by ssdgen; the gradients of a chunk of L tokens from d_y, d_S_end:

    d_read_S = 1 / sqrt(size(n)) * d_y

    d_S = 2^s[L-1] d_S_end
      + sum_i 2^s[i] d_read_S[i] (x) q[i]
    d_score[i,j] = d_read_S[i] . v[j]    j <= i
    d_row[j] = 2^(s[L-1] - s[j]) d_S_end . k[j]
      + sum_i score[i,j] d_read_S[i]
    d_write[j] = 2^(s[L-1] - s[j]) v[j] . d_S_end
      + sum_i 2^(s[i] - s[j]) d_score[i,j] q[i]
    d_vector[i] = 2^s[i] d_read_S[i] . S
      + sum_j 2^(s[i] - s[j]) d_score[i,j] k[j]
    d_s[i] = d_vector[i] . q[i] - d_write[i] . k[i]; at i = L-1 also + d_S_end . S_end
    d_decay[t] = d_s[t] + ... + d_s[L-1]    of the natural logarithm

    d_q = d_vector
    d_k = d_write
    d_v = d_row
    d_g = d_decay

    one token:
    d_S = 2^(g * LOG2E) (d_S + d_read_S (x) q)
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
from ._tiles import await_previous, chunk_at, dot, exp2, has_chunk, load, segment_at, store, sum_pair
from .simple_gla import LAYER, VARIANT, chunk_cumsum

LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Config:
    """How the kernels run. Tiles and chunk are powers of two; each set of values compiles its own kernels."""

    chunk: int = 64  # tokens a chunk
    tile_h: int = 8  # tile of axis h
    state_tile_p: int = 64  # tile of axis p of a state that walks the chunks
    state_tile_n: int = 64  # tile of axis n of a state that walks the chunks
    scores: str = "bf16"  # operands of the `scores` product
    carried: str = "bf16"  # operands of the `carried` product
    intra: str = "tf32"  # operands of the `intra` product
    state: str = "bf16"  # operands of the `state` product
    latency_v: int = 5  # latency hint of v
    latency_d_y: int = 5  # latency hint of d_y
    latency_q: int = 1  # latency hint of q
    latency_k: int = 1  # latency hint of k
    latency_S: int = 3  # latency hint of S
    state_latency_v: int = 3  # latency hint of v where a state walks the chunks
    state_latency_d_y: int = 3  # latency hint of d_y where a state walks the chunks
    state_latency_q: int = 3  # latency hint of q where a state walks the chunks
    state_latency_k: int = 3  # latency hint of k where a state walks the chunks
    state_latency_S: int = 3  # latency hint of S where a state walks the chunks
    segments: int = 0  # pieces of a sequence that are walked at once, 0 to let the size of the GPU choose
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
    torch.float16: Config(scores="tf32", carried="tf32", state="tf32"),
    torch.float32: Config(scores="tf32", carried="tf32", state="tf32"),
}
"""The default configuration for each dtype of `v`."""


@ct.kernel
def segment_states(
    k: ct.Array, v: ct.Array,
    decay_sum: ct.Array, S_part: ct.Array, S_left: ct.Array, decay_oldest: ct.Array,
    segment_table: ct.Array,
    per_segment: int,
    LATENCY_V: ct.Constant[int], LATENCY_K: ct.Constant[int], STATE: ct.Constant[int], LATENCY_S: ct.Constant[int],
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
        k, v = k.slice(1, start, stop), v.slice(1, start, stop)
    length = v.shape[1]
    n_tiles = ct.cdiv(S_part.shape[4], TILE_N)
    p_tile, n_tile = ct.bid(2) // n_tiles, ct.bid(2) % n_tiles
    begin = _reach.chunk_since(decay_oldest, lane, head, origin, segment, per_segment)

    S_tile = ct.zeros((TILE_P, TILE_N), dtype=ct.float32)  # [P, N]
    S_left_tile = ct.zeros((), dtype=ct.float32)
    for chunk in range(begin, ct.minimum(ct.cdiv(length, CHUNK), (segment + 1) * per_segment)):
        v_tile = load(  # [L, P]
            v, (batch, chunk, head, p_tile), (1, CHUNK, 1, TILE_P), latency=LATENCY_V
        ).astype(ct.float32)
        k_tile = load(k, (batch, chunk, head, n_tile), (1, CHUNK, 1, TILE_N), latency=LATENCY_K)  # [L, N]
        decay_sum_tile = load(decay_sum, (lane, head, slot + chunk), (1, 1, CHUNK))  # [L]
        decay_end = ct.extract(decay_sum_tile, index=(CHUNK - 1,), shape=(1,)).reshape(())
        carry = exp2(-ct.abs(decay_end - decay_sum_tile))  # [L]: what is left of a token's input at the end
        S_tile = dot(ct.transpose(v_tile) * carry[None, :], k_tile, exp2(decay_end) * S_tile, STATE)  # [P, N]
        S_left_tile = S_left_tile + decay_end
    store(S_part, (lane, head, origin + segment, p_tile, n_tile), (1, 1, 1, TILE_P, TILE_N), S_tile, latency=LATENCY_S)
    if ct.bid(2) == 0:
        store(S_left, (origin + segment, lane, head), (1, 1, 1), S_left_tile)


@ct.kernel
def entry_states(
    k: ct.Array, v: ct.Array,
    S0: ct.Array,
    decay_oldest: ct.Array, S_left: ct.Array, S_part: ct.Array, decay_sum: ct.Array, S_entry: ct.Array,
    segment_table: ct.Array,
    S_starts: ct.Array,
    per_segment: int,
    LATENCY_S: ct.Constant[int], LATENCY_V: ct.Constant[int], LATENCY_K: ct.Constant[int], STATE: ct.Constant[int],
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
        k, v = k.slice(1, start, stop), v.slice(1, start, stop)
    length = v.shape[1]
    n_tiles = ct.cdiv(S_entry.shape[4], TILE_N)
    p_tile, n_tile = ct.bid(2) // n_tiles, ct.bid(2) % n_tiles
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
        v_tile = load(  # [L, P]
            v, (batch, chunk, head, p_tile), (1, CHUNK, 1, TILE_P), latency=LATENCY_V
        ).astype(ct.float32)
        k_tile = load(k, (batch, chunk, head, n_tile), (1, CHUNK, 1, TILE_N), latency=LATENCY_K)  # [L, N]
        decay_sum_tile = load(decay_sum, (lane, head, slot + chunk), (1, 1, CHUNK))  # [L]
        decay_end = ct.extract(decay_sum_tile, index=(CHUNK - 1,), shape=(1,)).reshape(())
        carry = exp2(-ct.abs(decay_end - decay_sum_tile))  # [L]: what is left of a token's input at the end
        S_tile = dot(ct.transpose(v_tile) * carry[None, :], k_tile, exp2(decay_end) * S_tile, STATE)  # [P, N]


@ct.kernel
def segment_gradients(
    q: ct.Array,
    d_y: ct.Array,
    decay_sum: ct.Array, d_S_part: ct.Array, d_S_left: ct.Array, decay_newest: ct.Array,
    segment_table: ct.Array,
    d_S_states: ct.Array,
    size_n: float, every: int, per_segment: int,
    LATENCY_D_Y: ct.Constant[int], LATENCY_Q: ct.Constant[int], STATE: ct.Constant[int], CHUNK: ct.Constant[int],
    TILE_P: ct.Constant[int], TILE_N: ct.Constant[int],
    PACKED: ct.Constant[bool], KEPT: ct.Constant[bool],
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
        q, d_y = q.slice(1, start, stop), d_y.slice(1, start, stop)
    length = q.shape[1]
    n_tiles = ct.cdiv(d_S_part.shape[4], TILE_N)
    p_tile, n_tile = ct.bid(2) // n_tiles, ct.bid(2) % n_tiles
    begin = segment * per_segment
    chunks = _reach.chunks_until(decay_newest, lane, head, origin, segment, per_segment, length, CHUNK)

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
        d_y_tile = load(  # [L, P]
            d_y, (batch, chunk, head, p_tile), (1, CHUNK, 1, TILE_P), latency=LATENCY_D_Y
        ).astype(ct.float32)
        d_read_S_tile = 1.0 / ct.sqrt(size_n) * d_y_tile  # [L, P]
        decay_sum_tile = load(decay_sum, (lane, head, slot + chunk), (1, 1, CHUNK))  # [L]
        decay_end = ct.extract(decay_sum_tile, index=(CHUNK - 1,), shape=(1,)).reshape(())
        q_tile = load(q, (batch, chunk, head, n_tile), (1, CHUNK, 1, TILE_N), latency=LATENCY_Q)  # [L, N]
        weight = exp2(decay_sum_tile)  # [L]: what is left of the state at a token
        d_S_tile = dot(  # [P, N]
            ct.transpose(d_read_S_tile) * weight[None, :], q_tile, exp2(decay_end) * d_S_tile, STATE
        )
        d_S_left_tile = d_S_left_tile + decay_end
    store(d_S_part, (lane, head, origin + segment, p_tile, n_tile), (1, 1, 1, TILE_P, TILE_N), d_S_tile)
    if ct.bid(2) == 0:
        store(d_S_left, (origin + segment, lane, head), (1, 1, 1), d_S_left_tile)


@ct.kernel
def state_gradients(
    q: ct.Array,
    d_S_final: ct.Array,
    d_y: ct.Array,
    decay_newest: ct.Array, d_S_left: ct.Array, d_S_part: ct.Array, decay_sum: ct.Array, d_S_end: ct.Array,
    segment_table: ct.Array,
    d_S0: ct.Array,
    d_S_states: ct.Array,
    size_n: float, every: int, per_segment: int,
    LATENCY_S: ct.Constant[int], LATENCY_D_Y: ct.Constant[int], LATENCY_Q: ct.Constant[int], STATE: ct.Constant[int],
    CHUNK: ct.Constant[int], TILE_P: ct.Constant[int], TILE_N: ct.Constant[int],
    PACKED: ct.Constant[bool], WITH_D_S: ct.Constant[bool], KEPT: ct.Constant[bool],
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
        q, d_y = q.slice(1, start, stop), d_y.slice(1, start, stop)
    length = q.shape[1]
    n_tiles = ct.cdiv(d_S_end.shape[4], TILE_N)
    p_tile, n_tile = ct.bid(2) // n_tiles, ct.bid(2) % n_tiles
    begin = segment * per_segment
    chunks = ct.minimum(ct.cdiv(length, CHUNK), begin + per_segment) - begin
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
        d_y_tile = load(  # [L, P]
            d_y, (batch, chunk, head, p_tile), (1, CHUNK, 1, TILE_P), latency=LATENCY_D_Y
        ).astype(ct.float32)
        d_read_S_tile = 1.0 / ct.sqrt(size_n) * d_y_tile  # [L, P]
        decay_sum_tile = load(decay_sum, (lane, head, slot + chunk), (1, 1, CHUNK))  # [L]
        decay_end = ct.extract(decay_sum_tile, index=(CHUNK - 1,), shape=(1,)).reshape(())
        q_tile = load(q, (batch, chunk, head, n_tile), (1, CHUNK, 1, TILE_N), latency=LATENCY_Q)  # [L, N]
        weight = exp2(decay_sum_tile)  # [L]: what is left of the state at a token
        d_S_tile = dot(  # [P, N]
            ct.transpose(d_read_S_tile) * weight[None, :], q_tile, exp2(decay_end) * d_S_tile, STATE
        )
    if segment == 0:
        store(d_S0, (sequence, head, p_tile, n_tile), (1, 1, TILE_P, TILE_N), d_S_tile)


@ct.kernel
def chunk_gradients(
    q: ct.Array, k: ct.Array, v: ct.Array,
    d_y: ct.Array,
    decay_sum: ct.Array, d_S_end: ct.Array, S_entry: ct.Array, d_decay_written: ct.Array, S_met: ct.Array,
    d_decay_sum: ct.Array,
    chunk_table: ct.Array,
    d_v: ct.Array, d_q: ct.Array, d_k: ct.Array,
    size_n: float,
    LATENCY_K: ct.Constant[int], LATENCY_Q: ct.Constant[int], SCORES: ct.Constant[int], LATENCY_D_Y: ct.Constant[int],
    LATENCY_S: ct.Constant[int], CARRIED: ct.Constant[int], INTRA: ct.Constant[int], LATENCY_V: ct.Constant[int],
    CHUNK: ct.Constant[int], TILE_P: ct.Constant[int], TILE_N: ct.Constant[int],
    PACKED: ct.Constant[bool],
) -> None:
    """The gradients of one chunk and head."""
    await_previous()
    chunks = ct.cdiv(k.shape[1], CHUNK)
    batch, chunk = ct.bid(0) // chunks, ct.bid(0) % chunks
    lane, slot = batch, chunk
    present = True
    if PACKED:
        batch, start, stop = chunk_at(chunk_table, ct.bid(0))
        lane, slot, chunk = 0, ct.bid(0), 0
        present = has_chunk(chunk_table, ct.bid(0))
        q, k = q.slice(1, start, stop), k.slice(1, start, stop)
        v, d_y = v.slice(1, start, stop), d_y.slice(1, start, stop)
        d_v, d_q = d_v.slice(1, start, stop), d_q.slice(1, start, stop)
        d_k = d_k.slice(1, start, stop)
    head = ct.bid(1)
    token = ct.arange(CHUNK, dtype=ct.int32)

    if present:
        k_tile = load(k, (batch, chunk, head, 0), (1, CHUNK, 1, TILE_N), latency=LATENCY_K)  # [L, N]
        q_tile = load(q, (batch, chunk, head, 0), (1, CHUNK, 1, TILE_N), latency=LATENCY_Q)  # [L, N]
        scores = ct.zeros((CHUNK, CHUNK), dtype=ct.float32)  # [L, L]
        scores = dot(k_tile, ct.transpose(q_tile), scores, SCORES)  # [L, L]
        causal = token[None, :] >= token[:, None]  # [L, L]
        causal_before = token[None, :] > token[:, None]  # [L, L]
        d_q_tile = ct.zeros((CHUNK, TILE_N), dtype=ct.float32)  # [L, N]
        d_score_sum = ct.zeros((CHUNK, CHUNK), dtype=ct.float32)  # [L, L]
        d_k_tile = ct.zeros((CHUNK, TILE_N), dtype=ct.float32)  # [L, N]
        d_y_tile = load(  # [L, P]
            d_y, (batch, chunk, head, 0), (1, CHUNK, 1, TILE_P), latency=LATENCY_D_Y
        ).astype(ct.float32)
        d_read_S_tile = 1.0 / ct.sqrt(size_n) * d_y_tile  # [L, P]
        decay_sum_tile = load(decay_sum, (lane, head, slot), (1, 1, CHUNK))  # [L]
        decay_end = ct.extract(decay_sum_tile, index=(CHUNK - 1,), shape=(1,)).reshape(())
        carry = exp2(-ct.abs(decay_end - decay_sum_tile))  # [L]: what is left of a token's input at the end
        d_S_end_tile = load(d_S_end, (lane, head, slot, 0, 0), (1, 1, 1, TILE_P, TILE_N), latency=LATENCY_S)  # [P, N]
        pulled = ct.zeros((CHUNK, TILE_P), dtype=ct.float32)  # [L, P]
        pulled = dot(k_tile, ct.transpose(d_S_end_tile), pulled, CARRIED)  # [L, P]
        decay_left = ct.where(  # [L, L]: what is left of token j at token i
            causal, exp2(-ct.abs(decay_sum_tile[None, :] - decay_sum_tile[:, None])), 0.0
        )
        score = scores * decay_left  # [L, L]
        d_row_tile = dot(score, d_read_S_tile, pulled * carry[:, None], INTRA)  # [L, P]
        d_v_tile = d_row_tile  # [L, P]
        store(d_v, (batch, chunk, head, 0), (1, CHUNK, 1, TILE_P), d_v_tile)
        kept = exp2(decay_sum_tile)  # [L]: what is left of the entry state at a token
        S_entry_tile = load(S_entry, (lane, head, slot, 0, 0), (1, 1, 1, TILE_P, TILE_N), latency=LATENCY_S)  # [P, N]
        d_q_tile = dot(d_read_S_tile * kept[:, None], S_entry_tile, d_q_tile, CARRIED)  # [L, N]
        d_score_tile = ct.zeros((CHUNK, CHUNK), dtype=ct.float32)  # [L, L]
        v_tile = load(v, (batch, chunk, head, 0), (1, CHUNK, 1, TILE_P), latency=LATENCY_V)  # [L, P]
        v_wide = ct.astype(v_tile, ct.float32)  # [L, P]
        d_score_tile = dot(v_tile, ct.transpose(d_read_S_tile), d_score_tile, INTRA)  # [L, L]
        d_score_tile = d_score_tile * decay_left  # [L, L]: decayed
        d_score_sum = d_score_sum + d_score_tile  # [L, L]
        d_k_tile = dot(v_wide * carry[:, None], d_S_end_tile, d_k_tile, CARRIED)  # [L, N]
        read_S_carried = ct.zeros((CHUNK, TILE_P), dtype=ct.float32)  # [L, P]
        read_S_carried = dot(q_tile, ct.transpose(S_entry_tile), read_S_carried, CARRIED)  # [L, P]
        flow = d_score_tile * scores  # [L, L]: what the weight at j is asked for by i
        past = ct.where(causal_before, flow, 0.0)  # [L, L]: between two tokens
        row_pulled, seen = sum_pair(v_wide * pulled, d_read_S_tile * read_S_carried)  # [L]
        passed = ct.sum(past, axis=1)  # [L]
        d_decay_written_tile = carry * row_pulled  # [L]
        store_direct(d_decay_written, (lane, head, slot), (1, 1, CHUNK), d_decay_written_tile, True)
        S_met_tile = (  # [P]: what reaches from before the chunk behind it
            exp2(decay_end) * ct.sum(ct.astype(S_entry_tile, ct.float32) * ct.astype(d_S_end_tile, ct.float32), axis=1)
        )
        store(S_met, (lane, head, slot, 0), (1, 1, 1, TILE_P), S_met_tile)
        d_decay_sum_tile = kept * seen + ct.sum(past, axis=0) - passed  # [L]
        store_direct(d_decay_sum, (lane, head, slot), (1, 1, CHUNK), d_decay_sum_tile, True)

        d_q_tile = dot(ct.transpose(d_score_sum), k_tile, d_q_tile, INTRA)  # [L, N]
        store(d_q, (batch, chunk, head, 0), (1, CHUNK, 1, TILE_N), d_q_tile)
        d_k_tile = dot(d_score_sum, q_tile, d_k_tile, INTRA)  # [L, N]
        store(d_k, (batch, chunk, head, 0), (1, CHUNK, 1, TILE_N), d_k_tile)


@ct.kernel
def token_gradients(
    g: ct.Array,
    d_decay_sum: ct.Array, d_decay_written: ct.Array, S_met: ct.Array,
    chunk_table: ct.Array,
    d_g: ct.Array,
    TILE_P: ct.Constant[int], CHUNK: ct.Constant[int], TILE_H: ct.Constant[int],
    PACKED: ct.Constant[bool],
) -> None:
    """From the gradients of a chunk's per-token scalars to those of their inputs, for a tile of heads."""
    await_previous()
    chunks = ct.cdiv(g.shape[1], CHUNK)
    batch, chunk = ct.bid(0) // chunks, ct.bid(0) % chunks
    lane, slot = batch, chunk
    present = True
    if PACKED:
        batch, start, stop = chunk_at(chunk_table, ct.bid(0))
        lane, slot, chunk = 0, ct.bid(0), 0
        present = has_chunk(chunk_table, ct.bid(0))
        g, d_g = g.slice(1, start, stop), d_g.slice(1, start, stop)
    length = g.shape[1]
    head_tile = ct.bid(1)
    token = chunk * CHUNK + ct.arange(CHUNK, dtype=ct.int32)

    if present:
        valid = token < length  # [L]: false past the end
        d_decay_sum_tile = load(d_decay_sum, (lane, head_tile, slot), (1, TILE_H, CHUNK))  # [H, L]
        d_decay_written_tile = load(d_decay_written, (lane, head_tile, slot), (1, TILE_H, CHUNK))  # [H, L]
        d_decay_tile = ct.cumsum(ct.transpose(d_decay_sum_tile), axis=0, reverse=True)  # [L, H]
        written_before = ct.cumsum(ct.transpose(d_decay_written_tile), axis=0)  # [L, H]
        S_met_tile = load(S_met, (lane, head_tile, slot, 0), (1, TILE_H, 1, TILE_P))  # [H, P]
        g_tile = load(g, (batch, chunk, head_tile), (1, CHUNK, TILE_H)).astype(ct.float32)  # [L, H]
        decay_log2 = g_tile * LOG2E  # [L, H]: of one token
        d_decay_tile = ct.where(  # [L, H]: of the natural logarithm: all that goes past; nothing where clamped
            valid[:, None] & (decay_log2 >= -128.0),
            d_decay_tile + written_before - ct.transpose(d_decay_written_tile) + ct.sum(S_met_tile, axis=1)[None, :],
            0.0,
        )
        d_g_tile = d_decay_tile  # [L, H]
        store(d_g, (batch, chunk, head_tile), (1, CHUNK, TILE_H), d_g_tile)


def launch(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, S0: Tensor | None, d_y: Tensor, d_S_final: Tensor | None,
    d_S_states: Tensor | None, states_every: int, S_starts: Tensor | None, starts_every: int,
    decays: Sequence[Tensor] | None, d_S0: Tensor, sequences: _packed.Sequences | None, config: Config,
) -> tuple[Tensor | None, ...]:
    """Launch the kernels on tensors that 32-bit indices reach. Returns the gradients of inputs in their order,
    as blocks leave them, None for one that is 0; those of initial states are written in place. Where a forward pass
    kept them, segments of `starts_every` tokens begin with its states, and scalars of tokens are its `decays`.
    """
    size_b, size_t, size_h, size_p, size_n = q.shape[0], q.shape[1], q.shape[2], v.shape[3], q.shape[3]
    q, k, v, g, d_y = (_rt.indexable(v) for v in (q, k, v, g, d_y))
    state_tiles = _rt.ceil_div(size_p, config.state_tile_p) * _rt.ceil_div(size_n, config.state_tile_n)
    segments = _gradients.segments(
        config.segments, _rt.ceil_div(size_t, config.chunk), size_b * size_h * state_tiles, v
    )
    cut = _cut.cut(size_b, size_t, config.chunk, segments, 1, 1, sequences, v, starts_every // config.chunk)
    stream = _rt.stream(v)
    # decay_sum[b h t]: running sum of g * LOG2E within a chunk
    (decay_sum,) = decays or _rt.several(1, (cut.lanes, size_h, cut.slots * config.chunk), v)
    # S_entry[b h chunk p n]: the state S that enters each chunk
    # d_S_end[b h chunk p n]: the gradient of the state S at the end of each chunk
    S_entry, d_S_end = _rt.empty(
        (2, cut.lanes, size_h, cut.slots, size_p, size_n), dtype=_rt.stored(config.carried), device=v.device
    ).unbind()
    # S_part[b h segment p n]: the state S that each segment would end with if it began at zero
    S_part = _rt.empty((cut.lanes, size_h, cut.ends, size_p, size_n), dtype=torch.float32, device=v.device)
    # S_left[segment b h]: the sum of the log2 decays of S over each segment
    # d_S_left[segment b h]: the sum of the log2 decays of S over each segment
    S_left, d_S_left = _rt.empty((2, cut.ends, cut.lanes, size_h), dtype=torch.float32, device=v.device).unbind()
    # d_S_part[b h segment p n]: what each segment adds to the gradient of S that arrives at its end
    d_S_part = _rt.empty((cut.lanes, size_h, cut.ends, size_p, size_n), dtype=torch.float32, device=v.device)
    # d_decay_sum[b h t]: the gradient of the running sum of decay, by reads
    # d_decay_written[b h t]: what the end of a chunk asks decay for, by each token's input
    d_decay_sum, d_decay_written = _rt.empty(
        (2, cut.lanes, size_h, cut.slots * config.chunk), dtype=torch.float32, device=v.device
    ).unbind()
    # S_met[b h chunk p]: what S passes through each chunk, times what arrives there
    S_met = _rt.empty((cut.lanes, size_h, cut.slots, size_p), dtype=torch.float32, device=v.device)
    d_q = _gradients.memory(q, sequences)
    d_k = _gradients.memory(k, sequences)
    d_v = _gradients.memory(v, sequences)
    d_g = _gradients.memory(g, sequences)
    if decays is None:
        _rt.launch(
            stream,
            _rt.hinted(chunk_cumsum, config.occupancy_chunk_cumsum, config.warps_chunk_cumsum),
            (cut.lanes * cut.slots, _rt.ceil_div(size_h, config.tile_h)),
            (g, decay_sum, cut.chunk_table, config.chunk, config.tile_h, sequences is not None),
        )
    # decay_oldest, decay_newest[segment b h]: the chunks that each segment remembers from and reaches to
    decay_oldest, decay_newest = _reach.reaches(stream, decay_sum, cut, config.chunk, sequences is not None)
    if S_starts is None:
        _rt.launch(
            stream,
            _rt.hinted(segment_states, config.occupancy_entry_states, config.warps_entry_states),
            (cut.walks * size_h, cut.inner, state_tiles),
            (
                k, v, decay_sum, S_part, S_left, decay_oldest, cut.segment_table, cut.per_segment,
                config.state_latency_v, config.state_latency_k, _rt.PRECISION[config.state], config.state_latency_S,
                config.chunk, config.state_tile_p, config.state_tile_n, sequences is not None,
            ),
            early=True,
        )
    _rt.launch(
        stream,
        _rt.hinted(entry_states, config.occupancy_entry_states, config.warps_entry_states),
        (cut.walks * size_h, cut.segments, state_tiles),
        (
            k, v, _rt.given(S0, d_S0), decay_oldest, S_left, S_part, decay_sum, S_entry, cut.segment_table,
            _rt.given(S_starts, d_S0), cut.per_segment, config.state_latency_S, config.state_latency_v,
            config.state_latency_k, _rt.PRECISION[config.state], config.chunk, config.state_tile_p, config.state_tile_n,
            sequences is not None, S0 is not None, S_starts is not None,
        ),
        early=True,
    )
    _rt.launch(
        stream,
        _rt.hinted(segment_gradients, config.occupancy_state_gradients, config.warps_state_gradients),
        (cut.walks * size_h, cut.inner, state_tiles),
        (
            q, d_y, decay_sum, d_S_part, d_S_left, decay_newest, cut.segment_table, _rt.given(d_S_states, d_S0),
            float(size_n), states_every, cut.per_segment, config.state_latency_d_y, config.state_latency_q,
            _rt.PRECISION[config.state], config.chunk, config.state_tile_p, config.state_tile_n, sequences is not None,
            d_S_states is not None,
        ),
        early=True,
    )
    _rt.launch(
        stream,
        _rt.hinted(state_gradients, config.occupancy_state_gradients, config.warps_state_gradients),
        (cut.walks * size_h, cut.segments, state_tiles),
        (
            q, _rt.given(d_S_final, d_S0), d_y, decay_newest, d_S_left, d_S_part, decay_sum, d_S_end, cut.segment_table,
            d_S0, _rt.given(d_S_states, d_S0), float(size_n), states_every, cut.per_segment, config.state_latency_S,
            config.state_latency_d_y, config.state_latency_q, _rt.PRECISION[config.state], config.chunk,
            config.state_tile_p, config.state_tile_n, sequences is not None, d_S_final is not None,
            d_S_states is not None,
        ),
        early=True,
    )
    _rt.launch(
        stream,
        _rt.hinted(chunk_gradients, config.occupancy_chunk_gradients, config.warps_chunk_gradients),
        (cut.lanes * cut.slots, size_h),
        (
            q, k, v, d_y, decay_sum, d_S_end, S_entry, d_decay_written, S_met, d_decay_sum, cut.chunk_table, d_v, d_q,
            d_k, float(size_n), config.latency_k, config.latency_q, _rt.PRECISION[config.scores], config.latency_d_y,
            config.latency_S, _rt.PRECISION[config.carried], _rt.PRECISION[config.intra], config.latency_v,
            config.chunk, _rt.covering(size_p), _rt.covering(size_n), sequences is not None,
        ),
        early=True,
    )
    _rt.launch(
        stream,
        _rt.hinted(token_gradients, config.occupancy_token_gradients, config.warps_token_gradients),
        (cut.lanes * cut.slots, _rt.ceil_div(size_h, config.tile_h)),
        (
            g, d_decay_sum, d_decay_written, S_met, cut.chunk_table, d_g, _rt.covering(size_p), config.chunk,
            config.tile_h, sequences is not None,
        ),
        early=True,
    )
    return (d_q, d_k, d_v, d_g)


SPEC_DIGEST = "25b59f99f44771e32aba0a6bf206e961a0a126719bcf3b39be7df453d7df2e85"
"""The SHA-256 of the spec's text; emitted by ssdgen 0.1.0."""

SUMMED: dict[str, tuple[int, ...]] = {}
"""The dimensions to sum over of the gradients that are left in parts, by input."""


GRADIENTS = _gradients.Gradients(LAYER, launch, CONFIGS, ("v", "g"), SUMMED, SPEC_DIGEST, VARIANT)
"""What `forward` of `simple_gla` is differentiated by."""
