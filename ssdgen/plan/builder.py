"""What the builders of all kernels share: parameters declared on first use, loads and lets emitted once, positions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import get_args

from ssdgen.ir.chunkform import ChunkForm
from ssdgen.ir.expr import Apply, Axes, Contract, Expr, Index, Ref, Size, axes_of, children, refs, rewrite, walk
from ssdgen.ir.layer import Layer, Tensor
from ssdgen.ir.plan import (
    Config,
    Cumsum,
    Dot,
    HalfScale,
    If,
    Inner,
    Last,
    Let,
    Load,
    Parameter,
    Role,
    Round,
    Rows,
    Slot,
    Statement,
    Store,
    SumTogether,
    When,
    Zeros,
    flattened,
)
from ssdgen.plan.lower import float32, fold
from ssdgen.plan.names import Names

LOCALS = frozenset(
    {"batch", "head", "chunk", "chunks", "heads", "length", "token", "valid", "block", "end", "head_index", "segment"}
    | {"sequence", "lane", "slot", "origin", "last", "row", "start", "stop", "before", "place", "first", "into", "_"}
    | {"share", "per_share", "start_head", "stop_head", "present", "turn", "begin", "segments"}
    | {"oldest", "newest", "since", "until"}
)


ROLES = get_args(Role)


class Unsupported(Exception):
    """No kernel can be emitted for this form (yet); the message says which part prevents it."""


@dataclass
class KernelBuilder:
    """Builds the parts of one kernel. `place` says how an axis of an array is cut: index and extent, 1 if one element;
    `places` where that differs for arrays of one role. `latencies` is the knob that latency hints come from, `whole` the
    flag of loads and stores that says whether tiles stick out of arrays, if the kernel has one.

    `order` is the order in which tile axes lie unless something else is asked for. Inside a loop, `hoist` names the axis
    that changes from turn to turn and the section before the loop: loads and lets without that axis go there. `known` are
    the tiles of names of the layer; what a kernel makes besides is kept there too, under keys with a space in them.
    """

    form: ChunkForm
    config: Config
    place: dict[str, Slot]
    order: Axes
    places: dict[str, dict[str, Slot]] = field(default_factory=dict)
    latencies: str = "latency"
    whole: str = ""
    parameters: dict[str, Parameter] = field(default_factory=dict)
    position: list[str] = field(default_factory=list)
    known: dict[str, Ref] = field(default_factory=dict)
    hoist: tuple[str, list[Statement]] | None = None
    names: Names = field(init=False)
    used: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Keep the names of positions along axes from tiles."""
        positions = {f"{a.name}_{what}" for a in self.layer.axes for what in ("tile", "tiles", "index")}
        self.names = Names(LOCALS | positions | {s.index for s in self.place.values()})

    @property
    def layer(self) -> Layer:
        """The layer the kernel is for."""
        return self.form.recurrence.layer

    def array_axes(self, tensor: Tensor) -> Axes:
        """The axes of the array a caller passes for `tensor`, in the order of its dimensions."""
        return dict(self.config.layouts).get(tensor.name, tensor.axes)

    def declare(self, parameter: Parameter) -> str:
        """Declare a parameter unless it is there; its name."""
        name = self.names.of(parameter.role, parameter.name)
        self.parameters.setdefault(name, replace(parameter, name=name))
        return name

    def flag(self, name: str, argument: str) -> str:
        """Declare the compile-time flag `name` that the host sets from `argument`; its name."""
        return self.declare(Parameter(name, "flag", argument))

    def presence(self, name: str) -> str:
        """Declare the flag that says whether the caller passes an optional input or an initial state; its name."""
        return self.flag(f"WITH_{name.upper()}", name)

    def constant(self, name: str, field: str = "") -> str:
        """Declare the compile-time constant `name`, printed in capitals, with the value of a config field; its name."""
        return self.declare(Parameter(name.upper(), "constant", field or name))

    def latency(self, name: str) -> str | None:
        """The latency constant of a tensor, if the schedule gives it one."""
        declared = {"latency": self.config.latency, "state_latency": self.config.state_latency}[self.latencies]
        return self.constant(f"latency_{name}", f"{self.latencies}_{name}") if name in dict(declared) else None

    def slots(self, array: str, axes: Axes | None = None) -> tuple[Slot, ...]:
        """Where this block's tile stands in a declared array, by default with its dimensions in their own order."""
        parameter = self.parameters[array]
        place = self.place | self.places.get(parameter.role, {})
        return tuple(replace(place[a], axis=a) for a in axes or parameter.axes)

    def tile_axes(self, axes: Axes) -> Axes:
        """The axes that remain of a tile of an array with these axes."""
        return tuple(a for a in axes if self.place[a].extent != "1")

    def load(
        self,
        section: list[Statement],
        parameter: str,
        latency: str | None = None,
        key: str = "",
        uniform: tuple[str, ...] = (),
    ) -> Ref:
        """Load this block's tile of a declared array, once for each `key` (or array); the tile."""
        key = key or f"array {parameter}"
        if key not in self.known:
            axes = self.parameters[parameter].axes
            target = Ref(self.names.of("tile", f"{parameter}_tile"), self.tile_axes(axes))
            load = Load(target, parameter, self.slots(parameter), latency, whole=self.whole, uniform=uniform)
            self.section(section, target.axes).append(load)
            self.known[key] = target
        return self.known[key]

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What is made within it, the body of a flag, stays there: no tile is moved before the loop, or known after."""
        hoist, known = self.hoist, dict(self.known)
        self.hoist = None
        yield
        self.hoist, self.known = hoist, known

    def section(self, section: list[Statement], axes: Axes) -> list[Statement]:
        """Where a statement whose result has these axes goes: `section`, or before the loop it stands in."""
        if self.hoist is not None and self.hoist[0] not in axes:
            return self.hoist[1]
        return section

    def input(self, section: list[Statement], name: str) -> Ref:
        """Load the tile of an input of the layer."""
        tensor = self.layer.tensor(name)
        axes = self.array_axes(tensor)
        unplaced = [a for a in axes if a not in self.place]
        if unplaced:
            raise Unsupported(f"`{name}` has the axis `{unplaced[0]}`, which a kernel that needs it does not run over")
        dtype = f"like {tensor.name}"
        parameter = self.declare(Parameter(name, "input", name, axes, dtype))
        return self.load(section, parameter, self.latency(name), uniform=self.uniform(parameter, tensor))

    def uniform(self, parameter: str, tensor: Tensor) -> tuple[str, ...]:
        """The flags of the axes of an input that its narrower forms lack, as `Load` has them: along those it is the same
        where a caller passes such a form. None where tiles are moved without TMA, which is for kernels that run once."""
        axes = self.parameters[parameter].axes
        tiled = () if self.whole else self.tile_axes(axes)
        lacking = [a for a in tiled if any(a not in form for form in tensor.narrower)]
        flags = {
            a: self.declare(Parameter(f"{parameter}_UNIFORM_{a}".upper(), "uniform", tensor.name, (a,)))
            for a in lacking
        }
        return tuple(flags.get(a, "") for a in axes) if flags else ()

    def tile(self, section: list[Statement], expr: Expr) -> Expr:
        """`expr` over tiles, what it needs loaded and named in `section`. A bare input keeps its dtype; in arithmetic it is
        widened to float32."""
        bare = isinstance(expr, Ref)

        def rule(e: Expr) -> Expr | None:
            match e:
                case Ref(name=name, lag=lag) if lag:
                    raise Unsupported(f"`{name}[{self.layer.time}-{lag}]` reads the token before")
                case Ref(name=name) if name in self.known:
                    return self.known[name]
                case Ref(name=name) if name in {p.name for p in self.layer.params}:
                    return Ref(self.declare(Parameter(name, "scalar", name, dtype="f32")))
                case Ref(name=name) if name in {let.name for let in self.layer.lets}:
                    return self.let(section, name)
                case Ref(name=name):
                    loaded = self.input(section, name)
                    return loaded if bare else float32(loaded)
                case Size(axis=axis):
                    return Ref(self.declare(Parameter(f"size_{axis}", "scalar", f"size_{axis}", dtype="f32")))
                case Index(axis=axis):
                    return self.index(axis)
                case Contract():
                    raise Unsupported("a product `.` of two inputs inside an expression")
                case _:
                    return None

        return rewrite(fold(expr), rule)

    def widened(self, tile: Expr) -> Expr:
        """A tile as an operand of arithmetic: one that was loaded is widened to float32."""
        return float32(tile) if any(k.startswith("array ") and v == tile for k, v in self.known.items()) else tile

    def arithmetic(self, section: list[Statement], expr: Expr) -> Expr:
        """`tile(expr)` as an operand of arithmetic, a bare input too."""
        return self.widened(self.tile(section, expr))

    def let(self, section: list[Statement], name: str) -> Expr:
        """Compute a let of the layer, once; its tile."""
        let = {x.name: x for x in self.layer.lets}[name]
        value = self.tile(section, let.value)
        if isinstance(value, Ref):
            value = float32(value)
        target = Ref(self.names.of("let", f"{name}_tile"), self.natural(value))
        self.section(section, target.axes).append(Let(target, value, let.span.line))
        self.known[name] = target
        return target

    def index(self, axis: str) -> Expr:
        """The position along an axis, as float32."""
        slot = self.place.get(axis)
        if slot is None or axis == self.layer.time:
            raise Unsupported(f"`index({axis})`, whose axis this kernel does not run over")
        if slot.extent == "1":
            return float32(Ref(slot.index))
        if self.hoist is not None and self.hoist[0] == axis:  # a loop over tiles: only the offset in a tile is fixed
            name = self.names.of("index", f"{axis}_offset")
            line = f"{name} = ct.arange({slot.extent}, dtype=ct.int32)"
            if line not in self.position:
                self.position.append(line)
            start = Apply("mul", (Ref(slot.index), Ref(slot.extent)))
            return float32(Apply("add", (start, Ref(name, (axis,)))))
        name = self.names.of("index", f"{axis}_index")
        shift = "" if slot.index == "0" else f"{slot.index} * {slot.extent} + "
        line = f"{name} = {shift}ct.arange({slot.extent}, dtype=ct.int32)"
        if line not in self.position:
            self.position.append(line)
        return float32(Ref(name, (axis,)))

    def natural(self, expr: Expr) -> Axes:
        """The axes of a tile expression, in this kernel's order."""
        axes = axes_of(expr)
        return tuple(a for a in self.order if a in axes)

    def operand(self, section: list[Statement], expr: Expr, name: str) -> Expr:
        """`tile(expr)` as an operand that is used more than once: what is no bare tile is computed once, under a name."""
        key = f"operand {expr}"
        if key not in self.known:
            tile = self.tile(section, expr)
            if isinstance(tile, Ref):
                return tile
            axes = self.natural(tile)
            self.known[key] = self.name_value(self.section(section, axes), name, tile, axes=axes)
        return self.known[key]

    def name_value(
        self, section: list[Statement], name: str, value: Expr, note: str = "", axes: Axes | None = None
    ) -> Ref:
        """target = value, under a fresh name."""
        target = Ref(self.names.fresh(name), self.natural(value) if axes is None else axes)
        section.append(Let(target, value, None, note))
        return target

    def ordered_parameters(self) -> tuple[Parameter, ...]:
        """The parameters as a reader expects them: inputs in the order of the spec, states, workspaces, results, scalars,
        constants."""
        inputs = [t.name for t in self.layer.inputs]

        def rank(p: Parameter) -> tuple[int, int]:
            source = p.dtype.removeprefix("like ") if p.role == "input" else ""
            return ROLES.index(p.role), inputs.index(source) if source in inputs else 0

        return tuple(sorted(self.parameters.values(), key=rank))

    def finish(self, *sections: list[Statement]) -> None:
        """Widen at the load every tile that is only ever used in arithmetic; note in `used` what is referred to."""
        statements = [s for section in sections for s in flattened(section)]
        self.used |= {r.name for s in statements for e in _operands(s) for r in refs(e)}
        native = {r.name for s in statements for e in _operands(s) for r in _bare(e)}
        widened = {s.target.name for s in statements if isinstance(s, Load) and s.target.name not in native}

        def rule(e: Expr) -> Expr | None:
            match e:
                case Apply(op="float32", args=(Ref(name=name) as ref,)) if name in widened:
                    return ref
            return None

        for section in sections:
            section[:] = [_map(s, widened, rule) for s in section]

    def name_widened(self, section: list[Statement]) -> None:
        """Name a tile that a `finish`ed section makes once and widens several times, not only under flags."""
        makes = [
            {s.target.name: s.target for s in flattened([w]) if isinstance(s, Load | Let | Zeros)} for w in section
        ]
        once = Counter(name for made in makes for name in made)
        plainly = {r.name for s in section for e in _operands(s) for r in _widened(e)}
        count = Counter(r.name for s in flattened(section) for e in _operands(s) for r in _widened(e))
        found = [name for name in once if once[name] == 1 and count[name] > 1 and name in plainly]
        named = {name: self.names.fresh(f"{name.removesuffix('_tile')}_wide") for name in found}

        def rule(e: Expr) -> Expr | None:
            match e:
                case Apply(op="float32", args=(Ref(name=name, axes=axes),)) if name in named:
                    return Ref(named[name], axes)
            return None

        out: list[Statement] = []
        for s, made in zip(section, makes, strict=True):
            out.append(_map(s, set(), rule))
            out += [Let(Ref(named[n], x.axes), Apply("float32", (x,))) for n, x in made.items() if n in named]
        section[:] = out


def _operands(statement: Statement) -> tuple[Expr, ...]:
    match statement:
        case Let() | Cumsum() | Last() | Rows() | HalfScale() | Store():
            return (statement.value,)
        case Round(target=target, value=value):
            return (value, target)
        case Dot(factors=factors, accumulator=accumulator):
            return (*factors, accumulator)
        case Inner(left=left, right=right):
            return (left, right)
        case SumTogether(values=values):
            return values
        case Load() | Zeros() | When() | If():
            return ()


def _widened(expr: Expr) -> Iterator[Ref]:
    """The references in `expr` that are widened, as often as they are."""
    for e in walk(expr):
        match e:
            case Apply(op="float32", args=(Ref() as ref,)):
                yield ref


def _bare(expr: Expr) -> tuple[Ref, ...]:
    """The references in `expr` that stand outside `float32(...)`."""
    match expr:
        case Ref():
            return (expr,)
        case Apply(op="float32"):
            return ()
        case _:
            return tuple(r for child in children(expr) for r in _bare(child))


def _map(statement: Statement, widened: set[str], rule: Callable[[Expr], Expr | None]) -> Statement:
    match statement:
        case Load(target=target):
            return replace(statement, cast=statement.cast or target.name in widened)
        case Dot(factors=(a, b), accumulator=accumulator):
            return replace(
                statement, factors=(rewrite(a, rule), rewrite(b, rule)), accumulator=rewrite(accumulator, rule)
            )
        case Let(value=value) | Cumsum(value=value) | Store(value=value):
            return replace(statement, value=rewrite(value, rule))
        case SumTogether(values=values):
            return replace(statement, values=tuple(rewrite(v, rule) for v in values))
        case When(body=body, otherwise=otherwise):
            mapped = (tuple(_map(s, widened, rule) for s in part) for part in (body, otherwise))
            return When(statement.flag, *mapped)
        case If(body=body):
            return replace(statement, body=tuple(_map(s, widened, rule) for s in body))
        case Last() | Rows() | HalfScale() | Inner() | Round() | Zeros():
            return statement
