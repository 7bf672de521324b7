"""Names in emitted code: one scope a function, so that a spec's `b`, `T`, `lambda` or `chunk` never collides."""

from __future__ import annotations

import builtins
import keyword
import re

from ssdgen.ir.layer import Layer

RESERVED = frozenset(
    {*keyword.kwlist, *dir(builtins), "ct", "math", "torch", "annotations", "dataclass", "replace"}
    | {
        "dot",
        "softplus",
        "sign",
        "above",
        "within",
        "chunk_at",
        "await_previous",
        "segment_at",
        "has_chunk",
        "inner",
        "sum_five",
        "sum_four",
        "sum_pair",
        "exp2",
        "f16_scale",
        "sigmoid",
        "log1p",
        "log_sigmoid",
        "load",
        "load_direct",
        "slot_at",
        "store",
        "store_direct",
        "silu",
        "clamp",
        "LOG2E",
        "ZERO",
        "CONFIGS",
        "Config",
        "TENSORS",
    }
    | {
        "LAYER",
        "SPEC_DIGEST",
        "VARIANT",
        "Tensor",
        "_blocks",
        "_rt",
        "_cut",
        "_gradients",
        "_packed",
        "_step",
        "_tuned",
        "_portable",
        "_portable_step",
        "_step_kernels",
        "StepConfig",
        "STEP",
        "_three_kernel",
        "_segmented",
        "_single_walk",
        "forward",
        "init_state",
        "config",
    }
)
"""Names that emitted modules use at module level or take from Python; no name of a spec may stand for another there."""

PACKED, SHARED, KEPT, ENDS = "PACKED", "SHARED", "KEPT", "ENDS"
"""The flags of kernels compiled for packed sequences, for products of vectors that groups of heads share, and for callers who
keep states between the first and the last: at the ends of any chunks, or at the ends of segments alone."""

EVERY = "states_every"
"""The argument of `forward`, and the number in kernels, of tokens in a block at whose end states are kept."""

STARTS = "starts_every"
"""The same of the states that a forward pass keeps for its gradients."""

DECAYS = "decays"
"""The scalars of tokens, weights and running sums of decays, that a forward pass keeps for its gradients."""

CONSTANT = re.compile(
    "(CHUNK|TILE_.*|LATENCY_.*|SCORES|CARRIED|INTRA|STATE|WITH_.*|PACKED|SHARED|INDEXED|KEPT|ENDS|STARTED|WHOLE|STEADY)(?<!_)"
)
"""Names of compile-time constants and flags, kept free for them."""


class Names:
    """Hands out names that are unique in one function; the same key gets the same name again."""

    def __init__(self, taken: frozenset[str] = frozenset()) -> None:
        self._taken = set(RESERVED | taken)
        self._given: dict[tuple[str, str], str] = {}

    def of(self, kind: str, wanted: str) -> str:
        """The name of the thing `wanted` of a `kind` (input, tile, let ...): `wanted` itself, or with underscores added."""
        key = (kind, wanted)
        if key not in self._given:
            name = wanted
            while name in self._taken or (kind not in ("constant", "uniform", "flag") and CONSTANT.fullmatch(name)):
                name += "_"
            self._taken.add(name)
            self._given[key] = name
        return self._given[key]

    def fresh(self, wanted: str) -> str:
        """A name that nothing has yet: `wanted`, else with a number."""
        count, name = 1, wanted
        while name in self._taken or CONSTANT.fullmatch(name):
            count += 1
            name = f"{wanted}_{count}"
        self._taken.add(name)
        return name


def arguments(layer: Layer) -> dict[str, str]:
    """What `forward` calls the inputs, scalars and (by `initial_key`) initial states: their names, unless those are taken."""
    names = host_scope(layer)
    items = [t.name for t in layer.inputs] + [p.name for p in layer.params]
    initial = {initial_key(s.name): names.of("initial", f"{s.name}0") for s in layer.states}
    return {name: names.of("host", name) for name in items} | initial


def key_inputs(layer: Layer, leader: str) -> tuple[str, ...]:
    """The inputs whose dtypes a tuning key has: the leading one, then those of every token whose dtype may be another."""
    free = (t.name for t in layer.inputs if layer.time in t.axes and not t.like and t.required)
    return tuple(dict.fromkeys((leader, *free)))


def initial_key(state: str) -> str:
    """The key of a state's initial value in `arguments`: no name of a spec, so that an input may be called `S0`."""
    return f"{state}'"


HOST_LOCALS = frozenset(
    {
        "size",
        "sequences",
        "cu_seqlens",
        "seq_idx",
        "mask",
        "rows",
        "now",
        "first",
        "tensors",
        "chunk",
        "chunks",
        "start",
        "token",
        "dtype",
        "batch",
        "heads",
        "device",
        "cut",
        "ends",
        "found",
        "shared",
        "stream",
        "state_indices",
        "write_indices",
        "before",
        "out",
        "steady",
        "slots",
        "whole",
        "kept",
    }
    | {EVERY, STARTS}
    | {"chunk_cumsum", "token_step", "group_scores", "fwd_pass_state", "segment_states", "compute_out", "walk_out"}
    | {
        "entry_states",
        "state_gradients",
        "chunk_gradients",
        "segment_gradients",
        "token_gradients",
        "shares",
        "segments",
        "state_tiles",
        "parts",
        "sums",
    }
    | {"call", "states", "product", "precision", "jax", "jnp", "Array", "Any"}
)
"""Names that the host functions of an emitted module use themselves, and of the kernels they launch."""


def host_scope(layer: Layer) -> Names:
    """The scope of the host functions, with inputs, scalars, states and outputs named first, under the kind `host`."""
    names = Names(HOST_LOCALS)
    named = [t.name for t in layer.inputs] + [p.name for p in layer.params]
    for name in named + [s.name for s in layer.states] + [o.name for o in layer.outputs]:
        names.of("host", name)
    for state in layer.states:
        names.of("initial", f"{state.name}0")
        names.of("final", f"{state.name}_final")
    return names
