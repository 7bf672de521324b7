"""The cubin reader on files that are whole, cut off, or something else; on real ones it is tested by test_compile."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

from ssdgen.build.elf import CubinError, read_cubin

INSTRUCTIONS = {"LDL": 0x7983, "STL": 0x7387, "HMMA": 0x723C, "HGMMA": 0x79F0, "HGMMA register": 0x7DF0}


def string_table(names: list[str]) -> tuple[bytes, list[int]]:
    table, starts = b"\0", []
    for name in names:
        starts.append(len(table))
        table += name.encode() + b"\0"
    return table, starts


def cubin(opcodes: list[int], kernels: tuple[str, ...] = ("k",), frame: int = 48, machine: int = 190) -> bytes:
    """A minimal cubin: one text of `opcodes` for each kernel, 40 registers, 1024 bytes of shared memory."""
    text = b"".join(struct.pack("<H14x", opcode) for opcode in opcodes)
    names, starts = string_table(["other", *kernels])
    symbols = b"".join(struct.pack("<I20x", at) for at in starts)
    info = b""
    for symbol in range(1, len(kernels) + 1):
        info += struct.pack("<BBHII", 4, 0x2F, 8, symbol, 40) + struct.pack("<BBHII", 4, 0x11, 8, symbol, frame)
    info += struct.pack("<BBH", 3, 0x1C, 0) + struct.pack("<BBHI", 4, 0x37, 4, 7)
    contents = [("", 0, b"", 0), (".strtab", 3, names, len(names)), (".symtab", 2, symbols, len(symbols))]
    contents.append((".nv.info", 0x70000000, info, len(info)))
    for kernel in kernels:
        contents += [(f".text.{kernel}", 1, text, len(text)), (f".nv.shared.{kernel}", 8, b"", 1024)]
    table, where = string_table([name for name, *_ in contents] + [".shstrtab"])
    contents.append((".shstrtab", 3, table, len(table)))
    body, headers = b"", b""
    for (_, kind, data, size), name in zip(contents, where, strict=True):
        headers += struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, 64 + len(body), size, 0, 0, 1, 0)
        body += data
    head = b"\x7fELF\x02".ljust(16, b"\0") + struct.pack("<HHI", 2, machine, 1)
    head += struct.pack("<QQQI", 0, 0, 64 + len(body), 0)
    return head + struct.pack("<HHHHHH", 64, 0, 0, 64, len(contents), len(contents) - 1) + body + headers


def test_instructions_are_told_apart_by_their_operation_not_their_operands() -> None:
    """wgmma with an operand in registers is another form of the same operation."""
    used = read_cubin(cubin(list(INSTRUCTIONS.values())))
    assert (used.registers, used.shared_bytes, used.spilled_bytes) == (40, 1024, 48)
    assert (used.spill_loads, used.spill_stores) == (1, 1)
    assert used.mma == (("HMMA", 1), ("wgmma", 2))
    assert not used.tmem


def test_tensor_memory_and_tma() -> None:
    used = read_cubin(cubin([0x79EA, 0x75EA, 0x79EE, 0x79ED, 0x79ED, 0x75B4, 0x73B5]))
    assert used.mma == (("tcgen05", 2),)
    assert used.tmem
    assert (used.tmem_loads, used.tmem_stores, used.tma_loads, used.tma_stores) == (1, 2, 1, 1)


@pytest.mark.parametrize("kept", range(0, len(cubin([0x7983])), 7))
def test_a_cut_off_file_is_refused(kept: int) -> None:
    with pytest.raises(CubinError, match="not a"):
        read_cubin(cubin([0x7983])[:kept])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no 64-bit ELF header"),
        (b"MZ" + bytes(1000), "no 64-bit ELF header"),
        (Path(sys.executable).resolve().read_bytes()[:100_000], "its machine is"),
        (cubin([], kernels=()), "it has 0 kernels"),
        (cubin([0x7983], kernels=("k", "l")), "it has 2 kernels"),
    ],
)
def test_what_is_not_the_cubin_of_one_kernel_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(CubinError, match=message):
        read_cubin(data)


def test_a_damaged_text_is_refused() -> None:
    """A text that is no whole number of instructions."""
    data = cubin([0x7983])
    size = data.index(struct.pack("<Q", 16), len(data) - 64 * 7)
    with pytest.raises(CubinError):
        read_cubin(data[:size] + struct.pack("<Q", 15) + data[size + 8 :])
