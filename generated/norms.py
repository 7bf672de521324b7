"""Root mean square norms of a model's layers, with what stands beside them: the residual addition before, the gate after.

    v = x, or x + add, which is left in x
    y = weight * v / sqrt(mean(v^2) + eps), times silu(gate) if there is one

On CUDA tensors a kernel computes it in one launch; on CPU tensors, where gradients are wanted, and under torch.compile, plain
torch, which is differentiable on every device without `add`. Either way in float32 (float64 inputs: float64), rounded once.

Copied verbatim beside the modules that ssdgen emits; it imports nothing of ssdgen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _norms
from . import _runtime as _rt

NAME = "rms_norm"


def rms_norm(
    x: Tensor, weight: Tensor, *,
    eps: float = 1e-5, groups: int = 1, gate: Tensor | None = None, add: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The norm of every row: y, of the shape of x and the dtype of `weight`.

    x: [... d], bfloat16, float16 or float32, on the CPU also float64; rows may be strided, such as those of a slice
    weight: [d]
    eps: added to the mean of the squares
    groups: of so many equal parts of a row each has its own mean
    gate: [... d]: y is multiplied by silu(gate)
    add: [... d]: added to x in place, before; x is then contiguous
    out: memory for y, contiguous

    Raises TypeError or ValueError, which name the tensor, for a missing input, a dtype, shape or device;
    NotImplementedError for `add` or `out` where a gradient is wanted.
    """
    _check(x, weight, groups, {"gate": gate, "add": add}, out)
    if (add is not None or out is not None) and _wants_gradient(x, weight, gate, add):
        raise NotImplementedError(f"{NAME}: with `add` or `out` there are no gradients; use torch.no_grad()")
    if not _runs_kernels(x, weight, gate) or x.shape[-1] // groups > _norms.LONGEST:
        y = _portable(x, weight, eps, groups, gate, add)
        return y if out is None else out.copy_(y)
    y = torch.empty(x.shape, dtype=weight.dtype, device=x.device) if out is None else out
    if x.numel():
        _rt.check_kernels(NAME, (x,))
        _norms.launch(x, weight, eps, groups, gate, add, y)
    return y


@_rt.without_autocast
def _portable(x: Tensor, weight: Tensor, eps: float, groups: int, gate: Tensor | None, add: Tensor | None) -> Tensor:
    """The same in plain torch, for any device."""
    dtype = _rt.widest((x, weight, gate, add))
    v = x.to(dtype)
    if add is not None:
        v = v + add.to(dtype)
        x.copy_(v)
        v = x.to(dtype)
    parts = v.reshape(*v.shape[:-1], groups, v.shape[-1] // groups)
    scale = torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)
    y: Tensor = (parts * scale).flatten(-2) * weight.to(dtype)
    if gate is not None:
        y = y * torch.nn.functional.silu(gate.to(dtype))
    return y.to(weight.dtype)


def _runs_kernels(x: Tensor, *others: Tensor | None) -> bool:
    """Whether a kernel computes a call: not under torch.compile, which fuses the plain form, nor where it is differentiated."""
    return not torch.compiler.is_compiling() and _rt.runs_kernels(x) and not _wants_gradient(x, *others)


def _wants_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _check(x: Tensor, weight: Tensor, groups: int, others: dict[str, Tensor | None], out: Tensor | None) -> None:
    """Check all arguments."""
    for name, value in {"x": x, "weight": weight, **others, "out": out}.items():
        if value is None and name not in ("x", "weight"):
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"{NAME}: `{name}` must be a torch.Tensor, got {type(value).__name__}")
        if not value.is_floating_point():
            raise TypeError(f"{NAME}: `{name}` must be of a floating point dtype, got {value.dtype}")
        if value.device != x.device:
            raise ValueError(f"{NAME}: `{name}` is on {value.device}, `x` on {x.device}")
        shape = x.shape[-1:] if name == "weight" else x.shape
        if value.shape != shape or not x.dim():
            form = "[d]" if name == "weight" else "[... d]"
            raise ValueError(f"{NAME}: `{name}`{form} must have shape {list(shape)}, got {list(value.shape)}")
        if value.dtype == _rt.F64 and _rt.runs_kernels(x):
            raise TypeError(f"{NAME}: `{name}` must be bfloat16, float16 or float32 on a GPU, got float64")
    if type(groups) is not int or groups < 1 or x.shape[-1] % groups:
        raise ValueError(f"{NAME}: {groups!r} groups do not divide rows of {x.shape[-1]}")
    if others["add"] is not None and not x.is_contiguous():
        raise ValueError(f"{NAME}: `x` must be contiguous, for `add` is added to it in place")
    if out is not None and (out.dtype != weight.dtype or not out.is_contiguous()):
        raise ValueError(f"{NAME}: `out` must be contiguous and of the dtype of `weight`, {weight.dtype}")
