"""Steps of the causal convolution that read the cache and the taps before they wait: which do, and that it changes nothing."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from generated import _runtime, causal_conv
from ssdgen.ir.build import ConstantArg
from ssdgen.run.checks import poisoned_memory
from ssdgen.run.emulate import launch
from ssdgen.run.recorded import recording

BF16, F32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("name", ["portable", "emulation"])
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("w", causal_conv.WIDTHS)
def test_steady_steps_are_steps(name: str, dtype: torch.dtype, w: int) -> None:
    """Fewer tokens than the cache keeps, as many as a block takes, and more; bit for bit, outputs and cache."""
    random = torch.Generator().manual_seed(w)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    for t, d, biased, silu in ((1, 5, True, True), (2, 130, False, False), (16, 3, True, False), (20, 5, False, True)):
        x, weight, bias, first = drawn(2, t, d), drawn(d, w), drawn(d) if biased else None, drawn(2, d, w - 1)
        results = []
        for steady in (False, True):
            cache = first.clone()
            keywords: dict[str, Any] = {"activation": "silu" if silu else None, "steady": steady}
            with poisoned_memory(), _runtime.launcher(launch) if name == "emulation" else nullcontext():
                y = causal_conv.steps(cache, x, weight, bias, **keywords)
            results.append((y, cache))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])
        assert not torch.equal(cache, first)


def flags(x: Tensor, weight: Tensor, **keywords: Any) -> list[bool | int | float]:
    """Which of the launches of a call of `steps` are steady."""
    cache = torch.zeros(2, len(weight), weight.shape[1] - 1, dtype=BF16)
    with recording(causal_conv) as launches:
        causal_conv.steps(cache, x, weight, **keywords)
    constants = [a for launch in launches for a in launch.request.signature if isinstance(a, ConstantArg)]
    return [a.value for a in constants if a.name == "STEADY"]


def test_what_is_steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first launch of a call that promises so: the next reads the cache that it writes. Not of slots, nor with a copy of
    the taps, which the call makes."""
    x, weight = torch.zeros(2, 40, 6, dtype=BF16), torch.zeros(6, 100, dtype=BF16)[:, :4]
    assert flags(x, weight) == [False, False, False]
    assert flags(x, weight, steady=True) == [True, False, False]
    slots = torch.tensor([1, 0], dtype=torch.int32)
    assert flags(x, weight, steady=True, state_indices=slots) == [False, False, False]
    assert flags(x[:, :2], weight, steady=True) == [True]
    monkeypatch.setattr(_runtime, "LIMIT", 300)
    assert flags(x[:, :2], weight, steady=True) == [False]
