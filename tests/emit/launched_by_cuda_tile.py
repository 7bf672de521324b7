"""A process that launches a call's kernels with `cuda.tile.launch` and from what was written down, one by one and as a graph,
and compares them.

libcuda is a stand-in that computes nothing: it answers questions about a device that is not there, and writes down what it is
asked to launch. cuda.tile finds it in place of its own module that loads libcuda.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
from collections.abc import Callable
from ctypes import c_int, c_void_p
from types import ModuleType
from typing import Any

import torch

CONTEXT, KERNEL, STREAM = 0x77, 0x4242, 7
CAPTURED, GRAPH, EXECUTABLE, NODE = 0x99, 0x55, 0x66, 0x1000
"""A stream that is captured, what becomes of it, and the first of its nodes, behind which the others are numbered."""
CAPABILITY = {75: 9, 76: 0}
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and MINOR."""

Launched = tuple[int, list[int], list[int], int, list[int]]
LAUNCHED: list[Launched] = []
"""What the driver was asked for: kernel, grid, block, whether early, and the first 8 bytes of each parameter."""

NODES: list[Launched] = []
"""What was captured, with the parameters that were set last."""

COUNTS: list[int] = []
"""How many parameters the kernels of a call have, in order, which the driver knows from their code."""

CURRENT = [CONTEXT]
"""The context of this thread, 0 for none."""


def put(address: int, value: int, kind: Any = c_void_p) -> int:
    kind.from_address(address).value = value
    return 0


def words_at(parameters: int, number: int) -> list[int]:
    """The first 8 bytes of each parameter of the kernel that is launched as the `number`-th."""
    addresses = (c_void_p * COUNTS[number % len(COUNTS)]).from_address(parameters)
    return [ctypes.c_uint64.from_address(a or 0).value for a in addresses]


def note(config: int, kernel: int, parameters: int, extra: int) -> int:
    from generated._driver import LaunchConfig

    if not CURRENT[0]:
        return 201  # CUDA_ERROR_INVALID_CONTEXT
    how = LaunchConfig.from_address(config)
    into = NODES if how.stream == CAPTURED else LAUNCHED
    assert (how.count, how.shared_bytes, how.attributes[0].id) == (1, 0, 6)
    assert how.stream in (STREAM, CAPTURED)
    words = words_at(parameters, len(into))
    into.append((kernel, list(how.grid), list(how.block), how.attributes[0].value, words))
    return 0


def last_node(stream: int, status: int, number: int, graph: int, nodes: int, edges: int, count: int) -> int:
    LAST[0] = NODE + len(NODES) - 1
    return put(nodes, ctypes.addressof(LAST)) or put(count, 1, ctypes.c_size_t)


LAST = (c_void_p * 1)()


def parameters_of(node: int, parameters: int) -> int:
    from generated._driver import NodeParameters

    found = NodeParameters.from_address(parameters)
    found.kernel, found.grid, found.block = NODES[node - NODE][0], tuple(NODES[node - NODE][1]), (1, 1, 1)
    return 0


def set_parameters(executable: int, node: int, parameters: int) -> int:
    from generated._driver import NodeParameters

    at, found = node - NODE, NodeParameters.from_address(parameters)
    kernel, grid, block, early, _ = NODES[at]
    assert (executable, found.kernel, list(found.grid)) == (EXECUTABLE, kernel, grid)
    NODES[at] = kernel, grid, block, early, words_at(found.parameters, at)
    return 0


def launch_graph(executable: int, stream: int) -> int:
    assert (executable, stream) == (EXECUTABLE, STREAM)
    LAUNCHED.extend(NODES)
    return 0


def upload_graph(executable: int, stream: int) -> int:
    """Launches are ordered behind what is queued on their own stream alone: an upload elsewhere may end after the next."""
    UPLOADED_TO.append(stream)
    return 0


UPLOADED_TO: list[int] = []

ANSWERS: dict[str, tuple[int, Callable[..., int]]] = {
    "cuDriverGetVersion": (1, lambda v: put(v, 13000, c_int)),
    "cuDeviceGetCount": (1, lambda n: put(n, 1, c_int)),
    "cuDeviceGetAttribute": (3, lambda v, which, device: put(v, CAPABILITY.get(which, 1 << 20), c_int)),
    "cuStreamGetCtx": (2, lambda stream, context: put(context, CONTEXT)),
    "cuCtxGetCurrent": (1, lambda context: put(context, CURRENT[0])),
    "cuCtxSetCurrent": (1, lambda context: CURRENT.__setitem__(0, context or 0) or 0),
    "cuDevicePrimaryCtxRetain": (2, lambda context, device: put(context, CONTEXT)),
    "cuCtxGetDevice": (1, lambda device: put(device, 0, c_int)),
    "cuPointerGetAttribute": (3, lambda data, which, x: put(data, CONTEXT)),
    "cuLibraryLoadData": (8, lambda library, *rest: put(library, 0x11)),
    "cuLibraryGetKernel": (3, lambda kernel, library, name: put(kernel, KERNEL)),
    "cuLaunchKernelEx": (4, note),
    "cuStreamCreate": (2, lambda stream, flags: put(stream, CAPTURED)),
    "cuStreamGetCaptureInfo_v3": (7, last_node),
    "cuStreamEndCapture": (2, lambda stream, graph: put(graph, GRAPH)),
    "cuGraphKernelNodeGetParams_v2": (2, parameters_of),
    "cuGraphInstantiateWithFlags": (3, lambda executable, graph, flags: put(executable, EXECUTABLE)),
    "cuGraphExecKernelNodeSetParams_v2": (3, set_parameters),
    "cuGraphLaunch": (2, launch_graph),
    "cuGraphUpload": (2, upload_graph),
}
FUNCTIONS = {name: ctypes.CFUNCTYPE(c_int, *(c_void_p,) * n)(answer) for name, (n, answer) in ANSWERS.items()}
NOTHING = ctypes.CFUNCTYPE(c_int)(lambda: 0)


class Library:
    """What `ctypes.CDLL` gives for libcuda."""

    def __getattr__(self, name: str) -> Any:
        return FUNCTIONS.get(name, NOTHING)


def find(symbol: int, function: int, version: int, flags: int, status: int) -> int:
    answer = FUNCTIONS.get(ctypes.string_at(symbol).decode(), NOTHING)
    return put(function, ctypes.cast(answer, c_void_p).value or 0)


FIND = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_int, ctypes.c_uint64, c_void_p)(find)
FOUND = c_void_p(ctypes.cast(FIND, c_void_p).value)


NAMES = {torch.float32: "<f4", torch.float16: "<f2", torch.int32: "<i4"}


class OnGpu:
    """A CPU tensor that says it is on a GPU."""

    def __init__(self, x: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(x.shape),
            "strides": tuple(n * x.element_size() for n in x.stride()),
            "typestr": NAMES[x.dtype],
            "data": (x.data_ptr(), False),
            "version": 3,
        }


def dressed(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(OnGpu(a) if isinstance(a, torch.Tensor) else a for a in arguments)


def main() -> None:
    os.environ["CUDA_TILE_CACHE_DIR"] = "off"  # what is compiled here is nothing
    stand_in = ModuleType("cuda.tile._load_libcuda")
    stand_in.cuGetProcAddress_v2_ptrptr = ctypes.addressof(FOUND)  # type: ignore[attr-defined]
    sys.modules[stand_in.__name__] = stand_in
    import cuda.tile as ct

    from generated import _driver, _kept, _launch, _replay, mamba2

    captures = True

    class Driver(_driver.Cuda):
        def stream(self, device: int) -> int:
            return STREAM

        def capturing(self) -> bool:
            return captures

        def function(self, kernel: Any, arguments: tuple[Any, ...], device: int) -> tuple[int, tuple[bool, ...]] | None:
            return super().function(kernel, dressed(arguments), device)

    _driver.DRIVER = Driver()
    ctypes.CDLL = lambda name: Library()  # type: ignore[assignment, misc]
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    _launch.has_early_launch = lambda device: True  # type: ignore[assignment]
    b, t, h, p, n = 2, 1000, 16, 48, 32
    x, z = torch.randn(2, b, t, h, p)
    B, C = torch.randn(2, b, t, 1, n)
    given = (x, torch.randn(b, t, h), -torch.rand(h), B, C, torch.randn(h), None, z, torch.randn(b, h, p, n))
    config = mamba2.Config(segments=3, share_scores_from=1)
    arguments = (*given[:-1], 0.5, 2.5, given[-1], None, None, None, None, config)
    with _launch.launcher(lambda kernel, grid, arguments: None), _launch.recording() as recording:
        values = mamba2._checked(*arguments)

    COUNTS.extend(len(_sizes(launch)) for launch in recording.launches)
    for launch in recording.launches:
        kernel = launch.kernel
        kernel._compile = lambda signature, context, capability=None: (b"code", "symbol", None, ())
        kernel = _kept.kept(kernel)
        ct.launch(STREAM, launch.grid, kernel, dressed(launch.arguments), programmatic_dependent_launch=launch.early)
    expected = list(LAUNCHED)
    LAUNCHED.clear()

    CURRENT[0] = 0
    replay = _replay.prepared(recording, given, values, -1)
    assert replay is not None
    assert [len(launch.places) for launch in replay.launches] == COUNTS
    for captures in (True, False):  # one by one, then as a graph
        CURRENT[0] = 0
        LAUNCHED.clear()
        again = replay(given)
        assert again is not None
        assert bool(NODES) is not captures
        compare(expected, recording, values, again)
    assert set(UPLOADED_TO) <= {STREAM}, UPLOADED_TO
    print(f"{len(expected)} launches alike")


def compare(expected: list[Launched], recording: Any, values: Any, again: Any) -> None:
    """What was launched is what was `expected`, but for the memory of a call, of whose results `values` became `again`."""
    own = {v.data_ptr(): w.data_ptr() for v, w in zip(values, again, strict=True) if v is not None and w is not None}
    between = [m for m in recording.memory if m.data_ptr() not in own]
    starts: dict[int, int] = {}
    for old, new, launch in zip(expected, LAUNCHED, recording.launches, strict=True):
        assert old[:4] == new[:4], (launch.kernel, old, new)
        for word, other, size in zip(old[4], new[4], _sizes(launch), strict=True):
            block = next((m for m in between if size == 8 and m.data_ptr() <= word < m.data_ptr() + m.nbytes), None)
            if block is None:
                mask = (1 << 8 * size) - 1
                assert own.get(word, word) & mask == other & mask, (launch.kernel, word, other)
            else:  # memory between kernels is elsewhere, whole, and as well aligned
                assert word % 16 == other % 16
                start = other - (word - block.data_ptr())
                assert starts.setdefault(block.data_ptr(), start) == start
    ends = sorted((starts[m.data_ptr()], m.nbytes) for m in between)
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(ends))


def _sizes(launch: Any) -> list[int]:
    """The bytes of each parameter of a kernel: the address of an array, its lengths and strides; a number; no constant."""
    constants = [node.constant for node in launch.kernel._annotated_function.parameter_annotations]
    taken = [a for a, constant in zip(launch.arguments, constants, strict=True) if not constant]
    sizes = [[8] + [4] * 2 * a.dim() if isinstance(a, torch.Tensor) else [4] for a in taken]
    return [size for several in sizes for size in several]


if __name__ == "__main__":
    main()
