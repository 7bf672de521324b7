"""How long the host takes for a call, and what of it takes how long, on a GPU; nothing is waited for within a call.

    python bench/host_time.py [--dtype bf16] [--rounds 40]

Prints one JSON object a line, in microseconds, medians of calls that are timed one by one, some at a time before the GPU is
waited for:

  ours       a shape: forward without gradients; by `checks`, the kind of the call; `memory`, of results and between kernels;
             `launches`, as one where it is one; and the usual way, of a call that has not come before
  training   forward and backward pass with autograd, by torch.autograd.grad: the forward pass, both, the launches of the
             backward pass, both without another thread for it, and both passes of a function that computes nothing
  decode     a step of a layer of 80 heads, and of its convolution, with memory for the outputs
  peers      the forward pass of those that are installed (`mamba_ssm`, TileGym), at the same inputs
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from generated import _replay, causal_conv, mamba2, mamba2_gradients
from ssdgen.run.gpu_peers import mamba_ssm, tilegym
from ssdgen.run.inputs import DTYPES, Case, draw
from ssdgen.spec import load_source, read_layer

SHAPES = ((1, 2048, 24, 1, 64, 128), (4, 16384, 8, 1, 64, 128))
"""batch, tokens, heads, groups, channels of a head, and of a state."""
AT_A_TIME = 20
"""Calls before the GPU is waited for: their launches fit into its queue, so that the host never is."""


def median(call: Callable[[], Any], rounds: int) -> float:
    """Microseconds of a call."""
    seconds = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        for _ in range(AT_A_TIME):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return round(statistics.median(seconds) * 1e6, 1)


def launches(call: Callable[[], Any], rounds: int) -> list[float]:
    """Microseconds of the launches of each replay of a call, in order; none where it goes the usual way."""
    found: list[float] = []
    launched = _replay.Words.launched

    def timed(words: _replay.Words, device: int) -> bool:
        start = time.perf_counter()
        went_well = launched(words, device)
        found.append(time.perf_counter() - start)
        return went_well

    count = 0
    with mock.patch.object(_replay.Words, "launched", timed):
        for _ in range(rounds):
            torch.cuda.synchronize()
            before = len(found)
            call()
            count = len(found) - before
    return [round(statistics.median(found[i::count]) * 1e6, 1) for i in range(count)]


def ours(inputs: dict[str, Any], rounds: int) -> dict[str, Any]:
    """The forward pass without gradients."""
    operator, calls = mamba2.OPERATOR, mamba2.OPERATOR._calls
    arguments = tuple(inputs.get(name, NUMBERS.get(name)) for name in operator._names)
    given = arguments[: calls._scalars.start] + arguments[calls._scalars.stop : -calls._absent]
    with torch.no_grad():
        usual = median(lambda: mamba2._checked(*arguments), rounds)
        for _ in range(3):
            mamba2.forward(**inputs)
        replay = calls._kept.get(calls._kind(arguments, given))
        if replay is None:
            return {"forward": median(lambda: mamba2.forward(**inputs), rounds), "usual": usual, "launches": "usual"}

        return {
            "forward": median(lambda: mamba2.forward(**inputs), rounds),
            "checks": median(lambda: calls._kind(arguments, given), rounds),
            "memory": median(lambda: replay.memory(given), rounds),
            "launches": launches(lambda: mamba2.forward(**inputs), rounds),
            "usual": usual,
        }


def training(inputs: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Both passes, with the gradients of every tensor."""
    leaves: dict[str, Any] = {k: v.detach().requires_grad_() for k, v in inputs.items() if isinstance(v, torch.Tensor)}
    arriving = torch.randn_like(mamba2.forward(**leaves)[0])

    def both() -> Any:
        return torch.autograd.grad(mamba2.forward(**leaves)[0], list(leaves.values()), arriving)

    for _ in range(3):
        both()
    return {
        "forward": median(lambda: mamba2.forward(**leaves), rounds),
        "forward and backward": median(both, rounds),
        "launches of backward": launches(both, rounds)[1:],
        "in one thread": in_one_thread(both, rounds),
        "an empty function": median(empty(tuple(leaves.values()), arriving), rounds),
        "written down": len(mamba2_gradients.GRADIENTS._calls._kept),
    }


def in_one_thread(call: Callable[[], Any], rounds: int) -> float:
    """Microseconds of a call where PyTorch's autograd computes gradients in the thread that asks for them."""
    with torch.autograd.set_multithreading_enabled(False):
        return median(call, rounds)


def empty(leaves: tuple[torch.Tensor, ...], arriving: torch.Tensor) -> Callable[[], Any]:
    """Both passes of a function that computes nothing: what PyTorch's autograd takes for itself."""

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(*inputs)
            return torch.empty_like(arriving)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return ctx.saved_tensors

    return lambda: torch.autograd.grad(Nothing.apply(*leaves), leaves, arriving)


def decode(dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """One token of a layer of 80 heads, p = 64, n = 128: the convolution of x, B and C, and the recurrence, of slices of it."""
    b, h, p, n = 1, 80, 64, 128
    row = torch.randn(b, h * p + 2 * n, device="cuda", dtype=dtype)
    weight, bias = torch.randn(row.shape[1], 4, device="cuda", dtype=dtype), torch.randn_like(row[0])
    cache = causal_conv.init_cache(b, row.shape[1], 4, device="cuda", dtype=dtype)
    x, B, C = (v.unflatten(1, (-1, m)) for v, m in zip(row.split([h * p, n, n], 1), (p, n, n), strict=True))
    A, dt, D = -torch.rand(h, device="cuda"), torch.randn(b, h, device="cuda"), torch.randn(h, device="cuda")
    state, out, y = mamba2.init_state(b, h, p=p, n=n, device="cuda"), torch.empty_like(x), torch.empty_like(row)
    with torch.no_grad():
        return {
            "convolution": median(lambda: causal_conv.step(cache, row, weight, bias, activation="silu", out=y), rounds),
            "step": median(lambda: mamba2.step(state, x, dt, A, B, C, D=D, out=out), rounds),
        }


NUMBERS = {"dt_min": 0.0, "dt_max": float("inf")}


def main() -> int:
    """Every shape; 1 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "f16", "f32"))
    parser.add_argument("--rounds", type=int, default=40)
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("host_time: it needs a CUDA device", file=sys.stderr)
        return 1
    layer = read_layer(load_source("mamba2"))
    for shape in SHAPES:
        sizes = dict(zip(("b", "t", "h", "g", "p", "n"), shape, strict=True))
        case = Case(sizes, dtype=chosen.dtype, absent=frozenset({"z", "S0"}), forms={"D": ("h",)})
        drawn = draw(layer, case, "cuda")
        inputs = {k: v for k, v in drawn.keywords().items() if k not in NUMBERS}
        print(json.dumps({"shape": shape, "ours": ours(inputs, chosen.rounds)}), flush=True)
        print(json.dumps({"shape": shape, "training": training(inputs, chosen.rounds)}), flush=True)
        for name, make in (("mamba_ssm", partial(mamba_ssm, 128)), ("TileGym", partial(tilegym, 64))):
            try:
                call = partial(make(), drawn)
                call()
            except ImportError as missing:
                print(json.dumps({"shape": shape, "peer": name, "missing": str(missing)}), flush=True)
                continue
            print(json.dumps({"shape": shape, "peer": name, "forward": median(call, chosen.rounds)}), flush=True)
    print(json.dumps({"decode": decode(DTYPES[chosen.dtype], chosen.rounds)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
