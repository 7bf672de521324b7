"""What a Mamba-2 language model is, apart from its weights: read from the config.json of a checkpoint, of either layout.

    transformers    "model_type": "mamba2", sizes by their own names
    state-spaces    "d_model", "n_layer" and the options of the mixer in "ssm_cfg" (mamba_ssm's MambaLMHeadModel)

A layer is u + out_proj(norm(y, z)) with z, x, B, C, dt from in_proj(norm(u)); x, B and C go through a causal convolution and
silu, then through the recurrence of specs/mamba2.ssd. The layouts differ in their norm of y: transformers' is over all
channels, that of state-spaces over those of a group, and there it may stand before the gate, or be absent.

No torch here, and no arrays: what else builds the model reads the same class.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ssdgen.diagnostics import UserError

Layout = Literal["transformers", "state-spaces"]


@dataclass(frozen=True)
class Config:
    """The sizes and options of a model.

    width: channels of the model; layers: how many; vocab: rows of the embedding, padding included
    heads, channels, groups, state: of the recurrence, h, p, g and n of specs/mamba2.ssd
    taps: of the causal convolution
    eps: of every norm
    tied: the head is the embedding
    projection_bias, conv_bias: whether in_proj and out_proj, and the convolution, have a bias
    channel_skip: D is one number a channel [h p] instead of one a head [h]
    gated_norm: whether y is normalised; without it y is only gated
    norm_groups: into how many equal parts of the channels that norm is cut
    norm_before_gate: norm(y) * silu(z) instead of norm(y * silu(z))
    step_min, step_max: what softplus(dt + dt_bias) is clamped to
    residual_f32: residuals are added up in float32, whatever the dtype of the weights
    stop: tokens that end a text; pad: the token that fills rows, None if the checkpoint names none
    """

    width: int
    layers: int
    vocab: int
    heads: int
    channels: int = 64
    groups: int = 1
    state: int = 128
    taps: int = 4
    eps: float = 1e-5
    tied: bool = True
    projection_bias: bool = False
    conv_bias: bool = True
    channel_skip: bool = False
    gated_norm: bool = True
    norm_groups: int = 1
    norm_before_gate: bool = False
    step_min: float = 0.0
    step_max: float = math.inf
    residual_f32: bool = True
    stop: tuple[int, ...] = ()
    pad: int | None = None

    @property
    def inner(self) -> int:
        """Channels of all heads: of x, y and the gate."""
        return self.heads * self.channels

    @property
    def convolved(self) -> int:
        """Channels of the convolution: of x, B and C side by side."""
        return self.inner + 2 * self.groups * self.state

    @property
    def projected(self) -> int:
        """Channels of in_proj: of z, x, B, C and dt side by side."""
        return self.inner + self.convolved + self.heads

    @property
    def parameters(self) -> int:
        """Numbers in all weights."""
        return sum(math.prod(shape) for shape in self.shapes().values())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The canonical name and shape of every weight, in the order of use.

        embedding [vocab width]
        layers.I.norm [width]             layers.I.conv.weight [convolved taps]    layers.I.A_log [heads]
        layers.I.in_proj.weight [projected width]  layers.I.conv.bias [convolved]  layers.I.D [heads] or [heads channels]
        layers.I.in_proj.bias [projected]  layers.I.dt_bias [heads]                layers.I.gated_norm [inner]
        layers.I.out_proj.weight [width inner]     layers.I.out_proj.bias [width]
        norm [width]                      head [vocab width], unless tied
        """
        one: dict[str, tuple[int, ...]] = {"norm": (self.width,), "in_proj.weight": (self.projected, self.width)}
        if self.projection_bias:
            one["in_proj.bias"] = (self.projected,)
        one["conv.weight"] = (self.convolved, self.taps)
        if self.conv_bias:
            one["conv.bias"] = (self.convolved,)
        one |= {"dt_bias": (self.heads,), "A_log": (self.heads,)}
        one["D"] = (self.heads, self.channels) if self.channel_skip else (self.heads,)
        if self.gated_norm:
            one["gated_norm"] = (self.inner,)
        one["out_proj.weight"] = (self.width, self.inner)
        if self.projection_bias:
            one["out_proj.bias"] = (self.width,)
        shapes: dict[str, tuple[int, ...]] = {"embedding": (self.vocab, self.width)}
        shapes |= {f"layers.{i}.{name}": shape for i in range(self.layers) for name, shape in one.items()}
        shapes["norm"] = (self.width,)
        return shapes if self.tied else shapes | {"head": (self.vocab, self.width)}


SIZES: dict[str, Config] = {
    name: Config(width=width, layers=layers, vocab=50288, heads=2 * width // 64)
    for name, width, layers in (
        ("130m", 768, 24),
        ("370m", 1024, 48),
        ("780m", 1536, 48),
        ("1.3b", 2048, 48),
        ("2.7b", 2560, 64),
    )
}
"""The published models, state-spaces/mamba2-NAME."""


def read_config(folder: Path) -> tuple[Config, Layout]:
    """The configuration in a checkpoint's config.json, and the layout it is written in.

    Raises UserError, which names the file and the key, for one that is missing, of another model, or that does not fit.
    """
    path = folder / "config.json"
    data = read_json(path)
    if data.get("model_type") == "mamba2":
        return _speaking(_transformers(_Reader(path, data), folder), folder), "transformers"
    if "d_model" in data and "ssm_cfg" in data:
        return _speaking(_state_spaces(_Reader(path, data)), folder), "state-spaces"
    found = f"of a `{data['model_type']}` model" if "model_type" in data else "of no model known here"
    raise UserError(
        f"{path} is {found}",
        'a Mamba-2 checkpoint has "model_type": "mamba2" (transformers), or "d_model" and "ssm_cfg" (state-spaces)',
    )


def check_tokens(tokens: Iterable[object], vocab: int) -> None:
    """ValueError for one that is no integer, or not in a vocabulary of so many."""
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool):
            raise ValueError(f"tokens are integers, got {token!r}")
        if not 0 <= token < vocab:
            raise ValueError(f"token {token} is not in the vocabulary of {vocab}")


def _speaking(config: Config, folder: Path) -> Config:
    """`config`; UserError if it names tokens that the vocabulary lacks."""
    named = (*config.stop, *(() if config.pad is None else (config.pad,)))
    for token in (t for t in named if t >= config.vocab):
        raise UserError(
            f"{folder}: token {token}, of `eos_token_id` or `pad_token_id` there, is not in the vocabulary of {config.vocab}",
            "see config.json and generation_config.json",
        )
    return config


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint; UserError, which names it, for what cannot be read or is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {(error.strerror or str(error)).lower()}", "name a checkpoint's folder"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON: {error}", "the file is damaged or cut short; fetch it again") from error
    if not isinstance(data, dict):
        raise UserError(f"{path} holds no JSON object, but a {type(data).__name__}")
    return data


MOST = 2**31 - 1
"""Of any size in a configuration."""

MOST_LAYERS = 10_000
"""Layers of a model, at most: a damaged number must not fill the memory with names of weights."""

LARGEST = 1e30
"""Of any number there that is finite."""


class _Reader:
    """Values of a JSON object, each checked; messages name the file and the key."""

    def __init__(self, path: Path, data: Mapping[str, Any], inside: str = "") -> None:
        self.path, self.data, self.inside = path, data, inside

    def wrong(self, key: str, expected: str) -> UserError:
        found = json.dumps(self.data[key]) if key in self.data else "nothing"
        return UserError(f"{self.path}: `{self.inside}{key}` must be {expected}, got {found}")

    def count(self, key: str, default: int | None = None, most: int = MOST) -> int:
        """A positive integer, `most` at most."""
        value = self.data.get(key, default)
        if type(value) is not int or not 1 <= value <= most:
            large = type(value) is int and value > most
            raise self.wrong(key, f"a positive integer{f', {most} at most' if large else ''}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.data.get(key, default)
        if type(value) is not bool:
            raise self.wrong(key, "true or false")
        return value

    def number(self, key: str, default: float) -> float:
        """A positive, finite number."""
        value = self.data.get(key, default)
        if type(value) not in (int, float) or not 0 < value <= LARGEST:
            raise self.wrong(key, f"a positive number, {LARGEST:g} at most")
        return float(value)

    def limit(self, key: str) -> tuple[float, float]:
        """Two numbers from 0 to infinity, in order; infinity also as transformers writes it, {"__float__": "Infinity"}."""
        pair = self.data.get(key, [0.0, math.inf])
        values = pair if isinstance(pair, list) else []
        values = [math.inf if v in ({"__float__": "Infinity"}, "Infinity") else v for v in values]
        numbers = all(type(v) in (int, float) and (v <= LARGEST or v == math.inf) for v in values)
        if len(values) != 2 or not numbers or not 0 <= values[0] <= values[1]:
            raise self.wrong(key, "two numbers, the least step and the largest")
        return float(values[0]), float(values[1])

    def within(self, key: str) -> _Reader:
        """The reader of an object; an empty one if it is absent."""
        value = self.data.get(key) or {}
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return _Reader(self.path, value, f"{self.inside}{key}.")

    def tokens(self, key: str) -> tuple[int, ...]:
        """A token, a list of them, or null for none."""
        value = self.data.get(key)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(v) is int and v >= 0 for v in values):
            raise self.wrong(key, "a token's number, a list of them, or null")
        return tuple(values)

    def refuse(self, key: str, allowed: tuple[Any, ...], why: str) -> None:
        """UserError if there is another value than those allowed."""
        if key in self.data and self.data[key] not in allowed:
            raise UserError(f"{self.path}: `{self.inside}{key}` is {json.dumps(self.data[key])}, and {why}")


def _transformers(reader: _Reader, folder: Path) -> Config:
    """A config.json of transformers' Mamba2Config; what it leaves out is as in that class.

    `norm_before_gate`, which old versions wrote, is not read, as they never did.
    """
    reader.refuse("hidden_act", ("silu", "swish"), "only silu is computed here")
    reader.refuse("quantization_config", (None,), "quantised weights are not read; take the original checkpoint")
    width, expand = reader.count("hidden_size", 4096), reader.count("expand", 2)
    heads, channels = reader.count("num_heads", 128), reader.count("head_dim", 64)
    if heads * channels != expand * width:
        raise UserError(
            f"{reader.path}: `num_heads` * `head_dim` is {heads} * {channels} = {heads * channels},"
            f" but `expand` * `hidden_size` is {expand} * {width} = {expand * width}"
        )
    low, high = reader.limit("time_step_limit")
    generation = folder / "generation_config.json"
    texts = _Reader(generation, read_json(generation)) if generation.exists() else reader
    texts = texts if "eos_token_id" in texts.data else reader
    pad = reader.tokens("pad_token_id")
    return Config(
        width=width,
        layers=reader.count("num_hidden_layers", 64, MOST_LAYERS),
        vocab=reader.count("vocab_size", 32768),
        heads=heads,
        channels=channels,
        groups=_groups(reader, "n_groups", 8, heads),
        state=reader.count("state_size", 128),
        taps=_taps(reader, "conv_kernel"),
        eps=reader.number("layer_norm_epsilon", 1e-5),
        tied=reader.flag("tie_word_embeddings", False),
        projection_bias=reader.flag("use_bias", False),
        conv_bias=reader.flag("use_conv_bias", True),
        step_min=low,
        step_max=high,
        residual_f32=reader.flag("residual_in_fp32", True),
        stop=texts.tokens("eos_token_id"),
        pad=pad[0] if pad else None,
    )


def _state_spaces(reader: _Reader) -> Config:
    """A config.json of mamba_ssm's MambaConfig; what it leaves out is as in that class and in its Mamba2."""
    mixer = reader.within("ssm_cfg")
    layer = mixer.data.get("layer", "Mamba1")
    if layer != "Mamba2":
        raise UserError(
            f"{reader.path}: `ssm_cfg.layer` is {json.dumps(layer)}: a Mamba-1 model, another recurrence",
            'a Mamba-2 checkpoint has "ssm_cfg": {"layer": "Mamba2"}',
        )
    reader.refuse("attn_layer_idx", (None, []), "layers of attention are not computed here")
    reader.refuse("d_intermediate", (0,), "layers between the mixers are not computed here")
    reader.refuse("rms_norm", (True,), "only RMSNorm is computed here")
    width, channels = reader.count("d_model"), mixer.count("headdim", 64)
    inner = mixer.count("expand", 2) * width
    mixer.refuse("d_ssm", (None, inner), "a mixer with channels beside the recurrence is not computed here")
    if inner % channels:
        raise UserError(f"{reader.path}: heads of `ssm_cfg.headdim` {channels} do not divide {inner} channels")
    vocab, multiple = reader.count("vocab_size", 50277), reader.count("pad_vocab_size_multiple", 8)
    groups = _groups(mixer, "ngroups", 1, inner // channels)
    low, high = mixer.limit("dt_limit")
    return Config(
        width=width,
        layers=reader.count("n_layer", 64, MOST_LAYERS),
        vocab=-(-vocab // multiple) * multiple,
        heads=inner // channels,
        channels=channels,
        groups=groups,
        state=mixer.count("d_state", 128),
        taps=_taps(mixer, "d_conv"),
        tied=reader.flag("tie_embeddings", True),
        projection_bias=mixer.flag("bias", False),
        conv_bias=mixer.flag("conv_bias", True),
        channel_skip=mixer.flag("D_has_hdim", False),
        gated_norm=mixer.flag("rmsnorm", True),
        norm_groups=groups,
        norm_before_gate=mixer.flag("norm_before_gate", False),
        step_min=low,
        step_max=high,
        residual_f32=reader.flag("residual_in_fp32", True),
    )


def _groups(reader: _Reader, key: str, default: int, heads: int) -> int:
    groups = reader.count(key, default)
    if heads % groups:
        raise UserError(f"{reader.path}: `{reader.inside}{key}`, {groups} groups, do not divide {heads} heads")
    return groups


def _taps(reader: _Reader, key: str) -> int:
    taps = reader.count(key, 4)
    if not 2 <= taps <= 8:
        raise reader.wrong(key, "from 2 to 8")
    return taps
