"""The bytes and operations that every fraction is of, and the text that names a shape."""

from __future__ import annotations

import pytest

from ssdgen.diagnostics import UserError
from ssdgen.emit.support._segments import segments
from ssdgen.ir.chunkform import ChunkForm
from ssdgen.plan import configure, plan
from ssdgen.plan.roofline import roofline
from ssdgen.run.bench.shapes import SHAPES, Shape, read_shape

COMPULSORY_US = (40, 10, 36, 47, 26, 41, 632)
"""At 4.3 TB/s, as the project's sources have them: without the final states."""


@pytest.mark.parametrize(("shape", "us"), list(zip(SHAPES, COMPULSORY_US, strict=True)), ids=map(str, SHAPES))
def test_compulsory_traffic(shape: Shape, us: int) -> None:
    assert (shape.compulsory_bytes - 4 * shape.b * shape.h * shape.p * shape.n) / 4.3e12 * 1e6 == pytest.approx(
        us, abs=0.8
    )


def test_operations() -> None:
    """Of one chunk of one head: 64 x 64 scores over n, times x, and the state read and updated."""
    chunk = Shape(1, 64, 1, 1, 16, 32)
    assert chunk.operations == 2 * 64 * 64 * 32 + 2 * 64 * 64 * 16 + 2 * (2 * 64 * 32 * 16)


def test_operations_are_those_of_one_walk_that_shares_nothing(mamba2: ChunkForm) -> None:
    planned = plan(mamba2, configure(mamba2, {"plan": "single_walk", "share_scores_from": "0"}))
    for shape in SHAPES:
        assert roofline(planned, shape.sizes, segments).operations == shape.operations


def test_a_shape_is_read_as_it_prints() -> None:
    assert [read_shape(str(shape)) for shape in SHAPES] == list(SHAPES)
    assert read_shape(" 1, 2,4,2,5 ,6") == Shape(1, 2, 4, 2, 5, 6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4,16x,8,1,64,128", "number 2 (tokens) is `16x`"),
        ("4,0,8,1,64,128", "number 2 (tokens) is `0`"),
        ("4,,8,1,64,128", "number 2 (tokens) is ``"),
        ("4,-1,8,1,64,128", "number 2 (tokens) is `-1`"),
        ("4,16", "has 2 numbers, not 6"),
        ("1,2,3,4,5,6,7", "has 7 numbers, not 6"),
        ("1,2,8,3,5,6", "3 groups do not divide 8 heads"),
    ],
)
def test_a_bad_shape_says_where(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        read_shape(text)
    assert message in caught.value.message
    assert str(SHAPES[0]) in caught.value.hint
