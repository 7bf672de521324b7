"""What the chunked scans of all drop-ins share: checks in the caller's words, and the call of an emitted `forward`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ssdgen.generated import mamba2, state_space_duality


def expect(who: str, name: str, x: Any, axes: str, shape: tuple[int, ...] | None = None) -> None:
    """Raise TypeError or ValueError unless `x` is a tensor with these axes, of this shape where it is known."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{who}: `{name}` must be a torch.Tensor, got {type(x).__name__}")
    if x.dim() != len(axes.split()):
        raise ValueError(f"{who}: `{name}` must be [{axes}] (rank {len(axes.split())}), got shape {list(x.shape)}")
    if shape is not None and tuple(x.shape) != shape:
        raise ValueError(f"{who}: `{name}`[{axes}] must have shape {list(shape)}, got {list(x.shape)}")


def of_one_dtype(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors, converted to the widest of their dtypes where they differ: emitted modules take one for all of these."""
    dtypes = {x.dtype for x in tensors if isinstance(x, Tensor)}
    if len(dtypes) < 2 or not all(d.is_floating_point for d in dtypes):
        return tensors
    widest = dtypes.pop()
    for dtype in dtypes:
        widest = torch.promote_types(widest, dtype)
    return tuple(x.to(widest) if isinstance(x, Tensor) else x for x in tensors)


def scan(
    who: str,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    chunk_size: Any,
    *,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limit: Any,
    initial_states: Tensor | None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The outputs y[b t h p], in the dtype of x, and the final states S[b h p n], float32 (float64 if an input is).

    `inputs` are x[b t h p], dt[b t h], A[h], B[b t g n] and C[b t g n]; with `cu_seqlens` states have an entry a sequence.
    `chunk_size` is checked and has no other effect. Raises as the emitted `forward` does.
    """
    x, dt, A, B, C = inputs
    if type(chunk_size) is not int or chunk_size < 1:
        raise ValueError(f"{who}: `chunk_size` must be an integer of at least 1, got {chunk_size!r}")
    dtype = x.dtype
    x, B, C, z = of_one_dtype(x, B, C, z)  # type: ignore[assignment]
    low, high = _limits(who, dt_limit)
    if initial_states is not None and initial_states.dtype != torch.float64:
        initial_states = initial_states.to(torch.float32)
    module = mamba2 if dt_softplus else state_space_duality
    y, S = module.forward(
        x, dt, A, B, C, D=D, dt_bias=dt_bias, z=z, dt_min=low, dt_max=high, S0=initial_states,
        cu_seqlens=cu_seqlens, seq_idx=seq_idx,
    )  # fmt: skip
    return y.to(dtype), S


def _limits(who: str, dt_limit: Any) -> tuple[float, float]:
    """The least and the largest step."""
    pair = tuple(dt_limit) if isinstance(dt_limit, tuple | list) else ()
    if len(pair) != 2 or not all(isinstance(v, int | float) for v in pair):
        raise TypeError(f"{who}: `dt_limit` must be a pair of numbers, got {dt_limit!r}")
    if not all(v >= 0 for v in pair):
        raise ValueError(
            f"{who}: `dt_limit` must be of numbers that are at least 0, got {dt_limit!r}: a step below 0 has a decay above 1,"
            " which no chunked form here bounds"
        )
    return float(pair[0]), float(pair[1])
