from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """What a test draws is the same each time."""
    torch.manual_seed(0)
