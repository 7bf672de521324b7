"""vLLM's `mamba_chunk_scan_combined_varlen`: vLLM's own grids of one example and of examples fed piece by piece."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from ssdgen.compat.vllm import mamba_chunk_scan_combined_varlen
from ssdgen.ir.report import Gate
from tests.compat.test_scan import BOUND, DTYPES, KERNELS, both, near, running
from tests.compat.truth import batch_of_loops, drawn, packed_loops

PIECES = (  # tokens of an example, chunk size, and what each call takes of every example
    (64, 8, ((64, 32), (64, 32))),
    (64, 8, ((32, 32), (32, 32), (32, 32))),
    (64, 8, ((8, 8), (8, 8), (8, 8))),
    (64, 8, ((4, 4), (4, 4), (4, 4), (4, 4))),
    (64, 8, ((64, 32, 16, 8, 8), (8, 16, 32, 16, 8), (8, 8, 16, 32, 16))),
    (64, 29, ((11, 4), (13, 23), (19, 22), (21, 15))),
    (64, 256, ((5,), (1,), (1,), (1,))),
    (64, 256, ((5, 30), (1, 2), (1, 2), (1, 2))),
)


def random_inputs(rows: int, t: int, h: int, d: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """As vLLM's tests draw them: finished steps, as many groups as heads, as many state as head channels."""
    torch.manual_seed(0)
    return {
        "x": torch.randn(rows, t, h, d).to(dtype),
        "dt": softplus(torch.randn(rows, t, h) - 4).to(dtype),
        "A": -torch.exp(torch.rand(h)).to(dtype),
        "B": torch.randn(rows, t, h, d).to(dtype),
        "C": torch.randn(rows, t, h, d).to(dtype),
    }


def call(ends: list[int], inputs: dict[str, Tensor], chunk_size: int, **options: object) -> tuple[Tensor, Tensor]:
    """Outputs and states; what the kernels here do not use is not given."""
    out = torch.full_like(inputs["x"], torch.nan)
    states = mamba_chunk_scan_combined_varlen(
        **inputs, chunk_size=chunk_size, cu_seqlens=torch.tensor(ends, dtype=torch.int32), cu_chunk_seqlens=None,
        last_chunk_indices=None, seq_idx=None, out=out, **options,
    )  # fmt: skip
    return out, states


@pytest.mark.parametrize("heads", [3, 4, 11, 16, 32])
@pytest.mark.parametrize("channels", [5, 8, 19, 32, 128])
@pytest.mark.parametrize(("tokens", "chunk_size"), [(119, 17), (128, 32)])
def test_one_example(heads: int, channels: int, tokens: int, chunk_size: int) -> None:
    """vLLM's test_mamba_chunk_scan_single_example; the first and the last head are compared, all of their tokens."""
    for dtype in DTYPES:
        i = random_inputs(1, tokens, heads, channels, dtype)
        rows = {k: v if k == "A" else v[0] for k, v in i.items()}
        out, states = call([0, tokens], rows, chunk_size, state_dtype=torch.float32)
        some = [0, heads - 1]
        y, S = packed_loops([0, tokens], **{k: v[some] if k == "A" else v[:, some] for k, v in rows.items()})
        assert (out.dtype, states.dtype) == (dtype, torch.float32)
        near(out[:, some], y, BOUND[dtype])
        near(states[:, some], S, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("channels", [5, 16, 21, 32])
@pytest.mark.parametrize(("tokens", "chunk_size", "calls"), PIECES)
def test_examples_piece_by_piece(
    tokens: int, chunk_size: int, calls: tuple[tuple[int, ...], ...], channels: int, dtype: torch.dtype
) -> None:
    """vLLM's test_mamba_chunk_scan_cont_batch: an example that is used up begins again from a zero state."""
    for heads in (4, 8, 13):
        i = random_inputs(len(calls[0]), tokens, heads, channels, dtype)
        whole, _ = batch_of_loops(**i)
        taken = [0] * len(calls[0])
        states: Tensor | None = None
        for lengths in calls:
            cuts = [slice(start, start + length) for start, length in zip(taken, lengths, strict=True)]
            rows = {k: v if k == "A" else torch.cat([v[e, cut] for e, cut in enumerate(cuts)]) for k, v in i.items()}
            ends = [0, *torch.tensor(lengths).cumsum(0).tolist()]
            out, states = call(ends, rows, chunk_size, initial_states=states, state_dtype=torch.float32)
            near(out, torch.cat([whole[e, cut] for e, cut in enumerate(cuts)]), BOUND[dtype])
            taken = [cut.stop % tokens for cut in cuts]
            states[[e for e, at in enumerate(taken) if at == 0]] = 0.0


@both
@pytest.mark.parametrize("dt_softplus", [True, False])
def test_every_option_at_once(gate: Gate, dt_softplus: bool) -> None:
    """Sequences with and without tokens, each with its initial state; metadata is taken as vLLM makes it."""
    ends = [0, 0, 37, 80, 80, 133]
    i = drawn(1, 133, 4, 2, 24, 40, torch.bfloat16)
    if not dt_softplus:
        i["dt"] = (i["dt"] + 2.5) / 10
    rows = {k: v[0] if v.dim() > 2 else v for k, v in i.items()}
    start = torch.randn(5, 4, 24, 40, dtype=torch.bfloat16)
    wide = torch.full((133, 4, 48), torch.nan, dtype=torch.bfloat16)
    out = wide[..., :24]
    with running(gate):
        states = mamba_chunk_scan_combined_varlen(
            **rows, chunk_size=64, cu_seqlens=torch.tensor(ends), cu_chunk_seqlens=torch.tensor([0, 37, 80, 133]),
            last_chunk_indices=torch.tensor([0, 0, 1, 1, 2]), seq_idx=torch.tensor([1, 2, 4]), out=out,
            initial_states=start, dt_softplus=dt_softplus, dt_limit=(0.01, 0.2),
        )  # fmt: skip
    y, S = packed_loops(ends, **rows, S=start, dt_softplus=dt_softplus, dt_limit=(0.01, 0.2))
    assert states.dtype == torch.bfloat16
    near(out, y, KERNELS)
    near(states, S, KERNELS)
    assert wide[..., 24:].isnan().all()


@pytest.mark.parametrize(("state_dtype", "wanted"), [(None, torch.float16), (torch.float32, torch.float32)])
def test_states_are_in_the_dtype_asked_for(state_dtype: torch.dtype | None, wanted: torch.dtype) -> None:
    i = random_inputs(1, 20, 2, 8, torch.float16)
    rows = {k: v if k == "A" else v[0] for k, v in i.items()}
    assert call([0, 20], rows, 64, state_dtype=state_dtype)[1].dtype == wanted


def test_nothing_is_differentiated() -> None:
    """As in vLLM, whose function is a launch of kernels: parameters of a model need not be detached."""
    i = random_inputs(1, 20, 2, 8, torch.float32)
    rows = {k: v.requires_grad_() if k == "A" else v[0] for k, v in i.items()}
    out, states = call([0, 20], rows, 64)
    assert not out.requires_grad
    assert not states.requires_grad
