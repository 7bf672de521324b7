"""What is computed in plain torch, for any device: the same forms as the kernels of a plan, on whole tensors."""

from __future__ import annotations

from dataclasses import dataclass

from ssdgen.ir.expr import Axes, Expr, Ref
from ssdgen.ir.plan import Cumsum, Last, Let


@dataclass(frozen=True, slots=True)
class Einsum:
    """target = sum of the product of `factors` over every axis that the target lacks."""

    target: Ref
    factors: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """target = the tokens of the chunk at hand of `source`."""

    target: Ref
    source: Ref


@dataclass(frozen=True, slots=True)
class Shift:
    """target = `source` one token later, zero at the first."""

    target: Ref
    source: Ref


@dataclass(frozen=True, slots=True)
class Scale:
    """target = factor * target, in place."""

    target: Ref
    factor: Expr


@dataclass(frozen=True, slots=True)
class AddProduct:
    """target = target + left * right, in place."""

    target: Ref
    left: Expr
    right: Expr


PortableStatement = Let | Cumsum | Last | Einsum | Slice | Shift | Scale | AddProduct


@dataclass(frozen=True, slots=True)
class PortableInput:
    """An input on the portable path: passed with `array_axes`, brought to `axes`, in which groups are expanded to heads."""

    name: str
    array_axes: Axes
    axes: Axes
    grouped: bool
    per_token: bool


@dataclass(frozen=True, slots=True)
class PortableOutput:
    """An output of one chunk: `body` computes `value`, each of `gates` changes it if its optional input is there.

    `pieces` is the list of chunks; `axes` are those of the array that is returned.
    """

    name: str
    pieces: str
    body: tuple[PortableStatement, ...]
    gates: tuple[tuple[str, tuple[PortableStatement, ...]], ...]
    value: Ref
    axes: Axes


@dataclass(frozen=True, slots=True)
class Portable:
    """The chunked form in plain torch, a loop over chunks; `sizes` and `indices` are the axes whose length or positions it
    uses: `tokens` once for all tokens, `chunk` for each chunk, then the
    outputs, then `advance` moves the states (carried under their own names) to the chunk's end."""

    inputs: tuple[PortableInput, ...]
    sizes: Axes
    indices: Axes
    tokens: tuple[PortableStatement, ...]
    chunk: tuple[PortableStatement, ...]
    outputs: tuple[PortableOutput, ...]
    advance: tuple[PortableStatement, ...]


@dataclass(frozen=True, slots=True)
class PortableStep:
    """One token in plain torch: `body` moves the states in place and reads them, then the outputs; no axis is time."""

    inputs: tuple[PortableInput, ...]
    sizes: Axes
    indices: Axes
    body: tuple[PortableStatement, ...]
    outputs: tuple[PortableOutput, ...]


@dataclass(frozen=True, slots=True)
class ChunkMove:
    """A state's way from chunk to chunk: `end` is the sum of its log2 decays over each, `gained` what each adds, in parts.

    `entry` is what it is before each, which follows from both and from `state` before the first.
    """

    state: Ref
    entry: Ref
    end: Expr
    gained: tuple[Ref, ...]


@dataclass(frozen=True, slots=True)
class ChunksForm:
    """The chunked form over chunks of equal length at once, which have an axis CHUNKS: einsums and no loop.

    `tokens` is computed once for all tokens; `cut` are those of its values, and the inputs, that each chunk has its tokens of;
    `gains` is computed from these alone, then `moves` the states that the chunks begin with, then `reads` and the outputs.
    `group` is the axis that heads are split by, if there is one: what heads of a group share is then computed once a group,
    and the head axis counts within a group.
    """

    inputs: tuple[PortableInput, ...]
    sizes: Axes
    indices: Axes
    group: str | None
    tokens: tuple[PortableStatement, ...]
    cut: tuple[Slice, ...]
    gains: tuple[PortableStatement, ...]
    moves: tuple[ChunkMove, ...]
    reads: tuple[PortableStatement, ...]
    outputs: tuple[PortableOutput, ...]
