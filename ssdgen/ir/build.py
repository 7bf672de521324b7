"""What to compile ahead of time, and what came of it.

A `CompileRequest` names a kernel of an emitted file and describes the launch it is for. `cuda.tile` compiles a kernel
once for a *class* of arguments, so an array stands here as the class it falls into, by the rules of a launch. A
`Build` holds one result for each request, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

ARCHITECTURES = tuple(f"sm_{n}" for n in (80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121))
"""Every GPU architecture that cuTile 1.7 compiles for."""

DEFAULT_ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_103", "sm_120")
"""Those that kernels are compiled for if nobody says otherwise."""

Element = Literal["bf16", "f16", "f32", "i32", "i64"]
ITEMSIZE: dict[Element, int] = {"bf16": 2, "f16": 2, "f32": 4, "i32": 4, "i64": 8}

Length = Literal["1", "16", "any"]
"""A dimension's length: one, a multiple of 16 (zero too), or any other."""

Stride = Literal["1", "16", "any"]
"""A dimension's stride: one element, a multiple of 16 bytes (zero too), or any other."""


@dataclass(frozen=True, slots=True)
class ArrayArg:
    """An array parameter: its element type and, a dimension at a time, the classes of its lengths and strides.

    `overlaps` says that two indices may share an element (such as a stride of 0); `aligned`
    that the base address is a multiple of 16 bytes. The arrays of one launch are assumed not to overlap each other.
    """

    name: str
    dtype: Element
    lengths: tuple[Length, ...]
    strides: tuple[Stride, ...]
    overlaps: bool = False
    aligned: bool = True
    wide: bool = False


@dataclass(frozen=True, slots=True)
class ScalarArg:
    """A run-time scalar: a Python float is passed as f32, an int as i32."""

    name: str
    dtype: Literal["f32", "i32"]


@dataclass(frozen=True, slots=True)
class ConstantArg:
    """A `ct.Constant` parameter and its value. The types count: 1, True and 1.0 are three constants."""

    name: str
    value: int | float | bool


Argument = ArrayArg | ScalarArg | ConstantArg


def array_arg(
    name: str,
    dtype: Element,
    shape: Sequence[int],
    strides: Sequence[int] | None = None,
    wide: bool = False,
    start: int = 0,
) -> ArrayArg:
    """The class an array of `shape` falls into; `strides`, in elements, are those of a contiguous one if None, and it begins
    `start` elements behind an aligned address.

    The rules are those of `cuda.tile` 1.7 at a launch. Raises ValueError for strides of another rank than the shape.
    """
    if strides is None:
        strides = contiguous(shape)
    if len(strides) != len(shape):
        raise ValueError(f"{name}: {len(strides)} strides for an array of {len(shape)} dimensions")
    size = ITEMSIZE[dtype]
    return ArrayArg(
        name,
        dtype,
        lengths=tuple("1" if n == 1 else "16" if n % 16 == 0 else "any" for n in shape),
        strides=tuple("1" if s == 1 else "16" if s * size % 16 == 0 else "any" for s in strides),
        overlaps=_overlaps(shape, strides),
        aligned=start * size % 16 == 0,
        wide=wide,
    )


def _overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a dimension's step is below the extent (stride times length) of the next smaller one, or zero."""
    extent = 1
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if stride < extent:
            return True
        extent = stride * max(length, 1)
    return False


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides torch gives to a new array of `shape`, in elements."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """A kernel to compile for one architecture and one class of arguments.

    `module_path` is an emitted .py file inside a package folder, `signature` the kernel's parameters in order,
    `hints` the compiler hints that replace the kernel's own (`occupancy`, `num_ctas`, ...), `arch` such as `sm_90`.
    `label` is for people: dtype, variant, configuration.
    """

    module_path: str
    kernel: str
    signature: tuple[Argument, ...]
    hints: tuple[tuple[str, int], ...]
    arch: str
    label: str = ""

    def __str__(self) -> str:
        return f"{self.kernel} [{', '.join(x for x in (self.arch, self.label) if x)}]"


MmaKind = Literal["HMMA", "wgmma", "tcgen05"]


@dataclass(frozen=True, slots=True)
class KernelResources:
    """What a compiled kernel takes from the GPU, read from its cubin.

    `registers` are per thread (255 for most kernels with specialised warps, whatever they use), `shared_bytes` per
    block, from sm_90 with the 1 KiB that the system reserves. `spilled_bytes` is the frame of a thread in local
    memory, `spill_loads` and `spill_stores` count the instructions that touch it. `mma` counts tensor core
    instructions by kind: none means that products, if there are any, run as scalar code. tcgen05 accumulates in
    tensor memory; `tmem_loads` and `tmem_stores` count the moves between it and registers. `tma_loads` and
    `tma_stores` count bulk tensor copies. Counts are of instructions in the text, not of executions.
    """

    registers: int
    shared_bytes: int
    spilled_bytes: int
    spill_loads: int
    spill_stores: int
    mma: tuple[tuple[MmaKind, int], ...]
    tmem_loads: int
    tmem_stores: int
    tma_loads: int
    tma_stores: int

    @property
    def tmem(self) -> bool:
        """Whether tensor memory holds accumulators."""
        return any(kind == "tcgen05" for kind, _ in self.mma)


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A cubin, what it uses, and how long the compiler took; `cached` if it was not compiled now."""

    request: CompileRequest
    resources: KernelResources
    cubin: bytes = field(repr=False)
    seconds: float = field(compare=False)
    cached: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class CompileFailure:
    """A kernel that did not compile.

    `message` is the compiler's own, cleaned up. `emitted` is the place in the emitted code (`layer.py:120`), `spec`
    the line of the spec which that code comes from (`layer.ssd:21`), or every such line of the kernel
    (`layer.ssd:12, 21`) where the compiler gave no place. Both are empty where unknown.
    """

    request: CompileRequest
    message: str
    emitted: str = ""
    spec: str = ""

    def __str__(self) -> str:
        lines = [f"{self.request}: {self.message}"]
        if self.spec:
            lines.append(f"  from {self.spec}")
        if self.emitted:
            lines.append(f"  at {self.emitted}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Build:
    """One result for each request, in their order. `notes` say what went wrong besides (a cache that cannot be
    written)."""

    results: tuple[CompiledKernel | CompileFailure, ...]
    notes: tuple[str, ...] = ()

    @property
    def kernels(self) -> tuple[CompiledKernel, ...]:
        """The results that compiled."""
        return tuple(r for r in self.results if isinstance(r, CompiledKernel))

    @property
    def failures(self) -> tuple[CompileFailure, ...]:
        """The results that did not."""
        return tuple(r for r in self.results if isinstance(r, CompileFailure))
