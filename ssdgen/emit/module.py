"""Plan -> ModuleSource: fill the templates. What varies from run to run does not occur; what varies by spec comes last."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
import textwrap
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import jinja2

import ssdgen
from ssdgen.emit.host import DTYPES, Host, number
from ssdgen.emit.layout import WIDTH, broken, filled
from ssdgen.emit.printer import LOG2E
from ssdgen.emit.statements import Commenter, CutileStatements, TorchStatements
from ssdgen.emit.step import StepHost
from ssdgen.ir.expr import Apply, Axes, Ref, mul, to_text
from ssdgen.ir.layer import Axis, Layer, Param, Tensor
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
from ssdgen.ir.schedule import KERNELS, PRODUCTS
from ssdgen.plan import Unsupported, variant
from ssdgen.plan.config import default_config, knobs
from ssdgen.resources import resource_dir

SUPPORT = (
    "_blocks.py",
    "_conv.py",
    "_cut.py",
    "_direct.py",
    "_kept.py",
    "_launch.py",
    "_operator.py",
    "_packed.py",
    "_runtime.py",
    "_segments.py",
    "_step.py",
    "_step_call.py",
    "_tiles.py",
    "_tuned.py",
    "causal_conv.py",
)
"""Files that stand beside emitted modules, copied as they are; `causal_conv.py` is for users, as the modules are."""

TEMPLATES: dict[type[Kernel], str] = {
    TokenKernel: "chunk_cumsum.py.j2",
    GroupKernel: "group_scores.py.j2",
    StateKernel: "fwd_pass_state.py.j2",
    OutputKernel: "compute_out.py.j2",
    WalkKernel: "walk_out.py.j2",
    StepKernel: "token_step.py.j2",
}
"""The algorithm's skeleton for each kind of kernel."""

KINDS = {
    "constant": "ct.Constant[int]",
    "flag": "ct.Constant[bool]",
    "state": "ct.IndexedWithInt64",
    "kept": "ct.IndexedWithInt64",
}
"""Annotations of the parameters of kernels that are neither arrays indexed with int32 nor numbers."""

HELPERS = (
    "await_previous",
    "chunk_at",
    "clamp",
    "dot",
    "exp2",
    "load",
    "log1p",
    "log_sigmoid",
    "magnitude",
    "segment_at",
    "sigmoid",
    "silu",
    "softplus",
    "store",
)
"""What kernels call of `_tiles.py`."""

DIRECT = ("load_direct", "slot_at", "store_direct")
"""What kernels call of `_direct.py`."""


@dataclass(frozen=True, slots=True)
class ModuleSource:
    """An emitted module: its name, its text, the plan it is printed from, and the files it needs beside it."""

    name: str
    text: str
    plan: Plan
    support: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return self.text


def emit(plan: Plan, portable_only: bool = False) -> ModuleSource:
    """Print the module of a plan.

    Raises Unsupported for a plan without kernels, unless `portable_only` asks for the portable path alone.
    """
    if plan.refused and not portable_only:
        raise Unsupported(plan.refused)
    layer = plan.form.recurrence.layer
    env = _environment(plan)
    host = Host(plan)
    every = (*plan.kernels, *plan.step.kernels)
    kernels = [_tidy(env.get_template(TEMPLATES[type(k)]).render(k=k)) for k in every]
    text = env.get_template("module.py.j2").render(
        doc=_module_doc(plan),
        kernels=kernels,
        helpers=_called(HELPERS, kernels),
        direct=_called(DIRECT, kernels),
        plan=plan,
        knobs=plan.knobs,
        configs=_configs(plan),
        digest=hashlib.sha256(layer.source.text.encode()).hexdigest(),
        version=ssdgen.__version__,
        variant=_assigned("VARIANT", _variant(plan)),
        steps=StepHost(plan, host).context(),
        no_steps=f"{layer.name}: no steps are emitted for {plan.step.refused}",
        **host.context(),
    )
    text = re.sub(r"\n+(?=\n(def|@|class|VARIANT|CONFIGS) ?)", "\n\n", text).strip() + "\n"
    if "math." not in text:
        text = text.replace("import math\n", "")
    return ModuleSource(layer.name, text, plan, support_files())


def _variant(plan: Plan) -> str:
    """The structural knobs, and the numeric ones that are not the spec's own defaults: a tuned table is for one of these."""
    own = {k.name: k.defaults for k in knobs(default_config(plan.form), PRODUCTS, {role: role for role in KERNELS})}
    other = [k for k in plan.knobs if k.defaults != own.get(k.name, k.defaults)]
    return " ".join([variant(plan.config), *(f"{k.name}={dict(k.defaults)['bf16']}" for k in other)])


def _tidy(kernel: str) -> str:
    """A kernel's text with at most one blank line between its parts."""
    return re.sub(r"\n{3,}", "\n\n", kernel).strip()


@cache
def support_files() -> tuple[tuple[str, str], ...]:
    """The files that emitted modules import, by name."""
    folder = files("ssdgen.emit.support")
    return tuple((name, folder.joinpath(name).read_text(encoding="utf-8")) for name in SUPPORT)


def _environment(plan: Plan) -> jinja2.Environment:
    layer = plan.form.recurrence.layer
    loader = jinja2.FileSystemLoader(resource_dir("templates"))
    env = jinja2.Environment(
        loader=loader, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False
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
        "string": _string,
        "strings": lambda axes: "(" + ", ".join(map(_string, axes)) + ("," if len(axes) == 1 else "") + ")",
        "number": number,
        "input_table": lambda t: _input_table(t, dict(plan.config.layouts).get(t.name, t.axes)),
        "output_dtype": lambda o: _string(o.like) if o.like else DTYPES[o.dtypes[0]],
        "output_axes": lambda o: dict(plan.config.layouts).get(o.name, o.axes),
        "scalar_table": _scalar_table,
        "field": _field,
        "filled": lambda items, depth: "\n".join(filled(list(items), "    " * depth)),
        "call_lines": lambda args, head, function, depth: broken(
            head, f"{function}({', '.join(args)})", "    " * depth
        ),
        "assign_lines": lambda code, target, depth: broken(f"{target} = ", code, "    " * depth),
        "returned": _returned,
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
    for _, group in itertools.groupby(kernel.parameters, key=lambda p: p.role):
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


def _assigned(name: str, words: str) -> str:
    """`name = "words"`, over several lines if it is too long for one."""
    line = f"{name} = {_string(words)}"
    if len(line) <= WIDTH:
        return line
    pieces = textwrap.wrap(words, WIDTH - 7)
    parts = [*(f"{piece} " for piece in pieces[:-1]), pieces[-1]]
    return "\n".join([f"{name} = (", *(f"    {_string(part)}" for part in parts), ")"])


def _string(text: str) -> str:
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
    args = [_string(t.name), _axes(axes), _axes_of_dtypes(t)]
    args += [f"like={_string(t.like)}"] if t.like else []
    args += [f"narrower=({', '.join(_axes(a) for a in t.narrower)},)"] if t.narrower else []
    args += [f"default={number(t.default)}"] if t.default is not None else []
    args += ["optional=True"] if t.optional else []
    return f"_rt.Input({', '.join([*args, *_range(t)])})"


def _axes(axes: Axes) -> str:
    return f"({', '.join(map(_string, axes))}{',' if len(axes) == 1 else ''})"


def _axes_of_dtypes(t: Tensor) -> str:
    names = [f"_rt.{d.upper()}" for d in t.dtypes]
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def _scalar_table(p: Param) -> str:
    return f"_rt.Scalar({', '.join([_string(p.name), *_range(p)])})"


def _field(knob: Knob) -> str:
    default = dict(knob.defaults)["bf16"]
    kind = "str" if knob.kind == "precision" else "int"
    return f"{knob.name}: {kind} = {_string(default) if isinstance(default, str) else default}  # {knob.doc}"


def _configs(plan: Plan) -> list[tuple[str, str]]:
    out = []
    for dtype, torch_dtype in DTYPES.items():
        changed = []
        for knob in plan.knobs:
            values = dict(knob.defaults)
            if values[dtype] != values["bf16"]:
                value = values[dtype]
                changed.append(f"{knob.name}={_string(value) if isinstance(value, str) else value}")
        out.append((torch_dtype, ", ".join(changed)))
    return out


def _called(functions: tuple[str, ...], kernels: list[str]) -> list[str]:
    text = "\n".join(kernels)
    return [h for h in functions if re.search(rf"(?<![\w.]){h}\(", text)]


def _module_doc(plan: Plan) -> str:
    """The recurrence, the jump formula it is computed by, and what the letters stand for."""
    layer, form = plan.form.recurrence.layer, plan.form
    lines = [f"{layer.title}.", "", "The forward pass of", ""]
    for s in layer.states:
        update = Apply("add", (mul(s.decay, Ref(s.name, s.axes, True, 1)), s.input))
        lines.append(f"    {s.name}[{layer.time}] = {to_text(update, layer.time)}")
    lines += ["", "emitted by ssdgen, as the jump formula over chunks of L tokens:", ""]
    lines += [f"    {line}".rstrip() for line in str(form).splitlines()[2:]]
    lines += ["", *textwrap.wrap(f"Axes: {', '.join(_axis(plan, a) for a in layer.axes)}.", 112)]
    return "\n".join(lines).replace(repr(LOG2E), "LOG2E").replace("\\", "\\\\").replace('"""', "'''") + "\n"


def _axis(plan: Plan, axis: Axis) -> str:
    """`h head`, `n = 128 column channel`: a letter, the length it is compiled for ahead of time, its part in the states."""
    layer, states = plan.form.recurrence.layer, plan.form.states
    parts = {layer.batch: "batch", layer.time: "time", layer.head: "head"}
    parts |= {g.axis: f"group of {g.shared}" for g in layer.groups}
    parts |= {s.row_axis: "row channel" for s in states if s.row_axis} | {
        s.column_axis: "column channel" for s in states
    }
    size = f" = {axis.size}" if axis.size else ""
    return f"{axis.name}{size} {parts.get(axis.name, 'channel')}"
