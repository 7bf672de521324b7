"""How far a result is from the truth, and how far it may be.

Errors are relative Frobenius norms, one per output and per final state. A bound is that of the coarsest product that
feeds the value and of the dtype it is rounded to at the end: float32 and tf32x3 1e-5, tf32 and float16 1e-3, bf16 5e-3.
An output in bf16 is off by up to 2^-8 in each element before any kernel has had a chance to be wrong; that is inside
its bound, not on top of it. Inputs are rounded first, and the reference sees the rounded values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from ssdgen.ir.report import Check, Gate
from ssdgen.ir.schedule import Precision

BOUNDS: dict[str, float] = {"f64": 1e-12, "f32": 1e-5, "tf32x3": 1e-5, "tf32": 1e-3, "f16": 1e-3, "bf16": 5e-3}
"""The largest relative error allowed of a product's precision or an output's dtype."""

_ROUNDING = {torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def bound(dtype: torch.dtype, precisions: Iterable[Precision | str] = ()) -> float:
    """The bound of a value stored as `dtype` whose products ran in `precisions`."""
    return max(BOUNDS[_ROUNDING[dtype]], *(BOUNDS[p] for p in precisions), 0.0)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want| in float64 (|got| if `want` is 0); inf for another shape, nan if either holds a nan."""
    if got.shape != want.shape:
        return math.inf
    difference = float((got.double() - want.double()).norm())
    scale = float(want.double().norm())
    return difference / scale if scale != 0 else difference


def compare(
    gate: Gate,
    name: str,
    got: Mapping[str, torch.Tensor],
    want: Mapping[str, torch.Tensor],
    bounds: Mapping[str, float],
) -> list[Check]:
    """One check for each value of `want`, called `name: value`; a missing value, another shape or a nan fails."""
    checks = []
    for key, true in want.items():
        value = got.get(key)
        error = math.inf if value is None else relative_error(value, true)
        if value is None:
            note = "not returned"
        elif value.shape != true.shape:
            note = f"shape {tuple(value.shape)}, expected {tuple(true.shape)}"
        elif not bool(value.isfinite().all()):
            note = "holds nan or inf"
        else:
            note = ""
        checks.append(Check(f"{name}: {key}", gate, error, bounds[key], error <= bounds[key], note))
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
