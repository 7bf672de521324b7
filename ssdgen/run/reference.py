"""The layer as its author wrote it, token by token in float64: what everything else is compared with.

Interprets `Layer` alone (updates and outputs as written), so that a mistake in the derivation cannot hide in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ssdgen.ir.expr import Apply, Axes, Const, Contract, Expr, Index, Ref, Size, axes_of, children, merge_axes, walk
from ssdgen.ir.layer import Layer
from ssdgen.ir.layer import Tensor as Input


def reference(
    layer: Layer,
    tensors: Mapping[str, Tensor | None],
    params: Mapping[str, float] | None = None,
    states: Mapping[str, Tensor | None] | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(outputs, final states) of `layer`, float64, dimensions in the order of the declared axes.

    `tensors` holds inputs by name, any dtype, dimensions in the order of their declared axes (or of a narrower form);
    absent or None stands for the default, or for absence if the input is optional. `params` override the defaults;
    `states` are the states before the first token, zero if absent or None. Raises ValueError for a missing or unknown
    input and for sizes that disagree.
    """
    return _Loop(layer, tensors, params or {}, states or {}).run()


@dataclass(frozen=True, slots=True)
class Array:
    """A float64 tensor whose dimensions are named."""

    data: Tensor
    axes: Axes

    def over(self, axes: Axes) -> Tensor:
        """The data with its dimensions in the order of `axes`, size 1 for those it has not; broadcasts."""
        data = self.data.permute([self.axes.index(a) for a in axes if a in self.axes])
        return data.reshape([self.data.shape[self.axes.index(a)] if a in self.axes else 1 for a in axes])


OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "neg": torch.neg,
    "pow": torch.pow,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "log": torch.log,
    "log2": torch.log2,
    "log1p": torch.log1p,
    "sqrt": torch.sqrt,
    "abs": torch.abs,
    "min": torch.minimum,
    "max": torch.maximum,
    "clamp": lambda x, low, high: torch.minimum(torch.maximum(x, low), high),
    "sigmoid": torch.sigmoid,
    "logsigmoid": torch.nn.functional.logsigmoid,
    "softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    "silu": torch.nn.functional.silu,
    "tanh": torch.tanh,
    "relu": torch.relu,
}


class Evaluator:
    """Values of expressions over all tokens at once; the time axis is the layer's."""

    def __init__(
        self, layer: Layer, tensors: Mapping[str, Tensor | None], params: Mapping[str, float] | None = None
    ) -> None:
        unknown = [name for name in tensors if name not in {t.name for t in layer.inputs}]
        if unknown:
            raise ValueError(f"{layer.name} has no input `{unknown[0]}`")
        self.layer = layer
        self.sizes: dict[str, int] = {a.name: a.size for a in layer.axes if a.size is not None}
        self.names: dict[str, Array] = {}
        given = {name: value for name, value in tensors.items() if value is not None}
        self.device = next((v.device for v in given.values()), torch.device("cpu"))
        forms = {t.name: _form(t, given[t.name]) for t in layer.inputs if t.name in given}
        self._measure(given, forms)
        for p in layer.params:
            self.names[p.name] = self.number((params or {}).get(p.name, p.default))
        for t in layer.inputs:
            if t.name in given:
                self.names[t.name] = self._by_head(Array(given[t.name].to(torch.float64), forms[t.name]))
            elif t.default is not None:
                self.names[t.name] = self.number(t.default)
            elif t.required:
                raise ValueError(f"{layer.name} needs the input `{t.name}`")
        for let in layer.lets:
            self.names[let.name] = self.value(let.value)

    def number(self, value: float) -> Array:
        """A scalar."""
        return Array(torch.tensor(float(value), dtype=torch.float64, device=self.device), ())

    def value(self, expr: Expr) -> Array:
        """The value of `expr`, with a time axis if it varies from token to token."""
        match expr:
            case Ref(name=name, lag=lag):
                return self.shifted(self.names[name]) if lag else self.names[name]
        return self.apply(expr, self.value)

    def apply(self, expr: Expr, value: Callable[[Expr], Array]) -> Array:
        """The value of anything but a Ref, its operands evaluated by `value`."""
        match expr:
            case Const(value=number):
                return self.number(number)
            case Size(axis=axis):
                return self.number(self.sizes[axis])
            case Index(axis=axis):
                return Array(torch.arange(self.sizes[axis], dtype=torch.float64, device=self.device), (axis,))
            case Apply(op=op, args=args):
                return combine(OPERATIONS[op], *map(value, args))
            case Contract(left=left, right=right, axis=axis):
                return contract(value(left), value(right), axis)
        raise TypeError(f"no value without a context: {expr}")

    def shifted(self, array: Array) -> Array:
        """The value one token before: zero before the first."""
        time, length = self.layer.time, self.sizes[self.layer.time]
        axes = (time, *(a for a in array.axes if a != time))
        data = array.over(axes).expand(length, *array.over(axes).shape[1:])
        return Array(torch.cat([torch.zeros_like(data[:1]), data[:-1]]), axes)

    def _measure(self, given: dict[str, Tensor], forms: dict[str, Axes]) -> None:
        measured: dict[str, tuple[int, str]] = {}
        for name, axes in forms.items():
            for axis, size in zip(axes, given[name].shape, strict=True):
                known, owner = measured.setdefault(axis, (size, name))
                if known != size:
                    raise ValueError(f"axis `{axis}` is {size} in `{name}` but {known} in `{owner}`")
        self.sizes.update({axis: size for axis, (size, _) in measured.items()})

    def _by_head(self, array: Array) -> Array:
        """`array` with a group axis repeated for the consecutive heads that share each group."""
        for position, axis in enumerate(array.axes):
            head = self.layer.shared(axis)
            if head != axis:
                groups, heads = self.sizes[axis], self.sizes[head]
                if groups == 0 or heads % groups:
                    raise ValueError(f"{groups} groups `{axis}` do not divide {heads} of `{head}`")
                data = array.data.repeat_interleave(heads // groups, position)
                return Array(data, tuple(head if a == axis else a for a in array.axes))
        return array


def combine(operation: Callable[..., Tensor], *arrays: Array) -> Array:
    """An elementwise operation on arrays that broadcast by axis name."""
    axes = merge_axes(a.axes for a in arrays)
    return Array(operation(*(a.over(axes) for a in arrays)), axes)


def contract(left: Array, right: Array, axis: str) -> Array:
    """The sum of left * right over `axis`."""
    axes = merge_axes((left.axes, right.axes))
    letter = {a: i for i, a in enumerate(axes)}
    kept = tuple(a for a in axes if a != axis)
    operands = (left.data, [letter[a] for a in left.axes], right.data, [letter[a] for a in right.axes])
    return Array(torch.einsum(*operands, [letter[a] for a in kept]), kept)


def _form(declared: Input, given: Tensor) -> Axes:
    """The declared form of an input that has the rank of what was given."""
    forms = (declared.axes, *declared.narrower)
    for axes in forms:
        if len(axes) == given.ndim:
            return axes
    expected = " or ".join(f"[{' '.join(axes)}]" for axes in forms)
    raise ValueError(f"`{declared.name}` has {given.ndim} dimensions, expected {expected}")


class _Loop:
    def __init__(
        self,
        layer: Layer,
        tensors: Mapping[str, Tensor | None],
        params: Mapping[str, float],
        states: Mapping[str, Tensor | None],
    ) -> None:
        self.layer = layer
        self.evaluator = Evaluator(layer, tensors, params)
        self.present = {name for name, value in tensors.items() if value is not None}
        self.state_names = {s.name for s in layer.states}
        self.token = 0
        self.hoisted: dict[int, tuple[Array, ...] | None] = {}
        self.before: dict[str, Array] = {}
        self.after: dict[str, Array] = {s.name: self._initial(s.name, s.axes, states.get(s.name)) for s in layer.states}
        self.output: dict[str, Array] = {}

    def _initial(self, name: str, axes: Axes, given: Tensor | None) -> Array:
        sizes = self.evaluator.sizes
        if given is None:
            return Array(torch.zeros([sizes[a] for a in axes], dtype=torch.float64, device=self.evaluator.device), axes)
        fits = given.ndim == len(axes) and all(sizes.get(a, n) == n for a, n in zip(axes, given.shape, strict=True))
        if not fits:
            raise ValueError(f"the state `{name}` has shape {tuple(given.shape)}, expected [{' '.join(axes)}]")
        sizes.update(zip(axes, given.shape, strict=True))
        return Array(given.to(torch.float64), axes)

    def run(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        layer, sizes = self.layer, self.evaluator.sizes
        results: dict[str, list[Tensor]] = {o.name: [] for o in layer.outputs}
        for self.token in range(sizes[layer.time]):
            self.before = self.after
            self.after = {s.name: self._whole(self.value(s.update), s.axes) for s in layer.states}
            self.output = {}
            for o in layer.outputs:
                axes = tuple(a for a in o.axes if a != layer.time)
                self.output[o.name] = self._whole(self.value(o.value), axes)
                for gate in o.gates:
                    if gate.tensor in self.present:
                        self.output[o.name] = self._whole(self.value(gate.value), axes)
                results[o.name].append(self.output[o.name].data)
        outputs = {o.name: self._stack(results[o.name], o.axes) for o in layer.outputs}
        return outputs, {name: array.data for name, array in self.after.items()}

    def value(self, expr: Expr) -> Array:
        """The value of `expr` at the current token."""
        if id(expr) not in self.hoisted:
            self.hoisted[id(expr)] = self._tokens(self.evaluator.value(expr)) if self._is_hoistable(expr) else None
        hoisted = self.hoisted[id(expr)]
        if hoisted is not None:
            return hoisted[self.token]
        if not isinstance(expr, Ref):
            return self.evaluator.apply(expr, self.value)
        if expr.name in self.state_names:
            return (self.before if expr.lag else self.after)[expr.name]
        return self.output[expr.name]

    def _is_hoistable(self, expr: Expr) -> bool:
        """Whether `expr` is worth computing for all tokens at once: no state in it, and never as big as a state."""
        own = {*self.state_names, *(o.name for o in self.layer.outputs)}
        if any(isinstance(e, Ref) and e.name in own for e in walk(expr)):
            return False
        channels = set(axes_of(expr)) - {self.layer.batch, self.layer.head}
        return len(channels) <= 1 or not children(expr)

    def _tokens(self, array: Array) -> tuple[Array, ...]:
        """`array` at each token. Cut once for all: backward, every cut by itself would be as large as the whole."""
        time = self.layer.time
        if time not in array.axes:
            return (array,) * self.evaluator.sizes[time]
        axes = tuple(a for a in array.axes if a != time)
        return tuple(Array(x, axes) for x in array.data.unbind(array.axes.index(time)))

    def _whole(self, array: Array, axes: Axes) -> Array:
        """`array` with exactly `axes`, repeated over those it does not vary over."""
        return Array(array.over(axes).expand([self.evaluator.sizes[a] for a in axes]), axes)

    def _stack(self, tokens: list[Tensor], axes: Axes) -> Tensor:
        time = axes.index(self.layer.time)
        if tokens:
            return torch.stack(tokens, time)
        sizes = [self.evaluator.sizes[a] for a in axes]
        return torch.zeros(sizes, dtype=torch.float64, device=self.evaluator.device)
