"""Where kernels run: on the stream of a GPU, in an emulator, or not at all; the hints they run with; and what of a call is
written down, for one of its kind that comes again.

Copied verbatim beside the modules that ssdgen emits; it imports nothing of ssdgen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import _kept

Launcher = Callable[[Any, tuple[int, ...], tuple[Any, ...]], None]
_LAUNCHER: ContextVar[Launcher | None] = ContextVar("ssdgen_launcher", default=None)
_PORTABLE: ContextVar[bool] = ContextVar("ssdgen_portable", default=False)


@dataclass(frozen=True)
class Launch:
    """What `launch` was given."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    early: bool


@dataclass(frozen=True)
class Recording:
    """What a call does on its way through the host functions: the memory it takes, and the kernels it launches, in order."""

    memory: list[Tensor] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)


_RECORDING: ContextVar[Recording | None] = ContextVar("ssdgen_recording", default=None)


@contextmanager
def recording() -> Iterator[Recording]:
    """Within it what a call does is written down, too."""
    token = _RECORDING.set(recording := Recording())
    try:
        yield recording
    finally:
        _RECORDING.reset(token)


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of a call: for results, and between kernels."""
    memory = torch.empty(shape, dtype=dtype, device=device)
    recording = _RECORDING.get()
    if recording is not None:
        recording.memory.append(memory)
    return memory


def several(count: int, shape: Sequence[int], like: Tensor) -> list[Tensor]:
    """`count` pieces of such memory, of float32 and beside `like`, each by itself: a call may return one and not another."""
    return [empty(shape, torch.float32, like.device) for _ in range(count)]


_LASTING: set[int] = set()


def lasting(x: Tensor) -> Tensor:
    """`x`, a tensor of numbers that are the same in every call, which whoever calls this keeps for the life of the process."""
    if type(x) is Tensor:  # what a tracer has in its place has no address
        _LASTING.add(x.data_ptr())
    return x


def lasts(x: Tensor) -> bool:
    """Whether `x` is a `lasting` tensor, or a view of one that begins where it does."""
    return x.data_ptr() in _LASTING


def diverted() -> bool:
    """Whether kernels run through a launcher, or not at all."""
    return _LAUNCHER.get() is not None or _PORTABLE.get()


@contextmanager
def launcher(launch: Launcher) -> Iterator[None]:
    """Within it, kernels run through `launch(kernel, grid, args)`, for CPU tensors too: how an emulator gets at them."""
    token = _LAUNCHER.set(launch)
    try:
        yield
    finally:
        _LAUNCHER.reset(token)


def runs_kernels(x: Tensor) -> bool:
    """Whether tensors where `x` is are computed by kernels, and not by the portable path.

    What torch.compile traces runs through no launcher: it cannot look at one.
    """
    if torch.compiler.is_compiling():
        return x.is_cuda
    return (x.is_cuda or _LAUNCHER.get() is not None) and not portable_wanted()


@contextmanager
def portable() -> Iterator[None]:
    """Within it no kernel runs: the portable path computes on a GPU too, in float64 if inputs are. It is for what was called
    before: ranges are not checked again."""
    token = _PORTABLE.set(True)
    try:
        yield
    finally:
        _PORTABLE.reset(token)


def portable_wanted() -> bool:
    """Whether a call is within `portable`."""
    return _PORTABLE.get()


def stream(x: Tensor) -> Any:
    """The current stream of the device that `x` is on; None where kernels run through a launcher."""
    return torch.cuda.current_stream(x.device) if _LAUNCHER.get() is None else None


def launch(on: Any, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], early: bool = False) -> None:
    """Queue `kernel` on the stream `on`.

    With `early` its blocks take up their positions while the kernel before ends (programmatic dependent launch); each of them
    must wait for that one: see `await_previous` in `_tiles.py`.
    """
    if 0 in grid:
        return
    recording = _RECORDING.get()
    if recording is not None:
        recording.launches.append(Launch(kernel, grid, args, early))
    emulate = _LAUNCHER.get()
    if emulate is not None:
        emulate(kernel, grid, args)
        return
    import cuda.tile as ct

    early = early and has_early_launch(args[0].get_device())
    ct.launch(on, grid, _kept.kept(kernel), args, programmatic_dependent_launch=early)


@functools.cache
def has_early_launch(device: int) -> bool:
    """Whether a GPU begins a kernel early; never without one."""
    return device >= 0 and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def hinted(kernel: Any, occupancy: int, warps: int) -> Any:
    """`kernel` with hints of blocks a multiprocessor and worker warps a block, 0 for none; kept for the life of the process,
    which cuda.tile needs."""
    hints = {name: value for name, value in (("occupancy", occupancy), ("num_worker_warps", warps)) if value}
    return kernel.replace_hints(**hints) if hints else kernel
