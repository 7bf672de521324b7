"""The plans: which kernels compute a form, in launch order, and what goes through memory between them.

three_kernel   the published decomposition: every chunk's entry state goes through memory
segmented      one state a segment of many chunks does; for long sequences of few heads
single_walk    nothing but inputs and outputs does; where batch and heads alone fill the GPU
"""

from __future__ import annotations

from itertools import chain, combinations

from ssdgen.ir.chunkform import ChunkForm
from ssdgen.ir.plan import AnyKernel, Config, Knob, Plan, Workspace
from ssdgen.ir.schedule import PRODUCTS
from ssdgen.plan.builder import Unsupported
from ssdgen.plan.config import DTYPES, default_config, knobs
from ssdgen.plan.outputs import output_kernel
from ssdgen.plan.portable import portable
from ssdgen.plan.segments import segment_kernel, segment_workspaces, walk_kernel
from ssdgen.plan.states import entry_workspace, state_kernel
from ssdgen.plan.tokens import token_kernel, workspaces

Present = tuple[str, ...]
SEGMENTS_KNOB = Knob(
    "segments",
    "pieces of a sequence that are walked at once, 0 to let the size of the GPU choose",
    tuple((d, 0) for d in DTYPES),
)


def plan(form: ChunkForm, config: Config | None = None) -> Plan:
    """The plan of `form` at a point of its schedule, by default the first alternative of every knob.

    Guarantees a portable path; `refused` says why there are no kernels if there are none.
    """
    config = config or default_config(form)
    layer = form.recurrence.layer
    leader = layer.outputs[0].like or layer.inputs[0].name
    common: tuple[AnyKernel, ...] = ()
    outputs: dict[Present, AnyKernel] = {}
    buffers: tuple[Workspace, ...] = ()
    refused = ""
    try:
        common = _common(form, config)
        outputs = {present: _output(form, config, present) for present in _optional(form)}
        buffers = _workspaces(form, config)
    except Unsupported as reason:
        common, outputs, refused = (), {}, str(reason)
    kernels = (*common, *outputs.values())
    shared = tuple(k.name for k in common)
    variants = tuple((present, (*shared, k.name)) for present, k in outputs.items())
    fields = _fields(config, kernels)
    return Plan(form, config, kernels, variants, buffers, fields, portable(form, config), leader, refused)


def _common(form: ChunkForm, config: Config) -> tuple[AnyKernel, ...]:
    """The kernels before the one that computes the outputs."""
    tokens = token_kernel(form, config)
    first: tuple[AnyKernel, ...] = () if tokens is None else (tokens,)
    match config.plan:
        case "three_kernel":
            return (*first, *(state_kernel(form, config, s) for s in form.states))
        case "segmented":
            return (*first, *(segment_kernel(form, config, s) for s in form.states))
        case "single_walk":
            return first


def _output(form: ChunkForm, config: Config, present: Present) -> AnyKernel:
    """The kernel that computes the outputs when the optional inputs `present` are passed."""
    if config.plan == "three_kernel":
        return output_kernel(form, config, present)
    return walk_kernel(form, config, present, segmented=config.plan == "segmented")


def _workspaces(form: ChunkForm, config: Config) -> tuple[Workspace, ...]:
    match config.plan:
        case "three_kernel":
            return (*workspaces(form, config), *(entry_workspace(form, s) for s in form.states))
        case "segmented":
            return (*workspaces(form, config), *segment_workspaces(form, config))
        case "single_walk":
            return workspaces(form, config)


def _optional(form: ChunkForm) -> list[Present]:
    """Every set of optional inputs, the empty one first."""
    names = [t.name for t in form.recurrence.layer.inputs if t.optional]
    return list(chain.from_iterable(combinations(names, n) for n in range(len(names) + 1)))


def _fields(config: Config, kernels: tuple[AnyKernel, ...]) -> tuple[Knob, ...]:
    """The fields of the emitted Config: the chunk, and the knobs that some kernel takes."""
    constants = {p.argument for k in kernels for p in k.parameters if p.role == "constant"}
    products = tuple(p for p in PRODUCTS if p in constants)
    roles = tuple(dict.fromkeys(k.role for k in kernels))
    every = knobs(config, products, roles)
    fields = [k for k in every if k.kind != "int" or k.name == "chunk" or k.name in constants]
    return (*fields, *([SEGMENTS_KNOB] if kernels and config.plan == "segmented" else []))
