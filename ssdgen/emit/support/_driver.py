"""The CUDA driver, for launches that were prepared before: the kernels that `cuda.tile` compiled, called as it calls them.

`cuda.tile.launch` looks at every argument of every launch to find the kernel for their classes. Who knows that nothing of this
has changed since another launch needs only new addresses, and calls the driver itself. A kernel takes an array as its
address, then its lengths, then its strides, each a parameter; numbers are one parameter each, constants none.

Copied verbatim beside the modules that ssdgen emits; it imports nothing of ssdgen.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _kept, _launch

EARLY = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""


class Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig. The driver's blocks are of one thread: how many run is written in the kernel."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(Attribute)), ("count", ctypes.c_uint),
    )  # fmt: skip


class Cuda:
    """What is asked of the driver, and of PyTorch about its streams."""

    def device(self, x: Tensor) -> int | None:
        """The current device, if it is a GPU and `x` is on one, and kernels are not diverted; else None."""
        return torch._C._cuda_getDevice() if x.is_cuda and not _launch.diverted() else None

    def stream(self, device: int) -> int:
        """PyTorch's current stream of a device, as the driver calls it."""
        return torch._C._cuda_getCurrentRawStream(device)

    def capturing(self) -> bool:
        """Whether what is launched now goes into a graph."""
        return torch.cuda.is_current_stream_capturing()

    @functools.cached_property
    def launch(self) -> Callable[[int, int, int, None], int]:
        """cuLaunchKernelEx, of a LaunchConfig's address, a kernel, and the address of its parameters'; 0 if it went well."""
        function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
        function.argtypes, function.restype = (ctypes.c_void_p,) * 4, ctypes.c_int
        return function

    def bind(self, device: int) -> None:
        """Make PyTorch's context of a device that of this thread, if it has none: before they launch anything through PyTorch,
        threads that autograd starts have not. Where that is refused, so is the next launch."""
        driver, current = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        driver.cuCtxGetCurrent(ctypes.byref(current))
        if current.value is None:
            driver.cuCtxSetCurrent(_context(device))

    def function(self, kernel: Any, arguments: tuple[Any, ...], device: int) -> tuple[int, tuple[bool, ...]] | None:
        """The kernel that `cuda.tile.launch` ran on `arguments` before, and which of these are constants of it; None if it is
        not known, or takes more than them."""
        self.bind(device)
        image = _kept.image(kernel, arguments, torch.cuda.get_device_capability(device))
        loaded = None if image is None else _loaded(image.symbol, image.cubin)
        return None if image is None or loaded is None else (loaded, image.constants)


@functools.cache
def _context(device: int) -> ctypes.c_void_p:
    """The primary context of a device, which is PyTorch's, kept for the life of the process."""
    context = ctypes.c_void_p()
    ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    return context


@functools.cache
def _loaded(symbol: str, cubin: bytes) -> int | None:
    """A kernel that the driver loaded, for the life of the process, on any device of its architecture; None if it refuses."""
    driver = ctypes.CDLL("libcuda.so.1")
    library, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    problem = driver.cuLibraryLoadData(ctypes.byref(library), cubin, None, None, 0, None, None, 0)
    problem = problem or driver.cuLibraryGetKernel(ctypes.byref(kernel), library, symbol.encode())
    # to ask for it in this context loads it now: a launch that goes into a graph must not
    problem = problem or driver.cuKernelGetFunction(ctypes.byref(ctypes.c_void_p()), kernel)
    return None if problem else kernel.value


DRIVER = Cuda()
"""The driver that calls go to."""
