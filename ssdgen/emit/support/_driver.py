"""The CUDA driver, for launches that were prepared before: the kernels that `cuda.tile` compiled, called as it calls them.

`cuda.tile.launch` looks at every argument of every launch to find the kernel for their classes. Who knows that nothing of this
has changed since another launch needs only new addresses, and calls the driver itself. A kernel takes an array as its
address, then its lengths, then its strides, each a parameter; numbers are one parameter each, constants none.

Several launches are one to the host as a CUDA graph: to set the parameters of its kernels and launch it takes a fourth to
a third of the time that launching them one by one does.

Copied verbatim beside the modules that ssdgen emits; it imports nothing of ssdgen.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _kept, _launch

EARLY = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""

NON_BLOCKING, RELAXED = 1, 2
"""CU_STREAM_NON_BLOCKING and CU_STREAM_CAPTURE_MODE_RELAXED: other threads, and graphs that they capture, are not minded."""

Launch = tuple[int, int, int]
"""The address of a LaunchConfig, a kernel, and the address of its parameters'."""


class Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig. The driver's blocks are of one thread: how many run is written in the kernel."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(Attribute)), ("count", ctypes.c_uint),
    )  # fmt: skip


class NodeParameters(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS, the second version."""

    _fields_ = (
        ("function", ctypes.c_void_p), ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint), ("parameters", ctypes.c_void_p), ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p), ("context", ctypes.c_void_p),
    )  # fmt: skip


class Graph:
    """Launches that were captured in `graph`, made `executable`: a node each, with its NodeParameters. It runs behind itself
    only, on whatever streams it is launched."""

    def __init__(
        self, driver: ctypes.CDLL, graph: int, executable: int, nodes: Sequence[tuple[int, NodeParameters]]
    ) -> None:
        self._executable, self._parameters = executable, [parameters for _, parameters in nodes]
        self._nodes = [(node, ctypes.addressof(parameters)) for node, parameters in nodes]
        self._set, self._launch = driver.cuGraphExecKernelNodeSetParams_v2, driver.cuGraphLaunch
        self._set.argtypes, self._launch.argtypes = (ctypes.c_void_p,) * 3, (ctypes.c_void_p,) * 2
        weakref.finalize(self, _destroyed, driver, graph, executable).atexit = False

    def launch(self, stream: int) -> int:
        """Read the parameters of all kernels as they are now, and launch them on `stream`; 0 if it went well, else none was."""
        for node, parameters in self._nodes:
            problem: int = self._set(self._executable, node, parameters)
            if problem:
                return problem
        found: int = self._launch(self._executable, stream)
        return found


def _destroyed(driver: ctypes.CDLL, graph: int, executable: int) -> None:
    """Free a graph; what of it still runs goes on."""
    driver.cuGraphExecDestroy(ctypes.c_void_p(executable))
    driver.cuGraphDestroy(ctypes.c_void_p(graph))


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

    def graph(self, launches: Sequence[Launch]) -> Graph | None:
        """`launches` in their order, as one; None where the driver makes no graph of them. Their configs' streams change."""
        driver = ctypes.CDLL("libcuda.so.1")
        with _relaxed(driver), _own_stream(driver) as stream:
            graph, nodes = self._captured(driver, stream, launches)
            if graph.value is None:
                return None
            executable, instantiate = ctypes.c_void_p(), driver.cuGraphInstantiateWithFlags
            if len(nodes) < len(launches) or instantiate(ctypes.byref(executable), graph, None):
                driver.cuGraphDestroy(graph)
                return None
        return Graph(driver, graph.value, executable.value or 0, nodes)

    def _captured(
        self, driver: ctypes.CDLL, stream: ctypes.c_void_p, launches: Sequence[Launch]
    ) -> tuple[ctypes.c_void_p, list[tuple[int, NodeParameters]]]:
        """The graph of `launches`, and the node of each, up to the first that is refused."""
        nodes: list[tuple[int, NodeParameters]] = []
        if driver.cuStreamBeginCapture_v2(stream, RELAXED):
            return ctypes.c_void_p(), nodes
        for config, function, parameters in launches:
            LaunchConfig.from_address(config).stream = stream.value
            if self.launch(config, function, parameters, None):
                break
            at, found = _last_node(driver, stream), NodeParameters()
            if at is None or driver.cuGraphKernelNodeGetParams_v2(ctypes.c_void_p(at), ctypes.byref(found)):
                break
            found.parameters = parameters
            nodes.append((at, found))
        graph = ctypes.c_void_p()
        driver.cuStreamEndCapture(stream, ctypes.byref(graph))
        return graph, nodes

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


def _last_node(driver: ctypes.CDLL, stream: ctypes.c_void_p) -> int | None:
    """The node that what is captured next on a stream waits for, if it is one."""
    status, number, graph = ctypes.c_int(), ctypes.c_ulonglong(), ctypes.c_void_p()
    nodes, edges, count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_void_p(), ctypes.c_size_t()
    places = (status, number, graph, nodes, edges, count)
    problem = driver.cuStreamGetCaptureInfo_v3(stream, *(ctypes.byref(place) for place in places))
    return None if problem or count.value != 1 else nodes[0]


@contextlib.contextmanager
def _relaxed(driver: ctypes.CDLL) -> Iterator[None]:
    """Within it this thread may do what a graph that somebody captures would forbid."""
    mode = ctypes.c_int(RELAXED)
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


@contextlib.contextmanager
def _own_stream(driver: ctypes.CDLL) -> Iterator[ctypes.c_void_p]:
    """A stream that nobody else has; without a context an invalid one, on which nothing begins."""
    stream = ctypes.c_void_p()
    driver.cuStreamCreate(ctypes.byref(stream), NON_BLOCKING)
    try:
        yield stream
    finally:
        if stream.value is not None:
            driver.cuStreamDestroy_v2(stream)


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
