"""Axis-aware printing of expressions over tiles: transposes and `[:, None]` follow from the axes asked for.

One algorithm, three dialects: `CUTILE` for kernels, `TORCH` and `JAX` for the portable path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ssdgen.ir.expr import Apply, Axes, Const, Contract, Expr, Ref, axes_of, merge_axes, refs

LOG2E = 1.4426950408889634
ATOM, UNARY, PRODUCT, SUM, COMPARISON, BITWISE = 5, 4, 3, 2, 0, 1
"""How tightly the outermost operation of a text binds."""

_INFIX = {
    "add": ("+", SUM),
    "sub": ("-", SUM),
    "mul": ("*", PRODUCT),
    "div": ("/", PRODUCT),
    "floordiv": ("//", PRODUCT),
    "ge": (">=", COMPARISON),
    "gt": (">", COMPARISON),
    "lt": ("<", COMPARISON),
    "eq": ("==", COMPARISON),
    "and": ("&", BITWISE),
}
_COMMUTES = {"add", "mul"}


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a target writes calls, permutations and sums."""

    calls: dict[str, str]
    permute: Callable[[str, Axes, Axes], str]
    total: Callable[[str, int], str]
    reciprocals: bool = False
    """Whether to divide by what lacks axes of the quotient as a product with its reciprocal, which is computed fewer times."""


@dataclass(frozen=True, slots=True)
class Text:
    """Printed code, how tightly it binds, and the axes of its value in order."""

    code: str
    level: int
    axes: Axes

    def at(self, level: int) -> str:
        """The code as an operand of something that binds at `level`."""
        return f"({self.code})" if self.level < level else self.code


class Printer:
    """Prints expressions in one dialect."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect

    def print(self, expr: Expr, axes: Axes, lift: bool = True) -> str:
        """`expr` with exactly `axes`, in that order. A number stays one, and without `lift` missing axes do too, where the
        reader's code broadcasts by itself."""
        text = self._show(expr, axes)
        return (self._lift(text, axes) if lift else text).code

    def _show(self, expr: Expr, order: Axes) -> Text:
        match expr:
            case Const():
                return Text(number(expr.value), ATOM if expr.value >= 0 else UNARY, ())
            case Ref(name=name, axes=axes):
                wanted = tuple(a for a in order if a in axes)
                if set(wanted) != set(axes):
                    raise ValueError(f"`{name}` has axes {axes}, of which {order} lacks some")
                code = name if wanted == axes else self._dialect.permute(name, axes, wanted)
                return Text(code, ATOM, wanted)
            case Contract(left=left, right=right, axis=axis):
                return self._contract(Apply("mul", (left, right)) if right != Const(1) else left, axis, order)
            case Apply(op="neg", args=(arg,)):
                inner = self._show(arg, order)
                return Text(f"-{inner.at(UNARY)}", UNARY, inner.axes)
            case Apply(op=op, args=args) if op in _INFIX:
                return self._infix(op, args, order)
            case Apply(op=op, args=args):
                axes = tuple(a for a in order if a in merge_axes(axes_of(x) for x in args))
                shown = [self._lift(self._show(a, order), axes) for a in args]
                return Text(self._dialect.calls[op].format(*(s.code for s in shown)), ATOM, axes)
            case _:
                raise TypeError(f"{expr!r} is no tile expression")

    def _infix(self, op: str, args: tuple[Expr, ...], order: Axes) -> Text:
        sign, level = _INFIX[op]
        axes = tuple(a for a in order if a in merge_axes(axes_of(x) for x in args))
        left, right = (self._show(a, order) for a in args)
        if op == "div" and self._dialect.reciprocals and args[0] != Const(1) and right.axes != axes:
            sign, right = "*", self._show(Apply("div", (Const(1), args[1])), order)
        left, right = (self._lift(text, axes) for text in (left, right))
        divides = isinstance(args[1], Apply) and args[1].op == "div"  # x * (1 / y), not (x * 1) / y
        tighter = level if op in _COMMUTES and not divides else level + 1
        if level in (COMPARISON, BITWISE):
            return Text(f"{left.at(level + 1)} {sign} {right.at(level + 1)}", level, axes)
        return Text(f"{left.at(level)} {sign} {right.at(tighter)}", level, axes)

    def _contract(self, product: Expr, axis: str, order: Axes) -> Text:
        """The sum over an axis of a product, which is laid out as a factor of it that has all axes lies, if there is one."""
        axes = (*(a for a in order if a in axes_of(product) and a != axis), axis)
        within = next((r.axes for r in refs(product) if set(r.axes) == set(axes)), axes)
        inner = self._lift(self._show(product, within), within)
        code = self._dialect.total(inner.code, within.index(axis))
        rest, wanted = (tuple(a for a in found if a != axis) for found in (within, axes))
        return Text(code if rest == wanted else self._dialect.permute(code, rest, wanted), ATOM, wanted)

    @staticmethod
    def _lift(text: Text, axes: Axes) -> Text:
        """`text` with a new axis of length 1 for each of `axes` it lacks; a number needs none."""
        if text.axes in ((), axes):
            return text
        index = ", ".join(":" if a in text.axes else "None" for a in axes)
        return Text(f"{text.at(ATOM)}[{index}]", ATOM, axes)


def number(value: int | float) -> str:
    """A constant as a float literal; log2(e) by its name."""
    return "LOG2E" if value == LOG2E else repr(float(value))


def _cutile_permute(code: str, axes: Axes, wanted: Axes) -> str:
    if len(axes) == 2:
        return f"ct.transpose({code})"
    return f"ct.permute({code}, {tuple(axes.index(a) for a in wanted)})"


CUTILE = Dialect(
    calls={
        "exp": "ct.exp({0})",
        "exp2": "exp2({0})",
        "log": "ct.log({0})",
        "log2": "ct.log2({0})",
        "log1p": "log1p({0})",
        "sqrt": "ct.sqrt({0})",
        "abs": "ct.abs({0})",
        "tanh": "ct.tanh({0})",
        "pow": "ct.pow({0}, {1})",
        "min": "ct.minimum({0}, {1})",
        "max": "ct.maximum({0}, {1})",
        "clamp": "clamp({0}, {1}, {2})",
        "relu": "ct.maximum({0}, 0.0)",
        "sigmoid": "sigmoid({0})",
        "logsigmoid": "log_sigmoid({0})",
        "softplus": "softplus({0})",
        "silu": "silu({0})",
        "sign": "sign({0})",
        "above": "above({0}, {1})",
        "within": "within({0}, {1}, {2})",
        "where": "ct.where({0}, {1}, {2})",
        "float32": "ct.astype({0}, ct.float32)",
    },
    permute=_cutile_permute,
    total=lambda code, at: f"ct.sum({code}, axis={at})",
    reciprocals=True,
)
"""Kernels: device functions of cuda.tile, and those of `_tiles.py`."""

TORCH = Dialect(
    calls={
        "exp": "torch.exp({0})",
        "exp2": "torch.exp2({0})",
        "log": "torch.log({0})",
        "log2": "torch.log2({0})",
        "log1p": "torch.log1p({0})",
        "sqrt": "torch.sqrt({0})",
        "abs": "torch.abs({0})",
        "tanh": "torch.tanh({0})",
        "pow": "torch.pow({0}, {1})",
        "min": "_rt.minimum({0}, {1})",
        "max": "_rt.maximum({0}, {1})",
        "clamp": "_rt.minimum(_rt.maximum({0}, {1}), {2})",
        "relu": "torch.relu({0})",
        "sigmoid": "torch.sigmoid({0})",
        "logsigmoid": "torch.nn.functional.logsigmoid({0})",
        "softplus": "_rt.softplus({0})",
        "silu": "torch.nn.functional.silu({0})",
        "where": "torch.where({0}, {1}, {2})",
    },
    permute=lambda code, axes, wanted: f"{code}.permute({', '.join(str(axes.index(a)) for a in wanted)})",
    total=lambda code, at: f"({code}).sum({at})",
)
"""The portable path: torch, and helpers of `_runtime.py`."""

JAX = Dialect(
    calls={
        "exp": "jnp.exp({0})",
        "exp2": "jnp.exp2({0})",
        "log": "jnp.log({0})",
        "log2": "jnp.log2({0})",
        "log1p": "jnp.log1p({0})",
        "sqrt": "jnp.sqrt({0})",
        "abs": "jnp.abs({0})",
        "tanh": "jnp.tanh({0})",
        "pow": "jnp.power({0}, {1})",
        "min": "_rt.minimum({0}, {1})",
        "max": "_rt.maximum({0}, {1})",
        "clamp": "_rt.minimum(_rt.maximum({0}, {1}), {2})",
        "relu": "jax.nn.relu({0})",
        "sigmoid": "jax.nn.sigmoid({0})",
        "logsigmoid": "jax.nn.log_sigmoid({0})",
        "softplus": "jax.nn.softplus({0})",
        "silu": "jax.nn.silu({0})",
        "where": "jnp.where({0}, {1}, {2})",
    },
    permute=lambda code, axes, wanted: f"jnp.transpose({code}, ({', '.join(str(axes.index(a)) for a in wanted)}))",
    total=lambda code, at: f"jnp.sum({code}, {at})",
)
"""The portable path for XLA: jax.numpy, whose functions of one argument take numbers too, and helpers of `_xla.py`."""
