"""Plan -> ModuleSource for XLA: the portable path with its chunks side by side, as pure functions of JAX."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import Any

import ssdgen
from ssdgen.emit.environment import einsum_letters, environment
from ssdgen.emit.host import Host, number, quoted, tupled
from ssdgen.emit.jax_statements import JaxStatements
from ssdgen.emit.layout import broken
from ssdgen.emit.module import ModuleSource, module_doc
from ssdgen.ir.expr import Apply, Axes, Expr
from ssdgen.ir.layer import State
from ssdgen.ir.plan import CHUNKS, KEY, Plan
from ssdgen.ir.portable import ChunkMove, PortableInput, PortableOutput

SUPPORT = "_xla.py"
"""The one file beside emitted modules for XLA, copied as it is."""

NAME = "{}_jax"
"""What the module of a layer is called."""


def emit_jax(plan: Plan) -> ModuleSource:
    """Print the module for XLA of a plan: every plan has one, for it is the portable path.

    Steps that the plan has none of are refused by the module, with the plan's reason.
    """
    layer, host = plan.form.recurrence.layer, _JaxHost(plan)
    env = environment(plan)
    letters = einsum_letters(layer)
    letters[CHUNKS] = next(c for c in "cabdefghijklmnopqrstuvwxyz" if c not in letters.values())
    whole = JaxStatements(layer, letters, host.order, matrices=True)
    step = JaxStatements(layer, letters, tuple(a.name for a in layer.axes), matrices=False)
    env.filters |= {
        "jax_statement": lambda s, depth: whole.statement(s, "    " * depth),
        "jax_step_statement": lambda s, depth: step.statement(s, "    " * depth),
        "assign_lines_of": lambda names, code, depth: broken(f"{names} = ", code, "    " * depth),
        "output_dtype": lambda o: f'"{o.like}"' if o.like else f"_rt.{o.dtypes[0].upper()}",
    }
    text = env.get_template("jax.py.j2").render(
        doc=module_doc(plan),
        digest=hashlib.sha256(layer.source.text.encode()).hexdigest(),
        version=ssdgen.__version__,
        no_steps=f"{layer.name}: no steps are emitted for {plan.step.refused}",
        **host.context(whole),
    )
    text = re.sub(r"\n+(?=\n(def|SPEC_DIGEST) ?)", "\n\n", text)
    if "LOG2E" not in text.partition("\nLOG2E = ")[2]:
        text = text.replace("LOG2E = math.log2(math.e)\n\n", "", 1)
    for name, use in (("math", "math."), ("jax", "jax.nn.")):
        text = text if use in text else text.replace(f"import {name}\n", "", 1)
    return ModuleSource(NAME.format(layer.name), text.strip() + "\n", plan, jax_support(), tuned=False)


@cache
def jax_support() -> tuple[tuple[str, str], ...]:
    """The files that emitted modules for XLA import, by name."""
    return ((SUPPORT, files("ssdgen.emit.support").joinpath(SUPPORT).read_text(encoding="utf-8")),)


class _JaxHost:
    """Names, lists of arguments and lines for the template `jax.py.j2` of one plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._names = plan, Host(plan)
        self._layer = plan.form.recurrence.layer
        self._group = plan.chunks.group
        self._layouts = dict(plan.config.layouts)
        layer = self._layer
        first = (CHUNKS, layer.batch, *((self._group,) if self._group else ()), layer.head, layer.time, KEY)
        self.order: Axes = (*first, *(a.name for a in layer.axes if a.name not in first))

    def context(self, statements: JaxStatements) -> dict[str, Any]:
        """The variables of the template."""
        layer, chunks, host = self._layer, self._plan.chunks, self._names.host
        states = [host(s.name) for s in layer.states]
        channels = dict.fromkeys(a for s in layer.states for a in s.axes if a not in (layer.batch, layer.head))
        lengths = {layer.batch: "batch", layer.head: "heads"} | {a: host(a) for a in channels}
        zeros = [f"jnp.zeros({tupled([lengths[a] for a in s.axes])}, dtype)" for s in layer.states]
        outputs = [o.value.name for o in chunks.outputs]
        first = next(s for s in chunks.cut if not self._optional(s.source.name))
        cuts = [f"({s.source.name}, {s.source.axes.index(layer.time)})" for s in chunks.cut]
        walk = ["chunks", tupled(states), tupled(cuts), tupled([self._output_shape(o) for o in chunks.outputs])]
        walk += [f"size[{quoted(layer.time)}]", "chunk"]
        results = [host(o.name) for o in chunks.outputs]
        own = tupled(
            [f"{v}.astype(call.outputs[{quoted(o.name)}])" for v, o in zip(outputs, chunks.outputs, strict=True)]
        )
        chunk = next(dict(k.defaults)["bf16"] for k in self._plan.knobs if k.name == "chunk")
        return {
            "layer": layer,
            "chunks": chunks,
            "required_arguments": self._required(),
            "other_arguments": [
                *self._others(),
                *(f"{self._names.initial(s.name)}: Array | None = None" for s in layer.states),
                f"chunk: int = {chunk}",
                "precision: Any = _rt.HIGHEST",
            ],
            "forward_doc": self._forward_doc(),
            "check": self._check({s.name: self._names.initial(s.name) for s in layer.states}),
            "arranged": [*self._expanded(), *map(self._arranged, chunks.inputs), *map(self._initial, layer.states)],
            "indices": self._indices(chunks.indices),
            "leader_dtype": f"call.inputs[{quoted(self._plan.leader)}]",
            "states": tupled(states) if len(states) == 1 else ", ".join(states),
            "cut": ", ".join(s.target.name for s in chunks.cut) + ("," if len(chunks.cut) == 1 else ""),
            "token": f"jnp.arange({first.target.name}.shape[{first.target.axes.index(layer.time)}], dtype=dtype)",
            "moves": [self._move(m, statements) for m in chunks.moves],
            "chunk_result": [tupled(states), own],
            "walk": f"_rt.walk({', '.join(walk)})",
            "walked": f"{tupled(results)}, {tupled(states)}",
            "result": [*map(self._returned, chunks.outputs), *map(self._final, layer.states)],
            "state_arguments": [
                *("batch: int", "heads: int", "*"),
                *(f"{host(a)}: int" + (f" = {layer.size(a)}" if layer.size(a) else "") for a in channels),
                "dtype: Any = jnp.float32",
            ],
            "state_type": f"tuple[{', '.join(['Array'] * len(zeros))}]" if len(zeros) > 1 else "Array",
            "state_zeros": zeros,
            "state_doc": "Zero states: " + ", ".join(f"{s.name}[{' '.join(s.axes)}]" for s in layer.states) + ".",
            "step": self._step(),
        }

    def _optional(self, name: str) -> bool:
        return any(self._names.host(t.name) == name and t.optional for t in self._layer.inputs)

    def _required(self) -> list[str]:
        return [f"{self._names.host(t.name)}: Array" for t in self._layer.inputs if t.required]

    def _others(self) -> list[str]:
        layer, host = self._layer, self._names.host
        args = [f"{host(t.name)}: Array | None = None" for t in layer.inputs if not t.required]
        return args + [f"{host(p.name)}: float | Array = {number(p.default)}" for p in layer.params]

    def _check(self, states: dict[str, str], step: bool = False) -> str:
        layer, host = self._layer, self._names.host
        groups = (
            {t.name: host(t.name) for t in layer.inputs},
            states,
            {p.name: host(p.name) for p in layer.params},
        )
        texts = ["{" + ", ".join(f"{quoted(k)}: {v}" for k, v in group.items()) + "}" for group in groups]
        return f"_rt.check({', '.join(['LAYER', *texts, *(['step=True'] if step else [])])})"

    def _expanded(self) -> list[str]:
        """The lines that bring inputs with a default to their widest form."""
        lines = []
        for i, t in enumerate(self._layer.inputs):
            if t.default is not None:
                lines.append(
                    f"{self._names.host(t.name)} = _rt.expand(LAYER.inputs[{i}], {self._names.host(t.name)}, size)"
                )
        return lines

    def _arranged(self, t: PortableInput) -> str:
        """The line that brings an input to the axes that it is computed with, and widens it."""
        layer, name = self._layer, self._names.host(t.name)
        code, axes = name, t.array_axes
        if t.grouped:
            at = next(i for i, a in enumerate(axes) if a not in t.axes)
            code = f"_rt.per_head({code}, {at}, size[{quoted(layer.head)}])"
            axes = tuple(layer.shared(a) for a in axes)
        if len(t.axes) > len(axes):
            code, axes = self._split(code, axes)
        if axes != t.axes:
            code = f"jnp.transpose({code}, ({', '.join(str(axes.index(a)) for a in t.axes)}))"
        line = f"{name} = {code}.astype(dtype)"
        return f"if {name} is not None:\n        {line}" if layer.tensor(t.name).optional else line

    def _split(self, code: str, axes: Axes) -> tuple[str, Axes]:
        """An array whose head axis, if it has one, is split by group."""
        head = self._layer.head
        if self._group is None or head not in axes:
            return code, axes
        at = axes.index(head)
        return f"_rt.by_group({code}, {at}, size[{quoted(self._group)}])", (*axes[:at], self._group, *axes[at:])

    def _initial(self, state: State) -> str:
        given = self._names.initial(state.name)
        code, _ = self._split(f"_rt.initial(LAYER, {quoted(state.name)}, {given}, call)", state.axes)
        return f"{self._names.host(state.name)} = {code}"

    def _indices(self, axes: Axes) -> list[str]:
        found = []
        for axis in axes:
            code, _ = self._split(f"jnp.arange(size[{quoted(axis)}], dtype=dtype)", (axis,))
            found.append(f"index_{axis} = {code}")
        return found

    def _move(self, move: ChunkMove, statements: JaxStatements) -> dict[str, str]:
        gained: Expr = move.gained[0]
        for more in move.gained[1:]:
            gained = Apply("add", (gained, more))
        axes = move.entry.axes
        args = [statements.expr(move.end, axes), statements.expr(gained, axes), move.state.name, "precision"]
        return {"target": f"{move.entry.name}, {move.state.name}", "code": f"_rt.entries({', '.join(args)})"}

    def _output_shape(self, o: PortableOutput) -> str:
        axes = o.value.axes[1:]
        lengths = {self._layer.head: f"size[{quoted(self._layer.head)}]"}
        if self._group:
            lengths[self._layer.head] += f" // size[{quoted(self._group)}]"
        shape = tupled([lengths.get(a, f"size[{quoted(a)}]") for a in axes])
        return f"({axes.index(self._layer.time)}, {shape}, call.outputs[{quoted(o.name)}])"

    def _returned(self, o: PortableOutput) -> str:
        """An output as the caller gets it: heads one axis, the order of its array."""
        code, axes = self._names.host(o.name), o.value.axes[1:]
        _, wanted = self._split("", o.axes)
        if axes != wanted:
            code = f"jnp.transpose({code}, ({', '.join(str(axes.index(a)) for a in wanted)}))"
        return self._joined(code, wanted)

    def _final(self, state: State) -> str:
        return self._joined(self._names.host(state.name), self._split("", state.axes)[1])

    def _joined(self, code: str, axes: Axes) -> str:
        return f"_rt.by_head({code}, {axes.index(self._group)})" if self._group in axes else code

    def _forward_doc(self) -> str:
        lines = [
            *self._names.input_docs(),
            "chunk: tokens a chunk; it changes the time that it takes, not the result",
            "precision: of products of float32, a jax.lax.Precision or its name; of bfloat16 it changes nothing",
            "",
            "A pure function to be traced: under jax.jit, with `chunk` and `precision` as static arguments, jax.vmap and"
            " jax.grad. Computed in float32, or float64 if an input is; products of bfloat16 inputs have bfloat16 operands"
            " and float32 sums. Raises TypeError or ValueError, which name the argument, for a missing input, a dtype, rank"
            " or size, or a number out of range; values of arrays are not looked at.",
        ]
        return "\n".join(lines)

    def _step(self) -> dict[str, Any]:
        """What the template calls `step`; empty for a plan without steps."""
        layer, portable, host = self._layer, self._plan.step.portable, self._names.host
        if portable is None:
            return {}
        states = [host(s.name) for s in layer.states]
        widened = [f"{host(s.name)} = {host(s.name)}.astype(dtype)" for s in layer.states]
        return {
            "portable": portable,
            "required_arguments": [*(f"{s}: Array" for s in states), *self._required()],
            "other_arguments": self._others(),
            "doc": self._step_doc(),
            "check": self._check({s.name: host(s.name) for s in layer.states}, step=True),
            "arranged": [*self._expanded(), *map(self._arranged, portable.inputs), *widened],
            "indices": [f"index_{a} = jnp.arange(size[{quoted(a)}], dtype=dtype)" for a in portable.indices],
            "result": [
                *map(self._step_result, portable.outputs),
                *(f"{host(s.name)}.astype(call.states[{quoted(s.name)}])" for s in layer.states),
            ],
        }

    def _step_result(self, o: PortableOutput) -> str:
        axes, code = tuple(a for a in o.axes if a != self._layer.time), o.value.name
        if o.value.axes != axes:
            code = f"jnp.transpose({code}, ({', '.join(str(o.value.axes.index(a)) for a in axes)}))"
        return f"{code}.astype(call.outputs[{quoted(o.name)}])"

    def _step_doc(self) -> str:
        layer, host = self._layer, self._names.host

        def inside(axes: Axes) -> str:
            return f"[{' '.join(a for a in axes if a != layer.time)}]"

        outputs = [f"{o.name}{inside(self._layouts.get(o.name, o.axes))}" for o in layer.outputs]
        states = [f"{host(s.name)}[{' '.join(s.axes)}]" for s in layer.states]
        moving = [
            f"{host(t.name)}{inside(self._layouts.get(t.name, t.axes))}" for t in layer.inputs if layer.time in t.axes
        ]
        return (
            f"One token: {', '.join(outputs)} and the states behind it, {', '.join(states)}, float32, bfloat16 or float64 as"
            f" they came. Inputs are as in `forward`, without its time axis: {', '.join(moving)}.\n\n"
            "A pure function, as `forward` is: under jax.jit, donate the states to have them updated in their memory."
        )
