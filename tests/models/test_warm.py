"""`ssdgen warm CHECKPOINT`: what a decoder of the model launches is among what is compiled."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ssdgen.diagnostics import UserError
from ssdgen.generated import mamba2
from ssdgen.models.config import Config, read_config
from ssdgen.models.loop import Decoder
from ssdgen.models.mamba2 import Mamba2
from ssdgen.models.warm import is_model, launched_by, model_work
from ssdgen.run import warm as warm_module
from ssdgen.run.recorded import recording
from ssdgen.run.tune.device import H200, assumed
from ssdgen.run.warm import Kernel, filled, module_path, near
from tests.models.folders import SMALL, config_json


def write_config(folder: Path, **change: Any) -> Config:
    """The configuration of a checkpoint whose weights are not there."""
    text = json.dumps(config_json(replace(SMALL, **change), "state-spaces"))
    (folder / "config.json").write_text(text)
    return read_config(folder)[0]


def silent(kernel: Kernel, done: int, total: int) -> None:
    """Nobody hears of the kernels."""


@pytest.mark.parametrize("rows", [1, 3, 7])
@pytest.mark.parametrize("change", [{}, {"groups": 3, "norm_groups": 3, "norm_before_gate": True}])
def test_what_a_decoder_launches_is_compiled(tmp_path: Path, rows: int, change: dict[str, Any]) -> None:
    """Prompts shorter and longer than what is computed at once, and than a chunk, of every class of length; all layers."""
    config = write_config(tmp_path, **change)
    requests = launched_by(tmp_path, [{"b": rows, "t": 192}], ["bf16"], H200).requests
    model = Mamba2.random(replace(config, layers=3), dtype=torch.bfloat16)
    decoder = Decoder(model, rows, every=2)
    with assumed(mamba2, H200), recording(mamba2) as launches:
        for length in (1, 5, 64, 65, 128, 200, 1023, 2048, 2100):
            for at_once in (8192, rows * 128):
                for _ in decoder.run([[1] * length] * rows, 5, at_once=at_once):
                    pass
    assert {launch.request.kernel for launch in launches} >= {"walk_out", "convolve", "token_step", "normalise"}
    missing = {launch.request for launch in launches} - set(requests)
    assert not missing


def test_a_checkpoint_is_taken_for_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels are handed to the compiler; what does not fit is said before."""
    write_config(tmp_path)
    monkeypatch.setenv("CUDA_TILE_CACHE_DIR", str(tmp_path / "cache"))
    asked: list[Any] = []

    class Nothing:
        def __init__(self, *arguments: object) -> None:
            pass

        def __enter__(self) -> Nothing:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def compiled(self, groups: list[Any]) -> list[Any]:
            asked.extend(groups)
            return []

    monkeypatch.setattr(warm_module, "Compiler", Nothing)
    assert is_model(str(tmp_path))
    warmed = filled(tmp_path, model_work(tmp_path, [{"t": 64}], ["bf16"]), "sm_90", 1, silent)
    assert {request.kernel for (request,) in asked} >= {
        "multiply_row",
        "normalise",
        "convolve",
        "token_step",
        "walk_out",
    }
    assert warmed.calls > 2 * len(near(64))
    with pytest.raises(UserError, match="a model has no axis `h`"):
        launched_by(tmp_path, [{"h": 8}], ["bf16"], H200)
    with pytest.raises(UserError, match="is a model, of which nothing else is compiled"):
        model_work(tmp_path, [], ["bf16"], ("steps",))
    with pytest.raises(UserError, match="is no emitted module and no checkpoint"):
        module_path(str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match="llama"):
        launched_by(tmp_path, [], ["bf16"], H200)


def test_long_prompts_are_pieces(tmp_path: Path) -> None:
    """A prompt of any length is computed a piece at a time, and so it is here, whatever the shape says."""
    write_config(tmp_path)
    for shape in ({"t": 10**9}, {"b": 256, "t": 64}):
        wanted = launched_by(tmp_path, [shape], ["bf16"], H200)
        assert wanted.count <= 2 * (len(near(4096)) + 6) + 1
        assert wanted.requests
    with pytest.raises(UserError, match="1000 rows of a model are more than are called here") as error:
        launched_by(tmp_path, [{"b": 1000}], ["bf16"], H200)
    assert error.value.hint is not None
    assert "--shape b=248" in error.value.hint
