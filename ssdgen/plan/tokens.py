"""The kernel `chunk_cumsum`: per-token scalars, computed once and stored for the kernels that follow."""

from __future__ import annotations

from ssdgen.ir.chunkform import ChunkForm
from ssdgen.ir.expr import Apply, Ref, axes_of
from ssdgen.ir.plan import Config, Cumsum, Let, Parameter, Slot, Statement, Store, TokenKernel, Workspace
from ssdgen.plan.builder import KernelBuilder, Unsupported
from ssdgen.plan.decays import scalar_axes, scalar_name, scalar_source, stored_weight
from ssdgen.plan.lower import clamp_log2, where
from ssdgen.plan.place import CHUNK_TABLE, chunk_position, declare_packed

ROLE = "chunk_cumsum"


def stored_scalars(form: ChunkForm) -> tuple[str, ...]:
    """The names of the per-token scalars that go through memory, in the order they are stored."""
    layer = form.recurrence.layer
    names = [scalar_name(w) for w in form.weights if stored_weight(layer, w)]
    for decay in form.decays:
        if decay.kind == "token":
            names.append(f"{decay.name}_sum")
            if _read_before(form, decay.name):
                names.append(f"{decay.name}_before")
    return tuple(names)


def _read_before(form: ChunkForm, decay: str) -> bool:
    return any(r.decay == decay and r.at == -1 for r in form.reads)


def token_kernel(form: ChunkForm, config: Config) -> TokenKernel | None:
    """The kernel that stores `stored_scalars(form)`; None if there are none."""
    if not stored_scalars(form):
        return None
    layer = form.recurrence.layer
    batch, time, head = layer.batch, layer.time, layer.head
    place = {
        batch: Slot(batch, "batch", "1"),
        time: Slot(time, "chunk", "CHUNK"),
        head: Slot(head, "head_tile", f"TILE_{head.upper()}"),
    }
    builder = _TokenBuilder(form, config, place, (time, head))
    declare_packed(builder, CHUNK_TABLE)
    body: list[Statement] = []
    valid = Ref("valid", (time,))
    stores: list[tuple[str, Ref]] = []
    for weight in form.weights:
        if stored_weight(layer, weight):
            _check_axes(weight.name, axes_of(weight.value), batch, head)
            value = where(valid, builder.tile(body, weight.value))
            target = builder.name_value(body, f"{weight.name}_valid", value, axes=(time, head))
            stores.append((scalar_name(weight), target))
    for decay in form.decays:
        if decay.kind == "token":
            _check_axes(decay.name, axes_of(decay.log2), batch, head)
            value = where(valid, clamp_log2(builder.tile(body, decay.log2)))
            one = builder.name_value(body, f"{decay.name}_log2", value, "of one token", axes=(time, head))
            through = Ref(builder.names.of("value", f"{decay.name}_sum_tile"), (time, head))
            body.append(Cumsum(through, one))
            stores.append((f"{decay.name}_sum", through))
            if _read_before(form, decay.name):
                name = f"{decay.name}_before"
                before = builder.name_value(body, f"{name}_tile", Apply("sub", (through, one)), axes=(time, head))
                stores.append((name, before))
    for name, value in stores:
        axes = scalar_axes(form, config, name)
        parameter = builder.declare(Parameter(name, "workspace", name, axes, "f32"))
        body.append(Store(parameter, builder.slots(parameter), value, builder.tile_axes(axes)))
    body.insert(0, Let(valid, Apply("lt", (Ref("token", (time,)), Ref("length"))), None, "false past the end"))
    builder.constant("chunk")
    builder.constant(f"tile_{head}")
    builder.finish(body)
    position = [
        *chunk_position(builder),
        "head_tile = ct.bid(1)",
        "token = chunk * CHUNK + ct.arange(CHUNK, dtype=ct.int32)",
        *builder.position,
    ]
    return TokenKernel(
        name=ROLE,
        role=ROLE,
        doc="Per-token scalars of one chunk for a tile of heads, in float32; past the end of the sequence nothing decays"
        " and every weight is 0.",
        parameters=builder.ordered_parameters(),
        grid=("cut.lanes * cut.slots", f"_rt.ceil_div(size_{head}, config.tile_{head})"),
        position=tuple(position),
        occupancy=f"occupancy_{ROLE}",
        body=tuple(body),
    )


class _TokenBuilder(KernelBuilder):
    """Tensors shared by the heads of a group are passed one value a head: the host expands them."""

    def input(self, section: list[Statement], name: str) -> Ref:
        tensor = self.layer.tensor(name)
        grouped = [a for a in self.array_axes(tensor) if self.layer.shared(a) != a]
        if not grouped:
            return super().input(section, name)
        axes = tuple(self.layer.shared(a) for a in self.array_axes(tensor))
        at = self.array_axes(tensor).index(grouped[0])
        parameter = self.declare(Parameter(name, "input", name, axes, f"like {name}", at))
        return self.load(section, parameter, self.latency(name))


def _check_axes(name: str, axes: tuple[str, ...], batch: str, head: str) -> None:
    other = [a for a in axes if a not in (batch, head)]
    if other:
        raise Unsupported(f"`{name}` varies along `{other[0]}`")


def workspaces(form: ChunkForm, config: Config) -> tuple[Workspace, ...]:
    """The buffers of `stored_scalars`, padded to whole chunks; gradients begin with them too."""
    layer = form.recurrence.layer
    shape = {layer.batch: "cut.lanes", layer.head: f"size_{layer.head}", layer.time: "cut.slots * config.chunk"}
    out = []
    for name in stored_scalars(form):
        axes = scalar_axes(form, config, name)
        out.append(Workspace(name, axes, tuple(shape[a] for a in axes), "f32", _doc(form, name), kept=True))
    return tuple(out)


def _doc(form: ChunkForm, name: str) -> str:
    source = scalar_source(form, name)
    if name.endswith("_sum"):
        return f"running sum of {source} within a chunk"
    return f"sum of {source} before each token of a chunk" if name.endswith("_before") else f"weight {source}"
