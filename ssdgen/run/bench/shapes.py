"""The shapes of a Mamba-2 forward pass, and the bytes and operations that any implementation of one needs."""

from __future__ import annotations

import re
from dataclasses import asdict, astuple, dataclass
from functools import cache

from ssdgen.diagnostics import UserError
from ssdgen.ir.layer import Layer
from ssdgen.plan.roofline import compulsory_bytes
from ssdgen.spec import load_source, read_layer

NAMES = ("batch", "tokens", "heads", "groups", "head channels", "state channels")
CHUNK = 64
"""Tokens a chunk in the count of operations, the same for everyone."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Batch, tokens, heads, groups, head channels and state channels; `str` is what `--shape` takes."""

    b: int
    t: int
    h: int
    g: int
    p: int
    n: int

    def __str__(self) -> str:
        return ",".join(map(str, astuple(self)))

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.b * self.t

    @property
    def sizes(self) -> dict[str, int]:
        """The length of each axis of the layer."""
        return asdict(self)

    @property
    def compulsory_bytes(self) -> int:
        """Reading each input once and writing y and the final state once: x, B and C in bf16, D of one number a head."""
        return compulsory_bytes(_layer(), self.sizes)

    @property
    def operations(self) -> int:
        """Floating-point operations of the chunked form at chunk 64, C.B once a head: scores, their product with x, what is
        read from the state, and its update. Whole chunks: the masked half of the scores counts.
        """
        return self.tokens * self.h * (2 * CHUNK * self.n + 2 * CHUNK * self.p + 4 * self.n * self.p)


SHAPES = (
    Shape(4, 16384, 8, 1, 64, 128),
    Shape(4, 4096, 8, 1, 64, 128),
    Shape(4, 16384, 8, 1, 64, 64),
    Shape(4, 16384, 8, 1, 64, 256),
    Shape(8, 2048, 24, 1, 64, 128),
    Shape(1, 8192, 80, 1, 64, 128),
    Shape(1, 131072, 64, 8, 64, 128),
)
"""What the forward pass is measured at; the first is the example of the published comparison."""


def read_shape(text: str) -> Shape:
    """The shape that `b,t,h,g,p,n` names. UserError says which number is wrong."""
    words = [word.strip() for word in text.split(",")]
    hint = f"six numbers, {', '.join(NAMES)}: --shape {SHAPES[0]}"
    for number, word in enumerate(words[: len(NAMES)]):
        if not re.fullmatch(r"[0-9]+", word) or int(word) == 0:
            place = f"number {number + 1} ({NAMES[number]})"
            raise UserError(f"--shape {text}: {place} is `{word}`, which is no whole number above 0", hint)
    if len(words) != len(NAMES):
        raise UserError(f"--shape {text} has {len(words)} numbers, not {len(NAMES)}", hint)
    shape = Shape(*map(int, words))
    if shape.h % shape.g:
        raise UserError(f"--shape {text}: {shape.g} groups do not divide {shape.h} heads", hint)
    return shape


@cache
def _layer() -> Layer:
    return read_layer(load_source("mamba2"))
