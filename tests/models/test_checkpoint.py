"""Checkpoints: what is read is what was written, and whatever is wrong has a message before a weight is loaded."""

from __future__ import annotations

import json
import math
import pickle
import re
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ssdgen.diagnostics import UserError
from ssdgen.models.checkpoint import open_checkpoint
from ssdgen.models.config import SIZES, Config, Layout, read_config
from tests.models.folders import SMALL, config_json, random_weights, write_folder

STATE_SPACES = replace(
    SMALL, tied=True, channel_skip=True, norm_before_gate=True, projection_bias=True, stop=(), pad=None, heads=4,
    channels=12, groups=2, norm_groups=2,
)  # fmt: skip


@pytest.mark.parametrize(("kind", "pieces"), [("safetensors", 1), ("safetensors", 3), ("bin", 1), ("bin", 2)])
@pytest.mark.parametrize(("layout", "config"), [("transformers", SMALL), ("state-spaces", STATE_SPACES)])
def test_what_was_written_is_read(tmp_path: Path, layout: Layout, config: Config, kind: str, pieces: int) -> None:
    weights = random_weights(config, dtype=torch.bfloat16)
    checkpoint = open_checkpoint(write_folder(tmp_path / "model", config, layout, weights, kind, pieces))
    assert (checkpoint.config, checkpoint.layout) == (config, layout)
    got = dict(checkpoint.read())
    assert got.keys() == weights.keys()
    assert all(got[name].dtype == torch.bfloat16 and torch.equal(got[name], weights[name]) for name in weights)
    arrays = dict(checkpoint.read("np"))
    assert all((arrays[name] == weights[name].float().numpy()).all() for name in weights)


def test_published_sizes() -> None:
    """The numbers of parameters that give the models their names, within a few per cent."""
    millions = {name: config.parameters / 1e6 for name, config in SIZES.items()}
    named = {"130m": 130, "370m": 370, "780m": 780, "1.3b": 1344, "2.7b": 2703}
    assert millions == pytest.approx(named, rel=0.02)


def test_a_config_of_state_spaces_pads_the_vocabulary(tmp_path: Path) -> None:
    """As published: 50,277 tokens padded to a multiple of 16; what `ssm_cfg` leaves out is as in mamba_ssm's Mamba2."""
    data = {
        "d_model": 768,
        "n_layer": 24,
        "vocab_size": 50277,
        "ssm_cfg": {"layer": "Mamba2"},
        "pad_vocab_size_multiple": 16,
    }
    (tmp_path / "config.json").write_text(json.dumps(data))
    assert read_config(tmp_path) == (SIZES["130m"], "state-spaces")


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("transformers", {"model_type": "llama"}, "config.json is of a `llama` model"),
        ("transformers", {"model_type": None}, "config.json is of a `None` model"),
        ("transformers", {"num_heads": 0}, "`num_heads` must be a positive integer, got 0"),
        ("transformers", {"num_heads": 5}, r"`num_heads` \* `head_dim` is 5 \* 16 = 80, but"),
        ("transformers", {"n_groups": 2}, "`n_groups`, 2 groups, do not divide 3 heads"),
        ("transformers", {"hidden_act": "gelu"}, '`hidden_act` is "gelu", and only silu'),
        ("transformers", {"conv_kernel": 9}, "`conv_kernel` must be from 2 to 8, got 9"),
        ("transformers", {"layer_norm_epsilon": 0}, "`layer_norm_epsilon` must be a positive number"),
        ("transformers", {"time_step_limit": [1, 0.5]}, "`time_step_limit` must be two numbers"),
        ("transformers", {"tie_word_embeddings": 1}, "`tie_word_embeddings` must be true or false, got 1"),
        ("transformers", {"quantization_config": {}}, "quantised"),
        ("transformers", {"eos_token_id": "</s>"}, "`eos_token_id` must be a token's number"),
        ("transformers", {"num_hidden_layers": 30_000_000}, "`num_hidden_layers` must be a positive integer, 10000 at most"),
        ("transformers", {"layer_norm_epsilon": 10**400}, "`layer_norm_epsilon` must be a positive number, 1e"),
        ("transformers", {"time_step_limit": [0, 10**400]}, "`time_step_limit` must be two numbers"),
        ("state-spaces", {"ssm_cfg": {}}, '`ssm_cfg.layer` is "Mamba1": a Mamba-1 model'),
        ("state-spaces", {"ssm_cfg": 3}, "`ssm_cfg` must be an object, got 3"),
        ("state-spaces", {"attn_layer_idx": [1]}, "`attn_layer_idx`"),
        ("state-spaces", {"d_intermediate": 64}, "`d_intermediate`"),
        ("state-spaces", {"rms_norm": False}, "`rms_norm`"),
        ("state-spaces", {"ssm_cfg": {"layer": "Mamba2", "d_ssm": 16}}, "`ssm_cfg.d_ssm`"),
        ("state-spaces", {"ssm_cfg": {"layer": "Mamba2", "headdim": 7}}, "do not divide 48 channels"),
    ],
)  # fmt: skip
def test_configs_that_do_not_fit(tmp_path: Path, layout: Layout, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config_json(SMALL if layout == "transformers" else STATE_SPACES, layout), **change}))
    with pytest.raises(UserError, match=message) as raised:
        read_config(tmp_path)
    assert str(path) in str(raised.value)


class Harmful:
    """Unpickled by Python it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.write_text, (self.path, "run")


def _edited(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    return edit


def _changed(**values: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return edit


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def _bin(content: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        torch.save(content, folder / "pytorch_model.bin")

    return edit


def _cut_bin(folder: Path) -> None:
    _bin({"x": torch.zeros(1000)})(folder)
    file = folder / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-100])


def _old_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Harmful(folder / "harm")))


def _empty_zip(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as archive:
        archive.writestr("readme", "nothing")


def _twice(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for name in ("a.safetensors", "b.safetensors"):
        save_file(tensors, folder / name)
    names = {f"{key}{i}": name for i, name in enumerate(("a.safetensors", "b.safetensors")) for key in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def _index(weights: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "other.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "cannot read .*config.json: no such file"),
        (lambda f: (f / "config.json").write_text('{"model_type": '), "config.json is no JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "config.json holds no JSON object"),
        (lambda f: (f / "model.safetensors").unlink(), "there are no weights in"),
        (_cut, "model.safetensors is no whole safetensors file: .*not fully covered"),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "model.safetensors is no whole safetensors file"),
        (
            _edited(lambda t: [t.pop(k) for k in list(t) if k.endswith("mixer.D")]),
            r"missing: `backbone\.layers\.\{0-1\}\.mixer\.D`$",
        ),
        (
            _edited(lambda t: t.update({"backbone.layers.7.mixer.D": torch.zeros(3), "extra": torch.zeros(1)})),
            r"unknown: `backbone\.layers\.7\.mixer\.D`, `extra`$",
        ),
        (
            _edited(lambda t: t.clear() or t.update(transformer=torch.zeros(1))),
            r"missing: .*`lm_head\.weight`; unknown: `transformer`",
        ),
        (
            _edited(lambda t: t.update({"backbone.norm_f.weight": torch.zeros(25)})),
            r"do not fit .*; `backbone\.norm_f\.weight`: \[25\] instead of \[24\] in model\.safetensors",
        ),
        (
            _edited(lambda t: t.update({"backbone.norm_f.weight": torch.zeros(24, dtype=torch.int8)})),
            r"`backbone\.norm_f\.weight`: of dtype I8, which is no float, in model\.safetensors",
        ),
        (lambda f: (f / "config.json").write_text("[" * 100_000), "config.json is no JSON"),
        (_changed(eos_token_id=9999), "token 9999, of `eos_token_id` or `pad_token_id` there, is not in the vocabulary of"),
        (_bin({"x": 3}), "pytorch_model.bin holds no tensors by name"),
        (_bin({1: torch.zeros(1)}), "pytorch_model.bin holds no tensors by name"),
        (_bin([torch.zeros(1)]), "pytorch_model.bin holds no tensors by name"),
        (lambda f: _bin(Harmful(f / "harm"))(f), "pytorch_model.bin holds more than tensors"),
        (_cut_bin, "pytorch_model.bin is no whole file of torch.save"),
        (_old_pickle, "pytorch_model.bin is no whole file of torch.save"),
        (_empty_zip, "pytorch_model.bin cannot be read"),
        (_twice, r"b\.safetensors: `.*` is in a\.safetensors too"),
        (_index({"x": "../other.safetensors"}), "`../other.safetensors` is no file of this folder"),
        (_index({"x": "gone.safetensors"}), "lists files that are not there: gone.safetensors"),
        (_index(["x"]), "`weight_map` must be an object of file names"),
    ],
)  # fmt: skip
def test_bad_checkpoints(tmp_path: Path, edit: Callable[[Path], object], message: str) -> None:
    """Each is named, nothing is loaded, and no code of a pickle is run."""
    folder = write_folder(tmp_path / "model", SMALL, "transformers", random_weights(SMALL))
    edit(folder)
    with pytest.raises(UserError) as raised:
        open_checkpoint(folder)
    assert re.search(message, raised.value.message), raised.value.message
    assert "\n" not in raised.value.message
    assert str(folder) in raised.value.message
    assert not (folder / "harm").exists()


def test_infinite_steps_are_read_as_both_layouts_write_them(tmp_path: Path) -> None:
    for written in ([0.0, math.inf], [0.0, {"__float__": "Infinity"}]):
        data = {**config_json(SMALL, "transformers"), "time_step_limit": written}
        (tmp_path / "config.json").write_text(json.dumps(data))
        assert read_config(tmp_path)[0].step_max == math.inf
