"""specs/README.md is true: its examples run, and every diagnostic that ssdgen can make about a spec is in it."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from ssdgen.derive import recurrence
from ssdgen.diagnostics import Source, SpecError
from ssdgen.resources import resource_dir
from ssdgen.spec import builtin_specs, load_source, read_layer
from ssdgen.spec.parse import KNOBS
from ssdgen.spec.scope import FUNCTIONS
from ssdgen.spec.split import BLOCKS

README = (resource_dir("specs") / "README.md").read_text(encoding="utf-8")
EXAMPLES = [(m[1] or "", m[2]) for m in re.finditer(r"^```ssd ?(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)]
TINY = EXAMPLES[0][1]
CODE = r"[ED]\d{3}"


def blocks(text: str) -> list[tuple[str, str]]:
    """The blocks of a spec by their names, in order."""
    starts = [m.start() for m in re.finditer(r"^\w+", text, re.MULTILINE)] + [len(text)]
    pieces = [text[a:b] for a, b in pairwise(starts)]
    return [(re.match(r"\w+", piece)[0], piece) for piece in pieces]  # type: ignore[index]


def completed(fragment: str) -> str:
    """`fragment` in place of the blocks of TINY with the same names; a one-line `inputs` is added to TINY's."""
    changed = blocks(fragment)
    if not changed or (changed[0][0] == "language" and len(changed) > 1):
        return fragment
    replaced = {name for name, piece in changed if name != "inputs" or piece.startswith("inputs\n")}
    kept = [(name, piece) for name, piece in blocks(TINY) if name not in replaced]
    order = {name: i for i, name in enumerate(BLOCKS)}
    return "".join(piece for _, piece in sorted(kept + changed, key=lambda b: order.get(b[0], len(order))))


def codes(text: str) -> set[str]:
    try:
        recurrence(read_layer(Source("example.ssd", text)))
    except SpecError as error:
        return {d.code for d in error.diagnostics}
    return set()


@pytest.mark.parametrize(
    ("code", "text"), EXAMPLES, ids=[f"{i}-{code or 'right'}" for i, (code, _) in enumerate(EXAMPLES)]
)
def test_example(code: str, text: str) -> None:
    """An example without a code is right, one with a code has that error alone."""
    assert codes(completed(text)) == ({code} if code else set())


def test_every_diagnostic_is_explained() -> None:
    made = set()
    for path in (resource_dir("specs").parent / "ssdgen").rglob("*.py"):
        made |= set(re.findall(rf'"({CODE})"', path.read_text(encoding="utf-8")))
    explained = set(re.findall(rf"^(?:\*\*|\| )({CODE})", README, re.MULTILINE))
    explained |= set(re.findall(rf"\*\*({CODE})\*\*", README))
    assert made - explained == set(), "specs/README.md does not explain these"
    assert explained - made == set(), "specs/README.md explains what no longer exists"


def test_every_word_of_the_language_is_explained() -> None:
    for word in (*FUNCTIONS, *BLOCKS):
        assert re.search(rf"\b{word}\b", README), word
    for knob in KNOBS:
        assert re.search(rf"^\| `{knob}\b", README, re.MULTILINE), knob


def test_every_built_in_spec_is_listed_and_right() -> None:
    assert set(re.findall(r"\[`(\w+)`\]\(\1\.ssd\)", README)) == set(builtin_specs())
    for name in builtin_specs():
        assert read_layer(load_source(name)).name == name
