"""Launching a kernel on the CPU: its own python body, once a block, on views of the caller's tensors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import cuda.tile as ct
import torch

from ssdgen.run.checks import one_thread
from ssdgen.run.emulate import products, shapes  # noqa: F401  (they register the answers of device functions)
from ssdgen.run.emulate.array import Array
from ssdgen.run.emulate.block import Grid
from ssdgen.run.emulate.dtypes import check_range
from ssdgen.run.emulate.errors import EmulationError, Fault, blame
from ssdgen.run.emulate.memory import Recorder, Track, storage_key, whole_storage
from ssdgen.run.emulate.tile import Scalar, Tile

_RECORDER: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


@contextmanager
def emulation() -> Iterator[Recorder]:
    """Record what every `launch` inside the `with` statement writes; the value is the `Recorder` to ask afterwards."""
    recorder = Recorder()
    token = _RECORDER.set(recorder)
    try:
        yield recorder
    finally:
        _RECORDER.reset(token)


def launch(kernel: Any, grid: tuple[int, ...], args: Sequence[Any]) -> None:
    """Run `kernel`, a `cuda.tile.kernel`, over `grid`, 1 to 3 block counts, on CPU tensors and python values.

    `args` follow the kernel's parameters as for `cuda.tile.launch`: tensors become arrays, `ct.Constant` parameters
    arrive as they are, other ints as int32 (int64 for `ct.ScalarInt64`), floats as float32 and bools as masks of rank 0;
    tuples and frozen dataclasses of those are taken apart. Blocks run one after the other.

    Raises `EmulationError` for whatever cuTile would refuse, would leave undefined or would compute silently wrong:
    mistyped operations, tiles wholly outside an array, integer overflow, races between blocks.
    """
    if not isinstance(kernel, ct.kernel):
        raise TypeError(f"launch takes a cuda.tile.kernel, got {type(kernel).__name__}")
    body = kernel._pyfunc
    blocks: Grid | None = None
    try:
        running = Grid(_grid_shape(grid))
        tracks: dict[tuple[int, int], Track] = {}
        bound = _Binder(kernel, running, tracks).bind(args)
        blocks = running
        with running.as_current(), one_thread():
            for number in range(math.prod(running.shape)):
                running.enter(number)
                body(*bound)
                running.leave()
    except Exception as e:  # a kernel's body is somebody else's code: whatever it raises is a fault of the kernel
        reason = str(e) if isinstance(e, Fault) else f"{type(e).__name__}: {e}"
        block = blocks.block[: len(grid)] if blocks else None
        raise EmulationError(body.__name__, block, blame(e, body.__code__), reason) from e
    recorder = _RECORDER.get()
    if recorder is not None:
        recorder.note(body.__name__, tracks)


def _grid_shape(grid: tuple[int, ...]) -> tuple[int, int, int]:
    limits = (2**31 - 1, 65535, 65535)
    if not isinstance(grid, tuple) or not 1 <= len(grid) <= 3 or not all(type(n) is int for n in grid):
        raise Fault(f"a grid is a tuple of 1 to 3 ints, got {grid!r}")
    if not all(1 <= n <= limit for n, limit in zip(grid, limits, strict=False)):
        raise Fault(f"grid {grid} is outside 1 to {limits}")
    x, y, z = grid + (1,) * (3 - len(grid))
    return x, y, z


class _Binder:
    """Turns the arguments of one launch into what device code sees."""

    def __init__(self, kernel: Any, grid: Grid, tracks: dict[tuple[int, int], Track]) -> None:
        self._function = kernel._annotated_function
        self._grid = grid
        self._tracks = tracks

    def bind(self, args: Sequence[Any]) -> list[Any]:
        """One value a parameter."""
        names = list(self._function.pysig.parameters)
        if len(args) != len(names):
            raise Fault(f"{len(args)} arguments for the {len(names)} parameters {', '.join(names)}")
        nodes = self._function.parameter_annotations
        return [self._value(v, node, name) for v, node, name in zip(args, nodes, names, strict=True)]

    def _value(self, value: Any, node: Any, name: str) -> Any:
        if node is not None and node.KIND == "leaf" and node.constant:
            return _constant(value, name)
        if isinstance(value, torch.Tensor):
            return self._array(value, node, name)
        if isinstance(value, tuple):
            return self._tuple(value, node, name)
        if isinstance(value, bool):
            return Scalar(value, ct.bool_)
        if isinstance(value, int):
            dtype = node.scalar.dtype if node is not None and node.KIND == "leaf" and node.scalar else ct.int32
            check_range(value, value, dtype)
            return Scalar(value, dtype)
        if isinstance(value, float):
            return Tile(torch.tensor(value, dtype=torch.float32), ct.float32)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            return dataclasses.replace(value, **{k: self._value(v, None, f"{name}.{k}") for k, v in fields.items()})
        raise Fault(f"argument {name} is a {type(value).__name__}, which a kernel does not take")

    def _tuple(self, value: tuple[Any, ...], node: Any, name: str) -> tuple[Any, ...]:
        nodes = [None] * len(value)
        if node is not None and node.KIND == "homogeneous_tuple":
            nodes = [node.each] * len(value)
        elif node is not None and node.KIND == "heterogeneous_tuple":
            nodes = list(node.items)
        if len(nodes) != len(value):
            raise Fault(f"argument {name} has {len(value)} items, its annotation {len(nodes)}")
        return tuple(self._value(v, n, f"{name}[{i}]") for i, (v, n) in enumerate(zip(value, nodes, strict=True)))

    def _array(self, tensor: torch.Tensor, node: Any, name: str) -> Array:
        if tensor.device.type != "cpu":
            raise Fault(f"argument {name} is on {tensor.device}; the emulator takes CPU tensors")
        view = tensor.detach()
        given = node.array if node is not None and node.KIND == "leaf" and node.array else ct.ArrayAnnotation()
        reach = sum((n - 1) * step for n, step in zip(view.shape, view.stride(), strict=True) if n > 1)
        if given.index_dtype == ct.int32 and max((*view.shape, *view.stride(), reach)) >= 2**31:
            raise Fault(f"array {name} reaches past 2^31 elements; annotate it with ct.IndexedWithInt64")
        key = storage_key(view)
        if key not in self._tracks:
            self._tracks[key] = Track(whole_storage(view), self._grid.index_of)
        return Array(
            view,
            name,
            self._tracks[key],
            self._grid,
            given.index_dtype,
            given.static_shape_dims,
            given.static_stride_dims,
        )


def _constant(value: Any, name: str) -> Any:
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, tuple):
        return tuple(_constant(v, name) for v in value)
    raise Fault(f"constant {name} is a {type(value).__name__}; ct.Constant takes int, float, bool and tuples of them")


Launcher = Callable[[Any, tuple[int, ...], Sequence[Any]], None]
"""What `launch` is: the type of what emitted modules launch kernels through."""
