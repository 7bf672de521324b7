"""Loads and stores of a kernel in its machine code, by the array that they are of, in the order of the code.

An address comes from an argument: `nvdisasm` shows from which place of the constants that kernels have their arguments in.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?(?P<text>[^;]*?)\s*;")
ARGUMENT = re.compile(r"c\[0x0\]\[(0x[2-9a-f][0-9a-f]{2})\]")
ADDRESS = re.compile(r"desc\[UR\d+\]\[R(\d+)\.64(?:\+(-?0x[0-9a-f]+))?\]")
REGISTER = re.compile(r"\b(U?R)(\d+)\b")
PASSED_ON = (
    "IMAD.WIDE", "IMAD.X", "IMAD.MOV", "IMAD.U32", "LEA", "IADD3", "MOV", "R2UR",
    "UIMAD.WIDE", "UIMAD.X", "ULEA", "UIADD3", "UMOV",
)  # fmt: skip
"""Instructions whose result is an address if a number that they add is one."""


@dataclass(frozen=True)
class Access:
    """A load or a store of memory: `array` is the place of the argument with its address, None if it was not found, and
    `offset` what is added to an address in a register."""

    kind: Literal["load", "store"]
    array: str | None
    offset: int


def disassembled(cubin: bytes) -> str:
    """The text of a cubin by the `nvdisasm` of the package nvidia-cuda-nvdisasm."""
    import nvidia.cu13  # type: ignore[import-not-found]

    tool = Path(next(iter(nvidia.cu13.__path__))) / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout


def accesses(text: str) -> list[Access]:
    """All loads and stores of global memory, as they follow each other."""
    comes_from: dict[str, str] = {}
    found = []
    for instruction in INSTRUCTION.finditer(text):
        code = instruction["text"]
        name = code.split(" ", 1)[0]
        if name.startswith(("LDG", "STG")):
            address = ADDRESS.search(code)
            array = comes_from.get(f"R{address[1]}") if address else None
            offset = int(address[2] or "0", 16) if address else 0
            found.append(Access("load" if name.startswith("LDG") else "store", array, offset))
        if name.startswith(("STG", "BAR")):
            continue
        registers = REGISTER.findall(code)
        if not registers:
            continue
        argument = ARGUMENT.search(code)
        sources = [comes_from[kind + n] for kind, n in registers[1:] if kind + n in comes_from]
        (kind, number), origin = registers[0], None
        if argument and name.startswith(("LDC", "ULDC", *PASSED_ON)):
            origin = argument[1]
        if sources and name.startswith(PASSED_ON):
            origin = sources[-1]
        wide = ".64" in name or "WIDE" in name
        for register in (f"{kind}{number}", *([f"{kind}{int(number) + 1}"] if wide else [])):
            if origin is not None:
                comes_from[register] = origin
            elif not instruction[0].split("*/", 1)[1].lstrip().startswith("@"):
                comes_from.pop(register, None)
    return found


def read_again(text: str) -> list[Access]:
    """The loads of an array behind a store to it at the same offset: where a block updates several rows one behind the other,
    those of others have other offsets."""
    written: set[tuple[str, int]] = set()
    found = []
    for access in accesses(text):
        if access.array is None:
            continue
        if access.kind == "store":
            written.add((access.array, access.offset))
        elif (access.array, access.offset) in written:
            found.append(access)
    return found
