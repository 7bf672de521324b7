"""The Mamba-2 language model of `ssdgen.models.mamba2` for XLA: the same checkpoints, pure functions, donated caches.

    model = Mamba2.load("checkpoint", dtype=jnp.bfloat16)
    tokens = model.generate([[5, 7, 9], [3]], most=100)          # [b most], an array of numpy

What a sequence leaves behind, its cache, is a pytree that is donated: XLA updates it where it is. Tokens are made by a compiled
loop whose length is a number at run time, so one executable makes any number of them.

Layers are written out one behind the other, in no `lax.scan` over stacked weights. Decoding reads every weight once a token,
and that is its time; a loop over layers would slice its weights out of the stack, which XLA copies before a product reads
them: three times the traffic. What it costs is compiling as many layers as the model has, once for each shape.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ssdgen.generated import mamba2_jax as recurrence
from ssdgen.models.checkpoint import open_checkpoint
from ssdgen.models.config import Config, check_tokens

Layer = dict[str, Array]
"""A layer's weights, in the shapes of `Config.shapes`: norm, in_proj, out_proj, dt_bias, D, and if the model has them in_bias,
out_bias, conv_bias, gated_norm; conv is [taps convolved], and A = -exp(A_log)."""

Weights = dict[str, Any]
"""A pytree: embedding, norm, head (if it is not the embedding), and layers, a tuple of Layer."""

Cache = tuple[tuple[Array, Array], ...]
"""A pytree, of each layer the last inputs of its convolution [b taps-1 convolved], in the model's dtype, and its states
[b heads channels state], float32."""

CHUNK = 64
"""Tokens a chunk of the recurrence, with which an H200 was measured. Scores are [tokens chunk] a head and the states of chunks
[tokens / chunk, channels, state]: as many numbers where chunk^2 is channels * state."""

DTYPES = (jnp.float32, jnp.bfloat16)

ROOM = 256
"""Tokens that the loop makes at most before the host takes them: the length of an array on the device."""


def init_cache(config: Config, batch: int, dtype: Any = jnp.float32) -> Cache:
    """The cache before any token."""
    c = config
    shape = (batch, c.heads, c.channels, c.state)
    return tuple(
        (jnp.zeros((batch, c.taps - 1, c.convolved), dtype), jnp.zeros(shape, jnp.float32)) for _ in range(c.layers)
    )


def logits(
    config: Config,
    weights: Weights,
    tokens: Array,
    precision: Any = lax.Precision.HIGHEST,
    chunk: int = CHUNK,
) -> Array:
    """The logits of the token behind every one of `tokens`[b t], integers: [b t vocab], float32.

    precision: of products of float32 weights, a jax.lax.Precision or its name; chunk: tokens a chunk of the recurrence
    """
    cache = init_cache(config, tokens.shape[0], weights["embedding"].dtype)
    u, _ = _sequence(config, weights, tokens, cache, None, precision, chunk)
    return _head(weights, u, precision)


def prefill(
    config: Config,
    weights: Weights,
    tokens: Array,
    cache: Cache,
    padding: Array | None = None,
    precision: Any = lax.Precision.HIGHEST,
    chunk: int = CHUNK,
) -> tuple[Array, Cache]:
    """The logits of the token behind rows of `tokens`[b t]: [b vocab]; and the cache behind them, which `cache` is before.

    padding: [b], integers: so many tokens at the left of each row are none; `cache` is then empty
    """
    u, cache = _sequence(config, weights, tokens, cache, padding, precision, chunk)
    return _head(weights, u[:, -1], precision), cache


def step(
    config: Config, weights: Weights, tokens: Array, cache: Cache, precision: Any = lax.Precision.HIGHEST
) -> tuple[Array, Cache]:
    """The logits of the token behind `tokens`[b], and the cache behind them."""
    residual, after = _embedded(config, weights, tokens), []
    for layer, (conv, state) in zip(weights["layers"], cache, strict=True):
        u = _norm(residual, layer["norm"], config.eps).astype(weights["embedding"].dtype)
        z, xBC, dt = _projected(config, layer, u, precision)
        window = jnp.concatenate((conv, xBC[:, None]), 1)  # [b taps convolved]
        summed = jnp.sum(window.astype(jnp.float32) * layer["conv"].astype(jnp.float32), 1)
        x, B, C = _vectors(config, _activated(layer, summed, u.dtype))
        y, state = recurrence.step(state, x, dt, layer["A"], B, C, **_gated(config, layer, z))
        residual = _added(residual, _mixed(config, layer, y, z, precision))
        after.append((window[:, 1:], state))
    u = _norm(residual, weights["norm"], config.eps).astype(weights["embedding"].dtype)
    return _head(weights, u, precision), tuple(after)


def choose(scores: Array, key: Array, temperature: float = 0.0, top_k: int = 0) -> Array:
    """A token for every row of `scores`[b vocab], the logits: [b], int32.

    temperature: what they are divided by; 0 takes the likeliest
    top_k: only so many of the likeliest are in the draw, and those as likely as the last of them; 0 for all
    """
    if temperature == 0:
        return jnp.argmax(scores, -1).astype(jnp.int32)
    if 0 < top_k < scores.shape[-1]:
        least = jnp.sort(scores, -1)[:, -top_k, None]
        scores = jnp.where(scores < least, -jnp.inf, scores)
    return jnp.argmax(scores / temperature + jax.random.gumbel(key, scores.shape), -1).astype(jnp.int32)


def decode(
    config: Config,
    weights: Weights,
    cache: Cache,
    token: Array,
    ended: Array,
    key: Array,
    count: Array,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    stop: tuple[int, ...] = (),
    pad: int = 0,
    precision: Any = lax.Precision.HIGHEST,
) -> tuple[Array, Cache, Array, Array, Array]:
    """The next `count` tokens of every row, at most ROOM of them, in one loop: [b ROOM], the first `count` of them made.

    cache: behind all tokens but the last, `token`[b]
    ended: [b], bool: rows that make `pad` alone from now on; once all do, the loop ends
    key: of jax.random; count: an integer, at run time

    Also returns the next call's cache, token, ended and key.
    """
    made = jnp.full((token.shape[0], ROOM), pad, jnp.int32)
    stops = jnp.asarray(stop, jnp.int32)

    def more(carried: tuple[Any, ...]) -> Array:
        number, _, ended = carried[:3]
        return (number < count) & ~jnp.all(ended)

    def one(carried: tuple[Any, ...]) -> tuple[Any, ...]:
        number, token, ended, key, cache, made = carried
        scores, cache = step(config, weights, token, cache, precision)
        key, now = jax.random.split(key)
        token = jnp.where(ended, pad, choose(scores, now, temperature, top_k))
        ended = ended | jnp.any(token[:, None] == stops, 1)
        return number + 1, token, ended, key, cache, lax.dynamic_update_slice(made, token[:, None], (0, number))

    start = (jnp.zeros((), jnp.int32), token, ended, key, cache, made)
    _, token, ended, key, cache, made = lax.while_loop(more, one, start)
    return made, cache, token, ended, key


STATIC = ("config", "temperature", "top_k", "stop", "pad", "precision")
"""The arguments that a program is compiled for."""

prefilled = jax.jit(prefill, static_argnames=("config", "precision", "chunk"), donate_argnames="cache")
"""`prefill`, compiled once for each shape of the tokens; the cache is donated."""

decoded = jax.jit(decode, static_argnames=STATIC, donate_argnames=("cache", "token", "ended", "key"))
"""`decode`, compiled once for each batch and way of sampling, whatever the number of tokens; what it goes on from is
donated."""

scored = jax.jit(logits, static_argnames=("config", "precision", "chunk"))
"""`logits`, compiled once for each shape."""

chosen = jax.jit(choose, static_argnames=("temperature", "top_k"))
"""`choose`, compiled."""


class Mamba2:
    """A model for inference; `weights` by the names of `Config.shapes`, arrays of jax or numpy, converted to `dtype`.

    precision: of products of float32 weights, a jax.lax.Precision or its name

    Raises ValueError for another dtype than float32 and bfloat16, or for a weight that is missing, unknown or of another shape.
    """

    def __init__(
        self,
        config: Config,
        weights: Mapping[str, Any],
        dtype: Any = jnp.float32,
        precision: Any = lax.Precision.HIGHEST,
    ) -> None:
        shapes = config.shapes()
        dtype = _known(dtype)
        if weights.keys() != shapes.keys():
            raise ValueError(f"weights missing or unknown: {', '.join(sorted(weights.keys() ^ shapes.keys()))}")
        for name, shape in shapes.items():
            if weights[name].shape != shape:
                raise ValueError(f"weight `{name}` must have shape {list(shape)}, got {list(weights[name].shape)}")
        self.config, self.dtype, self.precision = config, dtype, precision
        self.weights = _pytree(config, weights, dtype)

    @classmethod
    def load(cls, folder: str | Path, dtype: Any = jnp.float32, precision: Any = lax.Precision.HIGHEST) -> Mamba2:
        """The model of a checkpoint. Raises UserError, which names the file and what is wrong with it."""
        dtype, checkpoint = _known(dtype), open_checkpoint(folder)
        weights = {name: _placed(name, x, dtype) for name, x in checkpoint.read("flax")}
        return cls(checkpoint.config, weights, dtype, precision)

    @classmethod
    def random(
        cls, config: Config, dtype: Any = jnp.float32, precision: Any = lax.Precision.HIGHEST, seed: int = 0
    ) -> Mamba2:
        """A model of untrained weights, made on the device, as Mamba-2 begins: steps from 1e-3 to 1e-1, A from -16 to -1."""
        weights = {}
        for number, (name, shape) in enumerate(config.shapes().items()):
            key = jax.random.fold_in(jax.random.key(seed), number)
            weights[name] = _placed(name, _random(name.split(".", 2)[-1], shape, key), dtype)
        return cls(config, weights, dtype, precision)

    def init_cache(self, batch: int) -> Cache:
        """The cache before any token."""
        return init_cache(self.config, batch, self.dtype)

    def logits(self, tokens: Any) -> Array:
        """The logits of the token behind every one of `tokens`[b t], integers: [b t vocab], float32. ValueError for others, for
        none, or for some that the vocabulary lacks."""
        given = np.asarray(tokens)
        if given.ndim != 2 or not given.size or not np.issubdtype(given.dtype, np.integer):
            raise ValueError(f"`tokens` must be integers [b t], got {given.dtype} {list(given.shape)}")
        check_tokens(given.ravel().tolist(), self.config.vocab)
        return scored(self.config, self.weights, jnp.asarray(given), precision=self.precision)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        most: int,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        seed: int = 0,
        stop: Sequence[int] = (),
        pad: int = 0,
    ) -> np.ndarray[Any, Any]:
        """The next tokens of every prompt, [b k], int32: `most` of them, or fewer if all rows have ended before.

        prompts: a row each, of at least one token; rows of different lengths are padded on the left, which changes nothing
        temperature, top_k, seed: how tokens are chosen, as in `choose`; temperature 0 takes the likeliest
        stop: tokens that end a row, which has `pad` behind them

        Raises ValueError for prompts that do not fit, and for numbers out of range, before anything is computed.
        """
        tokens, padding = _rows(prompts, self.config.vocab)
        check_tokens((*stop, pad), self.config.vocab)
        if most < 1:
            raise ValueError(f"at least one token is to be made, got {most}")
        if not 0 <= temperature < math.inf or top_k < 0:
            raise ValueError(f"temperature and top_k must be numbers from 0, got {temperature} and {top_k}")
        how = {"temperature": temperature, "top_k": top_k}
        scores, cache = prefilled(
            self.config, self.weights, tokens, self.init_cache(len(tokens)), padding, precision=self.precision
        )
        key, now = jax.random.split(jax.random.key(seed))
        token = chosen(scores, now, **how)
        ended = jnp.isin(token, jnp.asarray(stop, jnp.int32))
        pieces, left = [np.asarray(token)[:, None]], most - 1
        while left and not ended.all():
            count = min(left, ROOM)
            made, cache, token, ended, key = decoded(
                self.config, self.weights, cache, token, ended, key, jnp.int32(count),
                stop=tuple(stop), pad=pad, precision=self.precision, **how,
            )  # fmt: skip
            pieces.append(np.asarray(made)[:, :count])
            left -= count
        return _until_all_ended(np.concatenate(pieces, 1), stop)


def _sequence(
    config: Config, weights: Weights, tokens: Array, cache: Cache, padding: Array | None, precision: Any, chunk: int
) -> tuple[Array, Cache]:
    """What the head is applied to, [b t width], and the cache behind. Padding at the left leaves the convolution's cache zero
    and, as its x is zero too, the states; and sums of decays do not depend on what it is."""
    residual, after = _embedded(config, weights, tokens), []
    length = tokens.shape[1]
    hidden = None if padding is None else (jnp.arange(length)[None, :] < padding[:, None])[:, :, None]
    for layer, (conv, state) in zip(weights["layers"], cache, strict=True):
        u = _norm(residual, layer["norm"], config.eps).astype(weights["embedding"].dtype)
        z, xBC, dt = _projected(config, layer, u, precision)
        xBC, dt = (v if hidden is None else jnp.where(hidden, 0, v) for v in (xBC, dt))
        window = jnp.concatenate((conv, xBC), 1)
        taps = layer["conv"].astype(jnp.float32)
        shifted = [window[:, i : i + length].astype(jnp.float32) * taps[i] for i in range(config.taps)]
        mixed = _activated(layer, sum(shifted[1:], shifted[0]), u.dtype)
        x, B, C = _vectors(config, mixed if hidden is None else jnp.where(hidden, 0, mixed))
        y, state = recurrence.forward(
            x, dt, layer["A"], B, C, S0=state, chunk=chunk, precision=precision, **_gated(config, layer, z)
        )
        residual = _added(residual, _mixed(config, layer, y, z, precision))
        after.append((window[:, length:], state))
    return _norm(residual, weights["norm"], config.eps).astype(weights["embedding"].dtype), tuple(after)


def _embedded(config: Config, weights: Weights, tokens: Array) -> Array:
    """The first residual."""
    rows = weights["embedding"][tokens]
    return rows.astype(jnp.float32) if config.residual_f32 else rows


def _norm(x: Array, weight: Array, eps: float, groups: int = 1) -> Array:
    """x over its root mean square, over each of `groups` equal parts of its last axis, times the weight; float32."""
    parts = x.astype(jnp.float32).reshape(*x.shape[:-1], groups, -1)
    scale = lax.rsqrt(jnp.mean(jnp.square(parts), -1, keepdims=True) + eps)
    return (parts * scale).reshape(x.shape) * weight.astype(jnp.float32)


def _linear(x: Array, weight: Array, bias: Array | None, precision: Any, dtype: Any = jnp.float32) -> Array:
    """x[... w] times weight[p w], summed in float32 and then of a dtype."""
    how = None if weight.dtype == jnp.bfloat16 else precision
    y: Array = jnp.einsum("...w,pw->...p", x, weight, precision=how, preferred_element_type=dtype)
    return y if bias is None else (y.astype(jnp.float32) + bias.astype(jnp.float32)).astype(dtype)


def _projected(config: Config, layer: Layer, u: Array, precision: Any) -> tuple[Array, ...]:
    """z, the channels of the convolution, and dt."""
    into = _linear(u, layer["in_proj"], layer.get("in_bias"), precision, u.dtype)
    return tuple(jnp.split(into, [config.inner, config.inner + config.convolved], -1))


def _activated(layer: Layer, summed: Array, dtype: Any) -> Array:
    """silu of the convolution's sums, float32, with its bias."""
    bias = layer.get("conv_bias")
    return jax.nn.silu(summed if bias is None else summed + bias.astype(jnp.float32)).astype(dtype)


def _vectors(config: Config, xBC: Array) -> tuple[Array, ...]:
    """x[... h p], B and C[... g n]."""
    c = config
    x, B, C = jnp.split(xBC, [c.inner, c.inner + c.groups * c.state], -1)
    return tuple(v.reshape(*v.shape[:-1], parts, -1) for v, parts in ((x, c.heads), (B, c.groups), (C, c.groups)))


def _gated(config: Config, layer: Layer, z: Array) -> dict[str, Any]:
    """The other arguments of the recurrence."""
    gate = None if config.gated_norm and config.norm_before_gate else z.reshape(*z.shape[:-1], config.heads, -1)
    limits = {"dt_min": config.step_min, "dt_max": config.step_max}
    return {"D": layer["D"], "dt_bias": layer["dt_bias"], "z": gate, **limits}


def _mixed(config: Config, layer: Layer, y: Array, z: Array, precision: Any) -> Array:
    """What a layer adds, of the recurrence's y[... h p]."""
    flat = y.reshape(z.shape)
    if config.gated_norm:
        normed = _norm(flat, layer["gated_norm"], config.eps, config.norm_groups)
        flat = (normed * jax.nn.silu(z.astype(jnp.float32)) if config.norm_before_gate else normed).astype(z.dtype)
    return _linear(flat, layer["out_proj"], layer.get("out_bias"), precision)


def _added(residual: Array, update: Array) -> Array:
    """The residual behind a layer, in the dtype that it has."""
    return (residual + update).astype(residual.dtype)


def _head(weights: Weights, u: Array, precision: Any) -> Array:
    return _linear(u, weights.get("head", weights["embedding"]), None, precision)


def _known(dtype: Any) -> Any:
    """One of DTYPES, also by its name; ValueError for another."""
    for known in DTYPES:
        if dtype in (known, jnp.dtype(known), jnp.dtype(known).name):
            return known
    raise ValueError(f"a model computes in float32 or bfloat16, not in {dtype}")


def _placed(name: str, x: Any, dtype: Any) -> Array:
    """A weight on the device, in the dtype that the model has it in."""
    return jnp.asarray(x, jnp.float32 if name.rsplit(".", 1)[-1] in ("A_log", "D", "dt_bias") else dtype)


def _pytree(config: Config, weights: Mapping[str, Any], dtype: Any) -> Weights:
    """Weights by their canonical names as the functions above take them."""
    layers = []
    for i in range(config.layers):
        layer: Layer = {}
        for name in (n for n in weights if n.startswith(f"layers.{i}.")):
            x, kind = _placed(name, weights[name], dtype), name.removeprefix(f"layers.{i}.")
            short = kind.removesuffix(".weight").replace("_proj.bias", "_bias").replace("conv.bias", "conv_bias")
            layer |= {"A": -jnp.exp(x)} if kind == "A_log" else {short: x.T if short == "conv" else x}
        layers.append(layer)
    whole = {name: _placed(name, x, dtype) for name, x in weights.items() if not name.startswith("layers.")}
    return {**whole, "layers": tuple(layers)}


@functools.partial(jax.jit, static_argnames=("kind", "shape"))
def _random(kind: str, shape: tuple[int, ...], key: Array) -> Array:
    """An untrained weight."""
    if kind in ("norm", "gated_norm", "D"):
        return jnp.ones(shape)
    if kind == "A_log":
        return jnp.log(jax.random.uniform(key, shape, minval=1.0, maxval=16.0))
    if kind == "dt_bias":
        steps = jnp.exp(jax.random.uniform(key, shape, minval=math.log(1e-3), maxval=math.log(1e-1)))
        return steps + jnp.log(-jnp.expm1(-steps))
    if kind.endswith("bias"):
        return jnp.zeros(shape)
    bound = 0.02 * math.sqrt(3) if kind == "embedding" else shape[-1] ** -0.5
    return jax.random.uniform(key, shape, minval=-bound, maxval=bound)


def _rows(prompts: Sequence[Sequence[int]], vocab: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
    """Prompts [b t], padded on the left, and how much padding each has; None if none has any."""
    prompts = [p.tolist() if hasattr(p, "tolist") else p for p in prompts]
    if not prompts or not all(prompts):
        raise ValueError(f"prompts of at least one token are wanted, got {list(map(len, prompts))}")
    for prompt in prompts:
        check_tokens(prompt, vocab)
    longest = max(map(len, prompts))
    padding = np.array([longest - len(p) for p in prompts], np.int32)
    tokens = np.array([[0] * (longest - len(p)) + list(p) for p in prompts], np.int32)
    return tokens, padding if padding.any() else None


def _until_all_ended(tokens: np.ndarray[Any, Any], stop: Sequence[int]) -> np.ndarray[Any, Any]:
    """Tokens up to the one that ends the last row, if all have ended."""
    ends = np.isin(tokens, np.array(stop, np.int32))
    return tokens[:, : ends.argmax(1).max() + 1] if ends.any(1).all() else tokens
