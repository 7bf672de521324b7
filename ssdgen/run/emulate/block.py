"""The dispatch mode: which python function answers each device function, and which block is running."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from ssdgen.run.emulate.dtypes import DispatchMode, is_stub
from ssdgen.run.emulate.errors import Fault

_Answer = TypeVar("_Answer", bound=Callable[..., Any])

_ANSWERS: dict[Any, Callable[..., Any]] = {}


def answers(function: Any) -> Callable[[_Answer], _Answer]:
    """Register the decorated function as what the device function `function` does in an emulated block."""

    def register(answer: _Answer) -> _Answer:
        _ANSWERS[inspect.unwrap(function)] = answer
        return answer

    return register


class Grid(DispatchMode):  # type: ignore[misc]
    """One launch being emulated; blocks run one after the other, axis 0 fastest.

    `block` is the index of the running block, always of three axes, and `number` its rank in the order of running.
    `poisoned` says that the running block has loaded undetermined padding. `dependent` says that a block has waited for the
    launch before, or let the one behind begin; `waited` counts the blocks that have waited, up to one that has not.
    """

    def __init__(self, shape: tuple[int, int, int]) -> None:
        self.shape = shape
        self.block = (0, 0, 0)
        self.number = 0
        self.poisoned = False
        self.dependent = False
        self.waited = 0

    def enter(self, number: int) -> None:
        """Make block `number` the running one."""
        self.block = self.index_of(number)
        self.number = number
        self.poisoned = False

    def leave(self) -> None:
        """End the running block. A fault if some do not wait for the launch before where others do, or where they let the one
        behind begin, which relies on it that with this launch all before it are over."""
        if self.dependent and self.waited <= self.number:
            raise Fault("some block ends without grid_dependency_control_wait: all have to call it, or none")

    def index_of(self, number: int) -> tuple[int, int, int]:
        """The block index of block `number`."""
        x, y, _ = self.shape
        return number % x, number // x % y, number // (x * y)

    def call_tile_function_from_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of a device function: cuTile's own from the table, a `@ct.function` by running its body."""
        body = func.__wrapped__
        answer = _ANSWERS.get(body)
        if answer is not None:
            return answer(*args, **kwargs)
        if is_stub(func):
            raise Fault(f"ct.{func.__qualname__} is not emulated")
        return body(*args, **kwargs)


def here() -> Grid:
    """The launch that is running on this thread."""
    return cast(Grid, DispatchMode.get_current())
