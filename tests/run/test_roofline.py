"""The roofline of a plan is what its emitted module does: its arrays are those of the launches, its products those that run."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from ssdgen import pipeline
from ssdgen.emit.support._segments import segments
from ssdgen.ir.chunkform import ChunkForm
from ssdgen.ir.layer import Dtype
from ssdgen.ir.plan import SEGMENTS
from ssdgen.plan.roofline import roofline
from ssdgen.run.emulate import launch, products
from ssdgen.run.inputs import DTYPES, Case, draw

SPECS = ("mamba2", "retnet", "linear_attention", "simple_gla", "mlstm")
PLANS = ("segmented", "single_walk", "three_kernel")


@cache
def form_of(spec: str) -> ChunkForm:
    return pipeline.derive(spec)[0]


def distinct_bytes(x: torch.Tensor) -> int:
    """The bytes of `x`, what is repeated by a stride of 0 once."""
    sizes = (size for size, stride in zip(x.shape, x.stride(), strict=True) if stride)
    return math.prod(sizes) * x.element_size()


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("spec", SPECS)
def test_a_kernel_counts_what_it_is_launched_with_and_multiplies(
    spec: str, plan: str, dtype: Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every product of the emulated call is counted, in bf16 operations; every array of a launch is one that is counted, as
    long as it is, but for what stands in for an absent one and for what only packed sequences need."""
    form = form_of(spec)
    layer = form.recurrence.layer
    settings = {"plan": plan, "intra": "bf16x2" if dtype == "bf16" else "tf32x3", "tile_p": "32"}
    planned = pipeline.plan(form, settings)
    module: Any = pipeline.load(pipeline.emit(planned))
    shape = {a.name: a.size or 64 for a in layer.axes} | {g.axis: 2 for g in layer.groups}
    shape |= {layer.batch: 1, layer.time: 200, layer.head: 4} | {"p": 40, "n": 72}
    absent = {t.name for t in layer.inputs if t.optional} | {f"{s.name}0" for s in layer.states}
    forms = {t.name: t.narrower[0] for t in layer.inputs if t.narrower}
    inputs = draw(layer, Case(shape, dtype, absent=frozenset(absent), forms=forms))
    config = module.CONFIGS[DTYPES[dtype]]
    if hasattr(config, "segments"):
        config = replace(config, segments=2)
    if hasattr(config, "share_scores_from"):
        config = replace(config, share_scores_from=2)

    multiplied = {"": 0}
    given: dict[str, dict[str, torch.Tensor]] = {}
    kernels = {k.name: k for k in planned.kernels}
    product = products._product

    def counting(a: Any, b: Any, *rest: Any) -> Any:
        (m, k), n = a.shape, b.shape[1]
        multiplied[list(given)[-1]] += 2 * m * n * k * {"bfloat16": 1, "tfloat32": 2}[a.dtype.name]
        return product(a, b, *rest)

    def note(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        name = kernel._pyfunc.__name__
        if name not in kernels:  # what finds how far segments reach, a few numbers each
            return launch(kernel, grid, arguments)
        arrays = zip(kernels[name].parameters, arguments, strict=True)
        given[name] = {p.name: x for p, x in arrays if p.is_array and p.role != "table"}
        multiplied[name] = 0
        return launch(kernel, grid, arguments)

    monkeypatch.setattr(products, "_product", counting)
    with importlib.import_module("._runtime", module.__package__).launcher(note):
        module.forward(**inputs.keywords(), config=config)

    found = roofline(planned, shape, segments, dtype=dtype, knobs=vars(config))
    assert [w.kernel for w in found.kernels] == list(given)
    for w in found.kernels:
        assert w.bf16_operations == multiplied[w.kernel], w.kernel
        arrays, parameters = dict(w.arrays), {p.name: p for p in kernels[w.kernel].parameters}
        left = {name for name in given[w.kernel] if name not in arrays}
        left -= {name for name in left if parameters[name].role == "prefixes"}  # which the call does not ask for
        left -= {r.oldest for r in planned.reaches}
        assert all(parameters[name].argument in absent for name in left)
        for name, size in arrays.items():
            whole = distinct_bytes(given[w.kernel][name])
            if w.kernel.startswith("segment_states") and layer.time in parameters[name].axes:
                assert size == whole * 128 // (256 if parameters[name].role == "workspace" else 200), (
                    "one segment of two"
                )
            elif SEGMENTS in parameters[name].axes:
                parts = given[w.kernel][name].shape[parameters[name].axes.index(SEGMENTS)]
                assert size == whole // parts, "one segment has another after it"
            else:
                assert size == whole, f"{w.kernel}: {name}"
    assert found.segments == (2 if plan == "segmented" else 1)
