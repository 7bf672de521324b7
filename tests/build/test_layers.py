"""The kernels of `norms` and `projection`, compiled ahead of time at sizes of the smallest and largest published Mamba-2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from generated import norms, projection
from ssdgen.build.compile import build
from ssdgen.ir.build import CompiledKernel, CompileRequest
from ssdgen.run.recorded import recording

BF16 = torch.bfloat16
ARCHITECTURES = ("sm_80", "sm_90")
"""The oldest, and that of the targets."""

SHARED = 50 * 1024
"""Bytes of a block at most: two fit into the 99 KB of a multiprocessor with least."""


def requests() -> Iterator[CompileRequest]:
    """What a step and a prefill launch in bf16 with residuals in float32, and a gate behind a norm in groups."""
    with recording(norms, "a prefill") as prefill, torch.no_grad():
        residual, result = torch.empty(512, 2560), torch.empty(512, 2560, dtype=BF16)
        norms.rms_norm(residual, result[0], add=result)
        y, z = torch.empty(512, 5120, dtype=BF16), torch.empty(512, 3 * 5120, dtype=BF16)[:, :5120]
        norms.rms_norm(y, y[0])
        norms.rms_norm(y, y[0], groups=8, gate=z)
    with recording(projection, "a step") as step, torch.no_grad():
        for width, inner, projected in ((768, 1536, 3352), (2560, 5120, 10576)):
            residual, weight = torch.empty(1, width), torch.empty(projected, width, dtype=BF16)
            projection.project(residual, weight, norm=weight[0])
            y, weight = torch.empty(1, inner, dtype=BF16), torch.empty(width, inner, dtype=BF16)
            projection.project(y, weight, norm=weight[0], onto=residual)
    yield from (launch.request for launch in (*prefill, *step))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_hardly_anything_spills(arch: str) -> None:
    """A block of the products holds its part of the matrix in registers; one that spilled it would write what it read. What
    does not fit beside four blocks, 16 to 24 bytes, was faster with that."""
    for result in build([replace(r, arch=arch) for r in requests()]).results:
        assert isinstance(result, CompiledKernel), str(result)
        few = 24 if result.request.kernel == "multiply_row" else 0
        assert result.resources.spilled_bytes <= few, str(result.request)
        assert result.resources.shared_bytes <= SHARED, f"{result.request}: {result.resources.shared_bytes} bytes"
