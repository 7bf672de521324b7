"""Statements of the portable path as lines of JAX: einsums over all chunks at once, nothing in place."""

from __future__ import annotations

from ssdgen.emit.layout import assign
from ssdgen.emit.printer import JAX, Printer
from ssdgen.emit.statements import Commenter
from ssdgen.ir.expr import Apply, Axes, Const, Expr, Ref, axes_of, merge_axes, mul
from ssdgen.ir.layer import Layer
from ssdgen.ir.plan import Cumsum, Last, Let
from ssdgen.ir.portable import AddProduct, Einsum, PortableStatement, Scale, Shift, Slice


class JaxStatements:
    """Prints the statements of the portable path. `order` is the order of the axes of what has no name; without `matrices`,
    products are sums of an elementwise one, which XLA fuses with what else is done to their operands."""

    def __init__(self, layer: Layer, letters: dict[str, str], order: Axes, matrices: bool) -> None:
        self._time, self._letters, self._order, self._matrices = layer.time, letters, order, matrices
        self._comment = Commenter(layer)
        self._printer = Printer(JAX)

    def expr(self, expr: Expr, axes: Axes) -> str:
        """An expression with exactly these axes."""
        return self._printer.print(expr, axes)

    def statement(self, s: PortableStatement, indent: str) -> str:
        """The lines of a statement."""
        target, shape = s.target, self._comment.shape(s.target.axes)
        match s:
            case Let(value=value, line=line):
                code = assign(target.name, self.expr(value, target.axes), indent, shape)
                spec = self._comment.spec(line)
                return code if spec is None else f"{indent}{spec}\n{code}"
            case Cumsum(value=value):
                at = target.axes.index(self._time)
                return assign(target.name, f"_rt.summed({self.expr(value, target.axes)}, {at})", indent, shape)
            case Last(value=value):
                at = value.axes.index(self._time)
                return assign(target.name, f"{value.name}[{':, ' * at}-1]", indent, shape)
            case Slice():
                raise ValueError(f"`{target.name}` is cut before the chunks are computed")
            case Shift(source=source):
                return assign(
                    target.name, f"_rt.shifted({source.name}, {source.axes.index(self._time)})", indent, shape
                )
            case Einsum(factors=factors):
                return assign(target.name, self._product(target, factors), indent, shape)
            case Scale(factor=factor):
                return assign(target.name, self.expr(mul(factor, target), target.axes), indent, shape)
            case AddProduct(left=left, right=right):
                added = Apply("add", (target, mul(left, right)))
                return assign(target.name, self.expr(added, target.axes), indent, shape)

    def _product(self, target: Ref, factors: tuple[Expr, ...]) -> str:
        """A product of matrices if there are two factors and no more; else the sum of an elementwise product."""
        scales = [f for f in factors if not axes_of(f)]
        arrays = [f for f in factors if axes_of(f)]
        present = merge_axes(axes_of(f) for f in arrays)
        if not self._matrices or len(arrays) != 2:
            axes = tuple(a for a in self._order if a in present)
            summed = [i for i, a in enumerate(axes) if a not in target.axes]
            over = str(summed[0]) if len(summed) == 1 else str(tuple(summed))
            code = f"jnp.sum({self.expr(mul(*scales, *arrays), axes)}, {over})"
            rest = tuple(a for a in axes if a in target.axes)
            found = Ref("found", rest)
            return self.expr(found, target.axes).replace("found", code, 1)
        texts, subscripts = [], []
        for factor in arrays:
            own = axes_of(factor)
            axes = own if isinstance(factor, Ref) else tuple(a for a in self._order if a in own)
            texts.append(self.expr(factor, axes))
            subscripts.append("".join(self._letters[a] for a in axes))
        out = "".join(self._letters[a] for a in target.axes if a in present)
        code = f'product("{",".join(subscripts)}->{out}", {", ".join(texts)})'
        if len(out) < len(target.axes):
            code += f"[{', '.join(':' if a in present else 'None' for a in target.axes)}]"
        return " * ".join([*(self.expr(s, ()) for s in scales if s != Const(1)), code])
