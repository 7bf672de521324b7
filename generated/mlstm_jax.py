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

    one token:
    C = 2^(logsigmoid(f) * LOG2E) C + write v (x) k
    N = 2^(logsigmoid(f) * LOG2E) N + write k
    read_C = C . q
    read_N = N . q

Axes: b batch, t time, h head, p = 64 row channel, n = 64 column channel.
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
    dtypes={"y": "v"},
)


def forward(
    q: Array, k: Array, v: Array, i: Array, f: Array,
    *,
    C0: Array | None = None, N0: Array | None = None, chunk: int = 64, precision: Any = _rt.HIGHEST,
) -> tuple[Array, ...]:
    """mLSTM with sigmoid gates (Beck et al. 2024, arXiv 2405.04517; Beck et al. 2025, arXiv 2503.14376).

    Returns y[b t h p], the final state C[b h p n], the final state N[b h n].

    q: [b t h n], the dtype of v
    k: [b t h n], the dtype of v
    v: [b t h p], bfloat16 or float16 or float32
    i: [b t h], float32 or bfloat16 or float16
    f: [b t h], float32 or bfloat16 or float16
    C0: [b h p n], float32: the state before the first token, zero if absent
    N0: [b h n], float32: the state before the first token, zero if absent
    chunk: tokens a chunk; it changes the time that it takes, not the result
    precision: of products of float32, a jax.lax.Precision or its name; of bfloat16 it changes nothing

    A pure function to be traced: under jax.jit, with `chunk` and `precision` as static arguments, jax.vmap and
    jax.grad. Computed in float32, or float64 if an input is; products of bfloat16 inputs have bfloat16 operands
    and float32 sums. Raises TypeError or ValueError, which name the argument, for a missing input, a dtype, rank
    or size, or a number out of range; values of arrays are not looked at.
    """
    call = _rt.check(LAYER, {"q": q, "k": k, "v": v, "i": i, "f": f}, {"C": C0, "N": N0}, {})
    _rt.check_chunk(LAYER, chunk)
    size, dtype = call.size, call.dtype
    q = jnp.transpose(q, (0, 2, 1, 3)).astype(dtype)
    k = jnp.transpose(k, (0, 2, 1, 3)).astype(dtype)
    v = jnp.transpose(v, (0, 2, 1, 3)).astype(dtype)
    i = jnp.transpose(i, (0, 2, 1)).astype(dtype)
    f = jnp.transpose(f, (0, 2, 1)).astype(dtype)
    C = _rt.initial(LAYER, "C", C0, call)
    N = _rt.initial(LAYER, "N", N0, call)
    size_n = float(size["n"])
    product, precision = _rt.products(call.inputs["v"], dtype, precision)
    decay_log2 = _rt.minimum(_rt.maximum(jax.nn.log_sigmoid(f) * LOG2E, -128.0), 0.0)  # [B, H, L]
    # mlstm.ssd:13  write = sigmoid(i) / sqrt(size(n))
    write = jax.nn.sigmoid(i) / jnp.sqrt(size_n)  # [B, H, L]

    def chunks(states: tuple[Array, ...], now: tuple[Any, ...]) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """Several chunks side by side: from the states before them to those behind, and their outputs."""
        C, N = states
        decay_log2_now, write_now, k_now, v_now, q_now = now
        token = jnp.arange(decay_log2_now.shape[3], dtype=dtype)
        decay_sum = _rt.summed(decay_log2_now, 3)  # [C, B, H, L]
        decay_end = decay_sum[:, :, :, -1]  # [C, B, H]
        carry = write_now * jnp.exp2(_rt.minimum(decay_end[:, :, :, None] - decay_sum, 0.0))  # [C, B, H, L]
        C_gained = product("cbhtp,cbhtn->cbhpn", v_now * carry[:, :, :, :, None], k_now)  # [C, B, H, P, N]
        carry = write_now * jnp.exp2(_rt.minimum(decay_end[:, :, :, None] - decay_sum, 0.0))  # [C, B, H, L]
        N_gained = product("cbht,cbhtn->cbhn", carry, k_now)  # [C, B, H, N]
        C_entry, C = _rt.entries(decay_end[:, :, :, None, None], C_gained, C, precision)
        N_entry, N = _rt.entries(decay_end[:, :, :, None], N_gained, N, precision)
        causal_before = token[:, None] > token[None, :]  # [L, L]
        decay_left = jnp.exp2(  # [C, B, H, L, L]
            _rt.minimum(
                jnp.where(
                    causal_before[None, None, None, :, :],
                    decay_sum[:, :, :, :, None] - decay_sum[:, :, :, None, :],
                    0.0,
                ),
                0.0,
            ),
        )
        score_product = product("cbhtn,cbhsn->cbhts", q_now, k_now)  # [C, B, H, L, L]
        causal = token[:, None] >= token[None, :]  # [L, L]
        score = jnp.where(  # [C, B, H, L, L]
            causal[None, None, None, :, :], score_product * decay_left * write_now[:, :, :, None, :], 0.0
        )
        read_C_carried = product("cbhtn,cbhpn->cbhtp", q_now, C_entry)  # [C, B, H, L, P]
        read_C_within_score = product("cbhts,cbhsp->cbhtp", score, v_now)  # [C, B, H, L, P]
        read_C = jnp.exp2(decay_sum)[:, :, :, :, None] * read_C_carried + read_C_within_score  # [C, B, H, L, P]
        read_N_carried = product("cbhtn,cbhn->cbht", q_now, N_entry)  # [C, B, H, L]
        read_N = jnp.exp2(decay_sum) * read_N_carried + jnp.sum(score, 4)  # [C, B, H, L]
        # mlstm.ssd:22  y = (C[t] . q) / max(abs(N[t] . q), 1)
        y_now = read_C / _rt.maximum(jnp.abs(read_N), 1.0)[:, :, :, :, None]  # [C, B, H, L, P]
        return ((C, N), (y_now.astype(call.outputs["y"]),))

    (y,), (C, N) = _rt.walk(
        chunks,
        (C, N),
        ((decay_log2, 2), (write, 2), (k, 2), (v, 2), (q, 2)),
        ((2, (size["b"], size["h"], size["t"], size["p"]), call.outputs["y"]),),
        size["t"],
        chunk,
    )
    return (jnp.transpose(y, (0, 2, 1, 3)), C, N)


def init_state(
    batch: int, heads: int, *, p: int = 64, n: int = 64, dtype: Any = jnp.float32,
) -> tuple[Array, Array]:
    """Zero states: C[b h p n], N[b h n]."""
    return (jnp.zeros((batch, heads, p, n), dtype), jnp.zeros((batch, heads, n), dtype))


def step(
    C: Array, N: Array, q: Array, k: Array, v: Array, i: Array, f: Array,
) -> tuple[Array, ...]:
    """One token: y[b h p] and the states behind it, C[b h p n], N[b h n], float32, bfloat16 or float64 as they
    came. Inputs are as in `forward`, without its time axis: q[b h n], k[b h n], v[b h p], i[b h], f[b h].

    A pure function, as `forward` is: under jax.jit, donate the states to have them updated in their memory.
    """
    call = _rt.check(LAYER, {"q": q, "k": k, "v": v, "i": i, "f": f}, {"C": C, "N": N}, {}, step=True)
    size, dtype = call.size, call.dtype
    q = q.astype(dtype)
    k = k.astype(dtype)
    v = v.astype(dtype)
    i = i.astype(dtype)
    f = f.astype(dtype)
    C = C.astype(dtype)
    N = N.astype(dtype)
    size_n = float(size["n"])
    decay = jnp.exp2(_rt.minimum(_rt.maximum(jax.nn.log_sigmoid(f) * LOG2E, -128.0), 0.0))  # [B, H]
    C = decay[:, :, None, None] * C  # [B, H, P, N]
    # mlstm.ssd:13  write = sigmoid(i) / sqrt(size(n))
    write = jax.nn.sigmoid(i) / jnp.sqrt(size_n)  # [B, H]
    C = C + (write[:, :, None] * v)[:, :, :, None] * k[:, :, None, :]  # [B, H, P, N]
    N = decay[:, :, None] * N  # [B, H, N]
    N = N + write[:, :, None] * k  # [B, H, N]
    read_C = jnp.sum(C * q[:, :, None, :], 3)  # [B, H, P]
    read_N = jnp.sum(N * q, 2)  # [B, H]
    # mlstm.ssd:22  y = (C[t] . q) / max(abs(N[t] . q), 1)
    y_now = read_C / _rt.maximum(jnp.abs(read_N), 1.0)[:, :, None]  # [B, H, P]
    return (y_now.astype(call.outputs["y"]), C.astype(call.states["C"]), N.astype(call.states["N"]))


SPEC_DIGEST = "1eb781cd19dea253f942e5647c0f71b3f5f97bef3a04bb410563e4911a2908e3"
"""The SHA-256 of the spec's text; emitted by ssdgen 0.1.0."""
