"""Adjoint -> GradientPlan: the kernels of the gradients in launch order, and what goes through memory between them.

chunk_cumsum     the forward pass's, once more
entry_states     a walk: the state that enters each chunk
read_gradients   only where outputs are no linear function of what they read: what that is, and its gradient
state_gradients  a walk back: the gradient of the state that arrives at the end of each chunk
chunk_gradients  every chunk by itself: gradients of rows, columns, and of per-token scalars
token_gradients  from those of per-token scalars to those of what they are made of
"""

from __future__ import annotations

from dataclasses import replace

from ssdgen.ir.adjoint import Adjoint, Gradient
from ssdgen.ir.gradients import GradientPlan, Result
from ssdgen.ir.plan import CHUNKS, Config, Kernel, Knob, Plan, StepPlan, Workspace
from ssdgen.ir.schedule import PRODUCTS
from ssdgen.plan.builder import Unsupported
from ssdgen.plan.chunks import chunks_form
from ssdgen.plan.config import DTYPES, default_config, knobs
from ssdgen.plan.gradients.chunk import NAME as CHUNK
from ssdgen.plan.gradients.chunk import (
    chunk_kernel,
    flat_gradients,
    flat_name,
    met_axes,
    met_name,
    sum_name,
    written_name,
)
from ssdgen.plan.gradients.reads import NAME as READS
from ssdgen.plan.gradients.reads import read_kernel, read_workspaces
from ssdgen.plan.gradients.sort import check_form, sort, to_name
from ssdgen.plan.gradients.tokens import NAME as TOKENS
from ssdgen.plan.gradients.tokens import token_gradient_kernel
from ssdgen.plan.gradients.units import unit_of
from ssdgen.plan.gradients.walks import BACK, ENTRY, kernels, walk_workspaces
from ssdgen.plan.names import DECAYS
from ssdgen.plan.portable import portable
from ssdgen.plan.reach import reaches
from ssdgen.plan.tokens import token_kernel, workspaces

CHUNK_TOKENS = 64
"""Tokens of a chunk: with 128 the tiles of the chunk kernel do not fit."""

LATENCY, EARLY, LATE = 3, 5, 1
"""Latency hints: of states and of all that walks load; in the chunk kernel of what every head has, and of what a group has.
Found by a sweep of fifteen settings on an H200: 318 us instead of 335 for the chunk kernel at 4,16384,8,1,64,128."""

HINTS: dict[str, tuple[int, int]] = {ENTRY: (2, 0), BACK: (2, 0), CHUNK: (1, 8), TOKENS: (4, 0), READS: (2, 0)}
"""Blocks a multiprocessor and worker warps of a block, by role; 0 leaves it to the compiler."""


def gradient_plan(adjoint: Adjoint, config: Config | None = None) -> GradientPlan:
    """The plan of the gradients of a form whose own kernels are at the point `config`; `refused` says why there is none."""
    form = adjoint.form
    config = config or default_config(form)
    layer = form.recurrence.layer
    leader = layer.outputs[0].like or layer.inputs[0].name
    rows, columns, states = _loaded(adjoint)
    walked = tuple((name, LATENCY) for name in (*rows, *columns, *states))
    hints = tuple((n, v) for names, v in ((rows, EARLY), (columns, LATE), (states, LATENCY)) for n in names)
    config = replace(
        config, plan="segmented", swap=("state",), chunk=CHUNK_TOKENS, segments=0, latency=hints, state_latency=walked
    )
    empty = Plan(form, config, (), (), (), portable(form, config), chunks_form(form, config), StepPlan(), leader)
    try:
        check_form(adjoint)
        gradients = sort(adjoint)
        chunk, results = chunk_kernel(adjoint, config, gradients)
        tokens, more = token_gradient_kernel(adjoint, config, gradients)
        first = token_kernel(form, config)
        forward, back = kernels(adjoint, config)
        reads = read_kernel(adjoint, config)
    except Unsupported as reason:
        return GradientPlan(adjoint, empty, (), (), str(reason))
    scalars = None if first is None else replace(first, condition=f"{DECAYS} is None")
    optional = [scalars, *forward, reads, *back, chunk, tokens]
    every: tuple[Kernel, ...] = tuple(k for k in optional if k is not None)
    buffers = (
        *workspaces(form, config),
        *walk_workspaces(adjoint, config),
        *read_workspaces(adjoint),
        *_scalars(adjoint, flat_gradients(adjoint, gradients)),
    )
    nothing = tuple(Result(name, "", ()) for name in gradients.nothing)
    found = {r.of: r for r in (*results, *more, *nothing)}
    plan = replace(
        empty, workspaces=buffers, knobs=_knobs(adjoint, config, every), reaches=reaches(form, config, back=True)
    )
    return GradientPlan(adjoint, plan, every, tuple(found[t.name] for t in layer.inputs))


def _loaded(adjoint: Adjoint) -> tuple[list[str], list[str], list[str]]:
    """What a chunk is loaded with along a channel axis: inputs along rows with the gradients of outputs, inputs along columns,
    and states."""
    layer, states = adjoint.form.recurrence.layer, adjoint.form.states
    tokens = [t for t in layer.inputs if layer.time in t.axes and not t.optional]
    rows = [t.name for t in tokens if any(s.row_axis in t.axes for s in states)]
    columns = [t.name for t in tokens if any(s.column_axis in t.axes for s in states)]
    return [*rows, *(o.name for o in adjoint.outputs)], columns, [s.name for s in layer.states]


def _scalars(adjoint: Adjoint, flats: tuple[Gradient, ...]) -> tuple[Workspace, ...]:
    """The buffers of the gradients of per-token scalars."""
    layer = adjoint.form.recurrence.layer
    axes = (layer.batch, layer.head, layer.time)
    shape = ("cut.lanes", f"size_{layer.head}", "cut.slots * config.chunk")
    of = {w.name: f"the gradient of the weight {w.weight}" for w in adjoint.weights}
    of |= {sum_name(d): f"the gradient of the running sum of {d.decay}, by reads" for d in adjoint.decays}
    of |= {
        written_name(d): f"what the end of a chunk asks {d.decay} for, by each token's input" for d in adjoint.decays
    }
    of |= {
        flat_name(g): f"what each token adds to the gradient of {to_name(g)}, if that is one number a head"
        for g in flats
    }
    out = [Workspace(name, axes, shape, "f32", doc) for name, doc in of.items()]
    lengths = {layer.batch: "cut.lanes", CHUNKS: "cut.slots"}
    for state in (adjoint.form.state(name) for d in adjoint.decays for name in d.states):
        met = met_axes(adjoint.form, state)
        doc = f"what {state.name} passes through each chunk, times what arrives there"
        out.append(Workspace(met_name(state), met, tuple(lengths.get(a, f"size_{a}") for a in met), "f32", doc))
    return tuple(out)


def _knobs(adjoint: Adjoint, config: Config, kernels: tuple[Kernel, ...]) -> tuple[Knob, ...]:
    """The fields of the emitted Config: those of a forward pass that some kernel takes, and hints for each kernel."""
    constants = {p.argument for k in kernels for p in k.parameters if p.role == "constant"}
    products = tuple(p for p in PRODUCTS if p in constants)
    out = [k for k in knobs(config, products, {}) if k.kind == "precision" or k.name == "chunk" or k.name in constants]
    doc = "pieces of a sequence that are walked at once, 0 to let the size of the GPU choose"
    out.append(Knob("segments", doc, tuple((d, 0) for d in DTYPES)))
    if unit_of(adjoint.form) is not None:
        doc = "blocks that share the heads of a group, 0 to let the size of the GPU choose"
        out.append(Knob("shares", doc, tuple((d, 0) for d in DTYPES)))
    roles: dict[str, list[str]] = {}
    for kernel in kernels:
        roles.setdefault(kernel.role, []).append(kernel.name)
    docs = (
        "blocks of {} a multiprocessor, 0 to let the compiler choose",
        "worker warps of a block of {}, 0 to let the compiler choose",
    )
    for at, (hint, doc) in enumerate(zip(("occupancy", "warps"), docs, strict=True)):
        for role, names in roles.items():
            value = HINTS.get(role, (0, 0))[at]
            out.append(Knob(f"{hint}_{role}", doc.format(names[0]), tuple((d, value) for d in DTYPES), "hint"))
    return tuple(out)
