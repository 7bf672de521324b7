"""What several commands' options mean."""

from __future__ import annotations

from collections.abc import Iterable

from ssdgen.diagnostics import UserError


def settings(config: Iterable[str] | None) -> dict[str, str]:
    """The pairs of `--config KEY=VALUE`; UserError for one that is no pair or a key given twice."""
    pairs: dict[str, str] = {}
    for text in config or ():
        key, equals, value = (part.strip() for part in text.partition("="))
        if not (key and equals and value):
            raise UserError(f"--config {text} is not KEY=VALUE", "for example --config chunk=128")
        if key in pairs:
            raise UserError(f"--config gives {key} twice", "leave one of them out")
        pairs[key] = value
    return pairs


def several(text: str, allowed: Iterable[str], option: str) -> tuple[str, ...]:
    """The comma-separated words of an option, each once, all of them among `allowed`; UserError otherwise."""
    known = tuple(allowed)
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for word in words or ("nothing",):
        if word not in known:
            raise UserError(f"{option} knows no `{word}`", f"some of {', '.join(known)}, separated by commas")
    return words
