"""`ssdgen complete`: text behind a prompt, and messages for what is missing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ssdgen.models.loop import Decoder
from ssdgen.models.mamba2 import Mamba2
from tests.cli.conftest import Command, ssdgen
from tests.models.folders import SMALL, random_weights, write_folder

__all__ = ["ssdgen"]

CONFIG = replace(SMALL, vocab=264, stop=())


def write_tokenizer(folder: Path, eos: str | None = None) -> None:
    """A token a byte, and one that ends texts."""
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    if eos is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = write_folder(tmp_path / "model", CONFIG, "transformers", random_weights(CONFIG))
    write_tokenizer(made)
    return made


def test_text_and_json(ssdgen: Command, folder: Path) -> None:
    """The prompt and what the loop makes of it; the same in JSON; draws with a seed are the same each time."""
    (told,) = [json.loads(ssdgen("complete", str(folder), "Räuber", "-n", "12", "--json").out)]
    ids = told["prompt_tokens"]
    assert len(ids) == len("Räuber".encode())
    assert told["tokens"] == [t for (row,) in Decoder(Mamba2.load(folder)).run([ids], 12) for t in row]
    assert told["ended"] == "length"
    shown = ssdgen("complete", str(folder), "Räuber", "-n", "12")
    assert (shown.code, shown.err) == (0, "")
    assert shown.out == f"Räuber{told['text']}\n"
    drawn = [
        ssdgen("complete", str(folder), "a", "-n", "9", "--temperature", "1", "--top-k", "5", "--seed", s).out
        for s in "112"
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_stop_token_of_the_tokenizer_ends_the_text(ssdgen: Command, folder: Path) -> None:
    """Where config.json names none, as those of state-spaces; its text is not shown."""
    whole = json.loads(ssdgen("complete", str(folder), "abc", "-n", "12", "--json").out)["tokens"]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    write_tokenizer(folder, tokenizer.id_to_token(whole[4]))
    told = json.loads(ssdgen("complete", str(folder), "abc", "-n", "12", "--json").out)
    assert told["ended"] == "stop"
    assert told["tokens"] == whole[: whole.index(whole[4]) + 1]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "tokenizer.json").unlink(), "there is no tokenizer.json in"),
        (lambda f: (f / "tokenizer.json").write_text("{"), "tokenizer.json is no JSON"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json is no tokenizer"),
        (lambda f: (f / "model.safetensors").unlink(), "there are no weights in"),
        (lambda f: (f / "config.json").write_text('{"model_type": "llama"}'), "is of a `llama` model"),
    ],
)
def test_what_is_missing_is_named(ssdgen: Command, folder: Path, spoil: object, message: str) -> None:
    spoil(folder)  # type: ignore[operator]
    got = ssdgen("complete", str(folder), "abc")
    assert (got.code, got.out) == (1, "")
    assert message in got.err
    assert "Traceback" not in got.err


def test_an_empty_prompt_and_another_models_tokenizer(ssdgen: Command, folder: Path, tmp_path: Path) -> None:
    assert "the prompt has no tokens" in ssdgen("complete", str(folder), "").err
    small = write_folder(tmp_path / "small", SMALL, "transformers", random_weights(SMALL))
    got = ssdgen("complete", str(small), "z", "--tokenizer", str(folder))
    assert (got.code, "it is another model's" in got.err) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nosuch", "abc"), "there is no folder nosuch"),
        (("model", "\udcff"), "the prompt is no UTF-8 text"),
        (("model", "abc", "--temperature", "inf"), "--temperature"),
        (("model", "abc", "--seed", "9" * 26), "--seed"),
        (("model", "abc", "--device", "cuda"), "torch finds no GPU here"),
    ],
)
def test_bad_arguments(
    ssdgen: Command, folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    got = ssdgen("complete", *arguments)
    assert (got.code, got.out) == (1, "")
    assert message in got.err


def test_weights_that_are_not_finite(ssdgen: Command, tmp_path: Path) -> None:
    """Said with the weight's name, before anything is printed."""
    weights = random_weights(CONFIG)
    weights["layers.1.A_log"][0] = float("nan")
    made = write_folder(tmp_path / "model", CONFIG, "transformers", weights)
    write_tokenizer(made)
    got = ssdgen("complete", str(made), "abc")
    assert (got.code, got.out) == (1, "")
    assert "`backbone.layers.1.mixer.A_log` holds numbers that are not finite" in got.err
