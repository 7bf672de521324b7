"""How far a result is from the truth, and how far it may be.

Errors are relative Frobenius norms, one per output and per final state. A bound is that of the coarsest product that
feeds the value and of the dtype it is rounded to at the end: float32 and tf32x3 1e-5, tf32, bf16x2 and float16
1e-3, bf16 5e-3.
An output in bf16 is off by up to 2^-8 in each element before any kernel has had a chance to be wrong; that is inside
its bound, not on top of it. Inputs are rounded first, and the reference sees the rounded values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ssdgen.ir.report import Check, Gate
from ssdgen.ir.schedule import Precision

BOUNDS: dict[str, float] = {
    "f64": 1e-12,
    "f32": 1e-5,
    "tf32x3": 1e-5,
    "tf32": 1e-3,
    "f16": 1e-3,
    "bf16x2": 1e-3,
    "bf16": 5e-3,
}
"""The largest relative error allowed of a product's precision or an output's dtype."""

NOTHING = 2.0**-100
"""A norm below which float32 keeps nothing of a value: its elements are near or below the smallest normal number, 2^-126."""

_ROUNDING = {torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def bound(dtype: torch.dtype, precisions: Iterable[Precision | str] = ()) -> float:
    """The bound of a value stored as `dtype` whose products ran in `precisions`."""
    return max(BOUNDS[_ROUNDING[dtype]], *(BOUNDS[p] for p in precisions), 0.0)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want| in float64; inf for another shape, nan if either holds a nan.

    |got - want| where `want` is below what float32 holds, as a state is that decayed for a hundred tokens.
    """
    if got.shape != want.shape:
        return math.inf
    want = want.double()
    difference, scale = float((got.to(want) - want).norm()), float(want.norm())
    return difference / scale if scale > NOTHING else difference


@dataclass(frozen=True, slots=True)
class Expected:
    """What a value has to be: the truth in float64, the dtype it must have, and how far it may be off."""

    value: torch.Tensor
    dtype: torch.dtype
    bound: float


def compare(gate: Gate, name: str, got: Mapping[str, torch.Tensor], expected: Mapping[str, Expected]) -> list[Check]:
    """One check, `name: value`, for each expected value; a missing one, another shape or dtype, or a nan fails."""
    checks = []
    for key, want in expected.items():
        value = got.get(key)
        error, note = math.inf, ""
        if value is None:
            note = "not returned"
        elif value.shape != want.value.shape:
            note = f"shape {tuple(value.shape)}, expected {tuple(want.value.shape)}"
        elif value.dtype != want.dtype:
            note = f"dtype {value.dtype}, expected {want.dtype}"
        else:
            error = relative_error(value, want.value)
            if not bool(value.isfinite().all()):
                note = "holds nan or inf"
        checks.append(Check(f"{name}: {key}", gate, error, want.bound, error <= want.bound, note))
    return checks


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within, memory that torch hands out uninitialised is full of NaN: what a kernel leaves unwritten shows."""
    memory = torch.utils.deterministic
    fill: bool = memory.fill_uninitialized_memory  # type: ignore[attr-defined]
    on, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        memory.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(on, warn_only=warn)


@contextmanager
def one_thread() -> Iterator[None]:
    """Within, torch computes on one thread: for thousands of operations on small tensors that is many times faster."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
