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
    `path` and `line` the statement to blame, `reason` what was wrong with it.
    """

    def __init__(self, kernel: str, block: tuple[int, ...] | None, path: str, line: int, reason: str) -> None:
        self.kernel = kernel
        self.block = block
        self.path = path
        self.line = line
        self.reason = reason
        where = f"kernel {kernel}" if block is None else f"kernel {kernel}, block {block}"
        statement = linecache.getline(path, line).strip()
        super().__init__(f"{where}, {path}:{line}: {reason}" + (f"\n  {line} | {statement}" if statement else ""))


class Fault(Exception):
    """What is wrong, before it is known where; `launch` turns it into an `EmulationError`."""


def blame(raised: BaseException, body: CodeType) -> tuple[str, int]:
    """The file and line of the innermost statement of device code that led to `raised`.

    Device code is whatever is neither the emulator nor a library below it; `body` is the kernel's own code, blamed
    when no other device code was entered.
    """
    path, line = body.co_filename, body.co_firstlineno
    traceback: TracebackType | None = raised.__traceback__
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if not name.startswith(_LIBRARIES):
            path, line = name, traceback.tb_lineno
        traceback = traceback.tb_next
    return path, line


_LIBRARIES = tuple(f"{Path(str(file)).parent}/" for file in (__file__, ct.__file__, torch.__file__))
