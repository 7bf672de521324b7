"""What an emitted module launches, as requests to compile: its own host code runs, and its launches are written down."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, combinations
from types import ModuleType
from typing import Any

import torch

from ssdgen.ir.build import Argument, CompileRequest, ConstantArg, Element, ScalarArg, array_arg
from ssdgen.ir.layer import Layer
from ssdgen.ir.plan import Parameter, Plan, WalkKernel
from ssdgen.run.inputs import DTYPES, Case, Dtype, draw, takes

ELEMENTS: dict[torch.dtype, Element] = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.int32: "i32",
}
UNDECLARED_SIZE = 64
HINTS = ("occupancy", "num_worker_warps")


def compile_requests(
    plan: Plan,
    module: ModuleType,
    architectures: Iterable[str],
    dtypes: Iterable[Dtype],
    note: str = "",
    packed: bool = False,
) -> tuple[CompileRequest, ...]:
    """Every kernel that `module`, emitted from `plan`, launches for aligned inputs of `dtypes`, once an architecture.

    Shapes are those of the class that is used most: the declared sizes, a multiple of 16 tokens, one group; every optional
    input once present and once absent; with `packed` those for packed sequences too, if the plan has any. A dtype that the
    layer does not take gives nothing. `note` ends every label.
    """
    layer = plan.form.recurrence.layer
    found: dict[CompileRequest, list[str]] = {}
    for dtype in dtypes:
        if not takes(layer, dtype):
            continue
        subsets = _subsets([t.name for t in layer.inputs if t.optional])
        ways = [(present, False) for present in subsets]
        ways += [((), True)] if packed and isinstance(plan.kernels[-1], WalkKernel) else []
        for present, sequences in ways:
            for request in _launched(plan, module, dtype, present, sequences):
                found.setdefault(replace(request, label=""), []).append(request.label)
    labelled = [replace(request, label=f"{_common(labels)} {note}".strip()) for request, labels in found.items()]
    return tuple(replace(request, arch=arch) for arch in architectures for request in labelled)


def _subsets(names: list[str]) -> list[tuple[str, ...]]:
    """Every set of optional inputs, the empty one first."""
    return list(chain.from_iterable(combinations(names, n) for n in range(len(names) + 1)))


def _common(labels: list[str]) -> str:
    """One label for a kernel that several calls launch: the plainest of each dtype."""
    plainest = {label.split()[0]: label for label in sorted(labels, key=len, reverse=True)}
    dtypes = " ".join(dict.fromkeys(label.split()[0] for label in labels))
    return dtypes + "".join(dict.fromkeys(label.removeprefix(dtype) for dtype, label in plainest.items()))


def _launched(
    plan: Plan, module: ModuleType, dtype: Dtype, present: tuple[str, ...], packed: bool
) -> list[CompileRequest]:
    layer = plan.form.recurrence.layer
    parameters = {k.name: k.parameters for k in plan.kernels}
    absent = frozenset(t.name for t in layer.inputs if t.optional) - set(present)
    tokens = 2 * plan.config.chunk
    sizes = _aligned(layer, tokens) | ({layer.batch: 1} if packed else {})
    keywords = draw(layer, Case(sizes, dtype, absent=absent)).keywords()
    if packed:
        keywords["cu_seqlens"] = torch.tensor([0, tokens])
    label = " ".join([dtype, *(f"with {name}" for name in present), *(["packed"] if packed else [])])
    requests: list[CompileRequest] = []

    def note(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        name = kernel._pyfunc.__name__
        signature = tuple(_argument(p, a) for p, a in zip(parameters[name], arguments, strict=True))
        options = kernel._compiler_options
        hints = tuple((h, int(v)) for h in HINTS if (v := getattr(options, h)) is not None)
        requests.append(CompileRequest(str(module.__file__), name, signature, arch="", hints=hints, label=label))

    runtime = importlib.import_module("._runtime", module.__package__)
    config = module.CONFIGS[DTYPES[dtype]]
    if hasattr(config, "segments"):  # a sequence this short would be one segment, and leave kernels out
        config = replace(config, segments=2)
    with runtime.launcher(note):
        module.forward(**keywords, config=config)
    return requests


def _aligned(layer: Layer, tokens: int) -> dict[str, int]:
    channels = {a.name: a.size or UNDECLARED_SIZE for a in layer.axes}
    return channels | {layer.batch: 2, layer.time: tokens, layer.head: 8} | {g.axis: 1 for g in layer.groups}


def _argument(parameter: Parameter, value: Any) -> Argument:
    if parameter.is_array:
        return array_arg(parameter.name, ELEMENTS[value.dtype], tuple(value.shape), value.stride())
    if parameter.role in ("constant", "flag"):
        return ConstantArg(parameter.name, value)
    return ScalarArg(parameter.name, "i32" if parameter.dtype == "i32" else "f32")
