"""mamba_ssm's two functions of Mamba-2, `mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined` and
`mamba_ssm.ops.triton.selective_state_update.selective_state_update`, with the signatures of mamba_ssm 2.3.2.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from ssdgen.compat.scan import expect, of_one_dtype, scan
from ssdgen.compat.update import plain_update
from ssdgen.generated import mamba2

_SCAN, _UPDATE = "mamba_chunk_scan_combined", "selective_state_update"


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Mamba-2 over whole sequences: out[b t h p] in the dtype of x; with `return_final_states` also the states after the last
    token [b h p n], float32; with `return_varlen_states` also those after every sequence [s h p n], in the dtype of C.

    x, z: [b t h p]; dt: [b t h]; A, dt_bias: [h], A below 0; B, C: [b t g n]; D: [h] or [h p]. Floating point of any dtype that
    the emitted modules take, any strides; where x, B, C and z differ in dtype they are converted to the widest.
    chunk_size: not used: the kernels choose their own. Any integer of at least 1 is taken.
    initial_states: [b h p n], zero if absent
    seq_idx: [b t], int32 or int64: a sequence begins wherever it changes. Initial states enter the first sequence of a row if
    its number is 0, as in mamba_ssm, and final states are those of the last. Synchronises once with a GPU.
    cu_seqlens: [s + 1], int32 or int64, only with return_varlen_states and a batch of 1: where each sequence begins, and the
    last ends. `seq_idx` must then say the same, and may be absent if there is one sequence.
    dt_limit: at least 0; a step is clamped to it after dt_bias and softplus, without softplus too

    Unlike theirs: a sequence that is shorter than a chunk has its initial state in its varlen state; one without tokens has its
    initial state. It is differentiable, on a GPU once, on the CPU also in float64.
    Raises TypeError, ValueError or NotImplementedError, which name the tensor and the reason.
    """
    expect(_SCAN, "x", x, "b t h p")
    expect(_SCAN, "B", B, "b t g n")
    (b, t, h, p), n = x.shape, B.shape[-1]
    if initial_states is not None:
        expect(_SCAN, "initial_states", initial_states, "b h p n", (b, h, p, n))
    if seq_idx is not None:
        expect(_SCAN, "seq_idx", seq_idx, "b t", (b, t))
        if initial_states is not None and t:
            first = (seq_idx[:, 0] == 0)[:, None, None, None]
            initial_states = torch.where(first, initial_states, torch.zeros_like(initial_states))
    places = None
    if not return_varlen_states:
        cu_seqlens = None
    else:
        expect(_SCAN, "cu_seqlens", cu_seqlens, "s+1")
        assert cu_seqlens is not None
        if b != 1:
            raise ValueError(
                f"{_SCAN}: `return_varlen_states` is of sequences in a batch of 1, but axis b is {b} in `x`"
            )
        _check_same_cut(cu_seqlens, seq_idx)
        seq_idx, places = None, _first_and_last(cu_seqlens, t)
        if initial_states is not None:
            spread = initial_states.new_zeros(len(cu_seqlens) - 1, h, p, n)
            initial_states = spread.index_copy(0, places[:1], initial_states)
    y, S = scan(
        _SCAN, (x, dt, A, B, C), chunk_size, D=D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit,
        initial_states=initial_states, seq_idx=seq_idx, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    if places is None:
        return (y, S) if return_final_states else y
    varlen = S.to(C.dtype)
    return (y, S.index_select(0, places[1:]), varlen) if return_final_states else (y, varlen)


def _first_and_last(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """The numbers of the first and the last sequence that has tokens, without asking the device for them."""
    first = torch.searchsorted(cu_seqlens, torch.zeros_like(cu_seqlens[:1]), right=True) - 1
    last = torch.searchsorted(cu_seqlens, torch.full_like(cu_seqlens[:1], tokens)) - 1
    return torch.cat((first, last)).clamp(0, len(cu_seqlens) - 2)


def _check_same_cut(cu_seqlens: Tensor, seq_idx: Tensor | None) -> None:
    """`seq_idx` changes where `cu_seqlens` says; on a GPU, where that synchronises, looked at if SSDGEN_DEBUG is set."""
    if seq_idx is None:
        if len(cu_seqlens) != 2:
            raise ValueError(
                f"{_SCAN}: `return_varlen_states` of {len(cu_seqlens) - 1} sequences needs `seq_idx`: without it outputs"
                " run on from one sequence into the next, and the states at their ends with them"
            )
        return
    if torch.compiler.is_compiling() or (seq_idx.is_cuda and not os.environ.get("SSDGEN_DEBUG")):
        return
    changes = (seq_idx[:, 1:] != seq_idx[:, :-1]).nonzero()[:, 1] + 1
    edges = cu_seqlens[1:][cu_seqlens.diff() > 0][:-1]
    if not torch.equal(changes, edges.to(changes)):
        raise ValueError(
            f"{_SCAN}: `seq_idx` changes at tokens {changes.tolist()[:8]}, but sequences begin at {edges.tolist()[:8]}"
            " in `cu_seqlens`"
        )


@torch.no_grad()
def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """One token: out[b h p], or [b p] where the state has no heads, in the dtype of x. `state` is updated in place.

    state: [b h p n] or [b p n], rows beyond the batch are left alone; with `state_batch_indices` a pool of slots instead of b
    x, dt, z: [b h p] or [b p]; A: [h p n] or [p n]; B, C: [b g n] or [b n]; D, dt_bias: [h p] or [p]
    state_batch_indices: [b], int32 or int64: the slot of each row; a row with a negative one is left out, its output is 0

    Mamba-2 calls this with one dt, dt_bias and A a head, expanded with stride 0 over the channels; by that it is recognised
    here, and with dt_softplus and a state in float32 or bfloat16 ssdgen's kernel computes it, without a synchronisation. All
    else (Mamba-1, steps without softplus, states in float16) is right but not fast: some ten operations of torch, which
    synchronise once with a GPU if there are `state_batch_indices`.

    Nothing is differentiated, as in mamba_ssm. Raises TypeError or ValueError, which name the tensor.
    """
    if not isinstance(state, Tensor) or state.dim() not in (3, 4):
        got = list(state.shape) if isinstance(state, Tensor) else type(state).__name__
        raise TypeError(f"{_UPDATE}: `state` must be a tensor [b h p n] or [b p n], got {got}")
    has_heads = state.dim() == 4
    if not has_heads:
        state = state.unsqueeze(1)
    x, dt, z, B, C = (_with_axis(v, 3, 1) for v in (x, dt, z, B, C))  # type: ignore[assignment]
    A, D, dt_bias = _with_axis(A, 3, 0), _with_axis(D, 2, 0), _with_axis(dt_bias, 2, 0)  # type: ignore[assignment]
    h, p, n = state.shape[1:]
    expect(_UPDATE, "x", x, "b h p", (x.shape[0], h, p))
    b = x.shape[0]
    expect(_UPDATE, "dt", dt, "b h p", (b, h, p))
    expect(_UPDATE, "A", A, "h p n", (h, p, n))
    expect(_UPDATE, "B", B, "b g n")
    g = B.shape[1]
    if not g or h % g:
        raise ValueError(f"{_UPDATE}: {g} groups (axis g, of `B`) do not divide {h} heads (axis h, of `state`)")
    for name, value in (("B", B), ("C", C)):
        expect(_UPDATE, name, value, "b g n", (b, g, n))
    for name, given, axes, shape in (
        ("D", D, "h p", (h, p)), ("z", z, "b h p", (b, h, p)), ("dt_bias", dt_bias, "h p", (h, p)),
        ("state_batch_indices", state_batch_indices, "b", (b,)),
    ):  # fmt: skip
        if given is not None:
            expect(_UPDATE, name, given, axes, shape)
    if state_batch_indices is not None and state_batch_indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{_UPDATE}: `state_batch_indices` must be int32 or int64, got {state_batch_indices.dtype}")
    if state_batch_indices is None:
        if state.shape[0] < b:
            raise ValueError(f"{_UPDATE}: `state` has {state.shape[0]} rows, but the batch of `x` is {b}")
        state = state[:b]
    a_head_each = _tied(A, 1, 2) and _tied(dt, 2) and (dt_bias is None or _tied(dt_bias, 1))
    if dt_softplus and a_head_each and n and p and state.dtype != torch.float16:
        dtype = x.dtype
        x, B, C, z = of_one_dtype(x, B, C, z)  # type: ignore[assignment]
        bias = None if dt_bias is None else dt_bias[:, 0]
        out: Tensor = mamba2.step(
            state, x, dt[:, :, 0], A[:, 0, 0], B, C, D=D, dt_bias=bias, z=z, state_indices=state_batch_indices
        ).to(dtype)
    else:
        out = plain_update(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices)
    return out if has_heads else out.squeeze(1)


def _with_axis(x: Tensor | None, rank: int, at: int) -> Tensor | None:
    """`x` with the axis that it may lack."""
    return x.unsqueeze(at) if isinstance(x, Tensor) and x.dim() == rank - 1 else x


def _tied(x: Tensor, *dims: int) -> bool:
    """Whether `x` holds one value along these dimensions, as its strides tell."""
    return all(x.stride(d) == 0 or x.shape[d] == 1 for d in dims)
