"""Calls that come again: what the host did for one is kept, and the next of its kind only takes memory and launches.

The kind of a call is all that its checks, its configuration and its kernels depend on but the numbers in its tensors: shapes,
strides, dtypes, the device, whether addresses are multiples of 16 bytes, scalars, the Config. The first call of a kind goes the
usual way, and so does the second, of which is written down what memory it takes and what it launches (`_launch.Recording`).
From the third on the launches go to the driver as they are written down, but for the addresses. A call that cannot be written
down so, since something in it is neither the caller's, nor its own memory, nor the same in every call, goes the usual way each
time.

Several launches go to the driver as one, a CUDA graph (some 0.1 MB of the GPU's memory): one for each kind and stream, and
another for each further call of them at a time. Into a graph that somebody captures they go one by one.

Nothing here synchronises; memory comes from PyTorch's allocator, on the current stream, so that calls on several streams and
in CUDA graphs are as safe as the usual way.

Copied verbatim beside the modules that ssdgen emits; it imports nothing of ssdgen.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from . import _driver, _launch, _tuned
from ._driver import Attribute, LaunchConfig

PLAIN = (Tensor, torch.nn.Parameter)
"""The types of tensors that are what they seem."""

MOST = 1024
"""Kinds of calls that are kept of a function; one that is called in more begins again."""

ALIGNED = 16
"""Bytes that addresses are multiples of or not: kernels are compiled for either."""

APART = 512
"""Bytes that memory between kernels begins at multiples of, as PyTorch's own does."""

WORD = 8
"""Bytes of a place that the driver reads a parameter from, whatever that takes of it."""


class Calls:
    """`function`, whose calls are made again where that is possible: it takes tensors or None, then scalars, then more tensors
    or None, then `absent` arguments that are None or ints in such a call, and last a Config or None, of the type of the
    `configs`."""

    def __init__(
        self,
        function: Callable[..., tuple[Tensor | None, ...] | None],
        configs: Mapping[torch.dtype, Any],
        inputs: int,
        scalars: int,
        absent: int,
    ) -> None:
        self._function, self._config = function, type(next(iter(configs.values())))
        self._scalars, self._absent = slice(inputs, inputs + scalars), absent + 1
        self._seen: dict[Any, bool] = {}
        """Whether a call of a kind that came once may be written down."""
        self._kept: dict[Any, Replay] = {}

    def __call__(self, *arguments: Any) -> Any:
        """The values of the function."""
        scalars = self._scalars
        given = arguments[: scalars.start] + arguments[scalars.stop : -self._absent]
        kind = self._kind(arguments, given)
        if kind is None:
            return self._function(*arguments)
        replay = self._kept.get(kind)
        if replay is not None:
            values = replay(given)
            return self._function(*arguments) if values is None else values
        if self._seen.get(kind) and not _driver.DRIVER.capturing():
            return self._written_down(kind, arguments, given)
        if len(self._seen) >= MOST:
            self._seen.clear()
            self._kept.clear()
        values = self._function(*arguments)
        self._seen.setdefault(kind, True)
        return values

    def _kind(self, arguments: tuple[Any, ...], given: tuple[Any, ...]) -> Any:
        """The kind of a call; None for one that is not made again."""
        first = given[0]
        if type(first) not in PLAIN or os.environ.get("SSDGEN_DEBUG"):
            return None
        device = _driver.DRIVER.device(first)
        if device is None:
            return None
        for value in arguments[-self._absent : -1]:
            if value is not None and type(value) is not int:
                return None
        config = arguments[-1]
        if config is not None and type(config) is not self._config:
            return None
        differentiates = torch.is_grad_enabled()
        parts = [device, config, _tuned.edition(), *arguments[-self._absent : -1]]
        for value in arguments[self._scalars]:
            if type(value) is not float and type(value) is not int:
                return None
            parts.append(value)
        for x in given:
            if x is None:
                parts.append(None)
            elif type(x) in PLAIN and x.get_device() == device and not (differentiates and x.requires_grad):
                parts.append((x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNED))
            else:
                return None
        return tuple(parts)

    def _written_down(self, kind: Any, arguments: tuple[Any, ...], given: tuple[Tensor | None, ...]) -> Any:
        """The values of a call of a kind that has come before; the next one is made from what this one does, if it can be."""
        with _launch.recording() as recording:
            values = self._function(*arguments)
        replay = None if values is None else prepared(recording, given, values, kind[0])
        if replay is None:
            self._seen[kind] = False
        else:
            self._kept[kind] = replay
        return values


@dataclass(frozen=True)
class Prepared:
    """A launch: the driver's kernel, its grid, and the places of its parameters among the words of a call."""

    function: int
    grid: tuple[int, ...]
    early: bool
    places: tuple[int, ...]


class Words:
    """What the driver reads the launches of a call from: addresses of tensors first, then what is the same in every call."""

    def __init__(self, addresses: int, constants: bytes, launches: Sequence[Prepared], stream: int) -> None:
        self.words = bytearray(addresses * WORD) + constants
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.words))
        self.attributes = [Attribute(id=_driver.EARLY, value=launch.early) for launch in launches]
        self.configs = [
            LaunchConfig((*launch.grid, 1, 1)[:3], (1, 1, 1), 0, stream, ctypes.pointer(attribute), 1)
            for launch, attribute in zip(launches, self.attributes, strict=True)
        ]
        self.parameters = [
            (ctypes.c_void_p * len(launch.places))(*(start + place * WORD for place in launch.places))
            for launch in launches
        ]
        self.launches = [
            (ctypes.addressof(config), launch.function, ctypes.addressof(parameters))
            for config, launch, parameters in zip(self.configs, launches, self.parameters, strict=True)
        ]
        self.stream = stream
        self._graph: _driver.Graph | None = None
        self._whole = len(launches) > 1
        """Whether launches may be one: not if the driver made no graph of them."""

    def launched(self, device: int) -> bool:
        """Launch; whether it went well."""
        driver = _driver.DRIVER
        if self._whole and not driver.capturing():
            if self._graph is None:
                driver.bind(device)
                self._graph = driver.graph(self.launches)
                self._whole = self._graph is not None
                for own in self.configs:
                    own.stream = self.stream
            if self._graph is not None and self._graph.launch(self.stream) == 0:
                return True
        for config, function, parameters in self.launches:
            if driver.launch(config, function, parameters, None):
                driver.bind(device)
                if driver.launch(config, function, parameters, None):
                    return False
        return True


@dataclass(frozen=True)
class Replay:
    """A call that was written down: `given` are the places of the caller's tensors whose addresses it takes, `results` the
    shape and dtype of each that it makes, or the place of a tensor of the caller like it (of which PyTorch makes another in
    half the time), and `between` where in one piece of memory, of `size` bytes, what is between the kernels lies; `values` are
    what it returns, of the caller's or results, or None. `free` are words of calls that are over, by stream: no two calls have
    the same at a time."""

    device: int
    given: tuple[int, ...]
    results: tuple[tuple[tuple[int, ...], torch.dtype] | int, ...]
    values: tuple[_Address | None, ...]
    size: int
    between: tuple[int, ...]
    constants: bytes
    launches: tuple[Prepared, ...]
    addresses: struct.Struct
    free: dict[int, list[Words]]

    def __call__(self, given: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        """The values of another call of the kind; None if a launch was refused, and nothing is said about why."""
        results, between = self.memory(given)
        base = 0 if between is None else between.data_ptr()
        stream = _driver.DRIVER.stream(self.device)
        free = self.free.setdefault(stream, [])
        try:
            words = free.pop()
        except IndexError:
            words = Words(self.addresses.size // WORD, self.constants, self.launches, stream)
        self.addresses.pack_into(
            words.words,
            0,
            *[given[i].data_ptr() for i in self.given],  # type: ignore[union-attr]
            *[x.data_ptr() for x in results],
            *[base + offset for offset in self.between],
        )
        if not words.launched(self.device):
            return None
        free.append(words)
        return tuple(
            [None if v is None else results[v.number] if v.kind == "result" else given[v.number] for v in self.values]
        )

    def memory(self, given: tuple[Tensor | None, ...]) -> tuple[list[Tensor], Tensor | None]:
        """What a call takes: for its results, and between its kernels."""
        place = given[self.given[0]].device  # type: ignore[union-attr]
        results = [
            torch.empty_like(given[r]) if type(r) is int else torch.empty(r[0], dtype=r[1], device=place)  # type: ignore
            for r in self.results
        ]
        return results, torch.empty(self.size, dtype=torch.uint8, device=place) if self.size else None


def prepared(
    recording: _launch.Recording,
    given: Sequence[Tensor | None],
    values: Sequence[Tensor | None],
    device: int,
) -> Replay | None:
    """What another call of the kind of one that was recorded does; None if it depends on more than the addresses of `given`."""
    memory = _Memory.of(recording, given, values)
    if memory is None:
        return None
    launches: list[tuple[int, _launch.Launch, list[Word]]] = []
    for launch in recording.launches:
        function = _driver.DRIVER.function(launch.kernel, launch.arguments, device)
        if function is None:
            return None
        handle, constant = function
        words = [memory.words(a) for a, c in zip(launch.arguments, constant, strict=True) if not c]
        if any(word is None for several in words for word in several):
            return None
        launches.append((handle, launch, [word for several in words for word in several if word is not None]))
    found = [word for _, _, words in launches for word in words]
    own = [w for w in dict.fromkeys(found) if isinstance(w, _Address) and w.kind == "between"]
    addresses = [*memory.addresses, *own]
    constants = [w for w in dict.fromkeys(found) if isinstance(w, bytes)]
    place = {word: n for n, word in enumerate([*addresses, *constants])}
    return Replay(
        device=device,
        given=tuple(a.number for a in memory.addresses if a.kind == "given"),
        results=tuple(_form(x, given) for x in memory.results),
        values=memory.values,
        size=memory.size,
        between=tuple(a.number for a in own),
        constants=b"".join(constants),
        launches=tuple(
            Prepared(
                handle, launch.grid, launch.early and _launch.has_early_launch(device), tuple(place[w] for w in words)
            )
            for handle, launch, words in launches
        ),
        addresses=struct.Struct(f"{len(addresses)}Q"),
        free={},
    )


def _form(result: Tensor, given: Sequence[Tensor | None]) -> tuple[tuple[int, ...], torch.dtype] | int:
    """What to make another `result` from: its shape and dtype, or the place of a tensor among `given` with its strides too."""
    shape, dtype = tuple(result.shape), result.dtype
    laid = shape, result.stride(), dtype
    alike = (i for i, x in enumerate(given) if x is not None and (x.shape, x.stride(), x.dtype) == laid)
    return next(alike, (shape, dtype))


@dataclass(frozen=True)
class _Address:
    """An address that changes from call to call: of the caller's tensor `number`, of result `number`, or `number` bytes behind
    the beginning of what is between the kernels."""

    kind: Literal["given", "result", "between"]
    number: int


Word = _Address | bytes
"""What the driver reads: an address, or what is the same in every call."""


@dataclass(frozen=True)
class _Memory:
    """Whose memory is where in a call that was recorded: of a tensor that begins at an address, or of a whole storage."""

    begins: Mapping[int, _Address]
    stores: Mapping[int, int]
    size: int
    results: tuple[Tensor, ...]
    values: tuple[_Address | None, ...]

    @staticmethod
    def of(
        recording: _launch.Recording, given: Sequence[Tensor | None], values: Sequence[Tensor | None]
    ) -> _Memory | None:
        """None where two of the caller's tensors begin at the same address, or what is returned is neither one of them, nor a
        whole piece of memory that the call took, if in another shape."""
        begins: dict[int, _Address] = {}
        for number, x in enumerate(given):
            if x is not None and begins.setdefault(x.data_ptr(), _Address("given", number)).number != number:
                return None
        blocks = {m.data_ptr(): m for m in recording.memory}
        results: list[Tensor] = []
        returned: list[_Address | None] = []
        for v in values:
            if v is None or any(v is x for x in given):
                returned.append(None if v is None else begins[v.data_ptr()])
                continue
            block = blocks.pop(v.data_ptr(), None)
            if block is None or block.nbytes != v.nbytes or not v.is_contiguous() or v.data_ptr() in begins:
                return None
            returned.append(begins.setdefault(v.data_ptr(), _Address("result", len(results))))
            results.append(v)
        stores, size = {}, 0
        for block in blocks.values():
            if block.numel():
                stores[block.data_ptr()] = size
                size += -(-block.nbytes // APART) * APART
        return _Memory(begins, stores, size, tuple(results), tuple(returned))

    @property
    def addresses(self) -> list[_Address]:
        """Those that are read off tensors, the caller's first."""
        return list(self.begins.values())

    def words(self, x: Any) -> list[Word | None]:
        """What a kernel takes for an argument; None for the address of memory that is nobody's.

        The host passes tensors of the caller from their first element on, if in other shapes, and any part of its own memory.
        """
        if isinstance(x, float):
            return [struct.pack("<fxxxx", x)]
        if not isinstance(x, Tensor):
            return [struct.pack("<q", x)]
        store = self.stores.get(x.untyped_storage().data_ptr())
        address: Word | None = self.begins.get(x.data_ptr())
        if store is not None:
            address = _Address("between", store + x.data_ptr() - x.untyped_storage().data_ptr())
        elif address is None and _launch.lasts(x):
            address = struct.pack("<Q", x.data_ptr())
        return [address, *(struct.pack("<q", n) for n in (*x.shape, *x.stride()))]
