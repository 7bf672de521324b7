"""What a plan costs at least: the bytes that its kernels move and the products that they do, and the time those take.

The definition, for any spec and shape of a whole batch:

- *compulsory* are the bytes of reading every input once and of writing every output and final state once;
- a kernel moves every array that it loads or stores once, workspaces as long as they are: what blocks read again is in
  the L2 cache. Only a kernel that makes the states which enter segments walks all segments but the last, and all of those:
  where states forget it has less to do, and finding out how far they reach (`_reach.py`) is a few numbers a segment;
- a kernel's operations are those of its products of tiles, a multiply and an add counted as two, padding and the masked
  half of the scores too: that is what the tensor cores do;
- a kernel takes at least the longer of its bytes at the bandwidth and its products at their rate; a plan takes the sum.

Launches, latencies and all arithmetic outside the tensor cores are left out: a floor, not a forecast.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from ssdgen.diagnostics import UserError
from ssdgen.ir.build import ITEMSIZE, Element
from ssdgen.ir.expr import Axes, Expr, Ref
from ssdgen.ir.layer import Dtype, Layer, Tensor
from ssdgen.ir.plan import (
    CHUNKS,
    KEY,
    NUMBERS,
    SEGMENTS,
    AnyKernel,
    Dot,
    GroupKernel,
    If,
    Load,
    OutputKernel,
    Parameter,
    Plan,
    StateKernel,
    Statement,
    Store,
    TokenKernel,
    WalkKernel,
    When,
)
from ssdgen.plan.shapes import check_dtype, check_optional, input_dtype, sizes_of
from ssdgen.plan.shared import FIELD

SegmentRule = Callable[[int, int, int, int, int], tuple[int, int]]
"""(wanted or 0, chunks of a sequence, walks, columns of a state, multiprocessors) -> (segments, chunks a segment). The one
that calls go by at run time is `ssdgen.emit.support._segments.segments`, in a room above this one."""

LONGEST_COLUMN, SHORTEST_TILE = 256, 32
"""What a tile that holds a whole axis is at most and at least."""

F32 = ITEMSIZE["f32"]


@dataclass(frozen=True, slots=True)
class Rates:
    """What a GPU does: bytes a second of a copy, operations a second of dense bf16 products."""

    bandwidth: float
    products: float


H200 = Rates(bandwidth=4.3e12, products=800e12)
"""Measured on an H200: copies reach 4.2 to 4.3 TB/s, large dense bf16 products 780 to 990 TFLOP/s. TF32 has half
the rate."""

MULTIPROCESSORS = 132
"""Those of an H200."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a kernel does: the bytes of each of its arrays, and the operations of its products.

    `bf16_operations` are as many bf16 operations as take the tensor cores as long: a TF32 product counts twice, one that
    is split for accuracy as often as it is done.
    """

    kernel: str
    arrays: tuple[tuple[str, int], ...]
    operations: int
    bf16_operations: int

    @property
    def bytes(self) -> int:
        """The bytes of all arrays."""
        return sum(size for _, size in self.arrays)

    def seconds(self, rates: Rates) -> float:
        """The least time it takes."""
        return max(self.bytes / rates.bandwidth, self.bf16_operations / rates.products)


@dataclass(frozen=True, slots=True)
class Roofline:
    """A plan at a shape: the bytes that any plan moves, and the work of its kernels in launch order."""

    sizes: Mapping[str, int]
    dtype: Dtype
    compulsory: int
    segments: int
    kernels: tuple[Work, ...]

    @property
    def bytes(self) -> int:
        """The bytes that all kernels move."""
        return sum(k.bytes for k in self.kernels)

    @property
    def operations(self) -> int:
        """The operations of all products."""
        return sum(k.operations for k in self.kernels)

    @property
    def bf16_operations(self) -> int:
        """The same in bf16 operations that take as long."""
        return sum(k.bf16_operations for k in self.kernels)

    def seconds(self, rates: Rates) -> float:
        """The least time the plan takes: its kernels one after the other."""
        return sum(k.seconds(rates) for k in self.kernels)


def compulsory_bytes(
    layer: Layer, shape: Mapping[str, int], dtype: Dtype = "bf16", present: Collection[str] = ()
) -> int:
    """The bytes of every input, output and final state, each once.

    Optional inputs and initial states (`S0`) are passed if `present`, inputs of several forms in the narrowest.
    """
    sizes = sizes_of(layer, shape)
    total = 0
    for tensor in layer.inputs:
        if not tensor.optional or tensor.name in present:
            total += _elements(_passed(tensor, tensor.axes), sizes) * ITEMSIZE[input_dtype(layer, tensor, dtype)]
    for output in layer.outputs:
        like = output.dtypes[0] if output.like is None else input_dtype(layer, layer.tensor(output.like), dtype)
        total += _elements(output.axes, sizes) * ITEMSIZE[like]
    for state in layer.states:
        total += _elements(state.axes, sizes) * F32 * (2 if f"{state.name}0" in present else 1)
    return total


def roofline(
    plan: Plan,
    shape: Mapping[str, int],
    rule: SegmentRule,
    *,
    dtype: Dtype = "bf16",
    present: Collection[str] = (),
    knobs: Mapping[str, int | str] | None = None,
    multiprocessors: int = MULTIPROCESSORS,
) -> Roofline:
    """The work of `plan` at a shape (axis lengths by name; declared sizes and groups may be left out).

    Inputs are as `compulsory_bytes` has them; `knobs` are fields of the emitted Config that differ from the plan's defaults.
    UserError for a shape the layer does not have, a plan without kernels, and an axis that no tile holds.
    """
    layer = plan.form.recurrence.layer
    if plan.refused:
        raise UserError(f"{layer.name} has no kernels: {plan.refused}", "only the portable form computes it")
    check_dtype(layer, dtype)
    sizes = sizes_of(layer, shape)
    check_optional(layer, (name for name in present if name not in {f"{s.name}0" for s in layer.states}))
    values = {k.name: dict(k.defaults)[dtype] for k in plan.knobs} | dict(knobs or {})
    point = _Point.at(plan, sizes, dtype, frozenset(present), values, rule, multiprocessors)
    works = tuple(point.work(k) for k in plan.kernels if point.runs(k))
    return Roofline(sizes, dtype, compulsory_bytes(layer, sizes, dtype, present), point.segments, works)


@dataclass(frozen=True, slots=True)
class _Point:
    """A plan at a shape, with all that the host would know: chunks, segments, and which flags it sets."""

    plan: Plan
    sizes: Mapping[str, int]
    dtype: Dtype
    knobs: Mapping[str, int | str]
    flags: frozenset[str]
    segments: int
    per_segment: int

    @classmethod
    def at(
        cls,
        plan: Plan,
        sizes: Mapping[str, int],
        dtype: Dtype,
        present: frozenset[str],
        knobs: Mapping[str, int | str],
        rule: SegmentRule,
        multiprocessors: int,
    ) -> _Point:
        """With the segments that `rule` cuts, and products shared if the groups are as large as the knob asks for."""
        whole = cls(plan, sizes, dtype, knobs, present, 1, 0)
        count, per_segment = 1, whole.chunks
        if plan.config.plan == "segmented":
            walk = next(k for k in plan.kernels if isinstance(k, WalkKernel))
            layer = plan.form.recurrence.layer
            walks = sizes[layer.batch] * sizes[layer.head] * prod(whole.times(walk).values())
            column = sizes[plan.form.states[0].column_axis]
            count, per_segment = rule(int(knobs["segments"]), whole.chunks, walks, column, multiprocessors)
        flags = present | ({"shared"} if whole.shares() else frozenset())
        return replace(whole, flags=flags, segments=count, per_segment=per_segment)

    @property
    def layer(self) -> Layer:
        """The layer."""
        return self.plan.form.recurrence.layer

    @property
    def chunk(self) -> int:
        """Tokens a chunk."""
        return int(self.knobs["chunk"])

    @property
    def chunks(self) -> int:
        """Chunks of a sequence."""
        return _ceil_div(self.sizes[self.layer.time], self.chunk)

    def shares(self) -> bool:
        """Whether the heads of a group share a product."""
        kernel = next((k for k in self.plan.kernels if isinstance(k, GroupKernel)), None)
        if kernel is None:
            return False
        group = self.group(kernel)
        return 0 < int(self.knobs[FIELD]) <= self.sizes[self.layer.shared(group)] // self.sizes[group]

    def group(self, kernel: GroupKernel) -> str:
        """The group axis that a kernel has a block for each of."""
        groups = {g.axis for g in self.layer.groups}
        return next(a for p in kernel.parameters if p.role == "workspace" for a in p.axes if a in groups)

    def runs(self, kernel: AnyKernel) -> bool:
        """Whether the host launches it."""
        return bool(self.walked(kernel)) and ("shared" in self.flags or not isinstance(kernel, GroupKernel))

    def walked(self, kernel: AnyKernel) -> int:
        """The chunks of a sequence that a kernel goes over: all, but for end states those of all segments but the last."""
        if isinstance(kernel, StateKernel) and self.plan.config.plan == "segmented":
            return min(self.chunks, (self.segments - 1) * self.per_segment)
        return self.chunks

    def tiles(self, kernel: AnyKernel) -> dict[str, int]:
        """The tile of each axis that a kernel cuts."""
        out = {}
        for argument in (p.argument for p in kernel.parameters if p.role == "constant"):
            for prefix in ("state_tile_", "tile_", "size_"):
                if argument.startswith(prefix):
                    axis = argument.removeprefix(prefix)
                    out[axis] = _covering(axis, self.sizes[axis]) if prefix == "size_" else int(self.knobs[argument])
                    break
        return out

    def times(self, kernel: AnyKernel) -> dict[str, int]:
        """How many tiles there are along each axis that a kernel cuts."""
        return {axis: _ceil_div(self.sizes[axis], tile) for axis, tile in self.tiles(kernel).items()}

    def work(self, kernel: AnyKernel) -> Work:
        """The work of a kernel that runs."""
        once, each_tile = (tuple(self.active(kernel, part)) for part in _parts(kernel))
        parameters = {p.name: p for p in kernel.parameters}
        names = dict.fromkeys(s.array for s in (*once, *each_tile) if isinstance(s, Load | Store))
        arrays = tuple((name, self.array_bytes(kernel, parameters[name])) for name in names)
        operands = self.bf16_tiles(kernel, (*once, *each_tile))
        inner = {kernel.tile.removesuffix("_tile")} if isinstance(kernel, OutputKernel) else set()
        done = [(s, self.operations(kernel, s, inner)) for s in once if isinstance(s, Dot)]
        done += [(s, self.operations(kernel, s, set())) for s in each_tile if isinstance(s, Dot)]
        weighed = (n * _repeats(str(self.knobs[parameters[s.precision].argument]), s, operands) for s, n in done)
        return Work(kernel.name, arrays, sum(n for _, n in done), sum(weighed))

    def active(self, kernel: AnyKernel, statements: Iterable[Statement]) -> Iterator[Statement]:
        """The statements that are compiled with the flags as they are."""
        set_flags = {p.name for p in kernel.parameters if p.role == "flag" and p.argument in self.flags}
        for s in statements:
            if isinstance(s, When):
                yield from self.active(kernel, s.body if s.flag in set_flags else s.otherwise)
            elif isinstance(s, If):
                yield from self.active(kernel, s.body)
            else:
                yield s

    def operations(self, kernel: AnyKernel, dot: Dot, outside: set[str]) -> int:
        """The operations of all tiles of a product that stands outside the loops over some axes."""
        tiles, axes = self.tiles(kernel), (*dot.target.axes, dot.over)
        tile = prod(self.chunk if a in (self.layer.time, KEY) else tiles[a] for a in axes)
        heads = self.group(kernel) if isinstance(kernel, GroupKernel) else self.layer.head
        visits = self.sizes[self.layer.batch] * self.walked(kernel) * self.sizes[heads]
        return 2 * tile * visits * prod(n for axis, n in self.times(kernel).items() if axis not in outside)

    def array_bytes(self, kernel: AnyKernel, p: Parameter) -> int:
        """The bytes of an array as far as a kernel walks over it."""
        layer, tokens = self.layer, self.walked(kernel) * self.chunk
        lengths = dict(self.sizes) | {KEY: self.chunk, CHUNKS: self.chunks, SEGMENTS: self.segments - 1}
        for w in (w for w in self.plan.workspaces if NUMBERS in w.axes):
            lengths[NUMBERS] = int(w.shape[w.axes.index(NUMBERS)])
        lengths[layer.time] = tokens if p.role == "workspace" else min(tokens, self.sizes[layer.time])
        axes = _passed(layer.tensor(p.argument), p.axes) if p.role == "input" else p.axes
        return _elements(axes, lengths) * ITEMSIZE[self.array_dtype(p)]

    def array_dtype(self, p: Parameter) -> Element:
        """The dtype of an array; of buffers that feed one product, what the precision of that one asks for."""
        if p.dtype.startswith("like "):
            return input_dtype(self.layer, self.layer.tensor(p.dtype.removeprefix("like ")), self.dtype)
        if p.dtype == "carried":
            return "bf16" if self.knobs["carried"] == "bf16" else "f32"
        if p.dtype == "scores":
            return "f16" if self.knobs["intra"] in ("bf16", "bf16x2") else "f32"
        return next(element for element in ITEMSIZE if element == p.dtype)

    def bf16_tiles(self, kernel: AnyKernel, statements: Iterable[Statement]) -> frozenset[str]:
        """The tiles that are loaded in bf16 and stay so."""
        narrow = {p.name for p in kernel.parameters if p.is_array and self.array_dtype(p) == "bf16"}
        loads = (s for s in statements if isinstance(s, Load) and not s.cast)
        return frozenset(s.target.name for s in loads if s.array in narrow)


def _parts(kernel: AnyKernel) -> tuple[tuple[Statement, ...], tuple[Statement, ...]]:
    """The statements of a kernel, and apart those that an output kernel repeats for every tile of the column axis."""
    match kernel:
        case TokenKernel(body=body) | GroupKernel(body=body):
            return body, ()
        case StateKernel():
            return (*kernel.before, *kernel.enter, *kernel.step, *_stores(kernel.after)), ()
        case OutputKernel():
            return (*kernel.before, *kernel.combine, *kernel.outputs), kernel.contract
        case WalkKernel():
            walk = (*kernel.contract, *kernel.combine, *kernel.outputs, *kernel.advance)
            return (*kernel.before, *kernel.jump, *walk, *_stores(kernel.after)), ()


def _stores(after: Iterable[tuple[str, tuple[Statement, ...]]]) -> tuple[Statement, ...]:
    return tuple(s for _, stores in after for s in stores)


def _repeats(precision: str, dot: Dot, bf16: frozenset[str]) -> int:
    """How many bf16 products of the same size take as long as a product of this precision."""
    if precision == "bf16x2":  # a product more for each operand that bf16 does not hold
        return 1 + sum(not _is_one_of(factor, bf16) for factor in dot.factors)
    return {"bf16": 1, "tf32": 2, "tf32x3": 6}[precision]


def _is_one_of(factor: Expr, tiles: frozenset[str]) -> bool:
    return isinstance(factor, Ref) and factor.name in tiles


def _passed(tensor: Tensor, widest: Axes) -> Axes:
    """The axes of an input as it is passed: of several forms in the narrowest."""
    return tensor.narrower[0] if tensor.narrower else widest


def _elements(axes: Axes, lengths: Mapping[str, int]) -> int:
    return prod(lengths[a] for a in axes)


def _covering(axis: str, size: int) -> int:
    """The tile that holds a whole axis."""
    if size > LONGEST_COLUMN:
        raise UserError(
            f"this plan keeps whole columns of the state in registers, {LONGEST_COLUMN} at most, and {axis} is {size}",
            "choose plan=three_kernel",
        )
    return max(SHORTEST_TILE, 1 << (size - 1).bit_length())


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
