"""What the emulator says when a kernel is wrong, and where it says the kernel is wrong."""

from __future__ import annotations

import linecache
from pathlib import Path
from types import CodeType, TracebackType

import cuda.tile as ct
import torch


class EmulationError(Exception):
    """A kernel, or the way it was launched, is wrong.

    `kernel` is the kernel's name, `block` the index of the block that failed (None when the launch itself is at fault),
    `path` and `line` the statement of the kernel to blame, `reason` what was wrong with it. The text also shows the
    statement, and those of the device functions it was inside of.
    """

    def __init__(
        self, kernel: str, block: tuple[int, ...] | None, trail: tuple[tuple[str, int], ...], reason: str
    ) -> None:
        self.kernel = kernel
        self.block = block
        self.path, self.line = trail[0]
        self.reason = reason
        where = f"kernel {kernel}" if block is None else f"kernel {kernel}, block {block}"
        lines = [f"{where}, {self.path}:{self.line}: {reason}", f"  {self.line} | {_statement(*trail[0])}"]
        lines += [f"  {line} | {_statement(path, line)}  (in {path})" for path, line in trail[1:]]
        super().__init__("\n".join(lines))


def _statement(path: str, line: int) -> str:
    return linecache.getline(path, line).strip()


class Fault(Exception):
    """What is wrong, before it is known where; `launch` turns it into an `EmulationError`."""


def blame(raised: BaseException, body: CodeType) -> tuple[tuple[str, int], ...]:
    """The file and line of every statement of device code that led to `raised`, outermost first.

    Device code is whatever is neither the emulator nor a library below it; it begins with the kernel's own code `body`,
    which is blamed as a whole when it was not entered.
    """
    trail = []
    entered = False
    traceback: TracebackType | None = raised.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        entered = entered or code is body
        if entered and not code.co_filename.startswith(_LIBRARIES):
            trail.append((code.co_filename, traceback.tb_lineno))
        traceback = traceback.tb_next
    return tuple(trail) or ((body.co_filename, body.co_firstlineno),)


_LIBRARIES = tuple(f"{Path(str(file)).parent}/" for file in (__file__, ct.__file__, torch.__file__))
