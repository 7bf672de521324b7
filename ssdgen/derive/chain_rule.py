"""The chain rule over the expressions around a chunk: what each of them adds to the gradients of what it refers to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from ssdgen.derive.symbolic import Symbolic, partials
from ssdgen.ir.adjoint import Contribution, Gradient
from ssdgen.ir.expr import ONE, Apply, Axes, Contract, Expr, Ref, axes_of, is_per_token, mul, outermost, rewrite
from ssdgen.ir.layer import Layer

Target = Ref | Contract
"""What a gradient is of: an input, a let, a read or an output by a reference without lag, or a contraction."""


class ChainRule:
    """Gradients as sums of contributions: `pull` adds those of an expression, `gradient` is what there is by then."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.lets = {let.name: let.value for let in layer.lets}
        self.inputs = {t.name: t for t in layer.inputs}
        self.constant = {p.name for p in layer.params} | {o.name for o in layer.outputs}
        """What has no gradient here: a parameter has none, an output before a gate has its own."""
        self.terms: dict[Target, list[Contribution]] = defaultdict(list)

    def pull(
        self,
        expr: Expr,
        quantity: str,
        axes: Axes,
        lag: int = 0,
        weight: Expr = ONE,
        scale: Symbolic = 1,
        when: str | None = None,
    ) -> None:
        """Add what `expr` of the token `lag` before, times a number and the `weight` of this token, passes on of `quantity`.

        `quantity` is the name of its gradient at this token, with the axes `axes`, the time axis among them.
        """
        for leaf, derivative in partials(expr, scale):
            target = target_of(leaf)
            if not self.differentiable(target):
                continue
            ahead = lag + (leaf.lag if isinstance(leaf, Ref) else 0) if is_per_token(target) else 0
            factor = mul(weight, _earlier(derivative) if lag else derivative)
            self.terms[target].append(Contribution(factor, quantity, self.summed(axes, target), ahead, when))

    def pull_target(self, target: Target, name: str) -> None:
        """Add what a let or a contraction passes on of its gradient, called `name`."""
        axes = self.axes(target)
        if isinstance(target, Ref):
            self.pull(self.lets[target.name], name, axes)
        else:
            self.pull(product_of(target), name, self.ordered((*axes, target.axis)))

    def gradient(self, name: str, target: Target) -> Gradient:
        """The gradient of `target` as the sum of all that was pulled to it."""
        return Gradient(name, target, self.axes(target), tuple(self.terms.get(target, ())))

    def axes(self, target: Target) -> Axes:
        """The axes of a gradient: those of an input as it is declared, otherwise in the order of the layer."""
        if isinstance(target, Ref) and target.name in self.inputs:
            return self.inputs[target.name].axes
        return self.ordered((*axes_of(target), *((self.layer.time,) if is_per_token(target) else ())))

    def summed(self, axes: Axes, target: Target) -> Axes:
        """Those of `axes` that `target` does not have; a group's axis is not that of its heads."""
        return tuple(a for a in axes if a not in self.axes(target))

    def ordered(self, axes: Iterable[str]) -> Axes:
        """`axes` in the order of the layer."""
        wanted = set(axes)
        return tuple(a.name for a in self.layer.axes if a.name in wanted)

    def differentiable(self, target: Target) -> bool:
        """Whether `target` is an input or a read, or a let or a contraction that depends on one."""
        if isinstance(target, Contract):
            return self.depends_on_inputs(product_of(target))
        if target.name in self.lets:
            return self.depends_on_inputs(self.lets[target.name])
        return target.name not in self.constant

    def depends_on_inputs(self, expr: Expr) -> bool:
        """Whether an input, a read or an output occurs in `expr`, or in a let that does."""
        return any(map(self.differentiable, outermost(expr)))

    def intermediate(self, exprs: Iterable[Expr]) -> list[Target]:
        """The lets and contractions that `exprs` depend on and that depend on inputs, each before those it depends on."""
        heights: dict[Target, int] = {}

        def height(expr: Expr) -> int:
            return max((visit(target_of(e)) for e in outermost(expr)), default=0)

        def visit(target: Target) -> int:
            if not self.differentiable(target) or (isinstance(target, Ref) and target.name not in self.lets):
                return 0
            if target not in heights:
                value = product_of(target) if isinstance(target, Contract) else self.lets[target.name]
                heights[target] = 1 + height(value)
            return heights[target]

        for expr in exprs:
            height(expr)
        return sorted(heights, key=lambda target: -heights[target])


def target_of(leaf: Ref | Contract) -> Target:
    """What an occurrence is one of: a reference without its lag."""
    return replace(leaf, lag=0) if isinstance(leaf, Ref) else leaf


def product_of(contract: Contract) -> Expr:
    """What a contraction sums over its axis."""
    return Apply("mul", (contract.left, contract.right))


def _earlier(expr: Expr) -> Expr:
    """`expr` of the token before."""
    return rewrite(expr, lambda e: replace(e, lag=e.lag + 1) if isinstance(e, Ref) and e.per_token else None)
