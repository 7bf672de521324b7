"""`selective_state_update` against a token in float64: mamba_ssm's own grids, tied and not, and slots of a pool."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ssdgen.compat.mamba_ssm as ours
from ssdgen.compat.mamba_ssm import selective_state_update
from ssdgen.generated import mamba2
from ssdgen.ir.report import Gate
from tests.compat.test_scan import BOUND, DTYPES, both, near, running
from tests.compat.truth import batch_of_loops

Values = dict[str, Any]


def headless(b: int, dim: int, dstate: int, dtype: torch.dtype, has_z: bool, rows: int) -> tuple[Tensor, Values]:
    """Mamba-1's call: every channel has a step and a decay of its own."""
    torch.manual_seed(0)
    x = torch.randn(b, dim).to(dtype)
    values: Values = {
        "x": x, "dt": torch.randn(b, dim).to(dtype), "A": -torch.rand(dim, dstate) - 1,
        "B": torch.randn(b, dstate), "C": torch.randn(b, dstate), "D": torch.randn(dim),
        "z": torch.randn(b, dim).to(dtype) if has_z else None, "dt_bias": torch.rand(dim) - 4,
    }  # fmt: skip
    return torch.randn(rows, dim, dstate).to(dtype), values


def with_heads(
    b: int, dim: int, dstate: int, groups: int, dtype: torch.dtype, has_z: bool, tie: bool, rows: int
) -> tuple[Tensor, Values]:
    """Mamba-2's call, where one number of a head is expanded over its channels if `tie`."""
    torch.manual_seed(0)
    p = 64
    h = dim // p
    values: Values = {
        "x": torch.randn(b, h, p).to(dtype),
        "dt": torch.randn(b, h, 1 if tie else p).to(dtype).expand(b, h, p),
        "A": (-torch.rand(h, 1 if tie else p, 1 if tie else dstate) - 1).expand(h, p, dstate),
        "B": torch.randn(b, groups, dstate), "C": torch.randn(b, groups, dstate),
        "D": torch.randn(h, 1 if tie else p).expand(h, p),
        "z": torch.randn(b, h, p).to(dtype) if has_z else None,
        "dt_bias": (torch.rand(h, 1 if tie else p) - 4).expand(h, p),
    }  # fmt: skip
    return torch.randn(rows, h, p, dstate).to(dtype), values


def wanted(state: Tensor, values: Values, dt_softplus: bool = True) -> tuple[Tensor, Tensor]:
    """Outputs and states of each row, from one token of the loop."""
    heads = state.dim() == 4
    one = {k: v for k, v in values.items() if v is not None}
    if not heads:  # one head and one group
        state = state[:, None]
        one = {k: v[None] if k in ("A", "D", "dt_bias") else v[:, None] for k, v in one.items()}
    one = {k: v if k in ("A", "D", "dt_bias") else v[:, None] for k, v in one.items()}
    y, S = batch_of_loops(**one, S=state, dt_softplus=dt_softplus)
    return (y[:, 0], S) if heads else (y[:, 0, 0], S[:, 0])


def check(state: Tensor, values: Values, indices: Tensor | None = None, bound: float | None = None) -> None:
    """The call equals one token of the loop, and touches no other slot."""
    before = state.clone()
    slots = slice(None) if indices is None else indices.long()
    out = selective_state_update(state, **values, dt_softplus=True, state_batch_indices=indices)
    y, S = wanted(before[slots], values)
    assert out.dtype == values["x"].dtype
    near(out, y, bound or max(BOUND[out.dtype], 1e-5))
    near(state[slots], S, BOUND[state.dtype])
    if indices is not None:
        others = torch.ones(len(state), dtype=torch.bool).index_fill(0, indices.long(), False)
        assert torch.equal(state[others], before[others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_z", [False, True])
@pytest.mark.parametrize("dstate", [16, 32, 64])
@pytest.mark.parametrize("dim", [2048, 2064, 4096])
def test_their_grid_without_heads(dim: int, dstate: int, has_z: bool, dtype: torch.dtype) -> None:
    check(*headless(2, dim, dstate, dtype, has_z, rows=2))
    indices = torch.randperm(10)[:4].int()
    check(*headless(4, dim, dstate, dtype, has_z, rows=10), indices)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_z", [False, True])
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dstate", [16, 32, 64])
def test_their_grid_with_heads(dstate: int, groups: int, tie: bool, has_z: bool, dtype: torch.dtype) -> None:
    """32 heads; theirs goes through 64 as well."""
    dim = 2048
    check(*with_heads(2, dim, dstate, groups, dtype, has_z, tie, rows=2))
    indices = torch.randperm(10)[:4].int()
    check(*with_heads(4, dim, dstate, groups, dtype, has_z, tie, rows=10), indices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels(dtype: torch.dtype) -> None:
    """A head's numbers, expanded, go to the kernel, and only then; here in the emulator."""
    state, values = with_heads(3, 128, 48, 2, dtype, True, True, rows=6)
    calls = []

    def counted(*arguments: Any, **named: Any) -> Tensor:
        calls.append(arguments)
        return mamba2.step(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch, running("emulation"):
        patch.setattr(ours, "mamba2", type("Counted", (), {"step": staticmethod(counted)}))
        check(state, values, torch.tensor([4, 0, 3]))
        assert len(calls) == 1
        check(state, values | {"dt": values["dt"].clone()}, torch.tensor([4, 0, 3]))
        assert len(calls) == 1


@both
@pytest.mark.parametrize("tie", [False, True])
def test_rows_that_are_left_out(gate: Gate, tie: bool) -> None:
    """vllm PR #33937: a negative index touches no slot; its output is 0."""
    state, values = with_heads(4, 128, 32, 1, torch.float32, True, tie, rows=5)
    before = state.clone()
    with running(gate):
        out = selective_state_update(
            state, **values, dt_softplus=True, state_batch_indices=torch.tensor([3, -1, 0, -1], dtype=torch.int32)
        )
    y, S = wanted(before[[3, 0, 0, 0]], values)
    near(out[[0, 2]], y[[0, 2]], 1e-5)
    near(state[[3, 0]], S[[0, 2]], 1e-5)
    assert out[[1, 3]].eq(0).all()
    assert torch.equal(state[[1, 2, 4]], before[[1, 2, 4]])


def test_a_state_longer_than_the_batch() -> None:
    """Without indices the first rows are updated, as in mamba_ssm; the others stay."""
    state, values = with_heads(2, 128, 32, 1, torch.float32, False, True, rows=5)
    before = state.clone()
    out = selective_state_update(state, **values, dt_softplus=True)
    y, S = wanted(before[:2], values)
    near(out, y, 1e-5)
    near(state[:2], S, 1e-5)
    assert torch.equal(state[2:], before[2:])


@pytest.mark.parametrize("tie", [False, True])
def test_steps_without_softplus_may_be_below_0(tie: bool) -> None:
    """As in mamba_ssm, which has no limit here: such a step lets the state grow."""
    state, values = with_heads(2, 128, 32, 1, torch.float32, False, tie, rows=2)
    values |= {"D": None, "dt_bias": None}
    y, S = wanted(state, values, dt_softplus=False)
    assert bool((values["dt"] < 0).any())
    near(selective_state_update(state, **values), y, 1e-5)
    near(state, S, 1e-5)


def test_nothing_is_differentiated() -> None:
    """As in mamba_ssm, whose function is a launch of a kernel: a model may be decoded outside of torch.no_grad()."""
    state, values = with_heads(2, 128, 32, 1, torch.float32, False, True, rows=2)
    values["A"] = torch.nn.Parameter(values["A"][:, 0, 0])[:, None, None].expand(2, 64, 32)
    assert not selective_state_update(state, **values, dt_softplus=True).requires_grad
    assert not state.requires_grad


def test_a_layer_of_one_channel_a_head_is_tied() -> None:
    """Along an axis of length 1 any stride says that there is one value."""
    state, values = torch.randn(2, 3, 1, 8), {
        "x": torch.randn(2, 3, 1), "dt": torch.randn(2, 3, 1), "A": (-torch.rand(3, 1, 1) - 0.1).expand(3, 1, 8),
        "B": torch.randn(2, 3, 8), "C": torch.randn(2, 3, 8), "D": None, "z": None, "dt_bias": None,
    }  # fmt: skip
    check(state, values)
