"""One token of any diagonal state space layer in plain torch: what `selective_state_update` has no kernel for here."""

from __future__ import annotations

import torch
from torch import Tensor


def plain_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    indices: Tensor | None,
) -> Tensor:
    """The outputs [b h p], in the dtype of x; `state` [b h p n], or slots of a pool, is updated in place.

    x, dt, z: [b h p]; A: [h p n]; B, C: [b g n]; D, dt_bias: [h p]; indices: [b], a negative one leaves its row out.
    Computes in float32, or float64 if an input is.
    """
    if indices is not None:
        rows = (indices >= 0).nonzero()[:, 0]
        slots = indices[rows].long()
        held = state[slots]
        gated = None if z is None else z[rows]
        y = plain_update(held, x[rows], dt[rows], A, B[rows], C[rows], D, gated, dt_bias, dt_softplus, None)
        state[slots] = held
        return torch.zeros_like(x).index_copy(0, rows, y)
    given = [v for v in (state, x, dt, A, B, C, D, z, dt_bias) if v is not None]
    wide = torch.float64 if any(v.dtype == torch.float64 for v in given) else torch.float32
    heads = x.shape[1] // B.shape[1]
    token, step = x.to(wide), dt.to(wide)
    if dt_bias is not None:
        step = step + dt_bias
    if dt_softplus:
        step = torch.nn.functional.softplus(step)
    key, read = (v.to(wide).repeat_interleave(heads, 1)[:, :, None] for v in (B, C))  # [b h 1 n]
    decay = torch.exp(step[..., None] * A)  # [b h p n]
    moved = decay * state + (step * token)[..., None] * key
    state.copy_(moved)
    out = (moved * read).sum(-1)
    if D is not None:
        out = out + D * token
    if z is not None:
        out = out * torch.nn.functional.silu(z.to(wide))
    return out.to(x.dtype)
