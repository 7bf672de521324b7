"""The host functions of one-token steps: what their template is told about arguments, launches and the portable form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ssdgen.emit.buffers import DTYPES
from ssdgen.emit.host import Host, number, tupled
from ssdgen.ir.expr import Axes
from ssdgen.ir.layer import Output
from ssdgen.ir.plan import Parameter, Plan, StepKernel
from ssdgen.ir.portable import PortableInput, PortableOutput

INDICES = ("state_indices", "write_indices")


@dataclass(frozen=True, slots=True)
class Function:
    """`step` or `steps`: its arguments by position and by name, the annotation of its result, its docstring, and the arguments
    of what it calls."""

    name: str
    required: list[str]
    others: list[str]
    result: str
    doc: str
    call: list[str]


class StepHost:
    """Names, lists of arguments and lines for the template `step.py.j2` of one plan."""

    def __init__(self, plan: Plan, host: Host) -> None:
        self._plan, self._host = plan, host
        self._layer = plan.form.recurrence.layer
        self._layouts = dict(plan.config.layouts)

    def context(self) -> dict[str, Any]:
        """What the template calls `steps`; empty for a plan without steps."""
        layer, host, portable = self._layer, self._host.host, self._plan.step.portable
        if portable is None:
            return {}
        arranged = [t for t in portable.inputs if self._arranged(t)]
        plain = [host(t.name) for t in portable.inputs if t not in arranged]
        states = [host(s.name) for s in layer.states]
        inputs = [f"{host(t.name)}: Tensor{' | None' if t.optional else ''}" for t in layer.inputs]
        kernels = "_step_kernels" if self._plan.step.kernels else "None"
        config = "StepConfig()" if self._plan.step.kernels else "None"
        return {
            "functions": [self._function("step", False), self._function("steps", True)],
            "portable": portable,
            "portable_arguments": [
                *inputs,
                *(f"{name}: Tensor" for name in [host(p.name) for p in layer.params] + states),
                "size: dict[str, int]",
            ],
            "portable_result": f"tuple[{', '.join(['Tensor'] * len(layer.outputs))}]",
            "first_state": states[0],
            "widened": self._host.each(plain, "v.to(dtype)"),
            "prepared": [self._host.prepared(t) for t in arranged],
            "returned": [tupled([self._result(o) for o in portable.outputs])],
            "step": f"LAYER, {config}, {kernels}, _portable_step",
            "launches": [],
            **(self._kernel_context(inputs) if self._plan.step.kernels else {}),
        }

    def _function(self, name: str, several: bool) -> Function:
        layer, host = self._layer, self._host.host
        tensor = "Tensor" if len(layer.outputs) == 1 else f"tuple[{', '.join(['Tensor'] * len(layer.outputs))}]"
        states = [host(s.name) for s in layer.states]
        kept = "Tensor" if len(states) == 1 else f"tuple[{', '.join(['Tensor'] * len(states))}]"
        required = [f"{n}: Tensor" for n in (*states, *(host(t.name) for t in layer.inputs if t.required))]
        arguments = [f"{host(t.name)}: Tensor | None = None" for t in layer.inputs if not t.required]
        arguments += [f"{host(p.name)}: float = {number(p.default)}" for p in layer.params]
        arguments += [f"{n}: Tensor | None = None" for n in INDICES]
        arguments += [f"before: {kept} | None = None"] if several else []
        arguments += [f"out: {tensor} | None = None", "steady: bool = False"]
        arguments += ["config: StepConfig | None = None"] if self._plan.step.kernels else []
        call = [
            "STEP",
            tupled(states),
            tupled([host(t.name) for t in layer.inputs]),
            tupled([host(p.name) for p in layer.params]),
            tupled(list(INDICES)),
            "before" if several else "None",
            "out",
            "steady",
            "config" if self._plan.step.kernels else "None",
            f"several={several}",
        ]
        return Function(name, required, arguments, tensor, self._doc(several), call)

    def _doc(self, several: bool) -> str:
        layer, host = self._layer, self._host.host
        outputs = ", ".join(f"{o.name}{self._shape(self._layouts.get(o.name, o.axes), several)}" for o in layer.outputs)
        states = ", ".join(f"{host(s.name)}[{' '.join(s.axes)}]" for s in layer.states)
        if several:
            kept = ", ".join(self._shape((s.axes[0], layer.time, *s.axes[1:]), True) for s in layer.states)
            return (
                f"Several tokens, as so many calls of `step`, bit for bit: {outputs}. Inputs have the axes of `forward`.\n\n"
                f"before: {kept}, float32 or bfloat16: filled with what the states are before each token, so that copying"
                " one rolls the tokens from it on back; the rest is as for `step`"
            )
        per_token = [(host(t.name), self._layouts.get(t.name, t.axes)) for t in layer.inputs if layer.time in t.axes]
        axes = ", ".join(f"{name}{self._shape(axes, False)}" for name, axes in per_token)
        return (
            f"One token: {outputs}. The states {states}, float32 or bfloat16, are updated in place. Inputs are as in"
            f" `forward`, without its time axis: {axes}.\n\n"
            f"state_indices: [{layer.batch}], int32 or int64: the states are a pool, with slots instead of axis"
            f" {layer.batch}, and these the slots to read and update; a sequence with a negative one is left out: its"
            " outputs are 0, or as they were in `out`\n"
            "write_indices: the slots to update, if others than those to read; nothing is written at a negative one\n"
            "out: the outputs' memory; then nothing is allocated\n"
            "steady: promises that what wrote the states and the inputs without a time axis was queued before the last kernel"
            " that was launched the ordinary way, as PyTorch's are: they are read while that one, and those behind it, may"
            " still run. Not used with `state_indices`, or where an input with a default is left out\n\n"
            "Nothing is differentiated on a GPU, nor through the states. Raises TypeError or ValueError, which name the"
            " tensor; the values of indices are checked on the CPU, and on a GPU if SSDGEN_DEBUG is set."
        )

    def _shape(self, axes: Axes, several: bool) -> str:
        return f"[{' '.join(axes if several else self._without_time(axes))}]"

    def _without_time(self, axes: Axes) -> Axes:
        return tuple(a for a in axes if a != self._layer.time)

    def _arranged(self, t: PortableInput) -> bool:
        """Whether the portable form does more with an input than widen it."""
        declared = self._layer.tensor(t.name)
        return t.grouped or declared.optional or t.array_axes != t.axes

    def _result(self, portable: PortableOutput) -> str:
        """An output as the caller gets it: its axes in the order of its array, and its dtype."""
        output: Output = next(o for o in self._layer.outputs if o.name == portable.name)
        axes, code = self._without_time(portable.axes), portable.value.name
        if portable.value.axes != axes:
            code += f".permute({', '.join(str(portable.value.axes.index(a)) for a in axes)})"
        declared = DTYPES[output.dtypes[0]] if output.like is None else f"{self._host.host(output.like)}.dtype"
        out = "out_dtype" if output.like == self._plan.leader else f"_rt.output_dtype({declared}, out_dtype)"
        return f"{code}.to({out})"

    def _kernel_context(self, inputs: list[str]) -> dict[str, Any]:
        layer, host, step = self._layer, self._host.host, self._plan.step
        arguments = [*inputs, *(f"{host(p.name)}: float" for p in layer.params)]
        arguments += [f"{host(s.name)}: Tensor" for s in layer.states]
        arguments += [f"{self._host.kept(s.name)}: Tensor | None" for s in layer.states]
        arguments += [f"{host(o.name)}: Tensor" for o in layer.outputs]
        arguments += [f"{n}: Tensor | None" for n in INDICES]
        lengths = [t for k in step.kernels for t in (*k.grid, *(p.argument for p in k.parameters))]
        tiles, whole = [], []
        for p in dict.fromkeys(p for k in step.kernels for p in k.parameters if p.role == "constant"):
            axis = p.argument.removeprefix("tile_").removeprefix("size_")
            if p.argument.startswith("tile_"):
                tiles.append(f"tile_{axis} = _step.tile(config.tile_{axis}, size_{axis})")
                whole.append(f"size_{axis} % tile_{axis} == 0")
            else:
                whole.append(f"size_{axis} == _step.columns(size_{axis})")
        return {
            "kernel_arguments": [*arguments, "steady: bool", "config: StepConfig"],
            "sizes": self._host.lengths(lengths, [(host(s.name), s.axes) for s in layer.states]),
            "tiles": [*tiles, f"whole = {' and '.join(dict.fromkeys(whole))}"],
            "launches": [self._launch(k) for k in step.kernels],
        }

    def _launch(self, kernel: StepKernel) -> str:
        args = ", ".join(self._argument(p) for p in kernel.parameters)
        hinted = f"_rt.hinted({kernel.name}, config.occupancy, config.warps)"
        return f"_rt.launch(stream, {hinted}, {tupled(list(kernel.grid))}, ({args}), early=True)"

    def _argument(self, p: Parameter) -> str:
        leader = self._host.host(self._plan.leader)
        match p.role:
            case "state":
                return self._host.host(p.argument)
            case "kept":
                state = p.argument.removesuffix("_before")
                return f"_rt.given({self._host.kept(state)}, {self._host.host(state)})"
            case "slots":
                return f"_rt.given({p.argument}, {leader})"
            case "constant" if p.argument.startswith("tile_"):
                return p.argument
            case "constant":
                return f"_step.columns({p.argument})"
            case "flag" if p.argument in ("whole", "steady"):
                return p.argument
            case "flag" if p.argument == "before":
                return f"{self._host.kept(self._layer.states[0].name)} is not None"
            case "flag" if p.argument in INDICES:
                return f"{p.argument} is not None"
            case "input" if self._layer.tensor(p.argument).optional:
                return f"_rt.given({self._host.host(p.argument)}, {leader})"
        return self._host.argument(p)
