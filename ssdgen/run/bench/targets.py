"""One table of the three targets: the same forward pass as cuTile kernels, portable torch and XLA, timed beside its error.

    python -m ssdgen.run.bench.targets --seconds 3 --json targets.json

What portability costs. Each call is queued many times before the device is waited for, so that launching by Python counts only
where it is longer than the work, as it is in the portable torch form; all have the same inputs, which exceed the L2 cache.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ssdgen.diagnostics import UserError
from ssdgen.run.bench.environment import need_gpu, version
from ssdgen.run.bench.ours import runtime_of
from ssdgen.run.bench.shapes import SHAPES, Shape, read_shape
from ssdgen.run.bench.truth import case_of, errors, mamba2_truth, of_call
from ssdgen.run.inputs import Dtype, Inputs, draw
from ssdgen.spec import load_source, read_layer

TWO = (SHAPES[0], SHAPES[5])
"""The shapes unless others are named: long sequences of few heads, and one of many."""

QUEUED = 5
"""Calls between two waits for the device."""

FEWEST = 3
"""Rounds that are measured at least."""

Values = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Row:
    """One target at one shape: microseconds of a call, relative errors of y and the final state against float64; `note` says
    why there are none."""

    shape: str
    dtype: str
    target: str
    products: str
    us: float | None = None
    error_y: float | None = None
    error_state: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Target:
    """How a target is called: `call` queues the work and returns what `wait` waits for and `values` looks at."""

    name: str
    products: str
    call: Callable[[], Any]
    wait: Callable[[Any], object]
    values: Callable[[Any], Values]


def rows(shape: Shape, dtype: Dtype, seconds: float, device: str = "cuda") -> Iterator[Row]:
    """Every target at a shape of Mamba-2, in bf16 or f32, measured in turn for `seconds` behind their compilation."""
    layer = read_layer(load_source("mamba2"))
    module = importlib.import_module("ssdgen.generated.mamba2")
    inputs = draw(layer, replace(case_of(layer, shape, 0), dtype=dtype), device, device)
    truth = mamba2_truth(module, shape, inputs)
    targets: list[Target] = []
    precisions = ("default",) if dtype == "bf16" else ("default", "highest")  # which changes nothing of bfloat16
    makers: list[Callable[[Any, Inputs], Target]] = [cutile, portable]
    makers += [partial(xla, precision=p) for p in precisions]
    for make in makers:
        try:
            targets.append(make(module, inputs))
        except ImportError as error:
            yield Row(str(shape), dtype, "xla", "", note=f"not measured: {error}; pip install 'jax[cuda13]'")
            break
    found: dict[str, tuple[float, float]] = {}
    for target in targets:
        result = target.call()
        target.wait(result)
        y, state = target.values(result)
        found[f"{target.name} {target.products}"] = errors(of_call(shape, y, state), truth)
    for target, times in zip(targets, in_turn(targets, seconds), strict=True):
        error_y, error_state = found[f"{target.name} {target.products}"]
        yield Row(str(shape), dtype, target.name, target.products, 1e6 * median(times), error_y, error_state)


def in_turn(targets: Sequence[Target], seconds: float) -> list[list[float]]:
    """Seconds of a call of each target, in rounds of all of them."""
    times: list[list[float]] = [[] for _ in targets]
    end = time.perf_counter() + seconds
    while len(times[-1]) < FEWEST or time.perf_counter() < end:
        for target, found in zip(targets, times, strict=True):
            start = time.perf_counter()
            results = [target.call() for _ in range(QUEUED)]
            target.wait(results[-1])
            found.append((time.perf_counter() - start) / QUEUED)
    return times


def cutile(module: Any, inputs: Inputs) -> Target:
    """The kernels, with the configuration that a user gets."""
    config = module.CONFIGS[inputs.tensors["x"].dtype]
    call = partial(module.forward, **inputs.keywords())
    return Target("cutile", config.intra, call, _wait, lambda found: found)


def portable(module: Any, inputs: Inputs) -> Target:
    """The portable form in torch, eager: in float32 whatever the inputs are."""

    def call() -> Values:
        with runtime_of(module).portable():
            found: Values = module.forward(**inputs.keywords())
        return found

    return Target("torch", "f32", call, _wait, lambda found: found)


def xla(module: Any, inputs: Inputs, precision: str) -> Target:
    """The module for XLA, compiled; arrays are those of torch."""
    import jax

    emitted = importlib.import_module(f"{module.__name__}_jax")
    arrays = {k: jax.dlpack.from_dlpack(v) if isinstance(v, torch.Tensor) else v for k, v in inputs.keywords().items()}
    forward = jax.jit(partial(emitted.forward, precision=precision))

    def values(found: Any) -> Values:
        return [torch.utils.dlpack.from_dlpack(x) for x in found]

    narrow = inputs.tensors["x"].dtype == torch.bfloat16
    return Target("xla", "bf16" if narrow else precision, lambda: forward(**arrays), jax.block_until_ready, values)


def _wait(values: Values) -> None:
    if values[0].is_cuda:
        torch.cuda.synchronize()


def environment() -> dict[str, str]:
    """What rows are measured on."""
    found = {"device": torch.cuda.get_device_name(), "python": platform.python_version(), "torch": torch.__version__}
    return found | {name: version(name) for name in ("cuda-tile", "jax")}


def text(row: Row) -> str:
    """A row for a person."""
    head = f"{row.shape:26}{row.dtype:6}{row.target:8}{row.products:9}"
    return head + (row.note or f"{row.us:10.1f} us   error {row.error_y:.1e} of y, {row.error_state:.1e} of S")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: prints rows as they come, and writes them to a file."""
    parser = argparse.ArgumentParser(
        prog="python -m ssdgen.run.bench.targets", description="The targets, side by side."
    )
    parser.add_argument("--shape", action="append", help=f"b,t,h,g,p,n; may be repeated; else {TWO[0]} and {TWO[1]}")
    parser.add_argument("--dtypes", default="bf16,f32", help="some of bf16, f32")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each shape and dtype, behind compilation")
    parser.add_argument("--json", type=Path, help="the file that rows are written to")
    options = parser.parse_args(arguments)
    dtypes: dict[str, Dtype] = {"bf16": "bf16", "f32": "f32"}
    odd = [w for w in options.dtypes.split(",") if w not in dtypes]
    if odd:
        raise UserError(f"--dtypes knows no `{odd[0]}`", "some of bf16, f32")
    need_gpu()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch has most of the memory
    found: list[Row] = []
    for shape in map(read_shape, options.shape) if options.shape else TWO:
        for dtype in options.dtypes.split(","):
            for row in rows(shape, dtypes[dtype], options.seconds):
                print(text(row), flush=True)
                found.append(row)
        if options.json:
            data = {"environment": environment(), "rows": [asdict(r) for r in found]}
            options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(str(error))
