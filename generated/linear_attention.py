"""Linear attention without decay (Katharopoulos et al. 2020, arXiv 2006.16236).

The forward pass of

    S[t] = S[t-1] + v * k

emitted by ssdgen, as the jump formula over chunks of L tokens:

    S_end = S
      + sum_j v[j] (x) k[j]
    score[i,j] = (q[i] . k[j])    j <= i
    read_S[i] = S . q[i]
      + sum_j score[i,j] v[j]

    y = read_S / sqrt(size(n))

    one token:
    S = S + v (x) k
    read_S = S . q

Axes: b batch, t time, h head, p = 64 row channel, n = 64 column channel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cuda.tile as ct
import torch
from torch import Tensor

from . import _blocks, _cut, _operator, _packed, _step, _tuned
from . import _runtime as _rt
from ._direct import load_direct, slot_at, store_direct
from ._tiles import await_previous, dot, load, segment_at, store

LOG2E = math.log2(math.e)

LAYER = _rt.Layer(
    "linear_attention",
    batch="b",
    time="t",
    head="h",
    inputs=(
        _rt.Input("q", ("b", "t", "h", "n"), (_rt.BF16, _rt.F16, _rt.F32), like="v"),
        _rt.Input("k", ("b", "t", "h", "n"), (_rt.BF16, _rt.F16, _rt.F32), like="v"),
        _rt.Input("v", ("b", "t", "h", "p"), (_rt.BF16, _rt.F16, _rt.F32)),
    ),
    scalars=(),
    groups={},
    states={"S": ("b", "h", "p", "n")},
    outputs={"y": ("b", "t", "h", "p")},
    dtypes={"y": "v"},
)


@dataclass(frozen=True)
class Config:
    """How the kernels run. Tiles and chunk are powers of two; each set of values compiles its own kernels."""

    chunk: int = 64  # tokens a chunk
    tile_p: int = 64  # tile of axis p
    state_tile_p: int = 64  # tile of axis p of a state that walks the chunks
    state_tile_n: int = 64  # tile of axis n of a state that walks the chunks
    scores: str = "bf16"  # operands of the `scores` product
    carried: str = "bf16"  # operands of the `carried` product
    intra: str = "bf16"  # operands of the `intra` product
    state: str = "bf16"  # operands of the `state` product
    latency_v: int = 3  # latency hint of v
    latency_k: int = 3  # latency hint of k
    segments: int = 0  # pieces of a sequence that are walked at once, 0 to let the size of the GPU choose
    occupancy_fwd_pass_state: int = 2  # blocks of segment_states a multiprocessor, 0 to let the compiler choose
    occupancy_compute_out: int = 2  # blocks of walk_out a multiprocessor, 0 to let the compiler choose
    warps_fwd_pass_state: int = 0  # worker warps of a block of segment_states, 0 to let the compiler choose
    warps_compute_out: int = 0  # worker warps of a block of walk_out, 0 to let the compiler choose

    def __post_init__(self) -> None:
        _rt.check_config(LAYER, vars(self))


CONFIGS = {
    torch.bfloat16: Config(),
    torch.float16: Config(scores="tf32", carried="tf32", intra="tf32", state="tf32"),
    torch.float32: Config(scores="tf32", carried="tf32", intra="tf32", state="tf32"),
}
"""The default configuration for each dtype of `v`."""


@dataclass(frozen=True)
class StepConfig:
    """How kernels of steps run; a call without one takes what fits its states and the GPU. Tiles are powers of two."""

    tile_p: int = 64  # tile of axis p, at most
    occupancy: int = 2  # blocks a multiprocessor, 0 to let the compiler choose
    warps: int = 8  # worker warps of a block, 0 to let the compiler choose

    def __post_init__(self) -> None:
        _step.check_config(LAYER, vars(self))


@ct.kernel
def segment_states(
    k: ct.Array, v: ct.Array,
    S_part: ct.Array,
    segment_table: ct.Array,
    per_segment: int,
    STATE: ct.Constant[int], CHUNK: ct.Constant[int], TILE_P: ct.Constant[int], TILE_N: ct.Constant[int],
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
    n_tiles = ct.cdiv(S_part.shape[3], TILE_N)
    p_tile, n_tile = ct.bid(2) // n_tiles, ct.bid(2) % n_tiles
    begin = segment * per_segment

    S_tile = ct.zeros((TILE_P, TILE_N), dtype=ct.float32)  # [P, N]
    for chunk in range(begin, ct.minimum(ct.cdiv(length, CHUNK), (segment + 1) * per_segment)):
        v_tile = load(v, (batch, chunk, head, p_tile), (1, CHUNK, 1, TILE_P))  # [L, P]
        k_tile = load(k, (batch, chunk, head, n_tile), (1, CHUNK, 1, TILE_N))  # [L, N]
        S_tile = dot(ct.transpose(v_tile), k_tile, S_tile, STATE)  # [P, N]
    store(S_part, (lane, head, origin + segment, n_tile, p_tile), (1, 1, 1, TILE_N, TILE_P), ct.transpose(S_tile))


@ct.kernel
def walk_out(
    q: ct.Array, k: ct.Array, v: ct.Array,
    S0: ct.Array,
    S_part: ct.Array,
    segment_table: ct.Array,
    y: ct.Array,
    S_final: ct.Array,
    S_states: ct.Array,
    size_n: float, every: int, per_segment: int,
    LATENCY_K: ct.Constant[int], SCORES: ct.Constant[int], CARRIED: ct.Constant[int], LATENCY_V: ct.Constant[int],
    INTRA: ct.Constant[int], STATE: ct.Constant[int], CHUNK: ct.Constant[int], TILE_N: ct.Constant[int],
    TILE_P: ct.Constant[int],
    PACKED: ct.Constant[bool], WITH_S0: ct.Constant[bool], KEPT: ct.Constant[bool], ENDS: ct.Constant[bool],
) -> None:
    """The outputs of a segment: a block walks its chunks with the states in registers."""
    await_previous()
    heads = S_final.shape[1]
    batch, head = ct.bid(0) // heads, ct.bid(0) % heads
    sequence, lane, first = batch, batch, 0
    segment, origin = ct.bid(1), 0
    last = segment == ct.num_blocks(1) - 1
    if PACKED:
        row = batch
        sequence, batch, start, stop, _, segment, last = segment_at(segment_table, batch)
        lane, origin = 0, row - segment
        if KEPT or ENDS:
            first = start // every  # rounded down: see `_blocks`
        q, k = q.slice(1, start, stop), k.slice(1, start, stop)
        v, y = v.slice(1, start, stop), y.slice(1, start, stop)
    length = q.shape[1]
    p_tile = ct.bid(2)
    token = ct.arange(CHUNK, dtype=ct.int32)

    causal = token[:, None] >= token[None, :]  # [L, L]
    if WITH_S0:
        S_tile = load(S0, (sequence, head, 0, p_tile), (1, 1, TILE_N, TILE_P), order=(0, 1, 3, 2))  # [N, P]
    else:
        S_tile = ct.zeros((TILE_N, TILE_P), dtype=ct.float32)  # [N, P]
    for before in range(segment):
        S_part_tile = load(S_part, (lane, head, origin + before, 0, p_tile), (1, 1, 1, TILE_N, TILE_P))  # [N, P]
        S_tile = S_tile + S_part_tile  # [N, P]
    for chunk in range(segment * per_segment, ct.minimum(ct.cdiv(length, CHUNK), (segment + 1) * per_segment)):
        # Products over the column axis: of tokens with each other, and of tokens with the state that enters the chunk.
        scores = ct.zeros((CHUNK, CHUNK), dtype=ct.float32)  # [L, L]
        read_S_carried = ct.zeros((CHUNK, TILE_P), dtype=ct.float32)  # [L, P]
        q_tile = load(q, (batch, chunk, head, 0), (1, CHUNK, 1, TILE_N))  # [L, N]
        k_tile = load(k, (batch, chunk, head, 0), (1, CHUNK, 1, TILE_N), latency=LATENCY_K)  # [L, N]
        scores = dot(q_tile, ct.transpose(k_tile), scores, SCORES)  # [L, L]
        read_S_carried = dot(q_tile, S_tile, read_S_carried, CARRIED)  # [L, P]

        # What each token reads: the carried state, decayed, and the tokens of the chunk up to it.
        score = ct.where(causal, scores, 0.0)  # [L, L]
        v_tile = load(v, (batch, chunk, head, p_tile), (1, CHUNK, 1, TILE_P), latency=LATENCY_V)  # [L, P]
        read_S = dot(score, v_tile, read_S_carried, INTRA)  # [L, P]
        # linear_attention.ssd:15  y = (S[t] . q) / sqrt(size(n))
        y_tile = read_S * (1.0 / ct.sqrt(size_n))  # [L, P]
        store(y, (batch, chunk, head, p_tile), (1, CHUNK, 1, TILE_P), y_tile)

        # The state at the end of the chunk.
        S_tile = dot(ct.transpose(k_tile), v_tile, S_tile, STATE)  # [N, P]
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
    q: ct.Array, k: ct.Array, v: ct.Array,
    y: ct.Array,
    S: ct.IndexedWithInt64, S_before: ct.IndexedWithInt64,
    state_indices: ct.Array, write_indices: ct.Array,
    size_n: float,
    TILE_P: ct.Constant[int], TILE_N: ct.Constant[int],
    WHOLE: ct.Constant[bool], INDEXED: ct.Constant[bool], STEADY: ct.Constant[bool], KEPT: ct.Constant[bool],
) -> None:
    """Tokens one by one, with a tile of S in registers; a sequence without a slot is left out."""
    await_previous(STEADY)
    heads = q.shape[2]
    batch, head = ct.bid(0) // heads, ct.bid(0) % heads
    p_tile = ct.bid(1)
    length = v.shape[1]
    slot, into = batch, batch
    if INDEXED:
        slot = slot_at(state_indices, batch, S.shape[0])
        into = slot_at(write_indices, batch, S.shape[0])

    if slot >= 0:
        S_tile = load_direct(S, (slot, head, p_tile, 0), (1, 1, TILE_P, TILE_N), WHOLE)  # [P, N]
        if STEADY:  # there are no slots then, so every block is here
            ct.grid_dependency_control_wait()
        for token in range(length):
            if KEPT:
                store_direct(S_before, (batch, token, head, p_tile, 0), (1, 1, 1, TILE_P, TILE_N), S_tile, WHOLE)
            v_tile = load_direct(v, (batch, token, head, p_tile), (1, 1, 1, TILE_P), WHOLE).astype(ct.float32)  # [P]
            k_tile = load_direct(k, (batch, token, head, 0), (1, 1, 1, TILE_N), WHOLE).astype(ct.float32)  # [N]
            S_now = ct.astype(S_tile, ct.float32) + v_tile[:, None] * k_tile[None, :]  # [P, N]
            q_tile = load_direct(q, (batch, token, head, 0), (1, 1, 1, TILE_N), WHOLE).astype(ct.float32)  # [N]
            read_S = ct.sum(S_now * q_tile[None, :], axis=1)  # [P]
            # linear_attention.ssd:15  y = (S[t] . q) / sqrt(size(n))
            y_tile = read_S * (1.0 / ct.sqrt(size_n))  # [P]
            store_direct(y, (batch, token, head, p_tile), (1, 1, 1, TILE_P), y_tile, WHOLE)
            S_tile = ct.astype(S_now, S.dtype)
        if into >= 0:
            store_direct(S, (into, head, p_tile, 0), (1, 1, TILE_P, TILE_N), S_tile, WHOLE)


def forward(
    q: Tensor, k: Tensor, v: Tensor,
    *,
    S0: Tensor | None = None, cu_seqlens: Tensor | None = None, seq_idx: Tensor | None = None,
    mask: Tensor | None = None, states_every: int | None = None, config: Config | None = None,
) -> tuple[Tensor, ...]:
    """Linear attention without decay (Katharopoulos et al. 2020, arXiv 2006.16236).

    Returns y[b t h p], the final state S[b h p n].

    q: [b t h n], the dtype of v
    k: [b t h n], the dtype of v
    v: [b t h p], bfloat16 or float16 or float32
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
    return OPERATOR(q, k, v, S0, cu_seqlens, seq_idx, mask, states_every, config)


def _checked(
    q: Tensor, k: Tensor, v: Tensor, S0: Tensor | None, cu_seqlens: Tensor | None, seq_idx: Tensor | None,
    mask: Tensor | None, states_every: int | None, config: Config | None, keep: bool = False,
) -> tuple[Tensor, ...]:
    """`forward` of what nobody differentiates; last, to `keep` for gradients, scalars of tokens."""
    size, sequences = _packed.check(
        LAYER,
        {"q": q, "k": k, "v": v},
        {"S": S0},
        {},
        (cu_seqlens, seq_idx, mask),
    )
    config = _tuned.chosen(
        LAYER, config, CONFIGS, digest=SPEC_DIGEST, variant=VARIANT, present=_tuned.present({"packed": sequences}),
        size=size, dtypes=(v.dtype,), x=v,
    )
    _blocks.check(LAYER, states_every, config.chunk, mask)
    if _rt.runs_kernels(v):
        return _cut.run(LAYER, _segmented, sequences, (q, k, v), (), (S0,), size, config, states_every, keep)
    if S0 is None:
        S0 = _packed.zeros(LAYER, "S", size, v)
    return _packed.each(LAYER, _portable, sequences, (q, k, v), (), (S0,), size, config.chunk, states_every)


OPERATOR = _operator.Operator(LAYER, forward, _checked, CONFIGS, leader="v")
"""`forward`, differentiated, traced or neither."""


def init_state(
    batch: int, heads: int, *, p: int = 64, n: int = 64, device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Zero states: S[b h p n]."""
    return torch.zeros((batch, heads, p, n), dtype=dtype, device=device)


def _segmented(
    q: Tensor, k: Tensor, v: Tensor, S0: Tensor | None, y: Tensor, S_final: Tensor, S_states: Tensor | None,
    states_every: int, sequences: _packed.Sequences | None, config: Config,
) -> tuple[Tensor, ...]:
    """Launch the kernels on tensors that 32-bit indices reach; outputs and final states are written in place.
    Returns the scalars of tokens, if there are any, which gradients read again.
    """
    size_h, size_p, size_n, size_b, size_t = q.shape[2], v.shape[3], q.shape[3], q.shape[0], q.shape[1]
    q, k, v = (_rt.indexable(v) for v in (q, k, v))
    cut = _cut.cut(
        size_b, size_t, config.chunk, config.segments, size_h * _rt.ceil_div(size_p, config.tile_p), size_n, sequences,
        v,
    )
    stream = _rt.stream(v)
    ends = S_states is not None and states_every == cut.per_segment * config.chunk
    # S_part[b h segment n p]: the state S that each segment would end with if it began at zero
    S_part = _rt.empty((cut.lanes, size_h, cut.parts, size_n, size_p), dtype=torch.float32, device=v.device)
    _rt.launch(
        stream,
        _rt.hinted(segment_states, config.occupancy_fwd_pass_state, config.warps_fwd_pass_state),
        (
            cut.walks * size_h,
            cut.inner,
            _rt.ceil_div(size_p, config.state_tile_p) * _rt.ceil_div(size_n, config.state_tile_n),
        ),
        (
            k, v, S_part, cut.segment_table, cut.per_segment, _rt.PRECISION[config.state], config.chunk,
            config.state_tile_p, config.state_tile_n, sequences is not None,
        ),
    )
    _rt.launch(
        stream,
        _rt.hinted(walk_out, config.occupancy_compute_out, config.warps_compute_out),
        (cut.walks * size_h, cut.segments, _rt.ceil_div(size_p, config.tile_p)),
        (
            q, k, v, _rt.given(S0, S_final), S_part, cut.segment_table, y, S_final, _rt.given(S_states, S_final),
            float(size_n), states_every, cut.per_segment, config.latency_k, _rt.PRECISION[config.scores],
            _rt.PRECISION[config.carried], config.latency_v, _rt.PRECISION[config.intra], _rt.PRECISION[config.state],
            config.chunk, _rt.covering(size_n), config.tile_p, sequences is not None, S0 is not None,
            S_states is not None and not ends, ends,
        ),
        early=True,
    )
    return ()


@_rt.without_autocast
def _portable(
    q: Tensor, k: Tensor, v: Tensor, S: Tensor, size: dict[str, int], chunk: int, states_every: int | None,
) -> tuple[Tensor, ...]:
    """The same chunked form in plain torch, for any device: in float32, or float64 if an input is, and differentiable."""
    dtype = _rt.widest((q, k, v, S))
    out_dtype = v.dtype
    q, k, v = (v.to(dtype) for v in (q, k, v))
    S = S.to(dtype, copy=True)
    size_n = torch.tensor(float(size["n"]), dtype=dtype, device=v.device)
    y_pieces = []
    kept = []
    for start in range(0, size["t"], chunk):
        now = slice(start, start + chunk)
        token = torch.arange(min(chunk, size["t"] - start), dtype=dtype, device=v.device)
        q_now = q[:, now]  # [B, L, H, N]
        k_now = k[:, now]  # [B, L, H, N]
        score_product = torch.einsum("bthn,bshn->btsh", q_now, k_now)  # [B, L, L, H]
        causal = token[:, None] >= token[None, :]  # [L, L]
        score = torch.where(causal[None, :, :, None], score_product, 0.0)  # [B, L, L, H]
        read_S_carried = torch.einsum("bthn,bhpn->bthp", q_now, S)  # [B, L, H, P]
        v_now = v[:, now]  # [B, L, H, P]
        read_S_within_score = torch.einsum("btsh,bshp->bthp", score, v_now)  # [B, L, H, P]
        read_S = read_S_carried + read_S_within_score  # [B, L, H, P]
        # linear_attention.ssd:15  y = (S[t] . q) / sqrt(size(n))
        y_now = read_S / torch.sqrt(size_n)  # [B, L, H, P]
        y_pieces.append(y_now)
        S_gained = torch.einsum("bthp,bthn->bhpn", v_now, k_now)  # [B, H, P, N]
        S = S + S_gained  # [B, H, P, N]
        if _blocks.ends(start + chunk, states_every, size["t"]):
            kept.append((S,))
    y = _rt.joined(y_pieces, 1, (size["b"], size["t"], size["h"], size["p"]), v).to(out_dtype)
    return y, S, *_blocks.stacked(kept, (S,), states_every)


def step(
    S: Tensor, q: Tensor, k: Tensor, v: Tensor,
    *,
    state_indices: Tensor | None = None, write_indices: Tensor | None = None, out: Tensor | None = None,
    steady: bool = False, config: StepConfig | None = None,
) -> Tensor:
    """One token: y[b h p]. The states S[b h p n], float32 or bfloat16, are updated in place. Inputs are as in
    `forward`, without its time axis: q[b h n], k[b h n], v[b h p].

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
        STEP, (S,), (q, k, v), (), (state_indices, write_indices), None, out, steady, config, several=False
    )
    return found


def steps(
    S: Tensor, q: Tensor, k: Tensor, v: Tensor,
    *,
    state_indices: Tensor | None = None, write_indices: Tensor | None = None, before: Tensor | None = None,
    out: Tensor | None = None, steady: bool = False, config: StepConfig | None = None,
) -> Tensor:
    """Several tokens, as so many calls of `step`, bit for bit: y[b t h p]. Inputs have the axes of `forward`.

    before: [b t h p n], float32 or bfloat16: filled with what the states are before each token, so that copying
    one rolls the tokens from it on back; the rest is as for `step`
    """
    found: Tensor = _step.run(
        STEP, (S,), (q, k, v), (), (state_indices, write_indices), before, out, steady, config, several=True
    )
    return found


def _step_kernels(
    q: Tensor, k: Tensor, v: Tensor, S: Tensor, S_before: Tensor | None, y: Tensor, state_indices: Tensor | None,
    write_indices: Tensor | None, steady: bool, config: StepConfig,
) -> None:
    """Launch the kernels of `steps` on checked tensors: the states, outputs and kept states are written in place."""
    size_b, size_h, size_p, size_n = q.shape[0], q.shape[2], v.shape[3], q.shape[3]
    tile_p = _step.tile(config.tile_p, size_p)
    whole = size_p % tile_p == 0 and size_n == _step.columns(size_n)
    stream = _rt.stream(v)
    _rt.launch(
        stream,
        _rt.hinted(token_step, config.occupancy, config.warps),
        (size_b * size_h, _rt.ceil_div(size_p, tile_p)),
        (
            q, k, v, y, S, _rt.given(S_before, S), _rt.given(state_indices, v), _rt.given(write_indices, v),
            float(size_n), tile_p, _step.columns(size_n), whole, state_indices is not None, steady,
            S_before is not None,
        ),
        early=True,
    )


@_rt.without_autocast
def _portable_step(
    q: Tensor, k: Tensor, v: Tensor, S: Tensor, size: dict[str, int],
) -> tuple[Tensor]:
    """One token in plain torch, for any device: the states are moved in place, in the dtype that they have."""
    dtype = S.dtype
    out_dtype = v.dtype
    q, k, v = (v.to(dtype) for v in (q, k, v))
    size_n = torch.tensor(float(size["n"]), dtype=dtype, device=v.device)
    S.addcmul_(v[:, :, :, None], k[:, :, None, :])
    read_S = torch.einsum("bhpn,bhn->bhp", S, q)  # [B, H, P]
    # linear_attention.ssd:15  y = (S[t] . q) / sqrt(size(n))
    y_now = read_S / torch.sqrt(size_n)  # [B, H, P]
    return (y_now.to(out_dtype),)


STEP = _step.Step(LAYER, StepConfig(), _step_kernels, _portable_step)
"""What `step` and `steps` are made of."""


VARIANT = "plan=segmented swap=none weighted=row persistent=no"
SPEC_DIGEST = "636e84bf9d657f62935aa8aaf2821449f80b3d49392c6395587fa20712fa875c"
"""The knobs that this text was emitted with, and the SHA-256 of the spec's text; emitted by ssdgen 0.1.0."""
