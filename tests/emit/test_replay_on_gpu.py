"""On a GPU: what goes to the driver gives the bits of the usual way, wherever the host calls from. Skipped without one."""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Thread
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from generated import _step, mamba2, mamba2_gradients
from ssdgen.run.inputs import Case, draw
from ssdgen.spec import load_source, read_layer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a CUDA device")

SIZES = {"b": 2, "t": 1000, "h": 8, "g": 1, "p": 64, "n": 128}


def inputs_of(seed: int) -> dict[str, Any]:
    layer = read_layer(load_source("mamba2"))
    return dict(draw(layer, Case(SIZES, dtype="bf16", forms={"D": ("h",)}, seed=seed), "cuda").keywords())


def usual(call: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    with mock.patch.dict(os.environ, {"SSDGEN_DEBUG": "1"}):
        return call()


def same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> bool:
    torch.cuda.synchronize()
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def forward(seed: int) -> Callable[[], tuple[Tensor, ...]]:
    inputs = inputs_of(seed)
    return lambda: mamba2.forward(**inputs)


def test_forward_from_anywhere() -> None:
    """The thread, a thread that never used the GPU, another stream, and a CUDA graph that is replayed on other numbers."""
    with torch.no_grad():
        for seed in range(4):
            call = forward(seed)
            assert same(call(), usual(call))
        assert mamba2.OPERATOR._calls._kept
        want = usual(call)
        found: list[tuple[Tensor, ...]] = []
        thread = Thread(target=lambda: found.append(call()))
        thread.start()
        thread.join()
        assert same(found[0], want)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            other = call()
        torch.cuda.current_stream().wait_stream(stream)
        assert same(other, want)
        inputs, graph = inputs_of(7), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = mamba2.forward(**inputs)
        for name, value in inputs_of(8).items():
            if isinstance(value, Tensor):
                inputs[name].copy_(value)
        graph.replay()
        assert same(captured, usual(forward(8)))


def test_calls_that_wait_for_nothing() -> None:
    """One behind the other, on two streams: each reads its own addresses, though the graph of those before still runs."""
    with torch.no_grad():
        calls = [forward(seed) for seed in range(6)]
        want = [usual(call) for call in calls]
        streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
        streams[1].wait_stream(streams[0])
        found = []
        for number in range(60):
            with torch.cuda.stream(streams[number // 3 % 2]):
                found.append(calls[number % 6]())
    torch.cuda.synchronize()
    replay = next(iter(mamba2.OPERATOR._calls._kept.values()))
    assert all(words._graph is not None for stream in streams for words in replay.free[stream.cuda_stream])
    assert all(same(values, want[number % 6]) for number, values in enumerate(found))


def test_gradients() -> None:
    def both(seed: int) -> tuple[Tensor, ...]:
        inputs = inputs_of(seed)
        leaves = [v.requires_grad_() for v in inputs.values() if isinstance(v, Tensor)]
        y, S = mamba2.forward(**inputs)
        return torch.autograd.grad((y, S), leaves, (torch.ones_like(y), torch.ones_like(S)))

    for seed in range(4):
        got = both(seed)
        assert same(got, usual(lambda seed=seed: both(seed)))
    assert mamba2_gradients.GRADIENTS._calls._kept


def test_steps() -> None:
    for seed in range(4):
        inputs = {k: v for k, v in inputs_of(seed).items() if k != "S0" and isinstance(v, Tensor)}
        one: dict[str, Any] = {k: v[:, 0] if v.dim() > 2 else v for k, v in inputs.items()}
        S = torch.randn(2, 8, 64, 128, device="cuda")
        copy = S.clone()
        got = mamba2.step(S, **one)
        want = usual(lambda copy=copy, one=one: (mamba2.step(copy, **one),))
        assert same((got, S), (*want, copy))
    assert _step._calls(mamba2.STEP, False, False)._kept
