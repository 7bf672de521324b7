"""What a cubin says about its kernel, read without a GPU and without NVIDIA's tools.

A cubin is a 64-bit ELF file. `.nv.info` lists attributes of functions, the size of `.nv.shared.<kernel>` is the
shared memory of a block, and `.text.<kernel>` holds instructions of 16 bytes whose lowest nine bits are the operation
(the next three are the form of the operands). The numbers equal `cuobjdump -res-usage` and counts of `cuobjdump
-sass` for sm_80, 90, 100, 103 and 120.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ssdgen.ir.build import KernelResources, MmaKind

EM_CUDA = 190
SHT_NOBITS = 8
INSTRUCTION_BYTES = 16

ATTRIBUTE_WITH_SIZE = 0x04
FRAME_SIZE = 0x11
REGISTER_COUNT = 0x2F

LDL, STL = 0x183, 0x187
UTMALDG, UTMASTG = 0x1B4, 0x1B5
LDTM, STTM = 0x1EE, 0x1ED
MMA: dict[MmaKind, int] = {"HMMA": 0x03C, "wgmma": 0x1F0, "tcgen05": 0x1EA}  # HMMA, HGMMA and UTCHMMA in SASS


class CubinError(ValueError):
    """The bytes are not a whole cubin of one kernel."""


@dataclass(frozen=True, slots=True)
class _Section:
    name: int
    kind: int
    offset: int
    size: int
    link: int


def read_cubin(data: bytes) -> KernelResources:
    """The resources of the one kernel in `data`. Raises CubinError if it is not a whole cubin of one kernel."""
    if data[:5] != b"\x7fELF\x02":
        raise CubinError("not a cubin: no 64-bit ELF header")
    try:
        return _read(data)
    except (struct.error, IndexError, KeyError, ValueError) as error:
        raise CubinError(f"not a whole cubin ({len(data)} bytes): {error}") from error


def _read(data: bytes) -> KernelResources:
    sections = _sections(data)
    kernels = [name.removeprefix(".text.") for name in sections if name.startswith(".text.")]
    if len(kernels) != 1:
        raise ValueError(f"it has {len(kernels)} kernels, expected one")
    kernel = kernels[0]
    symbol = _symbols(data, sections).index(kernel.encode())
    attributes = dict(_attributes(_content(data, sections[".nv.info"])))
    text = _content(data, sections[f".text.{kernel}"])
    counts = Counter(word & 0x1FF for (word,) in struct.iter_unpack(f"<H{INSTRUCTION_BYTES - 2}x", text))
    shared = sections.get(f".nv.shared.{kernel}")
    return KernelResources(
        registers=attributes[REGISTER_COUNT, symbol],
        shared_bytes=shared.size if shared else 0,
        spilled_bytes=attributes[FRAME_SIZE, symbol],
        spill_loads=counts[LDL],
        spill_stores=counts[STL],
        mma=tuple((kind, counts[code]) for kind, code in MMA.items() if counts[code]),
        tmem_loads=counts[LDTM],
        tmem_stores=counts[STTM],
        tma_loads=counts[UTMALDG],
        tma_stores=counts[UTMASTG],
    )


def _sections(data: bytes) -> dict[str, _Section]:
    machine = struct.unpack_from("<H", data, 0x12)[0]
    if machine != EM_CUDA:
        raise ValueError(f"its machine is {machine}, not CUDA ({EM_CUDA})")
    table = struct.unpack_from("<Q", data, 0x28)[0]
    size, count, names_at = struct.unpack_from("<HHH", data, 0x3A)
    if table + size * count > len(data):
        raise ValueError(f"its table of {count} sections at {table} is cut off")
    headers = []
    for i in range(count):
        name, kind, _, _, offset, length, link = struct.unpack_from("<IIQQQQI", data, table + i * size)
        headers.append(_Section(name, kind, offset, length, link))
    names = _content(data, headers[names_at])
    return {_string(names, h.name).decode(): h for h in headers}


def _content(data: bytes, section: _Section) -> bytes:
    content = b"" if section.kind == SHT_NOBITS else data[section.offset : section.offset + section.size]
    if section.kind != SHT_NOBITS and len(content) != section.size:
        raise ValueError(f"section at {section.offset} of {section.size} bytes is cut off")
    return content


def _symbols(data: bytes, sections: dict[str, _Section]) -> list[bytes]:
    names = _content(data, sections[".strtab"])
    table = _content(data, sections[".symtab"])
    return [_string(names, at) for (at,) in struct.iter_unpack("<I20x", table)]


def _string(table: bytes, start: int) -> bytes:
    return table[start : table.index(b"\0", start)]


def _attributes(info: bytes) -> Iterator[tuple[tuple[int, int], int]]:
    """((attribute, symbol), value) for the attributes of functions: those of `.nv.info` that carry eight bytes."""
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == ATTRIBUTE_WITH_SIZE:
            if size == 8:
                symbol, value = struct.unpack_from("<II", info, at)
                yield (attribute, symbol), value
            at += size
