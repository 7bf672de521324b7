"""A Mamba-2 language model on the generated kernels: whole sequences, prefill of a cache, one token at a time.

A layer, with u the norm of the residual, which its result is added to:

    z, x, B, C, dt = in_proj(u)
    x, B, C = silu(causal convolution of x, B, C)
    y = the recurrence of specs/mamba2.ssd, gated: y * silu(z)
    result = out_proj(norm(y))

The gate may stand behind the norm instead; `Config` says. What a sequence leaves behind is of one size whatever its length: the
last inputs of every convolution, and every state. Nothing here waits for the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from ssdgen.diagnostics import UserError
from ssdgen.generated import causal_conv, mamba2, norms, projection
from ssdgen.models.checkpoint import open_checkpoint
from ssdgen.models.config import Config

AT_ONCE = 8192
"""Tokens of all rows together that a prefill computes at once: its memory does not grow with longer ones."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class LayerWeights:
    """The weights of a layer, as `Config.shapes` has them, but A = -exp(A_log); None for those the model lacks."""

    norm: Tensor
    in_proj: Tensor
    in_bias: Tensor | None
    conv: Tensor
    conv_bias: Tensor | None
    dt_bias: Tensor
    A: Tensor
    D: Tensor
    gated_norm: Tensor | None
    out_proj: Tensor
    out_bias: Tensor | None


@dataclass(frozen=True)
class Cache:
    """What a model remembers of a batch of sequences, changed in place: the last inputs of every layer's convolution
    [layers b convolved taps-1], in the model's dtype, and its states [layers b heads channels state], float32."""

    convolution: Tensor
    states: Tensor

    def reset(self) -> None:
        """Forget everything."""
        self.convolution.zero_()
        self.states.zero_()


class Mamba2:
    """A model for inference. `weights` by the names of `Config.shapes`, on one device; they are converted to `dtype`.

    Raises ValueError for another dtype than float32, bfloat16, float16 and float64 (on the CPU), or for a weight that is
    missing, unknown or of another shape.
    """

    def __init__(self, config: Config, weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
        shapes = config.shapes()
        _check_dtype(dtype)
        if weights.keys() != shapes.keys():
            odd = sorted(weights.keys() ^ shapes.keys())
            raise ValueError(f"weights missing or unknown: {', '.join(odd)}")
        for name, shape in shapes.items():
            if tuple(weights[name].shape) != shape:
                raise ValueError(f"weight `{name}` must have shape {list(shape)}, got {list(weights[name].shape)}")
        self.config, self.dtype = config, dtype
        self._wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.device = weights["embedding"].device
        self.embedding = weights["embedding"].to(dtype)
        self.norm = weights["norm"].to(dtype)
        self.head = self.embedding if config.tied else weights["head"].to(dtype)
        self.layers = tuple(self._layer(weights, f"layers.{i}.") for i in range(config.layers))

    @classmethod
    def load(cls, folder: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Mamba2:
        """The model of a checkpoint.

        Raises UserError, which names the file and what is wrong with it, or says that the device has not memory enough;
        ValueError for a device or a dtype that is none.
        """
        _check_dtype(dtype)
        _check_device(device)
        checkpoint = open_checkpoint(folder)
        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise UserError(f"torch finds no GPU here for device={str(device)!r}", 'load with device="cpu"')
        try:
            weights = {name: _placed(name, x, device, dtype) for name, x in checkpoint.read("pt")}
            return cls(checkpoint.config, weights, dtype)
        except torch.OutOfMemoryError as error:
            need = checkpoint.config.parameters * dtype.itemsize / 2**30
            raise UserError(
                f"{folder}: its weights take {need:.1f} GiB, which {device} has not free",
                "take a narrower dtype, or the CPU",
            ) from error

    @classmethod
    def random(
        cls, config: Config, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> Mamba2:
        """A model of untrained weights, made on the device, as Mamba-2 begins: steps from 1e-3 to 1e-1, A from -16 to -1."""
        random = torch.Generator(device).manual_seed(seed)
        weights = {}
        for name, shape in config.shapes().items():
            kind = name.split(".", 2)[-1]
            if kind in ("norm", "gated_norm", "D"):
                value = torch.ones(shape, device=device)
            elif kind in ("A_log", "dt_bias"):
                share = torch.rand(shape, device=device, generator=random)
                step = torch.exp(math.log(1e-3) + (math.log(1e-1) - math.log(1e-3)) * share)
                value = torch.log(1 + 15 * share) if kind == "A_log" else step + torch.log(-torch.expm1(-step))
            elif kind.endswith("bias"):
                value = torch.zeros(shape, device=device)
            else:
                bound = 0.02 * math.sqrt(3) if kind == "embedding" else shape[-1] ** -0.5
                value = torch.empty(shape, device=device, dtype=dtype).uniform_(-bound, bound, generator=random)
            weights[name] = _placed(name, value, device, dtype)
        return cls(config, weights, dtype)

    def init_cache(self, batch: int) -> Cache:
        """The cache before any token."""
        c = self.config
        return Cache(
            torch.zeros((c.layers, batch, c.convolved, c.taps - 1), device=self.device, dtype=self.dtype),
            torch.zeros((c.layers, batch, c.heads, c.channels, c.state), device=self.device, dtype=self._wide),
        )

    @torch.no_grad()
    def logits(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        """The logits of the token behind every one of `tokens`[b t], int64: [b t vocab], float32 (float64 of such a model).

        padding: [b], int64: so many tokens at the left of each row are none, and their logits mean nothing
        """
        self._check(tokens, 2)
        cache = self.init_cache(len(tokens))
        return self._head(self._sequence(tokens, cache, _hidden(tokens, padding, 0), fresh=True))

    @torch.no_grad()
    def prefill(self, tokens: Tensor, cache: Cache, padding: Tensor | None = None, at_once: int = AT_ONCE) -> Tensor:
        """The logits of the token behind rows of `tokens`[b t]: [b vocab]; `cache`, empty before, is then behind them.

        tokens: int64, on any device; each piece of them is copied when its turn comes, without waiting if they are in pinned
        memory
        padding: [b], int64, on the model's device: so many tokens at the left of each row are none; at least one is
        at_once: tokens of all rows together that are computed at once
        """
        self._check(tokens, 2, cache)
        piece = max(1, at_once // len(tokens))
        for start in range(0, tokens.shape[1], piece):
            now = tokens[:, start : start + piece].to(self.device, non_blocking=True)
            hidden = self._sequence(now, cache, _hidden(now, padding, start), fresh=start == 0)
        return self._head(hidden[:, -1])

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: Cache) -> Tensor:
        """The logits of the token behind `tokens`[b], int64, which follow those that `cache` is behind: [b vocab]."""
        self._check(tokens, 1, cache)
        residual, eps = self._embedded(tokens), self.config.eps
        for number, layer in enumerate(self.layers):
            self._step(layer, residual, cache.convolution[number], cache.states[number])
        logits: Tensor = projection.project(residual, self.head, norm=self.norm, eps=eps, dtype=self._wide, steady=True)
        return logits

    def _check(self, tokens: Tensor, rank: int, cache: Cache | None = None) -> None:
        """ValueError for tokens of another rank, none, of another batch than the cache, and on the CPU, where a look costs
        nothing, out of the vocabulary."""
        if tokens.dim() != rank or not tokens.numel():
            axes = "[b t]" if rank == 2 else "[b]"
            raise ValueError(f"`tokens` must be {axes} and hold some, got shape {list(tokens.shape)}")
        if cache is not None and cache.states.shape[1] != len(tokens):
            raise ValueError(f"`tokens` has {len(tokens)} rows, and the cache is of {cache.states.shape[1]}")
        if not tokens.is_cuda and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.config.vocab:
            raise ValueError(f"`tokens` holds some that are not in the vocabulary of {self.config.vocab}")

    def _sequence(self, tokens: Tensor, cache: Cache, hidden: Tensor | None, fresh: bool) -> Tensor:
        """What the head is applied to, [b t width]; the cache moves on. `hidden`[b t 1] is true where there is no token."""
        residual = self._embedded(tokens)
        update = None
        for number, layer in enumerate(self.layers):
            u = norms.rms_norm(residual, layer.norm, eps=self.config.eps, add=update)
            update = self._mixed(layer, u, cache.convolution[number], cache.states[number], hidden, fresh)
        last: Tensor = norms.rms_norm(residual, self.norm, eps=self.config.eps, add=update)
        return last

    def _mixed(
        self, layer: LayerWeights, u: Tensor, conv: Tensor, state: Tensor, hidden: Tensor | None, fresh: bool
    ) -> Tensor:
        """The mixer over whole rows u[b t width]. Padding at the left leaves the convolution's cache zero and, as its x is zero
        too, the state; and sums of decays do not depend on what it is."""
        z, xBC, dt = self._split(linear(u, layer.in_proj, layer.in_bias))
        if hidden is not None:
            xBC.masked_fill_(hidden, 0)
            dt.masked_fill_(hidden, 0)
        xBC, after = causal_conv.forward(
            xBC, layer.conv, layer.conv_bias, initial=None if fresh else conv, activation="silu", return_final=True
        )
        if hidden is not None:
            xBC.masked_fill_(hidden, 0)
        conv.copy_(after)
        x, B, C = self._vectors(xBC)
        y, end = mamba2.forward(x, dt, layer.A, B, C, **self._gated(layer, z), S0=None if fresh else state)
        state.copy_(end)
        y = y.flatten(2)
        if layer.gated_norm is not None:
            y = norms.rms_norm(y, layer.gated_norm, **self._gated_norm(z))
        return linear(y, layer.out_proj, layer.out_bias)

    def _step(self, layer: LayerWeights, residual: Tensor, conv: Tensor, state: Tensor) -> None:
        """A layer for one token of each row: its result is added to residual[b width].

        All of it is steady: a step begins with PyTorch's embedding, which waits for all that was queued before, and so for the
        weights, and for what the layer remembers, which a prefill or the token before has left.
        """
        c = self.config
        projected = projection.project(residual, layer.in_proj, layer.in_bias, norm=layer.norm, eps=c.eps, steady=True)
        z, xBC, dt = self._split(projected)
        xBC = causal_conv.step(conv, xBC, layer.conv, layer.conv_bias, activation="silu", steady=True)
        x, B, C = self._vectors(xBC)
        y = mamba2.step(state, x, dt, layer.A, B, C, **self._gated(layer, z), steady=True).flatten(1)
        norm = layer.gated_norm
        if norm is not None and (c.norm_before_gate or c.norm_groups > 1):
            y, norm = norms.rms_norm(y, norm, **self._gated_norm(z)), None
        projection.project(y, layer.out_proj, layer.out_bias, norm=norm, eps=c.eps, onto=residual, steady=True)

    def _split(self, projected: Tensor) -> tuple[Tensor, ...]:
        """z, the channels of the convolution, and dt, as views."""
        return torch.split(projected, [self.config.inner, self.config.convolved, self.config.heads], -1)

    def _vectors(self, xBC: Tensor) -> tuple[Tensor, ...]:
        """x[... h p], B and C[... g n], as views."""
        c = self.config
        x, B, C = torch.split(xBC, [c.inner, c.groups * c.state, c.groups * c.state], -1)
        return _in_parts(x, c.heads), _in_parts(B, c.groups), _in_parts(C, c.groups)

    def _gated(self, layer: LayerWeights, z: Tensor) -> dict[str, Any]:
        """The other arguments of the recurrence."""
        c = self.config
        gate = None if c.gated_norm and c.norm_before_gate else _in_parts(z, c.heads)
        return {"D": layer.D, "dt_bias": layer.dt_bias, "z": gate, "dt_min": c.step_min, "dt_max": c.step_max}

    def _gated_norm(self, z: Tensor) -> dict[str, Any]:
        """The other arguments of the norm of y."""
        c = self.config
        return {"eps": c.eps, "groups": c.norm_groups, "gate": z if c.norm_before_gate else None}

    def _embedded(self, tokens: Tensor) -> Tensor:
        """The first residual."""
        rows = embedding(tokens, self.embedding)
        return rows.to(self._wide) if self.config.residual_f32 else rows

    def _head(self, u: Tensor) -> Tensor:
        return linear(u, self.head).to(self._wide)

    def _layer(self, weights: Mapping[str, Tensor], prefix: str) -> LayerWeights:
        def some(name: str) -> Tensor | None:
            return weights[prefix + name].to(self.dtype) if prefix + name in weights else None

        def each(name: str) -> Tensor:
            return weights[prefix + name].to(self.dtype)

        return LayerWeights(
            norm=each("norm"), in_proj=each("in_proj.weight"), in_bias=some("in_proj.bias"), conv=each("conv.weight"),
            conv_bias=some("conv.bias"), dt_bias=weights[prefix + "dt_bias"].to(self._wide),
            A=-torch.exp(weights[prefix + "A_log"].to(self._wide)), D=weights[prefix + "D"].to(self._wide),
            gated_norm=some("gated_norm"), out_proj=each("out_proj.weight"), out_bias=some("out_proj.bias"),
        )  # fmt: skip


def _in_parts(x: Tensor, parts: int) -> Tensor:
    """x[... d] as [... parts d/parts], a view."""
    return x.view(*x.shape[:-1], parts, -1)


def _check_dtype(dtype: object) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"a model computes in one of {', '.join(map(str, DTYPES))}, not in {dtype!r}")


def _check_device(device: torch.device | str) -> None:
    try:
        torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"a model runs on a device that torch knows, such as cpu or cuda, not on {device!r}"
        ) from error


def _placed(name: str, x: Tensor, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    """A weight where and as the model has it, so that no wider copy of all stays."""
    kept = name.rsplit(".", 1)[-1] in ("A_log", "D", "dt_bias")
    return x.to(device, torch.promote_types(x.dtype, torch.float32) if kept else dtype)


def _hidden(tokens: Tensor, padding: Tensor | None, start: int) -> Tensor | None:
    """Where there is no token, [b t 1], of a piece that begins at token `start` of its rows."""
    if padding is None:
        return None
    place = torch.arange(start, start + tokens.shape[1], device=padding.device)
    return (place[None, :] < padding[:, None])[:, :, None]
