"""What a search has to know of a GPU, and what it knows if there is none."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from ssdgen.plan.roofline import H200 as RATES
from ssdgen.plan.roofline import MULTIPROCESSORS

SHARED_LIMIT = {
    "sm_80": 163, "sm_86": 99, "sm_87": 163, "sm_88": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_103": 227,
    "sm_110": 227, "sm_120": 99, "sm_121": 99,
}  # fmt: skip
"""KB of shared memory that one block may have (CUDA C++ Programming Guide, compute capabilities)."""

RESERVED = 1024
"""Bytes of it that the system takes, which a cubin's number includes from sm_90."""


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU: its name, architecture, multiprocessors, bytes of L2 cache, and bytes a second that a copy reaches."""

    name: str
    arch: str
    multiprocessors: int
    l2_bytes: int
    bandwidth: float

    @property
    def shared_limit(self) -> int:
        """The bytes of shared memory that a cubin may ask for."""
        major = int(self.arch.removeprefix("sm_")) // 10
        return SHARED_LIMIT[self.arch] * 1024 + (RESERVED if major >= 9 else 0)


H200 = Device("NVIDIA H200", "sm_90", MULTIPROCESSORS, 60 << 20, RATES.bandwidth)
"""What is assumed where there is no GPU."""


def assumed(module: ModuleType, device: Device, segments: int = 0) -> AbstractContextManager[None]:
    """Within, calls of an emitted module on the CPU are configured and cut as on `device`, unless `segments` is 0 into so many
    segments."""
    tuning: Any = importlib.import_module("._tuned", module.__package__)
    context: AbstractContextManager[None] = tuning.assumed(tuning.Gpu(device.name, device.multiprocessors), segments)
    return context


def here() -> Device:
    """The current GPU. The bandwidth, which only ranks candidates before they are measured, is scaled from an H200's."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    arch = f"sm_{properties.major}{properties.minor}"
    bandwidth = H200.bandwidth * properties.multi_processor_count / H200.multiprocessors
    return Device(properties.name, arch, properties.multi_processor_count, int(properties.L2_cache_size), bandwidth)
