"""The text of every message about a bad spec is pinned: golden/NAME.ssd is read, golden/NAME.txt is what people see."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ssdgen.diagnostics import Source, SpecError
from ssdgen.spec import read_layer

GOLDEN = Path(__file__).parent / "golden"
BAD = sorted(GOLDEN.glob("*.ssd"))


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_message(path: Path, golden: Callable[[Path, str], None]) -> None:
    with pytest.raises(SpecError) as error:
        read_layer(Source(path.name, path.read_text(encoding="utf-8")))
    golden(path.with_suffix(".txt"), str(error.value) + "\n")


def test_there_are_enough_bad_specs_and_no_orphans() -> None:
    assert len(BAD) >= 40
    assert {p.stem for p in GOLDEN.glob("*.txt")} == {p.stem for p in BAD}


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_message_is_in_human_words(path: Path) -> None:
    """No name of a grammar terminal, no Python class, no full stop at the end of a message."""
    text = path.with_suffix(".txt").read_text(encoding="utf-8")
    assert not re.search(r"\b(LSQB|RSQB|LPAR|RPAR|AXIS|DTYPE|NUMBER|TITLE|Token|Tree|__ANON)\b", text)
    for head in re.findall(r"error\[E\d{3}\]: (.*)", text):
        assert not head.endswith(".")
        assert len(head) < 200
