"""What templates are filled with: the templates' environment, and the texts of parameters, docstrings and tables."""

from __future__ import annotations

import itertools
import math
import re
import textwrap
from types import CodeType

import jinja2
from jinja2.bccache import Bucket

from ssdgen.emit.buffers import DTYPES, made
from ssdgen.emit.host import Host, number
from ssdgen.emit.layout import WIDTH, broken, filled
from ssdgen.emit.statements import Commenter, CutileStatements, TorchStatements
from ssdgen.ir.expr import Axes
from ssdgen.ir.gradients import BackKernel, ChunkGradientKernel, EntryKernel, TokenGradientKernel
from ssdgen.ir.layer import Layer, Param, Tensor
from ssdgen.ir.plan import (
    KEY,
    GroupKernel,
    Kernel,
    Knob,
    OutputKernel,
    Parameter,
    Plan,
    StateKernel,
    StepKernel,
    TokenKernel,
    WalkKernel,
)
from ssdgen.resources import resource_dir

TEMPLATES: dict[type[Kernel], str] = {
    TokenKernel: "chunk_cumsum.py.j2",
    GroupKernel: "group_scores.py.j2",
    StateKernel: "fwd_pass_state.py.j2",
    OutputKernel: "compute_out.py.j2",
    WalkKernel: "walk_out.py.j2",
    StepKernel: "token_step.py.j2",
    EntryKernel: "entry_states.py.j2",
    BackKernel: "state_gradients.py.j2",
    ChunkGradientKernel: "chunk_gradients.py.j2",
    TokenGradientKernel: "token_gradients.py.j2",
}
"""The algorithm's skeleton for each kind of kernel."""

KINDS = {
    "constant": "ct.Constant[int]",
    "uniform": "ct.Constant[bool]",
    "flag": "ct.Constant[bool]",
    "state": "ct.IndexedWithInt64",
    "kept": "ct.IndexedWithInt64",
}
"""Annotations of the parameters of kernels that are neither arrays indexed with int32 nor numbers."""

HELPERS = (
    "above",
    "await_previous",
    "chunk_at",
    "clamp",
    "dot",
    "exp2",
    "f16_scale",
    "has_chunk",
    "inner",
    "load",
    "log1p",
    "log_sigmoid",
    "rows",
    "segment_at",
    "sigmoid",
    "sign",
    "silu",
    "softplus",
    "store",
    "sum_five",
    "sum_four",
    "sum_pair",
    "within",
)
"""What kernels call of `_tiles.py`."""

DIRECT = ("load_direct", "slot_at", "store_direct")
"""What kernels call of `_direct.py`."""


def tidy(kernel: str) -> str:
    """A kernel's text with at most one blank line between its parts."""
    return re.sub(r"\n{3,}", "\n\n", kernel).strip()


class _Compiled(jinja2.BytecodeCache):
    """Templates compiled in this process. They are the same for every plan, whose filters they look up when they print."""

    def __init__(self) -> None:
        self._codes: dict[tuple[str, str], CodeType] = {}

    def load_bytecode(self, bucket: Bucket) -> None:
        """Fill `bucket` if its text has been compiled."""
        bucket.code = self._codes.get((bucket.key, bucket.checksum))

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Keep what `bucket` holds."""
        if bucket.code is not None:
            self._codes[bucket.key, bucket.checksum] = bucket.code


_COMPILED = _Compiled()


def environment(plan: Plan) -> jinja2.Environment:
    """The templates, and the filters that print what a plan holds."""
    layer = plan.form.recurrence.layer
    loader = jinja2.FileSystemLoader(resource_dir("templates"))
    env = jinja2.Environment(
        loader=loader,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
        bytecode_cache=_COMPILED,
        optimized=False,  # it would compute filters of constants when it compiles, once for all plans
    )
    cutile = CutileStatements(layer)
    torch = TorchStatements(layer, einsum_letters(layer))
    comments = Commenter(layer)
    env.filters |= {
        "statement": lambda s, depth: cutile.statement(s, "    " * depth),
        "torch_statement": lambda s, depth: torch.statement(s, "    " * depth),
        "shape": comments.shape,
        "extents": cutile.extents,
        "parameters": _parameters,
        "docstring": _docstring,
        "string": string,
        "strings": lambda axes: "(" + ", ".join(map(string, axes)) + ("," if len(axes) == 1 else "") + ")",
        "number": number,
        "input_table": lambda t: _input_table(t, dict(plan.config.layouts).get(t.name, t.axes)),
        "output_dtype": lambda o: string(o.like) if o.like else DTYPES[o.dtypes[0]],
        "output_axes": lambda o: dict(plan.config.layouts).get(o.name, o.axes),
        "scalar_table": _scalar_table,
        "field": _field,
        "filled": lambda items, depth: "\n".join(filled(list(items), "    " * depth)),
        "call_lines": lambda args, head, function, depth: broken(
            head, f"{function}({', '.join(args)})", "    " * depth
        ),
        "assign_lines": lambda code, target, depth: broken(f"{target} = ", code, "    " * depth),
        "returned": _returned,
        "made": made,
        "launch_lines": lambda launch, depth: broken("", launch, "    " * depth),
        **Host(plan).filters(),
    }
    return env


def einsum_letters(layer: Layer) -> dict[str, str]:
    """One letter for each axis, its own where it can be."""
    letters: dict[str, str] = {}
    free = iter("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    for axis in layer.axes:
        if len(axis.name) == 1 and axis.name.isascii() and axis.name.isalpha():
            letters[axis.name] = axis.name
    for name in (*(a.name for a in layer.axes), KEY):
        if name not in letters:
            wanted = "s" if name == KEY else name[0]
            taken = set(letters.values())
            letters[name] = (
                wanted if wanted not in taken and wanted.isascii() else next(c for c in free if c not in taken)
            )
    return letters


def _parameters(kernel: Kernel) -> str:
    """The parameters of a kernel, a line or more for each kind."""

    def kind(p: Parameter) -> str:
        if p.role == "scalar":
            return "int" if p.dtype == "i32" else "float"
        return KINDS.get(p.role, "ct.Array")

    lines: list[str] = []
    for _, group in itertools.groupby(kernel.parameters, key=lambda p: KINDS.get(p.role, p.role)):
        lines += filled([f"{p.name}: {kind(p)}" for p in group], "    ")
    return "\n".join(lines)


def _docstring(text: str, depth: int) -> str:
    indent = "    " * depth
    width = 113 - len(indent)
    lines = [line for p in text.split("\n") for line in (textwrap.wrap(p, width) if len(p) > width else [p])]
    if len(lines) == 1:
        return f'{indent}"""{lines[0]}"""'
    return (
        f'{indent}"""'
        + "\n".join((indent + line).rstrip() if i else line for i, line in enumerate(lines))
        + f'\n{indent}"""'
    )


def _returned(values: list[str], depth: int) -> str:
    code = values[0] if len(values) == 1 else f"({', '.join(values)})"
    return broken("return ", code, "    " * depth)


def string(text: str) -> str:
    """A string literal."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _range(item: Tensor | Param) -> list[str]:
    r = item.range
    bounds = [(n, v) for n, v in (("low", r.low), ("high", r.high)) if not math.isinf(v)]
    flags = [
        n
        for n, v in (("low_open", r.low_open), ("high_open", r.high_open))
        if v and dict(bounds).get(n[:-5]) is not None
    ]
    return [*(f"{n}={number(v)}" for n, v in bounds), *(f"{n}=True" for n in flags)]


def _input_table(t: Tensor, axes: Axes) -> str:
    args = [string(t.name), _axes(axes), _axes_of_dtypes(t)]
    args += [f"like={string(t.like)}"] if t.like else []
    args += [f"narrower=({', '.join(_axes(a) for a in t.narrower)},)"] if t.narrower else []
    args += [f"default={number(t.default)}"] if t.default is not None else []
    args += ["optional=True"] if t.optional else []
    return f"_rt.Input({', '.join([*args, *_range(t)])})"


def _axes(axes: Axes) -> str:
    return f"({', '.join(map(string, axes))}{',' if len(axes) == 1 else ''})"


def _axes_of_dtypes(t: Tensor) -> str:
    names = [f"_rt.{d.upper()}" for d in t.dtypes]
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def _scalar_table(p: Param) -> str:
    return f"_rt.Scalar({', '.join([string(p.name), *_range(p)])})"


def _field(knob: Knob) -> str:
    default = dict(knob.defaults)["bf16"]
    kind = "str" if knob.kind == "precision" else "int"
    return f"{knob.name}: {kind} = {string(default) if isinstance(default, str) else default}  # {knob.doc}"


def configs(plan: Plan) -> list[tuple[str, str]]:
    """For each dtype, the fields of a Config that differ from the defaults."""
    out = []
    for dtype, torch_dtype in DTYPES.items():
        changed = []
        for knob in plan.knobs:
            values = dict(knob.defaults)
            if values[dtype] != values["bf16"]:
                value = values[dtype]
                changed.append(f"{knob.name}={string(value) if isinstance(value, str) else value}")
        out.append((torch_dtype, ", ".join(changed)))
    return out


def called(functions: tuple[str, ...], kernels: list[str]) -> list[str]:
    """Those of `functions` that the text of `kernels` calls."""
    text = "\n".join(kernels)
    return [h for h in functions if re.search(rf"(?<![\w.]){h}\(", text)]


def imported(module: str, names: list[str]) -> str:
    """The line, or lines, that import `names` from `module`; empty for none."""
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= WIDTH or not names:
        return line if names else ""
    return "\n".join([f"from {module} import (", *(f"    {name}," for name in names), ")"])
