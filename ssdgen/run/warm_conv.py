"""The calls of the causal convolution that are compiled ahead: of every class that a Mamba layer makes, and their kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ssdgen.diagnostics import UserError
from ssdgen.ir.build import CompileRequest
from ssdgen.ir.layer import Dtype
from ssdgen.run.inputs import DTYPES
from ssdgen.run.recorded import recording

TAPS = 4
"""The number of taps if none is asked for: that of Mamba's layers."""

LAST = 2032
"""Tokens, a multiple of 16, of which the blocks of a packed call are a multiple of 16 too, for every dtype."""

STEPS = (2, 4, 8, 16)
"""Tokens of several steps at once, of every tile that a launch takes for them."""


def is_convolution(module: Any) -> bool:
    """Whether a module is the causal convolution and none that was emitted from a spec."""
    return hasattr(module, "init_cache") and not hasattr(module, "CONFIGS")


def conv_sizes(module: Any, shape: Mapping[str, int], batch: int, tokens: int) -> dict[str, int]:
    """The length of every axis, of `batch` and `tokens` where the shape does not say. UserError for one that is none of the
    module's, or too short, and for a shape that does not say how many channels there are."""
    layer = module.LAYER
    sizes = {"b": batch, "t": tokens, "w": TAPS, **shape}
    for axis, length in shape.items():
        if axis not in ("b", "t", "d", "w") or length < 1:
            raise UserError(f"{layer.name} has no axis `{axis}` of length {length}", "its axes are b, t, d, w")
    if "d" not in sizes:
        raise UserError("the shape does not say how long d is", "--shape d=1792, the channels of x, B and C")
    if sizes["w"] not in module.WIDTHS:
        raise UserError(
            f"{layer.name} has no axis `w` of length {sizes['w']}", f"{module.WIDTHS[0]} to {module.WIDTHS[-1]} taps"
        )
    return sizes


def convolved(
    module: Any, sizes: Mapping[str, int], dtype: Dtype, lengths: Sequence[int], several: bool
) -> tuple[CompileRequest, ...]:
    """The kernels of `forward` for each of `lengths` tokens, whole and of packed sequences if the batch is 1, and of `step`,
    with `several` of `steps` too; with a bias and without, an activation and none, caches and none, in steps also steady ones
    and slots. The weight and the bias have the dtype of x, which is aligned as a slice of a projection is."""
    with recording(module) as launches, torch.no_grad():
        for arguments in _forwards(sizes, DTYPES[dtype], lengths):
            module.forward(**arguments)
        for arguments in _steps(sizes, DTYPES[dtype], (1, *(STEPS if several else ()))):
            module.steps(**arguments)
    return tuple(dict.fromkeys(launch.request for launch in launches))


def _forwards(sizes: Mapping[str, int], dtype: torch.dtype, lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    b, d, w = (sizes[a] for a in "bdw")
    weight, bias, cache = (torch.empty(shape, dtype=dtype) for shape in ((d, w), (d,), (b, d, w - 1)))
    for tokens, biased, activation, begun, final, packed in itertools.product(
        (*lengths, LAST),
        (True, False),
        ("silu", None),
        (False, True),
        (False, True),
        (False, True) if b == 1 else (False,),
    ):
        yield {
            "x": torch.empty((b, tokens, d), dtype=dtype),
            "weight": weight,
            "bias": bias if biased else None,
            "initial": cache if begun else None,
            "cu_seqlens": torch.tensor([0, tokens], dtype=torch.int32) if packed else None,
            "activation": activation,
            "return_final": final,
        }


def _steps(sizes: Mapping[str, int], dtype: torch.dtype, lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    b, d, w = (sizes[a] for a in "bdw")
    weight, bias, cache = (torch.empty(shape, dtype=dtype) for shape in ((d, w), (d,), (b, d, w - 1)))
    slots = torch.arange(b, dtype=torch.int32)
    for tokens, biased, activation, (pooled, steady) in itertools.product(
        lengths, (True, False), ("silu", None), ((False, False), (False, True), (True, False))
    ):
        yield {
            "cache": cache,
            "x": torch.empty((b, tokens, d), dtype=dtype),
            "weight": weight,
            "bias": bias if biased else None,
            "activation": activation,
            "state_indices": slots if pooled else None,
            "steady": steady,
        }
