"""A GradientPlan: the kernels that compute the gradients of a call, beside the Plan of the call itself.

They make again what a forward pass does not store, the states that enter each chunk, and walk back from the last chunk to the
first with the gradient of the state; then each chunk stands alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ssdgen.ir.expr import Axes, Ref
from ssdgen.ir.plan import Kernel, Plan, StateKernel, Statement, When

if TYPE_CHECKING:
    from ssdgen.ir.adjoint import Adjoint


@dataclass(frozen=True, slots=True)
class EntryKernel(StateKernel):
    """A StateKernel of a segment: `start` loads the state that it begins with, where the forward pass kept that; else `jump`
    runs for each segment `before` this one, those of `jumps` (the arguments of `range`), and moves the state over it."""

    start: When
    jumps: str
    jump: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class BackKernel(StateKernel):
    """A StateKernel of a segment that walks from its last chunk to its first, `begin`; `jump` runs for each segment behind
    this one and before `until`, the last first, and moves the state back over it."""

    jump: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class ChunkGradientKernel(Kernel):
    """The gradients of one chunk.

    `once` is the same for all heads of a group; `heads` are the arguments of `range` over those that a block has, "" where
    heads share nothing and a block has one. `accumulators` start at zero, `each` is what a head adds to them and stores of its
    own, `after` what is made of the sums. A block without a chunk does nothing.
    """

    once: tuple[Statement, ...]
    heads: str
    accumulators: tuple[Ref, ...]
    each: tuple[Statement, ...]
    after: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class TokenGradientKernel(Kernel):
    """From the gradients of per-token scalars to those of what they are made of; a block without a chunk does nothing."""

    body: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """The gradient of an input, in the buffer `name`.

    `axes` are the buffer's. Those that the input lacks are summed by the host, in a fixed order; `shares` says that the
    first of them is the blocks of a group, whose parts are in float32 only if there are several. Along the axis `uniform` it
    has one number where the input is the same all along it. `name` is "" for a gradient that is zero.
    """

    of: str
    name: str
    axes: Axes
    shares: bool = False
    uniform: str = ""


@dataclass(frozen=True, slots=True)
class GradientPlan:
    """All that a module of gradients is printed from.

    `kernels` are in launch order; `plan` has their workspaces and knobs, and no kernels of its own. `results` has one entry
    for each input. `refused` says why there are no kernels.
    """

    adjoint: Adjoint
    plan: Plan
    kernels: tuple[Kernel, ...]
    results: tuple[Result, ...]
    refused: str = ""
