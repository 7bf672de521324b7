"""A Plan: the kernels that compute a chunk form, as lists of loads, lets, products and stores over named-axis tiles.

Values inside a kernel are expressions over *tiles*: a Ref whose `axes` are those of the tile in the order it lies in
registers. An axis is the layer's, or `KEY`, the time axis of the tokens that are looked back at. How a tile is transposed
or broadcast is therefore never written here: the printer works it out from the axes asked for.

A kernel's parameters are declared once, in `Parameter`; its signature, its launch, its ahead-of-time signature and the
table in the module's docstring are printed from that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ssdgen.ir.chunkform import ChunkForm
from ssdgen.ir.expr import Axes, Expr, Ref
from ssdgen.ir.schedule import PlanName, Product, Side

if TYPE_CHECKING:
    from ssdgen.ir.gradients import GradientPlan
    from ssdgen.ir.portable import ChunksForm, Portable, PortableStep

KEY = "t'"
"""The time axis of the tokens that are looked back at: scores have axes (time, KEY)."""

CHUNKS = "chunk'"
"""The axis of the chunks of a sequence, along which entry states are stored; no name of a spec has a prime."""

SHARES = "share'"
"""The axis of the blocks that the heads of a group are shared out to, along which their parts of a gradient are stored."""

SEGMENTS = "segment'"
"""The axis of the segments that a sequence is cut into, along which their end states are stored."""

BLOCKS = "block'"
"""The axis of the blocks of tokens at whose ends a caller wants the states."""

NUMBERS = "number'"
"""The axis of the numbers that are stored for each token, one behind the other, to be loaded together."""

TILE_OPS: dict[str, int] = {"float32": 1, "where": 3, "ge": 2, "gt": 2, "lt": 2, "eq": 2, "and": 2, "floordiv": 2}
"""Operations that occur in plans only, beside those of `ssdgen.ir.expr.OPS`."""

Role = Literal[
    "input", "initial", "arriving", "workspace", "table", "output", "gradient", "final", "prefixes", "state", "kept", "slots",
    "scalar", "constant", "uniform", "flag",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a kernel.

    Arrays (input, initial state, workspace, table of packed sequences, output, final state, `prefixes`: states at the ends of
    blocks of tokens; of steps the `state` that is updated in place, what it is before each token, `kept`, and the `slots` of
    a pool; of gradients those `arriving` at outputs, and the `gradient` of an input) have `axes`, in the order of the array's
    dimensions, and a `dtype`: a fixed one, or `like NAME` for that of an input. `scalar` is a number passed at run time (f32
    or i32), `constant` an int and `flag` a bool that specialise the kernel, and so does `uniform`: whether an input is passed
    that is the same all along `axes`. `argument` is the layer's name for what the host passes, a workspace, a config field,
    or what a flag asks for; with `per_head` that tensor is passed with its group axis, at this dimension, repeated to one
    entry a head. An array that only code under a flag reads may be a stand-in when the flag is not set.
    """

    name: str
    role: Role
    argument: str
    axes: Axes = ()
    dtype: str = ""
    per_head: int | None = None

    @property
    def is_array(self) -> bool:
        """Whether it is passed as an array."""
        return self.role not in ("scalar", "constant", "uniform", "flag")


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a tile stands along one dimension of an array: its index in tiles, and its extent; extent 1 is dropped."""

    axis: str
    index: str
    extent: str


@dataclass(frozen=True, slots=True)
class Load:
    """target = the tile of `array` at `slots`, zero outside the array; `cast` widens it to float32 at once.

    `order` are the array's dimensions in the order of `slots`, where that is not their own. `whole` is the flag that says
    that no tile of a kernel sticks out of its array, if the kernel has that: it then moves tiles without TMA. `uniform` has
    for each of `slots` the flag that says whether the array is the same all along it, so that one element is enough, or "".
    """

    target: Ref
    array: str
    slots: tuple[Slot, ...]
    latency: str | None = None
    cast: bool = False
    order: tuple[int, ...] = ()
    whole: str = ""
    uniform: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Zeros:
    """target = 0, float32."""

    target: Ref


@dataclass(frozen=True, slots=True)
class Let:
    """target = value. `line` is the line of the spec it comes from, `note` what it is, for the reader."""

    target: Ref
    value: Expr
    line: int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Cumsum:
    """target = inclusive running sum of `value` over the time axis, from its end with `back`."""

    target: Ref
    value: Expr
    back: bool = False


@dataclass(frozen=True, slots=True)
class Last:
    """target = the last element of a tile [L] along time, as a number."""

    target: Ref
    value: Ref


@dataclass(frozen=True, slots=True)
class Rows:
    """targets = the two rows of a tile."""

    targets: tuple[Ref, Ref]
    value: Ref


@dataclass(frozen=True, slots=True)
class HalfScale:
    """target = what `value` is divided by to be stored in float16, one number along axis `over`; never 0."""

    target: Ref
    value: Ref
    over: str


@dataclass(frozen=True, slots=True)
class Dot:
    """target = accumulator + left . right over axis `over`, on the tensor cores.

    The order of `target.axes` (m, n) decides which operand is the left one: whichever has axis m. Swapping operands is
    asking for (n, m).
    """

    target: Ref
    factors: tuple[Expr, Expr]
    over: str
    accumulator: Expr
    precision: str


@dataclass(frozen=True, slots=True)
class Inner:
    """target = the sum over `over` of left * right, as the diagonal of a product on the tensor cores: a sum over tokens would
    go through all the warps of a block, element by element."""

    target: Ref
    left: Ref
    right: Ref
    over: str
    precision: str


@dataclass(frozen=True, slots=True)
class SumTogether:
    """targets = the sums of two, four or five `values` of two axes, each over its axis of `over`, in one pass where
    their tiles have one shape: the warps of a block wait for each other once."""

    targets: tuple[Ref, ...]
    values: tuple[Expr, ...]
    over: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Store:
    """array[slots] = value, rounded to the array's dtype; what lies outside the array is dropped. `whole` is as in Load."""

    array: str
    slots: tuple[Slot, ...]
    value: Expr
    axes: Axes
    latency: str | None = None
    whole: str = ""


@dataclass(frozen=True, slots=True)
class Round:
    """target = value, rounded to the dtype of `array`."""

    target: Ref
    value: Ref
    array: str


@dataclass(frozen=True, slots=True)
class When:
    """`body` in kernels compiled with the flag, `otherwise` in the others."""

    flag: str
    body: tuple[Statement, ...]
    otherwise: tuple[Statement, ...] = ()


@dataclass(frozen=True, slots=True)
class If:
    """`body` where `condition` holds, which is known when the kernel runs."""

    condition: str
    body: tuple[Statement, ...]


Statement = (
    Load | Zeros | Let | Cumsum | Last | Rows | HalfScale | Dot | Inner | SumTogether | Round | Store | When | If
)


def flattened(statements: Iterable[Statement]) -> Iterator[Statement]:
    """Every statement, those under flags and conditions too."""
    for s in statements:
        yield s
        if isinstance(s, When):
            yield from flattened((*s.body, *s.otherwise))
        elif isinstance(s, If):
            yield from flattened(s.body)


@dataclass(frozen=True, slots=True)
class Kernel:
    """What every kernel has. `grid` are host expressions; `position` are the assignments that place a block. It is launched if
    the host's `condition` holds, "" for always."""

    name: str
    role: str
    doc: str
    parameters: tuple[Parameter, ...]
    grid: tuple[str, ...]
    position: tuple[str, ...]
    occupancy: str | None
    condition: str = field(default="", kw_only=True)


@dataclass(frozen=True, slots=True)
class TokenKernel(Kernel):
    """Per-token scalars of a chunk for a tile of heads: weights, and running sums of the log2 decays."""

    body: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class GroupKernel(Kernel):
    """Products of a chunk's tokens that the heads of a group share."""

    body: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class StateKernel(Kernel):
    """A walk over the chunks of a sequence, or of a segment of it, that carries one tile of a state.

    `chunks` are the arguments of `range`; `before` runs once, `enter` stores the state that enters a chunk, if that is
    wanted, `step` moves it to the chunk's end, `after` are stores under conditions, ("", ...) for none.
    """

    chunks: str
    before: tuple[Statement, ...]
    enter: tuple[Statement, ...]
    step: tuple[Statement, ...]
    after: tuple[tuple[str, tuple[Statement, ...]], ...]


@dataclass(frozen=True, slots=True)
class OutputKernel(Kernel):
    """The outputs of one chunk.

    `once` and `position` are the assignments that place a block, those that are the same for all blocks first. With `places`
    (the arguments of `range`) the kernel is persistent: the GPU holds all its blocks at once, and each does the rest for
    every `place` in turn. `before` runs first; `accumulators` start at zero and `contract` adds to them for each of `tiles`
    of the column axis; `combine` weighs them and adds the interactions inside the chunk; `outputs` are the epilogues.
    """

    once: tuple[str, ...]
    places: str
    before: tuple[Statement, ...]
    accumulators: tuple[Ref, ...]
    tile: str
    tiles: str
    contract: tuple[Statement, ...]
    combine: tuple[Statement, ...]
    outputs: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class WalkKernel(Kernel):
    """A walk over the chunks of a segment that carries all states and computes the outputs on the way.

    `before` runs once; `jump` runs for each segment before this one, those of `jumps`, and moves the states over it; in each of
    `chunks` (both the arguments of `range`) `accumulators` start at zero, `contract`, `combine` and `outputs` are as in
    OutputKernel and `advance` moves the states to the chunk's end. `after` are stores under conditions, ("", ...) for none.
    """

    before: tuple[Statement, ...]
    jumps: str
    jump: tuple[Statement, ...]
    chunks: str
    accumulators: tuple[Ref, ...]
    contract: tuple[Statement, ...]
    combine: tuple[Statement, ...]
    outputs: tuple[Statement, ...]
    advance: tuple[Statement, ...]
    after: tuple[tuple[str, tuple[Statement, ...]], ...]


@dataclass(frozen=True, slots=True)
class StepKernel(Kernel):
    """Tokens one by one, with a tile of every state in registers; a block that has no slot to read does nothing.

    `before` runs once, `token` for each token, and `after` stores the states if there is a slot to write.
    """

    before: tuple[Statement, ...]
    token: tuple[Statement, ...]
    after: tuple[Statement, ...]


AnyKernel = TokenKernel | GroupKernel | StateKernel | OutputKernel | WalkKernel


@dataclass(frozen=True, slots=True)
class Workspace:
    """A device buffer between kernels: host name, axes and the host expressions of its shape, dtype, purpose; whether a forward
    pass keeps it for its gradients."""

    name: str
    axes: Axes
    shape: tuple[str, ...]
    dtype: str
    doc: str
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Reach:
    """How far back the ends of segments remember, which the kernel of `_reach.py` finds from `sums`, the buffer of the running
    sums of a decay with these `axes`: in the buffer `oldest` the oldest chunk of which anything is left at the end of a
    segment; with `newest`, in that the newest chunk at which anything of its beginning is left."""

    sums: str
    axes: Axes
    oldest: str
    newest: str = ""


@dataclass(frozen=True, slots=True)
class Config:
    """One point of a schedule. The first six change the text of a module, the rest are constants of its kernels.

    `precision` maps (input dtype, product) to a precision.
    """

    plan: PlanName
    layouts: tuple[tuple[str, Axes], ...]
    internals: tuple[tuple[str, Axes], ...]
    swap: tuple[Product, ...]
    weighted: Side
    persistent: bool
    chunk: int
    tile: tuple[tuple[str, int], ...]
    state_tile: tuple[tuple[str, int], ...]
    latency: tuple[tuple[str, int], ...]
    state_latency: tuple[tuple[str, int], ...]
    occupancy: tuple[tuple[str, int], ...]
    warps: tuple[tuple[str, int], ...]
    share_scores_from: int
    segments: int
    precision: tuple[tuple[str, Product, str], ...]


@dataclass(frozen=True, slots=True)
class Knob:
    """A field of the emitted Config: its default for each input dtype, and what it is."""

    name: str
    doc: str
    defaults: tuple[tuple[str, int | str], ...]
    kind: Literal["int", "precision", "hint"] = "int"


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One-token steps: kernels in launch order, the fields of the emitted StepConfig, and the portable form.

    `refused` says why there is nothing of that; without kernels alone, it is for the reason that the Plan has none.
    """

    kernels: tuple[StepKernel, ...] = ()
    knobs: tuple[Knob, ...] = ()
    portable: PortableStep | None = None
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a module is printed from.

    `kernels` are in launch order; what is in `reaches` is found behind the one that stores the sums. `refused` says why there
    are no kernels, for a form that only the portable path computes. `portable` and `chunks` are one form for torch and for XLA,
    chunk by chunk and side by side. `gradients` is the plan of its gradients, if they were asked for and it has kernels.
    """

    form: ChunkForm
    config: Config
    kernels: tuple[AnyKernel, ...]
    workspaces: tuple[Workspace, ...]
    knobs: tuple[Knob, ...]
    portable: Portable
    chunks: ChunksForm
    step: StepPlan
    leader: str
    reaches: tuple[Reach, ...] = ()
    refused: str = field(default="")
    gradients: GradientPlan | None = None
