"""Plan -> ModuleSource: fill the templates. What varies from run to run does not occur; what varies by spec comes last."""

from __future__ import annotations

import hashlib
import re
import textwrap
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import ssdgen
from ssdgen.emit.environment import DIRECT, HELPERS, TEMPLATES, called, configs, environment, string, tidy
from ssdgen.emit.gradients import emit_gradients
from ssdgen.emit.host import Host
from ssdgen.emit.layout import WIDTH
from ssdgen.emit.printer import LOG2E
from ssdgen.emit.step import StepHost
from ssdgen.ir.expr import Apply, Ref, mul, to_text
from ssdgen.ir.layer import Axis
from ssdgen.ir.plan import Plan
from ssdgen.ir.schedule import KERNELS, PRODUCTS
from ssdgen.plan import Unsupported, variant
from ssdgen.plan.config import default_config, knobs

SUPPORT = (
    "_blocks.py",
    "_conv.py",
    "_cut.py",
    "_direct.py",
    "_driver.py",
    "_gradients.py",
    "_kept.py",
    "_launch.py",
    "_norms.py",
    "_operator.py",
    "_packed.py",
    "_projection.py",
    "_reach.py",
    "_replay.py",
    "_runtime.py",
    "_segments.py",
    "_step.py",
    "_step_call.py",
    "_sums.py",
    "_tiles.py",
    "_tuned.py",
    "causal_conv.py",
    "norms.py",
    "projection.py",
)
"""Files that stand beside emitted modules, copied as they are; without an underscore, for users, as the modules are."""


@dataclass(frozen=True, slots=True)
class ModuleSource:
    """An emitted module: its name, its text, the plan it is printed from, and the files it needs beside it. `gradients` is the
    text of the module of its gradients, if they have kernels; `tuned` says whether tuning tables are about it."""

    name: str
    text: str
    plan: Plan
    support: tuple[tuple[str, str], ...]
    gradients: str = ""
    tuned: bool = True

    def __str__(self) -> str:
        return self.text


def emit(plan: Plan, portable_only: bool = False) -> ModuleSource:
    """Print the module of a plan.

    Raises Unsupported for a plan without kernels, unless `portable_only` asks for the portable path alone.
    """
    if plan.refused and not portable_only:
        raise Unsupported(plan.refused)
    layer = plan.form.recurrence.layer
    env = environment(plan)
    host = Host(plan)
    every = (*plan.kernels, *plan.step.kernels)
    kernels = [tidy(env.get_template(TEMPLATES[type(k)]).render(k=k)) for k in every]
    text = env.get_template("module.py.j2").render(
        doc=module_doc(plan),
        kernels=kernels,
        helpers=called(HELPERS, kernels),
        direct=called(DIRECT, kernels),
        plan=plan,
        knobs=plan.knobs,
        configs=configs(plan),
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
    gradients = "" if plan.gradients is None or portable_only else emit_gradients(plan.gradients)
    return ModuleSource(layer.name, text, plan, support_files(), gradients)


def _variant(plan: Plan) -> str:
    """The structural knobs, and the numeric ones that are not the spec's own defaults: a tuned table is for one of these."""
    own = {k.name: k.defaults for k in knobs(default_config(plan.form), PRODUCTS, {role: role for role in KERNELS})}
    other = [k for k in plan.knobs if k.defaults != own.get(k.name, k.defaults)]
    return " ".join([variant(plan.config), *(f"{k.name}={dict(k.defaults)['bf16']}" for k in other)])


@cache
def support_files() -> tuple[tuple[str, str], ...]:
    """The files that emitted modules import, by name."""
    folder = files("ssdgen.emit.support")
    return tuple((name, folder.joinpath(name).read_text(encoding="utf-8")) for name in SUPPORT)


def _assigned(name: str, words: str) -> str:
    """`name = "words"`, over several lines if it is too long for one."""
    line = f"{name} = {string(words)}"
    if len(line) <= WIDTH:
        return line
    pieces = textwrap.wrap(words, WIDTH - 7)
    parts = [*(f"{piece} " for piece in pieces[:-1]), pieces[-1]]
    return "\n".join([f"{name} = (", *(f"    {string(part)}" for part in parts), ")"])


def module_doc(plan: Plan) -> str:
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
