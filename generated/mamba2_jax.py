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
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from . import _xla as _rt

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


def forward(
    x: Array, dt: Array, A: Array, B: Array, C: Array,
    *,
    D: Array | None = None, dt_bias: Array | None = None, z: Array | None = None, dt_min: float | Array = 0.0,
    dt_max: float | Array = math.inf, S0: Array | None = None, chunk: int = 64, precision: Any = _rt.HIGHEST,
) -> tuple[Array, ...]:
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
    chunk: tokens a chunk; it changes the time that it takes, not the result
    precision: of products of float32, a jax.lax.Precision or its name; of bfloat16 it changes nothing

    A pure function to be traced: under jax.jit, with `chunk` and `precision` as static arguments, jax.vmap and
    jax.grad. Computed in float32, or float64 if an input is; products of bfloat16 inputs have bfloat16 operands
    and float32 sums. Raises TypeError or ValueError, which name the argument, for a missing input, a dtype, rank
    or size, or a number out of range; values of arrays are not looked at.
    """
    call = _rt.check(
        LAYER,
        {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "dt_bias": dt_bias, "z": z},
        {"S": S0},
        {"dt_min": dt_min, "dt_max": dt_max},
    )
    _rt.check_chunk(LAYER, chunk)
    size, dtype = call.size, call.dtype
    D = _rt.expand(LAYER.inputs[5], D, size)
    dt_bias = _rt.expand(LAYER.inputs[6], dt_bias, size)
    x = jnp.transpose(_rt.by_group(x, 2, size["g"]), (0, 2, 3, 1, 4)).astype(dtype)
    dt = jnp.transpose(_rt.by_group(dt, 2, size["g"]), (0, 2, 3, 1)).astype(dtype)
    A = _rt.by_group(A, 0, size["g"]).astype(dtype)
    B = jnp.transpose(B, (0, 2, 1, 3)).astype(dtype)
    C = jnp.transpose(C, (0, 2, 1, 3)).astype(dtype)
    D = _rt.by_group(D, 0, size["g"]).astype(dtype)
    dt_bias = _rt.by_group(dt_bias, 0, size["g"]).astype(dtype)
    if z is not None:
        z = jnp.transpose(_rt.by_group(z, 2, size["g"]), (0, 2, 3, 1, 4)).astype(dtype)
    S = _rt.by_group(_rt.initial(LAYER, "S", S0, call), 1, size["g"])
    product, precision = _rt.products(call.inputs["x"], dtype, precision)
    # mamba2.ssd:18  step = clamp(softplus(dt + dt_bias), dt_min, dt_max)
    step = _rt.minimum(_rt.maximum(jax.nn.softplus(dt + dt_bias[None, :, :, None]), dt_min), dt_max)  # [B, G, H, L]
    decay_log2 = _rt.minimum(_rt.maximum(A[None, :, :, None] * step * LOG2E, -128.0), 0.0)  # [B, G, H, L]

    def chunks(states: tuple[Array, ...], now: tuple[Any, ...]) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """Several chunks side by side: from the states before them to those behind, and their outputs."""
        (S,) = states
        decay_log2_now, step_now, B_now, x_now, C_now, z_now = now
        token = jnp.arange(decay_log2_now.shape[4], dtype=dtype)
        decay_sum = _rt.summed(decay_log2_now, 4)  # [C, B, G, H, L]
        decay_end = decay_sum[:, :, :, :, -1]  # [C, B, G, H]
        carry = step_now * jnp.exp2(_rt.minimum(decay_end[:, :, :, :, None] - decay_sum, 0.0))  # [C, B, G, H, L]
        S_gained = product("cbghtp,cbgtn->cbghpn", x_now * carry[:, :, :, :, :, None], B_now)  # [C, B, G, H, P, N]
        S_entry, S = _rt.entries(decay_end[:, :, :, :, None, None], S_gained, S, precision)
        causal_before = token[:, None] > token[None, :]  # [L, L]
        decay_left = jnp.exp2(  # [C, B, G, H, L, L]
            _rt.minimum(
                jnp.where(
                    causal_before[None, None, None, None, :, :],
                    decay_sum[:, :, :, :, :, None] - decay_sum[:, :, :, :, None, :],
                    0.0,
                ),
                0.0,
            ),
        )
        score_product = product("cbgtn,cbgsn->cbgts", C_now, B_now)  # [C, B, G, L, L]
        causal = token[:, None] >= token[None, :]  # [L, L]
        score = jnp.where(  # [C, B, G, H, L, L]
            causal[None, None, None, None, :, :],
            score_product[:, :, :, None, :, :] * decay_left * step_now[:, :, :, :, None, :],
            0.0,
        )
        read_S_carried = product("cbgtn,cbghpn->cbghtp", C_now, S_entry)  # [C, B, G, H, L, P]
        read_S_within_score = product("cbghts,cbghsp->cbghtp", score, x_now)  # [C, B, G, H, L, P]
        read_S = jnp.exp2(decay_sum)[:, :, :, :, :, None] * read_S_carried + read_S_within_score  # [C, B, G, H, L, P]
        # mamba2.ssd:24  y = S[t] . C + D * x
        y_now = read_S + D[None, None, :, :, None, :] * x_now  # [C, B, G, H, L, P]
        if z is not None:
            # mamba2.ssd:25  when z: y = y * silu(z)
            y_now = y_now * jax.nn.silu(z_now)  # [C, B, G, H, L, P]
        return ((S,), (y_now.astype(call.outputs["y"]),))

    (y,), (S,) = _rt.walk(
        chunks,
        (S,),
        ((decay_log2, 3), (step, 3), (B, 2), (x, 3), (C, 2), (z, 3)),
        ((3, (size["b"], size["g"], size["h"] // size["g"], size["t"], size["p"]), call.outputs["y"]),),
        size["t"],
        chunk,
    )
    return (_rt.by_head(jnp.transpose(y, (0, 3, 1, 2, 4)), 2), _rt.by_head(S, 1))


def init_state(
    batch: int, heads: int, *, p: int = 64, n: int = 128, dtype: Any = jnp.float32,
) -> Array:
    """Zero states: S[b h p n]."""
    return jnp.zeros((batch, heads, p, n), dtype)


def step(
    S: Array, x: Array, dt: Array, A: Array, B: Array, C: Array,
    *,
    D: Array | None = None, dt_bias: Array | None = None, z: Array | None = None, dt_min: float | Array = 0.0,
    dt_max: float | Array = math.inf,
) -> tuple[Array, ...]:
    """One token: y[b h p] and the states behind it, S[b h p n], float32, bfloat16 or float64 as they came. Inputs
    are as in `forward`, without its time axis: x[b h p], dt[b h], B[b g n], C[b g n], z[b h p].

    A pure function, as `forward` is: under jax.jit, donate the states to have them updated in their memory.
    """
    call = _rt.check(
        LAYER,
        {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "dt_bias": dt_bias, "z": z},
        {"S": S},
        {"dt_min": dt_min, "dt_max": dt_max},
        step=True,
    )
    size, dtype = call.size, call.dtype
    D = _rt.expand(LAYER.inputs[5], D, size)
    dt_bias = _rt.expand(LAYER.inputs[6], dt_bias, size)
    x = x.astype(dtype)
    dt = dt.astype(dtype)
    A = A.astype(dtype)
    B = _rt.per_head(B, 1, size["h"]).astype(dtype)
    C = _rt.per_head(C, 1, size["h"]).astype(dtype)
    D = D.astype(dtype)
    dt_bias = dt_bias.astype(dtype)
    if z is not None:
        z = z.astype(dtype)
    S = S.astype(dtype)
    # mamba2.ssd:18  step = clamp(softplus(dt + dt_bias), dt_min, dt_max)
    step = _rt.minimum(_rt.maximum(jax.nn.softplus(dt + dt_bias[None, :]), dt_min), dt_max)  # [B, H]
    decay = jnp.exp2(_rt.minimum(_rt.maximum(A[None, :] * step * LOG2E, -128.0), 0.0))  # [B, H]
    S = decay[:, :, None, None] * S  # [B, H, P, N]
    S = S + (step[:, :, None] * x)[:, :, :, None] * B[:, :, None, :]  # [B, H, P, N]
    read_S = jnp.sum(S * C[:, :, None, :], 3)  # [B, H, P]
    # mamba2.ssd:24  y = S[t] . C + D * x
    y_now = read_S + D[None, :, :] * x  # [B, H, P]
    if z is not None:
        # mamba2.ssd:25  when z: y = y * silu(z)
        y_now = y_now * jax.nn.silu(z)  # [B, H, P]
    return (y_now.astype(call.outputs["y"]), S.astype(call.states["S"]))


SPEC_DIGEST = "eafb29fc035d5ce53c83a02b255cfaf238a181d66bbc929d18afa7c9e2fe2320"
"""The SHA-256 of the spec's text; emitted by ssdgen 0.1.0."""
