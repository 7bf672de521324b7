"""The token loop is the truth of every other check, so it is itself checked: against loops written out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from ssdgen.diagnostics import Source
from ssdgen.ir.layer import Layer
from ssdgen.run.reference import OPERATIONS, reference
from ssdgen.spec import load_source, read_layer

B, T, H, G, P, N = 2, 7, 4, 2, 3, 5


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def mamba2_inputs() -> dict[str, Tensor | None]:
    return {
        "x": randn(B, T, H, P),
        "dt": randn(B, T, H),
        "A": -randn(H).abs(),
        "B": randn(B, T, G, N),
        "C": randn(B, T, G, N),
    }


def mamba2() -> Layer:
    return read_layer(load_source("mamba2"))


def mamba2_by_hand(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, S: Tensor, low: float = 0, high: float = math.inf
) -> tuple[Tensor, Tensor]:
    y, S = torch.zeros_like(x), S.clone()
    for b in range(x.shape[0]):
        for h in range(H):
            for t in range(x.shape[1]):
                g = h // (H // G)
                step = min(max(math.log1p(math.exp(dt[b, t, h].item())), low), high)
                S[b, h] = math.exp(A[h].item() * step) * S[b, h] + step * torch.outer(x[b, t, h], B[b, t, g])
                y[b, t, h] = S[b, h] @ C[b, t, g]
    return y, S


def test_mamba2_is_the_loop_written_out_with_groups_and_an_initial_state() -> None:
    inputs, S0 = mamba2_inputs(), randn(B, H, P, N)
    outputs, states = reference(mamba2(), inputs, {}, {"S": S0})
    y, S = mamba2_by_hand(*inputs.values(), S=S0)  # type: ignore[arg-type]
    torch.testing.assert_close(outputs["y"], y, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(states["S"], S, rtol=1e-12, atol=1e-12)


def test_parameters_limit_the_step() -> None:
    inputs = mamba2_inputs()
    outputs, _ = reference(mamba2(), inputs, {"dt_min": 0.6, "dt_max": 0.9})
    y, _ = mamba2_by_hand(*inputs.values(), S=torch.zeros(B, H, P, N).double(), low=0.6, high=0.9)  # type: ignore[arg-type]
    torch.testing.assert_close(outputs["y"], y, rtol=1e-12, atol=1e-12)


def test_the_skip_may_be_absent_one_number_a_head_or_one_a_channel_and_the_gate_comes_last() -> None:
    inputs = mamba2_inputs()
    bare = reference(mamba2(), inputs)[0]["y"]
    x, narrow, wide, z = inputs["x"], randn(H), randn(H, P), randn(B, T, H, P)
    assert x is not None
    by_head = reference(mamba2(), {**inputs, "D": narrow, "z": None})[0]["y"]
    by_channel = reference(mamba2(), {**inputs, "D": wide, "z": z})[0]["y"]
    torch.testing.assert_close(by_head, bare + narrow[:, None] * x)
    torch.testing.assert_close(by_channel, (bare + wide * x) * silu(z))


def test_a_bias_is_added_before_softplus() -> None:
    inputs, bias = mamba2_inputs(), randn(H)
    dt = inputs["dt"]
    assert dt is not None
    torch.testing.assert_close(
        reference(mamba2(), {**inputs, "dt_bias": bias})[0]["y"],
        reference(mamba2(), {**inputs, "dt": dt + bias})[0]["y"],
    )


def test_lagged_inputs_are_zero_before_the_first_token() -> None:
    inputs = {**mamba2_inputs(), "A": -randn(B, T, H).abs(), "trap": randn(B, T, H)}
    outputs, states = reference(read_layer(load_source("mamba3")), inputs)
    x, dt, A, keys, C, trap = (inputs[n] for n in ("x", "dt", "A", "B", "C", "trap"))
    keys, C = keys.repeat_interleave(H // G, 2), C.repeat_interleave(H // G, 2)  # type: ignore[union-attr]
    step, late = softplus(dt), trap.sigmoid()  # type: ignore[arg-type,union-attr]
    S = torch.zeros(B, H, P, N, dtype=torch.float64)
    before = torch.zeros_like(S)
    for t in range(T):
        now = x[:, t, :, :, None] * keys[:, t, :, None, :]  # type: ignore[index]
        keep = (A[:, t] * step[:, t]).exp()  # type: ignore[index]
        early = (1 - late[:, t]) * step[:, t] * keep
        S = keep[..., None, None] * S + early[..., None, None] * before + (late * step)[:, t, :, None, None] * now
        before = now
        torch.testing.assert_close(outputs["y"][:, t], torch.einsum("bhpn,bhn->bhp", S, C[:, t]))
    torch.testing.assert_close(states["S"], S)


def test_a_state_may_be_read_before_the_token_and_several_states_belong_to_one_layer() -> None:
    text = """language 1
layer two "two"
axes b t h p n
inputs
  q[b t h n], k[b t h n], v[b t h p] : f32
state S[b h p n] : f32
      S[t] = (1 - 2^(-1 - index(h))) * S[t-1] + outer(v, k)
      N[b h n] : f32
      N[t] = 0.5 * N[t-1] + k
output y[b h t p] : f32
       y = S[t-1] . q + (N[t] . q) * v
schedule
  chunk = 64
  plan = three_kernel
"""
    q, k, v = randn(B, T, H, N), randn(B, T, H, N), randn(B, T, H, P)
    outputs, states = reference(read_layer(Source("two.ssd", text)), {"q": q, "k": k, "v": v})
    S, norm = torch.zeros(B, H, P, N).double(), torch.zeros(B, H, N).double()
    decay = (1 - 2.0 ** (-1 - torch.arange(H))).double()[:, None, None]
    for t in range(T):
        y = torch.einsum("bhpn,bhn->bhp", S, q[:, t])
        S = decay * S + v[:, t, :, :, None] * k[:, t, :, None, :]
        norm = 0.5 * norm + k[:, t]
        y = y + (norm * q[:, t]).sum(-1, keepdim=True) * v[:, t]
        torch.testing.assert_close(outputs["y"][:, :, t], y)
    torch.testing.assert_close(states["S"], S)
    torch.testing.assert_close(states["N"], norm)


def test_no_tokens_leave_the_states_as_they_were() -> None:
    inputs = {name: v if v is None or v.ndim == 1 else v[:, :0] for name, v in mamba2_inputs().items()}
    S0 = randn(B, H, P, N)
    outputs, states = reference(mamba2(), inputs, {}, {"S": S0})
    assert outputs["y"].shape == (B, 0, H, P)
    assert torch.equal(states["S"], S0)


def test_inputs_of_any_dtype_are_computed_in_float64() -> None:
    inputs = {name: v.to(torch.bfloat16) for name, v in mamba2_inputs().items() if v is not None}
    outputs, states = reference(mamba2(), inputs)
    wide, _ = reference(mamba2(), {name: v.double() for name, v in inputs.items()})
    assert outputs["y"].dtype == states["S"].dtype == torch.float64
    assert torch.equal(outputs["y"], wide["y"])


@pytest.mark.parametrize(
    ("x", "expected"), [(-800.0, 0.0), (-20.0, 2.061153620314381e-09), (0.0, math.log(2)), (90.0, 90.0)]
)
def test_softplus_is_exact_far_from_zero(x: float, expected: float) -> None:
    got = OPERATIONS["softplus"](torch.tensor(x, dtype=torch.float64))
    assert got.item() == pytest.approx(expected, rel=1e-14)


def test_wrong_arguments_are_named() -> None:
    inputs = mamba2_inputs()
    x = inputs["x"]
    assert x is not None
    for wrong, message in (
        ({"B": None}, "mamba2 needs the input `B`"),
        ({"w": x}, "mamba2 has no input `w`"),
        ({"dt": x}, r"`dt` has 4 dimensions, expected \[b t h\]"),
        ({"C": randn(B, T, G, N + 1)}, "axis `n` is 6 in `C` but 5 in `B`"),
        ({"B": randn(B, T, 3, N), "C": randn(B, T, 3, N)}, "3 groups `g` do not divide 4 of `h`"),
    ):
        with pytest.raises(ValueError, match=message):
            reference(mamba2(), {**inputs, **wrong})
    with pytest.raises(ValueError, match=r"the state `S` has shape \(1, 4, 3, 5\), expected \[b h p n\]"):
        reference(mamba2(), inputs, {}, {"S": randn(1, H, P, N)})
