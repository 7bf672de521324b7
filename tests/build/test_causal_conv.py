"""The kernels of the causal convolution, compiled ahead of time for every architecture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from generated import causal_conv
from ssdgen.build.compile import build
from ssdgen.ir.build import DEFAULT_ARCHITECTURES, CompiledKernel, CompileRequest
from ssdgen.run.recorded import ELEMENTS, recording


def requests(dtype: torch.dtype) -> Iterator[CompileRequest]:
    """Every flag of the kernels, for x a slice of a projection, with the sizes of Mamba-2 of 130 million parameters."""
    b, t, d = 2, 4096, 1792
    x = torch.empty(b, t, 2 * d, dtype=dtype)[:, :, :d]
    weight, bias, cache = (torch.empty(s, dtype=dtype) for s in ((d, 4), (d,), (b, d, 3)))
    edges, slots = torch.tensor([0, 1000, t], dtype=torch.int32), torch.tensor([1, -1], dtype=torch.int32)
    with recording(causal_conv, f"{ELEMENTS[dtype]}") as plain, torch.no_grad():
        causal_conv.forward(x, weight)
        causal_conv.forward(x, weight, bias, activation="silu")
        causal_conv.step(cache, x[:, 0], weight, bias, activation="silu")
        causal_conv.step(cache, x[:, 0], weight, bias, activation="silu", steady=True)
    with recording(causal_conv, f"{ELEMENTS[dtype]} caches") as carried, torch.no_grad():
        causal_conv.forward(x, weight, bias, initial=cache, activation="silu", return_final=True)
        causal_conv.step(cache, x[:, 0], weight, state_indices=slots)
        causal_conv.steps(cache, x[:, :5], weight, bias, activation="silu", state_indices=slots)
    with recording(causal_conv, f"{ELEMENTS[dtype]} packed") as packed, torch.no_grad():
        causal_conv.forward(x[:1], weight, bias, initial=cache, cu_seqlens=edges, activation="silu", return_final=True)
    yield from (launch.request for launch in (*plain, *carried, *packed))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_kernel_compiles_for_every_architecture(dtype: torch.dtype) -> None:
    """Nothing spills, and several blocks fit into the shared memory of a multiprocessor, so that their loads overlap.

    The conversion of a whole tile that reads a cache took 90 KB; 40 KB is two blocks and more of the 99 KB of sm_120.
    """
    wanted = [replace(r, arch=arch) for r in requests(dtype) for arch in DEFAULT_ARCHITECTURES]
    for result in build(wanted).results:
        assert isinstance(result, CompiledKernel), str(result)
        assert result.resources.spilled_bytes == 0, str(result.request)
        assert result.resources.shared_bytes <= 40 * 1024, f"{result.request}: {result.resources.shared_bytes} bytes"
