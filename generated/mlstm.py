"""mLSTM with sigmoid gates (Beck et al. 2024, arXiv 2405.04517; Beck et al. 2025, arXiv 2503.14376).

The forward pass of

    C[t] = forget * C[t-1] + write * v * k
    N[t] = forget * N[t-1] + write * k

emitted by ssdgen, as the jump formula over chunks of L tokens:

    decay[i] = logsigmoid(f) * LOG2E    log2, one a token and head
    s[i] = decay[0] + ... + decay[i]

    C_end = 2^s[L-1] C
      + sum_j 2^(s[L-1] - s[j]) write[j] v[j] (x) k[j]
    N_end = 2^s[L-1] N
      + sum_j 2^(s[L-1] - s[j]) write[j] k[j]
    score[i,j] = (q[i] . k[j]) 2^(s[i] - s[j]) write[j]    j <= i
    read_C[i] = 2^s[i] C . q[i]
      + sum_j score[i,j] v[j]
    read_N[i] = 2^s[i] N . q[i]
      + sum_j score[i,j]

    y = read_C / max(abs(read_N), 1)

Axes: b batch, t time, h head, p = 64 row channel, n = 64 column channel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cuda.tile as ct
import torch
from torch import Tensor

from . import _packed
from . import _runtime as _rt
from ._tiles import clamp, dot, load, log_sigmoid, sigmoid, store

LOG2E = math.log2(math.e)

LAYER = _rt.Layer(
    "mlstm",
    batch="b",
    time="t",
    head="h",
    inputs=(
        _rt.Input("q", ("b", "t", "h", "n"), (_rt.BF16, _rt.F16, _rt.F32), like="v"),
        _rt.Input("k", ("b", "t", "h", "n"), (_rt.BF16, _rt.F16, _rt.F32), like="v"),
        _rt.Input("v", ("b", "t", "h", "p"), (_rt.BF16, _rt.F16, _rt.F32)),
        _rt.Input("i", ("b", "t", "h"), (_rt.F32, _rt.BF16, _rt.F16)),
        _rt.Input("f", ("b", "t", "h"), (_rt.F32, _rt.BF16, _rt.F16)),
    ),
    scalars=(),
    groups={},
    states={"C": ("b", "h", "p", "n"), "N": ("b", "h", "n")},
    outputs={"y": ("b", "t", "h", "p")},
)


@dataclass(frozen=True)
class Config:
    """How the kernels run. Tiles and chunk are powers of two; each set of values compiles its own kernels."""

    chunk: int = 64  # tokens a chunk
    tile_h: int = 8  # tile of axis h
    tile_p: int = 64  # tile of axis p
    tile_n: int = 64  # tile of axis n
    state_tile_p: int = 64  # tile of axis p of a state that walks the chunks
    state_tile_n: int = 64  # tile of axis n of a state that walks the chunks
    scores: str = "bf16"  # operands of the `scores` product
    carried: str = "bf16"  # operands of the `carried` product
    intra: str = "tf32"  # operands of the `intra` product
    state: str = "bf16"  # operands of the `state` product
    latency_v: int = 3  # latency hint of v
    latency_k: int = 3  # latency hint of k
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
"""The default configuration for each dtype of `v`."""


@ct.kernel
def chunk_cumsum(
    i: ct.Array, f: ct.Array,
    write: ct.Array, decay_sum: ct.Array,
    size_n: float,
    CHUNK: ct.Constant[int], TILE_H: ct.Constant[int],
) -> None:
    """Per-token scalars of one chunk for a tile of heads, in float32; past the end of the sequence nothing decays
    and every weight is 0.
    """
    length = i.shape[1]
    chunks = ct.cdiv(length, CHUNK)
    batch, chunk = ct.bid(0) // chunks, ct.bid(0) % chunks
    head_tile = ct.bid(1)
    token = chunk * CHUNK + ct.arange(CHUNK, dtype=ct.int32)

    valid = token < length  # [L]: false past the end
    i_tile = load(  # [L, H]
        i, (batch, chunk, head_tile), (1, CHUNK, TILE_H)
    ).reshape((CHUNK, TILE_H)).astype(ct.float32)
    # mlstm.ssd:13  write = sigmoid(i) / sqrt(size(n))
    write_tile = sigmoid(i_tile) / ct.sqrt(size_n)  # [L, H]
    write_valid = ct.where(valid[:, None], write_tile, 0.0)  # [L, H]
    f_tile = load(  # [L, H]
        f, (batch, chunk, head_tile), (1, CHUNK, TILE_H)
    ).reshape((CHUNK, TILE_H)).astype(ct.float32)
    decay_log2 = ct.where(valid[:, None], clamp(log_sigmoid(f_tile) * LOG2E, -128.0, 0.0), 0.0)  # [L, H]: of one token
    decay_sum_tile = ct.cumsum(decay_log2, axis=0)  # [L, H]
    store(write, (batch, head_tile, chunk), (1, TILE_H, CHUNK), ct.transpose(write_valid))
    store(decay_sum, (batch, head_tile, chunk), (1, TILE_H, CHUNK), ct.transpose(decay_sum_tile))


@ct.kernel
def fwd_pass_state_C(
    k: ct.Array, v: ct.Array,
    C0: ct.Array,
    write: ct.Array, decay_sum: ct.Array, C_entry: ct.Array,
    C_final: ct.Array,
    LATENCY_V: ct.Constant[int], LATENCY_K: ct.Constant[int], STATE: ct.Constant[int], CHUNK: ct.Constant[int],
    TILE_P: ct.Constant[int], TILE_N: ct.Constant[int],
) -> None:
    """The state C that enters each chunk, and the final one: a block walks the chunks of one sequence and head with
    a tile of the state in registers.
    """
    heads = C0.shape[1]
    batch, head = ct.bid(0) // heads, ct.bid(0) % heads
    p_tile, n_tile = ct.bid(1), ct.bid(2)
    length = v.shape[1]

    C_tile = load(C0, (batch, head, p_tile, n_tile), (1, 1, TILE_P, TILE_N)).reshape((TILE_P, TILE_N))  # [P, N]
    for chunk in range(ct.cdiv(length, CHUNK)):
        store(C_entry, (batch, head, chunk, p_tile, n_tile), (1, 1, 1, TILE_P, TILE_N), C_tile)
        v_tile = load(  # [L, P]
            v, (batch, chunk, head, p_tile), (1, CHUNK, 1, TILE_P), latency=LATENCY_V
        ).reshape((CHUNK, TILE_P)).astype(ct.float32)
        k_tile = load(  # [L, N]
            k, (batch, chunk, head, n_tile), (1, CHUNK, 1, TILE_N), latency=LATENCY_K
        ).reshape((CHUNK, TILE_N))
        write_tile = load(write, (batch, head, chunk), (1, 1, CHUNK)).reshape((CHUNK,))  # [L]
        decay_sum_tile = load(decay_sum, (batch, head, chunk), (1, 1, CHUNK)).reshape((CHUNK,))  # [L]
        decay_end = ct.extract(decay_sum_tile, index=(CHUNK - 1,), shape=(1,)).reshape(())
        carry = (  # [L]: what is left of a token's input at the end of the chunk
            write_tile * ct.exp2(ct.minimum(decay_end - decay_sum_tile, 0.0))
        )
        C_tile = dot(ct.transpose(v_tile) * carry[None, :], k_tile, ct.exp2(decay_end) * C_tile, STATE)  # [P, N]
    store(C_final, (batch, head, p_tile, n_tile), (1, 1, TILE_P, TILE_N), C_tile)


@ct.kernel
def fwd_pass_state_N(
    k: ct.Array,
    N0: ct.Array,
    write: ct.Array, decay_sum: ct.Array, N_entry: ct.Array,
    N_final: ct.Array,
    LATENCY_K: ct.Constant[int], CHUNK: ct.Constant[int], TILE_N: ct.Constant[int],
) -> None:
    """The state N that enters each chunk, and the final one: a block walks the chunks of one sequence and head with
    a tile of the state in registers.
    """
    heads = N0.shape[1]
    batch, head = ct.bid(0) // heads, ct.bid(0) % heads
    n_tile = ct.bid(1)
    length = k.shape[1]

    N_tile = load(N0, (batch, head, n_tile), (1, 1, TILE_N)).reshape((TILE_N,))  # [N]
    for chunk in range(ct.cdiv(length, CHUNK)):
        store(N_entry, (batch, head, chunk, n_tile), (1, 1, 1, TILE_N), N_tile)
        k_tile = load(  # [L, N]
            k, (batch, chunk, head, n_tile), (1, CHUNK, 1, TILE_N), latency=LATENCY_K
        ).reshape((CHUNK, TILE_N)).astype(ct.float32)
        write_tile = load(write, (batch, head, chunk), (1, 1, CHUNK)).reshape((CHUNK,))  # [L]
        decay_sum_tile = load(decay_sum, (batch, head, chunk), (1, 1, CHUNK)).reshape((CHUNK,))  # [L]
        decay_end = ct.extract(decay_sum_tile, index=(CHUNK - 1,), shape=(1,)).reshape(())
        carry = (  # [L]: what is left of a token's input at the end of the chunk
            write_tile * ct.exp2(ct.minimum(decay_end - decay_sum_tile, 0.0))
        )
        N_tile = ct.exp2(decay_end) * N_tile + ct.sum(ct.transpose(k_tile) * carry[None, :], axis=1)  # [N]
    store(N_final, (batch, head, n_tile), (1, 1, TILE_N), N_tile)


@ct.kernel
def compute_out(
    q: ct.Array, k: ct.Array, v: ct.Array,
    C_entry: ct.Array, N_entry: ct.Array, decay_sum: ct.Array, write: ct.Array,
    y: ct.Array,
    LATENCY_K: ct.Constant[int], SCORES: ct.Constant[int], CARRIED: ct.Constant[int], LATENCY_V: ct.Constant[int],
    INTRA: ct.Constant[int], CHUNK: ct.Constant[int], TILE_P: ct.Constant[int], TILE_N: ct.Constant[int],
) -> None:
    """The outputs of one chunk: what tokens read from the state that entered it, what they read from each other,
    and the rest, fused; intermediates stay in registers.
    """
    heads, chunks = C_entry.shape[1], C_entry.shape[2]
    head, block = ct.bid(0) % heads, ct.bid(0) // heads
    p_tiles = ct.cdiv(y.shape[3], TILE_P)
    p_tile, block = block % p_tiles, block // p_tiles
    chunk, batch = block % chunks, block // chunks
    token = ct.arange(CHUNK, dtype=ct.int32)

    # Products over the column axis: of tokens with each other, and of tokens with the state that entered the chunk.
    scores = ct.zeros((CHUNK, CHUNK), dtype=ct.float32)  # [L, L]
    read_C_carried = ct.zeros((CHUNK, TILE_P), dtype=ct.float32)  # [L, P]
    read_N_carried = ct.zeros((CHUNK,), dtype=ct.float32)  # [L]
    for n_tile in range(ct.cdiv(q.shape[3], TILE_N)):
        q_tile = load(q, (batch, chunk, head, n_tile), (1, CHUNK, 1, TILE_N)).reshape((CHUNK, TILE_N))  # [L, N]
        k_tile = load(  # [L, N]
            k, (batch, chunk, head, n_tile), (1, CHUNK, 1, TILE_N), latency=LATENCY_K
        ).reshape((CHUNK, TILE_N))
        scores = dot(q_tile, ct.transpose(k_tile), scores, SCORES)  # [L, L]
        C_entry_tile = load(  # [P, N]
            C_entry, (batch, head, chunk, p_tile, n_tile), (1, 1, 1, TILE_P, TILE_N)
        ).reshape((TILE_P, TILE_N))
        read_C_carried = dot(q_tile, ct.transpose(C_entry_tile), read_C_carried, CARRIED)  # [L, P]
        N_entry_tile = load(  # [N]
            N_entry, (batch, head, chunk, n_tile), (1, 1, 1, TILE_N)
        ).reshape((TILE_N,)).astype(ct.float32)
        read_N_carried = read_N_carried + ct.sum(ct.astype(q_tile, ct.float32) * N_entry_tile[None, :], axis=1)  # [L]

    # What each token reads: the carried state, decayed, and the tokens of the chunk up to it.
    decay_sum_tile = load(decay_sum, (batch, head, chunk), (1, 1, CHUNK)).reshape((CHUNK,))  # [L]
    write_tile = load(write, (batch, head, chunk), (1, 1, CHUNK)).reshape((CHUNK,))  # [L]
    causal = token[:, None] >= token[None, :]  # [L, L]
    decay_left = ct.exp2(  # [L, L]: what is left of token j at token i
        ct.minimum(decay_sum_tile[:, None] - decay_sum_tile[None, :], 0.0)
    )
    score = ct.where(causal, scores * decay_left * write_tile[None, :], 0.0)  # [L, L]
    v_tile = load(  # [L, P]
        v, (batch, chunk, head, p_tile), (1, CHUNK, 1, TILE_P), latency=LATENCY_V
    ).reshape((CHUNK, TILE_P))
    read_C = dot(score, v_tile, read_C_carried * ct.exp2(decay_sum_tile)[:, None], INTRA)  # [L, P]
    read_N = read_N_carried * ct.exp2(decay_sum_tile) + ct.sum(score, axis=1)  # [L]

    # mlstm.ssd:22  y = (C[t] . q) / max(abs(N[t] . q), 1)
    y_tile = read_C / ct.maximum(ct.abs(read_N), 1.0)[:, None]  # [L, P]
    store(y, (batch, chunk, head, p_tile), (1, CHUNK, 1, TILE_P), y_tile)


def forward(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor,
    *,
    C0: Tensor | None = None, N0: Tensor | None = None, cu_seqlens: Tensor | None = None, seq_idx: Tensor | None = None,
    mask: Tensor | None = None, config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """mLSTM with sigmoid gates (Beck et al. 2024, arXiv 2405.04517; Beck et al. 2025, arXiv 2503.14376).

    Returns y[b t h p], the final state C[b h p n], the final state N[b h n].

    q: [b t h n], the dtype of v
    k: [b t h n], the dtype of v
    v: [b t h p], bfloat16 or float16 or float32
    i: [b t h], float32 or bfloat16 or float16
    f: [b t h], float32 or bfloat16 or float16
    C0: [b h p n], float32: the state before the first token, zero if absent
    N0: [b h n], float32: the state before the first token, zero if absent
    cu_seqlens: int32 or int64: where each of several sequences in a batch of 1 begins, and the last ends; each
    has its own initial and final state
    seq_idx: [b t], int32 or int64: a sequence begins wherever it changes
    mask: [b t], bool: tokens where it is false leave states as they are, and their outputs are 0

    On the CPU also in float64, and differentiable. Raises TypeError or ValueError, which name the tensor, for a
    missing input, a dtype, rank, size, device or range.
    """
    size, sequences = _packed.check(
        LAYER,
        {"q": q, "k": k, "v": v, "i": i, "f": f},
        {"C": C0, "N": N0},
        {},
        (cu_seqlens, seq_idx, mask),
    )
    if C0 is None:
        C0 = _packed.zeros(LAYER, "C", size, v)
    if N0 is None:
        N0 = _packed.zeros(LAYER, "N", size, v)
    config = _rt.chosen(LAYER, config, CONFIGS, v.dtype)
    if not _rt.runs_kernels(v):
        return _packed.each(LAYER, _portable, sequences, (q, k, v, i, f), (), (C0, N0), size, config.chunk)

    _packed.refuse(LAYER, sequences)
    tensors = (q, k, v, i, f, C0, N0)
    _rt.check_kernels(LAYER.name, tensors)
    y = torch.empty((size["b"], size["t"], size["h"], size["p"]), dtype=v.dtype, device=v.device)
    C_final = torch.empty_like(C0) if size["t"] else C0.clone()
    N_final = torch.empty_like(N0) if size["t"] else N0.clone()
    for rows, now in _rt.pieces(LAYER, size, config.chunk, tensors):
        first = now.start == 0
        _three_kernel(
            q[rows, now], k[rows, now], v[rows, now], i[rows, now], f[rows, now], C0[rows] if first else C_final[rows],
            N0[rows] if first else N_final[rows], y[rows, now], C_final[rows], N_final[rows], config,
        )
    return y, C_final, N_final


def init_state(
    batch: int, heads: int, *, p: int = 64, n: int = 64, device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Zero states: C[b h p n], N[b h n]."""
    return (
        torch.zeros((batch, heads, p, n), dtype=dtype, device=device),
        torch.zeros((batch, heads, n), dtype=dtype, device=device),
    )


def _three_kernel(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, C0: Tensor, N0: Tensor, y: Tensor, C_final: Tensor,
    N_final: Tensor, config: Config,
) -> None:
    """Launch the kernels on tensors that 32-bit indices reach; outputs and final states are written in place."""
    size_b, size_h, size_p, size_n, size_t = q.shape[0], q.shape[2], v.shape[3], q.shape[3], q.shape[1]
    q, k, v, i, f = (_rt.indexable(v) for v in (q, k, v, i, f))
    chunks = _rt.ceil_div(size_t, config.chunk)
    # write[b h t]: weight write
    write = torch.empty((size_b, size_h, chunks * config.chunk), dtype=torch.float32, device=v.device)
    # decay_sum[b h t]: running sum of logsigmoid(f) * LOG2E within a chunk
    decay_sum = torch.empty((size_b, size_h, chunks * config.chunk), dtype=torch.float32, device=v.device)
    # C_entry[b h chunk p n]: the state C that enters each chunk
    C_entry = torch.empty((size_b, size_h, chunks, size_p, size_n), dtype=_rt.stored(config.carried), device=v.device)
    # N_entry[b h chunk n]: the state N that enters each chunk
    N_entry = torch.empty((size_b, size_h, chunks, size_n), dtype=torch.float32, device=v.device)
    _rt.launch(
        _rt.hinted(chunk_cumsum, config.occupancy_chunk_cumsum),
        (size_b * chunks, _rt.ceil_div(size_h, config.tile_h)),
        (i, f, write, decay_sum, float(size_n), config.chunk, config.tile_h),
    )
    _rt.launch(
        _rt.hinted(fwd_pass_state_C, config.occupancy_fwd_pass_state),
        (size_b * size_h, _rt.ceil_div(size_p, config.state_tile_p), _rt.ceil_div(size_n, config.state_tile_n)),
        (
            k, v, C0, write, decay_sum, C_entry, C_final, config.latency_v, config.latency_k,
            _rt.PRECISION[config.state], config.chunk, config.state_tile_p, config.state_tile_n,
        ),
    )
    _rt.launch(
        _rt.hinted(fwd_pass_state_N, config.occupancy_fwd_pass_state),
        (size_b * size_h, _rt.ceil_div(size_n, config.state_tile_n)),
        (k, N0, write, decay_sum, N_entry, N_final, config.latency_k, config.chunk, config.state_tile_n),
    )
    _rt.launch(
        _rt.hinted(compute_out, config.occupancy_compute_out),
        (size_b * chunks * _rt.ceil_div(size_p, config.tile_p) * size_h,),
        (
            q, k, v, C_entry, N_entry, decay_sum, write, y, config.latency_k, _rt.PRECISION[config.scores],
            _rt.PRECISION[config.carried], config.latency_v, _rt.PRECISION[config.intra], config.chunk, config.tile_p,
            config.tile_n,
        ),
    )


@_rt.without_autocast
def _portable(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, C: Tensor, N: Tensor, size: dict[str, int], chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same chunked form in plain torch, for any device: in float32, or float64 if an input is, and differentiable."""
    dtype = _rt.widest((q, k, v, i, f, C, N))
    out_dtype = v.dtype
    q, k, v, i, f = (v.to(dtype) for v in (q, k, v, i, f))
    C = C.to(dtype, copy=True)
    N = N.to(dtype, copy=True)
    size_n = torch.tensor(float(size["n"]), dtype=dtype, device=v.device)
    decay_log2 = _rt.minimum(_rt.maximum(torch.nn.functional.logsigmoid(f) * LOG2E, -128.0), 0.0)  # [B, L, H]
    # mlstm.ssd:13  write = sigmoid(i) / sqrt(size(n))
    write = torch.sigmoid(i) / torch.sqrt(size_n)  # [B, L, H]
    y_pieces = []
    for start in range(0, size["t"], chunk):
        now = slice(start, start + chunk)
        token = torch.arange(min(chunk, size["t"] - start), dtype=dtype, device=v.device)
        decay_log2_now = decay_log2[:, now]  # [B, L, H]
        decay_sum = torch.cumsum(decay_log2_now, 1)  # [B, L, H]
        decay_end = decay_sum[:, -1]  # [B, H]
        q_now = q[:, now]  # [B, L, H, N]
        k_now = k[:, now]  # [B, L, H, N]
        decay_left = torch.exp2(_rt.minimum(decay_sum[:, :, None, :] - decay_sum[:, None, :, :], 0.0))  # [B, L, L, H]
        score_product = torch.einsum("bthn,bshn->btsh", q_now, k_now)  # [B, L, L, H]
        write_now = write[:, now]  # [B, L, H]
        causal = token[:, None] >= token[None, :]  # [L, L]
        score = torch.where(  # [B, L, L, H]
            causal[None, :, :, None], score_product * decay_left * write_now[:, None, :, :], 0.0
        )
        read_C_carried = torch.einsum(  # [B, L, H, P]
            "bthn,bhpn->bthp", q_now * torch.exp2(decay_sum)[:, :, :, None], C
        )
        v_now = v[:, now]  # [B, L, H, P]
        read_C_within_score = torch.einsum("btsh,bshp->bthp", score, v_now)  # [B, L, H, P]
        read_C = read_C_carried + read_C_within_score  # [B, L, H, P]
        read_N_carried = torch.einsum("bthn,bhn->bth", q_now * torch.exp2(decay_sum)[:, :, :, None], N)  # [B, L, H]
        read_N = read_N_carried + (score.permute(0, 1, 3, 2)).sum(3)  # [B, L, H]
        # mlstm.ssd:22  y = (C[t] . q) / max(abs(N[t] . q), 1)
        y_now = read_C / _rt.maximum(torch.abs(read_N), 1.0)[:, :, :, None]  # [B, L, H, P]
        y_pieces.append(y_now)
        carry = write_now * torch.exp2(_rt.minimum(decay_end[:, None, :] - decay_sum, 0.0))  # [B, L, H]
        C_gained = torch.einsum("bthp,bthn->bhpn", v_now, carry[:, :, :, None] * k_now)  # [B, H, P, N]
        C = torch.exp2(decay_end)[:, :, None, None] * C + C_gained  # [B, H, P, N]
        carry = write_now * torch.exp2(_rt.minimum(decay_end[:, None, :] - decay_sum, 0.0))  # [B, L, H]
        N_gained = torch.einsum("bthn->bhn", carry[:, :, :, None] * k_now)  # [B, H, N]
        N = torch.exp2(decay_end)[:, :, None] * N + N_gained  # [B, H, N]
    y = _rt.joined(y_pieces, 1, (size["b"], size["t"], size["h"], size["p"]), v).to(out_dtype)
    return y, C, N


SPEC_DIGEST = "d0de21c5ac59a86aef6c1460f88973c763767cc7f6198bda21232038e872204e"
"""SHA-256 of the spec's text; emitted by ssdgen 0.1.0."""
