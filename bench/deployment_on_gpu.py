"""What a deployment of the Mamba-2 module relies on, tried on a GPU: a first call after warm-up, and packed calls in graphs.

    python bench/deployment_on_gpu.py

Prints one JSON object a line:

  first_call  a fresh process after `ssdgen warm`: seconds of the first call and of the second
  packed      a call with `cu_seqlens` under torch's check for synchronisations, then captured in a CUDA graph, which is
              replayed after other boundaries were copied in; the largest difference from each sequence's own run
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
MODULE = ROOT / "generated" / "mamba2.py"
SHAPE = {"b": 1, "t": 4096, "h": 80, "g": 1, "p": 64, "n": 128}
BOUNDARIES = ((0, 1000, 1001, 1001, 4096), (0, 63, 2048, 4000, 4096))
"""Of four sequences each, one of them empty in the first."""
BOUND = 5e-3
"""Relative norm: sequences are cut into segments elsewhere than in their own runs, and states are rounded to bf16 there."""


def main() -> int:
    """Both trials, each in a process of its own."""
    if sys.argv[1:]:
        print(json.dumps({"first_call": first_call, "packed": packed}[sys.argv[1]]()))
        return 0
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "CUDA_TILE_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join(sys.path[1:])}
        shape = ",".join(f"{axis}={SHAPE[axis]}" for axis in ("b", "t", "h"))
        warm = ["-m", "ssdgen", "warm", str(MODULE), "--shape", shape, "--dtype", "bf16"]
        codes = [
            subprocess.run([sys.executable, *arguments], env=environment, cwd=ROOT, check=False).returncode
            for arguments in (warm, [__file__, "first_call"], [__file__, "packed"])
        ]
    return max(codes)


def inputs() -> dict[str, Any]:
    """Inputs of SHAPE, bf16, steps between 0.001 and 0.1 after softplus."""
    b, t, h, g, p, n = SHAPE.values()
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device="cuda")

    step = 0.001 + 0.099 * torch.rand((b, t, h), generator=generator, device="cuda")
    return {
        "x": normal(b, t, h, p).bfloat16(),
        "dt": step.expm1().log(),
        "A": -1 - 15 * torch.rand(h, generator=generator, device="cuda"),
        "B": normal(b, t, g, n).bfloat16(),
        "C": normal(b, t, g, n).bfloat16(),
        "D": normal(h),
    }


def first_call() -> dict[str, Any]:
    """Seconds of the first two calls of this process, the context of the GPU made before."""
    sys.path.insert(0, str(ROOT))
    from generated import mamba2

    tensors = inputs()
    seconds = []
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        mamba2.forward(**tensors)
        torch.cuda.synchronize()
        seconds.append(round(time.perf_counter() - start, 4))
    return {"trial": "first_call", "first": seconds[0], "second": seconds[1]}


def packed() -> dict[str, Any]:
    """The largest error of packed calls, the second replayed from the graph of the first."""
    sys.path.insert(0, str(ROOT))
    from generated import mamba2

    tensors = inputs()
    ends = torch.tensor(BOUNDARIES[0], device="cuda", dtype=torch.int32)
    other = torch.tensor(BOUNDARIES[1], device="cuda", dtype=torch.int32)
    mamba2.forward(**tensors, cu_seqlens=ends)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    mamba2.forward(**tensors, cu_seqlens=ends)
    torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, states = mamba2.forward(**tensors, cu_seqlens=ends)
    worst = []
    for boundaries, new in zip(BOUNDARIES, (ends.clone(), other), strict=True):
        ends.copy_(new)
        y.fill_(torch.nan)
        states.fill_(torch.nan)
        graph.replay()
        errors = []
        for i, (start, stop) in enumerate(pairwise(boundaries)):
            y_alone, state_alone = alone(mamba2, tensors, start, stop)
            errors += [error(y[:, start:stop], y_alone), error(states[i : i + 1], state_alone)]
        assert all(e <= BOUND for e in errors), errors  # each by itself: max() may pass over a NaN
        worst.append(max(errors))
    return {"trial": "packed", "synchronisations": 0, "captured": worst[0], "replayed": worst[1], "bound": BOUND}


def alone(module: Any, tensors: dict[str, Any], start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs and the final state of one sequence in a call of its own."""
    cut = {k: v[:, start:stop] if v.dim() > 1 else v for k, v in tensors.items()}
    y, state = module.forward(**cut)
    return y, state


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative norm of the difference; 0 for nothing."""
    if not expected.numel():
        return 0.0
    norm = expected.double().norm()
    return float((got.double() - expected.double()).norm() / (norm if norm else 1.0))


if __name__ == "__main__":
    sys.exit(main())
