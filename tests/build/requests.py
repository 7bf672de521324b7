"""Requests for the kernels in `emitted/`."""

from __future__ import annotations

from pathlib import Path

from ssdgen.ir.build import Argument, CompileRequest, ConstantArg, ScalarArg, array_arg

EMITTED = Path(__file__).parent / "emitted"


def arrays(*names: str) -> tuple[Argument, ...]:
    return tuple(array_arg(name, "f32", (512, 512)) for name in names)


def request(
    kernel: str,
    arch: str = "sm_90",
    module: Path = EMITTED / "small.py",
    hints: tuple[tuple[str, int], ...] = (),
    label: str = "f32, chunk 64",
    length: int = 64,
) -> CompileRequest:
    """A kernel of `small.py`, for aligned float32 arrays."""
    scalars = (ScalarArg("factor", "f32"),) if kernel == "scale" else ()
    signature = (*arrays("x", "y"), *scalars, ConstantArg("L", length))
    return CompileRequest(str(module), kernel, signature, hints, arch, label)
