"""Mamba-3's exponential-trapezoidal rule, without rotary embedding (Lahoti et al. 2026).

The forward pass of

    S[t] = keep * S[t-1] + (1 - late) * step * keep * x[t-1] * B[t-1] + late * step * x * B

emitted by ssdgen, as the jump formula over chunks of L tokens:

    decay[i] = A * step * LOG2E    log2, one a token and head
    s[i] = decay[0] + ... + decay[i]
    weight_S[i] = (1 - late) * step * keep
    weight_S_2[i] = late * step

    S_end = 2^s[L-1] S
      + sum_j 2^(s[L-1] - s[j]) weight_S[j] x[j-1] (x) B[j-1]
      + sum_j 2^(s[L-1] - s[j]) weight_S_2[j] x[j] (x) B[j]
    score_S[i,j] = (C[i] . B[j-1]) 2^(s[i] - s[j]) weight_S[j]    j <= i
    score_S_2[i,j] = (C[i] . B[j]) 2^(s[i] - s[j]) weight_S_2[j]    j <= i
    read_S[i] = 2^s[i] S . C[i]
      + sum_j score_S[i,j] x[j-1]
      + sum_j score_S_2[i,j] x[j]

    y = read_S + D * x
      when z: y = y * silu(z)

    one token:
    S = 2^(A * step * LOG2E) S + ((1 - late) * step * keep) x[t-1] (x) B[t-1] + (late * step) x (x) B
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
    "mamba3",
    batch="b",
    time="t",
    head="h",
    inputs=(
        _rt.Input("x", ("b", "t", "h", "p"), (_rt.BF16, _rt.F16, _rt.F32)),
        _rt.Input("dt", ("b", "t", "h"), (_rt.F32, _rt.BF16, _rt.F16)),
        _rt.Input("A", ("b", "t", "h"), (_rt.F32, _rt.BF16, _rt.F16), high=0.0, high_open=True),
        _rt.Input("trap", ("b", "t", "h"), (_rt.F32, _rt.BF16, _rt.F16)),
        _rt.Input("B", ("b", "t", "g", "n"), (_rt.BF16, _rt.F16, _rt.F32), like="x"),
        _rt.Input("C", ("b", "t", "g", "n"), (_rt.BF16, _rt.F16, _rt.F32), like="x"),
        _rt.Input("D", ("h", "p"), (_rt.F32, _rt.BF16, _rt.F16), narrower=(("h",),), default=0.0),
        _rt.Input("dt_bias", ("h",), (_rt.F32, _rt.BF16, _rt.F16), default=0.0),
        _rt.Input("z", ("b", "t", "h", "p"), (_rt.BF16, _rt.F16, _rt.F32), like="x", optional=True),
    ),
    scalars=(),
    groups={"g": "h"},
    states={"S": ("b", "h", "p", "n")},
    outputs={"y": ("b", "t", "h", "p")},
    dtypes={"y": "x"},
)


def forward(
    x: Array, dt: Array, A: Array, trap: Array, B: Array, C: Array,
    *,
    D: Array | None = None, dt_bias: Array | None = None, z: Array | None = None, S0: Array | None = None,
    chunk: int = 64, precision: Any = _rt.HIGHEST,
) -> tuple[Array, ...]:
    """Mamba-3's exponential-trapezoidal rule, without rotary embedding (Lahoti et al. 2026).

    Returns y[b t h p], the final state S[b h p n].

    x: [b t h p], bfloat16 or float16 or float32
    dt: [b t h], float32 or bfloat16 or float16
    A: [b t h], float32 or bfloat16 or float16, in [-inf, 0)
    trap: [b t h], float32 or bfloat16 or float16
    B: [b t g n], the dtype of x
    C: [b t g n], the dtype of x
    D: [h p] or [h], float32 or bfloat16 or float16, 0 if absent
    dt_bias: [h], float32 or bfloat16 or float16, 0 if absent
    z: [b t h p], the dtype of x, optional
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
        {"x": x, "dt": dt, "A": A, "trap": trap, "B": B, "C": C, "D": D, "dt_bias": dt_bias, "z": z},
        {"S": S0},
        {},
    )
    _rt.check_chunk(LAYER, chunk)
    size, dtype = call.size, call.dtype
    D = _rt.expand(LAYER.inputs[6], D, size)
    dt_bias = _rt.expand(LAYER.inputs[7], dt_bias, size)
    x = jnp.transpose(_rt.by_group(x, 2, size["g"]), (0, 2, 3, 1, 4)).astype(dtype)
    dt = jnp.transpose(_rt.by_group(dt, 2, size["g"]), (0, 2, 3, 1)).astype(dtype)
    A = jnp.transpose(_rt.by_group(A, 2, size["g"]), (0, 2, 3, 1)).astype(dtype)
    trap = jnp.transpose(_rt.by_group(trap, 2, size["g"]), (0, 2, 3, 1)).astype(dtype)
    B = jnp.transpose(B, (0, 2, 1, 3)).astype(dtype)
    C = jnp.transpose(C, (0, 2, 1, 3)).astype(dtype)
    D = _rt.by_group(D, 0, size["g"]).astype(dtype)
    dt_bias = _rt.by_group(dt_bias, 0, size["g"]).astype(dtype)
    if z is not None:
        z = jnp.transpose(_rt.by_group(z, 2, size["g"]), (0, 2, 3, 1, 4)).astype(dtype)
    S = _rt.by_group(_rt.initial(LAYER, "S", S0, call), 1, size["g"])
    product, precision = _rt.products(call.inputs["x"], dtype, precision)
    # mamba3.ssd:18  step = softplus(dt + dt_bias)
    step = jax.nn.softplus(dt + dt_bias[None, :, :, None])  # [B, G, H, L]
    decay_log2 = _rt.minimum(_rt.maximum(A * step * LOG2E, -128.0), 0.0)  # [B, G, H, L]
    # mamba3.ssd:20  late = sigmoid(trap)
    late = jax.nn.sigmoid(trap)  # [B, G, H, L]
    # mamba3.ssd:19  keep = exp(A * step)
    keep = jnp.exp(A * step)  # [B, G, H, L]
    B_before = _rt.shifted(B, 2)  # [B, G, L, N]
    x_before = _rt.shifted(x, 3)  # [B, G, H, L, P]

    def chunks(states: tuple[Array, ...], now: tuple[Any, ...]) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """Several chunks side by side: from the states before them to those behind, and their outputs."""
        (S,) = states
        decay_log2_now, late_now, step_now, keep_now, B_before_now, x_before_now, B_now, x_now, C_now, z_now = now
        token = jnp.arange(decay_log2_now.shape[4], dtype=dtype)
        decay_sum = _rt.summed(decay_log2_now, 4)  # [C, B, G, H, L]
        decay_end = decay_sum[:, :, :, :, -1]  # [C, B, G, H]
        carry = (  # [C, B, G, H, L]
            (1.0 - late_now) * step_now * keep_now * jnp.exp2(_rt.minimum(decay_end[:, :, :, :, None] - decay_sum, 0.0))
        )
        S_gained = product(  # [C, B, G, H, P, N]
            "cbghtp,cbgtn->cbghpn", x_before_now * carry[:, :, :, :, :, None], B_before_now
        )
        carry = (  # [C, B, G, H, L]
            late_now * step_now * jnp.exp2(_rt.minimum(decay_end[:, :, :, :, None] - decay_sum, 0.0))
        )
        S_gained_2 = product("cbghtp,cbgtn->cbghpn", x_now * carry[:, :, :, :, :, None], B_now)  # [C, B, G, H, P, N]
        S_entry, S = _rt.entries(decay_end[:, :, :, :, None, None], S_gained + S_gained_2, S, precision)
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
        score_S_product = product("cbgtn,cbgsn->cbgts", C_now, B_before_now)  # [C, B, G, L, L]
        causal = token[:, None] >= token[None, :]  # [L, L]
        score_S = jnp.where(  # [C, B, G, H, L, L]
            causal[None, None, None, None, :, :],
            (
                score_S_product[:, :, :, None, :, :]
                * decay_left
                * ((1.0 - late_now) * step_now * keep_now)[:, :, :, :, None, :]
            ),
            0.0,
        )
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
        score_S_2_product = product("cbgtn,cbgsn->cbgts", C_now, B_now)  # [C, B, G, L, L]
        score_S_2 = jnp.where(  # [C, B, G, H, L, L]
            causal[None, None, None, None, :, :],
            score_S_2_product[:, :, :, None, :, :] * decay_left * (late_now * step_now)[:, :, :, :, None, :],
            0.0,
        )
        read_S_carried = product("cbgtn,cbghpn->cbghtp", C_now, S_entry)  # [C, B, G, H, L, P]
        read_S_within_score_S = product("cbghts,cbghsp->cbghtp", score_S, x_before_now)  # [C, B, G, H, L, P]
        read_S_within_score_S_2 = product("cbghts,cbghsp->cbghtp", score_S_2, x_now)  # [C, B, G, H, L, P]
        read_S = (  # [C, B, G, H, L, P]
            jnp.exp2(decay_sum)[:, :, :, :, :, None] * read_S_carried + read_S_within_score_S + read_S_within_score_S_2
        )
        # mamba3.ssd:28  y = S[t] . C + D * x
        y_now = read_S + D[None, None, :, :, None, :] * x_now  # [C, B, G, H, L, P]
        if z is not None:
            # mamba3.ssd:29  when z: y = y * silu(z)
            y_now = y_now * jax.nn.silu(z_now)  # [C, B, G, H, L, P]
        return ((S,), (y_now.astype(call.outputs["y"]),))

    (y,), (S,) = _rt.walk(
        chunks,
        (S,),
        (
            (decay_log2, 3), (late, 3), (step, 3), (keep, 3), (B_before, 2), (x_before, 3), (B, 2), (x, 3), (C, 2),
            (z, 3),
        ),
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
    *args: object, **kwargs: object,
) -> tuple[Array, ...]:
    """Refused, with the reason."""
    raise NotImplementedError("mamba3: no steps are emitted for `trap[t-1]`, which reads the token before")


SPEC_DIGEST = "b6b621032d8f78ea8c48518a51fc683d91850142ed1f6034e6682ab6f6d4effb"
"""The SHA-256 of the spec's text; emitted by ssdgen 0.1.0."""
