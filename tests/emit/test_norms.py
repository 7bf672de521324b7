"""The norms beside emitted modules: the kernel in the emulator and the portable form, against float64."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from generated import _norms, _runtime, norms
from ssdgen.run.checks import BOUNDS, poisoned_memory, relative_error
from ssdgen.run.emulate import emulation, launch

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
BOUND = {BF16: BOUNDS["bf16"], F16: BOUNDS["f16"], F32: 1e-6, F64: BOUNDS["f64"]}
PATHS = ("portable", "emulation")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def path(name: str) -> Any:
    return _runtime.launcher(launch) if name == "emulation" else nullcontext()


def reference(x: Tensor, weight: Tensor, groups: int, gate: Tensor | None) -> Tensor:
    """By the definition, in float64."""
    parts = x.double().reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    y = (parts / (parts.square().mean(-1, keepdim=True) + 1e-5).sqrt()).reshape(x.shape) * weight.double()
    return y if gate is None else y * gate.double() / (1 + (-gate.double()).exp())


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize(
    ("rows", "d", "groups"), [((3,), 96, 1), ((2, 5), 96, 3), ((1,), 128, 1), ((0,), 8, 1), ((4,), 5, 1)]
)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtypes", [(F32, F32), (F32, BF16), (BF16, BF16), (F16, F32)])
def test_norms(
    name: str, rows: tuple[int, ...], d: int, groups: int, gated: bool, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """Rows that are slices of wider ones, of NaN around them; parts that fill a tile and not."""
    around = torch.full((*rows, 2 * d + 3), float("nan"), dtype=dtypes[0])
    x, gate = around[..., 1 : d + 1].normal_(), around[..., d + 2 : 2 * d + 2].normal_()
    weight = torch.randn(d, dtype=dtypes[1])
    with poisoned_memory(), path(name):
        y = norms.rms_norm(x, weight, groups=groups, gate=gate if gated else None)
    assert y.dtype == dtypes[1]
    assert relative_error(y, reference(x, weight, groups, gate if gated else None)) <= BOUND[dtypes[1]]


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize(("kept", "added"), [(F32, BF16), (BF16, BF16), (F32, F32)])
def test_what_is_added_stays(name: str, kept: torch.dtype, added: torch.dtype) -> None:
    """The sum is rounded to the dtype of x, and the norm is of what is stored."""
    x, add, weight = torch.randn(6, 40, dtype=kept), torch.randn(6, 40, dtype=added), torch.randn(40, dtype=added)
    sums = (x.float() + add.float()).to(kept)
    out = torch.empty(6, 40, dtype=added)
    with path(name):
        y = norms.rms_norm(x, weight, add=add, out=out)
    assert y is out
    assert torch.equal(x, sums)
    assert relative_error(y, reference(sums, weight, 1, None)) <= BOUND[added]


def test_one_launch_writes_all() -> None:
    x, weight = torch.randn(7, 3, 48), torch.randn(48)
    with emulation() as run, path("emulation"):
        y = norms.rms_norm(x, weight, groups=2)
    assert run.launches == ["normalise"]
    assert not run.unwritten(y).any()


def test_rows_longer_than_a_block_holds() -> None:
    """They are computed in plain torch, groups that fit by the kernel."""
    d = 2 * _norms.LONGEST
    x, weight = torch.randn(1, d), torch.randn(d)
    for groups, launches in ((1, []), (2, ["normalise"])):
        with emulation() as run, path("emulation"):
            y = norms.rms_norm(x, weight, groups=groups)
        assert run.launches == launches
        assert relative_error(y, reference(x, weight, groups, None)) <= BOUND[F32]


def test_gradients() -> None:
    x, weight, gate = (torch.randn(s, dtype=F64, requires_grad=True) for s in ((3, 8), (8,), (3, 8)))
    assert torch.autograd.gradcheck(lambda *v: norms.rms_norm(v[0], v[1], groups=2, gate=v[2]), (x, weight, gate))


X, W = torch.zeros(2, 6), torch.ones(6)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": None}, TypeError, "`x` must be a torch.Tensor, got NoneType"),
        ({"x": X.int()}, TypeError, "`x` must be of a floating point dtype"),
        ({"weight": torch.ones(5)}, ValueError, r"`weight`\[d\] must have shape \[6\], got \[5\]"),
        ({"gate": torch.ones(2, 5)}, ValueError, r"`gate`\[\.\.\. d\] must have shape \[2, 6\]"),
        ({"add": torch.ones(1, 6)}, ValueError, "`add`"),
        ({"add": X, "x": torch.zeros(6, 2).mT}, ValueError, "`x` must be contiguous, for `add`"),
        ({"weight": W.to("meta")}, ValueError, "`weight` is on meta, `x` on cpu"),
        ({"groups": 4}, ValueError, "4 groups do not divide rows of 6"),
        ({"groups": 0}, ValueError, "0 groups"),
        ({"out": X.half()}, ValueError, "`out` must be contiguous and of the dtype of `weight`"),
        ({"out": X.clone(), "weight": W.clone().requires_grad_()}, NotImplementedError, "with `add` or `out`"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", PATHS)
def test_bad_calls(name: str, change: dict[str, Any], error: type[Exception], message: str) -> None:
    with path(name), pytest.raises(error, match=f"rms_norm: .*{message}"):
        norms.rms_norm(**{"x": X, "weight": W, **change})


def test_float64_has_no_kernel() -> None:
    with path("emulation"), pytest.raises(TypeError, match="on a GPU, got float64"):
        norms.rms_norm(X.double(), W)
