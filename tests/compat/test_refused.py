"""Signatures are theirs, to the last default; what cannot be done is refused with a message that names it and says why."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ssdgen.compat.mamba_ssm import mamba_chunk_scan_combined, selective_state_update
from ssdgen.compat.vllm import mamba_chunk_scan_combined_varlen
from tests.compat.truth import drawn

NONE = dict.fromkeys(("D", "z", "dt_bias"))
INF = math.inf


@pytest.mark.parametrize(
    ("function", "required", "options"),
    [
        (
            mamba_chunk_scan_combined,
            "x dt A B C chunk_size",
            NONE
            | {
                "initial_states": None,
                "seq_idx": None,
                "cu_seqlens": None,
                "dt_softplus": False,
                "dt_limit": (0.0, INF),
            }
            | {"return_final_states": False, "return_varlen_states": False},
        ),
        (selective_state_update, "state x dt A B C", NONE | {"dt_softplus": False, "state_batch_indices": None}),
        (
            mamba_chunk_scan_combined_varlen,
            "x dt A B C chunk_size cu_seqlens cu_chunk_seqlens last_chunk_indices seq_idx out",
            NONE
            | {"initial_states": None, "dt_softplus": False, "dt_limit": (0.0, INF)}
            | {"return_intermediate_states": False, "state_dtype": None},
        ),
    ],
)
def test_signatures(function: Callable[..., Any], required: str, options: dict[str, Any]) -> None:
    """Of mamba_ssm 2.3.2, and of vLLM since it cuts sequences into chunks ahead of the call."""
    parameters = inspect.signature(function).parameters
    empty = inspect.Parameter.empty
    assert [(n, p.default) for n, p in parameters.items()] == [
        *((n, empty) for n in required.split()),
        *options.items(),
    ]
    assert {p.kind for p in parameters.values()} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def scanned(**changed: Any) -> Any:
    return mamba_chunk_scan_combined(**{**drawn(1, 20, 4, 2, 8, 16), "chunk_size": 64, "dt_softplus": True, **changed})


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"chunk_size": 0}, ValueError, "`chunk_size` must be an integer of at least 1, got 0"),
        ({"chunk_size": 64.0}, ValueError, r"`chunk_size` must be an integer of at least 1, got 64\.0"),
        ({"dt_limit": 0.1}, TypeError, "`dt_limit` must be a pair of numbers"),
        ({"dt_limit": (-1.0, INF)}, ValueError, "`dt_limit` must be of numbers that are at least 0.*decay above 1"),
        ({"dt_limit": (0.0, math.nan)}, ValueError, "`dt_limit` must be of numbers"),
        ({"x": None}, TypeError, "`x` must be a torch.Tensor, got NoneType"),
        ({"x": torch.zeros(20, 4, 8)}, ValueError, r"`x` must be \[b t h p\] \(rank 4\), got shape \[20, 4, 8\]"),
        ({"x": torch.zeros(1, 20, 4, 8, dtype=torch.int32)}, TypeError, "mamba2: `x` must be bfloat16"),
        ({"B": torch.zeros(1, 20, 3, 16), "C": torch.zeros(1, 20, 3, 16)}, ValueError, "3 groups .* do not divide 4"),
        ({"C": torch.zeros(1, 20, 2, 15)}, ValueError, "mamba2: `C`"),
        ({"A": torch.ones(4)}, ValueError, r"mamba2: `A` must be in \[-inf, 0\)"),
        ({"D": torch.zeros(3)}, ValueError, "mamba2: `D`"),
        (
            {"initial_states": torch.zeros(1, 4, 16, 8)},
            ValueError,
            r"`initial_states`\[b h p n\] must have shape \[1, 4, 8",
        ),
        ({"seq_idx": torch.zeros(20, dtype=torch.int32)}, ValueError, r"`seq_idx` must be \[b t\]"),
        ({"seq_idx": torch.zeros(1, 20)}, TypeError, "mamba2: `seq_idx` must be int32 or int64"),
        ({"return_varlen_states": True}, TypeError, "`cu_seqlens` must be a torch.Tensor, got NoneType"),
        (
            {"return_varlen_states": True, "cu_seqlens": torch.tensor([0, 8, 20])},
            ValueError,
            "`return_varlen_states` of 2 sequences needs `seq_idx`",
        ),
        (
            {
                "return_varlen_states": True,
                "cu_seqlens": torch.tensor([0, 8, 20]),
                "seq_idx": torch.arange(20)[None] // 10,
            },
            ValueError,
            r"`seq_idx` changes at tokens \[10\], but sequences begin at \[8\]",
        ),
        (
            {k: torch.cat((v, v)) for k, v in drawn(1, 20, 4, 2, 8, 16).items() if v.dim() > 2}
            | {"return_varlen_states": True, "cu_seqlens": torch.tensor([0, 20])},
            ValueError,
            "`return_varlen_states` is of sequences in a batch of 1, but axis b is 2 in `x`",
        ),
    ],
)
def test_scan(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        scanned(**changed)


def test_what_is_unused_is_free() -> None:
    """cu_seqlens without return_varlen_states is not looked at, as in mamba_ssm."""
    assert torch.equal(scanned(cu_seqlens="anything"), scanned())


def packed(**changed: Any) -> Any:
    rows = {k: v[0] if v.dim() > 2 else v for k, v in drawn(1, 20, 4, 2, 8, 16).items()}
    metadata = dict.fromkeys(("cu_chunk_seqlens", "last_chunk_indices", "seq_idx"))
    options = {"chunk_size": 64, "cu_seqlens": torch.tensor([0, 8, 20]), "out": torch.zeros(20, 4, 8)}
    return mamba_chunk_scan_combined_varlen(**{**rows, **metadata, **options, **changed})


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"return_intermediate_states": True}, NotImplementedError, "`return_intermediate_states` .*returns those"),
        ({"x": torch.zeros(1, 20, 4, 8)}, ValueError, r"`x` must be \[t h p\] \(rank 3\)"),
        ({"dt": torch.zeros(1, 20, 4)}, ValueError, r"`dt` must be \[t h\]"),
        ({"C": torch.zeros(20, 2, 15)}, ValueError, r"`C`\[t g n\] must have shape \[20, 2, 16\], got \[20, 2, 15\]"),
        ({"z": torch.zeros(20, 8)}, ValueError, "`z` must be"),
        ({"out": None}, TypeError, "`out` must be a torch.Tensor, got NoneType"),
        ({"out": torch.zeros(19, 4, 8)}, ValueError, r"`out`\[t h p\] must have shape \[20, 4, 8\]"),
        ({"cu_seqlens": None}, TypeError, "`cu_seqlens` must be a torch.Tensor"),
        ({"cu_seqlens": torch.tensor([0, 8, 19])}, ValueError, "`cu_seqlens` must begin at 0.* it ends at 19"),
        (
            {"initial_states": torch.zeros(1, 4, 8, 16)},
            ValueError,
            r"`initial_states`.* must have shape \[2, 4, 8, 16\]",
        ),
        ({"dt_limit": (-1.0, INF)}, ValueError, "`dt_limit`"),
        ({"chunk_size": -1}, ValueError, "`chunk_size`"),
    ],
)
def test_packed(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    """Nothing is written where a call is refused."""
    with pytest.raises(error, match=message):
        packed(**changed)


def updated(**changed: Any) -> Any:
    b, h, p, n = 2, 4, 8, 16
    values = {
        "state": torch.zeros(b, h, p, n), "x": torch.zeros(b, h, p), "dt": torch.zeros(b, h, 1).expand(b, h, p),
        "A": (-torch.rand(h, 1, 1) - 0.1).expand(h, p, n), "B": torch.zeros(b, 2, n), "C": torch.zeros(b, 2, n),
        "dt_softplus": True,
    }  # fmt: skip
    return selective_state_update(**{**values, **changed})


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"state": torch.zeros(2, 4)}, TypeError, r"`state` must be a tensor \[b h p n\] or \[b p n\], got \[2, 4\]"),
        ({"state": None}, TypeError, "`state` must be a tensor .* got NoneType"),
        ({"state": torch.zeros(1, 4, 8, 16)}, ValueError, "`state` has 1 rows, but the batch of `x` is 2"),
        (
            {"state": torch.zeros(2, 1, 1, 1).expand(2, 4, 8, 16)},
            ValueError,
            "`S` is written to, but some of its elements",
        ),
        ({"x": torch.zeros(2, 4, 9)}, ValueError, r"`x`\[b h p\] must have shape \[2, 4, 8\], got \[2, 4, 9\]"),
        ({"dt": torch.zeros(3, 4, 8)}, ValueError, "`dt`"),
        ({"A": -torch.ones(4)}, ValueError, r"`A` must be \[h p n\]"),
        ({"B": torch.zeros(2, 3, 16)}, ValueError, "3 groups .* do not divide 4 heads"),
        ({"C": torch.zeros(2, 1, 16)}, ValueError, r"`C`\[b g n\] must have shape \[2, 2, 16\]"),
        ({"D": torch.zeros(4)}, ValueError, r"`D`\[h p\] must have shape \[4, 8\]"),
        ({"z": torch.zeros(2, 4, 7)}, ValueError, "`z`"),
        ({"dt_bias": torch.zeros(4, 7)}, ValueError, "`dt_bias`"),
        ({"state_batch_indices": torch.tensor([0])}, ValueError, r"`state_batch_indices`\[b\] must have shape \[2\]"),
        ({"state_batch_indices": torch.tensor([0.0, 1.0])}, TypeError, "`state_batch_indices` must be int32"),
        ({"state_batch_indices": torch.tensor([0, 2])}, ValueError, "is 2 at 1, but the states have 2 slots"),
    ],
)
def test_update(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        updated(**changed)
