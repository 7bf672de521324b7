"""A norm, a matrix product and a residual addition, as they follow each other in a model's layers when it makes tokens.

    y = weight @ rms_norm(x) + bias, or onto + that, which is left in `onto`

A single row on a GPU, which is bound by reading the weights, takes one launch, and if they are steady begins to read them
while the kernel before it ends. More rows take the norm's kernel and PyTorch's product; so do CPU tensors, with plain torch
for the norm.

Copied verbatim beside the modules that ssdgen emits; it imports nothing of ssdgen.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from . import _projection, norms
from . import _runtime as _rt

NAME = "project"


def project(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *,
    norm: Tensor | None = None, eps: float = 1e-5, onto: Tensor | None = None, dtype: torch.dtype | None = None,
    steady: bool = False,
) -> Tensor:  # fmt: skip
    """y[b o], or `onto`, in place.

    x: [b k]; with `norm` of any floating point dtype, else of that of `weight`
    weight: [o k]
    bias: [o], added if given
    norm: [k]: rows of x are divided by sqrt(mean(x^2) + eps) and multiplied by it first
    onto: [b o], contiguous: y is added to it, which the kernel rounds once, while PyTorch rounds its product first
    dtype: of y; that of `weight` if absent
    steady: promises that what wrote `weight` and `norm` was queued before the last kernel that was launched the ordinary way,
    as PyTorch's are: they are read while that one, and those behind it, may still run

    Raises TypeError or ValueError, which name the tensor, for a missing input, a dtype, shape or device;
    NotImplementedError for `onto` where a gradient is wanted.
    """
    _check(x, weight, bias, norm, onto)
    _rt.check_flag(NAME, "steady", steady)
    if (
        onto is not None
        and torch.is_grad_enabled()
        and any(t is not None and t.requires_grad for t in (x, weight, bias, norm))
    ):
        raise NotImplementedError(f"{NAME}: with `onto` there are no gradients; use torch.no_grad()")
    if _runs_kernels(x, weight, bias, norm):
        y = onto
        if y is None:
            y = torch.empty((1, len(weight)), dtype=dtype or weight.dtype, device=x.device)
        _rt.check_kernels(NAME, (x, weight, bias, norm))
        _projection.launch(x, weight, bias, norm, eps, onto is not None, steady, y)
        return y
    u = x if norm is None else norms.rms_norm(x, norm, eps=eps)
    y = linear(u.to(weight.dtype), weight, bias)
    return y.to(dtype or y.dtype) if onto is None else onto.add_(y)


def _runs_kernels(x: Tensor, weight: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernel computes a call: of one row, not too long, and not differentiated or traced."""
    if torch.compiler.is_compiling() or not _rt.runs_kernels(x) or not _projection.fits(x, weight):
        return False
    return not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, *others)))


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, onto: Tensor | None) -> None:
    """Check all arguments."""
    for name, value, rank in (
        ("x", x, 2),
        ("weight", weight, 2),
        ("bias", bias, 1),
        ("norm", norm, 1),
        ("onto", onto, 2),
    ):
        if value is None and name not in ("x", "weight"):
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"{NAME}: `{name}` must be a torch.Tensor, got {type(value).__name__}")
        if value.dim() != rank:
            raise ValueError(f"{NAME}: `{name}` must have rank {rank}, got shape {list(value.shape)}")
        if not value.is_floating_point():
            raise TypeError(f"{NAME}: `{name}` must be of a floating point dtype, got {value.dtype}")
        if value.device != x.device:
            raise ValueError(f"{NAME}: `{name}` is on {value.device}, `x` on {x.device}")
    (b, k), o = x.shape, len(weight)
    for name, value, form, shape in (
        ("weight", weight, "[o k]", (o, k)), ("bias", bias, "[o]", (o,)), ("norm", norm, "[k]", (k,)),
        ("onto", onto, "[b o]", (b, o)),
    ):  # fmt: skip
        if value is not None and value.shape != shape:
            raise ValueError(f"{NAME}: `{name}`{form} must have shape {list(shape)}, got {list(value.shape)}")
    if norm is None and x.dtype != weight.dtype:
        raise TypeError(f"{NAME}: `x` must have the dtype of `weight`, {weight.dtype}, got {x.dtype}")
    if onto is not None and not onto.is_contiguous():
        raise ValueError(f"{NAME}: `onto` must be contiguous, for it is written to in place")
