"""Norm, product and residual addition in one launch: the kernel in the emulator and the portable form, against float64."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from generated import _runtime
from generated.projection import project
from ssdgen.run.checks import BOUNDS, poisoned_memory, relative_error
from ssdgen.run.emulate import emulation, launch

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
BOUND = {BF16: BOUNDS["bf16"], F16: BOUNDS["f16"], F32: 1e-6}
PATHS = ("portable", "emulation")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def path(name: str) -> Any:
    return _runtime.launcher(launch) if name == "emulation" else nullcontext()


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, onto: Tensor | None) -> Tensor:
    """By the definition, in float64."""
    u = x.double()
    if norm is not None:
        u = u / (u.square().mean(1, keepdim=True) + 1e-5).sqrt() * norm.double()
    y = u @ weight.double().T
    return y + sum(v.double() for v in (bias, onto) if v is not None)


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize(("b", "k", "o"), [(1, 384, 10), (1, 100, 7), (1, 1, 9), (3, 24, 5), (1, 1280, 33)])
@pytest.mark.parametrize("options", ["", "norm", "bias", "onto", "norm bias onto"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_projections(name: str, b: int, k: int, o: int, options: str, dtype: torch.dtype) -> None:
    """Rows cut evenly into steps and not; blocks that are full and not; a strided x, NaN around it."""
    around = torch.full((b, k + 2), float("nan"), dtype=F32 if "norm" in options else dtype)
    x = around[:, 1:-1].normal_()
    weight = (torch.randn(o, k) * k**-0.5).to(dtype)
    norm = torch.randn(k, dtype=dtype) if "norm" in options else None
    bias = torch.randn(o, dtype=dtype) if "bias" in options else None
    onto = torch.randn(b, o) if "onto" in options else None
    want = reference(x, weight, bias, norm, onto)
    with poisoned_memory(), path(name):
        y = project(x, weight, bias, norm=norm, onto=onto)
    assert y.dtype == (dtype if onto is None else F32)
    assert onto is None or y is onto
    assert relative_error(y, want) <= BOUND[dtype]


@pytest.mark.parametrize(("b", "launches"), [(1, ["multiply_row"]), (2, ["normalise"])])
def test_a_row_is_one_launch(b: int, launches: list[str]) -> None:
    x, weight, norm = torch.randn(b, 96), torch.randn(21, 96), torch.randn(96)
    with emulation() as run, path("emulation"):
        y = project(x, weight, norm=norm, dtype=F32)
    assert run.launches == launches
    assert b > 1 or not run.unwritten(y).any()
    assert relative_error(y, reference(x, weight, None, norm, None)) <= BOUND[F32]


def test_the_result_may_be_wider_than_the_weights() -> None:
    """Logits in float32 of a bf16 head: with the kernel they are not rounded on the way."""
    x, weight = torch.randn(1, 64).bfloat16(), torch.randn(40, 64).bfloat16()
    with path("emulation"):
        y = project(x, weight, dtype=F32)
    assert relative_error(y, reference(x, weight, None, None, None)) <= BOUND[F32]


X, W = torch.zeros(1, 6), torch.ones(4, 6)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": None}, TypeError, "`x` must be a torch.Tensor, got NoneType"),
        ({"x": X[0]}, ValueError, r"`x` must have rank 2, got shape \[6\]"),
        ({"x": X.long()}, TypeError, "`x` must be of a floating point dtype"),
        ({"x": X.half()}, TypeError, "`x` must have the dtype of `weight`, torch.float32, got torch.float16"),
        ({"weight": W[:, :5]}, ValueError, r"`weight`\[o k\] must have shape \[4, 6\], got \[4, 5\]"),
        ({"bias": torch.ones(5)}, ValueError, r"`bias`\[o\] must have shape \[4\]"),
        ({"norm": torch.ones(5)}, ValueError, r"`norm`\[k\] must have shape \[6\]"),
        ({"onto": torch.ones(2, 4)}, ValueError, r"`onto`\[b o\] must have shape \[1, 4\]"),
        ({"onto": torch.ones(1, 8)[:, ::2], "x": X}, ValueError, "`onto` must be contiguous"),
        ({"steady": None}, TypeError, "`steady` must be True or False, got None"),
        ({"weight": W.to("meta")}, ValueError, "`weight` is on meta, `x` on cpu"),
        ({"onto": torch.ones(1, 4), "weight": W.clone().requires_grad_()}, NotImplementedError, "with `onto`"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", PATHS)
def test_bad_calls(name: str, change: dict[str, Any], error: type[Exception], message: str) -> None:
    with path(name), pytest.raises(error, match=f"project: .*{message}"):
        project(**{"x": X, "weight": W, **change})
