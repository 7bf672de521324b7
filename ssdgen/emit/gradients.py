"""GradientPlan -> the text of the module of gradients that stands beside a module."""

from __future__ import annotations

import hashlib
import re
import textwrap
from dataclasses import replace

import ssdgen
from ssdgen.emit.buffers import workspaces
from ssdgen.emit.environment import DIRECT, HELPERS, TEMPLATES, called, configs, environment, imported, tidy
from ssdgen.emit.host import Host, quoted, tupled
from ssdgen.emit.printer import LOG2E
from ssdgen.ir.gradients import EntryKernel, GradientPlan, Result
from ssdgen.ir.plan import CHUNKS, Kernel, Parameter
from ssdgen.plan.names import DECAYS, EVERY, STARTS, key_inputs


def gradients_name(name: str) -> str:
    """The name of the module of gradients of the module `name`."""
    return f"{name}_gradients"


class GradientHost(Host):
    """Names, lists of arguments and lines for the host function of gradients."""

    def __init__(self, gradients: GradientPlan) -> None:
        super().__init__(gradients.plan)
        self._gradients = gradients
        self._ends = {s.state: s.name for s in gradients.adjoint.states}

    def gradient(self, name: str) -> str:
        """The variable of a gradient: one that arrives, or a result."""
        return self._names.of("gradient", name)

    def final(self, state: str) -> str:
        """The variable of the gradient of an initial state."""
        return self.gradient(f"{self._ends[state]}0")

    def arriving(self, state: str) -> str:
        """The argument that is the gradient which arrives at a final state."""
        return self.gradient(f"{self._ends[state]}_final")

    def prefixes(self, state: str) -> str:
        """The argument that is the gradient which arrives at the states kept at the ends of blocks."""
        return self.gradient(f"{self._ends[state]}_states")

    def starts(self, state: str) -> str:
        """The argument that has the states which segments begin with, where they were kept."""
        return self.gradient(f"{state}_starts")

    def flat(self, name: str) -> str:
        """The variable that says whether the gradient of an input is summed as that of one number all along the rows."""
        return self._names.of("flat", f"flat_{name}")

    @property
    def decays(self) -> str:
        """The argument that has the scalars of tokens, where they were kept."""
        return self.gradient(DECAYS)

    def condition(self, kernel: Kernel) -> str:
        """The host expression that says whether a kernel is launched: states are walked to, and scalars of tokens made, where
        none were kept."""
        name, _, rest = kernel.condition.partition(" ")
        return f"{self.gradient(name)} {rest}" if name else ""

    def argument(self, p: Parameter) -> str:
        """The host expression that is passed for a parameter of a kernel."""
        ends = {f"{end}_final": state for state, end in self._ends.items()}
        kept = {f"{end}_states": state for state, end in self._ends.items()}
        starts = {f"{state}_starts": state for state in self._ends}
        match p.role:
            case "arriving":
                return self.gradient(p.argument)
            case "gradient":
                name = self.gradient(p.name)
                optional = self._layer.tensor(p.argument).optional
                return f"_rt.given({name}, {self.host(self._plan.leader)})" if optional else name
            case "initial" | "flag" if p.argument in ends:
                state = ends[p.argument]
                if p.role == "flag":
                    return f"{self.arriving(state)} is not None"
                return f"_rt.given({self.arriving(state)}, {self.final(state)})"
            case "flag" if p.argument.endswith(" flat"):
                return self.flat(p.argument.removesuffix(" flat"))
            case "prefixes" if p.argument in starts:
                return f"_rt.given({self.starts(starts[p.argument])}, {self.final(starts[p.argument])})"
            case "flag" if p.argument in starts:
                return f"{self.starts(starts[p.argument])} is not None"
            case "prefixes":
                return f"_rt.given({self.prefixes(kept[p.argument])}, {self.final(kept[p.argument])})"
            case "flag" if p.argument in kept:
                return f"{self.prefixes(kept[p.argument])} is not None"
            case "final":
                return self.gradient(p.argument)
            case _:
                return super().argument(p)

    def gradient_context(self) -> dict[str, object]:
        """The variables of the template."""
        plan, layer = self._plan, self._layer
        outputs = [self.gradient(o.name) for o in self._gradients.adjoint.outputs]
        unit = next((r for r in self._gradients.results if r.shares), None)
        sizes = f"size_{layer.batch}, size_{layer.time}, config.chunk"
        walk = next(k for k in self._gradients.kernels if isinstance(k, EntryKernel))
        tiles = self._tiles()
        blocks = f"size_{layer.batch} * size_{layer.head} * {tiles.get(walk.grid[-1], walk.grid[-1])}"
        chunks = f"_rt.ceil_div(size_{layer.time}, config.chunk)"
        segments = f"_gradients.segments(config.segments, {chunks}, {blocks}, {self.host(plan.leader)})"
        results = [self._memory(r) for r in self._gradients.results if r.name]
        texts = [*(code for _, code in results), f"size_{layer.batch} size_{layer.time} size_{layer.head}"]
        texts += [g for k in self._gradients.kernels for g in k.grid] + [x for w in plan.workspaces for x in w.shape]
        texts += [p.argument for k in self._gradients.kernels for p in k.parameters if p.argument.startswith("size_")]
        shares = ""
        if unit is not None:
            group = next(g.axis for g in layer.groups if g.axis in unit.axes)
            count = f"cut.lanes * cut.slots * size_{group}"
            texts.append(count)
            shares = f"_gradients.shares(config.shares, {count}, size_{layer.head} // size_{group}, {self.host(plan.leader)})"
        arguments = [f"{self.host(t.name)}: Tensor{' | None' if t.optional else ''}" for t in layer.inputs]
        arguments += [f"{self.host(p.name)}: float" for p in layer.params]
        arguments += [f"{self.initial(s.name)}: Tensor | None" for s in layer.states]
        arguments += [f"{d}: Tensor" for d in outputs] + [
            f"{self.arriving(s.name)}: Tensor | None" for s in layer.states
        ]
        arguments += [*(f"{self.prefixes(s.name)}: Tensor | None" for s in layer.states), f"{EVERY}: int"]
        arguments += [*(f"{self.starts(s.name)}: Tensor | None" for s in layer.states), f"{STARTS}: int"]
        arguments += [
            f"{self.decays}: Sequence[Tensor] | None",
            *(f"{self.final(s.name)}: Tensor" for s in layer.states),
        ]
        tokens = [self.host(t.name) for t in layer.inputs if layer.time in t.axes and not t.optional]
        return {
            "plan": plan,
            "layer": layer,
            "leader": plan.leader,
            "keyed": tupled([quoted(name) for name in key_inputs(layer, plan.leader)]),
            "arguments": [*arguments, "sequences: _packed.Sequences | None", "config: Config"],
            "sizes": self.lengths(texts, [(self.final(s.name), s.axes) for s in layer.states]),
            "indexable": self.each([*tokens, *outputs], "_rt.indexable(v)"),
            "tiles": [(name, code) for code, name in tiles.items()],
            "segments": segments,
            "cut": f"_cut.cut({sizes}, segments, 1, 1, sequences, {self.host(plan.leader)}, {STARTS} // config.chunk)",
            "shares": shares,
            "flats": self._flats(),
            "workspaces": workspaces(plan, self._names, self.host(plan.leader), self.decays),
            "memory": results,
            "launches": self._launches(
                tuple(replace(k, grid=tuple(tiles.get(g, g) for g in k.grid)) for k in self._gradients.kernels)
            ),
            "parts": self._parts(),
            "returned": [tupled([self._returned_gradient(r) for r in self._gradients.results])],
        }

    def _tiles(self) -> dict[str, str]:
        """The variables of how many tiles a state has, by what they are: of states of rows and columns."""
        grids = (k.grid[-1] for k in self._gradients.kernels if isinstance(k, EntryKernel))
        products = dict.fromkeys(g for g in grids if " * " in g)
        return {g: "state_tiles" if at == 0 else f"state_tiles_{at + 1}" for at, g in enumerate(products)}

    def _flats(self) -> list[tuple[str, str]]:
        """(variable, code) of whether a gradient is summed flat: one sum more for the rows of a chunk leaves a state of many
        columns no registers."""
        column = next(s.column_axis for s in self._plan.form.states)
        found = []
        for result in (r for r in self._gradients.results if r.uniform):
            uniform = super().argument(Parameter("", "uniform", result.of, (result.uniform,)))
            found.append((self.flat(result.of), f"{uniform} and size_{column} <= _gradients.FLAT"))
        return found

    def _memory(self, result: Result) -> tuple[str, str]:
        """(variable, code) of a result's memory."""
        of = self.host(result.of)
        if CHUNKS in result.axes:
            lengths = {self._layer.batch: "cut.lanes", CHUNKS: "cut.slots"}
            if result.uniform:
                lengths[result.uniform] = f"1 if {self.flat(result.of)} else size_{result.uniform}"
            shape = tupled([lengths.get(a, f"size_{a}") for a in result.axes])
            return self._names.of("workspace", result.name), f"_gradients.parts({shape}, sequences, {of})"
        if result.shares:
            return self.gradient(result.name), f"_gradients.memory({of}, sequences, shares)"
        optional = f"None if {of} is None else " if self._layer.tensor(result.of).optional else ""
        return self.gradient(result.name), f"{optional}_gradients.memory({of}, sequences)"

    def _returned_gradient(self, result: Result) -> str:
        if not result.name:
            return "None"
        if CHUNKS in result.axes:
            return self._names.of("workspace", result.name)
        return self.gradient(result.name)

    def _parts(self) -> str:
        """The dictionary of dimensions to sum over, by input."""
        items = []
        for result in self._gradients.results:
            if result.name and CHUNKS in result.axes:
                own = self._layer.tensor(result.of).axes
                over = [str(at) for at, axis in enumerate(result.axes) if axis == CHUNKS or axis not in own]
                items.append(f"{quoted(result.of)}: {tupled(over)}")
        return f"{{{', '.join(items)}}}"


def emit_gradients(gradients: GradientPlan) -> str:
    """Print the module of a plan of gradients; empty if it has no kernels."""
    plan, host = gradients.plan, GradientHost(gradients)
    if gradients.refused:
        return ""
    layer = plan.form.recurrence.layer
    env = environment(plan)
    own = [k for k in gradients.kernels if k.role != "chunk_cumsum"]
    kernels = [tidy(env.get_template(TEMPLATES[type(k)]).render(k=k)) for k in own]
    text = env.get_template("gradients.py.j2").render(
        doc=_doc(gradients),
        kernels=kernels,
        direct=imported("._direct", called(DIRECT, kernels)),
        imported=imported("._tiles", called(HELPERS, kernels)),
        math="LOG2E" in "".join(kernels),
        cumsum=len(own) < len(gradients.kernels),
        configs=configs(plan),
        digest=hashlib.sha256(layer.source.text.encode()).hexdigest(),
        version=ssdgen.__version__,
        **host.gradient_context(),
    )
    return re.sub(r"\n+(?=\n(def|@|class|CONFIGS|GRADIENTS) ?)", "\n\n", text).strip() + "\n"


def _doc(gradients: GradientPlan) -> str:
    """The formulas, as `ssdgen derive --adjoint` prints them."""
    layer = gradients.plan.form.recurrence.layer
    title, *lines = str(gradients.adjoint).splitlines()
    text = [
        *textwrap.wrap(f"The gradients of {layer.name}: {layer.title}.", 112),
        "",
        f"Emitted by ssdgen;{title.partition(':')[2]}:",
    ]
    text += [f"    {line}".rstrip() for line in lines]
    return "\n".join(text).replace(repr(LOG2E), "LOG2E").replace("\\", "\\\\").replace('"""', "'''") + "\n"
