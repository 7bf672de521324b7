"""What kernels share in which a block has one batch entry, one head and one chunk at a time."""

from __future__ import annotations

from ssdgen.ir.chunkform import ChunkForm, ChunkState
from ssdgen.ir.expr import Apply, Axes, Expr, Ref, axes_of, mul
from ssdgen.ir.plan import CHUNKS, KEY, Config, Load, Parameter, Slot, Statement, When, Zeros
from ssdgen.plan.builder import KernelBuilder
from ssdgen.plan.lower import finite_on_padding, float32, inline, vanishes_on_padding, where


def tile_constant(axis: str) -> str:
    """The name of the constant that is the tile size of an axis."""
    return f"TILE_{axis.upper()}"


def channels_of(state: ChunkState) -> Axes:
    """The channel axes of a state: (row, column), or (column,) of a vector state."""
    return (state.column_axis,) if state.row_axis is None else (state.row_axis, state.column_axis)


def entry_axes(form: ChunkForm, state: ChunkState) -> Axes:
    """The axes of the stored entry states: batch, head, chunk, then the channels as (row, column)."""
    layer = form.recurrence.layer
    return (layer.batch, layer.head, CHUNKS, *channels_of(state))


def entry_dtype(state: ChunkState) -> str:
    """The dtype of stored entry states: `carried`, what that product rounds them to anyway; float32 for a vector state."""
    return "f32" if state.row_axis is None else "carried"


class WalkBuilder(KernelBuilder):
    """A KernelBuilder with the places of such a kernel; time is cut into chunks, `channels` into tiles."""

    def __init__(self, form: ChunkForm, config: Config, channels: Axes) -> None:
        layer = form.recurrence.layer
        place = {a: Slot(a, i, "1") for a, i in ((layer.batch, "batch"), (layer.head, "head"), (CHUNKS, "chunk"))}
        place |= {g.axis: Slot(g.axis, f"group_{g.axis}", "1") for g in layer.groups}
        place[layer.time] = Slot(layer.time, "chunk", "CHUNK")
        place |= {a: Slot(a, f"{a}_tile", tile_constant(a)) for a in channels}
        super().__init__(form, config, place, (layer.time, *channels))
        self._lets = {let.name: let.value for let in layer.lets}

    def column(self, section: list[Statement], column: Expr, axis: str) -> Expr:
        """The tile [L, N] of a column, zero past the end of time and of its axis: every product relies on that."""
        tile = self.operand(section, column, "column")
        if vanishes_on_padding(inline(column, self._lets), axis):
            return tile
        return self._masked(section, column, "column", tile, self._inside(axis))

    def row(self, section: list[Statement], row: Expr, axis: str, name: str = "row") -> Expr:
        """The tile [L, P] of a row, or [L, N] of a read vector: anything finite on padding, where columns are zero."""
        tile = self.operand(section, row, name)
        whole = {self.layer.time, axis} <= set(axes_of(tile))
        if whole and finite_on_padding(inline(row, self._lets)):
            return tile
        return self._masked(section, row, name, tile, self.before_end() if whole else self._inside(axis))

    def _masked(self, section: list[Statement], expr: Expr, name: str, tile: Expr, mask: Expr) -> Expr:
        """The tile, zero where `mask` is false, and with all axes of the mask."""
        key = f"masked {name} {expr}"
        if key not in self.known:
            self.known[key] = self.name_value(section, name, where(mask, widen(tile)), "zero on padding")
        return self.known[key]

    def _inside(self, axis: str) -> Expr:
        size = Ref(self.declare(Parameter(f"size_{axis}", "scalar", f"size_{axis}", dtype="f32")))
        return Apply("and", (self.before_end(), Apply("lt", (self.index(axis), size))))

    def before_end(self) -> Expr:
        """The mask of the tokens that there are."""
        time = self.layer.time
        position = Apply("add", (mul(Ref("chunk"), Ref("CHUNK")), Ref("token", (time,))))
        return Apply("lt", (position, Ref("length")))

    def causal(self, section: list[Statement], at: int, axes: Axes) -> Ref:
        """The mask of the tokens j that a token i reads: not those after it, nor itself if it reads the state before it."""
        key, time = f"causal {at}", self.layer.time
        if key not in self.known:
            mask = Apply("gt" if at == -1 else "ge", (Ref("token", (time,)), Ref("token", (KEY,))))
            self.known[key] = self.name_value(section, "causal_before" if at == -1 else "causal", mask, axes=axes)
        return self.known[key]

    def load_tile(self, array: str, target: Ref) -> Load:
        """Load this block's tile of an array in the order of the target's axes."""
        axes = self.parameters[array].axes
        ordered = (*(a for a in axes if a not in target.axes), *target.axes)
        order = () if ordered == axes else tuple(axes.index(a) for a in ordered)
        return Load(target, array, self.slots(array, ordered), order=order, whole=self.whole)

    def initial(self, state: ChunkState, target: Ref) -> When:
        """The state before the first token, in the order that it is carried in: zero unless the caller passes one."""
        name = f"{state.name}0"
        array = self.declare(Parameter(name, "initial", name, state.axes, "f32"))
        return When(self.presence(name), (self.load_tile(array, target),), (Zeros(target),))

    def position_lines(self, heads: str) -> list[str]:
        """The assignments a block begins with: groups, the number of tokens, positions in a chunk and along axes."""
        lines = []
        for group in self.layer.groups:
            users = [p for p in self.parameters.values() if p.role == "input" and group.axis in p.axes]
            if users:
                count = f"{users[0].name}.shape[{users[0].axes.index(group.axis)}]"
                lines.append(f"group_{group.axis} = head // ({heads} // {count})")
        token = ["token = ct.arange(CHUNK, dtype=ct.int32)"] if "token" in self.used else []
        return [*lines, *token, *self.position]


def widen(tile: Expr) -> Expr:
    """A tile as an operand of arithmetic: a bare tile is widened to float32."""
    return float32(tile) if isinstance(tile, Ref) else tile
