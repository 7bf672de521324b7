"""The gradients of retnet: Retention with a constant decay a head (Sun et al. 2023, arXiv 2307.08621).

Emitted by ssdgen; the gradients of a chunk of L tokens from d_y, d_S_end:

    d_read_S = d_y

    d_S = 2^s[L-1] d_S_end
      + sum_i 2^s[i] d_read_S[i] (x) q[i]
    d_score[i,j] = d_read_S[i] . v[j]    j <= i
    d_row[j] = weight 2^(s[L-1] - s[j]) d_S_end . k[j]
      + sum_i score[i,j] d_read_S[i]
    d_write[j] = 2^(s[L-1] - s[j]) v[j] . d_S_end
      + sum_i 2^(s[i] - s[j]) d_score[i,j] q[i]
    d_vector[i] = 2^s[i] d_read_S[i] . S
      + sum_j 2^(s[i] - s[j]) d_score[i,j] weight k[j]

    d_q = d_vector
    d_k = 1 / sqrt(size(n)) * d_write
    d_v = d_row

    one token:
    d_S = 2^(log1p(-exp2(-5 - index(h))) * LOG2E) (d_S + d_read_S (x) q)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import cuda.tile as ct
import torch
from torch import Tensor

from . import _cut, _gradients, _packed
from . import _runtime as _rt
from ._tiles import await_previous, chunk_at, clamp, dot, exp2, has_chunk, load, log1p, segment_at, store
from .retnet import LAYER, VARIANT

LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Config:
    """How the kernels run. Tiles and chunk are powers of two; each set of values compiles its own kernels."""

    chunk: int = 64  # tokens a chunk
    state_tile_p: int = 64  # tile of axis p of a state that walks the chunks
    state_tile_n: int = 64  # tile of axis n of a state that walks the chunks
    scores: str = "bf16"  # operands of the `scores` product
    carried: str = "bf16"  # operands of the `carried` product
    intra: str = "bf16"  # operands of the `intra` product
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
    occupancy_entry_states: int = 2  # blocks of segment_states a multiprocessor, 0 to let the compiler choose
    occupancy_state_gradients: int = 2  # blocks of segment_gradients a multiprocessor, 0 to let the compiler choose
    occupancy_chunk_gradients: int = 1  # blocks of chunk_gradients a multiprocessor, 0 to let the compiler choose
    warps_entry_states: int = 0  # worker warps of a block of segment_states, 0 to let the compiler choose
    warps_state_gradients: int = 0  # worker warps of a block of segment_gradients, 0 to let the compiler choose
    warps_chunk_gradients: int = 8  # worker warps of a block of chunk_gradients, 0 to let the compiler choose

    def __post_init__(self) -> None:
        _rt.check_config(LAYER, vars(self))


CONFIGS = {
    torch.bfloat16: Config(),
    torch.float16: Config(scores="tf32", carried="tf32", intra="tf32", state="tf32"),
    torch.float32: Config(scores="tf32", carried="tf32", intra="tf32", state="tf32"),
}
"""The default configuration for each dtype of `v`."""


@ct.kernel
def segment_states(
    k: ct.Array, v: ct.Array,
    S_part: ct.Array, S_left: ct.Array,
    segment_table: ct.Array,
    size_n: float, per_segment: int,
    LATENCY_V: ct.Constant[int], LATENCY_K: ct.Constant[int], STATE: ct.Constant[int], LATENCY_S: ct.Constant[int],
    CHUNK: ct.Constant[int], TILE_P: ct.Constant[int], TILE_N: ct.Constant[int],
    PACKED: ct.Constant[bool],
) -> None:
    """The state S that a segment would end with if it began at zero, and the sum of its log2 decays."""
    await_previous()
    heads = S_part.shape[1]
    batch, head = ct.bid(0) // heads, ct.bid(0) % heads
    lane = batch
    segment, origin = ct.bid(1), 0
    if PACKED:
        row = batch
        _, batch, start, stop, _, segment, last = segment_at(segment_table, batch)
        lane, origin = 0, row - segment
        stop = ct.where(last, start, stop)  # nothing enters a segment after the last
        k, v = k.slice(1, start, stop), v.slice(1, start, stop)
    length = v.shape[1]
    n_tiles = ct.cdiv(S_part.shape[4], TILE_N)
    p_tile, n_tile = ct.bid(2) // n_tiles, ct.bid(2) % n_tiles
    token = ct.arange(CHUNK, dtype=ct.int32)
    begin = segment * per_segment

    S_tile = ct.zeros((TILE_P, TILE_N), dtype=ct.float32)  # [P, N]
    weight_tile = 1.0 / ct.sqrt(size_n)
    decay_log2 = clamp(log1p(-exp2(-5.0 - ct.astype(head, ct.float32))) * LOG2E, -128.0, 0.0)  # of one token
    decay_sum = (ct.astype(token, ct.float32) + 1.0) * decay_log2  # [L]
    S_left_tile = ct.zeros((), dtype=ct.float32)
    for chunk in range(begin, ct.minimum(ct.cdiv(length, CHUNK), (segment + 1) * per_segment)):
        v_tile = load(  # [L, P]
            v, (batch, chunk, head, p_tile), (1, CHUNK, 1, TILE_P), latency=LATENCY_V
        ).astype(ct.float32)
        k_tile = load(k, (batch, chunk, head, n_tile), (1, CHUNK, 1, TILE_N), latency=LATENCY_K)  # [L, N]
        decay_end = ct.astype(ct.minimum(CHUNK, length - chunk * CHUNK), ct.float32) * decay_log2
        carry = weight_tile * exp2(-ct.abs(decay_end - decay_sum))  # [L]: what is left of a token's input at the end
        S_tile = dot(ct.transpose(v_tile) * carry[None, :], k_tile, exp2(decay_end) * S_tile, STATE)  # [P, N]
        S_left_tile = S_left_tile + decay_end
    store(S_part, (lane, head, origin + segment, p_tile, n_tile), (1, 1, 1, TILE_P, TILE_N), S_tile, latency=LATENCY_S)
    if ct.bid(2) == 0:
        store(S_left, (origin + segment, lane, head), (1, 1, 1), S_left_tile)


@ct.kernel
def entry_states(
    k: ct.Array, v: ct.Array,
    S0: ct.Array,
    S_left: ct.Array, S_part: ct.Array, S_entry: ct.Array,
    segment_table: ct.Array,
    S_starts: ct.Array,
    size_n: float, per_segment: int,
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
    token = ct.arange(CHUNK, dtype=ct.int32)

    if WITH_S0:
        S_tile = load(S0, (sequence, head, p_tile, n_tile), (1, 1, TILE_P, TILE_N))  # [P, N]
    else:
        S_tile = ct.zeros((TILE_P, TILE_N), dtype=ct.float32)  # [P, N]
    weight_tile = 1.0 / ct.sqrt(size_n)
    decay_log2 = clamp(log1p(-exp2(-5.0 - ct.astype(head, ct.float32))) * LOG2E, -128.0, 0.0)  # of one token
    decay_sum = (ct.astype(token, ct.float32) + 1.0) * decay_log2  # [L]
    if STARTED:
        if segment > 0:
            S_tile = load(S_starts, (batch, segment - 1, head, p_tile, n_tile), (1, 1, 1, TILE_P, TILE_N))  # [P, N]
    else:
        for before in range(segment):
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
        decay_end = ct.astype(ct.minimum(CHUNK, length - chunk * CHUNK), ct.float32) * decay_log2
        carry = weight_tile * exp2(-ct.abs(decay_end - decay_sum))  # [L]: what is left of a token's input at the end
        S_tile = dot(ct.transpose(v_tile) * carry[None, :], k_tile, exp2(decay_end) * S_tile, STATE)  # [P, N]


@ct.kernel
def segment_gradients(
    q: ct.Array,
    d_y: ct.Array,
    d_S_part: ct.Array, d_S_left: ct.Array,
    segment_table: ct.Array,
    d_S_states: ct.Array,
    every: int, per_segment: int,
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
    lane, first = batch, 0
    segment, origin = ct.bid(1) + 1, 0
    if PACKED:
        row = batch
        _, batch, start, stop, _, segment, _ = segment_at(segment_table, batch)
        lane, origin = 0, row - segment
        stop = ct.where(segment == 0, start, stop)  # nothing enters a segment before the first
        if KEPT:
            first = start // every  # rounded down: see `_blocks`
        q, d_y = q.slice(1, start, stop), d_y.slice(1, start, stop)
    length = q.shape[1]
    n_tiles = ct.cdiv(d_S_part.shape[4], TILE_N)
    p_tile, n_tile = ct.bid(2) // n_tiles, ct.bid(2) % n_tiles
    begin = segment * per_segment
    chunks = ct.minimum(ct.cdiv(length, CHUNK), begin + per_segment) - begin
    token = ct.arange(CHUNK, dtype=ct.int32)

    d_S_tile = ct.zeros((TILE_P, TILE_N), dtype=ct.float32)  # [P, N]
    decay_log2 = clamp(log1p(-exp2(-5.0 - ct.astype(head, ct.float32))) * LOG2E, -128.0, 0.0)  # of one token
    decay_sum = (ct.astype(token, ct.float32) + 1.0) * decay_log2  # [L]
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
        decay_end = ct.astype(ct.minimum(CHUNK, length - chunk * CHUNK), ct.float32) * decay_log2
        q_tile = load(q, (batch, chunk, head, n_tile), (1, CHUNK, 1, TILE_N), latency=LATENCY_Q)  # [L, N]
        weight = exp2(decay_sum)  # [L]: what is left of the state at a token
        d_S_tile = dot(ct.transpose(d_y_tile) * weight[None, :], q_tile, exp2(decay_end) * d_S_tile, STATE)  # [P, N]
        d_S_left_tile = d_S_left_tile + decay_end
    store(d_S_part, (lane, head, origin + segment, p_tile, n_tile), (1, 1, 1, TILE_P, TILE_N), d_S_tile)
    if ct.bid(2) == 0:
        store(d_S_left, (origin + segment, lane, head), (1, 1, 1), d_S_left_tile)


@ct.kernel
def state_gradients(
    q: ct.Array,
    d_S_final: ct.Array,
    d_y: ct.Array,
    d_S_left: ct.Array, d_S_part: ct.Array, d_S_end: ct.Array,
    segment_table: ct.Array,
    d_S0: ct.Array,
    d_S_states: ct.Array,
    every: int, per_segment: int,
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
    token = ct.arange(CHUNK, dtype=ct.int32)
    until = ct.cdiv(ct.cdiv(length, CHUNK), per_segment)

    if WITH_D_S:
        d_S_tile = load(d_S_final, (sequence, head, p_tile, n_tile), (1, 1, TILE_P, TILE_N))  # [P, N]
    else:
        d_S_tile = ct.zeros((TILE_P, TILE_N), dtype=ct.float32)  # [P, N]
    decay_log2 = clamp(log1p(-exp2(-5.0 - ct.astype(head, ct.float32))) * LOG2E, -128.0, 0.0)  # of one token
    decay_sum = (ct.astype(token, ct.float32) + 1.0) * decay_log2  # [L]
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
        decay_end = ct.astype(ct.minimum(CHUNK, length - chunk * CHUNK), ct.float32) * decay_log2
        q_tile = load(q, (batch, chunk, head, n_tile), (1, CHUNK, 1, TILE_N), latency=LATENCY_Q)  # [L, N]
        weight = exp2(decay_sum)  # [L]: what is left of the state at a token
        d_S_tile = dot(ct.transpose(d_y_tile) * weight[None, :], q_tile, exp2(decay_end) * d_S_tile, STATE)  # [P, N]
    if segment == 0:
        store(d_S0, (sequence, head, p_tile, n_tile), (1, 1, TILE_P, TILE_N), d_S_tile)


@ct.kernel
def chunk_gradients(
    q: ct.Array, k: ct.Array, v: ct.Array,
    d_y: ct.Array,
    d_S_end: ct.Array, S_entry: ct.Array,
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
    length = k.shape[1]
    head = ct.bid(1)
    token = ct.arange(CHUNK, dtype=ct.int32)

    if present:
        k_tile = load(k, (batch, chunk, head, 0), (1, CHUNK, 1, TILE_N), latency=LATENCY_K)  # [L, N]
        q_tile = load(q, (batch, chunk, head, 0), (1, CHUNK, 1, TILE_N), latency=LATENCY_Q)  # [L, N]
        scores = ct.zeros((CHUNK, CHUNK), dtype=ct.float32)  # [L, L]
        scores = dot(k_tile, ct.transpose(q_tile), scores, SCORES)  # [L, L]
        causal = token[None, :] >= token[:, None]  # [L, L]
        d_q_tile = ct.zeros((CHUNK, TILE_N), dtype=ct.float32)  # [L, N]
        d_score_sum = ct.zeros((CHUNK, CHUNK), dtype=ct.float32)  # [L, L]
        d_k_tile = ct.zeros((CHUNK, TILE_N), dtype=ct.float32)  # [L, N]
        d_score_sum_2 = ct.zeros((CHUNK, CHUNK), dtype=ct.float32)  # [L, L]
        d_y_tile = load(d_y, (batch, chunk, head, 0), (1, CHUNK, 1, TILE_P), latency=LATENCY_D_Y)  # [L, P]
        decay_log2 = clamp(log1p(-exp2(-5.0 - ct.astype(head, ct.float32))) * LOG2E, -128.0, 0.0)  # of one token
        decay_sum = (ct.astype(token, ct.float32) + 1.0) * decay_log2  # [L]
        decay_end = ct.astype(ct.minimum(CHUNK, length - chunk * CHUNK), ct.float32) * decay_log2
        carry = exp2(-ct.abs(decay_end - decay_sum))  # [L]: what is left of a token's input at the end
        d_S_end_tile = load(d_S_end, (lane, head, slot, 0, 0), (1, 1, 1, TILE_P, TILE_N), latency=LATENCY_S)  # [P, N]
        pulled = ct.zeros((CHUNK, TILE_P), dtype=ct.float32)  # [L, P]
        pulled = dot(k_tile, ct.transpose(d_S_end_tile), pulled, CARRIED)  # [L, P]
        weight_tile = 1.0 / ct.sqrt(size_n)
        decay_left = ct.where(  # [L, L]: what is left of token j at token i
            causal, exp2(-ct.abs(decay_sum[None, :] - decay_sum[:, None])), 0.0
        )
        score = scores * decay_left * weight_tile  # [L, L]
        d_row_tile = dot(score, d_y_tile, pulled * (weight_tile * carry)[:, None], INTRA)  # [L, P]
        d_v_tile = d_row_tile  # [L, P]
        store(d_v, (batch, chunk, head, 0), (1, CHUNK, 1, TILE_P), d_v_tile)
        kept = exp2(decay_sum)  # [L]: what is left of the entry state at a token
        S_entry_tile = load(S_entry, (lane, head, slot, 0, 0), (1, 1, 1, TILE_P, TILE_N), latency=LATENCY_S)  # [P, N]
        d_q_tile = dot(ct.astype(d_y_tile, ct.float32) * kept[:, None], S_entry_tile, d_q_tile, CARRIED)  # [L, N]
        d_score_tile = ct.zeros((CHUNK, CHUNK), dtype=ct.float32)  # [L, L]
        v_tile = load(v, (batch, chunk, head, 0), (1, CHUNK, 1, TILE_P), latency=LATENCY_V)  # [L, P]
        d_score_tile = dot(v_tile, ct.transpose(d_y_tile), d_score_tile, INTRA)  # [L, L]
        d_score_tile = d_score_tile * decay_left  # [L, L]: decayed
        d_score_sum = d_score_sum + d_score_tile * weight_tile  # [L, L]
        d_k_tile = dot(  # [L, N]
            ct.astype(v_tile, ct.float32) * (1.0 / ct.sqrt(size_n) * carry)[:, None], d_S_end_tile, d_k_tile, CARRIED
        )
        d_score_sum_2 = d_score_sum_2 + d_score_tile * (1.0 / ct.sqrt(size_n))  # [L, L]

        d_q_tile = dot(ct.transpose(d_score_sum), k_tile, d_q_tile, INTRA)  # [L, N]
        store(d_q, (batch, chunk, head, 0), (1, CHUNK, 1, TILE_N), d_q_tile)
        d_k_tile = dot(d_score_sum_2, q_tile, d_k_tile, INTRA)  # [L, N]
        store(d_k, (batch, chunk, head, 0), (1, CHUNK, 1, TILE_N), d_k_tile)


def launch(
    q: Tensor, k: Tensor, v: Tensor, S0: Tensor | None, d_y: Tensor, d_S_final: Tensor | None,
    d_S_states: Tensor | None, states_every: int, S_starts: Tensor | None, starts_every: int,
    decays: Sequence[Tensor] | None, d_S0: Tensor, sequences: _packed.Sequences | None, config: Config,
) -> tuple[Tensor | None, ...]:
    """Launch the kernels on tensors that 32-bit indices reach. Returns the gradients of inputs in their order,
    as blocks leave them, None for one that is 0; those of initial states are written in place. Where a forward pass
    kept them, segments of `starts_every` tokens begin with its states, and scalars of tokens are its `decays`.
    """
    size_b, size_t, size_h, size_p, size_n = q.shape[0], q.shape[1], q.shape[2], v.shape[3], q.shape[3]
    q, k, v, d_y = (_rt.indexable(v) for v in (q, k, v, d_y))
    state_tiles = _rt.ceil_div(size_p, config.state_tile_p) * _rt.ceil_div(size_n, config.state_tile_n)
    segments = _gradients.segments(
        config.segments, _rt.ceil_div(size_t, config.chunk), size_b * size_h * state_tiles, v
    )
    cut = _cut.cut(size_b, size_t, config.chunk, segments, 1, 1, sequences, v, starts_every // config.chunk)
    stream = _rt.stream(v)
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
    d_q = _gradients.memory(q, sequences)
    d_k = _gradients.memory(k, sequences)
    d_v = _gradients.memory(v, sequences)
    if S_starts is None:
        _rt.launch(
            stream,
            _rt.hinted(segment_states, config.occupancy_entry_states, config.warps_entry_states),
            (cut.walks * size_h, cut.inner, state_tiles),
            (
                k, v, S_part, S_left, cut.segment_table, float(size_n), cut.per_segment, config.state_latency_v,
                config.state_latency_k, _rt.PRECISION[config.state], config.state_latency_S, config.chunk,
                config.state_tile_p, config.state_tile_n, sequences is not None,
            ),
        )
    _rt.launch(
        stream,
        _rt.hinted(entry_states, config.occupancy_entry_states, config.warps_entry_states),
        (cut.walks * size_h, cut.segments, state_tiles),
        (
            k, v, _rt.given(S0, d_S0), S_left, S_part, S_entry, cut.segment_table, _rt.given(S_starts, d_S0),
            float(size_n), cut.per_segment, config.state_latency_S, config.state_latency_v, config.state_latency_k,
            _rt.PRECISION[config.state], config.chunk, config.state_tile_p, config.state_tile_n, sequences is not None,
            S0 is not None, S_starts is not None,
        ),
        early=True,
    )
    _rt.launch(
        stream,
        _rt.hinted(segment_gradients, config.occupancy_state_gradients, config.warps_state_gradients),
        (cut.walks * size_h, cut.inner, state_tiles),
        (
            q, d_y, d_S_part, d_S_left, cut.segment_table, _rt.given(d_S_states, d_S0), states_every, cut.per_segment,
            config.state_latency_d_y, config.state_latency_q, _rt.PRECISION[config.state], config.chunk,
            config.state_tile_p, config.state_tile_n, sequences is not None, d_S_states is not None,
        ),
        early=True,
    )
    _rt.launch(
        stream,
        _rt.hinted(state_gradients, config.occupancy_state_gradients, config.warps_state_gradients),
        (cut.walks * size_h, cut.segments, state_tiles),
        (
            q, _rt.given(d_S_final, d_S0), d_y, d_S_left, d_S_part, d_S_end, cut.segment_table, d_S0,
            _rt.given(d_S_states, d_S0), states_every, cut.per_segment, config.state_latency_S,
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
            q, k, v, d_y, d_S_end, S_entry, cut.chunk_table, d_v, d_q, d_k, float(size_n), config.latency_k,
            config.latency_q, _rt.PRECISION[config.scores], config.latency_d_y, config.latency_S,
            _rt.PRECISION[config.carried], _rt.PRECISION[config.intra], config.latency_v, config.chunk,
            _rt.covering(size_p), _rt.covering(size_n), sequences is not None,
        ),
        early=True,
    )
    return (d_q, d_k, d_v)


SPEC_DIGEST = "594729a3f3738506bfe1f038afd626be717dfa437d5062c6ec23378cfff8bb78"
"""The SHA-256 of the spec's text; emitted by ssdgen 0.1.0."""

SUMMED: dict[str, tuple[int, ...]] = {}
"""The dimensions to sum over of the gradients that are left in parts, by input."""


GRADIENTS = _gradients.Gradients(LAYER, launch, CONFIGS, ("v",), SUMMED, SPEC_DIGEST, VARIANT)
"""What `forward` of `retnet` is differentiated by."""
