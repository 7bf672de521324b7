"""The causal depthwise convolution of Mamba layers, whole sequences and token by token, with its rolling cache.

    y[t] = activation(bias + sum_k weight[k] * x[t - (w - 1) + k])        k from 0 to w - 1, in each channel by itself

A Mamba layer sends what its projection gives through this before the recurrence. The rolling cache of a sequence is its last
w - 1 inputs, the oldest first and zero before the first token: what one call leaves, the next one, or `step`, goes on from.

On CUDA tensors kernels compute it; on CPU tensors, where gradients are wanted, and under torch.compile, plain torch, which
is differentiable on every device. Either way in float32 (float64 inputs: float64), rounded once, to the dtype of x.

Axes: b batch, t time, d channel, w tap, k = w - 1 inputs that a cache keeps.

Copied verbatim beside the modules that ssdgen emits; it imports nothing of ssdgen.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from . import _conv, _cut, _packed
from . import _runtime as _rt

Activation = Literal["silu"]

FLOATS = (_rt.BF16, _rt.F16, _rt.F32)

LAYER = _rt.Layer(
    "causal_conv",
    batch="b",
    time="t",
    head="d",
    inputs=(
        _rt.Input("x", ("b", "t", "d"), FLOATS),
        _rt.Input("weight", ("d", "w"), FLOATS),
        _rt.Input("bias", ("d",), FLOATS, optional=True),
    ),
    scalars=(),
    groups={},
    states={"cache": ("b", "d", "k")},
    outputs={"y": ("b", "t", "d")},
    dtypes={"y": "x"},
)

WIDTHS = range(2, 9)
"""The numbers of taps that are computed."""


@overload
def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *,
    initial: Tensor | None = None, cu_seqlens: Tensor | None = None, seq_idx: Tensor | None = None,
    activation: Activation | None = None, return_final: Literal[False] = False, out: Tensor | None = None,
) -> Tensor: ...  # fmt: skip


@overload
def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *,
    initial: Tensor | None = None, cu_seqlens: Tensor | None = None, seq_idx: Tensor | None = None,
    activation: Activation | None = None, return_final: Literal[True], out: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *,
    initial: Tensor | None = None, cu_seqlens: Tensor | None = None, seq_idx: Tensor | None = None,
    activation: Activation | None = None, return_final: bool = False, out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """The convolution of whole sequences: y[b t d] of the dtype of x and, with `return_final`, the final cache.

    x: [b t d], bfloat16, float16 or float32, on the CPU also float64; any strides, such as a slice of a
    projection; fastest where channels are contiguous
    weight: [d w], 2 to 8 taps, the one for the newest input last; its dtype may differ from that of x
    bias: [d], added if given
    initial: [b d w-1], the dtype of x: the rolling cache before the first token, zero if absent
    cu_seqlens: int32 or int64: where each of several sequences in a batch of 1 begins, and the last ends; caches
    then have an entry a sequence instead of axis b
    seq_idx: [b t], int32 or int64: a sequence begins wherever it changes; the initial cache enters the first of a
    row, the final one is that of its last
    activation: "silu" or None
    out: memory for y, [b t d] of the dtype of x, any strides; not that of x

    A sequence shorter than a cache leaves a part of the initial one in the final one. Where a gradient is wanted, or
    torch.compile traces it, plain torch computes it, on a GPU too, packed sequences one by one. seq_idx synchronises
    once; cu_seqlens only with plain torch, and its values are checked on the CPU, on a GPU if SSDGEN_DEBUG is set.
    Raises TypeError or ValueError, which name the tensor, for a missing input, a dtype, rank, size, device or range;
    NotImplementedError for `out` where a gradient is wanted.
    """
    size, sequences = _packed.check(
        LAYER, {"x": x, "weight": weight, "bias": bias}, {"cache": None}, {}, (cu_seqlens, seq_idx, None)
    )
    size = {**size, "k": _check_width(weight) - 1}
    silu = _check_activation(activation)
    entries = size.get(_rt.SEQUENCE, size["b"])
    shape = (entries, size["d"], size["k"])
    if initial is not None:
        _check_like("initial", initial, x, ("b" if cu_seqlens is None else "sequences", "d", "w-1"), shape)
    if out is not None:
        _check_like("out", out, x, ("b", "t", "d"), x.shape)
        if _wants_gradient(x, weight, bias, initial, out):
            raise NotImplementedError(
                f"{LAYER.name}: with `out` there are no gradients; leave it out, or use torch.no_grad()"
            )
    if sequences is not None and sequences.whole:
        sequences = None
    if not x.numel():
        y, final = x.clone() if out is None else out, x.new_zeros(shape) if initial is None else initial.clone()
    elif _runs_kernels(x, weight, bias, initial):
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
        final = _convolve(x, weight, bias, initial, size, sequences, silu, return_final, y)
    else:
        before = x.new_zeros(shape) if initial is None else initial

        def portable(x: Tensor, weight: Tensor, bias: Tensor | None, cache: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
            return _portable(x, weight, bias, cache, silu)

        y, final = _packed.each(LAYER, portable, sequences, (x, weight, bias), (), (before,), size, 0)
        y = y if out is None else out.copy_(y)
    return (y, final) if return_final else y


def step(
    cache: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, *,
    activation: Activation | None = None, state_indices: Tensor | None = None, out: Tensor | None = None,
    steady: bool = False,
) -> Tensor:  # fmt: skip
    """The convolution of one token: y[b d] of the dtype of x. The cache is rolled on in place.

    cache: [b d w-1], the dtype of x: the last w - 1 inputs, the oldest first; with `state_indices`, [slots d w-1]
    x: [b d]
    state_indices: [b], int32: the slot of each row, none twice; a row of slot -1 is left out, its output stays as it
    was, or is 0 where there is no `out`
    out: memory for y, [b d] of the dtype of x, not that of x; with it, nothing is allocated (for CUDA graphs)
    steady: promises that what wrote the cache, weight and bias was queued before the last kernel that was launched the
    ordinary way, as PyTorch's are: they are read while that one, and those behind it, may still run. Not used with
    `state_indices`

    weight, bias, activation: as in `forward`. Raises TypeError or ValueError, which name the tensor, for a missing
    input, a dtype, rank, size or device, and for a wrong slot, on a GPU if SSDGEN_DEBUG is set; NotImplementedError
    where a gradient is wanted, which a cache that changes in place does not have.
    """
    for name, value in (("x", x), ("out", x if out is None else out)):
        if not isinstance(value, Tensor) or value.dim() != 2:
            found = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{LAYER.name}: `{name}` must be a torch.Tensor [b d] (rank 2), got {found}")
    place = None if out is None else out.unsqueeze(1)
    y = steps(
        cache, x.unsqueeze(1), weight, bias,
        activation=activation, state_indices=state_indices, out=place, steady=steady,
    )  # fmt: skip
    return y.squeeze(1) if out is None else out


def steps(
    cache: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, *,
    activation: Activation | None = None, state_indices: Tensor | None = None, out: Tensor | None = None,
    steady: bool = False,
) -> Tensor:  # fmt: skip
    """The convolution of the next few tokens, x[b t d]: y[b t d]. Otherwise as `step`, which is this for one token."""
    silu = _checked_steps(cache, x, weight, bias, activation, state_indices)
    _rt.check_flag(LAYER.name, "steady", steady)
    if out is not None:
        _check_like("out", out, x, ("b", "t", "d"), x.shape)
    if _wants_gradient(x, weight, bias, cache, out):
        raise NotImplementedError(
            f"{LAYER.name}: a step changes `cache` in place and has no gradient; use torch.no_grad()"
        )
    y = out
    if y is None:
        make = torch.empty if state_indices is None else torch.zeros
        y = make(x.shape, dtype=x.dtype, device=x.device)
    if not _runs_kernels(x):
        _portable_steps(cache, x, weight, bias, silu, state_indices, y)
    elif x.numel():
        _rt.check_kernels(LAYER.name, (x,))
        _conv.launch_roll(cache, x, weight, bias, silu, state_indices, steady, y)
    return y


def init_cache(
    batch: int, channels: int, width: int, *, device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """The cache before any token, zeros [b d w-1], for `width` taps; `dtype` is that of the x to come."""
    return torch.zeros((batch, channels, width - 1), dtype=dtype, device=device)


def _convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor | None, size: Mapping[str, int],
    sequences: _packed.Sequences | None, silu: bool, return_final: bool, y: Tensor,
) -> Any:  # fmt: skip
    """Compute checked arguments with kernels: y is written; the final cache, None unless `return_final`."""
    _rt.check_kernels(LAYER.name, (x,))
    entries = size["b"] if sequences is None else sequences.count
    final = x.new_empty((entries, size["d"], size["k"])) if return_final else None
    if sequences is not None:
        if x.numel() > _rt.LIMIT:
            raise ValueError(f"{LAYER.name}: packed sequences of more than 2**31 - 1 elements; pass fewer at once")
        if initial is not None:
            initial = _packed.spread_states(LAYER, sequences, "cache", initial)
        _conv.launch(x, weight, bias, initial, sequences, silu, y, final)
        return final if final is None else _packed.pick_states(LAYER, sequences, "cache", final, size["b"])
    for rows, now in _cut.pieces(LAYER, size, _conv.tokens_of_block(x), (x,)):
        before = None if initial is None else initial[rows]
        if now.start:  # the piece goes on from the inputs before it
            before = x[rows, now.start - size["k"] : now.start].mT
        after = None if final is None else final[rows]
        _conv.launch(x[rows, now], weight, bias, before, None, silu, y[rows, now], after)
    return final


def _portable(x: Tensor, weight: Tensor, bias: Tensor | None, cache: Tensor, silu: bool) -> tuple[Tensor, Tensor]:
    """The same in plain torch, for any device: in float32, or float64 if an input is, and differentiable."""
    dtype = _rt.widest((x, weight, bias))
    inputs = torch.cat((cache.mT, x), 1)  # [B, K + T, D]
    wide, taps = inputs.to(dtype), weight.to(dtype)
    length = x.shape[1]
    total = torch.zeros((), dtype=dtype, device=x.device) if bias is None else bias.to(dtype)
    for k in range(weight.shape[1]):
        total = total + taps[:, k] * wide[:, k : k + length]
    if silu:
        total = torch.nn.functional.silu(total)
    return total.to(x.dtype), inputs[:, length:].mT.contiguous()


def _portable_steps(
    cache: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, state_indices: Tensor | None, y: Tensor
) -> None:
    """`_portable` of the next tokens, in place."""
    if state_indices is None:
        value, final = _portable(x, weight, bias, cache, silu)
        y.copy_(value)
        cache.copy_(final)
        return
    rows = (state_indices >= 0).nonzero()[:, 0]
    slots = state_indices[rows]
    y[rows], cache[slots] = _portable(x[rows], weight, bias, cache[slots], silu)


def _checked_steps(
    cache: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, state_indices: Tensor | None
) -> bool:
    """Check the arguments of `steps`; whether the activation is silu."""
    size, _ = _packed.check(LAYER, {"x": x, "weight": weight, "bias": bias}, {"cache": None}, {}, (None, None, None))
    kept = _check_width(weight) - 1
    silu = _check_activation(activation)
    if state_indices is None:
        _check_like("cache", cache, x, ("b", "d", "w-1"), (size["b"], size["d"], kept))
    else:
        _check_like("cache", cache, x, ("slots", "d", "w-1"), (None, size["d"], kept))
        _check_indices(state_indices, x, cache)
    return silu


def _runs_kernels(x: Tensor, *others: Tensor | None) -> bool:
    """Whether kernels compute a call: not under torch.compile, which fuses the plain form, nor where it is differentiated."""
    return not torch.compiler.is_compiling() and _rt.runs_kernels(x) and not _wants_gradient(x, *others)


def _wants_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _check_width(weight: Tensor) -> int:
    """The number of taps."""
    width = weight.shape[1]
    if width not in WIDTHS:
        raise ValueError(
            f"{LAYER.name}: `weight`[d w] must have {WIDTHS[0]} to {WIDTHS[-1]} taps (axis w), got {width}"
        )
    return width


def _check_activation(activation: str | None) -> bool:
    """Whether it is silu."""
    if activation not in (None, "silu"):
        raise ValueError(f"{LAYER.name}: `activation` must be 'silu' or None, got {activation!r}")
    return activation is not None


def _check_like(name: str, value: Tensor, x: Tensor, axes: _rt.Axes, shape: Sequence[int | None]) -> None:
    """Check a tensor that must be where x is, of its dtype, and of a shape; None stands for any length."""
    form = f"[{' '.join(axes)}]"
    if not isinstance(value, Tensor):
        raise TypeError(f"{LAYER.name}: `{name}` must be a torch.Tensor, got {type(value).__name__}")
    if value.dim() != len(shape) or any(w not in (None, n) for w, n in zip(shape, value.shape, strict=True)):
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(f"{LAYER.name}: `{name}`{form} must have shape [{wanted}], got {list(value.shape)}")
    if value.dtype != x.dtype:
        raise TypeError(f"{LAYER.name}: `{name}` must have the dtype of `x`, {x.dtype}, got {value.dtype}")
    if value.device != x.device:
        raise ValueError(f"{LAYER.name}: `{name}` is on {value.device}, `x` on {x.device}")


def _check_indices(state_indices: Tensor, x: Tensor, cache: Tensor) -> None:
    """Check the slots of the rows of x; on a GPU their values, which costs a synchronisation, if SSDGEN_DEBUG is set."""
    if not isinstance(state_indices, Tensor) or state_indices.dtype != torch.int32:
        kind = state_indices.dtype if isinstance(state_indices, Tensor) else type(state_indices).__name__
        raise TypeError(f"{LAYER.name}: `state_indices` must be an int32 torch.Tensor, got {kind}")
    if state_indices.shape != x.shape[:1]:
        raise ValueError(
            f"{LAYER.name}: `state_indices`[b] must have shape [{len(x)}], got {list(state_indices.shape)}"
        )
    if state_indices.device != x.device:
        raise ValueError(f"{LAYER.name}: `state_indices` is on {state_indices.device}, `x` on {x.device}")
    if torch.compiler.is_compiling() or (x.is_cuda and not os.environ.get("SSDGEN_DEBUG")):
        return
    slots = [slot for slot in state_indices.tolist() if slot != -1]
    wrong = [slot for slot in slots if not 0 <= slot < len(cache)]
    if wrong:
        raise ValueError(f"{LAYER.name}: `state_indices` must be -1 or a slot below {len(cache)}, got {wrong[0]}")
    if len(set(slots)) < len(slots):
        raise ValueError(f"{LAYER.name}: `state_indices` has a slot twice")
