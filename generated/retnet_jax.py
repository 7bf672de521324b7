"""Retention with a constant decay a head (Sun et al. 2023, arXiv 2307.08621).

The forward pass of

    S[t] = (1 - exp2(-5 - index(h))) * S[t-1] + v * k / sqrt(size(n))

emitted by ssdgen, as the jump formula over chunks of L tokens:

    decay = log1p(-exp2(-5 - index(h))) * LOG2E    log2, one a head
    s[i] = (i + 1) * decay
    weight = 1 / sqrt(size(n))

    S_end = 2^s[L-1] S
      + sum_j 2^(s[L-1] - s[j]) weight v[j] (x) k[j]
    score[i,j] = (q[i] . k[j]) 2^(s[i] - s[j]) weight    j <= i
    read_S[i] = 2^s[i] S . q[i]
      + sum_j score[i,j] v[j]

    y = read_S

    one token:
    S = 2^(log1p(-exp2(-5 - index(h))) * LOG2E) S + (1 / sqrt(size(n))) v (x) k
    read_S = S . q

Axes: b batch, t time, h head, p = 64 row channel, n = 64 column channel.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import Array

from . import _xla as _rt

LOG2E = math.log2(math.e)

LAYER = _rt.Layer(
    "retnet",
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


def forward(
    q: Array, k: Array, v: Array,
    *,
    S0: Array | None = None, chunk: int = 64, precision: Any = _rt.HIGHEST,
) -> tuple[Array, ...]:
    """Retention with a constant decay a head (Sun et al. 2023, arXiv 2307.08621).

    Returns y[b t h p], the final state S[b h p n].

    q: [b t h n], the dtype of v
    k: [b t h n], the dtype of v
    v: [b t h p], bfloat16 or float16 or float32
    S0: [b h p n], float32: the state before the first token, zero if absent
    chunk: tokens a chunk; it changes the time that it takes, not the result
    precision: of products of float32, a jax.lax.Precision or its name; of bfloat16 it changes nothing

    A pure function to be traced: under jax.jit, with `chunk` and `precision` as static arguments, jax.vmap and
    jax.grad. Computed in float32, or float64 if an input is; products of bfloat16 inputs have bfloat16 operands
    and float32 sums. Raises TypeError or ValueError, which name the argument, for a missing input, a dtype, rank
    or size, or a number out of range; values of arrays are not looked at.
    """
    call = _rt.check(LAYER, {"q": q, "k": k, "v": v}, {"S": S0}, {})
    _rt.check_chunk(LAYER, chunk)
    size, dtype = call.size, call.dtype
    q = jnp.transpose(q, (0, 2, 1, 3)).astype(dtype)
    k = jnp.transpose(k, (0, 2, 1, 3)).astype(dtype)
    v = jnp.transpose(v, (0, 2, 1, 3)).astype(dtype)
    S = _rt.initial(LAYER, "S", S0, call)
    size_n = float(size["n"])
    index_h = jnp.arange(size["h"], dtype=dtype)
    product, precision = _rt.products(call.inputs["v"], dtype, precision)
    decay_log2 = _rt.minimum(_rt.maximum(jnp.log1p(-jnp.exp2(-5.0 - index_h)) * LOG2E, -128.0), 0.0)  # [H]

    def chunks(states: tuple[Array, ...], now: tuple[Any, ...]) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """Several chunks side by side: from the states before them to those behind, and their outputs."""
        (S,) = states
        k_now, v_now, q_now = now
        token = jnp.arange(k_now.shape[3], dtype=dtype)
        decay_sum = (token + 1.0)[None, :] * decay_log2[:, None]  # [H, L]
        decay_end = decay_sum[:, -1]  # [H]
        carry = 1.0 / jnp.sqrt(size_n) * jnp.exp2(_rt.minimum(decay_end[:, None] - decay_sum, 0.0))  # [H, L]
        S_gained = product("cbhtp,cbhtn->cbhpn", v_now * carry[None, None, :, :, None], k_now)  # [C, B, H, P, N]
        S_entry, S = _rt.entries(decay_end[None, None, :, None, None], S_gained, S, precision)
        causal_before = token[:, None] > token[None, :]  # [L, L]
        decay_left = jnp.exp2(  # [H, L, L]
            _rt.minimum(jnp.where(causal_before[None, :, :], decay_sum[:, :, None] - decay_sum[:, None, :], 0.0), 0.0)
        )
        score_product = product("cbhtn,cbhsn->cbhts", q_now, k_now)  # [C, B, H, L, L]
        causal = token[:, None] >= token[None, :]  # [L, L]
        score = jnp.where(  # [C, B, H, L, L]
            causal[None, None, None, :, :],
            score_product * decay_left[None, None, :, :, :] * (1.0 / jnp.sqrt(size_n)),
            0.0,
        )
        read_S_carried = product("cbhtn,cbhpn->cbhtp", q_now, S_entry)  # [C, B, H, L, P]
        read_S_within_score = product("cbhts,cbhsp->cbhtp", score, v_now)  # [C, B, H, L, P]
        read_S = jnp.exp2(decay_sum)[None, None, :, :, None] * read_S_carried + read_S_within_score  # [C, B, H, L, P]
        # retnet.ssd:15  y = S[t] . q
        y_now = read_S  # [C, B, H, L, P]
        return ((S,), (y_now.astype(call.outputs["y"]),))

    (y,), (S,) = _rt.walk(
        chunks,
        (S,),
        ((k, 2), (v, 2), (q, 2)),
        ((2, (size["b"], size["h"], size["t"], size["p"]), call.outputs["y"]),),
        size["t"],
        chunk,
    )
    return (jnp.transpose(y, (0, 2, 1, 3)), S)


def init_state(
    batch: int, heads: int, *, p: int = 64, n: int = 64, dtype: Any = jnp.float32,
) -> Array:
    """Zero states: S[b h p n]."""
    return jnp.zeros((batch, heads, p, n), dtype)


def step(
    S: Array, q: Array, k: Array, v: Array,
) -> tuple[Array, ...]:
    """One token: y[b h p] and the states behind it, S[b h p n], float32, bfloat16 or float64 as they came. Inputs
    are as in `forward`, without its time axis: q[b h n], k[b h n], v[b h p].

    A pure function, as `forward` is: under jax.jit, donate the states to have them updated in their memory.
    """
    call = _rt.check(LAYER, {"q": q, "k": k, "v": v}, {"S": S}, {}, step=True)
    size, dtype = call.size, call.dtype
    q = q.astype(dtype)
    k = k.astype(dtype)
    v = v.astype(dtype)
    S = S.astype(dtype)
    size_n = float(size["n"])
    index_h = jnp.arange(size["h"], dtype=dtype)
    decay = jnp.exp2(_rt.minimum(_rt.maximum(jnp.log1p(-jnp.exp2(-5.0 - index_h)) * LOG2E, -128.0), 0.0))  # [H]
    S = decay[None, :, None, None] * S  # [B, H, P, N]
    S = S + (1.0 / jnp.sqrt(size_n) * v)[:, :, :, None] * k[:, :, None, :]  # [B, H, P, N]
    read_S = jnp.sum(S * q[:, :, None, :], 3)  # [B, H, P]
    # retnet.ssd:15  y = S[t] . q
    y_now = read_S  # [B, H, P]
    return (y_now.astype(call.outputs["y"]), S.astype(call.states["S"]))


SPEC_DIGEST = "594729a3f3738506bfe1f038afd626be717dfa437d5062c6ec23378cfff8bb78"
"""The SHA-256 of the spec's text; emitted by ssdgen 0.1.0."""
