"""What can be said of the measuring process without a GPU: which results count as right."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from ssdgen.run.inputs import Case, draw
from ssdgen.run.tune.space import Candidate, Space
from ssdgen.run.tune.worker import Setup, Task, _call, distance
from tests.run.tune.conftest import SIZES


def test_a_nan_anywhere_is_no_result() -> None:
    """`max` of a nan depends on the order; the check must not."""
    one, nan = torch.ones(3), torch.tensor([1.0, math.nan, 1.0])
    for got in ((nan, one), (one, nan)):
        assert math.isnan(distance(got, (one, one)))
    assert distance((one, one), (nan, one)) != distance((one, one), (one, one))
    assert distance((one[:2], one), (one, one)) == math.inf
    assert distance((one * 1.5, one), (one, one)) == pytest.approx(0.5)


def test_a_candidate_runs_with_its_fields_and_is_held_to_the_bounds_of_its_products(space: Space) -> None:
    layer = space.form.recurrence.layer
    sizes = {**SIZES, "b": 1, "t": 100, "h": 2}
    case = Case(sizes, "f32", absent=frozenset({"z", "S0"}))
    module = str(Path(str(space.variant(Candidate()).module.__file__)))
    inputs = draw(layer, case)
    calls = {}
    for chunk in (64, 128):
        calls[chunk], bound = _call(Task(module, (("chunk", chunk),)), Setup(layer, case, module), inputs)
        assert bound == pytest.approx(2e-3), "twice that of TF32"
    assert distance(calls[128](), calls[64]()) < 1e-5
    with pytest.raises(ValueError, match="chunk"):
        _call(Task(module, (("chunk", 65),)), Setup(layer, case, module), inputs)
