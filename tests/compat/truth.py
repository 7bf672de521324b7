"""One sequence of a state space layer, token by token in float64, as papers write it: what every drop-in must compute."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus


def token_loop(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] | None = None,
    S: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y[t h p] and the last state [h p n], from x[t h p], B and C[t g n], and dt, A, dt_bias, D one a head or one a channel."""
    x, dt, A, B, C = (v.double() for v in (x, dt, A, B, C))
    t, h, p = x.shape
    heads, n = h // B.shape[1], B.shape[2]
    B, C = B.repeat_interleave(heads, 1), C.repeat_interleave(heads, 1)
    dt = dt if dt.dim() == 3 else dt[..., None].expand(t, h, p)
    if dt_bias is not None:
        dt = dt + dt_bias.double().reshape(h, -1)
    if dt_softplus:
        dt = softplus(dt)
    if dt_limit is not None:
        dt = dt.clamp(*dt_limit)
    A = A if A.dim() == 3 else A[:, None, None].expand(h, p, n)
    S = x.new_zeros(h, p, n) if S is None else S.double()
    y = torch.zeros_like(x)
    for i in range(t):
        S = torch.exp(dt[i, :, :, None] * A) * S + (dt[i] * x[i])[:, :, None] * B[i, :, None, :]
        y[i] = (S * C[i, :, None, :]).sum(-1)
    if D is not None:
        y = y + D.double().reshape(h, -1) * x
    if z is not None:
        y = y * silu(z.double())
    return y, S


def batch_of_loops(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """`token_loop` of every row; of `options`, z and S have a batch axis too."""
    z, S = options.pop("z", None), options.pop("S", None)
    rows = [
        token_loop(x[i], dt[i], A, B[i], C[i], z=None if z is None else z[i], S=None if S is None else S[i], **options)
        for i in range(x.shape[0])
    ]
    return torch.stack([y for y, _ in rows]), torch.stack([S for _, S in rows])


def packed_loops(
    ends: list[int], x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """`token_loop` of each sequence of x[t h p] between two of `ends`: all outputs, and a state each."""
    z, S = options.pop("z", None), options.pop("S", None)
    results = []
    for i, (start, stop) in enumerate(itertools.pairwise(ends)):
        now = slice(start, stop)
        gate, state = None if z is None else z[now], None if S is None else S[i]
        results.append(token_loop(x[now], dt[now], A, B[now], C[now], z=gate, S=state, **options))
    return torch.cat([y for y, _ in results]), torch.stack([S for _, S in results])


def drawn(
    b: int, t: int, h: int, g: int, p: int, n: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> dict[str, Tensor]:
    """Inputs of a scan with raw steps, that softplus makes 0.02 to 0.3 of; all optional ones but initial states."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "x": normal(b, t, h, p).to(dtype),
        "dt": normal(b, t, h) - 2.5,
        "A": -0.1 - normal(h).exp(),
        "B": normal(b, t, g, n).to(dtype),
        "C": normal(b, t, g, n).to(dtype),
        "D": normal(h),
        "dt_bias": 0.3 * normal(h),
        "z": normal(b, t, h, p).to(dtype),
    }
