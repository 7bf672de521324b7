"""The buffers between kernels as the host makes them: one line each, with what they hold in a comment."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from ssdgen.emit.layout import broken
from ssdgen.emit.printer import LOG2E
from ssdgen.ir.plan import Kernel, Plan, Reach, TokenKernel, Workspace
from ssdgen.plan.names import Names

PRIME = "'"
"""What marks the axes that are no axes of a spec."""

DTYPES = {"bf16": "torch.bfloat16", "f16": "torch.float16", "f32": "torch.float32"}


@dataclass(frozen=True, slots=True)
class Buffers:
    """Some host variables, the code that makes them, and what each is."""

    host: str
    code: str
    docs: tuple[str, ...]


def made(buffers: Buffers, depth: int) -> str:
    """The lines that make them, behind what they are."""
    indent = "    " * depth
    notes = [f"{indent}# {doc}" for doc in buffers.docs]
    return "\n".join([*notes, broken(f"{buffers.host} = ", buffers.code, indent)])


def workspaces(plan: Plan, names: Names, leader: str, kept: tuple[str, ...], given: str = "") -> list[Buffers]:
    """The workspaces in their order, on the device of `leader`; those that are alike, one behind another, in one allocation,
    but each by itself of those `kept` for gradients, which may be `given` by the host variable of that name."""
    alike = groupby(plan.workspaces, key=lambda w: (w.shape, w.dtype, w.name in kept))
    return [
        _kept(names, leader, shape, tuple(group), given)
        if keeps
        else _allocated(names, leader, shape, dtype, tuple(group))
        for (shape, dtype, keeps), group in alike
    ]


def scalars(kernels: Iterable[Kernel]) -> tuple[str, ...]:
    """The workspaces that hold the scalars of tokens, which a forward pass keeps for its gradients."""
    tokens = next((k for k in kernels if isinstance(k, TokenKernel)), None)
    return () if tokens is None else tuple(p.argument for p in tokens.parameters if p.role == "workspace")


def _allocated(names: Names, leader: str, shape: tuple[str, ...], dtype: str, group: tuple[Workspace, ...]) -> Buffers:
    stored = {"carried": "_rt.stored(config.carried)", "scores": "_rt.stored_scores(config.intra)"}
    sizes = shape if len(group) == 1 else (str(len(group)), *shape)
    code = f"_rt.empty(({', '.join(sizes)}), dtype={stored.get(dtype) or DTYPES[dtype]}, device={leader}.device)"
    variables, docs = _documented(names, group)
    return Buffers(", ".join(variables), code + (".unbind()" if len(group) > 1 else ""), docs)


def _kept(names: Names, leader: str, shape: tuple[str, ...], group: tuple[Workspace, ...], given: str) -> Buffers:
    variables, docs = _documented(names, group)
    code = f"_rt.several({len(group)}, ({', '.join(shape)}), {leader})"
    host = ", ".join(variables) if len(group) > 1 else f"({variables[0]},)"
    return Buffers(host, f"{given} or {code}" if given else code, docs)


def _documented(names: Names, group: tuple[Workspace, ...]) -> tuple[list[str], tuple[str, ...]]:
    variables = [names.of("workspace", w.name) for w in group]
    docs = [
        f"{name}[{' '.join(w.axes).replace(PRIME, '')}]: {w.doc.replace(repr(LOG2E), 'LOG2E')}"
        for name, w in zip(variables, group, strict=True)
    ]
    return variables, tuple(docs)


def reaches(plan: Plan, names: Names) -> list[Buffers]:
    """What `_reach.py` finds behind the kernel that stores running sums, decay by decay."""
    return [_reach(plan, names, r) for r in plan.reaches]


def _reach(plan: Plan, names: Names, reach: Reach) -> Buffers:
    layer = plan.form.recurrence.layer
    axes = (layer.batch, layer.head, layer.time)
    sums = names.of("workspace", reach.sums)
    if reach.axes != axes:
        sums += f".permute({', '.join(str(reach.axes.index(a)) for a in axes)})"
    oldest = names.of("workspace", reach.oldest)
    place = f"[segment {layer.batch} {layer.head}]"
    arguments = f"(stream, {sums}, cut, config.chunk, sequences is not None)"
    if not reach.newest:
        doc = f"{oldest}{place}: the oldest chunk of which anything is left at the end of each segment"
        return Buffers(oldest, f"_reach.oldest_chunks{arguments}", (doc,))
    newest = names.of("workspace", reach.newest)
    doc = f"{oldest}, {newest}{place}: the chunks that each segment remembers from and reaches to"
    return Buffers(f"{oldest}, {newest}", f"_reach.reaches{arguments}", (doc,))
