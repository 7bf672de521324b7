"""A mixer as Mamba-2 has it, around the recurrence of any spec: what a block of a model is between its residual additions.

    (gate, vectors, scalars) = projection(u)
    vectors = silu(causal convolution(vectors))
    y = recurrence(vectors, scalars, parameters)
    out = projection(norm(y * silu(gate)))

Which input is what is read off the spec: an input with a time axis and a channel axis is a vector, one without a channel axis a
scalar of each head, which is brought into its declared range; an optional one of the shape of the output is the gate, and the
equations say what it does (without one the gate is as above). What has no time axis is a parameter.
"""

from __future__ import annotations

import hashlib
import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, rms_norm, silu, softplus

from ssdgen import pipeline
from ssdgen.build.store import folder_in_cache
from ssdgen.ir.layer import Interval, Layer
from ssdgen.ir.layer import Tensor as Input
from ssdgen.plan.names import arguments
from ssdgen.run.inputs import uses_of
from ssdgen.run.load import kept, load_file
from ssdgen.spec import load_source, read_layer

STEPS = 1e-3, 1e-1
"""The range in which what a softplus gives is at first, spread evenly in log space, as in Mamba."""

OPEN = 3.0
"""What gates begin with: sigmoid(3) = 0.95."""


@dataclass(frozen=True)
class Cache:
    """What a mixer remembers of the tokens before: the last inputs of its convolution [b d taps-1], None without one, and the
    recurrence's states. Both are changed in place."""

    convolution: Tensor | None
    states: tuple[Tensor, ...]


class Mixer(nn.Module):
    """A mixer, u[b t width] -> [b t width], around the recurrence of `spec`: a built-in spec's name or a file.

    width: channels of the model
    heads, groups: heads, and of those that share inputs so many groups
    sizes: lengths of the channel axes by name, of which those left out are as the spec declares (p = 64, n = 128)
    taps: of the causal convolution, 2 to 8; 0 for none
    eps: of the norm

    Parameters are float32 at first; the recurrence's own (`recurrence.A`) should stay so. Raises UserError for a spec with a
    mistake, ValueError for sizes that do not fit it.
    """

    def __init__(
        self,
        spec: str | Path = "mamba2",
        *,
        width: int,
        heads: int,
        groups: int = 1,
        sizes: Mapping[str, int] | None = None,
        taps: int = 4,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.layer = layer = read_layer(load_source(str(spec)))
        self.module: Any = module_of(layer, str(spec))
        self.conv = importlib.import_module(".causal_conv", self.module.__package__)
        self.size = _sizes(layer, heads, groups, sizes or {})
        if type(width) is not int or width < 1:
            raise ValueError(f"width must be a positive integer, got {width!r}")
        if type(taps) is not int or (taps and taps not in self.conv.WIDTHS):
            raise ValueError(f"taps must be 0 or from {self.conv.WIDTHS[0]} to {self.conv.WIDTHS[-1]}, got {taps!r}")
        out = layer.outputs[0]
        self.arguments = arguments(layer)
        self.places = {i.name: i.axes for i in self.module.LAYER.inputs} | dict(self.module.LAYER.outputs)
        projected = [t for t in layer.inputs if layer.time in t.axes]
        self.vectors = [t for t in projected if t.required and len(self._per_token(t)) > 1]
        self.scalars = [t for t in projected if t.required and len(self._per_token(t)) <= 1]
        self.gate = next((t for t in projected if t.optional and set(t.axes) == set(out.axes)), None)
        self.channels = math.prod(self._lengths(self._per_token(out)))
        self.widths = [self.channels, *(self._channels(t) for t in (*self.vectors, *self.scalars))]
        convolved = sum(self.widths[1 : 1 + len(self.vectors)])
        self.into = nn.Linear(width, sum(self.widths), bias=False)
        self.taps = nn.Parameter(_uniform((convolved, taps), taps**-0.5)) if taps else None
        self.taps_bias = nn.Parameter(_uniform((convolved,), taps**-0.5)) if taps else None
        self.biases = nn.ParameterDict({t.name: b for t in self.scalars if (b := self._bias(t)) is not None})
        self.recurrence = nn.ParameterDict({t.name: self._parameter(t) for t in layer.inputs if t not in projected})
        self.norm = nn.RMSNorm(self.channels, eps=eps)
        self.out = nn.Linear(self.channels, width, bias=False)

    def forward(self, u: Tensor, *, cu_seqlens: Tensor | None = None, seq_idx: Tensor | None = None) -> Tensor:
        """u[b t width] -> [b t width]; with `cu_seqlens` or `seq_idx` of packed sequences, each on its own."""
        _check(u, "b t width", self.into.in_features)
        gate, vectors, scalars = self._projected(u)
        if self.taps is not None and vectors.numel():
            vectors = self.conv.forward(
                vectors, self.taps, self.taps_bias, activation="silu", cu_seqlens=cu_seqlens, seq_idx=seq_idx
            )
        named = self._named(gate, vectors, scalars)
        y = self.module.forward(**named, cu_seqlens=cu_seqlens, seq_idx=seq_idx)[0]
        return self._combined(y, gate)

    def init_cache(self, batch: int) -> Cache:
        """The cache before any token, for `step`; on the device of the parameters."""
        like = self.into.weight
        states = [
            torch.zeros([batch if a == self.layer.batch else self.size[a] for a in s.axes], device=like.device)
            for s in self.layer.states
        ]
        cache = None
        if self.taps is not None:
            cache = self.conv.init_cache(batch, *self.taps.shape, device=like.device, dtype=like.dtype)
        return Cache(cache, tuple(states))

    @torch.no_grad()
    def step(self, u: Tensor, cache: Cache) -> Tensor:
        """One token, u[b width] -> [b width], after those that `cache` is of; not differentiable."""
        _check(u, "b width", self.into.in_features)
        gate, vectors, scalars = self._projected(u.unsqueeze(1))
        if cache.convolution is not None:
            vectors = self.conv.steps(cache.convolution, vectors, self.taps, self.taps_bias, activation="silu")
        y = self.module.steps(*cache.states, **self._named(gate, vectors, scalars))
        return self._combined(y[0] if isinstance(y, tuple) else y, gate).squeeze(1)

    def extra_repr(self) -> str:
        """The spec and its sizes."""
        return f"{self.layer.name}, {', '.join(f'{a}={n}' for a, n in self.size.items())}"

    def _per_token(self, t: Any) -> tuple[str, ...]:
        """The axes of an input or output without batch and time, as its array has them."""
        return tuple(a for a in self.places[t.name] if a not in (self.layer.batch, self.layer.time))

    def _lengths(self, axes: tuple[str, ...]) -> list[int]:
        return [self.size[a] for a in axes]

    def _channels(self, t: Input) -> int:
        return math.prod(self._lengths(self._per_token(t)))

    def _projected(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gate, all vectors and all scalars side by side, [b t ...]."""
        vectors = sum(self.widths[1 : 1 + len(self.vectors)])
        gate, middle, last = torch.split(self.into(u), [self.channels, vectors, sum(self.widths[1:]) - vectors], 2)
        return gate, middle, last

    def _named(self, gate: Tensor, vectors: Tensor, scalars: Tensor) -> dict[str, Tensor]:
        """The arguments of the recurrence."""
        named = {self.arguments[name]: self._ranged(name) for name in self.recurrence}
        for inputs, together in ((self.vectors, vectors), (self.scalars, scalars)):
            pieces = torch.split(together, [self._channels(t) for t in inputs], 2) if inputs else ()
            for t, x in zip(inputs, pieces, strict=True):
                if t in self.scalars:
                    x = x.float() + self.biases[t.name] if t.name in self.biases else x.float()
                named[self.arguments[t.name]] = self._placed(t, within(x, t.range))
        if self.gate is not None:
            named[self.arguments[self.gate.name]] = self._placed(self.gate, gate)
        return named

    def _placed(self, t: Input, x: Tensor) -> Tensor:
        """A projected input [b t ...] in the shape and order of its array."""
        axes = (self.layer.batch, self.layer.time, *self._per_token(t))
        whole = torch.reshape(x, (*x.shape[:2], *self._lengths(self._per_token(t))))
        return whole.permute([axes.index(a) for a in self.places[t.name]])

    def _combined(self, y: Tensor, gate: Tensor) -> Tensor:
        out = self.layer.outputs[0]
        axes = (self.layer.batch, self.layer.time, *self._per_token(out))
        y = y.permute([self.places[out.name].index(a) for a in axes]).flatten(2)
        if self.gate is None:
            y = y * silu(gate)
        scale = self.norm.weight.to(y.dtype)  # under autocast: with a scale of another dtype no fused kernel runs
        combined: Tensor = self.out(rms_norm(y, self.norm.normalized_shape, scale, self.norm.eps))
        return combined

    def _parameter(self, t: Input) -> nn.Parameter:
        """A parameter, before `within` brings it into the range of its input."""
        shape = self._lengths(min((t.axes, *t.narrower), key=len))
        if t.name in uses_of(self.layer).softplus:
            return nn.Parameter(_before_softplus(shape))
        if t.range.high <= 0:
            return nn.Parameter(torch.log(1 + 15 * torch.rand(shape)))
        return nn.Parameter(torch.ones(shape))

    def _bias(self, t: Input) -> nn.Parameter | None:
        """What is added to a projected scalar, if the equations have nothing for that: gates begin open, steps in STEPS."""
        uses, shape = uses_of(self.layer), (self._channels(t),)
        if t.name in uses.gate or t.range.high <= 0:
            return nn.Parameter(torch.full(shape, OPEN))
        if t.name in uses.softplus and not uses.softplus & {i.name for i in self.layer.inputs if not i.required}:
            return nn.Parameter(_before_softplus(shape))
        return None

    def _ranged(self, name: str) -> Tensor:
        """A parameter as the recurrence takes it; a negative one is minus an exponential, as A is in Mamba."""
        value: Tensor = self.recurrence[name]
        bounds = self.layer.tensor(name).range
        return -torch.exp(value) if bounds.high <= 0 else within(value, bounds)


def within(x: Tensor, bounds: Interval) -> Tensor:
    """Any number brought into a range that is bounded by at most two finite numbers."""
    low, high = bounds.low, bounds.high
    if math.isfinite(low) and math.isfinite(high):
        return low + (high - low) * torch.sigmoid(x)
    if math.isfinite(high):
        return high + logsigmoid(x)
    if math.isfinite(low):
        return low + softplus(x)
    return x


def module_of(layer: Layer, spec: str) -> ModuleType:
    """The emitted module of a layer: the one that comes with ssdgen, or one emitted into the cache folder."""
    digest = hashlib.sha256(layer.source.text.encode()).hexdigest()
    try:
        shipped = importlib.import_module(f"ssdgen.generated.{layer.name}")
    except ImportError:
        shipped = None
    if shipped is not None and digest == shipped.SPEC_DIGEST:
        return shipped
    form, _ = pipeline.derive(spec)
    return load_file(kept(folder_in_cache("nn"), pipeline.emit(pipeline.plan(form, {}))))


def _sizes(layer: Layer, heads: int, groups: int, given: Mapping[str, int]) -> dict[str, int]:
    """The lengths of all axes but batch and time. ValueError for one that is missing, unknown or does not fit."""
    size = {a.name: a.size for a in layer.axes if a.size is not None}
    size |= {layer.head: heads} | {g.axis: groups for g in layer.groups}
    channels = [
        a.name
        for a in layer.axes
        if a.name not in (layer.batch, layer.time, layer.head, *(g.axis for g in layer.groups))
    ]
    for name, length in given.items():
        if name not in channels:
            raise ValueError(f"{layer.name} has no channel axis `{name}`; sizes may be of {', '.join(channels)}")
        size[name] = length
    missing = [a for a in channels if a not in size]
    if missing:
        raise ValueError(f"{layer.name} declares no size of {', '.join(missing)}: name it in sizes")
    for name, length in size.items():
        if type(length) is not int or length < 1:
            raise ValueError(f"{layer.name}: axis `{name}` must be a positive integer, got {length!r}")
    if heads % groups:
        raise ValueError(f"{layer.name}: {groups} groups do not divide {heads} heads")
    return size


def _check(u: Tensor, axes: str, width: int) -> None:
    """ValueError for an input of another rank or width."""
    if u.dim() != len(axes.split()) or u.shape[-1] != width:
        raise ValueError(f"`u` must be [{axes}] with width {width}, got shape {list(u.shape)}")


def _before_softplus(shape: Sequence[int]) -> Tensor:
    """What softplus makes steps of, spread over STEPS."""
    low, high = (math.log(s) for s in STEPS)
    step = torch.exp(low + (high - low) * torch.rand(tuple(shape)))
    return step + torch.log(-torch.expm1(-step))


def _uniform(shape: tuple[int, ...], bound: float) -> Tensor:
    return (2 * torch.rand(shape) - 1) * bound
