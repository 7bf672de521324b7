"""A layer as its author wrote it, checked: every name resolved, every rank right, every update affine in the state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ssdgen.diagnostics import NOWHERE, Source, Span
from ssdgen.ir.expr import Axes, Expr
from ssdgen.ir.schedule import Schedule

Dtype = Literal["bf16", "f16", "f32"]
INFINITY = float("inf")


@dataclass(frozen=True, slots=True)
class Interval:
    """The real numbers between two bounds, each in or out: what is known of a value's range."""

    low: float = -INFINITY
    high: float = INFINITY
    low_open: bool = False
    high_open: bool = False

    def __str__(self) -> str:
        return f"{'(' if self.low_open else '['}{self.low:g}, {self.high:g}{')' if self.high_open else ']'}"


ANY = Interval()


@dataclass(frozen=True, slots=True)
class Axis:
    """A named axis; `size` is the length compiled ahead of time and tuned, None if any will do."""

    name: str
    size: int | None = None
    span: Span = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Group:
    """`axis` is a coarser `shared` axis: `shared / axis` consecutive heads share one group."""

    axis: str
    shared: str
    span: Span = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input. `axes` are the widest declared, time and group axes included, in the order of the equations.

    `narrower` are the other declared forms (`D[h]` beside `D[h p]`), each a subset of `axes`. `like` names the input whose
    dtype this one has at run time; `dtypes` are then that input's. `default` is the neutral value an absent input stands
    for; `optional` inputs have none and are present or absent in the text of the kernels.
    """

    name: str
    axes: Axes
    dtypes: tuple[Dtype, ...]
    like: str | None = None
    narrower: tuple[Axes, ...] = ()
    range: Interval = ANY
    default: float | None = None
    optional: bool = False
    span: Span = field(default=NOWHERE, compare=False, repr=False)

    @property
    def required(self) -> bool:
        """Whether a caller must pass it."""
        return self.default is None and not self.optional


@dataclass(frozen=True, slots=True)
class Param:
    """A run-time scalar, float32; its range is declared, or that of its default's sign, and checked when called."""

    name: str
    default: float
    range: Interval = ANY
    span: Span = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Let:
    """A named value of one token, computed from inputs and lets before it."""

    name: str
    value: Expr
    span: Span = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class State:
    """A state, `axes` = (batch, head, channel) or (batch, head, channel, channel), and its update, affine in itself.

    `update` equals `decay * S[t-1] + input`; the state itself occurs in `update` as a Ref with lag 1, in neither of the
    parts. `decay` is provably in (0, 1].
    """

    name: str
    axes: Axes
    dtype: Dtype
    update: Expr
    decay: Expr
    input: Expr
    span: Span = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Gate:
    """`when z: y = ...`: the output's new value if the optional input `tensor` is present; `value` refers to the output."""

    tensor: str
    value: Expr
    span: Span = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Output:
    """An output per token: `value` reads states by Contract with a Ref of lag 0 or 1 to them; `gates` apply in order."""

    name: str
    axes: Axes
    like: str | None
    dtypes: tuple[Dtype, ...]
    value: Expr
    gates: tuple[Gate, ...] = ()
    span: Span = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Layer:
    """A whole spec. `batch`, `time` and `head` are the axes with that part in the recurrence, read off the states."""

    name: str
    title: str
    axes: tuple[Axis, ...]
    batch: str
    time: str
    head: str
    groups: tuple[Group, ...]
    inputs: tuple[Tensor, ...]
    params: tuple[Param, ...]
    lets: tuple[Let, ...]
    states: tuple[State, ...]
    outputs: tuple[Output, ...]
    schedule: Schedule
    source: Source = field(compare=False, repr=False)

    def tensor(self, name: str) -> Tensor:
        """The input called `name`; KeyError if there is none."""
        return {t.name: t for t in self.inputs}[name]

    def shared(self, axis: str) -> str:
        """The head axis that a group axis is shared by; any other axis itself."""
        return next((g.shared for g in self.groups if g.axis == axis), axis)

    def size(self, axis: str) -> int | None:
        """The declared size of an axis, if any."""
        return {a.name: a.size for a in self.axes}[axis]

    def __str__(self) -> str:
        lines = [f"layer {self.name}: {self.title}"]
        lines += [f"  input  {t.name}[{' '.join(t.axes)}]" for t in self.inputs]
        lines += [f"  param  {p.name} = {p.default:g}" for p in self.params]
        lines += [f"  let    {let.name} = {let.value}" for let in self.lets]
        for s in self.states:
            lines.append(f"  state  {s.name}[{' '.join(s.axes)}] = ({s.decay}) * {s.name}[{self.time}-1] + {s.input}")
        for o in self.outputs:
            lines.append(f"  output {o.name}[{' '.join(o.axes)}] = {o.value}")
            lines += [f"         when {g.tensor}: {o.name} = {g.value}" for g in o.gates]
        return "\n".join(lines)
