"""What can be said of the measuring process without a GPU: which results count as right."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from ssdgen.run.inputs import Case, draw
from ssdgen.run.tune.space import Candidate, Space
from ssdgen.run.tune.worker import Setup, Task, _call, distances
from tests.run.tune.conftest import SIZES


def test_a_nan_anywhere_is_no_result() -> None:
    """Each value is held to its bound, which a nan is not within; so is another shape not."""
    one, nan = torch.ones(3), torch.tensor([1.0, math.nan, 1.0])
    assert math.isnan(distances((nan, one), (one, one))[0])
    assert math.isnan(distances((one, one), (one, nan))[1])
    assert distances((one[:2], one), (one, one)) == [math.inf, 0]
    assert distances((one * 1.5, one), (one, one)) == pytest.approx([0.5, 0])


def test_a_candidate_runs_with_its_fields_and_is_held_to_the_bounds_of_its_products(space: Space) -> None:
    layer = space.form.recurrence.layer
    sizes = {**SIZES, "b": 1, "t": 100, "h": 2}
    case = Case(sizes, "f32", absent=frozenset({"z", "S0"}))
    module = str(Path(str(space.variant(Candidate()).module.__file__)))
    inputs = draw(layer, case)
    calls = {}
    for chunk in (64, 128):
        calls[chunk], bounds = _call(Task(module, (("chunk", chunk),)), Setup(layer, case, module), inputs)
        assert bounds == pytest.approx([2e-3, 2e-3]), "twice that of TF32"
    assert max(distances(calls[128](), calls[64]())) < 1e-5
    with pytest.raises(ValueError, match="chunk"):
        _call(Task(module, (("chunk", 65),)), Setup(layer, case, module), inputs)
