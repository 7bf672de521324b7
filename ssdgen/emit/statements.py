"""Statements of a plan as lines of code: loads, lets, products and stores, with tile shapes as comments."""

from __future__ import annotations

from collections.abc import Iterable

from ssdgen.emit.layout import INDENT, assign, broken
from ssdgen.emit.printer import CUTILE, TORCH, Printer
from ssdgen.ir.expr import Axes, Const, Expr, Ref, axes_of, merge_axes, mul
from ssdgen.ir.layer import Layer
from ssdgen.ir.plan import (
    CHUNKS,
    KEY,
    NUMBERS,
    Cumsum,
    Dot,
    HalfScale,
    If,
    Inner,
    Last,
    Let,
    Load,
    Round,
    Rows,
    Statement,
    Store,
    SumTogether,
    When,
    Zeros,
)
from ssdgen.ir.portable import AddProduct, Einsum, PortableStatement, Scale, Shift, Slice

TOGETHER = {2: "sum_pair", 4: "sum_four", 5: "sum_five"}
"""Device functions that sum tiles together, by how many."""


class Commenter:
    """What comments say: tile shapes in capitals, and lines of the spec."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._file = layer.source.path.replace("\\", "/").rsplit("/", 1)[-1]

    def shape(self, axes: Axes) -> str:
        """`[L, P]` for a tile with axes (time, p): L is the chunk's length, C the number of chunks side by side."""
        known = {self._layer.time: "L", KEY: "L", CHUNKS: "C", NUMBERS: "2"}
        return f"[{', '.join(known.get(a, a.upper()) for a in axes)}]" if axes else ""

    def spec(self, line: int | None) -> str | None:
        """A comment that quotes a line of the spec."""
        if line is None:
            return None
        text = self._layer.source.line(line).split("#")[0]
        return f"# {self._file}:{line}  {' '.join(text.removeprefix('let').split())}"


class CutileStatements:
    """Prints the statements of kernels."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._comment = Commenter(layer)
        self._printer = Printer(CUTILE)

    def expr(self, expr: Expr, axes: Axes) -> str:
        """An expression with exactly these axes."""
        return self._printer.print(expr, axes)

    def statement(self, s: Statement, indent: str) -> str:
        """The lines of a statement."""
        match s:
            case Load():
                return self._load(s, indent)
            case Let(target=target, value=value, line=line, note=note):
                shape = self._comment.shape(target.axes)
                comment = ": ".join(part for part in (shape, note) if part)
                text = self.expr(value, target.axes)
                if target.axes and isinstance(value, Const):
                    text = f"ct.full({self.extents(target.axes)}, {text}, dtype=ct.float32)"
                code = assign(target.name, text, indent, comment)
                spec = self._comment.spec(line)
                return code if spec is None else f"{indent}{spec}\n{code}"
            case Zeros(target=target):
                code = f"ct.zeros({self.extents(target.axes)}, dtype=ct.float32)"
                return assign(target.name, code, indent, self._comment.shape(target.axes))
            case Cumsum(target=target, value=value, back=back):
                code = f"ct.cumsum({self.expr(value, target.axes)}, axis=0{', reverse=True' if back else ''})"
                return assign(target.name, code, indent, self._comment.shape(target.axes))
            case Last(target=target, value=value):
                return assign(
                    target.name, f"ct.extract({value.name}, index=(CHUNK - 1,), shape=(1,)).reshape(())", indent
                )
            case Rows(targets=targets, value=value):
                names = ", ".join(t.name for t in targets)
                return assign(names, f"rows({value.name})", indent, self._comment.shape(targets[0].axes))
            case HalfScale(target=target, value=value, over=over):
                code = f"f16_scale({value.name}, {value.axes.index(over)})"
                return assign(target.name, code, indent, self._comment.shape(target.axes))
            case Dot():
                return self._dot(s, indent)
            case Inner(target=target, left=left, right=right, over=over, precision=precision):
                axes = (*target.axes, over)
                operands = ", ".join(self.expr(tile, axes) for tile in (left, right))
                code = f"inner({operands}, {precision})"
                return assign(target.name, code, indent, self._comment.shape(target.axes))
            case SumTogether(targets=targets, values=values, over=over):
                each = zip(targets, values, over, strict=True)
                operands = ", ".join(self.expr(value, (*target.axes, axis)) for target, value, axis in each)
                code = f"{TOGETHER[len(targets)]}({operands})"
                names = ", ".join(t.name for t in targets)
                return assign(names, code, indent, self._comment.shape(targets[0].axes))
            case Round(target=target, value=value, array=array):
                return assign(target.name, f"ct.astype({value.name}, {array}.dtype)", indent)
            case Store():
                return self._store(s, indent)
            case When(flag=flag, body=body, otherwise=otherwise):
                return self._branches(((f"if {flag}:", body), ("else:", otherwise)), indent)
            case If(condition=condition, body=body):
                return self._branches(((f"if {condition}:", body),), indent)

    def extents(self, axes: Axes) -> str:
        """The shape of a tile with these axes."""
        time = (self._layer.time, KEY)
        return _tuple("CHUNK" if a in time else f"TILE_{a.upper()}" for a in axes)

    def _branches(self, parts: Iterable[tuple[str, tuple[Statement, ...]]], indent: str) -> str:
        lines = [
            "\n".join([f"{indent}{head}", *(self.statement(x, indent + INDENT) for x in body)])
            for head, body in parts
            if body
        ]
        return "\n".join(lines)

    def _load(self, s: Load, indent: str) -> str:
        args = [s.array, _tuple(slot.index for slot in s.slots), _tuple(slot.extent for slot in s.slots)]
        args += [s.whole] if s.whole else []
        args += [f"order={s.order}"] if s.order else []
        args += [f"latency={s.latency}"] if s.latency else []
        args += [f"uniform={_tuple(flag or 'False' for flag in s.uniform)}"] if s.uniform else []
        cast = ".astype(ct.float32)" if s.cast else ""
        code = f"{'load_direct' if s.whole else 'load'}({', '.join(args)}){cast}"
        return assign(s.target.name, code, indent, self._comment.shape(s.target.axes))

    def _dot(self, s: Dot, indent: str) -> str:
        m, n = s.target.axes
        first, second = s.factors
        left, right = (first, second) if m in axes_of(first) else (second, first)
        args = [
            self.expr(left, (m, s.over)),
            self.expr(right, (s.over, n)),
            self.expr(s.accumulator, (m, n)),
            s.precision,
        ]
        return assign(s.target.name, f"dot({', '.join(args)})", indent, self._comment.shape(s.target.axes))

    def _store(self, s: Store, indent: str) -> str:
        args = [
            s.array,
            _tuple(slot.index for slot in s.slots),
            _tuple(slot.extent for slot in s.slots),
            self.expr(s.value, s.axes),
            *([s.whole] if s.whole else []),
            *([f"latency={s.latency}"] if s.latency else []),
        ]
        return broken("", f"{'store_direct' if s.whole else 'store'}({', '.join(args)})", indent)


class TorchStatements:
    """Prints the statements of the portable path."""

    def __init__(self, layer: Layer, letters: dict[str, str]) -> None:
        self._layer, self._letters = layer, letters
        first = (layer.batch, layer.time, KEY, layer.head)
        self._order = (*first, *(a.name for a in layer.axes if a.name not in first))
        self._comment = Commenter(layer)
        self._printer = Printer(TORCH)

    def expr(self, expr: Expr, axes: Axes) -> str:
        """An expression with exactly these axes."""
        return self._printer.print(expr, axes)

    def statement(self, s: PortableStatement, indent: str) -> str:
        """The lines of a statement."""
        shape = self._comment.shape(s.target.axes)
        time = self._layer.time
        match s:
            case Let(target=target, value=value, line=line):
                code = assign(target.name, self.expr(value, target.axes), indent, shape)
                spec = self._comment.spec(line)
                return code if spec is None else f"{indent}{spec}\n{code}"
            case Cumsum(target=target, value=value):
                at = target.axes.index(time)
                return assign(target.name, f"torch.cumsum({self.expr(value, target.axes)}, {at})", indent, shape)
            case Last(target=target, value=value):
                at = value.axes.index(time)
                return assign(target.name, f"{value.name}[{':, ' * at}-1]", indent, shape)
            case Slice(target=target, source=source):
                return assign(target.name, f"{source.name}[{':, ' * source.axes.index(time)}now]", indent, shape)
            case Shift(target=target, source=source):
                return assign(target.name, f"_rt.shifted({source.name}, {source.axes.index(time)})", indent, shape)
            case Einsum(target=target, factors=factors):
                return self._einsum(target, factors, indent, shape)
            case Scale(target=target, factor=factor):
                return f"{indent}{target.name}.mul_({self.expr(factor, target.axes)})"
            case AddProduct(target=target, left=left, right=right):
                if not axes_of(left):
                    return broken("", f"{target.name}.add_({self.expr(mul(left, right), target.axes)})", indent)
                product = ", ".join(self.expr(f, target.axes) for f in (left, right))
                return broken("", f"{target.name}.addcmul_({product})", indent)

    def _einsum(self, target: Ref, factors: tuple[Expr, ...], indent: str, shape: str) -> str:
        texts, subscripts = [], []
        numbers = [self.expr(factor, ()) for factor in factors if not axes_of(factor) and factor != Const(1)]
        for factor in factors:
            if not axes_of(factor):
                continue
            axes = factor.axes if isinstance(factor, Ref) else tuple(a for a in self._order if a in axes_of(factor))
            texts.append(self.expr(factor, axes))
            subscripts.append("".join(self._letters[a] for a in axes))
        present = merge_axes(axes_of(f) for f in factors)
        out = "".join(self._letters[a] for a in target.axes if a in present)
        code = f'torch.einsum("{",".join(subscripts)}->{out}", {", ".join(texts)})'
        if len(out) < len(target.axes):
            code += f"[{', '.join(':' if a in present else 'None' for a in target.axes)}]"
        return assign(target.name, " * ".join([*numbers, code]), indent, shape)


def _tuple(items: Iterable[str]) -> str:
    """A Python tuple of code strings."""
    texts = list(items)
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"
