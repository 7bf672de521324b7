"""Mamba-2 state space duality (Dao and Gu 2024, arXiv 2405.21060).

The forward pass of

    S[t] = exp(A * step) * S[t-1] + step * x * B

emitted by ssdgen, as the jump formula over chunks of L tokens:

    decay[i] = A * step * LOG2E    log2, one a token and head
    s[i] = decay[0] + ... + decay[i]

    S_end = 2^s[L-1] S
      + sum_j 2^(s[L-1] - s[j]) step[j] x[j] (x) B[j]
    score[i,j] = (C[i] . B[j]) 2^(s[i] - s[j]) step[j]    j <= i
    read_S[i] = 2^s[i] S . C[i]
      + sum_j score[i,j] x[j]

    y = read_S + D * x
      when z: y = y * silu(z)

    one token:
    S = 2^(A * step * LOG2E) S + step x (x) B
    read_S = S . C

Axes: b batch, t time, h head, g group of h, p = 64 row channel, n = 128 column channel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cuda.tile as ct
import torch
from torch import Tensor

from . import _blocks, _cut, _operator, _packed, _reach, _step, _tuned
from . import _runtime as _rt
from ._direct import load_direct, slot_at, store_direct
from ._tiles import await_previous, chunk_at, clamp, dot, exp2, f16_scale, load, rows, segment_at, silu, softplus, store

LOG2E = math.log2(math.e)

LAYER = _rt.Layer(
    "mamba2",
    batch="b",
    time="t",
    head="h",
    inputs=(
        _rt.Input("x", ("b", "t", "h", "p"), (_rt.BF16, _rt.F16, _rt.F32)),
        _rt.Input("dt", ("b", "t", "h"), (_rt.F32, _rt.BF16, _rt.F16)),
        _rt.Input("A", ("h",), (_rt.F32, _rt.BF16, _rt.F16), high=0.0, high_open=True),
        _rt.Input("B", ("b", "t", "g", "n"), (_rt.BF16, _rt.F16, _rt.F32), like="x"),
        _rt.Input("C", ("b", "t", "g", "n"), (_rt.BF16, _rt.F16, _rt.F32), like="x"),
        _rt.Input("D", ("h", "p"), (_rt.F32, _rt.BF16, _rt.F16), narrower=(("h",),), default=0.0),
        _rt.Input("dt_bias", ("h",), (_rt.F32, _rt.BF16, _rt.F16), default=0.0),
        _rt.Input("z", ("b", "t", "h", "p"), (_rt.BF16, _rt.F16, _rt.F32), like="x", optional=True),
    ),
    scalars=(_rt.Scalar("dt_min", low=0.0), _rt.Scalar("dt_max", low=0.0)),
    groups={"g": "h"},
    states={"S": ("b", "h", "p", "n")},
    outputs={"y": ("b", "t", "h", "p")},
    dtypes={"y": "x"},
)


@dataclass(frozen=True)
class Config:
    """How the kernels run. Tiles and chunk are powers of two; each set of values compiles its own kernels."""

    chunk: int = 64  # tokens a chunk
    tile_h: int = 8  # tile of axis h
    tile_p: int = 64  # tile of axis p
    state_tile_p: int = 64  # tile of axis p of a state that walks the chunks
    state_tile_n: int = 128  # tile of axis n of a state that walks the chunks
    scores: str = "bf16"  # operands of the `scores` product
    carried: str = "bf16"  # operands of the `carried` product
    intra: str = "bf16"  # operands of the `intra` product
    state: str = "bf16"  # operands of the `state` product
    latency_x: int = 3  # latency hint of x
    latency_B: int = 2  # latency hint of B
    latency_C: int = 2  # latency hint of C
    latency_S: int = 3  # latency hint of S
    latency_scores: int = 2  # latency hint of scores
    state_latency_x: int = 2  # latency hint of x where a state walks the chunks
    state_latency_B: int = 2  # latency hint of B where a state walks the chunks
    state_latency_S: int = 3  # latency hint of S where a state walks the chunks
    share_scores_from: int = 4  # heads a group from which they share the `scores` product, 0 for never
    segments: int = 0  # pieces of a sequence that are walked at once, 0 to let the size of the GPU choose
    occupancy_chunk_cumsum: int = 0  # blocks of chunk_cumsum a multiprocessor, 0 to let the compiler choose
    occupancy_group_scores: int = 4  # blocks of group_scores a multiprocessor, 0 to let the compiler choose
    occupancy_fwd_pass_state: int = 2  # blocks of segment_states a multiprocessor, 0 to let the compiler choose
    occupancy_compute_out: int = 2  # blocks of walk_out a multiprocessor, 0 to let the compiler choose
    warps_chunk_cumsum: int = 0  # worker warps of a block of chunk_cumsum, 0 to let the compiler choose
    warps_group_scores: int = 0  # worker warps of a block of group_scores, 0 to let the compiler choose
    warps_fwd_pass_state: int = 0  # worker warps of a block of segment_states, 0 to let the compiler choose
    warps_compute_out: int = 0  # worker warps of a block of walk_out, 0 to let the compiler choose

    def __post_init__(self) -> None:
        _rt.check_config(LAYER, vars(self))


CONFIGS = {
    torch.bfloat16: Config(),
    torch.float16: Config(scores="tf32", carried="tf32", intra="tf32", state="tf32"),
    torch.float32: Config(scores="tf32", carried="tf32", intra="tf32", state="tf32"),
}
"""The default configuration for each dtype of `x`."""


@dataclass(frozen=True)
class StepConfig:
    """How kernels of steps run; a call without one takes what fits its states and the GPU. Tiles are powers of two."""

    tile_p: int = 64  # tile of axis p, at most
    occupancy: int = 2  # blocks a multiprocessor, 0 to let the compiler choose
    warps: int = 8  # worker warps of a block, 0 to let the compiler choose

    def __post_init__(self) -> None:
        _step.check_config(LAYER, vars(self))


@ct.kernel
def chunk_cumsum(
    dt: ct.Array, A: ct.Array, dt_bias: ct.Array,
    step: ct.Array, decay_sum: ct.Array,
    chunk_table: ct.Array,
    dt_min: float, dt_max: float,
    CHUNK: ct.Constant[int], TILE_H: ct.Constant[int],
    PACKED: ct.Constant[bool],
) -> None:
    """Per-token scalars of one chunk for a tile of heads, in float32; past the end of the sequence nothing decays
    and every weight is 0.
    """
    await_previous()
    chunks = ct.cdiv(dt.shape[1], CHUNK)
    batch, chunk = ct.bid(0) // chunks, ct.bid(0) % chunks
    lane, slot = batch, chunk
    if PACKED:
        batch, start, stop = chunk_at(chunk_table, ct.bid(0))
        lane, slot, chunk = 0, ct.bid(0), 0
        dt = dt.slice(1, start, stop)
    length = dt.shape[1]
    head_tile = ct.bid(1)
    token = chunk * CHUNK + ct.arange(CHUNK, dtype=ct.int32)

    valid = token < length  # [L]: false past the end
    dt_tile = load(dt, (batch, chunk, head_tile), (1, CHUNK, TILE_H)).astype(ct.float32)  # [L, H]
    dt_bias_tile = load(dt_bias, (head_tile,), (TILE_H,)).astype(ct.float32)  # [H]
    # mamba2.ssd:18  step = clamp(softplus(dt + dt_bias), dt_min, dt_max)
    step_tile = clamp(softplus(dt_tile + dt_bias_tile[None, :]), dt_min, dt_max)  # [L, H]
    step_valid = ct.where(valid[:, None], step_tile, 0.0)  # [L, H]
    A_tile = load(A, (head_tile,), (TILE_H,)).astype(ct.float32)  # [H]
    decay_log2 = ct.where(  # [L, H]: of one token
        valid[:, None], clamp(A_tile[None, :] * step_tile * LOG2E, -128.0, 0.0), 0.0
    )
    decay_sum_tile = ct.cumsum(decay_log2, axis=0)  # [L, H]
    store(step, (lane, head_tile, slot), (1, TILE_H, CHUNK), ct.transpose(step_valid))
    store(decay_sum, (lane, head_tile, slot), (1, TILE_H, CHUNK), ct.transpose(decay_sum_tile))


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
    n_tiles = ct.cdiv(S_part.shape[3], TILE_N)
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
    store(
        S_part, (lane, head, origin + segment, n_tile, p_tile), (1, 1, 1, TILE_N, TILE_P), ct.transpose(S_tile),
        latency=LATENCY_S,
    )
    if ct.bid(2) == 0:
        store(S_left, (origin + segment, lane, head), (1, 1, 1), S_left_tile)


@ct.kernel
def group_scores(
    B: ct.Array, C: ct.Array,
    shared_scores: ct.Array, shared_scores_token: ct.Array,
    chunk_table: ct.Array,
    LATENCY_C: ct.Constant[int], LATENCY_B: ct.Constant[int], SCORES: ct.Constant[int], CHUNK: ct.Constant[int],
    TILE_N: ct.Constant[int],
    PACKED: ct.Constant[bool],
) -> None:
    """Products of every token of one chunk with those that it reads, before any decay: the same for all heads of a
    group.
    """
    chunks = ct.cdiv(C.shape[1], CHUNK)
    batch, chunk = ct.bid(0) // chunks, ct.bid(0) % chunks
    lane, slot = batch, chunk
    if PACKED:
        batch, start, stop = chunk_at(chunk_table, ct.bid(0))
        lane, slot, chunk = 0, ct.bid(0), 0
        B, C = B.slice(1, start, stop), C.slice(1, start, stop)
    group_g = ct.bid(1)
    token = ct.arange(CHUNK, dtype=ct.int32)

    C_tile = load(C, (batch, chunk, group_g, 0), (1, CHUNK, 1, TILE_N), latency=LATENCY_C)  # [L, N]
    B_tile = load(B, (batch, chunk, group_g, 0), (1, CHUNK, 1, TILE_N), latency=LATENCY_B)  # [L, N]
    scores = ct.zeros((CHUNK, CHUNK), dtype=ct.float32)  # [L, L]
    scores = dot(C_tile, ct.transpose(B_tile), scores, SCORES)  # [L, L]
    scores_own = ct.sum(ct.where(token[:, None] == token[None, :], scores, 0.0), axis=1)  # [L]: of a token with itself
    causal_before = token[:, None] > token[None, :]  # [L, L]
    scores = ct.where(causal_before, scores, 0.0)  # [L, L]
    scores_scale = f16_scale(scores, 1)  # [L]
    store(shared_scores, (lane, group_g, slot, 0), (1, 1, CHUNK, CHUNK), scores * (1.0 / scores_scale)[:, None])
    store(shared_scores_token, (lane, group_g, 0, slot), (1, 1, 1, CHUNK), scores_scale)
    store(shared_scores_token, (lane, group_g, 1, slot), (1, 1, 1, CHUNK), scores_own)
    await_previous()


@ct.kernel
def walk_out(
    x: ct.Array, B: ct.Array, C: ct.Array, D: ct.Array, z: ct.Array,
    S0: ct.Array,
    decay_oldest: ct.Array, S_left: ct.Array, S_part: ct.Array, shared_scores: ct.Array, shared_scores_token: ct.Array,
    decay_sum: ct.Array, step: ct.Array,
    segment_table: ct.Array,
    y: ct.Array,
    S_final: ct.Array,
    S_states: ct.Array,
    every: int, per_segment: int,
    LATENCY_S: ct.Constant[int], LATENCY_C: ct.Constant[int], LATENCY_B: ct.Constant[int], SCORES: ct.Constant[int],
    LATENCY_SCORES: ct.Constant[int], CARRIED: ct.Constant[int], LATENCY_X: ct.Constant[int], INTRA: ct.Constant[int],
    STATE: ct.Constant[int], CHUNK: ct.Constant[int], TILE_N: ct.Constant[int], TILE_P: ct.Constant[int],
    D_UNIFORM_P: ct.Constant[bool], PACKED: ct.Constant[bool], WITH_S0: ct.Constant[bool], SHARED: ct.Constant[bool],
    WITH_Z: ct.Constant[bool], KEPT: ct.Constant[bool], ENDS: ct.Constant[bool],
) -> None:
    """The outputs of a segment: a block walks its chunks with the states in registers."""
    await_previous()
    heads = S_final.shape[1]
    batch, head = ct.bid(0) // heads, ct.bid(0) % heads
    sequence, lane, slot, first = batch, batch, 0, 0
    segment, origin = ct.bid(1), 0
    last = segment == ct.num_blocks(1) - 1
    if PACKED:
        row = batch
        sequence, batch, start, stop, slot, segment, last = segment_at(segment_table, batch)
        lane, origin = 0, row - segment
        if KEPT or ENDS:
            first = start // every  # rounded down: see `_blocks`
        x, B = x.slice(1, start, stop), B.slice(1, start, stop)
        C, y = C.slice(1, start, stop), y.slice(1, start, stop)
        if WITH_Z:
            z = z.slice(1, start, stop)
    length = C.shape[1]
    p_tile = ct.bid(2)
    group_g = head // (heads // C.shape[2])
    token = ct.arange(CHUNK, dtype=ct.int32)
    since = _reach.segment_since(decay_oldest, lane, head, origin, segment, per_segment)

    causal = token[:, None] >= token[None, :]  # [L, L]
    D_tile = load(D, (head, p_tile), (1, TILE_P), uniform=(False, D_UNIFORM_P)).astype(ct.float32)  # [P]
    if WITH_S0:
        S_tile = load(S0, (sequence, head, 0, p_tile), (1, 1, TILE_N, TILE_P), order=(0, 1, 3, 2))  # [N, P]
    else:
        S_tile = ct.zeros((TILE_N, TILE_P), dtype=ct.float32)  # [N, P]
    for before in range(since, segment):
        S_left_tile = load(S_left, (origin + before, lane, head), (1, 1, 1))
        S_part_tile = load(  # [N, P]
            S_part, (lane, head, origin + before, 0, p_tile), (1, 1, 1, TILE_N, TILE_P), latency=LATENCY_S
        )
        S_tile = exp2(S_left_tile) * S_tile + S_part_tile  # [N, P]
    for chunk in range(segment * per_segment, ct.minimum(ct.cdiv(length, CHUNK), (segment + 1) * per_segment)):
        # Products over the column axis: of tokens with each other, and of tokens with the state that enters the chunk.
        read_S_carried = ct.zeros((CHUNK, TILE_P), dtype=ct.float32)  # [L, P]
        C_tile = load(C, (batch, chunk, group_g, 0), (1, CHUNK, 1, TILE_N), latency=LATENCY_C)  # [L, N]
        B_tile = load(B, (batch, chunk, group_g, 0), (1, CHUNK, 1, TILE_N), latency=LATENCY_B)  # [L, N]
        if SHARED:
            scores = load(  # [L, L]
                shared_scores, (lane, group_g, slot + chunk, 0), (1, 1, CHUNK, CHUNK), latency=LATENCY_SCORES
            ).astype(ct.float32)
            scores_token = load(shared_scores_token, (lane, group_g, 0, slot + chunk), (1, 1, 2, CHUNK))  # [2, L]
            scores_scale, scores_own = rows(scores_token)  # [L]
            scores = scores * scores_scale[:, None]  # [L, L]
        else:
            scores = ct.zeros((CHUNK, CHUNK), dtype=ct.float32)  # [L, L]
            scores = dot(C_tile, ct.transpose(B_tile), scores, SCORES)  # [L, L]
            scores = ct.where(causal, scores, 0.0)  # [L, L]
        read_S_carried = dot(C_tile, S_tile, read_S_carried, CARRIED)  # [L, P]

        # What each token reads: the carried state, decayed, and the tokens of the chunk up to it.
        decay_sum_tile = load(decay_sum, (lane, head, slot + chunk), (1, 1, CHUNK))  # [L]
        decay_end = ct.extract(decay_sum_tile, index=(CHUNK - 1,), shape=(1,)).reshape(())
        step_tile = load(step, (lane, head, slot + chunk), (1, 1, CHUNK))  # [L]
        x_tile = load(x, (batch, chunk, head, p_tile), (1, CHUNK, 1, TILE_P), latency=LATENCY_X)  # [L, P]
        decay_left = exp2(  # [L, L]: what is left of token j at token i, and at most 1 above the diagonal
            -ct.abs(decay_sum_tile[:, None] - decay_sum_tile[None, :])
        )
        score = scores * decay_left * step_tile[None, :]  # [L, L]
        read_S = dot(score, x_tile, read_S_carried * exp2(decay_sum_tile)[:, None], INTRA)  # [L, P]
        if SHARED:
            own = scores_own * step_tile  # [L]: weight of what a token reads of itself
            # mamba2.ssd:24  y = S[t] . C + D * x
            y_tile = read_S + (own[:, None] + D_tile[None, :]) * ct.astype(x_tile, ct.float32)  # [L, P]
        else:
            y_tile = read_S + D_tile[None, :] * ct.astype(x_tile, ct.float32)  # [L, P]
        if WITH_Z:
            z_tile = load(z, (batch, chunk, head, p_tile), (1, CHUNK, 1, TILE_P)).astype(ct.float32)  # [L, P]
            # mamba2.ssd:25  when z: y = y * silu(z)
            y_tile = y_tile * silu(z_tile)  # [L, P]
        store(y, (batch, chunk, head, p_tile), (1, CHUNK, 1, TILE_P), y_tile)

        # The state at the end of the chunk.
        carry = step_tile * exp2(-ct.abs(decay_end - decay_sum_tile))  # [L]: what is left of a token's input at the end
        S_tile = dot(  # [N, P]
            ct.transpose(B_tile), ct.astype(x_tile, ct.float32) * carry[:, None], exp2(decay_end) * S_tile, STATE
        )
        if KEPT:
            end = chunk * CHUNK + CHUNK
            if end % every == 0 and end <= length:
                block = first + chunk * CHUNK // every
                store(S_states, (batch, block, head, p_tile, 0), (1, 1, 1, TILE_P, TILE_N), ct.transpose(S_tile))

    if last:
        store(S_final, (sequence, head, p_tile, 0), (1, 1, TILE_P, TILE_N), ct.transpose(S_tile))
    if ENDS:
        block = first + segment
        if (segment + 1) * every <= length:
            store(S_states, (batch, block, head, p_tile, 0), (1, 1, 1, TILE_P, TILE_N), ct.transpose(S_tile))


@ct.kernel
def token_step(
    x: ct.Array, dt: ct.Array, A: ct.Array, B: ct.Array, C: ct.Array, D: ct.Array, dt_bias: ct.Array, z: ct.Array,
    y: ct.Array,
    S: ct.IndexedWithInt64, S_before: ct.IndexedWithInt64,
    state_indices: ct.Array, write_indices: ct.Array,
    dt_min: float, dt_max: float,
    TILE_P: ct.Constant[int], TILE_N: ct.Constant[int],
    WHOLE: ct.Constant[bool], INDEXED: ct.Constant[bool], STEADY: ct.Constant[bool], KEPT: ct.Constant[bool],
    WITH_Z: ct.Constant[bool],
) -> None:
    """Tokens one by one, with a tile of S in registers; a sequence without a slot is left out."""
    await_previous(STEADY)
    heads = x.shape[2]
    batch, head = ct.bid(0) // heads, ct.bid(0) % heads
    p_tile = ct.bid(1)
    length = dt.shape[1]
    slot, into = batch, batch
    if INDEXED:
        slot = slot_at(state_indices, batch, S.shape[0])
        into = slot_at(write_indices, batch, S.shape[0])
    group_g = head // (heads // B.shape[2])

    if slot >= 0:
        S_tile = load_direct(S, (slot, head, p_tile, 0), (1, 1, TILE_P, TILE_N), WHOLE)  # [P, N]
        A_tile = load_direct(A, (head,), (1,), WHOLE).astype(ct.float32)
        dt_bias_tile = load_direct(dt_bias, (head,), (1,), WHOLE).astype(ct.float32)
        D_tile = load_direct(D, (head, p_tile), (1, TILE_P), WHOLE).astype(ct.float32)  # [P]
        if STEADY:  # there are no slots then, so every block is here
            ct.grid_dependency_control_wait()
        for token in range(length):
            if KEPT:
                store_direct(S_before, (batch, token, head, p_tile, 0), (1, 1, 1, TILE_P, TILE_N), S_tile, WHOLE)
            dt_tile = load_direct(dt, (batch, token, head), (1, 1, 1), WHOLE).astype(ct.float32)
            # mamba2.ssd:18  step = clamp(softplus(dt + dt_bias), dt_min, dt_max)
            step_tile = clamp(softplus(dt_tile + dt_bias_tile), dt_min, dt_max)
            decay = exp2(clamp(A_tile * step_tile * LOG2E, -128.0, 0.0))
            x_tile = load_direct(x, (batch, token, head, p_tile), (1, 1, 1, TILE_P), WHOLE).astype(ct.float32)  # [P]
            B_tile = load_direct(B, (batch, token, group_g, 0), (1, 1, 1, TILE_N), WHOLE).astype(ct.float32)  # [N]
            S_now = decay * ct.astype(S_tile, ct.float32) + (step_tile * x_tile)[:, None] * B_tile[None, :]  # [P, N]
            C_tile = load_direct(C, (batch, token, group_g, 0), (1, 1, 1, TILE_N), WHOLE).astype(ct.float32)  # [N]
            read_S = ct.sum(S_now * C_tile[None, :], axis=1)  # [P]
            # mamba2.ssd:24  y = S[t] . C + D * x
            y_tile = read_S + D_tile * x_tile  # [P]
            if WITH_Z:
                z_tile = load_direct(  # [P]
                    z, (batch, token, head, p_tile), (1, 1, 1, TILE_P), WHOLE
                ).astype(ct.float32)
                # mamba2.ssd:25  when z: y = y * silu(z)
                y_tile = y_tile * silu(z_tile)  # [P]
            store_direct(y, (batch, token, head, p_tile), (1, 1, 1, TILE_P), y_tile, WHOLE)
            S_tile = ct.astype(S_now, S.dtype)
        if into >= 0:
            store_direct(S, (into, head, p_tile, 0), (1, 1, TILE_P, TILE_N), S_tile, WHOLE)


def forward(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    *,
    D: Tensor | None = None, dt_bias: Tensor | None = None, z: Tensor | None = None, dt_min: float = 0.0,
    dt_max: float = math.inf, S0: Tensor | None = None, cu_seqlens: Tensor | None = None, seq_idx: Tensor | None = None,
    mask: Tensor | None = None, states_every: int | None = None, config: Config | None = None,
) -> tuple[Tensor, ...]:
    """Mamba-2 state space duality (Dao and Gu 2024, arXiv 2405.21060).

    Returns y[b t h p], the final state S[b h p n].

    x: [b t h p], bfloat16 or float16 or float32
    dt: [b t h], float32 or bfloat16 or float16
    A: [h], float32 or bfloat16 or float16, in [-inf, 0)
    B: [b t g n], the dtype of x
    C: [b t g n], the dtype of x
    D: [h p] or [h], float32 or bfloat16 or float16, 0 if absent
    dt_bias: [h], float32 or bfloat16 or float16, 0 if absent
    z: [b t h p], the dtype of x, optional
    dt_min: a number in [0, inf]
    dt_max: a number in [0, inf]
    S0: [b h p n], float32: the state before the first token, zero if absent
    cu_seqlens: int32 or int64: where each of several sequences in a batch of 1 begins, and the last ends; states
    then have an entry a sequence instead of axis b
    seq_idx: [b t], int32 or int64: a sequence begins wherever it changes; initial states enter the first of a
    row, final ones are those of its last
    mask: [b t], bool: tokens where it is false leave states as they are, and their outputs are 0
    states_every: a multiple of `config.chunk`: S_states[b blocks h p n], float32, are returned last: entry i is
    the state after token (i + 1) * states_every, for every whole block of so many tokens. Sequences that begin
    at token `start` of a row count from there, and their entries from start // states_every; entries that none
    has are 0. Not with `mask`

    Differentiable, on a GPU once. On the CPU also in float64. Raises TypeError or ValueError, which name the
    tensor, for a missing input, a dtype, rank, size, device or range.
    """
    return OPERATOR(x, dt, A, B, C, D, dt_bias, z, dt_min, dt_max, S0, cu_seqlens, seq_idx, mask, states_every, config)


def _checked(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, dt_bias: Tensor | None, z: Tensor | None,
    dt_min: float, dt_max: float, S0: Tensor | None, cu_seqlens: Tensor | None, seq_idx: Tensor | None,
    mask: Tensor | None, states_every: int | None, config: Config | None, keep: bool = False,
) -> tuple[Tensor, ...]:
    """`forward` of what nobody differentiates; last, to `keep` for gradients, scalars of tokens."""
    size, sequences = _packed.check(
        LAYER,
        {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "dt_bias": dt_bias, "z": z},
        {"S": S0},
        {"dt_min": dt_min, "dt_max": dt_max},
        (cu_seqlens, seq_idx, mask),
    )
    D = _rt.expand(LAYER.inputs[5], D, size, x)
    dt_bias = _rt.expand(LAYER.inputs[6], dt_bias, size, x)
    config = _tuned.chosen(
        LAYER,
        config,
        CONFIGS,
        digest=SPEC_DIGEST,
        variant=VARIANT,
        present=_tuned.present({"z": z, "packed": sequences}),
        size=size,
        dtypes=(x.dtype, dt.dtype),
        x=x,
    )
    _blocks.check(LAYER, states_every, config.chunk, mask)
    if _rt.runs_kernels(x):
        return _cut.run(
            LAYER, _segmented, sequences, (x, dt, A, B, C, D, dt_bias, z), (float(dt_min), float(dt_max)), (S0,), size,
            config, states_every, keep,
        )
    if S0 is None:
        S0 = _packed.zeros(LAYER, "S", size, x)
    return _packed.each(
        LAYER, _portable, sequences, (x, dt, A, B, C, D, dt_bias, z), (_rt.scalar(dt_min, x), _rt.scalar(dt_max, x)),
        (S0,), size, config.chunk, states_every,
    )


OPERATOR = _operator.Operator(LAYER, forward, _checked, CONFIGS, leader="x")
"""`forward`, differentiated, traced or neither."""


def init_state(
    batch: int, heads: int, *, p: int = 64, n: int = 128, device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Zero states: S[b h p n]."""
    return torch.zeros((batch, heads, p, n), dtype=dtype, device=device)


def _segmented(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor, z: Tensor | None, dt_min: float,
    dt_max: float, S0: Tensor | None, y: Tensor, S_final: Tensor, S_states: Tensor | None, states_every: int,
    sequences: _packed.Sequences | None, config: Config,
) -> tuple[Tensor, ...]:
    """Launch the kernels on tensors that 32-bit indices reach; outputs and final states are written in place.
    Returns the scalars of tokens, if there are any, which gradients read again.
    """
    size_h, size_p, size_n, size_g, size_b, size_t = (
        x.shape[2], x.shape[3], B.shape[3], B.shape[2], x.shape[0], x.shape[1]
    )
    x, dt, B, C = (_rt.indexable(v) for v in (x, dt, B, C))
    cut = _cut.cut(
        size_b, size_t, config.chunk, config.segments, size_h * _rt.ceil_div(size_p, config.tile_p), size_n, sequences,
        x,
    )
    stream = _rt.stream(x)
    shared = 0 < config.share_scores_from <= size_h // size_g
    ends = S_states is not None and states_every == cut.per_segment * config.chunk
    # step[b h t]: weight step
    # decay_sum[b h t]: running sum of A * step * LOG2E within a chunk
    step, decay_sum = _rt.several(2, (cut.lanes, size_h, cut.slots * config.chunk), x)
    # shared_scores[b g t t]: C . B of each token and those before it in a chunk, over the token's scale
    shared_scores = _rt.empty(
        (cut.lanes, size_g, cut.slots * config.chunk if shared else 4, config.chunk),
        dtype=_rt.stored_scores(config.intra),
        device=x.device,
    )
    # shared_scores_token[b g number t]: what a token's scores are divided by, and its score with itself
    shared_scores_token = _rt.empty(
        (cut.lanes, size_g, 2, cut.slots * config.chunk if shared else 4), dtype=torch.float32, device=x.device
    )
    # S_part[b h segment n p]: the state S that each segment would end with if it began at zero
    S_part = _rt.empty((cut.lanes, size_h, cut.parts, size_n, size_p), dtype=torch.float32, device=x.device)
    # S_left[segment b h]: the sum of the log2 decays of S over each segment
    S_left = _rt.empty((cut.parts, cut.lanes, size_h), dtype=torch.float32, device=x.device)
    _rt.launch(
        stream,
        _rt.hinted(chunk_cumsum, config.occupancy_chunk_cumsum, config.warps_chunk_cumsum),
        (cut.lanes * cut.slots, _rt.ceil_div(size_h, config.tile_h)),
        (
            dt, A, dt_bias, step, decay_sum, cut.chunk_table, dt_min, dt_max, config.chunk, config.tile_h,
            sequences is not None,
        ),
    )
    # decay_oldest[segment b h]: the oldest chunk of which anything is left at the end of each segment
    decay_oldest = _reach.oldest_chunks(stream, decay_sum, cut, config.chunk, sequences is not None)
    _rt.launch(
        stream,
        _rt.hinted(segment_states, config.occupancy_fwd_pass_state, config.warps_fwd_pass_state),
        (
            cut.walks * size_h,
            cut.inner,
            _rt.ceil_div(size_p, config.state_tile_p) * _rt.ceil_div(size_n, config.state_tile_n),
        ),
        (
            x, B, step, decay_sum, S_part, S_left, decay_oldest, cut.segment_table, cut.per_segment,
            config.state_latency_x, config.state_latency_B, _rt.PRECISION[config.state], config.state_latency_S,
            config.chunk, config.state_tile_p, config.state_tile_n, sequences is not None,
        ),
        early=True,
    )
    if shared:
        _rt.launch(
            stream,
            _rt.hinted(group_scores, config.occupancy_group_scores, config.warps_group_scores),
            (cut.lanes * cut.slots, size_g),
            (
                B, C, shared_scores, shared_scores_token, cut.chunk_table, config.latency_C, config.latency_B,
                _rt.PRECISION[config.scores], config.chunk, _rt.covering(size_n), sequences is not None,
            ),
            early=True,
        )
    _rt.launch(
        stream,
        _rt.hinted(walk_out, config.occupancy_compute_out, config.warps_compute_out),
        (cut.walks * size_h, cut.segments, _rt.ceil_div(size_p, config.tile_p)),
        (
            x, B, C, D, _rt.indexable(_rt.given(z, x)), _rt.given(S0, S_final), decay_oldest, S_left, S_part,
            shared_scores, shared_scores_token, decay_sum, step, cut.segment_table, y, S_final,
            _rt.given(S_states, S_final), states_every, cut.per_segment, config.latency_S, config.latency_C,
            config.latency_B, _rt.PRECISION[config.scores], config.latency_scores, _rt.PRECISION[config.carried],
            config.latency_x, _rt.PRECISION[config.intra], _rt.PRECISION[config.state], config.chunk,
            _rt.covering(size_n), config.tile_p, D.stride(1) == 0, sequences is not None, S0 is not None, shared,
            z is not None, S_states is not None and not ends, ends,
        ),
        early=True,
    )
    return step, decay_sum


@_rt.without_autocast
def _portable(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor, z: Tensor | None,
    dt_min: Tensor, dt_max: Tensor, S: Tensor, size: dict[str, int], chunk: int, states_every: int | None,
) -> tuple[Tensor, ...]:
    """The same chunked form in plain torch, for any device: in float32, or float64 if an input is, and differentiable."""
    dtype = _rt.widest((x, dt, A, B, C, D, dt_bias, z, S))
    out_dtype = x.dtype
    x, dt, A, D, dt_bias = (v.to(dtype) for v in (x, dt, A, D, dt_bias))
    B = _rt.per_head(B, 2, size["h"]).to(dtype)
    C = _rt.per_head(C, 2, size["h"]).to(dtype)
    if z is not None:
        z = z.to(dtype)
    S = S.to(dtype, copy=True)
    # mamba2.ssd:18  step = clamp(softplus(dt + dt_bias), dt_min, dt_max)
    step = _rt.minimum(_rt.maximum(_rt.softplus(dt + dt_bias[None, None, :]), dt_min), dt_max)  # [B, L, H]
    decay_log2 = _rt.minimum(_rt.maximum(A[None, None, :] * step * LOG2E, -128.0), 0.0)  # [B, L, H]
    y_pieces = []
    kept = []
    for start in range(0, size["t"], chunk):
        now = slice(start, start + chunk)
        token = torch.arange(min(chunk, size["t"] - start), dtype=dtype, device=x.device)
        decay_log2_now = decay_log2[:, now]  # [B, L, H]
        decay_sum = torch.cumsum(decay_log2_now, 1)  # [B, L, H]
        decay_end = decay_sum[:, -1]  # [B, H]
        causal_before = token[:, None] > token[None, :]  # [L, L]
        C_now = C[:, now]  # [B, L, H, N]
        B_now = B[:, now]  # [B, L, H, N]
        decay_left = torch.exp2(  # [B, L, L, H]
            _rt.minimum(
                torch.where(causal_before[None, :, :, None], decay_sum[:, :, None, :] - decay_sum[:, None, :, :], 0.0),
                0.0,
            ),
        )
        score_product = torch.einsum("bthn,bshn->btsh", C_now, B_now)  # [B, L, L, H]
        step_now = step[:, now]  # [B, L, H]
        causal = token[:, None] >= token[None, :]  # [L, L]
        score = torch.where(  # [B, L, L, H]
            causal[None, :, :, None], score_product * decay_left * step_now[:, None, :, :], 0.0
        )
        read_S_carried = torch.einsum(  # [B, L, H, P]
            "bthn,bhpn->bthp", C_now * torch.exp2(decay_sum)[:, :, :, None], S
        )
        x_now = x[:, now]  # [B, L, H, P]
        read_S_within_score = torch.einsum("btsh,bshp->bthp", score, x_now)  # [B, L, H, P]
        read_S = read_S_carried + read_S_within_score  # [B, L, H, P]
        # mamba2.ssd:24  y = S[t] . C + D * x
        y_now = read_S + D[None, None, :, :] * x_now  # [B, L, H, P]
        if z is not None:
            z_now = z[:, now]  # [B, L, H, P]
            # mamba2.ssd:25  when z: y = y * silu(z)
            y_now = y_now * torch.nn.functional.silu(z_now)  # [B, L, H, P]
        y_pieces.append(y_now)
        carry = step_now * torch.exp2(_rt.minimum(decay_end[:, None, :] - decay_sum, 0.0))  # [B, L, H]
        S_gained = torch.einsum("bthp,bthn->bhpn", x_now, carry[:, :, :, None] * B_now)  # [B, H, P, N]
        S = torch.exp2(decay_end)[:, :, None, None] * S + S_gained  # [B, H, P, N]
        if _blocks.ends(start + chunk, states_every, size["t"]):
            kept.append((S,))
    y = _rt.joined(y_pieces, 1, (size["b"], size["t"], size["h"], size["p"]), x).to(out_dtype)
    return y, S, *_blocks.stacked(kept, (S,), states_every)


def step(
    S: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    *,
    D: Tensor | None = None, dt_bias: Tensor | None = None, z: Tensor | None = None, dt_min: float = 0.0,
    dt_max: float = math.inf, state_indices: Tensor | None = None, write_indices: Tensor | None = None,
    out: Tensor | None = None, steady: bool = False, config: StepConfig | None = None,
) -> Tensor:
    """One token: y[b h p]. The states S[b h p n], float32 or bfloat16, are updated in place. Inputs are as in
    `forward`, without its time axis: x[b h p], dt[b h], B[b g n], C[b g n], z[b h p].

    state_indices: [b], int32 or int64: the states are a pool, with slots instead of axis b, and these the slots
    to read and update; a sequence with a negative one is left out: its outputs are 0, or as they were in `out`
    write_indices: the slots to update, if others than those to read; nothing is written at a negative one
    out: the outputs' memory; then nothing is allocated
    steady: promises that what wrote the states and the inputs without a time axis was queued before the last
    kernel that was launched the ordinary way, as PyTorch's are: they are read while that one, and those behind
    it, may still run. Not used with `state_indices`, or where an input with a default is left out

    Nothing is differentiated on a GPU, nor through the states. Raises TypeError or ValueError, which name the
    tensor; the values of indices are checked on the CPU, and on a GPU if SSDGEN_DEBUG is set.
    """
    found: Tensor = _step.run(
        STEP, (S,), (x, dt, A, B, C, D, dt_bias, z), (dt_min, dt_max), (state_indices, write_indices), None, out,
        steady, config, several=False,
    )
    return found


def steps(
    S: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    *,
    D: Tensor | None = None, dt_bias: Tensor | None = None, z: Tensor | None = None, dt_min: float = 0.0,
    dt_max: float = math.inf, state_indices: Tensor | None = None, write_indices: Tensor | None = None,
    before: Tensor | None = None, out: Tensor | None = None, steady: bool = False, config: StepConfig | None = None,
) -> Tensor:
    """Several tokens, as so many calls of `step`, bit for bit: y[b t h p]. Inputs have the axes of `forward`.

    before: [b t h p n], float32 or bfloat16: filled with what the states are before each token, so that copying
    one rolls the tokens from it on back; the rest is as for `step`
    """
    found: Tensor = _step.run(
        STEP, (S,), (x, dt, A, B, C, D, dt_bias, z), (dt_min, dt_max), (state_indices, write_indices), before, out,
        steady, config, several=True,
    )
    return found


def _step_kernels(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor, z: Tensor | None, dt_min: float,
    dt_max: float, S: Tensor, S_before: Tensor | None, y: Tensor, state_indices: Tensor | None,
    write_indices: Tensor | None, steady: bool, config: StepConfig,
) -> None:
    """Launch the kernels of `steps` on checked tensors: the states, outputs and kept states are written in place."""
    size_b, size_h, size_p, size_n = x.shape[0], x.shape[2], x.shape[3], B.shape[3]
    tile_p = _step.tile(config.tile_p, size_p)
    whole = size_p % tile_p == 0 and size_n == _step.columns(size_n)
    stream = _rt.stream(x)
    _rt.launch(
        stream,
        _rt.hinted(token_step, config.occupancy, config.warps),
        (size_b * size_h, _rt.ceil_div(size_p, tile_p)),
        (
            x, dt, A, B, C, D, dt_bias, _rt.given(z, x), y, S, _rt.given(S_before, S), _rt.given(state_indices, x),
            _rt.given(write_indices, x), dt_min, dt_max, tile_p, _step.columns(size_n), whole,
            state_indices is not None, steady, S_before is not None, z is not None,
        ),
        early=True,
    )


@_rt.without_autocast
def _portable_step(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor, z: Tensor | None,
    dt_min: Tensor, dt_max: Tensor, S: Tensor, size: dict[str, int],
) -> tuple[Tensor]:
    """One token in plain torch, for any device: the states are moved in place, in the dtype that they have."""
    dtype = S.dtype
    out_dtype = x.dtype
    x, dt, A, D, dt_bias = (v.to(dtype) for v in (x, dt, A, D, dt_bias))
    B = _rt.per_head(B, 1, size["h"]).to(dtype)
    C = _rt.per_head(C, 1, size["h"]).to(dtype)
    if z is not None:
        z = z.to(dtype)
    # mamba2.ssd:18  step = clamp(softplus(dt + dt_bias), dt_min, dt_max)
    step = _rt.minimum(_rt.maximum(_rt.softplus(dt + dt_bias[None, :]), dt_min), dt_max)  # [B, H]
    decay = torch.exp2(_rt.minimum(_rt.maximum(A[None, :] * step * LOG2E, -128.0), 0.0))  # [B, H]
    S.mul_(decay[:, :, None, None])
    S.addcmul_((step[:, :, None] * x)[:, :, :, None], B[:, :, None, :])
    read_S = torch.einsum("bhpn,bhn->bhp", S, C)  # [B, H, P]
    # mamba2.ssd:24  y = S[t] . C + D * x
    y_now = read_S + D[None, :, :] * x  # [B, H, P]
    if z is not None:
        # mamba2.ssd:25  when z: y = y * silu(z)
        y_now = y_now * torch.nn.functional.silu(z)  # [B, H, P]
    return (y_now.to(out_dtype),)


STEP = _step.Step(LAYER, StepConfig(), _step_kernels, _portable_step)
"""What `step` and `steps` are made of."""


VARIANT = "plan=segmented swap=none weighted=row persistent=no layout_x=b,t,h,p internal_step=b,h,t"
SPEC_DIGEST = "eafb29fc035d5ce53c83a02b255cfaf238a181d66bbc929d18afa7c9e2fe2320"
"""The knobs that this text was emitted with, and the SHA-256 of the spec's text; emitted by ssdgen 0.1.0."""
