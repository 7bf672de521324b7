"""vLLM's prefill of packed sequences, `vllm.model_executor.layers.mamba.ops.ssd_combined`, by ssdgen's kernels.

The signature is that of the releases that cut sequences into chunks ahead of the call (`cu_chunk_seqlens`); vLLM calls it
with keywords, and so should you.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ssdgen.compat.scan import expect, scan

_WHO = "mamba_chunk_scan_combined_varlen"


@torch.no_grad()
def mamba_chunk_scan_combined_varlen(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    cu_seqlens: Tensor,
    cu_chunk_seqlens: Tensor | None,
    last_chunk_indices: Tensor | None,
    seq_idx: Tensor | None,
    out: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_intermediate_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> Tensor:
    """Mamba-2 over sequences that lie one behind the other. Writes `out`; returns their final states [s h p n], in
    `state_dtype`, or the dtype of C without it. Nothing is differentiated.

    x, z, out: [t h p]; dt: [t h]; A, dt_bias: [h], A below 0; B, C: [t g n]; D: [h] or [h p]. Floating point of any dtype that
    the emitted modules take; where x, B, C and z differ in dtype they are converted to the widest.
    cu_seqlens: [s + 1], int32 or int64: where each sequence begins, and the last ends
    initial_states: [s h p n], by sequence; zero if absent
    chunk_size, cu_chunk_seqlens, last_chunk_indices, seq_idx: not used: the kernels cut each sequence from its own first
    token by `cu_seqlens`. Any chunk_size of at least 1 is taken, theirs must be a power of two.

    Unlike theirs: states are carried from chunk to chunk in float32, and rounded to the returned dtype once, at the end; a
    sequence without tokens returns its initial state. The outputs are computed apart and copied into `out`.

    Raises NotImplementedError for return_intermediate_states, TypeError or ValueError, which name the tensor, for what is
    wrong. No synchronisation with the GPU.
    """
    if return_intermediate_states:
        raise NotImplementedError(
            f"{_WHO}: `return_intermediate_states` asks for the states at the ends of the chunks that `cu_chunk_seqlens` cuts;"
            " ours are kept at every so many tokens of a sequence: `forward(..., states_every=...)` of a module returns those"
        )
    expect(_WHO, "x", x, "t h p")
    t, h, p = x.shape
    expect(_WHO, "dt", dt, "t h", (t, h))
    expect(_WHO, "B", B, "t g n")
    g, n = B.shape[1:]
    for name, tensor in (("B", B), ("C", C)):
        expect(_WHO, name, tensor, "t g n", (t, g, n))
    expect(_WHO, "out", out, "t h p", (t, h, p))
    if z is not None:
        expect(_WHO, "z", z, "t h p", (t, h, p))
    expect(_WHO, "cu_seqlens", cu_seqlens, "s+1")
    if initial_states is not None:
        expect(_WHO, "initial_states", initial_states, "s h p n", (len(cu_seqlens) - 1, h, p, n))
    inputs = x.unsqueeze(0), dt.unsqueeze(0), A, B.unsqueeze(0), C.unsqueeze(0)
    y, S = scan(
        _WHO, inputs, chunk_size, D=D, z=None if z is None else z.unsqueeze(0), dt_bias=dt_bias, dt_softplus=dt_softplus,
        dt_limit=dt_limit, initial_states=initial_states, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    out.copy_(y[0])
    return S.to(C.dtype if state_dtype is None else state_dtype)
