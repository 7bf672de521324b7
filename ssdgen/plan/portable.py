"""The portable path: the same chunk form in plain torch, for any device and dtype, differentiable.

A loop over chunks, each exactly as long as it is, so there is no padding; tensors are broadcast by axis name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ssdgen.ir.chunkform import ChunkForm, Decay, Read, Score
from ssdgen.ir.expr import ONE, ZERO, Apply, Axes, Contract, Expr, Index, Ref, Size, axes_of, mul, rewrite
from ssdgen.ir.plan import KEY, Config, Cumsum, Last, Let
from ssdgen.ir.portable import Einsum, Portable, PortableInput, PortableOutput, PortableStatement, Shift, Slice
from ssdgen.plan.decays import Sums, decayed, grown
from ssdgen.plan.lower import at_most_0, clamp_log2, fold, inline, retime, where
from ssdgen.plan.names import host_scope


def portable(form: ChunkForm, config: Config) -> Portable:
    """The portable path of a chunk form."""
    return PortableBuilder(form, config).build()


@dataclass
class PortableBuilder:
    """Builds the portable path; `order` is the order of the axes of everything that has no other."""

    form: ChunkForm
    config: Config
    tokens: list[PortableStatement] = field(default_factory=list)
    chunk: list[PortableStatement] = field(default_factory=list)
    known: dict[str, Ref] = field(default_factory=dict)
    sizes: dict[str, None] = field(default_factory=dict)
    indices: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layer = self.form.recurrence.layer
        self.layer, self.time = layer, layer.time
        rest = tuple(a.name for a in layer.axes if a.name not in (layer.batch, layer.time, layer.head))
        self.order: Axes = (layer.batch, layer.time, KEY, layer.head, *rest)
        self.lets = {let.name: let.value for let in layer.lets}
        self.names = host_scope(layer)
        self.sums: dict[str, Sums] = {}

    def build(self) -> Portable:
        """The whole path."""
        form = self.form
        for decay in form.decays:
            self.sums[decay.name] = self._decay(decay)
        scores = {s.name: self._score(s) for s in form.scores}
        for read in form.reads:
            self.known[read.name] = self._read(read, scores)
        outputs = tuple(self.output(o.name) for o in form.outputs)
        advance: list[PortableStatement] = []
        for state in form.states:
            self._advance(advance, state.name)
        return Portable(
            self.inputs(),
            tuple(self.sizes),
            tuple(self.indices),
            tuple(self.tokens),
            tuple(self.chunk),
            outputs,
            tuple(advance),
        )

    def inputs(self) -> tuple[PortableInput, ...]:
        """The inputs, with the axes among `order` that their tensors have."""
        inputs = []
        for t in self.layer.inputs:
            axes = tuple(a for a in dict(self.config.layouts).get(t.name, t.axes) if self.layer.shared(a) in self.order)
            target = tuple(self.layer.shared(a) for a in axes)
            order = tuple(sorted(target, key=self.order.index))
            inputs.append(PortableInput(t.name, axes, order, target != axes, self.time in axes))
        return tuple(inputs)

    def natural(self, axes: Axes) -> Axes:
        """`axes` in the builder's order, without those that it lacks."""
        return tuple(a for a in self.order if a in axes)

    def value(self, section: list[PortableStatement], expr: Expr, lag: bool = False) -> Expr:
        """`expr` over tensors: of all tokens if `section` is `tokens`, else of the chunk's."""
        whole = section is self.tokens

        def rule(e: Expr) -> Expr | None:
            match e:
                case Ref(name=name) if name in self.lets and lag:
                    return self.value(section, inline(e, self.lets), lag)
                case Ref(name=name) if name in self.lets:
                    source = self._let(name)
                case Ref(name=name, lag=0) if name in self.known:
                    return self.known[name]
                case Ref(name=name) if name in {p.name for p in self.layer.params}:
                    return Ref(self.names.of("host", name))
                case Ref():
                    source = self.source(e, lag or bool(e.lag))
                case Size(axis=axis):
                    self.sizes.setdefault(axis)
                    return Ref(f"size_{axis}")
                case Index(axis=axis):
                    self.indices.setdefault(axis)
                    return Ref(f"index_{axis}", (axis,))
                case _:
                    return None
            return source if whole or self.time not in source.axes else self._slice(section, source)

        return rewrite(fold(expr), rule)

    def source(self, ref: Ref, lag: bool) -> Ref:
        """An input, with `lag` of the tokens before."""
        tensor = self.layer.tensor(ref.name)
        source = Ref(self.names.of("host", ref.name), self.natural(tuple(self.layer.shared(a) for a in tensor.axes)))
        if not lag or self.time not in source.axes:
            return source
        key = f"before {ref.name}"
        if key not in self.known:
            self.known[key] = Ref(self.names.of("before", f"{ref.name}_before"), source.axes)
            self.tokens.append(Shift(self.known[key], source))
        return self.known[key]

    def _let(self, name: str) -> Ref:
        key = f"let {name}"
        if key not in self.known:
            let = {x.name: x for x in self.layer.lets}[name]
            value = self.value(self.tokens, let.value)
            self.known[key] = Ref(self.names.of("let", name), self.natural(axes_of(value)))
            self.tokens.append(Let(self.known[key], value, let.span.line))
        return self.known[key]

    def _slice(self, section: list[PortableStatement], source: Ref) -> Ref:
        key = f"now {source.name}"
        if key in self.known:
            return self.known[key]
        target = Ref(self.names.of("now", f"{source.name}_now"), source.axes)
        if section is self.chunk:
            self.known[key] = target
        section.append(Slice(target, source))
        return target

    def named(self, section: list[PortableStatement], name: str, value: Expr, axes: Axes | None = None) -> Ref:
        """Append name = value; its Ref."""
        target = Ref(self.names.of("value", name), self.natural(axes_of(value)) if axes is None else axes)
        section.append(Let(target, value))
        return target

    def _decay(self, decay: Decay) -> Sums:
        if decay.kind == "none":
            return Sums(ZERO, ZERO, ZERO)
        token = Ref("token", (self.time,))
        log2 = self.named(self.tokens, f"{decay.name}_log2", clamp_log2(self.value(self.tokens, decay.log2)))
        if decay.kind == "constant":
            through = self.named(self.chunk, f"{decay.name}_sum", mul(Apply("add", (token, ONE)), log2))
            before: Expr = mul(token, log2)
        else:
            now = self._slice(self.chunk, log2)
            through = Ref(self.names.of("value", f"{decay.name}_sum"), log2.axes)
            self.chunk.append(Cumsum(through, now))
            before = Apply("sub", (through, now))
        end = Ref(self.names.of("value", f"{decay.name}_end"), tuple(a for a in through.axes if a != self.time))
        self.chunk.append(Last(end, through))
        return Sums(through, before, end)

    def _weight(self, name: str, section: list[PortableStatement]) -> Expr:
        return self.value(section, self.form.weight(name).value)

    def _score(self, score: Score) -> Ref:
        """scores[i, j]: the decay joins the product if it varies along the axis that is summed."""
        section, time, head = self.chunk, self.time, self.layer.head
        axes = (self.layer.batch, time, KEY, head)
        sums = self.sums[score.decay]
        later = sums.before if score.at == -1 else sums.through
        left = decayed(later, retime(sums.through, time, KEY), self._between)
        vector = self.value(section, score.vector)
        column = retime(self.value(section, score.column, bool(score.lag)), time, KEY)
        inside = score.axis in axes_of(left)
        if left != ONE:
            left = self.named(section, f"{score.decay}_left", left)
        product = Ref(self.names.of("product", f"{score.name}_product"), axes)
        section.append(Einsum(product, (vector, column, left) if inside else (vector, column)))
        weight = retime(self._weight(score.weight, section), time, KEY)
        value = mul(product, ONE if inside else left, weight)
        return self.named(section, score.name, where(self._causal(score.at), value), axes)

    def _between(self, difference: Expr) -> Expr:
        """A difference of sums at most 0, between two tokens only: of a token and itself its gradient would be noise."""
        return at_most_0(where(self._causal(-1), difference))

    def _causal(self, at: int) -> Ref:
        key = f"causal {at}"
        if key not in self.known:
            mask = Apply("gt" if at == -1 else "ge", (Ref("token", (self.time,)), Ref("token", (KEY,))))
            self.known[key] = self.named(self.chunk, "causal_before" if at == -1 else "causal", mask)
        return self.known[key]

    def _read(self, read: Read, scores: dict[str, Ref]) -> Ref:
        section = self.chunk
        state = self.form.state(read.state)
        sums = self.sums[read.decay]
        reach = grown(sums.before if read.at == -1 else sums.through)
        layer = self.layer
        axes = (layer.batch, self.time, layer.head) + ((state.row_axis,) if state.row_axis else ())
        carried = Ref(self.names.of("carried", f"{read.name}_carried"), axes)
        vector = mul(self.value(section, read.vector), reach)
        section.append(Einsum(carried, (vector, Ref(self.names.of("host", state.name), state.axes))))
        total: Expr = carried
        for interaction in read.interactions:
            score = scores[interaction.score]
            if interaction.row is None:
                total = Apply("add", (total, Contract(score, ONE, KEY)))
                continue
            row = retime(self.value(section, interaction.row, bool(interaction.lag)), self.time, KEY)
            within = Ref(self.names.of("value", f"{read.name}_within_{interaction.score}"), axes)
            section.append(Einsum(within, (score, row)))
            total = Apply("add", (total, within))
        return self.named(section, read.name, total, axes)

    def output(self, name: str) -> PortableOutput:
        """An output of what the chunk (or the step) has read."""
        form = next(o for o in self.form.outputs if o.name == name)
        declared = next(o for o in self.layer.outputs if o.name == name)
        body: list[PortableStatement] = []
        value = self.value(body, form.value)
        target = Ref(self.names.of("now", f"{name}_now"), self.natural(form.axes))
        body.append(Let(target, value, declared.value.span.line))
        self.known[name] = target
        gates = []
        for gate in form.gates:
            section: list[PortableStatement] = []
            gated = self.value(section, gate.value)
            section.append(Let(target, gated, gate.span.line))
            gates.append((gate.tensor, tuple(section)))
        axes = dict(self.config.layouts).get(name, form.axes)
        pieces = self.names.of("pieces", f"{name}_pieces")
        return PortableOutput(name, pieces, tuple(body), tuple(gates), target, axes)

    def _advance(self, section: list[PortableStatement], name: str) -> None:
        """S = 2^end S + sum over tokens of what is left of each input; the column bears it, along whose axis it may vary."""
        state = self.form.state(name)
        sums = self.sums[state.decay]
        target = Ref(self.names.of("host", state.name), state.axes)
        total: Expr = mul(grown(sums.end), target)
        for i, term in enumerate(state.terms):
            lag = bool(term.lag)
            carry = mul(self._weight(term.weight, section), decayed(sums.end, sums.through, at_most_0))
            if axes_of(carry):
                carry = self.named(section, "carry", carry)
            column = self.value(section, term.column, lag)
            factors: tuple[Expr, ...] = (mul(carry, column),)
            if term.row is not None:
                factors = (self.value(section, term.row, lag), *factors)
            gained = Ref(self.names.of("value", f"{state.name}_gained" + (f"_{i + 1}" if i else "")), state.axes)
            section.append(Einsum(gained, factors))
            total = Apply("add", (total, gained))
        section.append(Let(target, total))
