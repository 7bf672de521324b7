"""From a place in emitted code to the line of the spec that it was written for.

The emitter marks the blocks of a kernel with comments like `# mamba2.ssd:21`: a line comes from the nearest mark at
or above it in the same function.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from ssdgen.build.worker import Rejected
from ssdgen.ir.build import CompileFailure, CompileRequest

MARK = re.compile(r"#\s*([^\s#]+\.ssd):(\d+)\b")
NOISE = re.compile(
    r"^(error at offset \d+: )?(failed to |input does not correspond to Tile IR)|^Return code \d+$|^Unknown location$|^\s*$"
)
PREFIX = re.compile(r"^error at offset \d+: |^(<unknown>|loc\(unknown\)):?\s*(error:\s*)?")


def failure(request: CompileRequest, rejected: Rejected) -> CompileFailure:
    """What to tell the user about a `request` that was rejected."""
    path = Path(request.module_path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        text = ""
    here = [line for file, line in rejected.frames if Path(file).name == path.name]
    emitted = f"{path.name}:{here[0]}" if here else ""
    spec = next((mark for line in here if (mark := mark_above(text, line))), "") or all_marks(text, request.kernel)
    if rejected.frames and Path(rejected.frames[0][0]).name != path.name:
        file, line = rejected.frames[0]
        emitted = f"{Path(file).name}:{line}" + (f", called at {emitted}" if emitted else "")
    return CompileFailure(request, clean(rejected.message), emitted, spec)


def clean(message: str) -> str:
    """The compiler's message without what only repeats that it failed."""
    lines = [PREFIX.sub("", line).rstrip() for line in message.splitlines() if not NOISE.match(line)]
    return "\n    ".join(dict.fromkeys(lines)) or f"the compiler stopped without a reason ({' '.join(message.split())})"


def mark_above(text: str, line: int) -> str:
    """The mark nearest to `line` (from 1), at or above it in its function; empty if it has none."""
    lines = text.splitlines()
    first = max((start for start, end, _ in _functions(text) if start <= line <= end), default=1)
    for candidate in reversed(lines[first - 1 : line]):
        if marks := MARK.findall(candidate):
            return ":".join(marks[-1])
    return ""


def all_marks(text: str, function: str) -> str:
    """The marks in `function`, as `mamba2.ssd:12, 21`; empty if there are none."""
    lines = text.splitlines()
    body = next(("\n".join(lines[start - 1 : end]) for start, end, name in _functions(text) if name == function), "")
    files: dict[str, list[str]] = {}
    for file, line in dict.fromkeys(MARK.findall(body)):
        files.setdefault(file, []).append(line)
    return "; ".join(f"{file}:{', '.join(numbers)}" for file, numbers in files.items())


def _functions(text: str) -> list[tuple[int, int, str]]:
    """(first line with its decorators, last line, name) of every function at the top of the module."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [
        (min([f.lineno, *(d.lineno for d in f.decorator_list)]), f.end_lineno or f.lineno, f.name) for f in functions
    ]
