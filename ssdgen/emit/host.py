"""The host functions of a module: what its templates are told about arguments, workspaces and launches."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ssdgen.emit.buffers import DTYPES, Buffers, reaches, workspaces
from ssdgen.emit.layout import broken
from ssdgen.ir.expr import Axes
from ssdgen.ir.layer import INFINITY, Output, State, Tensor
from ssdgen.ir.plan import GroupKernel, Kernel, OutputKernel, Parameter, Plan, TokenKernel, WalkKernel
from ssdgen.ir.portable import PortableInput, PortableOutput
from ssdgen.ir.schedule import PRODUCTS
from ssdgen.plan.names import EVERY, host_scope, key_inputs

PACKINGS = ("cu_seqlens", "seq_idx", "mask")
"""The arguments of `forward` that cut its tokens into sequences."""


@dataclass(frozen=True, slots=True)
class _Output:
    host: str
    shape: str
    dtype: str
    joined: str


@dataclass(frozen=True, slots=True)
class _Launch:
    """A launch, if `condition` holds, and what is `found` behind it from what it stores."""

    condition: str
    code: str
    found: list[Buffers]


class Host:
    """Names, lists of arguments and lines for the host templates of one plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._layer = plan.form.recurrence.layer
        self._names = host_scope(self._layer)
        for name in (*(w.name for w in plan.workspaces), *(n for r in plan.reaches for n in (r.oldest, r.newest) if n)):
            self._names.of("workspace", name)

    def filters(self) -> dict[str, Callable[..., str]]:
        """The filters that name things: a tensor, scalar, state or output; an initial state; a final one."""
        return {"host": self.host, "initial": self.initial, "final": self.final, "prepared": self.prepared}

    def host(self, name: str) -> str:
        """The host variable of an input, scalar, state or output."""
        return self._names.of("host", name)

    def initial(self, state: str) -> str:
        """The argument that is the initial state."""
        return self._names.of("initial", f"{state}0")

    def kept(self, state: str) -> str:
        """The variable of what a state is before each token."""
        return self._names.of("kept", f"{state}_before")

    def prefixes(self, state: str) -> str:
        """The variable of what a state is at the ends of blocks."""
        return self._names.of("prefixes", f"{state}_states")

    def final(self, state: str) -> str:
        """The variable that is the final state."""
        return self._names.of("final", f"{state}_final")

    def context(self) -> dict[str, Any]:
        """The variables of the host templates."""
        layer, plan = self._layer, self._plan
        tensors = [self.host(t.name) for t in layer.inputs]
        initials = [self.initial(s.name) for s in layer.states]
        finals = [self.final(s.name) for s in layer.states]
        outputs = [self._output(o) for o in layer.outputs]
        channels = dict.fromkeys(a for s in layer.states for a in s.axes if a not in (layer.batch, layer.head))
        lengths = {layer.batch: "batch", layer.head: "heads"} | {a: self.host(a) for a in channels}
        zeros = [
            f"torch.zeros(({', '.join(lengths[a] for a in s.axes)}), dtype=dtype, device=device)" for s in layer.states
        ]
        several = len(layer.states) > 1
        return {
            "layer": layer,
            "leader": plan.leader,
            "plan_name": plan.config.plan,
            "portable": plan.portable,
            "forward_doc": self._forward_doc(),
            "portable_tensors": [*tensors, *(self.host(s.name) for s in layer.states)],
            "required_arguments": [f"{self.host(t.name)}: Tensor" for t in layer.inputs if t.required],
            "other_arguments": self._other_arguments(),
            "portable_arguments": self._portable_arguments(),
            "portable_call": self._portable_call(initials),
            "chosen_call": self._chosen_call(),
            "outputs": outputs,
            "results": [*(o.host for o in outputs), *finals],
            "portable_results": [*(o.host for o in outputs), *(self.host(s.name) for s in layer.states)],
            "portable_states": tupled([self.host(s.name) for s in layer.states]),
            "rearranged": self._rearranged(),
            "widened": self.each(
                [self.host(t.name) for t in layer.inputs if t.name not in self._rearranged()], "v.to(dtype)"
            ),
            "output_dtypes": f"out_dtype = {self.host(plan.leader)}.dtype",
            "state_arguments": [
                *("batch: int", "heads: int", "*"),
                *(f"{self.host(a)}: int" + (f" = {layer.size(a)}" if layer.size(a) else "") for a in channels),
                *("device: torch.device | str | None = None", "dtype: torch.dtype = torch.float32"),
            ],
            "state_type": f"tuple[{', '.join(['Tensor'] * len(zeros))}]" if several else "Tensor",
            "state_zeros": zeros,
            "state_doc": f"Zero states: {', '.join(_state(s) for s in layer.states)}.",
            "refusal": f"{layer.name}: no kernels are emitted for {plan.refused}; compute on the CPU",
            **(self._kernel_context() if plan.kernels else {}),
        }

    def _kernel_context(self) -> dict[str, Any]:
        plan, layer = self._plan, self._layer
        inputs = tupled([self.host(t.name) for t in layer.inputs])
        scalars = tupled([f"float({self.host(p.name)})" for p in layer.params])
        kept = [self._names.of("workspace", w.name) for w in plan.workspaces if w.kept]
        initials = tupled([self.initial(s.name) for s in layer.states])
        wanted, blocks, column = "1", "1", "1"  # what is not cut into segments need not be counted
        if plan.config.plan == "segmented":
            wanted = "config.segments"
            blocks = " * ".join((f"size_{layer.head}", *(g for g in plan.kernels[-1].grid if not g.startswith("cut."))))
            column = f"size_{plan.form.states[0].column_axis}"
        sizes = f"size_{layer.batch}, size_{layer.time}, config.chunk"
        call = ["LAYER", f"_{plan.config.plan}"]
        return {
            "arguments": self._arguments(),
            "checked_arguments": [*self._checked_arguments(), "keep: bool = False"],
            "kernels_call": [*call, "sequences", inputs, scalars, initials, "size", "config", EVERY, "keep"],
            "packs": isinstance(plan.kernels[-1], WalkKernel),
            "plan_arguments": self._plan_arguments(),
            "indexable": self.each(
                [self.host(t.name) for t in layer.inputs if layer.time in t.axes and not t.optional], "_rt.indexable(v)"
            ),
            "plan_sizes": self._sizes(list(plan.kernels)),
            "cut": f"_cut.cut({sizes}, {wanted}, {blocks}, {column}, sequences, {self.host(plan.leader)})",
            "sharing": self._sharing(),
            "ends": self._at_ends(),
            "workspaces": workspaces(plan, self._names, self.host(plan.leader)),
            "kept": ", ".join(kept) if len(kept) > 1 else tupled(kept),
            "launches": self._launches(plan.kernels),
        }

    def _checked_arguments(self) -> list[str]:
        """The parameters of `forward`, without their defaults."""
        required = [f"{self.host(t.name)}: Tensor" for t in self._layer.inputs if t.required]
        return [*required, *(argument.partition(" = ")[0] for argument in self._other_arguments())]

    def _arguments(self) -> list[str]:
        """The arguments of `forward` in its order."""
        return [argument.partition(":")[0] for argument in self._checked_arguments()]

    def _chosen_call(self) -> list[str]:
        layer, leader = self._layer, self._plan.leader
        optional = [t.name for t in layer.inputs if t.optional]
        given = [f'"{name}": {self.host(name)}' for name in optional] + ['"packed": sequences']
        dtypes = tupled([f"{self.host(name)}.dtype" for name in key_inputs(layer, leader)])
        present = f"_tuned.present({{{', '.join(given)}}})"
        key = ["digest=SPEC_DIGEST", "variant=VARIANT", f"present={present}", "size=size", f"dtypes={dtypes}"]
        return ["LAYER", "config", "CONFIGS", *key, f"x={self.host(leader)}"]

    def _sharing(self) -> str:
        """The host expression of whether heads share products; empty if no kernel can compute them for a group."""
        kernel = next((k for k in self._plan.kernels if isinstance(k, GroupKernel)), None)
        if kernel is None:
            return ""
        return f"0 < config.share_scores_from <= size_{self._layer.head} // {kernel.grid[1]}"

    def _other_arguments(self) -> list[str]:
        layer = self._layer
        args = [f"{self.host(t.name)}: Tensor | None = None" for t in layer.inputs if not t.required]
        args += [f"{self.host(p.name)}: float = {number(p.default)}" for p in layer.params]
        args += [f"{self.initial(s.name)}: Tensor | None = None" for s in layer.states]
        args += [f"{name}: Tensor | None = None" for name in PACKINGS]
        return [*args, f"{EVERY}: int | None = None", "config: Config | None = None"]

    def _portable_arguments(self) -> list[str]:
        layer = self._layer
        args = [f"{self.host(t.name)}: Tensor{' | None' if t.optional else ''}" for t in layer.inputs]
        names = [p.name for p in layer.params] + [s.name for s in layer.states]
        sizes = ["size: dict[str, int]", "chunk: int", f"{EVERY}: int | None"]
        return [*args, *(f"{self.host(name)}: Tensor" for name in names), *sizes]

    def _plan_arguments(self) -> list[str]:
        layer = self._layer
        args = [f"{self.host(t.name)}: Tensor{' | None' if t.optional else ''}" for t in layer.inputs]
        args += [f"{self.host(p.name)}: float" for p in layer.params]
        args += [f"{self.initial(s.name)}: Tensor | None" for s in layer.states]
        args += [f"{self.host(o.name)}: Tensor" for o in layer.outputs]
        args += [f"{self.final(s.name)}: Tensor" for s in layer.states]
        args += [f"{self.prefixes(s.name)}: Tensor | None" for s in layer.states]
        return [*args, f"{EVERY}: int", "sequences: _packed.Sequences | None", "config: Config"]

    def _portable_call(self, initials: list[str]) -> list[str]:
        layer, leader = self._layer, self.host(self._plan.leader)
        inputs = [self.host(t.name) for t in layer.inputs]
        scalars = [f"_rt.scalar({self.host(p.name)}, {leader})" for p in layer.params]
        groups = [tupled(items) for items in (inputs, scalars, initials)]
        return ["LAYER", "_portable", "sequences", *groups, "size", "config.chunk", EVERY]

    def _output(self, o: Output) -> _Output:
        layer = self._layer
        axes = dict(self._plan.config.layouts).get(o.name, o.axes)
        portable: PortableOutput = next(p for p in self._plan.portable.outputs if p.name == o.name)
        leader = self.host(self._plan.leader)
        dtype = DTYPES[o.dtypes[0]] if o.like is None else f"{self.host(o.like)}.dtype"
        at = portable.value.axes.index(layer.time)
        joined = f"_rt.joined({portable.pieces}, {at}, {_shape(portable.value.axes, 'size')}, {leader})"
        if portable.value.axes != axes:
            joined += f".permute({', '.join(str(portable.value.axes.index(a)) for a in axes)})"
        out = "out_dtype" if o.like == self._plan.leader else f"_rt.output_dtype({dtype}, out_dtype)"
        return _Output(self.host(o.name), _shape(axes, "size"), dtype, f"{joined}.to({out})")

    def _rearranged(self) -> list[str]:
        """The inputs that the portable path does more with than widen them: in another order, grouped, or optional."""
        out = []
        for t in self._plan.portable.inputs:
            declared = self._layer.tensor(t.name)
            if t.grouped or declared.optional or not t.array_axes == declared.axes == t.axes:
                out.append(t.name)
        return out

    def each(self, names: list[str], code: str) -> str:
        """The line that replaces each of several variables `v` by `code`; empty if there are none."""
        if not names:
            return ""
        if len(names) == 1:
            only = re.sub(r"\bv\b", names[0], code)
            return f"    {names[0]} = {only}"
        return broken(f"{', '.join(names)} = ", f"({code} for v in ({', '.join(names)}))", "    ")

    def prepared(self, t: PortableInput) -> str:
        """The line that brings an input to the heads, axes and dtype that the portable form computes with."""
        layer, name = self._layer, self.host(t.name)
        code, axes = name, t.array_axes
        if t.grouped:
            at = next(i for i, a in enumerate(axes) if layer.shared(a) != a)
            code = f"_rt.per_head({code}, {at}, size[{quoted(layer.head)}])"
            axes = tuple(layer.shared(a) for a in axes)
        if axes != t.axes:
            code += f".permute({', '.join(str(axes.index(a)) for a in t.axes)})"
        line = f"{name} = {code}.to(dtype)"
        return f"if {name} is not None:\n        {line}" if layer.tensor(t.name).optional else line

    def _sizes(self, kernels: list[Kernel]) -> str:
        """The line that reads the lengths the host needs off the arrays."""
        texts = [g for k in kernels for g in k.grid] + [x for w in self._plan.workspaces for x in w.shape]
        texts += [f"size_{self._layer.batch} size_{self._layer.time} size_{self._layer.head}"]
        texts += [p.argument for k in kernels for p in k.parameters if p.argument.startswith("size_")]
        texts += [f"size_{s.column_axis}" for s in self._plan.form.states if self._plan.config.plan == "segmented"]
        return self.lengths(texts, [(self.final(s.name), s.axes) for s in self._layer.states])

    def lengths(self, texts: list[str], states: list[tuple[str, Axes]]) -> str:
        """The line that reads what `texts` mention as size_AXIS off the required inputs, or variables that are `states`."""
        needed = dict.fromkeys(name for text in texts for name in re.findall(r"\bsize_(\w+)", text))
        layouts = dict(self._plan.config.layouts)
        arrays = [(self.host(t.name), layouts.get(t.name, t.axes)) for t in self._layer.inputs if t.required] + states
        sources = []
        for axis in needed:
            name, axes = next((n, a) for n, a in arrays if axis in a)
            sources.append(f"{name}.shape[{axes.index(axis)}]")
        return broken(f"{', '.join(f'size_{a}' for a in needed)} = ", ", ".join(sources), "    ")

    def _launches(self, kernels: tuple[Kernel, ...]) -> list[_Launch]:
        """The launches in their order."""
        out = []
        for at, kernel in enumerate(kernels):
            found = reaches(self._plan, self._names) if isinstance(kernel, TokenKernel) else []
            out.append(_Launch(self.condition(kernel), self._launch(kernel, early=at > 0), found))
        return out

    def condition(self, kernel: Kernel) -> str:
        """The host expression that says whether a kernel is launched; "" for always."""
        return kernel.condition

    def _launch(self, kernel: Kernel, early: bool) -> str:
        args = ", ".join(self.argument(p) for p in kernel.parameters)
        hinted = f"_rt.hinted({kernel.name}, config.occupancy_{kernel.role}, config.warps_{kernel.role})"
        grid = tupled(list(kernel.grid))
        if isinstance(kernel, OutputKernel) and kernel.places:
            leader = self.host(self._plan.leader)
            grid = f"(_cut.held({kernel.grid[0]}, config.occupancy_{kernel.role}, {leader}),)"
        return f"_rt.launch(stream, {hinted}, {grid}, ({args}){', early=True' if early else ''})"

    def argument(self, p: Parameter) -> str:
        """The host expression that is passed for a parameter of a kernel."""
        match p.role:
            case "constant" if p.argument.startswith("size_"):
                return f"_rt.covering({p.argument})"
            case "constant":
                field = f"config.{p.argument}"
                return f"_rt.PRECISION[{field}]" if p.argument in PRODUCTS else field
            case "scalar":
                if p.dtype == "i32":
                    return p.argument
                return f"float({p.argument})" if p.argument.startswith("size_") else self.host(p.argument)
            case "input":
                name = self.host(p.argument)
                if p.per_head is not None:
                    name = f"_rt.per_head({name}, {p.per_head}, size_{self._layer.head})"
                if self._layer.tensor(p.argument).optional:
                    return f"_rt.indexable(_rt.given({name}, {self.host(self._plan.leader)}))"
                return name
            case "uniform":
                axes = dict(self._plan.config.layouts).get(p.argument, self._layer.tensor(p.argument).axes)
                return f"{self.host(p.argument)}.stride({axes.index(p.axes[0])}) == 0"
            case "flag":
                return self._flag(p.argument)
            case "table":
                return f"cut.{p.argument}"
            case "initial":
                state = p.argument.removesuffix("0")
                return f"_rt.given({self.initial(state)}, {self.final(state)})"
            case "final":
                return self.final(p.argument.removesuffix("_final"))
            case "prefixes":
                state = p.argument.removesuffix("_states")
                return f"_rt.given({self.prefixes(state)}, {self.final(state)})"
            case "workspace":
                return self._names.of("workspace", p.argument)
            case "output":
                return self.host(p.argument)
            case "state" | "kept" | "slots" | "arriving" | "gradient":
                raise ValueError(f"`{p.name}` is a parameter of steps or of gradients alone")

    def _between(self) -> str:
        """The host expression of whether states are kept between the first and the last."""
        return f"{self.prefixes(self._layer.states[0].name)} is not None"

    def _at_ends(self) -> str:
        """The host expression of whether those are the states at the ends of segments; empty if no kernel asks."""
        asked = any((p.role, p.argument) == ("flag", "ends") for k in self._plan.kernels for p in k.parameters)
        return f"{self._between()} and {EVERY} == cut.per_segment * config.chunk" if asked else ""

    def _flag(self, argument: str) -> str:
        """The host expression that sets a flag."""
        if argument in ("shared", "ends"):
            return argument
        if argument == EVERY:
            return f"{self._between()} and not ends" if self._at_ends() else self._between()
        states = {f"{s.name}0": self.initial(s.name) for s in self._layer.states}
        name = "sequences" if argument == "sequences" else states.get(argument) or self.host(argument)
        return f"{name} is not None"

    def _forward_doc(self) -> str:
        layer = self._layer
        lines = self.input_docs()
        plane = f"[{layer.batch} {layer.time}]"
        lines += [
            "cu_seqlens: int32 or int64: where each of several sequences in a batch of 1 begins, and the last ends; states"
            f" then have an entry a sequence instead of axis {layer.batch}",
            f"seq_idx: {plane}, int32 or int64: a sequence begins wherever it changes; initial states enter the first of a"
            " row, final ones are those of its last",
            f"mask: {plane}, bool: tokens where it is false leave states as they are, and their outputs are 0",
        ]
        kept = ", ".join(f"{s.name}_states[{' '.join((s.axes[0], 'blocks', *s.axes[1:]))}]" for s in layer.states)
        lines += [
            f"{EVERY}: a multiple of `config.chunk`: {kept}, float32, are returned last: entry i is the state after token"
            f" (i + 1) * {EVERY}, for every whole block of so many tokens. Sequences that begin at token `start` of a row"
            f" count from there, and their entries from start // {EVERY}; entries that none has are 0. Not with `mask`",
            "",
            "Differentiable, on a GPU once. On the CPU also in float64. Raises TypeError or ValueError, which name the"
            " tensor, for a missing input, a dtype, rank, size, device or range.",
        ]
        return "\n".join(lines)

    def input_docs(self) -> list[str]:
        """The lines of the docstring of `forward` about what it computes and returns, its inputs, scalars and states."""
        layer, layouts = self._layer, dict(self._plan.config.layouts)
        lines = [f"{layer.title}.", "", f"Returns {', '.join(self._returned())}.", ""]
        for t in layer.inputs:
            forms = [layouts.get(t.name, t.axes), *t.narrower]
            text = " or ".join(f"[{' '.join(a)}]" for a in forms)
            kind = (
                f"the dtype of {t.like}" if t.like else " or ".join(DTYPES[d].removeprefix("torch.") for d in t.dtypes)
            )
            lines.append(f"{self.host(t.name)}: {text}, {kind}{_extra(t)}")
        for p in layer.params:
            lines.append(f"{self.host(p.name)}: a number in {p.range}")
        for s in layer.states:
            text = "the state before the first token, zero if absent"
            lines.append(f"{self.initial(s.name)}: [{' '.join(s.axes)}], float32: {text}")
        return lines

    def _returned(self) -> list[str]:
        layouts = dict(self._plan.config.layouts)
        out = [f"{o.name}[{' '.join(layouts.get(o.name, o.axes))}]" for o in self._layer.outputs]
        return out + [f"the final state {s.name}[{' '.join(s.axes)}]" for s in self._layer.states]


def number(value: float) -> str:
    """A default value as code."""
    if math.isinf(value):
        return "math.inf" if value > 0 else "-math.inf"
    return repr(float(value))


def _state(state: State) -> str:
    return f"{state.name}[{' '.join(state.axes)}]"


def _shape(axes: Axes, size: str) -> str:
    items = [f"{size}[{quoted(a)}]" for a in axes]
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def tupled(items: list[str]) -> str:
    """A Python tuple of code strings."""
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def quoted(text: str) -> str:
    """A string literal."""
    return f'"{text}"'


def _extra(t: Tensor) -> str:
    parts = []
    if (t.range.low, t.range.high) != (-INFINITY, INFINITY):
        parts.append(f"in {t.range}")
    if t.default is not None:
        parts.append(f"{t.default:g} if absent")
    if t.optional:
        parts.append("optional")
    return "".join(f", {p}" for p in parts)
