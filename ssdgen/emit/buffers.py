"""The buffers between kernels as the host makes them: one line each, with what they hold in a comment."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from ssdgen.emit.layout import broken
from ssdgen.emit.printer import LOG2E
from ssdgen.ir.plan import Plan, Reach, Workspace
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


def workspaces(plan: Plan, names: Names, leader: str, given: str = "") -> list[Buffers]:
    """The workspaces in their order, on the device of `leader`; those that are alike, one behind another, in one allocation,
    but those kept for gradients each in its own, unless the host variable `given` has them already."""
    alike = groupby(plan.workspaces, key=lambda w: (w.shape, w.dtype, w.kept))
    return [_allocated(names, leader, tuple(group), given) for _, group in alike]


def _allocated(names: Names, leader: str, group: tuple[Workspace, ...], given: str) -> Buffers:
    stored = {"carried": "_rt.stored(config.carried)", "scores": "_rt.stored_scores(config.intra)"}
    variables = [names.of("workspace", w.name) for w in group]
    shape, dtype, several = group[0].shape, group[0].dtype, len(group) > 1
    docs = [
        f"{name}[{' '.join(w.axes).replace(PRIME, '')}]: {w.doc.replace(repr(LOG2E), 'LOG2E')}"
        for name, w in zip(variables, group, strict=True)
    ]
    if group[0].kept:
        code = f"_rt.several({len(group)}, ({', '.join(shape)}), {leader})"
        host = ", ".join(variables) if several else f"({variables[0]},)"
        return Buffers(host, f"{given} or {code}" if given else code, tuple(docs))
    sizes = (str(len(group)), *shape) if several else shape
    code = f"_rt.empty(({', '.join(sizes)}), dtype={stored.get(dtype) or DTYPES[dtype]}, device={leader}.device)"
    return Buffers(", ".join(variables), code + (".unbind()" if several else ""), tuple(docs))


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
