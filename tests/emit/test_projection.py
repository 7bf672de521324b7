"""Norm, product and residual addition in one launch: the kernel in the emulator and the portable form, against float64."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from generated import _runtime, causal_conv
from generated.projection import project, project_and_convolve
from ssdgen.ir.build import ConstantArg
from ssdgen.run.checks import BOUNDS, poisoned_memory, relative_error
from ssdgen.run.emulate import emulation, launch
from ssdgen.run.recorded import recording

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


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize(("first", "d", "w"), [(5, 17, 4), (0, 33, 2), (32, 1, 3)])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_convolution_of_a_token(name: str, b: int, first: int, d: int, w: int, dtype: torch.dtype) -> None:
    """Outputs that go through it begin and end within a block; the cache and the others are as of two calls, bit for bit."""
    x, weight = torch.randn(b, 48), (torch.randn(33, 48) / 7).to(dtype)
    norm, taps, bias = torch.rand(48).to(dtype), torch.randn(d, w).to(dtype), torch.randn(d).to(dtype)
    cache = torch.randn(b, d, w - 1).to(dtype)
    for taps_bias, activation in ((bias, "silu"), (None, None)):
        caches = [cache.clone(), cache.clone()]
        with path(name):
            apart = project(x, weight, norm=norm)
            want = causal_conv.step(caches[0], apart[:, first : first + d], taps, taps_bias, activation=activation)
        with poisoned_memory(), emulation() as run, path(name):
            y, got = project_and_convolve(
                x, weight, None, caches[1], taps, taps_bias, first=first, activation=activation, norm=norm
            )
        assert name == "portable" or run.launches == (["multiply_row"] if b == 1 else ["normalise", "roll"])
        outside = [i for i in range(33) if not first <= i < first + d]
        torch.testing.assert_close(y[:, outside], apart[:, outside], rtol=0, atol=0)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        torch.testing.assert_close(caches[1], caches[0], rtol=0, atol=0)


@pytest.mark.parametrize(("rows", "length"), [(13056, 32), (2112, 2048)])
def test_a_convolution_is_a_launch_of_its_own_where_blocks_wait_for_others(rows: int, length: int) -> None:
    """13,056 rows are 1,632 blocks of 8, of which 528 run at once on a GPU of 132 multiprocessors; and blocks of 64 KiB, of
    which 2,112 rows of 2,048 in float32 are 264, are too large for so many of them."""
    x, weight, taps = torch.randn(1, length), torch.randn(rows, length), torch.randn(6, 4)
    with emulation() as run, path("emulation"):
        project_and_convolve(x, weight, None, torch.zeros(1, 6, 3), taps, first=20)
    assert run.launches == ["multiply_row", "roll"]


@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("steady", [False, True])
def test_the_convolution_behind_a_product_is_as_steady_as_that(b: int, steady: bool) -> None:
    """Of one row of 13,056 outputs, and of two rows: what is promised is promised of the cache and its taps too."""
    x, weight, taps = torch.randn(b, 32), torch.randn(13056, 32), torch.randn(6, 4)
    with recording(causal_conv) as launches:
        project_and_convolve(x, weight, None, torch.zeros(b, 6, 3), taps, first=20, norm=torch.ones(32), steady=steady)
    assert [launch.request.kernel for launch in launches] == [["multiply_row", "normalise"][b - 1], "roll"]
    constants = [a for a in launches[1].request.signature if isinstance(a, ConstantArg) and a.name == "STEADY"]
    assert [a.value for a in constants] == [steady]


TAPS = {"cache": torch.zeros(1, 2, 3), "taps": torch.ones(2, 4), "first": 1}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"first": 3}, ValueError, "`first` must be 0 to 2, for 2 of 4 outputs to begin there, got 3"),
        ({"first": -1}, ValueError, "`first` must be 0 to 2"),
        ({"first": 1.0}, ValueError, "`first` must be 0 to 2, .* got 1.0"),
        ({"cache": [0.0]}, TypeError, "`cache` must be a torch.Tensor, got list"),
        ({"cache": torch.zeros(1, 2, 2)}, ValueError, r"`cache`\[b d w-1\] must have shape \[1, 2, 3\]"),
        ({"cache": torch.zeros(1, 2, 3).half()}, TypeError, "`cache` must have the dtype of `x`"),
        ({"taps": torch.ones(2, 9)}, ValueError, "must have 2 to 8 taps"),
        ({"taps": None}, ValueError, r"`taps` must be a torch.Tensor \[d w\] \(rank 2\), got NoneType"),
        ({"activation": "relu"}, ValueError, "`activation` must be 'silu' or None"),
        ({"taps_bias": torch.ones(3)}, ValueError, "`bias`"),
        ({"steady": 1}, TypeError, "`steady` must be True or False, got 1"),
        ({"weight": W.clone().requires_grad_()}, NotImplementedError, "no gradient"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", PATHS)
def test_bad_convolutions(name: str, change: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"x": X, "weight": W, "bias": None, **TAPS, **change}
    before = TAPS["cache"].clone()  # type: ignore[attr-defined]
    with path(name), pytest.raises(error, match=message):
        project_and_convolve(**given)
    assert torch.equal(TAPS["cache"], before)  # type: ignore[arg-type]
