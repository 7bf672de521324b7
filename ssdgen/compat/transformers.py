"""The Mamba-2 mixers of transformers' models on emitted modules: one call exchanges the functions that they compute with.

    model = AutoModelForCausalLM.from_pretrained(...)
    use_kernels(model)              # ("Mamba2Mixer",)

Mamba2 itself and the hybrids around the same mixer (Bamba, FalconH1, GraniteMoeHybrid, NemotronH, Zamba2) call five functions
of their own modules, which stand for kernels of mamba_ssm and causal_conv1d. Those are what is exchanged, for all models of the
family in the process, until `restore`. Convolutions, scans and steps run on our kernels then, in training too; projections and
norms stay transformers'. Written for transformers 5.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ssdgen.compat.mamba_ssm import mamba_chunk_scan_combined, selective_state_update
from ssdgen.generated import causal_conv

_TAKEN: dict[ModuleType, dict[str, Any]] = {}
"""Modules whose functions were exchanged, with what they were."""


def use_kernels(model: torch.nn.Module) -> tuple[str, ...]:
    """Let the Mamba-2 mixers of a model of transformers compute with ssdgen: the names of their classes.

    Raises TypeError for what is no module, ValueError for one without such mixers.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"use_kernels: `model` must be a torch.nn.Module, got {type(model).__name__}")
    mixers = {type(m) for m in model.modules() if hasattr(m, "A_log") and hasattr(m, "conv1d")}
    found = {kind: sys.modules[kind.__module__] for kind in mixers}
    found = {kind: module for kind, module in found.items() if all(hasattr(module, name) for name in FUNCTIONS)}
    if not found:
        raise ValueError(
            f"use_kernels: {type(model).__name__} has no Mamba-2 mixer of transformers 5, one that calls {', '.join(FUNCTIONS)}"
        )
    for module in found.values():
        if module not in _TAKEN:
            _TAKEN[module] = {name: getattr(module, name) for name in FUNCTIONS}
            vars(module).update(FUNCTIONS)
    return tuple(sorted(kind.__name__ for kind in found))


def restore() -> None:
    """Give all models back what they computed with before."""
    for module, functions in _TAKEN.items():
        vars(module).update(functions)
    _TAKEN.clear()


def causal_conv1d_fn(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **options: Any
) -> Tensor:
    """The convolution of whole rows hidden_states[b d t]; `seq_idx`[b t] among the options keeps packed sequences apart."""
    y: Tensor = causal_conv.forward(
        hidden_states.mT, weight, bias, activation=_activation(activation), seq_idx=options.get("seq_idx")
    )
    return y.mT


def causal_conv1d_update(
    hidden_states: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """The convolution of the next tokens hidden_states[b d t]. conv_state[b d k], k at least w - 1, is rolled on in place."""
    older = conv_state.shape[-1] - (weight.shape[-1] - 1)  # inputs that are kept and not used
    if older < 0:
        raise ValueError(
            f"causal_conv1d_update: `conv_state` keeps {conv_state.shape[-1]} inputs, too few for the taps"
        )
    if older:
        t = hidden_states.shape[-1]
        conv_state[..., :older].copy_(torch.cat((conv_state, hidden_states), -1)[..., t : t + older])
    y: Tensor = causal_conv.steps(
        conv_state[..., older:], hidden_states.mT, weight, bias, activation=_activation(activation)
    )
    return y.mT


def mamba2_chunk_scan(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, **options: Any
) -> Tensor | tuple[Tensor, ...]:
    """`mamba_chunk_scan_combined`, of whose options those are passed on that it has."""
    known = {name: value for name, value in options.items() if name in _SCAN}
    return mamba_chunk_scan_combined(hidden_states, dt, A, B, C, chunk_size, **known)


def mamba2_selective_state_update(
    state: Tensor, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    **options: Any,
) -> Tensor:  # fmt: skip
    """`selective_state_update`, of whose options those are passed on that it has."""
    known = {name: value for name, value in options.items() if name in _UPDATE}
    return selective_state_update(state, hidden_states, dt, A, B, C, D, **known)


def mamba2_split_conv1d_scan_combined(*arguments: Any, **options: Any) -> None:
    """Nothing: the mixer then calls the functions above one by one, which have gradients."""


_SCAN = ("D", "z", "dt_bias", "initial_states", "seq_idx", "dt_softplus", "dt_limit", "return_final_states")
_UPDATE = ("z", "dt_bias", "dt_softplus")

FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        causal_conv1d_fn,
        causal_conv1d_update,
        mamba2_chunk_scan,
        mamba2_selective_state_update,
        mamba2_split_conv1d_scan_combined,
    )
}
"""What is exchanged, by name."""


def _activation(name: str | None) -> Any:
    """As `causal_conv` takes it; ValueError for one that it does not have."""
    if name not in (None, "silu", "swish"):
        raise ValueError(f"causal_conv1d: `activation` must be silu, swish or None, got {name!r}")
    return None if name is None else "silu"
