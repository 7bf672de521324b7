"""Where kernels run: on the stream of a GPU, in an emulator, or not at all; and the hints they run with.

Copied verbatim beside the modules that ssdgen emits; it imports nothing of ssdgen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from . import _kept

Launcher = Callable[[Any, tuple[int, ...], tuple[Any, ...]], None]
_LAUNCHER: ContextVar[Launcher | None] = ContextVar("ssdgen_launcher", default=None)
_PORTABLE: ContextVar[bool] = ContextVar("ssdgen_portable", default=False)


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

    With `early` its blocks take up their positions while the kernel before ends (programmatic dependent launch); it must
    begin by waiting for that one.
    """
    if 0 in grid:
        return
    emulate = _LAUNCHER.get()
    if emulate is not None:
        emulate(kernel, grid, args)
        return
    import cuda.tile as ct

    early = early and _has_early_launch(args[0].get_device())
    ct.launch(on, grid, _kept.kept(kernel), args, programmatic_dependent_launch=early)


@functools.cache
def _has_early_launch(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def hinted(kernel: Any, occupancy: int, warps: int) -> Any:
    """`kernel` with hints of blocks a multiprocessor and worker warps a block, 0 for none; kept for the life of the process,
    which cuda.tile needs."""
    hints = {name: value for name, value in (("occupancy", occupancy), ("num_worker_warps", warps)) if value}
    return kernel.replace_hints(**hints) if hints else kernel
