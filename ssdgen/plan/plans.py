"""The plans: which kernels compute a form, in launch order, and what goes through memory between them.

three_kernel   the published decomposition: every chunk's entry state goes through memory
segmented      one state a segment of many chunks does; for long sequences of few heads
single_walk    nothing but inputs and outputs does; where batch and heads alone fill the GPU
"""

from __future__ import annotations

from ssdgen.ir.adjoint import Adjoint
from ssdgen.ir.chunkform import ChunkForm
from ssdgen.ir.plan import AnyKernel, Config, GroupKernel, Knob, Plan, Workspace
from ssdgen.ir.schedule import PERSISTENT, PRODUCTS
from ssdgen.plan.builder import Unsupported
from ssdgen.plan.chunks import chunks_form
from ssdgen.plan.config import default_config, knobs
from ssdgen.plan.gradients import gradient_plan
from ssdgen.plan.outputs import output_kernel
from ssdgen.plan.portable import portable
from ssdgen.plan.reach import reaches
from ssdgen.plan.segments import segment_kernel, segment_workspaces, walk_kernel
from ssdgen.plan.shared import FIELD, group_kernel, group_workspaces, shared_scores
from ssdgen.plan.states import entry_workspace, state_kernel
from ssdgen.plan.step import step_plan
from ssdgen.plan.tokens import token_kernel, workspaces

SEGMENTS = "segments"
ONE_WAVE = f"the grids of other plans than {PERSISTENT} are one wave by construction"


def plan(form: ChunkForm, config: Config | None = None, adjoint: Adjoint | None = None) -> Plan:
    """The plan of `form` at a point of its schedule, by default the first alternative of every knob; with `adjoint`, that of
    the form, its gradients are planned too.

    Guarantees a portable path; `refused` says why there are no kernels if there are none.
    """
    config = config or default_config(form)
    layer = form.recurrence.layer
    leader = layer.outputs[0].like or layer.inputs[0].name
    kernels: tuple[AnyKernel, ...] = ()
    buffers: tuple[Workspace, ...] = ()
    refused = ""
    try:
        kernels, buffers = _kernels(form, config), _workspaces(form, config)
    except Unsupported as reason:
        refused = str(reason)
    step = step_plan(form, config, bool(kernels))
    gradients = None if adjoint is None or refused else gradient_plan(adjoint, config)
    fields = _fields(config, kernels)
    portables = portable(form, config), chunks_form(form, config)
    found = reaches(form, config) if kernels and config.plan == "segmented" else ()
    return Plan(form, config, kernels, buffers, fields, *portables, step, leader, found, refused, gradients)


def _kernels(form: ChunkForm, config: Config) -> tuple[AnyKernel, ...]:
    if config.persistent and config.plan != PERSISTENT:
        raise Unsupported(f"{config.plan} with a persistent kernel: {ONE_WAVE}")
    tokens = token_kernel(form, config)
    first: tuple[AnyKernel, ...] = () if tokens is None else (tokens,)
    shared = tuple(group_kernel(form, config, s) for s in shared_scores(form))
    match config.plan:
        case "three_kernel":
            return (*first, *(state_kernel(form, config, s) for s in form.states), output_kernel(form, config))
        case "segmented":
            states = tuple(segment_kernel(form, config, s) for s in form.states)
            return (*first, *states, *shared, walk_kernel(form, config, segmented=True))
        case "single_walk":
            return (*first, *shared, walk_kernel(form, config, segmented=False))


def _workspaces(form: ChunkForm, config: Config) -> tuple[Workspace, ...]:
    scalars, shared = workspaces(form, config), tuple(w for s in shared_scores(form) for w in group_workspaces(form, s))
    match config.plan:
        case "three_kernel":
            return (*scalars, *(entry_workspace(form, s) for s in form.states))
        case "segmented":
            return (*scalars, *shared, *segment_workspaces(form, config))
        case "single_walk":
            return (*scalars, *shared)


def _fields(config: Config, kernels: tuple[AnyKernel, ...]) -> tuple[Knob, ...]:
    """The fields of the emitted Config: the chunk, and the knobs that some kernel takes."""
    constants = {p.argument for k in kernels for p in k.parameters if p.role == "constant"}
    constants |= {FIELD for k in kernels if isinstance(k, GroupKernel)}
    constants |= {SEGMENTS} if kernels and config.plan == "segmented" else set()
    products = tuple(p for p in PRODUCTS if p in constants)
    roles: dict[str, list[str]] = {}
    for kernel in kernels:
        roles.setdefault(kernel.role, []).append(kernel.name)
    every = knobs(
        config, products, {role: ", ".join(names[:1] + ["..."] * (len(names) > 1)) for role, names in roles.items()}
    )
    return tuple(k for k in every if k.kind != "int" or k.name == "chunk" or k.name in constants)
