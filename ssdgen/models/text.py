"""Text to tokens and back, by the tokenizer.json of a checkpoint and the tokenizers library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ssdgen.diagnostics import UserError
from ssdgen.models.checkpoint import INSTALL
from ssdgen.models.config import read_json


class Text:
    """The tokenizer in a folder. Raises UserError, which names the file, if it is missing, damaged, or cannot be read here."""

    def __init__(self, folder: Path) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise UserError("text needs the package tokenizers, which is not installed", INSTALL) from error
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise UserError(
                f"there is no tokenizer.json in {folder}",
                "--tokenizer FOLDER names another; Mamba-2 of state-spaces was trained with that of EleutherAI/gpt-neox-20b",
            )
        read_json(path)  # a message of ours for what is no JSON
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower class
            raise UserError(f"{path} is no tokenizer: {' '.join(str(error).split())}") from error
        self._streams: Any = tokenizers.decoders.DecodeStream
        settings = folder / "tokenizer_config.json"
        end = read_json(settings).get("eos_token") if settings.is_file() else None
        name = end.get("content") if isinstance(end, dict) else end
        found = self._tokenizer.token_to_id(name) if isinstance(name, str) else None
        self.stop: tuple[int, ...] = () if found is None else (found,)
        """The token that ends a text, if tokenizer_config.json names one."""

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text, with those that the tokenizer puts around every one."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def pieces(self, prompt: Sequence[int], tokens: Iterable[int]) -> Iterator[str]:
        """The text of tokens behind a prompt, as soon as it is whole: a character may take several of them."""
        stream = self._streams(ids=list(prompt), skip_special_tokens=True)
        for token in tokens:
            yield stream.step(self._tokenizer, token) or ""
