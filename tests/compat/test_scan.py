"""`mamba_chunk_scan_combined` against a token loop in float64: mamba_ssm's own grids, options, layouts, seq_idx, gradients."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from ssdgen.compat.mamba_ssm import mamba_chunk_scan_combined
from ssdgen.generated import mamba2
from ssdgen.ir.report import Gate
from ssdgen.run.checks import one_thread, poisoned_memory, relative_error
from ssdgen.run.verify import emulated
from tests.cases.subject import BOTH
from tests.compat.truth import batch_of_loops, drawn, packed_loops

both = pytest.mark.parametrize("gate", BOTH)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BOUND = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}
"""Of the portable path, which computes in float32: one rounding of the result. Kernels multiply in bf16: 5e-3."""

KERNELS = 5e-3


def running(gate: Gate) -> object:
    """Within, calls of the drop-ins run the portable path or the kernels in the emulator."""
    return emulated(mamba2) if gate == "emulation" else nullcontext()


def near(got: Tensor, want: Tensor, bound: float) -> None:
    error = relative_error(got, want)
    assert error <= bound, f"{error:.1e} > {bound:.0e}"


@both
@pytest.mark.parametrize("dt_softplus", [True, False])
def test_every_option_at_once(gate: Gate, dt_softplus: bool) -> None:
    """Steps below 0 without softplus are clamped to the lower limit, as in mamba_ssm; final states are float32."""
    i = drawn(2, 70, 4, 2, 24, 40)
    if not dt_softplus:
        i["dt"] = (i["dt"] + 2.5) / 10
    start = torch.randn(2, 4, 24, 40)
    limit = (0.01, 0.2)
    with running(gate):
        out, final = mamba_chunk_scan_combined(
            **i, chunk_size=256, initial_states=start, dt_softplus=dt_softplus, dt_limit=limit, return_final_states=True
        )
    y, S = batch_of_loops(**i, S=start, dt_softplus=dt_softplus, dt_limit=limit)
    bound = KERNELS if gate == "emulation" else BOUND[torch.float32]
    assert (out.dtype, final.dtype) == (torch.float32, torch.float32)
    near(out, y, bound)
    near(final, S, bound)


def test_what_is_left_out_has_their_defaults() -> None:
    """Softplus is off, there is no limit but 0, and only the outputs are returned."""
    i = {k: v for k, v in drawn(2, 65, 4, 1, 8, 16).items() if k in ("x", "dt", "A", "B", "C")}
    i["dt"] = i["dt"].abs() / 10
    out = mamba_chunk_scan_combined(*i.values(), 64)
    assert isinstance(out, Tensor)
    near(out, batch_of_loops(**i)[0], 1e-5)


@pytest.mark.parametrize("form", [(4,), (4, 8)])
def test_forms_of_d(form: tuple[int, ...]) -> None:
    i = drawn(1, 9, 4, 2, 8, 16) | {"D": torch.randn(form)}
    near(
        mamba_chunk_scan_combined(**i, chunk_size=64, dt_softplus=True),
        batch_of_loops(**i, dt_softplus=True)[0],
        1e-5,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [1, 2, 8, 16])
@pytest.mark.parametrize("chunk_size", [64, 128])
def test_their_grid_of_varlen_states(chunk_size: int, groups: int, dtype: torch.dtype) -> None:
    """mamba_ssm's test_chunk_state_varlen, with 12 sequences instead of 300 and 16 heads instead of 64."""
    torch.manual_seed(chunk_size + groups)
    lengths = torch.randint(1, 200, (12,))
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    t, h, p, n = int(ends[-1]), 16, 64, 32
    x, B, C = torch.randn(t, h, p), torch.randn(t, groups, n) / 5, torch.randn(t, groups, n) / 5
    x, B, C = (v.to(dtype) for v in (x, B, C))
    dt, A = torch.nn.functional.softplus(torch.randn(t, h) - 4), -0.1 * (torch.rand(h) + 0.01)
    seq_idx = torch.repeat_interleave(torch.arange(12, dtype=torch.int32), lengths)[None]
    out, varlen = mamba_chunk_scan_combined(
        x[None], dt[None], A, B[None], C[None], chunk_size, seq_idx=seq_idx, cu_seqlens=ends, return_varlen_states=True
    )
    y, S = packed_loops(ends.tolist(), x, dt, A, B, C)
    assert (out.dtype, varlen.dtype) == (dtype, dtype)
    near(out[0], y, BOUND[dtype])
    near(varlen, S, BOUND[dtype])


@both
def test_initial_states_enter_the_first_sequence_and_all_three_results_are_returned(gate: Gate) -> None:
    """Sequences without tokens before, between and behind; theirs forgets an initial state of a sequence within one chunk."""
    i = drawn(1, 90, 4, 2, 16, 24)
    ends = [0, 0, 30, 30, 90, 90]
    seq_idx = torch.tensor([[0] * 30 + [1] * 60])
    start = torch.randn(1, 4, 16, 24)
    with running(gate):
        out, final, varlen = mamba_chunk_scan_combined(
            **i, chunk_size=128, dt_softplus=True, initial_states=start, seq_idx=seq_idx, cu_seqlens=torch.tensor(ends),
            return_final_states=True, return_varlen_states=True,
        )  # fmt: skip
    rows = {k: v[0] if v.dim() > 2 else v for k, v in i.items()}
    states = torch.zeros(5, 4, 16, 24)
    states[1] = start[0]
    y, S = packed_loops(ends, **rows, S=states, dt_softplus=True)
    bound = KERNELS if gate == "emulation" else 1e-5
    near(out[0], y, bound)
    near(varlen, S, bound)
    assert torch.equal(final[0], varlen[3])


@both
def test_seq_idx_in_a_batch(gate: Gate) -> None:
    """Initial states enter a row whose first number is 0 and no other, as in mamba_ssm; the final state is the last's."""
    i = drawn(2, 80, 4, 2, 16, 24)
    seq_idx = torch.tensor([[0] * 33 + [1] * 47, [3] * 70 + [4] * 10], dtype=torch.int32)
    start = torch.randn(2, 4, 16, 24)
    with running(gate):
        out, final = mamba_chunk_scan_combined(
            **i, chunk_size=64, dt_softplus=True, initial_states=start, seq_idx=seq_idx, return_final_states=True
        )
    bound = KERNELS if gate == "emulation" else 1e-5
    for row, cut, entering in ((0, 33, start[0]), (1, 70, torch.zeros_like(start[0]))):
        rows = {k: v[row] if v.dim() > 2 else v for k, v in i.items()}
        states = torch.stack((entering, torch.zeros_like(entering)))
        y, S = packed_loops([0, cut, 80], **rows, S=states, dt_softplus=True)
        near(out[row], y, bound)
        near(final[row], S[1], bound)


@both
def test_tensors_as_the_layer_passes_them(gate: Gate) -> None:
    """dt and z are slices of a projection, x, B and C of a convolution's output, whose time is its last axis in memory."""
    b, t, h, g, p, n = 2, 70, 3, 1, 16, 24
    torch.manual_seed(2)
    inner, wide = h * p, h * p + 2 * g * n
    projected = torch.randn(b, t, inner + wide + h)
    z, xBC, dt = torch.split(projected, [inner, wide, h], dim=-1)
    xBC = xBC.transpose(1, 2).contiguous().transpose(1, 2)
    x, B, C = torch.split(xBC, [inner, g * n, g * n], dim=-1)
    x, z = x.unflatten(-1, (h, p)), z.unflatten(-1, (h, p))
    B, C = B.unflatten(-1, (g, n)), C.unflatten(-1, (g, n))
    assert not any(v.is_contiguous() for v in (x, z, B, C, dt))
    A, limit = -torch.rand(h) - 0.1, (0.0, math.inf)

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        x, z, B, C, dt = tensors
        with running(gate), one_thread(), poisoned_memory():
            return mamba_chunk_scan_combined(
                x, dt, A, B, C, chunk_size=256, z=z, dt_softplus=True, dt_limit=limit, return_final_states=True
            )

    given = (x, z, B, C, dt)
    for got, want in zip(call(*given), call(*(v.contiguous() for v in given)), strict=True):
        near(got, want, 1e-6)


@both
@pytest.mark.parametrize(("x_dtype", "c_dtype"), [(torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)])
def test_dtypes_may_differ(gate: Gate, x_dtype: torch.dtype, c_dtype: torch.dtype) -> None:
    """mamba #854: x in bf16 with C in float32 does not compile. Here they meet in the widest; outputs are in the dtype of x."""
    i = drawn(1, 66, 2, 1, 16, 24)
    i |= {"x": i["x"].to(x_dtype), "B": i["B"].to(c_dtype), "C": i["C"].to(c_dtype), "dt": i["dt"].to(x_dtype)}
    start = torch.randn(1, 2, 16, 24, dtype=torch.bfloat16)
    with running(gate):
        out, final = mamba_chunk_scan_combined(
            **i, chunk_size=64, dt_softplus=True, initial_states=start, return_final_states=True
        )
    y, S = batch_of_loops(**i, S=start, dt_softplus=True)
    assert (out.dtype, final.dtype) == (x_dtype, torch.float32)
    near(out, y, 5e-3)
    near(final, S, KERNELS if gate == "emulation" else 1e-5)


@pytest.mark.parametrize("t", [0, 1])
def test_short_sequences(t: int) -> None:
    i = drawn(2, t, 4, 2, 8, 16)
    start = torch.randn(2, 4, 8, 16)
    out, final = mamba_chunk_scan_combined(
        **i, chunk_size=1, dt_softplus=True, initial_states=start, seq_idx=torch.zeros(2, t, dtype=torch.int64),
        return_final_states=True,
    )  # fmt: skip
    y, S = batch_of_loops(**i, S=start, dt_softplus=True)
    assert out.shape == (2, t, 4, 8)
    near(final, S, 1e-5)
    if t:
        near(out, y, 1e-5)


@pytest.mark.parametrize("dt_softplus", [True, False])
def test_gradients_on_the_cpu(dt_softplus: bool) -> None:
    """Of every input, through packed sequences, in float64; steps are inside their limits, where the loop has a gradient."""
    i = {k: v.double() for k, v in drawn(2, 40, 2, 1, 4, 8).items()}
    if not dt_softplus:
        i["dt"] = i["dt"].abs() + i["dt_bias"].abs().max()
    i["start"] = torch.randn(2, 2, 4, 8, dtype=torch.float64)
    leaves = {k: v.requires_grad_() for k, v in i.items()}
    start = leaves["start"]
    tensors = {k: v for k, v in leaves.items() if k != "start"}
    out, final = mamba_chunk_scan_combined(
        **tensors, chunk_size=64, initial_states=start, dt_softplus=dt_softplus, return_final_states=True
    )
    y, S = batch_of_loops(**tensors, S=start, dt_softplus=dt_softplus, dt_limit=(0.0, math.inf))
    up, down = torch.randn_like(y), torch.randn_like(S)
    got = torch.autograd.grad((out * up).sum() + (final * down).sum(), list(leaves.values()))
    want = torch.autograd.grad((y * up).sum() + (S * down).sum(), list(leaves.values()))
    assert out.dtype == final.dtype == torch.float64
    for ours, theirs in zip(got, want, strict=True):
        near(ours, theirs, 1e-10)
