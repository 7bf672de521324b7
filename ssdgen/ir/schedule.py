"""How a layer may be computed: a Schedule is a space of choices, a Config (plan/) one point of it.

Every field is a tuple of alternatives; the first is the default. Knobs that are not declared keep these defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from ssdgen.diagnostics import NOWHERE, Span
from ssdgen.ir.expr import Axes

Product = Literal["scores", "carried", "intra", "state"]
"""The matrix products of a chunk.

scores: read . column of two tokens; carried: read . entry state; intra: scores times row; state: the update by a chunk.
"""
PRODUCTS: tuple[Product, ...] = ("scores", "carried", "intra", "state")

Precision = Literal["bf16", "bf16x2", "tf32", "tf32x3"]
"""Operands of a product: bf16, bf16 with what rounding a float32 operand to it leaves in a product of its own, TF32, or three
TF32 products for float32 accuracy. Sums are float32 in all of them."""

PRECISIONS: tuple[Precision, ...] = get_args(Precision)

PlanName = Literal["three_kernel", "segmented", "single_walk"]
PLANS: tuple[PlanName, ...] = get_args(PlanName)
KERNELS: tuple[str, ...] = ("chunk_cumsum", "group_scores", "fwd_pass_state", "compute_out")
"""The roles of kernels, as `occupancy` and `warps` name them."""

Side = Literal["row", "column"]
SIDES: tuple[Side, ...] = get_args(Side)
"""The operands of the `state` product, of which one bears the weight and the decay of a token."""

PERSISTENT: PlanName = "three_kernel"
"""The plan whose output kernel may be persistent: the grids of the others are one wave by construction."""

ALLOWED: dict[str, tuple[int, ...] | range] = {
    "chunk": (16, 32, 64, 128, 256),
    "tile": (32, 64, 128, 256),
    "latency": range(1, 11),
    "occupancy": range(33),
    "warps": (0, 4, 8),
    "share_scores_from": range(1025),
    "segments": range(1025),
}
"""What a number of a schedule may be, by the knob; `tile` and `latency` stand for `state_tile` and `state_latency` too."""

SHARE_SCORES_FROM = 4
"""Heads a group from which the `scores` product is computed once a group: on an H200 a kernel of its own costs what three
heads save."""


@dataclass(frozen=True, slots=True)
class MmaChoice:
    """The precisions of one product for inputs of one dtype.

    Undeclared for a dtype: `bf16` as declared for bf16 inputs, and TF32 wherever that is bf16 for f16 and f32 inputs.
    """

    dtype: Literal["bf16", "f16", "f32"]
    product: Product
    precisions: tuple[Precision, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The order of a tensor's dimensions: of the array a caller passes, or of a copy that kernels make."""

    name: str
    axes: Axes
    span: Span = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Choice:
    """The alternatives of a knob that belongs to one name: a latency of a tensor, a tile of an axis, an occupancy of a role."""

    name: str
    values: tuple[int, ...]
    span: Span = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The declared space. `mma` holds every (dtype, product), undeclared ones filled in.

    `tile` are tiles of `compute_out`, `state_tile` those of a state in `fwd_pass_state`; `latency` are of the loads and
    stores of all kernels but that, which has `state_latency`. `warps` are worker warps of a block,
    `share_scores_from` how many heads a group must have to share the `scores` product, 0 for never; `segments` are pieces
    of a sequence walked at once. Of `occupancy` and `warps` 0 lets the compiler choose, of `segments` the size of the GPU.
    `persistent` is a grid of as many blocks of `compute_out` as the GPU holds, each of which loops; see PERSISTENT.
    """

    chunk: tuple[int, ...] = (64,)
    mma: tuple[MmaChoice, ...] = ()
    layouts: tuple[Layout, ...] = ()
    internals: tuple[Layout, ...] = ()
    swap: tuple[Product, ...] = ()
    latency: tuple[Choice, ...] = ()
    state_latency: tuple[Choice, ...] = ()
    tile: tuple[Choice, ...] = ()
    state_tile: tuple[Choice, ...] = ()
    occupancy: tuple[Choice, ...] = ()
    warps: tuple[Choice, ...] = ()
    weighted: tuple[Side, ...] = ("row",)
    share_scores_from: tuple[int, ...] = (SHARE_SCORES_FROM,)
    segments: tuple[int, ...] = (0,)
    persistent: tuple[bool, ...] = (False,)
    plan: tuple[PlanName, ...] = ("segmented",)
