"""The gradients of mlstm: mLSTM with sigmoid gates (Beck et al. 2024, arXiv 2405.04517; Beck et al. 2025, arXiv
2503.14376).

Emitted by ssdgen; the gradients of a chunk of L tokens from d_y, d_C_end, d_N_end:

    d_read_C = 1 / max(abs(read_N), 1) * d_y
    d_read_N = sum[p] -(above(abs(read_N), 1) * read_C * sign(read_N) / max(abs(read_N), 1)^2) * d_y

    d_C = 2^s[L-1] d_C_end
      + sum_i 2^s[i] d_read_C[i] (x) q[i]
    d_N = 2^s[L-1] d_N_end
      + sum_i 2^s[i] d_read_N[i] q[i]
    d_score[i,j] = d_read_C[i] . v[j] + d_read_N[i]    j <= i
    d_row[j] = write[j] 2^(s[L-1] - s[j]) d_C_end . k[j]
      + sum_i score[i,j] d_read_C[i]
    d_write_2[j] = 2^(s[L-1] - s[j]) v[j] . d_C_end
      + 2^(s[L-1] - s[j]) d_N_end
      + sum_i 2^(s[i] - s[j]) d_score[i,j] q[i]
    d_vector[i] = 2^s[i] d_read_C[i] . C
      + 2^s[i] d_read_N[i] N
      + sum_j 2^(s[i] - s[j]) d_score[i,j] write[j] k[j]
    d_weight[j] = d_write_2[j] . k[j]
    d_s[i] = d_vector[i] . q[i] - write[i] d_write_2[i] . k[i]; at i = L-1 also + d_C_end . C_end + d_N_end . N_end
    d_decay[t] = d_s[t] + ... + d_s[L-1]    of the natural logarithm

    d_write = d_weight

    d_q = d_vector
    d_k = write * d_write_2
    d_v = d_row
    d_i = (1 - sigmoid(i)) * sigmoid(i) / sqrt(size(n)) * d_write
    d_f = (1 - sigmoid(f)) * d_decay

    one token:
    d_C = 2^(logsigmoid(f) * LOG2E) (d_C + d_read_C (x) q)
    d_N = 2^(logsigmoid(f) * LOG2E) (d_N + d_read_N q)
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
    above,
    await_previous,
    chunk_at,
    dot,
    exp2,
    has_chunk,
    load,
    log_sigmoid,
    segment_at,
    sigmoid,
    sign,
    store,
    sum_pair,
)
from .mlstm import LAYER, VARIANT, chunk_cumsum

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
    latency_C: int = 3  # latency hint of C
    latency_N: int = 3  # latency hint of N
    state_latency_v: int = 3  # latency hint of v where a state walks the chunks
    state_latency_q: int = 3  # latency hint of q where a state walks the chunks
    state_latency_k: int = 3  # latency hint of k where a state walks the chunks
    state_latency_C: int = 3  # latency hint of C where a state walks the chunks
    state_latency_N: int = 3  # latency hint of N where a state walks the chunks
    segments: int = 0  # pieces of a sequence that are walked at once, 0 to let the size of the GPU choose
    occupancy_chunk_cumsum: int = 0  # blocks of chunk_cumsum a multiprocessor, 0 to let the compiler choose
    occupancy_entry_states: int = 2  # blocks of segment_states_C a multiprocessor, 0 to let the compiler choose
    occupancy_read_gradients: int = 2  # blocks of read_gradients a multiprocessor, 0 to let the compiler choose
    occupancy_state_gradients: int = 2  # blocks of segment_gradients_C a multiprocessor, 0 to let the compiler choose
    occupancy_chunk_gradients: int = 1  # blocks of chunk_gradients a multiprocessor, 0 to let the compiler choose
    occupancy_token_gradients: int = 4  # blocks of token_gradients a multiprocessor, 0 to let the compiler choose
    warps_chunk_cumsum: int = 0  # worker warps of a block of chunk_cumsum, 0 to let the compiler choose
    warps_entry_states: int = 0  # worker warps of a block of segment_states_C, 0 to let the compiler choose
    warps_read_gradients: int = 0  # worker warps of a block of read_gradients, 0 to let the compiler choose
    warps_state_gradients: int = 0  # worker warps of a block of segment_gradients_C, 0 to let the compiler choose
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
def segment_states_C(
    k: ct.Array, v: ct.Array,
    write: ct.Array, decay_sum: ct.Array, C_part: ct.Array, C_left: ct.Array, decay_oldest: ct.Array,
    segment_table: ct.Array,
    per_segment: int,
    LATENCY_V: ct.Constant[int], LATENCY_K: ct.Constant[int], STATE: ct.Constant[int], LATENCY_C: ct.Constant[int],
    CHUNK: ct.Constant[int], TILE_P: ct.Constant[int], TILE_N: ct.Constant[int],
    PACKED: ct.Constant[bool],
) -> None:
    """The state C that a segment would end with if it began at zero, and the sum of its log2 decays."""
    await_previous()
    heads = C_part.shape[1]
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
    n_tiles = ct.cdiv(C_part.shape[4], TILE_N)
    p_tile, n_tile = ct.bid(2) // n_tiles, ct.bid(2) % n_tiles
    begin = _reach.chunk_since(decay_oldest, lane, head, origin, segment, per_segment)

    C_tile = ct.zeros((TILE_P, TILE_N), dtype=ct.float32)  # [P, N]
    C_left_tile = ct.zeros((), dtype=ct.float32)
    for chunk in range(begin, ct.minimum(ct.cdiv(length, CHUNK), (segment + 1) * per_segment)):
        v_tile = load(  # [L, P]
            v, (batch, chunk, head, p_tile), (1, CHUNK, 1, TILE_P), latency=LATENCY_V
        ).astype(ct.float32)
        k_tile = load(k, (batch, chunk, head, n_tile), (1, CHUNK, 1, TILE_N), latency=LATENCY_K)  # [L, N]
        write_tile = load(write, (lane, head, slot + chunk), (1, 1, CHUNK))  # [L]
        decay_sum_tile = load(decay_sum, (lane, head, slot + chunk), (1, 1, CHUNK))  # [L]
        decay_end = ct.extract(decay_sum_tile, index=(CHUNK - 1,), shape=(1,)).reshape(())
        carry = (  # [L]: what is left of a token's input at the end
            write_tile * exp2(-ct.abs(decay_end - decay_sum_tile))
        )
        C_tile = dot(ct.transpose(v_tile) * carry[None, :], k_tile, exp2(decay_end) * C_tile, STATE)  # [P, N]
        C_left_tile = C_left_tile + decay_end
    store(C_part, (lane, head, origin + segment, p_tile, n_tile), (1, 1, 1, TILE_P, TILE_N), C_tile, latency=LATENCY_C)
    if ct.bid(2) == 0:
        store(C_left, (origin + segment, lane, head), (1, 1, 1), C_left_tile)


@ct.kernel
def entry_states_C(
    k: ct.Array, v: ct.Array,
    C0: ct.Array,
    decay_oldest: ct.Array, C_left: ct.Array, C_part: ct.Array, write: ct.Array, decay_sum: ct.Array, C_entry: ct.Array,
    segment_table: ct.Array,
    C_starts: ct.Array,
    per_segment: int,
    LATENCY_C: ct.Constant[int], LATENCY_V: ct.Constant[int], LATENCY_K: ct.Constant[int], STATE: ct.Constant[int],
    CHUNK: ct.Constant[int], TILE_P: ct.Constant[int], TILE_N: ct.Constant[int],
    PACKED: ct.Constant[bool], WITH_C0: ct.Constant[bool], STARTED: ct.Constant[bool],
) -> None:
    """The state C that enters each chunk: a block walks the chunks of a segment with a tile of the state in
    registers.
    """
    await_previous()
    heads = C_entry.shape[1]
    batch, head = ct.bid(0) // heads, ct.bid(0) % heads
    sequence, lane, slot = batch, batch, 0
    segment, origin = ct.bid(1), 0
    if PACKED:
        row = batch
        sequence, batch, start, stop, slot, segment, _ = segment_at(segment_table, batch)
        lane, origin = 0, row - segment
        k, v = k.slice(1, start, stop), v.slice(1, start, stop)
    length = v.shape[1]
    n_tiles = ct.cdiv(C_entry.shape[4], TILE_N)
    p_tile, n_tile = ct.bid(2) // n_tiles, ct.bid(2) % n_tiles
    since = _reach.segment_since(decay_oldest, lane, head, origin, segment, per_segment)

    if WITH_C0:
        C_tile = load(C0, (sequence, head, p_tile, n_tile), (1, 1, TILE_P, TILE_N))  # [P, N]
    else:
        C_tile = ct.zeros((TILE_P, TILE_N), dtype=ct.float32)  # [P, N]
    if STARTED:
        if segment > 0:
            C_tile = load(C_starts, (batch, segment - 1, head, p_tile, n_tile), (1, 1, 1, TILE_P, TILE_N))  # [P, N]
    else:
        for before in range(since, segment):
            C_left_tile = load(C_left, (origin + before, lane, head), (1, 1, 1))
            C_part_tile = load(  # [P, N]
                C_part, (lane, head, origin + before, p_tile, n_tile), (1, 1, 1, TILE_P, TILE_N), latency=LATENCY_C
            )
            C_tile = exp2(C_left_tile) * C_tile + C_part_tile  # [P, N]
    for chunk in range(segment * per_segment, ct.minimum(ct.cdiv(length, CHUNK), (segment + 1) * per_segment)):
        store(C_entry, (lane, head, slot + chunk, p_tile, n_tile), (1, 1, 1, TILE_P, TILE_N), C_tile, latency=LATENCY_C)
        v_tile = load(  # [L, P]
            v, (batch, chunk, head, p_tile), (1, CHUNK, 1, TILE_P), latency=LATENCY_V
        ).astype(ct.float32)
        k_tile = load(k, (batch, chunk, head, n_tile), (1, CHUNK, 1, TILE_N), latency=LATENCY_K)  # [L, N]
        write_tile = load(write, (lane, head, slot + chunk), (1, 1, CHUNK))  # [L]
        decay_sum_tile = load(decay_sum, (lane, head, slot + chunk), (1, 1, CHUNK))  # [L]
        decay_end = ct.extract(decay_sum_tile, index=(CHUNK - 1,), shape=(1,)).reshape(())
        carry = (  # [L]: what is left of a token's input at the end
            write_tile * exp2(-ct.abs(decay_end - decay_sum_tile))
        )
        C_tile = dot(ct.transpose(v_tile) * carry[None, :], k_tile, exp2(decay_end) * C_tile, STATE)  # [P, N]


@ct.kernel
def segment_states_N(
    k: ct.Array,
    write: ct.Array, decay_sum: ct.Array, N_part: ct.Array, decay_oldest: ct.Array,
    segment_table: ct.Array,
    per_segment: int,
    LATENCY_K: ct.Constant[int], LATENCY_N: ct.Constant[int], CHUNK: ct.Constant[int], TILE_N: ct.Constant[int],
    PACKED: ct.Constant[bool],
) -> None:
    """The state N that a segment would end with if it began at zero, and the sum of its log2 decays."""
    await_previous()
    heads = N_part.shape[1]
    batch, head = ct.bid(0) // heads, ct.bid(0) % heads
    lane, slot = batch, 0
    segment, origin = ct.bid(1), 0
    if PACKED:
        row = batch
        _, batch, start, stop, slot, segment, last = segment_at(segment_table, batch)
        lane, origin = 0, row - segment
        stop = ct.where(last, start, stop)  # nothing enters a segment after the last
        k = k.slice(1, start, stop)
    length = k.shape[1]
    n_tile = ct.bid(2)
    begin = _reach.chunk_since(decay_oldest, lane, head, origin, segment, per_segment)

    N_tile = ct.zeros((TILE_N,), dtype=ct.float32)  # [N]
    for chunk in range(begin, ct.minimum(ct.cdiv(length, CHUNK), (segment + 1) * per_segment)):
        k_tile = load(  # [L, N]
            k, (batch, chunk, head, n_tile), (1, CHUNK, 1, TILE_N), latency=LATENCY_K
        ).astype(ct.float32)
        write_tile = load(write, (lane, head, slot + chunk), (1, 1, CHUNK))  # [L]
        decay_sum_tile = load(decay_sum, (lane, head, slot + chunk), (1, 1, CHUNK))  # [L]
        decay_end = ct.extract(decay_sum_tile, index=(CHUNK - 1,), shape=(1,)).reshape(())
        carry = (  # [L]: what is left of a token's input at the end
            write_tile * exp2(-ct.abs(decay_end - decay_sum_tile))
        )
        N_tile = exp2(decay_end) * N_tile + ct.sum(k_tile * carry[:, None], axis=0)  # [N]
    store(N_part, (lane, head, origin + segment, n_tile), (1, 1, 1, TILE_N), N_tile, latency=LATENCY_N)


@ct.kernel
def entry_states_N(
    k: ct.Array,
    N0: ct.Array,
    decay_oldest: ct.Array, C_left: ct.Array, N_part: ct.Array, write: ct.Array, decay_sum: ct.Array, N_entry: ct.Array,
    segment_table: ct.Array,
    N_starts: ct.Array,
    per_segment: int,
    LATENCY_N: ct.Constant[int], LATENCY_K: ct.Constant[int], CHUNK: ct.Constant[int], TILE_N: ct.Constant[int],
    PACKED: ct.Constant[bool], WITH_N0: ct.Constant[bool], STARTED: ct.Constant[bool],
) -> None:
    """The state N that enters each chunk: a block walks the chunks of a segment with a tile of the state in
    registers.
    """
    await_previous()
    heads = N_entry.shape[1]
    batch, head = ct.bid(0) // heads, ct.bid(0) % heads
    sequence, lane, slot = batch, batch, 0
    segment, origin = ct.bid(1), 0
    if PACKED:
        row = batch
        sequence, batch, start, stop, slot, segment, _ = segment_at(segment_table, batch)
        lane, origin = 0, row - segment
        k = k.slice(1, start, stop)
    length = k.shape[1]
    n_tile = ct.bid(2)
    since = _reach.segment_since(decay_oldest, lane, head, origin, segment, per_segment)

    if WITH_N0:
        N_tile = load(N0, (sequence, head, n_tile), (1, 1, TILE_N))  # [N]
    else:
        N_tile = ct.zeros((TILE_N,), dtype=ct.float32)  # [N]
    if STARTED:
        if segment > 0:
            N_tile = load(N_starts, (batch, segment - 1, head, n_tile), (1, 1, 1, TILE_N))  # [N]
    else:
        for before in range(since, segment):
            C_left_tile = load(C_left, (origin + before, lane, head), (1, 1, 1))
            N_part_tile = load(  # [N]
                N_part, (lane, head, origin + before, n_tile), (1, 1, 1, TILE_N), latency=LATENCY_N
            )
            N_tile = exp2(C_left_tile) * N_tile + N_part_tile  # [N]
    for chunk in range(segment * per_segment, ct.minimum(ct.cdiv(length, CHUNK), (segment + 1) * per_segment)):
        store(N_entry, (lane, head, slot + chunk, n_tile), (1, 1, 1, TILE_N), N_tile, latency=LATENCY_N)
        k_tile = load(  # [L, N]
            k, (batch, chunk, head, n_tile), (1, CHUNK, 1, TILE_N), latency=LATENCY_K
        ).astype(ct.float32)
        write_tile = load(write, (lane, head, slot + chunk), (1, 1, CHUNK))  # [L]
        decay_sum_tile = load(decay_sum, (lane, head, slot + chunk), (1, 1, CHUNK))  # [L]
        decay_end = ct.extract(decay_sum_tile, index=(CHUNK - 1,), shape=(1,)).reshape(())
        carry = (  # [L]: what is left of a token's input at the end
            write_tile * exp2(-ct.abs(decay_end - decay_sum_tile))
        )
        N_tile = exp2(decay_end) * N_tile + ct.sum(k_tile * carry[:, None], axis=0)  # [N]


@ct.kernel
def read_gradients(
    q: ct.Array, k: ct.Array, v: ct.Array,
    d_y: ct.Array,
    C_entry: ct.Array, decay_sum: ct.Array, write: ct.Array, N_entry: ct.Array, d_read_C: ct.Array, d_read_N: ct.Array,
    chunk_table: ct.Array,
    LATENCY_Q: ct.Constant[int], LATENCY_C: ct.Constant[int], CARRIED: ct.Constant[int], LATENCY_K: ct.Constant[int],
    SCORES: ct.Constant[int], LATENCY_V: ct.Constant[int], INTRA: ct.Constant[int], LATENCY_N: ct.Constant[int],
    LATENCY_D_Y: ct.Constant[int], CHUNK: ct.Constant[int], TILE_P: ct.Constant[int], TILE_N: ct.Constant[int],
    PACKED: ct.Constant[bool],
) -> None:
    """The gradients of what the tokens of one chunk and head read, zero past the end."""
    await_previous()
    chunks = ct.cdiv(q.shape[1], CHUNK)
    batch, chunk = ct.bid(0) // chunks, ct.bid(0) % chunks
    lane, slot = batch, chunk
    present = True
    if PACKED:
        batch, start, stop = chunk_at(chunk_table, ct.bid(0))
        lane, slot, chunk = 0, ct.bid(0), 0
        present = has_chunk(chunk_table, ct.bid(0))
        q, k = q.slice(1, start, stop), k.slice(1, start, stop)
        v, d_y = v.slice(1, start, stop), d_y.slice(1, start, stop)
    length = q.shape[1]
    head = ct.bid(1)
    token = ct.arange(CHUNK, dtype=ct.int32)

    if present:
        q_tile = load(q, (batch, chunk, head, 0), (1, CHUNK, 1, TILE_N), latency=LATENCY_Q)  # [L, N]
        causal = token[None, :] >= token[:, None]  # [L, L]
        k_tile = load(k, (batch, chunk, head, 0), (1, CHUNK, 1, TILE_N), latency=LATENCY_K)  # [L, N]
        scores = ct.zeros((CHUNK, CHUNK), dtype=ct.float32)  # [L, L]
        scores = dot(k_tile, ct.transpose(q_tile), scores, SCORES)  # [L, L]
        C_entry_tile = load(C_entry, (lane, head, slot, 0, 0), (1, 1, 1, TILE_P, TILE_N), latency=LATENCY_C)  # [P, N]
        read_C_carried = ct.zeros((CHUNK, TILE_P), dtype=ct.float32)  # [L, P]
        read_C_carried = dot(q_tile, ct.transpose(C_entry_tile), read_C_carried, CARRIED)  # [L, P]
        decay_sum_tile = load(decay_sum, (lane, head, slot), (1, 1, CHUNK))  # [L]
        kept = exp2(decay_sum_tile)  # [L]: what is left of the entry state at a token
        write_tile = load(write, (lane, head, slot), (1, 1, CHUNK))  # [L]
        decay_left = ct.where(  # [L, L]: what is left of token j at token i
            causal, exp2(-ct.abs(decay_sum_tile[None, :] - decay_sum_tile[:, None])), 0.0
        )
        score = scores * decay_left * write_tile[:, None]  # [L, L]
        v_tile = load(v, (batch, chunk, head, 0), (1, CHUNK, 1, TILE_P), latency=LATENCY_V)  # [L, P]
        read_C = dot(ct.transpose(score), v_tile, read_C_carried * kept[:, None], INTRA)  # [L, P]
        N_entry_tile = load(  # [N]
            N_entry, (lane, head, slot, 0), (1, 1, 1, TILE_N), latency=LATENCY_N
        ).astype(ct.float32)
        read_N_carried = ct.sum(ct.astype(q_tile, ct.float32) * N_entry_tile[None, :], axis=1)  # [L]
        read_N_within = ct.sum(score, axis=0)  # [L]
        read_N = read_N_carried * kept + read_N_within  # [L]
        d_y_tile = load(  # [L, P]
            d_y, (batch, chunk, head, 0), (1, CHUNK, 1, TILE_P), latency=LATENCY_D_Y
        ).astype(ct.float32)
        d_read_C_tile = (1.0 / ct.maximum(ct.abs(read_N), 1.0))[:, None] * d_y_tile  # [L, P]
        store(
            d_read_C,
            (lane, head, slot, 0),
            (1, 1, CHUNK, TILE_P),
            ct.where((chunk * CHUNK + token < length)[:, None], d_read_C_tile, 0.0),
        )
        d_read_N_tile = ct.sum(  # [L]
            (
                -(
                    above(ct.abs(read_N), 1.0)[:, None]
                    * read_C
                    * sign(read_N)[:, None]
                    * (1.0 / (ct.maximum(ct.abs(read_N), 1.0) * ct.maximum(ct.abs(read_N), 1.0)))[:, None]
                )
                * d_y_tile
            ),
            axis=1,
        )
        store(d_read_N, (lane, head, slot), (1, 1, CHUNK), ct.where(chunk * CHUNK + token < length, d_read_N_tile, 0.0))


@ct.kernel
def segment_gradients_C(
    q: ct.Array,
    d_read_C: ct.Array, decay_sum: ct.Array, d_C_part: ct.Array, d_C_left: ct.Array, decay_newest: ct.Array,
    segment_table: ct.Array,
    d_C_states: ct.Array,
    every: int, per_segment: int,
    LATENCY_Q: ct.Constant[int], STATE: ct.Constant[int], CHUNK: ct.Constant[int], TILE_P: ct.Constant[int],
    TILE_N: ct.Constant[int],
    PACKED: ct.Constant[bool], KEPT: ct.Constant[bool],
) -> None:
    """The gradient of the state C that a segment passes on if none arrives at its end: a block walks back over its
    chunks with a tile of it in registers.
    """
    await_previous()
    heads = d_C_part.shape[1]
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
        q = q.slice(1, start, stop)
    length = q.shape[1]
    n_tiles = ct.cdiv(d_C_part.shape[4], TILE_N)
    p_tile, n_tile = ct.bid(2) // n_tiles, ct.bid(2) % n_tiles
    begin = segment * per_segment
    chunks = _reach.chunks_until(decay_newest, lane, head, origin, segment, per_segment, length, CHUNK)

    d_C_tile = ct.zeros((TILE_P, TILE_N), dtype=ct.float32)  # [P, N]
    d_C_left_tile = ct.zeros((), dtype=ct.float32)
    for turn in range(chunks):
        chunk = begin + chunks - 1 - turn
        if KEPT:
            end = chunk * CHUNK + CHUNK
            if end % every == 0 and end <= length:
                block = first + chunk * CHUNK // every
                d_C_states_tile = load(  # [P, N]
                    d_C_states, (batch, block, head, p_tile, n_tile), (1, 1, 1, TILE_P, TILE_N)
                )
                d_C_tile = d_C_tile + d_C_states_tile  # [P, N]
        d_read_C_tile = load(  # [L, P]
            d_read_C, (lane, head, slot + chunk, p_tile), (1, 1, CHUNK, TILE_P)
        ).astype(ct.float32)
        decay_sum_tile = load(decay_sum, (lane, head, slot + chunk), (1, 1, CHUNK))  # [L]
        decay_end = ct.extract(decay_sum_tile, index=(CHUNK - 1,), shape=(1,)).reshape(())
        q_tile = load(q, (batch, chunk, head, n_tile), (1, CHUNK, 1, TILE_N), latency=LATENCY_Q)  # [L, N]
        weight = exp2(decay_sum_tile)  # [L]: what is left of the state at a token
        d_C_tile = dot(  # [P, N]
            ct.transpose(d_read_C_tile) * weight[None, :], q_tile, exp2(decay_end) * d_C_tile, STATE
        )
        d_C_left_tile = d_C_left_tile + decay_end
    store(d_C_part, (lane, head, origin + segment, p_tile, n_tile), (1, 1, 1, TILE_P, TILE_N), d_C_tile)
    if ct.bid(2) == 0:
        store(d_C_left, (origin + segment, lane, head), (1, 1, 1), d_C_left_tile)


@ct.kernel
def state_gradients_C(
    q: ct.Array,
    d_C_final: ct.Array,
    decay_newest: ct.Array, d_C_left: ct.Array, d_C_part: ct.Array, d_read_C: ct.Array, decay_sum: ct.Array,
    d_C_end: ct.Array,
    segment_table: ct.Array,
    d_C0: ct.Array,
    d_C_states: ct.Array,
    every: int, per_segment: int,
    LATENCY_C: ct.Constant[int], LATENCY_Q: ct.Constant[int], STATE: ct.Constant[int], CHUNK: ct.Constant[int],
    TILE_P: ct.Constant[int], TILE_N: ct.Constant[int],
    PACKED: ct.Constant[bool], WITH_D_C: ct.Constant[bool], KEPT: ct.Constant[bool],
) -> None:
    """The gradient of the state C at the end of each chunk, and of the initial one: a block walks back over the
    chunks of a segment with a tile of it in registers.
    """
    await_previous()
    heads = d_C_end.shape[1]
    batch, head = ct.bid(0) // heads, ct.bid(0) % heads
    sequence, lane, slot, first = batch, batch, 0, 0
    segment, origin = ct.bid(1), 0
    if PACKED:
        row = batch
        sequence, batch, start, stop, slot, segment, _ = segment_at(segment_table, batch)
        lane, origin = 0, row - segment
        if KEPT:
            first = start // every  # rounded down: see `_blocks`
        q = q.slice(1, start, stop)
    length = q.shape[1]
    n_tiles = ct.cdiv(d_C_end.shape[4], TILE_N)
    p_tile, n_tile = ct.bid(2) // n_tiles, ct.bid(2) % n_tiles
    begin = segment * per_segment
    chunks = ct.minimum(ct.cdiv(length, CHUNK), begin + per_segment) - begin
    until = _reach.segment_until(decay_newest, lane, head, origin, segment, per_segment, length, CHUNK)

    if WITH_D_C:
        d_C_tile = load(d_C_final, (sequence, head, p_tile, n_tile), (1, 1, TILE_P, TILE_N))  # [P, N]
    else:
        d_C_tile = ct.zeros((TILE_P, TILE_N), dtype=ct.float32)  # [P, N]
    for turn in range(until - 1 - segment):
        before = until - 1 - turn
        d_C_left_tile = load(d_C_left, (origin + before, lane, head), (1, 1, 1))
        d_C_part_tile = load(  # [P, N]
            d_C_part, (lane, head, origin + before, p_tile, n_tile), (1, 1, 1, TILE_P, TILE_N), latency=LATENCY_C
        )
        d_C_tile = exp2(d_C_left_tile) * d_C_tile + d_C_part_tile  # [P, N]
    for turn in range(chunks):
        chunk = begin + chunks - 1 - turn
        if KEPT:
            end = chunk * CHUNK + CHUNK
            if end % every == 0 and end <= length:
                block = first + chunk * CHUNK // every
                d_C_states_tile = load(  # [P, N]
                    d_C_states, (batch, block, head, p_tile, n_tile), (1, 1, 1, TILE_P, TILE_N)
                )
                d_C_tile = d_C_tile + d_C_states_tile  # [P, N]
        store(d_C_end, (lane, head, slot + chunk, p_tile, n_tile), (1, 1, 1, TILE_P, TILE_N), d_C_tile)
        d_read_C_tile = load(  # [L, P]
            d_read_C, (lane, head, slot + chunk, p_tile), (1, 1, CHUNK, TILE_P)
        ).astype(ct.float32)
        decay_sum_tile = load(decay_sum, (lane, head, slot + chunk), (1, 1, CHUNK))  # [L]
        decay_end = ct.extract(decay_sum_tile, index=(CHUNK - 1,), shape=(1,)).reshape(())
        q_tile = load(q, (batch, chunk, head, n_tile), (1, CHUNK, 1, TILE_N), latency=LATENCY_Q)  # [L, N]
        weight = exp2(decay_sum_tile)  # [L]: what is left of the state at a token
        d_C_tile = dot(  # [P, N]
            ct.transpose(d_read_C_tile) * weight[None, :], q_tile, exp2(decay_end) * d_C_tile, STATE
        )
    if segment == 0:
        store(d_C0, (sequence, head, p_tile, n_tile), (1, 1, TILE_P, TILE_N), d_C_tile)


@ct.kernel
def segment_gradients_N(
    q: ct.Array,
    d_read_N: ct.Array, decay_sum: ct.Array, d_N_part: ct.Array, decay_newest: ct.Array,
    segment_table: ct.Array,
    d_N_states: ct.Array,
    every: int, per_segment: int,
    LATENCY_Q: ct.Constant[int], CHUNK: ct.Constant[int], TILE_N: ct.Constant[int],
    PACKED: ct.Constant[bool], KEPT: ct.Constant[bool],
) -> None:
    """The gradient of the state N that a segment passes on if none arrives at its end: a block walks back over its
    chunks with a tile of it in registers.
    """
    await_previous()
    heads = d_N_part.shape[1]
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
        q = q.slice(1, start, stop)
    length = q.shape[1]
    n_tile = ct.bid(2)
    begin = segment * per_segment
    chunks = _reach.chunks_until(decay_newest, lane, head, origin, segment, per_segment, length, CHUNK)

    d_N_tile = ct.zeros((TILE_N,), dtype=ct.float32)  # [N]
    for turn in range(chunks):
        chunk = begin + chunks - 1 - turn
        if KEPT:
            end = chunk * CHUNK + CHUNK
            if end % every == 0 and end <= length:
                block = first + chunk * CHUNK // every
                d_N_states_tile = load(d_N_states, (batch, block, head, n_tile), (1, 1, 1, TILE_N))  # [N]
                d_N_tile = d_N_tile + d_N_states_tile  # [N]
        d_read_N_tile = load(d_read_N, (lane, head, slot + chunk), (1, 1, CHUNK)).astype(ct.float32)  # [L]
        decay_sum_tile = load(decay_sum, (lane, head, slot + chunk), (1, 1, CHUNK))  # [L]
        decay_end = ct.extract(decay_sum_tile, index=(CHUNK - 1,), shape=(1,)).reshape(())
        q_tile = load(  # [L, N]
            q, (batch, chunk, head, n_tile), (1, CHUNK, 1, TILE_N), latency=LATENCY_Q
        ).astype(ct.float32)
        weight = exp2(decay_sum_tile)  # [L]: what is left of the state at a token
        d_N_tile = exp2(decay_end) * d_N_tile + ct.sum(q_tile * (weight * d_read_N_tile)[:, None], axis=0)  # [N]
    store(d_N_part, (lane, head, origin + segment, n_tile), (1, 1, 1, TILE_N), d_N_tile)


@ct.kernel
def state_gradients_N(
    q: ct.Array,
    d_N_final: ct.Array,
    decay_newest: ct.Array, d_C_left: ct.Array, d_N_part: ct.Array, d_read_N: ct.Array, decay_sum: ct.Array,
    d_N_end: ct.Array,
    segment_table: ct.Array,
    d_N0: ct.Array,
    d_N_states: ct.Array,
    every: int, per_segment: int,
    LATENCY_N: ct.Constant[int], LATENCY_Q: ct.Constant[int], CHUNK: ct.Constant[int], TILE_N: ct.Constant[int],
    PACKED: ct.Constant[bool], WITH_D_N: ct.Constant[bool], KEPT: ct.Constant[bool],
) -> None:
    """The gradient of the state N at the end of each chunk, and of the initial one: a block walks back over the
    chunks of a segment with a tile of it in registers.
    """
    await_previous()
    heads = d_N_end.shape[1]
    batch, head = ct.bid(0) // heads, ct.bid(0) % heads
    sequence, lane, slot, first = batch, batch, 0, 0
    segment, origin = ct.bid(1), 0
    if PACKED:
        row = batch
        sequence, batch, start, stop, slot, segment, _ = segment_at(segment_table, batch)
        lane, origin = 0, row - segment
        if KEPT:
            first = start // every  # rounded down: see `_blocks`
        q = q.slice(1, start, stop)
    length = q.shape[1]
    n_tile = ct.bid(2)
    begin = segment * per_segment
    chunks = ct.minimum(ct.cdiv(length, CHUNK), begin + per_segment) - begin
    until = _reach.segment_until(decay_newest, lane, head, origin, segment, per_segment, length, CHUNK)

    if WITH_D_N:
        d_N_tile = load(d_N_final, (sequence, head, n_tile), (1, 1, TILE_N))  # [N]
    else:
        d_N_tile = ct.zeros((TILE_N,), dtype=ct.float32)  # [N]
    for turn in range(until - 1 - segment):
        before = until - 1 - turn
        d_C_left_tile = load(d_C_left, (origin + before, lane, head), (1, 1, 1))
        d_N_part_tile = load(  # [N]
            d_N_part, (lane, head, origin + before, n_tile), (1, 1, 1, TILE_N), latency=LATENCY_N
        )
        d_N_tile = exp2(d_C_left_tile) * d_N_tile + d_N_part_tile  # [N]
    for turn in range(chunks):
        chunk = begin + chunks - 1 - turn
        if KEPT:
            end = chunk * CHUNK + CHUNK
            if end % every == 0 and end <= length:
                block = first + chunk * CHUNK // every
                d_N_states_tile = load(d_N_states, (batch, block, head, n_tile), (1, 1, 1, TILE_N))  # [N]
                d_N_tile = d_N_tile + d_N_states_tile  # [N]
        store(d_N_end, (lane, head, slot + chunk, n_tile), (1, 1, 1, TILE_N), d_N_tile)
        d_read_N_tile = load(d_read_N, (lane, head, slot + chunk), (1, 1, CHUNK)).astype(ct.float32)  # [L]
        decay_sum_tile = load(decay_sum, (lane, head, slot + chunk), (1, 1, CHUNK))  # [L]
        decay_end = ct.extract(decay_sum_tile, index=(CHUNK - 1,), shape=(1,)).reshape(())
        q_tile = load(  # [L, N]
            q, (batch, chunk, head, n_tile), (1, CHUNK, 1, TILE_N), latency=LATENCY_Q
        ).astype(ct.float32)
        weight = exp2(decay_sum_tile)  # [L]: what is left of the state at a token
        d_N_tile = exp2(decay_end) * d_N_tile + ct.sum(q_tile * (weight * d_read_N_tile)[:, None], axis=0)  # [N]
    if segment == 0:
        store(d_N0, (sequence, head, n_tile), (1, 1, TILE_N), d_N_tile)


@ct.kernel
def chunk_gradients(
    q: ct.Array, k: ct.Array, v: ct.Array,
    d_read_C: ct.Array, d_read_N: ct.Array, decay_sum: ct.Array, d_C_end: ct.Array, write: ct.Array, C_entry: ct.Array,
    N_entry: ct.Array, d_N_end: ct.Array, d_weight: ct.Array, d_decay_written: ct.Array, C_met: ct.Array,
    N_met: ct.Array, d_decay_sum: ct.Array,
    chunk_table: ct.Array,
    d_v: ct.Array, d_q: ct.Array, d_k: ct.Array,
    LATENCY_K: ct.Constant[int], LATENCY_Q: ct.Constant[int], SCORES: ct.Constant[int], LATENCY_C: ct.Constant[int],
    CARRIED: ct.Constant[int], INTRA: ct.Constant[int], LATENCY_N: ct.Constant[int], LATENCY_V: ct.Constant[int],
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
        v, d_v = v.slice(1, start, stop), d_v.slice(1, start, stop)
        d_q, d_k = d_q.slice(1, start, stop), d_k.slice(1, start, stop)
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
        d_read_C_tile = load(d_read_C, (lane, head, slot, 0), (1, 1, CHUNK, TILE_P))  # [L, P]
        d_read_C_wide = ct.astype(d_read_C_tile, ct.float32)  # [L, P]
        d_read_N_tile = load(d_read_N, (lane, head, slot), (1, 1, CHUNK)).astype(ct.float32)  # [L]
        decay_sum_tile = load(decay_sum, (lane, head, slot), (1, 1, CHUNK))  # [L]
        decay_end = ct.extract(decay_sum_tile, index=(CHUNK - 1,), shape=(1,)).reshape(())
        carry = exp2(-ct.abs(decay_end - decay_sum_tile))  # [L]: what is left of a token's input at the end
        d_C_end_tile = load(d_C_end, (lane, head, slot, 0, 0), (1, 1, 1, TILE_P, TILE_N), latency=LATENCY_C)  # [P, N]
        pulled_C = ct.zeros((CHUNK, TILE_P), dtype=ct.float32)  # [L, P]
        pulled_C = dot(k_tile, ct.transpose(d_C_end_tile), pulled_C, CARRIED)  # [L, P]
        write_tile = load(write, (lane, head, slot), (1, 1, CHUNK))  # [L]
        decay_left = ct.where(  # [L, L]: what is left of token j at token i
            causal, exp2(-ct.abs(decay_sum_tile[None, :] - decay_sum_tile[:, None])), 0.0
        )
        score = scores * decay_left * write_tile[:, None]  # [L, L]
        d_row_tile = dot(score, d_read_C_tile, pulled_C * (write_tile * carry)[:, None], INTRA)  # [L, P]
        d_v_tile = d_row_tile  # [L, P]
        store(d_v, (batch, chunk, head, 0), (1, CHUNK, 1, TILE_P), d_v_tile)
        kept = exp2(decay_sum_tile)  # [L]: what is left of the entry state at a token
        C_entry_tile = load(C_entry, (lane, head, slot, 0, 0), (1, 1, 1, TILE_P, TILE_N), latency=LATENCY_C)  # [P, N]
        d_q_tile = dot(d_read_C_wide * kept[:, None], C_entry_tile, d_q_tile, CARRIED)  # [L, N]
        N_entry_tile = load(  # [N]
            N_entry, (lane, head, slot, 0), (1, 1, 1, TILE_N), latency=LATENCY_N
        ).astype(ct.float32)
        d_q_tile = d_q_tile + (d_read_N_tile * kept)[:, None] * N_entry_tile[None, :]  # [L, N]
        d_score_tile = ct.zeros((CHUNK, CHUNK), dtype=ct.float32)  # [L, L]
        v_tile = load(v, (batch, chunk, head, 0), (1, CHUNK, 1, TILE_P), latency=LATENCY_V)  # [L, P]
        v_wide = ct.astype(v_tile, ct.float32)  # [L, P]
        d_score_tile = dot(v_tile, ct.transpose(d_read_C_tile), d_score_tile, INTRA)  # [L, L]
        d_score_tile = (d_score_tile + d_read_N_tile[None, :]) * decay_left  # [L, L]: decayed
        d_score_sum = d_score_sum + d_score_tile * write_tile[:, None]  # [L, L]
        d_k_tile = dot(v_wide * (write_tile * carry)[:, None], d_C_end_tile, d_k_tile, CARRIED)  # [L, N]
        d_N_end_tile = load(  # [N]
            d_N_end, (lane, head, slot, 0), (1, 1, 1, TILE_N), latency=LATENCY_N
        ).astype(ct.float32)
        d_k_tile = d_k_tile + (write_tile * carry)[:, None] * d_N_end_tile[None, :]  # [L, N]
        flow = d_score_tile * scores  # [L, L]: what the weight at j is asked for by i
        past = ct.where(causal_before, flow * write_tile[:, None], 0.0)  # [L, L]: between two tokens
        asked, passed = sum_pair(flow, past)  # [L]
        row_pulled = ct.sum(v_wide * pulled_C, axis=1)  # [L]
        pulled_N = ct.sum(ct.astype(k_tile, ct.float32) * d_N_end_tile[None, :], axis=1)  # [L]
        d_weight_tile = carry * row_pulled + carry * pulled_N + asked  # [L]
        store_direct(d_weight, (lane, head, slot), (1, 1, CHUNK), d_weight_tile, True)
        read_C_carried = ct.zeros((CHUNK, TILE_P), dtype=ct.float32)  # [L, P]
        read_C_carried = dot(q_tile, ct.transpose(C_entry_tile), read_C_carried, CARRIED)  # [L, P]
        seen = ct.sum(d_read_C_wide * read_C_carried, axis=1)  # [L]
        read_N_carried = ct.sum(ct.astype(q_tile, ct.float32) * N_entry_tile[None, :], axis=1)  # [L]
        seen_2 = d_read_N_tile * read_N_carried  # [L]
        d_decay_written_tile = write_tile * carry * row_pulled + write_tile * carry * pulled_N  # [L]
        store_direct(d_decay_written, (lane, head, slot), (1, 1, CHUNK), d_decay_written_tile, True)
        C_met_tile = (  # [P]: what reaches from before the chunk behind it
            exp2(decay_end) * ct.sum(ct.astype(C_entry_tile, ct.float32) * ct.astype(d_C_end_tile, ct.float32), axis=1)
        )
        store(C_met, (lane, head, slot, 0), (1, 1, 1, TILE_P), C_met_tile)
        N_met_tile = (  # what reaches from before the chunk behind it
            exp2(decay_end) * ct.sum(N_entry_tile * d_N_end_tile, axis=0)
        )
        store(N_met, (lane, head, slot), (1, 1, 1), N_met_tile)
        d_decay_sum_tile = kept * seen + kept * seen_2 + ct.sum(past, axis=0) - passed  # [L]
        store_direct(d_decay_sum, (lane, head, slot), (1, 1, CHUNK), d_decay_sum_tile, True)

        d_q_tile = dot(ct.transpose(d_score_sum), k_tile, d_q_tile, INTRA)  # [L, N]
        store(d_q, (batch, chunk, head, 0), (1, CHUNK, 1, TILE_N), d_q_tile)
        d_k_tile = dot(d_score_sum, q_tile, d_k_tile, INTRA)  # [L, N]
        store(d_k, (batch, chunk, head, 0), (1, CHUNK, 1, TILE_N), d_k_tile)


@ct.kernel
def token_gradients(
    i: ct.Array, f: ct.Array,
    d_weight: ct.Array, d_decay_sum: ct.Array, d_decay_written: ct.Array, C_met: ct.Array, N_met: ct.Array,
    chunk_table: ct.Array,
    d_i: ct.Array, d_f: ct.Array,
    size_n: float,
    TILE_P: ct.Constant[int], CHUNK: ct.Constant[int], TILE_H: ct.Constant[int],
    PACKED: ct.Constant[bool],
) -> None:
    """From the gradients of a chunk's per-token scalars to those of their inputs, for a tile of heads."""
    await_previous()
    chunks = ct.cdiv(f.shape[1], CHUNK)
    batch, chunk = ct.bid(0) // chunks, ct.bid(0) % chunks
    lane, slot = batch, chunk
    present = True
    if PACKED:
        batch, start, stop = chunk_at(chunk_table, ct.bid(0))
        lane, slot, chunk = 0, ct.bid(0), 0
        present = has_chunk(chunk_table, ct.bid(0))
        i, f = i.slice(1, start, stop), f.slice(1, start, stop)
        d_i, d_f = d_i.slice(1, start, stop), d_f.slice(1, start, stop)
    length = f.shape[1]
    head_tile = ct.bid(1)
    token = chunk * CHUNK + ct.arange(CHUNK, dtype=ct.int32)

    if present:
        valid = token < length  # [L]: false past the end
        d_weight_tile = load(d_weight, (lane, head_tile, slot), (1, TILE_H, CHUNK))  # [H, L]
        d_decay_sum_tile = load(d_decay_sum, (lane, head_tile, slot), (1, TILE_H, CHUNK))  # [H, L]
        d_decay_written_tile = load(d_decay_written, (lane, head_tile, slot), (1, TILE_H, CHUNK))  # [H, L]
        d_decay_tile = ct.cumsum(ct.transpose(d_decay_sum_tile), axis=0, reverse=True)  # [L, H]
        written_before = ct.cumsum(ct.transpose(d_decay_written_tile), axis=0)  # [L, H]
        C_met_tile = load(C_met, (lane, head_tile, slot, 0), (1, TILE_H, 1, TILE_P))  # [H, P]
        N_met_tile = load(N_met, (lane, head_tile, slot), (1, TILE_H, 1))  # [H]
        f_tile = load(f, (batch, chunk, head_tile), (1, CHUNK, TILE_H)).astype(ct.float32)  # [L, H]
        decay_log2 = log_sigmoid(f_tile) * LOG2E  # [L, H]: of one token
        d_decay_tile = ct.where(  # [L, H]: of the natural logarithm: all that goes past; nothing where clamped
            valid[:, None] & (decay_log2 >= -128.0),
            (
                d_decay_tile
                + written_before
                - ct.transpose(d_decay_written_tile)
                + ct.sum(C_met_tile, axis=1)[None, :]
                + N_met_tile[None, :]
            ),
            0.0,
        )
        d_write_tile = ct.transpose(d_weight_tile)  # [L, H]
        i_tile = load(i, (batch, chunk, head_tile), (1, CHUNK, TILE_H)).astype(ct.float32)  # [L, H]
        d_i_tile = (1.0 - sigmoid(i_tile)) * sigmoid(i_tile) * (1.0 / ct.sqrt(size_n)) * d_write_tile  # [L, H]
        store(d_i, (batch, chunk, head_tile), (1, CHUNK, TILE_H), d_i_tile)
        d_f_tile = (1.0 - sigmoid(f_tile)) * d_decay_tile  # [L, H]
        store(d_f, (batch, chunk, head_tile), (1, CHUNK, TILE_H), d_f_tile)


def launch(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, C0: Tensor | None, N0: Tensor | None, d_y: Tensor,
    d_C_final: Tensor | None, d_N_final: Tensor | None, d_C_states: Tensor | None, d_N_states: Tensor | None,
    states_every: int, C_starts: Tensor | None, N_starts: Tensor | None, starts_every: int,
    decays: Sequence[Tensor] | None, d_C0: Tensor, d_N0: Tensor, sequences: _packed.Sequences | None, config: Config,
) -> tuple[Tensor | None, ...]:
    """Launch the kernels on tensors that 32-bit indices reach. Returns the gradients of inputs in their order,
    as blocks leave them, None for one that is 0; those of initial states are written in place. Where a forward pass
    kept them, segments of `starts_every` tokens begin with its states, and scalars of tokens are its `decays`.
    """
    size_b, size_t, size_h, size_p, size_n = q.shape[0], q.shape[1], q.shape[2], v.shape[3], q.shape[3]
    q, k, v, i, f, d_y = (_rt.indexable(v) for v in (q, k, v, i, f, d_y))
    state_tiles = _rt.ceil_div(size_p, config.state_tile_p) * _rt.ceil_div(size_n, config.state_tile_n)
    segments = _gradients.segments(
        config.segments, _rt.ceil_div(size_t, config.chunk), size_b * size_h * state_tiles, v
    )
    cut = _cut.cut(size_b, size_t, config.chunk, segments, 1, 1, sequences, v, starts_every // config.chunk)
    stream = _rt.stream(v)
    # write[b h t]: weight write
    # decay_sum[b h t]: running sum of logsigmoid(f) * LOG2E within a chunk
    write, decay_sum = decays or _rt.several(2, (cut.lanes, size_h, cut.slots * config.chunk), v)
    # C_entry[b h chunk p n]: the state C that enters each chunk
    # d_C_end[b h chunk p n]: the gradient of the state C at the end of each chunk
    C_entry, d_C_end = _rt.empty(
        (2, cut.lanes, size_h, cut.slots, size_p, size_n), dtype=_rt.stored(config.carried), device=v.device
    ).unbind()
    # N_entry[b h chunk n]: the state N that enters each chunk
    # d_N_end[b h chunk n]: the gradient of the state N at the end of each chunk
    N_entry, d_N_end = _rt.empty(
        (2, cut.lanes, size_h, cut.slots, size_n), dtype=torch.float32, device=v.device
    ).unbind()
    # C_part[b h segment p n]: the state C that each segment would end with if it began at zero
    C_part = _rt.empty((cut.lanes, size_h, cut.ends, size_p, size_n), dtype=torch.float32, device=v.device)
    # C_left[segment b h]: the sum of the log2 decays of C over each segment
    C_left = _rt.empty((cut.ends, cut.lanes, size_h), dtype=torch.float32, device=v.device)
    # N_part[b h segment n]: the state N that each segment would end with if it began at zero
    N_part = _rt.empty((cut.lanes, size_h, cut.ends, size_n), dtype=torch.float32, device=v.device)
    # d_C_left[segment b h]: the sum of the log2 decays of C over each segment
    d_C_left = _rt.empty((cut.ends, cut.lanes, size_h), dtype=torch.float32, device=v.device)
    # d_C_part[b h segment p n]: what each segment adds to the gradient of C that arrives at its end
    d_C_part = _rt.empty((cut.lanes, size_h, cut.ends, size_p, size_n), dtype=torch.float32, device=v.device)
    # d_N_part[b h segment n]: what each segment adds to the gradient of N that arrives at its end
    d_N_part = _rt.empty((cut.lanes, size_h, cut.ends, size_n), dtype=torch.float32, device=v.device)
    # d_read_C[b h t p]: the gradient of read_C, what each token reads
    d_read_C = _rt.empty(
        (cut.lanes, size_h, cut.slots * config.chunk, size_p), dtype=_rt.stored(config.carried), device=v.device
    )
    # d_read_N[b h t]: the gradient of read_N, what each token reads
    # d_weight[b h t]: the gradient of the weight write
    # d_decay_sum[b h t]: the gradient of the running sum of decay, by reads
    # d_decay_written[b h t]: what the end of a chunk asks decay for, by each token's input
    d_read_N, d_weight, d_decay_sum, d_decay_written = _rt.empty(
        (4, cut.lanes, size_h, cut.slots * config.chunk), dtype=torch.float32, device=v.device
    ).unbind()
    # C_met[b h chunk p]: what C passes through each chunk, times what arrives there
    C_met = _rt.empty((cut.lanes, size_h, cut.slots, size_p), dtype=torch.float32, device=v.device)
    # N_met[b h chunk]: what N passes through each chunk, times what arrives there
    N_met = _rt.empty((cut.lanes, size_h, cut.slots), dtype=torch.float32, device=v.device)
    d_q = _gradients.memory(q, sequences)
    d_k = _gradients.memory(k, sequences)
    d_v = _gradients.memory(v, sequences)
    d_i = _gradients.memory(i, sequences)
    d_f = _gradients.memory(f, sequences)
    if decays is None:
        _rt.launch(
            stream,
            _rt.hinted(chunk_cumsum, config.occupancy_chunk_cumsum, config.warps_chunk_cumsum),
            (cut.lanes * cut.slots, _rt.ceil_div(size_h, config.tile_h)),
            (
                i, f, write, decay_sum, cut.chunk_table, float(size_n), config.chunk, config.tile_h,
                sequences is not None,
            ),
        )
    # decay_oldest, decay_newest[segment b h]: the chunks that each segment remembers from and reaches to
    decay_oldest, decay_newest = _reach.reaches(stream, decay_sum, cut, config.chunk, sequences is not None)
    if C_starts is None:
        _rt.launch(
            stream,
            _rt.hinted(segment_states_C, config.occupancy_entry_states, config.warps_entry_states),
            (cut.walks * size_h, cut.inner, state_tiles),
            (
                k, v, write, decay_sum, C_part, C_left, decay_oldest, cut.segment_table, cut.per_segment,
                config.state_latency_v, config.state_latency_k, _rt.PRECISION[config.state], config.state_latency_C,
                config.chunk, config.state_tile_p, config.state_tile_n, sequences is not None,
            ),
            early=True,
        )
    _rt.launch(
        stream,
        _rt.hinted(entry_states_C, config.occupancy_entry_states, config.warps_entry_states),
        (cut.walks * size_h, cut.segments, state_tiles),
        (
            k, v, _rt.given(C0, d_C0), decay_oldest, C_left, C_part, write, decay_sum, C_entry, cut.segment_table,
            _rt.given(C_starts, d_C0), cut.per_segment, config.state_latency_C, config.state_latency_v,
            config.state_latency_k, _rt.PRECISION[config.state], config.chunk, config.state_tile_p, config.state_tile_n,
            sequences is not None, C0 is not None, C_starts is not None,
        ),
        early=True,
    )
    if N_starts is None:
        _rt.launch(
            stream,
            _rt.hinted(segment_states_N, config.occupancy_entry_states, config.warps_entry_states),
            (cut.walks * size_h, cut.inner, _rt.ceil_div(size_n, config.state_tile_n)),
            (
                k, write, decay_sum, N_part, decay_oldest, cut.segment_table, cut.per_segment, config.state_latency_k,
                config.state_latency_N, config.chunk, config.state_tile_n, sequences is not None,
            ),
            early=True,
        )
    _rt.launch(
        stream,
        _rt.hinted(entry_states_N, config.occupancy_entry_states, config.warps_entry_states),
        (cut.walks * size_h, cut.segments, _rt.ceil_div(size_n, config.state_tile_n)),
        (
            k, _rt.given(N0, d_N0), decay_oldest, C_left, N_part, write, decay_sum, N_entry, cut.segment_table,
            _rt.given(N_starts, d_N0), cut.per_segment, config.state_latency_N, config.state_latency_k, config.chunk,
            config.state_tile_n, sequences is not None, N0 is not None, N_starts is not None,
        ),
        early=True,
    )
    _rt.launch(
        stream,
        _rt.hinted(read_gradients, config.occupancy_read_gradients, config.warps_read_gradients),
        (cut.lanes * cut.slots, size_h),
        (
            q, k, v, d_y, C_entry, decay_sum, write, N_entry, d_read_C, d_read_N, cut.chunk_table, config.latency_q,
            config.latency_C, _rt.PRECISION[config.carried], config.latency_k, _rt.PRECISION[config.scores],
            config.latency_v, _rt.PRECISION[config.intra], config.latency_N, config.latency_d_y, config.chunk,
            _rt.covering(size_p), _rt.covering(size_n), sequences is not None,
        ),
        early=True,
    )
    _rt.launch(
        stream,
        _rt.hinted(segment_gradients_C, config.occupancy_state_gradients, config.warps_state_gradients),
        (cut.walks * size_h, cut.inner, state_tiles),
        (
            q, d_read_C, decay_sum, d_C_part, d_C_left, decay_newest, cut.segment_table, _rt.given(d_C_states, d_C0),
            states_every, cut.per_segment, config.state_latency_q, _rt.PRECISION[config.state], config.chunk,
            config.state_tile_p, config.state_tile_n, sequences is not None, d_C_states is not None,
        ),
        early=True,
    )
    _rt.launch(
        stream,
        _rt.hinted(state_gradients_C, config.occupancy_state_gradients, config.warps_state_gradients),
        (cut.walks * size_h, cut.segments, state_tiles),
        (
            q, _rt.given(d_C_final, d_C0), decay_newest, d_C_left, d_C_part, d_read_C, decay_sum, d_C_end,
            cut.segment_table, d_C0, _rt.given(d_C_states, d_C0), states_every, cut.per_segment, config.state_latency_C,
            config.state_latency_q, _rt.PRECISION[config.state], config.chunk, config.state_tile_p, config.state_tile_n,
            sequences is not None, d_C_final is not None, d_C_states is not None,
        ),
        early=True,
    )
    _rt.launch(
        stream,
        _rt.hinted(segment_gradients_N, config.occupancy_state_gradients, config.warps_state_gradients),
        (cut.walks * size_h, cut.inner, _rt.ceil_div(size_n, config.state_tile_n)),
        (
            q, d_read_N, decay_sum, d_N_part, decay_newest, cut.segment_table, _rt.given(d_N_states, d_N0),
            states_every, cut.per_segment, config.state_latency_q, config.chunk, config.state_tile_n,
            sequences is not None, d_N_states is not None,
        ),
        early=True,
    )
    _rt.launch(
        stream,
        _rt.hinted(state_gradients_N, config.occupancy_state_gradients, config.warps_state_gradients),
        (cut.walks * size_h, cut.segments, _rt.ceil_div(size_n, config.state_tile_n)),
        (
            q, _rt.given(d_N_final, d_N0), decay_newest, d_C_left, d_N_part, d_read_N, decay_sum, d_N_end,
            cut.segment_table, d_N0, _rt.given(d_N_states, d_N0), states_every, cut.per_segment, config.state_latency_N,
            config.state_latency_q, config.chunk, config.state_tile_n, sequences is not None, d_N_final is not None,
            d_N_states is not None,
        ),
        early=True,
    )
    _rt.launch(
        stream,
        _rt.hinted(chunk_gradients, config.occupancy_chunk_gradients, config.warps_chunk_gradients),
        (cut.lanes * cut.slots, size_h),
        (
            q, k, v, d_read_C, d_read_N, decay_sum, d_C_end, write, C_entry, N_entry, d_N_end, d_weight,
            d_decay_written, C_met, N_met, d_decay_sum, cut.chunk_table, d_v, d_q, d_k, config.latency_k,
            config.latency_q, _rt.PRECISION[config.scores], config.latency_C, _rt.PRECISION[config.carried],
            _rt.PRECISION[config.intra], config.latency_N, config.latency_v, config.chunk, _rt.covering(size_p),
            _rt.covering(size_n), sequences is not None,
        ),
        early=True,
    )
    _rt.launch(
        stream,
        _rt.hinted(token_gradients, config.occupancy_token_gradients, config.warps_token_gradients),
        (cut.lanes * cut.slots, _rt.ceil_div(size_h, config.tile_h)),
        (
            i, f, d_weight, d_decay_sum, d_decay_written, C_met, N_met, cut.chunk_table, d_i, d_f, float(size_n),
            _rt.covering(size_p), config.chunk, config.tile_h, sequences is not None,
        ),
        early=True,
    )
    return (d_q, d_k, d_v, d_i, d_f)


SPEC_DIGEST = "1eb781cd19dea253f942e5647c0f71b3f5f97bef3a04bb410563e4911a2908e3"
"""The SHA-256 of the spec's text; emitted by ssdgen 0.1.0."""

SUMMED: dict[str, tuple[int, ...]] = {}
"""The dimensions to sum over of the gradients that are left in parts, by input."""


GRADIENTS = _gradients.Gradients(LAYER, launch, CONFIGS, ("v", "i", "f"), SUMMED, SPEC_DIGEST, VARIANT)
"""What `forward` of `mlstm` is differentiated by."""
