"""A stand-in for the CUDA driver: it runs what it is asked to launch in the emulator, from the very words it would read."""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from generated._driver import Launch, LaunchConfig
from ssdgen.run.emulate import launch


@dataclass(frozen=True)
class Function:
    """A kernel with the constants it was compiled for, and of each other argument its dtype and rank, or its type."""

    kernel: Any
    constants: tuple[Any, ...]
    kinds: tuple[tuple[torch.dtype, int] | type | None, ...]


class EmulatedDriver:
    """As `generated._driver.Cuda`, for CPU tensors; `launched` are the names of kernels, `refuse` those that fail, and
    `current` is the stream that they must come on; nothing is launched before a context is `bound`. `graphs` says whether
    it makes graphs, `made` how many it made, and `whole` how often one was launched."""

    def __init__(self) -> None:
        self.functions: list[Function] = []
        self.launched: list[str] = []
        self.refuse: set[str] = set()
        self.current = 7
        self.bound = True
        self.graphs, self.made, self.whole = True, 0, 0

    def device(self, x: torch.Tensor) -> int | None:
        return -1 if x.device.type == "cpu" else None

    def stream(self, device: int) -> int:
        return self.current

    def bind(self, device: int) -> None:
        assert device == -1
        self.bound = True

    def capturing(self) -> bool:
        return False

    def graph(self, launches: Sequence[Launch]) -> EmulatedGraph | None:
        """None where one of them is refused, which the driver says when they are captured."""
        names = {self.functions[function - 1].kernel._pyfunc.__name__ for _, function, _ in launches}
        if not self.graphs or names & self.refuse:
            return None
        self.made += 1
        for config, _, _ in launches:
            LaunchConfig.from_address(config).stream = None  # that which they are captured on
        return EmulatedGraph(self, list(launches))

    def function(self, kernel: Any, arguments: tuple[Any, ...], device: int) -> tuple[int, tuple[bool, ...]]:
        annotations = [str(p.annotation) for p in inspect.signature(kernel._pyfunc).parameters.values()]
        constant = tuple("Constant" in a for a in annotations)
        self.functions.append(
            Function(
                kernel,
                tuple(a for a, c in zip(arguments, constant, strict=True) if c),
                tuple(
                    None if c else (a.dtype, a.dim()) if isinstance(a, torch.Tensor) else type(a)
                    for a, c in zip(arguments, constant, strict=True)
                ),
            )
        )
        return len(self.functions), constant

    def launch(self, config: int, function: int, parameters: int, extra: None) -> int:
        if not self.bound:
            return 201
        it, how = self.functions[function - 1], LaunchConfig.from_address(config)
        assert (list(how.block), how.shared_bytes, how.stream, how.count) == ([1, 1, 1], 0, self.current, 1)
        words = (ctypes.c_void_p * 1000).from_address(parameters)
        constants, at, arguments = iter(it.constants), iter(words), []
        for kind in it.kinds:
            if kind is None:
                arguments.append(next(constants))
            elif isinstance(kind, tuple):
                address = ctypes.c_void_p.from_address(next(at) or 0).value or 0
                lengths = [ctypes.c_int32.from_address(next(at) or 0).value for _ in range(2 * kind[1])]
                arguments.append(tensor_at(address, kind[0], lengths[: kind[1]], lengths[kind[1] :]))
            else:
                number = {float: ctypes.c_float, int: ctypes.c_int32}[kind]
                arguments.append(number.from_address(next(at) or 0).value)
        name = it.kernel._pyfunc.__name__
        self.launched.append(name)
        if name in self.refuse:
            return 1
        launch(it.kernel, tuple(how.grid), tuple(arguments))
        return 0


@dataclass(frozen=True)
class EmulatedGraph:
    """As `generated._driver.Graph`: launches whose parameters are read when it is launched."""

    driver: EmulatedDriver
    launches: list[Launch]

    def launch(self, stream: int) -> int:
        names = {self.driver.functions[function - 1].kernel._pyfunc.__name__ for _, function, _ in self.launches}
        if not self.driver.bound or names & self.driver.refuse:
            return 1
        self.driver.whole += 1
        for config, function, parameters in self.launches:
            how = LaunchConfig.from_address(config)
            before, how.stream = how.stream, stream
            problem = self.driver.launch(config, function, parameters, None)
            how.stream = before
            assert problem == 0
        return 0


def tensor_at(address: int, dtype: torch.dtype, shape: list[int], strides: list[int]) -> torch.Tensor:
    """The tensor that lies at an address."""
    reach = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * (reach * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)
