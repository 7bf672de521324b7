"""Our modules at points of their schedule, emitted into folders that stay: the compiler's cache knows kernels by their path."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ssdgen.build.store import folder_in_cache
from ssdgen.emit import ModuleSource, emit
from ssdgen.emit.support._segments import segments
from ssdgen.ir.chunkform import ChunkForm
from ssdgen.ir.plan import Config
from ssdgen.plan import plan
from ssdgen.plan.roofline import Roofline, roofline
from ssdgen.plan.settings import configure
from ssdgen.run.bench.rows import DEFAULT
from ssdgen.run.bench.shapes import Shape
from ssdgen.run.gpu_peers import Call
from ssdgen.run.inputs import Inputs
from ssdgen.run.load import kept, load_file

PLANS: Mapping[str, Mapping[str, str]] = {
    DEFAULT: {},
    "three_kernel": {
        **{"plan": "three_kernel", "swap": "carried,intra", "intra": "tf32", "state_tile_n": "64"},
        **{"latency_x": "5", "latency_B": "5", "latency_C": "4", "state_latency_x": "5", "state_latency_B": "5"},
    },
    "segmented": {"plan": "segmented"},
    "single_walk": {"plan": "single_walk"},
}
"""What of ours is measured: names, and the knobs that differ from the spec's defaults. `default` is what a user gets;
`three_kernel` is the published plan with the knobs that a sweep on an H200 found best for it."""


def write_module(form: ChunkForm, config: Config) -> Path:
    """The folder of a package with the module of `form` at `config`, written unless it is there."""
    planned = plan(form, config)
    return kept(folder_in_cache("bench"), emit(planned, portable_only=bool(planned.refused))).parent


def differentiable_module(source: ModuleSource) -> ModuleType:
    """A module with that of its gradients beside it."""
    return load_file(kept(folder_in_cache("bench"), source))


def load_module(folder: Path, name: str) -> ModuleType:
    """The module `name` of a package that `write_module` wrote."""
    return load_file(folder / f"{name}.py")


def runtime_of(module: ModuleType) -> Any:
    """The host-side helpers that a module launches through."""
    return importlib.import_module("._runtime", module.__package__)


def call_of(module: ModuleType, *, tuned: bool) -> Call:
    """The module's `forward`; with `tuned` the configuration that it chooses itself, else exactly what it was emitted with."""
    if tuned:
        return lambda inputs: module.forward(**inputs.keywords())
    config = module.CONFIGS[torch.bfloat16]
    return lambda inputs: module.forward(**inputs.keywords(), config=config)


def floor_of(form: ChunkForm, module: ModuleType, call: Call, shape: Shape, inputs: Inputs) -> Roofline:
    """The roofline of a module of `form` at a shape, with the configuration that a call of it runs with."""
    planned = plan(form, configure(form, dict(word.split("=", 1) for word in module.VARIANT.split())))
    cut: Any = importlib.import_module("._cut", module.__package__)
    return roofline(
        planned,
        shape.sizes,
        segments,
        knobs=vars(config_of(module, call, inputs)),
        multiprocessors=cut.multiprocessors(inputs.tensors[planned.leader]),
    )


def config_of(module: ModuleType, call: Call, inputs: Inputs) -> Any:
    """The configuration that a call runs with: that of the call, or what the module chooses for its shape. Nothing is
    launched."""
    tuned: Any = importlib.import_module("._tuned", module.__package__)
    found: list[Any] = []
    chosen = tuned.chosen

    def noting(*arguments: Any, **keywords: Any) -> Any:
        found.append(chosen(*arguments, **keywords))
        return found[-1]

    tuned.chosen = noting
    try:
        with runtime_of(module).launcher(lambda kernel, grid, arguments: None):
            call(inputs)
    finally:
        tuned.chosen = chosen
    return found[0]


def portable_float64(module: ModuleType, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """The module's portable form in float64, where the inputs are; verification holds it to a loop over tokens."""
    runtime = runtime_of(module)
    wide = Inputs(
        {k: v.double() for k, v in inputs.tensors.items()},
        inputs.params,
        {k: v.double() for k, v in inputs.states.items()},
        inputs.arguments,
    )
    config = replace(module.CONFIGS[torch.float32], chunk=256)  # fewer, larger steps
    with runtime.portable():
        values: tuple[torch.Tensor, ...] = module.forward(**wide.keywords(), config=config)
    return values
