"""The published decomposition, `chunk_cumsum`, `fwd_pass_state`, `compute_out`: all entry states go through memory."""

from __future__ import annotations

from itertools import chain, combinations

from ssdgen.ir.chunkform import ChunkForm
from ssdgen.ir.plan import Config, OutputKernel, Plan, StateKernel, TokenKernel
from ssdgen.ir.schedule import PRODUCTS
from ssdgen.plan.builder import Unsupported
from ssdgen.plan.config import default_config, knobs
from ssdgen.plan.outputs import output_kernel
from ssdgen.plan.portable import portable
from ssdgen.plan.states import entry_workspace, state_kernel
from ssdgen.plan.tokens import token_kernel, workspaces

Kernels = tuple[TokenKernel | StateKernel | OutputKernel, ...]


def plan(form: ChunkForm, config: Config | None = None) -> Plan:
    """The plan of `form` at a point of its schedule, by default the first alternative of every knob.

    Guarantees a portable path; `refused` says why there are no kernels if there are none.
    """
    config = config or default_config(form)
    layer = form.recurrence.layer
    leader = layer.outputs[0].like or layer.inputs[0].name
    try:
        kernels, variants = _kernels(form, config)
        refused = ""
        buffers = (*workspaces(form, config), *(entry_workspace(form, s) for s in form.states))
    except Unsupported as reason:
        kernels, variants, buffers, refused = (), (), (), str(reason)
    constants = {p.argument for k in kernels for p in k.parameters if p.role == "constant"}
    products = tuple(p for p in PRODUCTS if p in constants)
    roles = tuple(dict.fromkeys(k.role for k in kernels))
    fields = tuple(
        k for k in knobs(config, products, roles) if k.kind != "int" or k.name == "chunk" or k.name in constants
    )
    return Plan(form, config, kernels, variants, buffers, fields, portable(form, config), leader, refused)


def _kernels(form: ChunkForm, config: Config) -> tuple[Kernels, tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]]:
    """All kernels, and for each set of optional inputs the names of those that are launched."""
    tokens = token_kernel(form, config)
    common: list[TokenKernel | StateKernel | OutputKernel] = [] if tokens is None else [tokens]
    common += [state_kernel(form, config, s) for s in form.states]
    optional = [t.name for t in form.recurrence.layer.inputs if t.optional]
    present = list(chain.from_iterable(combinations(optional, n) for n in range(len(optional) + 1)))
    outputs = [output_kernel(form, config, p) for p in present]
    shared = tuple(k.name for k in common)
    variants = tuple((p, (*shared, k.name)) for p, k in zip(present, outputs, strict=True))
    return (*common, *outputs), variants
