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

Axes: b batch, t time, h head, g group of h, p = 64 row channel, n = 128 column channel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cuda.tile as ct
import torch
from torch import Tensor

from . import _packed
from . import _runtime as _rt
from ._tiles import clamp, dot, load, silu, softplus, store

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
)


@dataclass(frozen=True)
class Config:
    """How the kernels run. Tiles and chunk are powers of two; each set of values compiles its own kernels."""

    chunk: int = 64  # tokens a chunk
    tile_h: int = 8  # tile of axis h
    tile_p: int = 64  # tile of axis p
    tile_n: int = 128  # tile of axis n
    state_tile_p: int = 64  # tile of axis p of a state that walks the chunks
    state_tile_n: int = 64  # tile of axis n of a state that walks the chunks
    scores: str = "bf16"  # operands of the `scores` product
    carried: str = "bf16"  # operands of the `carried` product
    intra: str = "tf32"  # operands of the `intra` product
    state: str = "bf16"  # operands of the `state` product
    latency_x: int = 5  # latency hint of x
    latency_B: int = 5  # latency hint of B
    latency_C: int = 4  # latency hint of C
    latency_S: int = 3  # latency hint of S
    occupancy_chunk_cumsum: int = 0  # blocks of chunk_cumsum a multiprocessor, 0 to let the compiler choose
    occupancy_fwd_pass_state: int = 2  # blocks of fwd_pass_state a multiprocessor, 0 to let the compiler choose
    occupancy_compute_out: int = 2  # blocks of compute_out a multiprocessor, 0 to let the compiler choose

    def __post_init__(self) -> None:
        _rt.check_config(LAYER, vars(self))


CONFIGS = {
    torch.bfloat16: Config(),
    torch.float16: Config(scores="tf32", carried="tf32", state="tf32"),
    torch.float32: Config(scores="tf32", carried="tf32", state="tf32"),
}
"""The default configuration for each dtype of `x`."""


@ct.kernel
def chunk_cumsum(
    dt: ct.Array, A: ct.Array, dt_bias: ct.Array,
    step: ct.Array, decay_sum: ct.Array,
    dt_min: float, dt_max: float,
    CHUNK: ct.Constant[int], TILE_H: ct.Constant[int],
) -> None:
    """Per-token scalars of one chunk for a tile of heads, in float32; past the end of the sequence nothing decays
    and every weight is 0.
    """
    length = dt.shape[1]
    chunks = ct.cdiv(length, CHUNK)
    batch, chunk = ct.bid(0) // chunks, ct.bid(0) % chunks
    head_tile = ct.bid(1)
    token = chunk * CHUNK + ct.arange(CHUNK, dtype=ct.int32)

    valid = token < length  # [L]: false past the end
    dt_tile = load(  # [L, H]
        dt, (batch, chunk, head_tile), (1, CHUNK, TILE_H)
    ).reshape((CHUNK, TILE_H)).astype(ct.float32)
    dt_bias_tile = load(dt_bias, (head_tile,), (TILE_H,)).astype(ct.float32)  # [H]
    # mamba2.ssd:18  step = clamp(softplus(dt + dt_bias), dt_min, dt_max)
    step_tile = clamp(softplus(dt_tile + dt_bias_tile[None, :]), dt_min, dt_max)  # [L, H]
    step_valid = ct.where(valid[:, None], step_tile, 0.0)  # [L, H]
    A_tile = load(A, (head_tile,), (TILE_H,)).astype(ct.float32)  # [H]
    decay_log2 = ct.where(  # [L, H]: of one token
        valid[:, None], clamp(A_tile[None, :] * step_tile * LOG2E, -128.0, 0.0), 0.0
    )
    decay_sum_tile = ct.cumsum(decay_log2, axis=0)  # [L, H]
    store(step, (batch, head_tile, chunk), (1, TILE_H, CHUNK), ct.transpose(step_valid))
    store(decay_sum, (batch, head_tile, chunk), (1, TILE_H, CHUNK), ct.transpose(decay_sum_tile))


@ct.kernel
def fwd_pass_state(
    x: ct.Array, B: ct.Array,
    S0: ct.Array,
    step: ct.Array, decay_sum: ct.Array, S_entry: ct.Array,
    S_final: ct.Array,
    LATENCY_X: ct.Constant[int], LATENCY_B: ct.Constant[int], STATE: ct.Constant[int], LATENCY_S: ct.Constant[int],
    CHUNK: ct.Constant[int], TILE_P: ct.Constant[int], TILE_N: ct.Constant[int],
) -> None:
    """The state S that enters each chunk, and the final one: a block walks the chunks of one sequence and head with
    a tile of the state in registers.
    """
    heads = S0.shape[1]
    batch, head = ct.bid(0) // heads, ct.bid(0) % heads
    p_tile, n_tile = ct.bid(1), ct.bid(2)
    length = x.shape[1]
    group_g = head // (heads // B.shape[2])

    S_tile = load(S0, (batch, head, p_tile, n_tile), (1, 1, TILE_P, TILE_N)).reshape((TILE_P, TILE_N))  # [P, N]
    for chunk in range(ct.cdiv(length, CHUNK)):
        store(S_entry, (batch, head, chunk, p_tile, n_tile), (1, 1, 1, TILE_P, TILE_N), S_tile, latency=LATENCY_S)
        x_tile = load(  # [L, P]
            x, (batch, chunk, head, p_tile), (1, CHUNK, 1, TILE_P), latency=LATENCY_X
        ).reshape((CHUNK, TILE_P)).astype(ct.float32)
        B_tile = load(  # [L, N]
            B, (batch, chunk, group_g, n_tile), (1, CHUNK, 1, TILE_N), latency=LATENCY_B
        ).reshape((CHUNK, TILE_N))
        step_tile = load(step, (batch, head, chunk), (1, 1, CHUNK)).reshape((CHUNK,))  # [L]
        decay_sum_tile = load(decay_sum, (batch, head, chunk), (1, 1, CHUNK)).reshape((CHUNK,))  # [L]
        decay_end = ct.extract(decay_sum_tile, index=(CHUNK - 1,), shape=(1,)).reshape(())
        carry = (  # [L]: what is left of a token's input at the end of the chunk
            step_tile * ct.exp2(ct.minimum(decay_end - decay_sum_tile, 0.0))
        )
        S_tile = dot(ct.transpose(x_tile) * carry[None, :], B_tile, ct.exp2(decay_end) * S_tile, STATE)  # [P, N]
    store(S_final, (batch, head, p_tile, n_tile), (1, 1, TILE_P, TILE_N), S_tile)


@ct.kernel
def compute_out(
    x: ct.Array, B: ct.Array, C: ct.Array, D: ct.Array,
    S_entry: ct.Array, decay_sum: ct.Array, step: ct.Array,
    y: ct.Array,
    LATENCY_C: ct.Constant[int], LATENCY_B: ct.Constant[int], SCORES: ct.Constant[int], LATENCY_S: ct.Constant[int],
    CARRIED: ct.Constant[int], LATENCY_X: ct.Constant[int], INTRA: ct.Constant[int], CHUNK: ct.Constant[int],
    TILE_P: ct.Constant[int], TILE_N: ct.Constant[int],
) -> None:
    """The outputs of one chunk: what tokens read from the state that entered it, what they read from each other,
    and the rest, fused; intermediates stay in registers.
    """
    heads, chunks = S_entry.shape[1], S_entry.shape[2]
    head, block = ct.bid(0) % heads, ct.bid(0) // heads
    p_tiles = ct.cdiv(y.shape[3], TILE_P)
    p_tile, block = block % p_tiles, block // p_tiles
    chunk, batch = block % chunks, block // chunks
    group_g = head // (heads // C.shape[2])
    token = ct.arange(CHUNK, dtype=ct.int32)

    # Products over the column axis: of tokens with each other, and of tokens with the state that entered the chunk.
    scores = ct.zeros((CHUNK, CHUNK), dtype=ct.float32)  # [L, L]
    read_S_carried = ct.zeros((TILE_P, CHUNK), dtype=ct.float32)  # [P, L]
    for n_tile in range(ct.cdiv(C.shape[3], TILE_N)):
        C_tile = load(  # [L, N]
            C, (batch, chunk, group_g, n_tile), (1, CHUNK, 1, TILE_N), latency=LATENCY_C
        ).reshape((CHUNK, TILE_N))
        B_tile = load(  # [L, N]
            B, (batch, chunk, group_g, n_tile), (1, CHUNK, 1, TILE_N), latency=LATENCY_B
        ).reshape((CHUNK, TILE_N))
        scores = dot(C_tile, ct.transpose(B_tile), scores, SCORES)  # [L, L]
        S_entry_tile = load(  # [P, N]
            S_entry, (batch, head, chunk, p_tile, n_tile), (1, 1, 1, TILE_P, TILE_N), latency=LATENCY_S
        ).reshape((TILE_P, TILE_N))
        read_S_carried = dot(S_entry_tile, ct.transpose(C_tile), read_S_carried, CARRIED)  # [P, L]

    # What each token reads: the carried state, decayed, and the tokens of the chunk up to it.
    decay_sum_tile = load(decay_sum, (batch, head, chunk), (1, 1, CHUNK)).reshape((CHUNK,))  # [L]
    step_tile = load(step, (batch, head, chunk), (1, 1, CHUNK)).reshape((CHUNK,))  # [L]
    causal = token[:, None] >= token[None, :]  # [L, L]
    decay_left = ct.exp2(  # [L, L]: what is left of token j at token i
        ct.minimum(decay_sum_tile[:, None] - decay_sum_tile[None, :], 0.0)
    )
    score = ct.where(causal, scores * decay_left * step_tile[None, :], 0.0)  # [L, L]
    x_tile = load(  # [L, P]
        x, (batch, chunk, head, p_tile), (1, CHUNK, 1, TILE_P), latency=LATENCY_X
    ).reshape((CHUNK, TILE_P))
    read_S = dot(  # [P, L]
        ct.transpose(x_tile), ct.transpose(score), read_S_carried * ct.exp2(decay_sum_tile)[None, :], INTRA
    )

    D_tile = load(D, (head, p_tile), (1, TILE_P)).reshape((TILE_P,)).astype(ct.float32)  # [P]
    # mamba2.ssd:24  y = S[t] . C + D * x
    y_tile = read_S + D_tile[:, None] * ct.astype(ct.transpose(x_tile), ct.float32)  # [P, L]
    store(y, (batch, chunk, head, p_tile), (1, CHUNK, 1, TILE_P), ct.transpose(y_tile))


@ct.kernel
def compute_out_z(
    x: ct.Array, B: ct.Array, C: ct.Array, D: ct.Array, z: ct.Array,
    S_entry: ct.Array, decay_sum: ct.Array, step: ct.Array,
    y: ct.Array,
    LATENCY_C: ct.Constant[int], LATENCY_B: ct.Constant[int], SCORES: ct.Constant[int], LATENCY_S: ct.Constant[int],
    CARRIED: ct.Constant[int], LATENCY_X: ct.Constant[int], INTRA: ct.Constant[int], CHUNK: ct.Constant[int],
    TILE_P: ct.Constant[int], TILE_N: ct.Constant[int],
) -> None:
    """The outputs of one chunk: what tokens read from the state that entered it, what they read from each other,
    and the rest, fused; intermediates stay in registers.
    """
    heads, chunks = S_entry.shape[1], S_entry.shape[2]
    head, block = ct.bid(0) % heads, ct.bid(0) // heads
    p_tiles = ct.cdiv(y.shape[3], TILE_P)
    p_tile, block = block % p_tiles, block // p_tiles
    chunk, batch = block % chunks, block // chunks
    group_g = head // (heads // C.shape[2])
    token = ct.arange(CHUNK, dtype=ct.int32)

    # Products over the column axis: of tokens with each other, and of tokens with the state that entered the chunk.
    scores = ct.zeros((CHUNK, CHUNK), dtype=ct.float32)  # [L, L]
    read_S_carried = ct.zeros((TILE_P, CHUNK), dtype=ct.float32)  # [P, L]
    for n_tile in range(ct.cdiv(C.shape[3], TILE_N)):
        C_tile = load(  # [L, N]
            C, (batch, chunk, group_g, n_tile), (1, CHUNK, 1, TILE_N), latency=LATENCY_C
        ).reshape((CHUNK, TILE_N))
        B_tile = load(  # [L, N]
            B, (batch, chunk, group_g, n_tile), (1, CHUNK, 1, TILE_N), latency=LATENCY_B
        ).reshape((CHUNK, TILE_N))
        scores = dot(C_tile, ct.transpose(B_tile), scores, SCORES)  # [L, L]
        S_entry_tile = load(  # [P, N]
            S_entry, (batch, head, chunk, p_tile, n_tile), (1, 1, 1, TILE_P, TILE_N), latency=LATENCY_S
        ).reshape((TILE_P, TILE_N))
        read_S_carried = dot(S_entry_tile, ct.transpose(C_tile), read_S_carried, CARRIED)  # [P, L]

    # What each token reads: the carried state, decayed, and the tokens of the chunk up to it.
    decay_sum_tile = load(decay_sum, (batch, head, chunk), (1, 1, CHUNK)).reshape((CHUNK,))  # [L]
    step_tile = load(step, (batch, head, chunk), (1, 1, CHUNK)).reshape((CHUNK,))  # [L]
    causal = token[:, None] >= token[None, :]  # [L, L]
    decay_left = ct.exp2(  # [L, L]: what is left of token j at token i
        ct.minimum(decay_sum_tile[:, None] - decay_sum_tile[None, :], 0.0)
    )
    score = ct.where(causal, scores * decay_left * step_tile[None, :], 0.0)  # [L, L]
    x_tile = load(  # [L, P]
        x, (batch, chunk, head, p_tile), (1, CHUNK, 1, TILE_P), latency=LATENCY_X
    ).reshape((CHUNK, TILE_P))
    read_S = dot(  # [P, L]
        ct.transpose(x_tile), ct.transpose(score), read_S_carried * ct.exp2(decay_sum_tile)[None, :], INTRA
    )

    D_tile = load(D, (head, p_tile), (1, TILE_P)).reshape((TILE_P,)).astype(ct.float32)  # [P]
    # mamba2.ssd:24  y = S[t] . C + D * x
    y_tile = read_S + D_tile[:, None] * ct.astype(ct.transpose(x_tile), ct.float32)  # [P, L]
    z_tile = load(  # [L, P]
        z, (batch, chunk, head, p_tile), (1, CHUNK, 1, TILE_P)
    ).reshape((CHUNK, TILE_P)).astype(ct.float32)
    # mamba2.ssd:25  when z: y = y * silu(z)
    y_tile = y_tile * silu(ct.transpose(z_tile))  # [P, L]
    store(y, (batch, chunk, head, p_tile), (1, CHUNK, 1, TILE_P), ct.transpose(y_tile))


def forward(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    *,
    D: Tensor | None = None, dt_bias: Tensor | None = None, z: Tensor | None = None, dt_min: float = 0.0,
    dt_max: float = math.inf, S0: Tensor | None = None, cu_seqlens: Tensor | None = None, seq_idx: Tensor | None = None,
    mask: Tensor | None = None, config: Config | None = None,
) -> tuple[Tensor, Tensor]:
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
    cu_seqlens: int32 or int64: where each of several sequences in a batch of 1 begins, and the last ends; each
    has its own initial and final state
    seq_idx: [b t], int32 or int64: a sequence begins wherever it changes
    mask: [b t], bool: tokens where it is false leave states as they are, and their outputs are 0

    On the CPU also in float64, and differentiable. Raises TypeError or ValueError, which name the tensor, for a
    missing input, a dtype, rank, size, device or range.
    """
    size, sequences = _packed.check(
        LAYER,
        {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "dt_bias": dt_bias, "z": z},
        {"S": S0},
        {"dt_min": dt_min, "dt_max": dt_max},
        (cu_seqlens, seq_idx, mask),
    )
    D = _rt.expand(LAYER.inputs[5], D, size, x)
    dt_bias = _rt.expand(LAYER.inputs[6], dt_bias, size, x)
    if S0 is None:
        S0 = _packed.zeros(LAYER, "S", size, x)
    config = _rt.chosen(LAYER, config, CONFIGS, x.dtype)
    if not _rt.runs_kernels(x):
        return _packed.each(
            LAYER, _portable, sequences, (x, dt, A, B, C, D, dt_bias, z),
            (_rt.scalar(dt_min, x), _rt.scalar(dt_max, x)), (S0,), size, config.chunk,
        )

    _packed.refuse(LAYER, sequences)
    tensors = (x, dt, A, B, C, D, dt_bias, z, S0)
    _rt.check_kernels(LAYER.name, tensors)
    y = torch.empty((size["b"], size["t"], size["h"], size["p"]), dtype=x.dtype, device=x.device)
    S_final = torch.empty_like(S0) if size["t"] else S0.clone()
    for rows, now in _rt.pieces(LAYER, size, config.chunk, tensors):
        first = now.start == 0
        _three_kernel(
            x[rows, now], dt[rows, now], A, B[rows, now], C[rows, now], D, dt_bias, _rt.part(z, rows, now),
            float(dt_min), float(dt_max), S0[rows] if first else S_final[rows], y[rows, now], S_final[rows], config,
        )
    return y, S_final


def init_state(
    batch: int, heads: int, *, p: int = 64, n: int = 128, device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Zero states: S[b h p n]."""
    return torch.zeros((batch, heads, p, n), dtype=dtype, device=device)


def _three_kernel(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor, z: Tensor | None, dt_min: float,
    dt_max: float, S0: Tensor, y: Tensor, S_final: Tensor, config: Config,
) -> None:
    """Launch the kernels on tensors that 32-bit indices reach; outputs and final states are written in place."""
    size_b, size_h, size_p, size_n, size_t = x.shape[0], x.shape[2], x.shape[3], B.shape[3], x.shape[1]
    x, dt, B, C = (_rt.indexable(v) for v in (x, dt, B, C))
    chunks = _rt.ceil_div(size_t, config.chunk)
    # step[b h t]: weight step
    step = torch.empty((size_b, size_h, chunks * config.chunk), dtype=torch.float32, device=x.device)
    # decay_sum[b h t]: running sum of A * step * LOG2E within a chunk
    decay_sum = torch.empty((size_b, size_h, chunks * config.chunk), dtype=torch.float32, device=x.device)
    # S_entry[b h chunk p n]: the state S that enters each chunk
    S_entry = torch.empty((size_b, size_h, chunks, size_p, size_n), dtype=_rt.stored(config.carried), device=x.device)
    _rt.launch(
        _rt.hinted(chunk_cumsum, config.occupancy_chunk_cumsum),
        (size_b * chunks, _rt.ceil_div(size_h, config.tile_h)),
        (dt, A, dt_bias, step, decay_sum, dt_min, dt_max, config.chunk, config.tile_h),
    )
    _rt.launch(
        _rt.hinted(fwd_pass_state, config.occupancy_fwd_pass_state),
        (size_b * size_h, _rt.ceil_div(size_p, config.state_tile_p), _rt.ceil_div(size_n, config.state_tile_n)),
        (
            x, B, S0, step, decay_sum, S_entry, S_final, config.latency_x, config.latency_B,
            _rt.PRECISION[config.state], config.latency_S, config.chunk, config.state_tile_p, config.state_tile_n,
        ),
    )
    if z is None:
        _rt.launch(
            _rt.hinted(compute_out, config.occupancy_compute_out),
            (size_b * chunks * _rt.ceil_div(size_p, config.tile_p) * size_h,),
            (
                x, B, C, D, S_entry, decay_sum, step, y, config.latency_C, config.latency_B,
                _rt.PRECISION[config.scores], config.latency_S, _rt.PRECISION[config.carried], config.latency_x,
                _rt.PRECISION[config.intra], config.chunk, config.tile_p, config.tile_n,
            ),
        )
    else:
        _rt.launch(
            _rt.hinted(compute_out_z, config.occupancy_compute_out),
            (size_b * chunks * _rt.ceil_div(size_p, config.tile_p) * size_h,),
            (
                x, B, C, D, _rt.indexable(z), S_entry, decay_sum, step, y, config.latency_C, config.latency_B,
                _rt.PRECISION[config.scores], config.latency_S, _rt.PRECISION[config.carried], config.latency_x,
                _rt.PRECISION[config.intra], config.chunk, config.tile_p, config.tile_n,
            ),
        )


@_rt.without_autocast
def _portable(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor, z: Tensor | None,
    dt_min: Tensor, dt_max: Tensor, S: Tensor, size: dict[str, int], chunk: int,
) -> tuple[Tensor, Tensor]:
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
    for start in range(0, size["t"], chunk):
        now = slice(start, start + chunk)
        token = torch.arange(min(chunk, size["t"] - start), dtype=dtype, device=x.device)
        decay_log2_now = decay_log2[:, now]  # [B, L, H]
        decay_sum = torch.cumsum(decay_log2_now, 1)  # [B, L, H]
        decay_end = decay_sum[:, -1]  # [B, H]
        C_now = C[:, now]  # [B, L, H, N]
        B_now = B[:, now]  # [B, L, H, N]
        decay_left = torch.exp2(_rt.minimum(decay_sum[:, :, None, :] - decay_sum[:, None, :, :], 0.0))  # [B, L, L, H]
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
    y = _rt.joined(y_pieces, 1, (size["b"], size["t"], size["h"], size["p"]), x).to(out_dtype)
    return y, S


SPEC_DIGEST = "9aeef42fdc55a30131a798d071565864367904c6045812ba66f05201118fd97e"
"""SHA-256 of the spec's text; emitted by ssdgen 0.1.0."""
