"""`forward` as an operator of PyTorch: what autograd, torch.compile and activation checkpointing see of a call of kernels.

The operator is the function itself, which an outer call passes its arguments on to where somebody traces it; where somebody
only differentiates it, a torch.autograd.Function does the same in less time, and where nobody does either, there is neither.
The gradients are an operator too, of the kernels in the module of gradients. Where there are none, and for more elements than
int32 reaches, gradients are those of the portable form, computed in float32 (with plain torch on the same device), block by
block of tokens from the last one back. Beyond the inputs little is stored for the kernels, the states at the ends of the
forward pass's segments and the scalars of tokens, and nothing for the others; the states at which chunks or blocks begin are
computed again by kernels.

Copied verbatim beside the modules that ssdgen emits; it imports nothing of ssdgen.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from . import _blocks, _cut, _gradients, _packed, _replay, _tuned
from . import _runtime as _rt
from ._replay import PLAIN

KINDS = {
    "Tensor": "Tensor", "Tensor | None": "Tensor?", "float": "float", "int | None": "int?", "Config | None": "str"
}  # fmt: skip
"""The annotations of a `forward`, and what a schema has for them; a Config travels as text."""

SPECIAL = ("cu_seqlens", "seq_idx", "mask", "states_every")
"""The arguments of a `forward` between its tensors and its Config."""

NAMESPACE = "ssdgen"
BLOCK_CHUNKS = 16
"""Chunks of a block, at most: between them the portable form keeps what its gradient needs."""


class Operator:
    """A module's `forward`: `checked` is what it does where nobody differentiates it, with all arguments in its order;
    `configs` are its default Configs by the dtype of the argument `leader`."""

    def __init__(
        self,
        layer: _rt.Layer,
        forward: Callable[..., tuple[Tensor, ...]],
        checked: Callable[..., tuple[Tensor, ...]],
        configs: Mapping[torch.dtype, Any],
        leader: str,
    ) -> None:
        self._layer, self._checked, self._configs, self._leader = layer, checked, configs, leader
        self._module = forward.__module__
        arguments = configs, len(layer.inputs), len(layer.scalars), len(SPECIAL)
        self._calls = _replay.Calls(checked, *arguments)
        self._keeping = _replay.Calls(functools.partial(checked, keep=True), *arguments)
        parameters = inspect.signature(forward).parameters.values()
        self._names = [p.name for p in parameters]
        self._kinds = [KINDS[p.annotation] for p in parameters]
        required = [i for i in layer.inputs if i.default is None and not i.optional]
        self._specs = [*required, *(i for i in layer.inputs if i not in required)]
        scalars = len(self._specs) + len(layer.scalars)
        self._tensors = [*range(len(self._specs)), *range(scalars, scalars + len(layer.states))]
        """The places of the arguments that may be differentiated: inputs, then initial states."""
        self._inputs = [self._specs.index(i) for i in layer.inputs]
        """The place of each input of the layer among the arguments."""
        schema = ", ".join(f"{kind} {name}" for kind, name in zip(self._kinds, self._names, strict=True))
        values = len(layer.outputs) + 2 * len(layer.states)
        # A file may be imported under two names, and one name be given to two files: a process that defines an operator
        # twice crashes when it calls the first.
        place = f"{forward.__module__} {inspect.getfile(forward)}"
        name = f"{NAMESPACE}::{layer.name}_{hashlib.sha256(place.encode()).hexdigest()[:8]}"
        results = f"({', '.join(['Tensor'] * values)})"
        operator = torch.library.custom_op(name, self._run, mutates_args=(), schema=f"({schema}) -> {results}")
        operator.register_fake(self._fake)
        operator.register_autograd(self._differentiate, setup_context=self._save)
        self._operator = getattr(getattr(torch.ops, NAMESPACE), name.partition("::")[2]).default
        self._kept: dict[Any, tuple[int | None, int | None]] = {}
        self._kernels: Any = self._gradient_operator(name) if _gradients.beside(self._module) else None

    def _gradient_operator(self, name: str) -> Any:
        """The operator of the gradients by kernels: of a call's tensors and numbers, and what arrives at its results."""
        places = [*range(len(self._specs) + len(self._layer.scalars)), *self._tensors[len(self._specs) :]]
        arguments = [f"{self._kinds[i]} {self._names[i]}" for i in places]
        arriving = [f"Tensor? arriving_{i}" for i in range(len(self._layer.outputs) + 2 * len(self._layer.states))]
        packing = [f"Tensor? {name}" for name in _packed.NAMES]
        schema = ", ".join([*arguments, *packing, "int? states_every", *arriving])
        results = ", ".join(["Tensor"] * len(self._tensors))
        operator = torch.library.custom_op(
            f"{name}_gradients", self._run_gradients, mutates_args=(), schema=f"({schema}) -> ({results})"
        )
        operator.register_fake(self._fake_gradients)
        return getattr(getattr(torch.ops, NAMESPACE), f"{name.partition('::')[2]}_gradients").default

    def _split(self, arguments: Sequence[Any]) -> tuple[dict[str, Any], list[Any], list[Any], list[Any], list[Any]]:
        """Inputs by name, scalars, states, [cu_seqlens, seq_idx, mask, states_every] and what arrives, of what the operator of
        gradients takes."""
        inputs, scalars, states = len(self._specs), len(self._layer.scalars), len(self._layer.states)
        values = list(arguments)
        given = {spec.name: x for spec, x in zip(self._specs, values[:inputs], strict=True)}
        ends = inputs + scalars + states
        return (
            given,
            values[inputs : inputs + scalars],
            values[inputs + scalars : ends],
            values[ends : ends + 4],
            values[ends + 4 :],
        )

    def _run_gradients(self, *arguments: Any) -> tuple[Tensor, ...]:
        given, scalars, states, (edges, seq_idx, mask, every), arriving = self._split(arguments)
        outputs = len(self._layer.outputs)
        ends = outputs + len(states)
        inputs = [given[i.name] for i in self._layer.inputs]
        found = _gradients.of(self._module)(
            inputs, scalars, states, edges, arriving[:outputs], arriving[outputs:ends],
            seq_idx=seq_idx, mask=mask, states_every=every, kept=arriving[ends:],
        )  # fmt: skip
        assert found is not None  # what kernels do not reach is not passed here
        by_name = dict(zip((i.name for i in self._layer.inputs), found, strict=False))
        leader = next(x for x in inputs if x is not None)
        values = (by_name[spec.name] for spec in self._specs)
        return tuple(leader.new_empty(0) if x is None else x for x in (*values, *found[len(inputs) :]))

    def _fake_gradients(self, *arguments: Any) -> tuple[Tensor, ...]:
        given, _, states, _, _ = self._split(arguments)
        leader = given[self._layer.inputs[0].name]
        values = (*(given[spec.name] for spec in self._specs), *states)
        return tuple(leader.new_empty(0) if x is None else x.new_empty(x.shape) for x in values)

    def __call__(self, *arguments: Any) -> tuple[Tensor, ...]:
        """`forward` of all its arguments, in its order."""
        if torch.compiler.is_compiling():
            return self.call(*arguments) if self._runs_kernels(arguments) else self._checked(*arguments)
        if torch.is_grad_enabled() and self._requires_grad(arguments) and self._runs_kernels(arguments):
            return self.call(*arguments)
        values: tuple[Tensor, ...] = self._calls(*arguments)
        return values

    def _runs_kernels(self, arguments: tuple[Any, ...]) -> bool:
        given = [arguments[i] for i in self._tensors if isinstance(arguments[i], Tensor)]
        return len(given) > 0 and _rt.runs_kernels(given[0])  # torch.compile of PyTorch 2.11 has no truth of a list

    def _requires_grad(self, arguments: tuple[Any, ...]) -> bool:
        for i in self._tensors:
            x = arguments[i]
            if isinstance(x, Tensor) and x.requires_grad:
                return True
        return False

    def call(self, *arguments: Any) -> tuple[Tensor, ...]:
        """A call that is differentiated or traced: differentiable, one node for a compiler."""
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        if _is_plain(tensors):
            eager: Callable[..., tuple[Tensor, ...]] = _Eager.apply
            return eager(self, arguments, *tensors)
        *before, every, config = arguments
        known = config is None or isinstance(config, type(self._configs[_rt.F32]))
        known = known and (every is None or type(every) is int)
        if not known or not all(map(_fits, self._kinds, before)):  # a mistake, of which `forward` itself speaks better
            with torch.no_grad():
                return self._checked(*arguments)
        values: tuple[Tensor, ...] = self._operator(*before, every, _text(config))
        return values if every is not None else values[: -len(self._layer.states)]

    def _run(self, *arguments: Any) -> tuple[Tensor, ...]:
        *before, every, config = arguments
        values: tuple[Tensor, ...] = self._calls(*before, every, self._config(config))
        if every is None:
            values += tuple(values[0].new_empty(0, dtype=_rt.F32) for _ in self._layer.states)
        return values

    def _config(self, config: Any) -> Any:
        """A Config, of which the operator has the text."""
        return _config(type(self._configs[_rt.F32]), config) if isinstance(config, str) else config

    def _sizes(self, arguments: Sequence[Any]) -> dict[str, Any]:
        """The length of every axis; states have an entry of SEQUENCE."""
        size: dict[str, Any] = {}
        for spec, x in zip(self._specs, arguments, strict=False):
            if x is not None:
                size |= zip(_axes(spec, x), x.shape, strict=True)
        edges = arguments[self._names.index("cu_seqlens")]
        return {**size, _rt.SEQUENCE: size[self._layer.batch] if edges is None else edges.shape[0] - 1}

    def _fake(self, *arguments: Any) -> tuple[Tensor, ...]:
        layer, every, size = self._layer, arguments[-2], self._sizes(arguments)
        given = dict(zip((s.name for s in self._specs), arguments, strict=False))
        outputs = _cut.output_memory(layer, [given[i.name] for i in layer.inputs], size, None)
        dtype = _rt.widest(list(given.values()))
        finals = _cut.final_memory(layer, outputs, [None] * len(layer.states), size, None)
        kept = _blocks.memory(layer, size, every, False, outputs[0]) or [f.new_empty(0) for f in finals]
        return (*outputs, *(x.to(dtype) for x in finals), *(x.to(_rt.F32 if every is None else dtype) for x in kept))

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        self._keep(ctx, inputs)

    def _keep(self, ctx: Any, inputs: Sequence[Any], kept: Sequence[Tensor] = ()) -> None:
        """Keep a call's arguments for its gradients, and what else `run` has for them."""
        ctx.places = [i for i, x in enumerate(inputs) if isinstance(x, Tensor)]
        ctx.save_for_backward(*(inputs[i] for i in ctx.places), *kept)
        ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.set_materialize_grads(False)

    def _differentiate(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (given, _), needed = self._given(ctx), ctx.needs_input_grad
        found = self._by_operator(given, grads)
        if found is None:
            found = self._portably(given, grads, [self._names[i] for i in self._tensors if needed[i]])
        return tuple(g if n else None for g, n in zip(found, needed, strict=True))

    def run(self, ctx: Any, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """The values of a call; what its gradients read besides its arguments is kept."""
        ctx.kept = every, chunk = self._keeps(arguments)
        if every is None and chunk is None:
            values: tuple[Tensor, ...] = self._calls(*arguments)
            self._keep(ctx, arguments)
            return values
        values = self.keeping(arguments, every, chunk)
        end = len(self._layer.outputs) + len(self._layer.states)
        self._keep(ctx, arguments, values[end:])
        return values[:end]

    def keeping(self, arguments: Sequence[Any], every: int | None, chunk: int | None) -> tuple[Tensor, ...]:
        """`forward` of all its arguments, and then what is kept for gradients: the states `every` so many tokens, and the
        scalars of tokens if there is a `chunk` for them."""
        calls = self._calls if chunk is None else self._keeping
        values: tuple[Tensor, ...] = calls(*arguments[:-2], every, arguments[-1])
        return values

    def kept(self, values: Sequence[Tensor], every: int | None, chunk: int | None) -> dict[str, Any]:
        """What gradients take of what `keeping` kept, in the order of its values."""
        starts = 0 if every is None else len(self._layer.states)
        states = {"starts": values[:starts], "starts_every": every}
        return {**states, "decays": values[starts:], "decays_chunk": chunk}

    def _keeps(self, arguments: Sequence[Any]) -> tuple[int | None, int | None]:
        """Of how many tokens the segments are whose first states are kept for gradients, and the chunks whose scalars of tokens
        are; None if none are."""
        *before, every, config = arguments
        special = every is not None or any(x is not None for x in before[-3:])
        if self._kernels is None or special or not (config is None or isinstance(config, type(self._configs[_rt.F32]))):
            return None, None
        tensors = arguments[: len(self._specs)]
        key = (
            config,
            _tuned.edition(),
            *((x.shape, x.dtype, x.device) if isinstance(x, Tensor) else None for x in tensors),
        )
        if key not in self._kept:
            if len(self._kept) >= _replay.MOST:
                self._kept.clear()
            layer, inputs, scalars = self._layer, len(self._specs), len(self._layer.scalars)
            given = {i.name: arguments[at] for i, at in zip(layer.inputs, self._inputs, strict=True)}
            numbers = dict(zip((s.name for s in layer.scalars), arguments[inputs : inputs + scalars], strict=True))
            states = dict(zip(layer.states, arguments[inputs + scalars :], strict=False))
            size, _ = _packed.check(layer, given, states, numbers, (None, None, None))
            self._kept[key] = _gradients.of(self._module).keeps(list(given.values()), size, config)
        return self._kept[key]

    def differentiate(self, ctx: Any, grads: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Tensor | None]:
        """The gradients of those tensors of a call that are `needed`, for those that arrive at its values."""
        (given, kept), places = self._given(ctx), ctx.places
        found = self._by_kernels(given, grads, self.kept(kept, *ctx.kept))
        if found is None:
            names = [self._names[i] for i, n in zip(places, needed, strict=True) if n]
            found = self._portably(given, grads, names)
        return [found[i] if n else None for i, n in zip(places, needed, strict=True)]

    def _given(self, ctx: Any) -> tuple[list[Any], Sequence[Tensor]]:
        """The arguments of a call, and what else was kept for its gradients."""
        if torch.is_grad_enabled():
            raise NotImplementedError(
                f"{self._layer.name}: a gradient of kernels cannot be differentiated again; compute on the CPU, or leave out"
                " create_graph=True"
            )
        given, saved = list(ctx.others), ctx.saved_tensors  # a checkpoint gives them out once
        for i, x in zip(ctx.places, saved, strict=False):
            given[i] = x
        return given, saved[len(ctx.places) :]

    def _by_kernels(
        self, given: list[Any], grads: Sequence[Tensor | None], kept: Mapping[str, Any]
    ) -> list[Tensor | None] | None:
        """The gradients of the arguments of a call; None for a call that has something which kernels lack."""
        if self._kernels is None or not _rt.runs_kernels(given[self._inputs[0]]):
            return None
        outputs, states, inputs = len(self._layer.outputs), len(self._layer.states), self._inputs
        end = len(self._specs) + len(self._layer.scalars)
        edges, seq_idx, mask, every = given[-5:-1]
        found = _gradients.of(self._module)(
            [given[i] for i in inputs], given[len(inputs) : end], given[end : end + states], edges,
            grads[:outputs], grads[outputs : outputs + states],
            seq_idx=seq_idx, mask=mask, states_every=every, kept=grads[outputs + states :], **kept,
        )  # fmt: skip
        if found is None:
            return None
        places: list[Tensor | None] = [None] * len(given)
        for at, gradient in zip((*inputs, *range(end, end + states)), found, strict=True):
            places[at] = gradient
        return places

    def _by_operator(self, given: list[Any], grads: Sequence[Tensor | None]) -> list[Tensor | None] | None:
        """The same by the operator of gradients, which a tracer sees."""
        if not self._have_kernels(given):
            return None
        places = [*range(len(self._specs) + len(self._layer.scalars)), *self._tensors[len(self._specs) :]]
        values = self._kernels(*(given[i] for i in places), *given[-5:-1], *grads)
        found: list[Tensor | None] = [None] * len(given)
        for at, gradient in zip(self._tensors, values, strict=True):
            found[at] = gradient
        return found

    def _portably(self, given: list[Any], grads: Sequence[Tensor | None], tensors: list[str]) -> list[Tensor | None]:
        """The gradients of `tensors`, for those that arrive at outputs, final and kept states, by the portable form."""
        named = dict(zip(self._names, [*given[:-1], self._config(given[-1])], strict=True))
        # a tracer leaves sizes open, by which no table of configurations can be searched
        config = named["config"] or self._configs.get(named[self._leader].dtype, self._configs[_rt.F32])
        every = named["states_every"]
        if every is not None:  # kept states are at ends of chunks of the forward pass, which may be shorter
            config = replace(config, chunk=min(config.chunk, every & -every))
        named["config"] = config
        sums = {name: torch.zeros_like(named[name], dtype=_rt.widest((named[name],))) for name in tensors}
        packed = any(named[name] is not None for name in ("cu_seqlens", "seq_idx", "mask"))
        if packed or not self._sizes(given)[self._layer.time]:
            self._add(sums, named, grads, slice(None))
        else:
            self._walk_back(sums, named, grads)
        return [sums[name].to(named[name].dtype) if name in sums else None for name in self._names]

    def _have_kernels(self, given: Sequence[Any]) -> bool:
        """Whether kernels compute the gradients of a call: there are some, and int32 reaches all of it."""
        tensors = [given[i] for i in range(len(self._specs))]
        runs = self._kernels is not None and _rt.runs_kernels(given[self._names.index(self._leader)])
        chunk = _gradients.chunk_of(_gradients.CHUNK, given[-2])
        return runs and _gradients.reached(self._layer, self._sizes(given), tensors, chunk)

    def _walk_back(self, sums: dict[str, Tensor], named: dict[str, Any], grads: Sequence[Tensor | None]) -> None:
        """Add the gradients block by block from the last; what arrives at the state that a block begins with goes on to the
        one before."""
        layer, every = self._layer, named["states_every"]
        chunk = named["config"].chunk
        tokens = chunk * next(d for d in range(BLOCK_CHUNKS, 0, -1) if every is None or every // chunk % d == 0)
        length = self._sizes([named[n] for n in self._names])[layer.time]
        outputs, states = len(layer.outputs), list(layer.states)
        initials = [self._names[i] for i in self._tensors[len(self._specs) :]]
        arguments = {**named, "states_every": tokens}
        starts = self.call(*(arguments[n] for n in self._names))[-len(states) :] if length > tokens else ()
        arriving = list(grads[outputs : outputs + len(states)])
        for start in range((length - 1) // tokens * tokens, -1, -tokens):
            end = min(start + tokens, length)
            if every is not None and end % every == 0:
                kept = [None if g is None else g.select(1, end // every - 1) for g in grads[-len(states) :]]
                arriving = list(map(_sum, arriving, kept))
            now = slice(start, end)
            block = {**named, "states_every": None}
            for spec, name in zip(self._specs, self._names, strict=False):
                block[name] = _cut.piece_of(layer, slice(None), now, _axes(spec, named[name]), named[name])
            if start:
                block |= {n: s.select(1, start // tokens - 1) for n, s in zip(initials, starts, strict=True)}
            named_outputs = zip(layer.outputs.values(), grads, strict=False)
            reaching = [_cut.piece_of(layer, slice(None), now, axes, g) for axes, g in named_outputs]
            arriving = self._add(sums, block, [*reaching, *arriving], now, initials, inner=start > 0)

    def _add(
        self, sums: dict[str, Tensor], named: dict[str, Any], grads: Sequence[Tensor | None], now: slice,
        initials: Sequence[str] = (), inner: bool = False,
    ) -> list[Tensor | None]:  # fmt: skip
        """Add the gradients of the portable form of a call, of which `now` are the tokens of `sums`. Returns those of the
        initial states of an `inner` block, which are in no sum."""
        passed = initials if inner else ()
        leaves = {
            n: named[n].detach().requires_grad_() for n in dict.fromkeys((*sums, *passed)) if named[n] is not None
        }
        with torch.enable_grad(), _rt.portable():
            values = self._checked(*({**named, **leaves}[name] for name in self._names))
        reached = [(v, g) for v, g in zip(values, grads, strict=False) if g is not None and v.requires_grad]
        if not reached or not leaves:
            return [None for _ in passed]
        ends, arrived = [v for v, _ in reached], [g for _, g in reached]
        found = torch.autograd.grad(ends, list(leaves.values()), arrived, allow_unused=True)
        gradients = dict(zip(leaves, found, strict=True))
        for name, gradient in gradients.items():
            if name in sums and gradient is not None and not (inner and name in initials):
                place = self._names.index(name)
                axes = _axes(self._specs[place], sums[name]) if place < len(self._specs) else ()
                sums[name][_cut.place_of(self._layer, slice(None), now, axes)] += gradient
        return [gradients.get(name) for name in passed]


class _Eager(torch.autograd.Function):
    """A call outside of any tracer, for which the operator's own ways in and out take longer than the launches."""

    @staticmethod
    def forward(ctx: Any, operator: Operator, arguments: tuple[Any, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.operator = operator  # the arguments are not kept: of them what is saved is
        return operator.run(ctx, arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return (None, None, *ctx.operator.differentiate(ctx, grads, ctx.needs_input_grad[2:]))


def _is_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors are nothing but that, and nobody traces what is done with them."""
    if torch.compiler.is_compiling() or torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
        return False
    return all(type(x) in PLAIN for x in tensors)


def _fits(kind: str, value: Any) -> bool:
    """Whether a schema takes an argument: a tensor is one, a number too, and only what may be None is."""
    if value is None:
        return kind.endswith("?")
    return isinstance(value, (int, float) if kind == "float" else Tensor)


def _axes(spec: _rt.Input, x: Tensor | None) -> _rt.Axes:
    """The axes of an input as it was passed."""
    return spec.axes if x is None else next(a for a in (spec.axes, *spec.narrower) if len(a) == x.dim())


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def _text(config: Any) -> str:
    """A Config, or None, as text."""
    return "" if config is None else ",".join(f"{f.name}={getattr(config, f.name)}" for f in fields(config))


def _config(kind: type, text: str) -> Any:
    """The Config that a text is of; None for an empty one."""
    if not text:
        return None
    default = kind()
    pairs = (pair.split("=") for pair in text.split(","))
    return kind(**{name: type(getattr(default, name))(value) for name, value in pairs})
