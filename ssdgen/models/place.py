"""Where and in which dtype a model computes if nobody says."""

from __future__ import annotations

import torch

from ssdgen.diagnostics import UserError
from ssdgen.run.bench.environment import environment
from ssdgen.run.bench.rows import Environment

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def place(device: str | None = None, dtype: str | None = None) -> tuple[str, torch.dtype]:
    """The device, a GPU where there is one, and the dtype, bf16 on a GPU, else f32. UserError for a GPU that is not there."""
    there = torch.cuda.is_available()
    if device == "cuda" and not there:
        raise UserError("--device cuda: torch finds no GPU here", "leave it out to compute on the CPU")
    device = device or ("cuda" if there else "cpu")
    return device, DTYPES[dtype or ("bf16" if device == "cuda" else "f32")]


def gpu_environment(command: str) -> Environment | None:
    """The current GPU, the versions that matter, and how fast it copies and multiplies; None where there is none."""
    return environment(command) if torch.cuda.is_available() else None
