"""The lengths of a call's axes are complete and possible, or a message says what is not."""

from __future__ import annotations

import pytest

from ssdgen.diagnostics import UserError
from ssdgen.plan.shapes import sizes_of
from ssdgen.spec import load_source, read_layer


def test_shapes_are_checked() -> None:
    layer = read_layer(load_source("mamba2"))
    assert sizes_of(layer, {"b": 4, "t": 9, "h": 8}) == {"b": 4, "t": 9, "h": 8, "g": 1, "p": 64, "n": 128}
    for shape, message in (
        ({"b": 4, "t": 9}, "does not say how long h is"),
        ({"b": 4, "t": 9, "h": 8, "q": 1}, "has no axis `q`"),
        ({"b": 4, "t": 9, "h": 0}, "axis h has length 0"),
        ({"b": 4, "t": 9, "h": 8, "g": 3}, r"3 groups \(g\) do not divide 8 heads"),
    ):
        with pytest.raises(UserError, match=message):
            sizes_of(layer, shape)
