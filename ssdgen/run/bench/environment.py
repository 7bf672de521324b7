"""The machine that something is measured on."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import time
from collections.abc import Callable
from statistics import median

import torch

from ssdgen.diagnostics import UserError
from ssdgen.run.bench.others import versions
from ssdgen.run.bench.rows import Environment

COPY_BYTES = 1 << 30
MATMUL = 8192


def need_gpu() -> None:
    """Raise UserError without a CUDA device."""
    if not torch.cuda.is_available():
        raise UserError(
            "this measures on an NVIDIA GPU, and torch finds none here",
            "`ssdgen bench draw FILE.json --out DIR` draws what was measured elsewhere",
        )


def environment(command: str) -> Environment:
    """The current CUDA device, the versions that matter, and how fast it copies and multiplies."""
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Environment(
        gpu=device.name,
        multiprocessors=device.multi_processor_count,
        l2_bytes=int(device.L2_cache_size),
        driver=_driver(),
        cuda=str(torch.version.cuda),
        torch=torch.__version__,
        triton=version("triton"),
        cuda_tile=version("cuda-tile"),
        python=platform.python_version(),
        date=time.strftime("%Y-%m-%d"),
        command=command,
        bandwidth=copy_bandwidth(),
        matmul_flops=matmul_flops(),
        peers=versions(),
    )


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a large copy."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / _seconds(lambda: target.copy_(source))


def matmul_flops() -> float:
    """Operations a second of a large bf16 matrix product."""
    a, b = (torch.randn(MATMUL, MATMUL, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2.0 * MATMUL**3 / _seconds(lambda: a @ b)


def _seconds(work: Callable[[], object], repeats: int = 10) -> float:
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return float(median(times))


def version(package: str) -> str:
    """The version of an installed package; "none" if it is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
