"""Small checkpoints in folders, in every layout, with random weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ssdgen.models.checkpoint import stored_name
from ssdgen.models.config import Config, Layout

SMALL = Config(
    width=24, layers=2, vocab=40, heads=3, channels=16, groups=1, state=20, tied=False, stop=(2,), pad=1,
    step_max=math.inf,
)  # fmt: skip


def random_weights(config: Config, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """By canonical name, of a size that logits are of order one."""
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in config.shapes().items():
        values = torch.randn(shape, generator=random)
        kind = name.split(".", 2)[-1]
        if kind in ("norm", "gated_norm", "D"):
            values = 1 + 0.1 * values
        elif kind == "A_log":
            values = values.abs()
        elif kind == "dt_bias":
            values = values - 2
        elif kind.endswith("weight"):
            values = values * shape[-1] ** -0.5
        weights[name] = values.to(dtype)
    return weights


def stored(config: Config, layout: Layout, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights under the names and in the shapes of a layout."""
    out = {}
    for name, x in weights.items():
        x = x.unsqueeze(1) if name.endswith("conv.weight") else x.reshape(-1) if name.endswith(".D") else x
        out[stored_name(name, layout)] = x.contiguous()
    if config.tied:
        out[stored_name("head", layout)] = out[stored_name("embedding", layout)].clone()
    return out


def config_json(config: Config, layout: Layout) -> dict[str, Any]:
    """What a config.json of a layout says of a configuration."""
    if layout == "transformers":
        return {
            "model_type": "mamba2", "hidden_size": config.width, "expand": config.inner // config.width,
            "num_hidden_layers": config.layers, "vocab_size": config.vocab, "num_heads": config.heads,
            "head_dim": config.channels, "n_groups": config.groups, "state_size": config.state,
            "conv_kernel": config.taps, "layer_norm_epsilon": config.eps, "tie_word_embeddings": config.tied,
            "use_bias": config.projection_bias, "use_conv_bias": config.conv_bias, "eos_token_id": list(config.stop),
            "pad_token_id": config.pad, "time_step_limit": [config.step_min, {"__float__": "Infinity"}],
        }  # fmt: skip
    mixer = {
        "layer": "Mamba2", "d_state": config.state, "d_conv": config.taps, "headdim": config.channels,
        "ngroups": config.groups, "rmsnorm": config.gated_norm, "norm_before_gate": config.norm_before_gate,
        "bias": config.projection_bias, "conv_bias": config.conv_bias, "D_has_hdim": config.channel_skip,
    }  # fmt: skip
    return {
        "d_model": config.width, "n_layer": config.layers, "vocab_size": config.vocab, "pad_vocab_size_multiple": 8,
        "tie_embeddings": config.tied, "ssm_cfg": mixer, "rms_norm": True, "attn_layer_idx": [],
    }  # fmt: skip


def write_folder(
    folder: Path,
    config: Config,
    layout: Layout,
    weights: Mapping[str, Tensor],
    kind: str = "safetensors",
    pieces: int = 1,
) -> Path:
    """A checkpoint in `folder`, which is made: its weights as safetensors or bin, in one file or several with an index."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_json(config, layout)))
    content = stored(config, layout, weights)
    whole = "model.safetensors" if kind == "safetensors" else "pytorch_model.bin"
    save = save_file if kind == "safetensors" else torch.save
    if pieces == 1:
        save(content, folder / whole)
        return folder
    stem, suffix = whole.split(".")
    names = {key: f"{stem}-{i % pieces + 1:05}-of-{pieces:05}.{suffix}" for i, key in enumerate(content)}
    for name in set(names.values()):
        save({key: x for key, x in content.items() if names[key] == name}, folder / name)
    (folder / f"{whole}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder
