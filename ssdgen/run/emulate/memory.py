"""Which block touched which element: races inside a launch, and elements that a whole run never wrote.

Blocks of one launch run in no order on a GPU, so an element that one block writes must not be touched by another. A
`Track` keeps, for a storage that is written, the number of the last block that wrote each element; what was read is
only logged until a first write makes it matter. Elements are counted in the storage, so that two views of it are one
memory; two views of different item size are not seen as one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from ssdgen.run.emulate.errors import Fault

Region: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...], int] | torch.Tensor"
"""Elements of a storage: sizes, strides and offset of a strided box, or their positions (int64, any shape)."""

_NOBODY = 2**31 - 1
_MANY = -(2**31)


def elements(flat: torch.Tensor, region: Region) -> torch.Tensor:
    """The elements `region` of the 1D tensor `flat`: a view of a box, a copy of scattered ones."""
    return flat[region] if isinstance(region, torch.Tensor) else flat.as_strided(*region)


def overwrite(flat: torch.Tensor, region: Region, value: torch.Tensor | int) -> None:
    """Write `value` to the elements `region` of the 1D tensor `flat`."""
    if isinstance(region, torch.Tensor):
        flat[region] = value if isinstance(value, int) else value.reshape(region.shape)
    elif isinstance(value, int):
        flat.as_strided(*region).fill_(value)
    else:
        flat.as_strided(*region).copy_(value)


class Track:
    """Who read and wrote the elements of one storage in one launch.

    `writer` holds per element the number of the block that wrote it, -2 - number for an atomic update and _NOBODY
    before any write; `reader` the block that read it, -1 for none, _MANY for several.
    """

    def __init__(self, storage: torch.Tensor, block_index: Callable[[int], tuple[int, int, int]]) -> None:
        self.storage = storage
        self.block_index = block_index
        self.writer: torch.Tensor | None = None
        self._reader: torch.Tensor | None = None
        self._log: list[tuple[Region, int]] = []

    def read(self, region: Region, block: int, name: str) -> None:
        """Block `block` reads `region` of the array `name`; a fault if another block of the launch wrote to it."""
        if self.writer is None:
            self._log.append((region, block))
            return
        self._unshared(elements(self.writer, region), block, f"an element of {name} is read that")
        self._remember(region, block)

    def write(self, region: Region, block: int, name: str) -> None:
        """Block `block` writes `region` of the array `name`; a fault if another block of the launch read or wrote any of it."""
        writer = self._for_writing(region, block, name)
        self._unshared(elements(writer, region), block, f"an element of {name} is written that")
        overwrite(writer, region, block)

    def update(self, region: Region, block: int, name: str) -> None:
        """Block `block` updates `region` of the array `name` atomically, which other blocks may do too, but only atomically."""
        writer = self._for_writing(region, block, name)
        seen = elements(writer, region)
        plain = (seen >= 0) & (seen != _NOBODY) & (seen != block)
        if bool(plain.any()):
            other = self.block_index(int(seen[plain][0]))
            raise Fault(f"race: an element of {name} is updated that block {other} of this launch wrote")
        mine = -2 - block
        overwrite(writer, region, torch.where((seen < 0) & (seen != mine), _MANY, mine).to(torch.int32))

    def _for_writing(self, region: Region, block: int, name: str) -> torch.Tensor:
        if self.writer is None:
            self.writer = torch.full((self.storage.numel(),), _NOBODY, dtype=torch.int32)
            if self._log:
                self._reader = torch.full((self.storage.numel(),), -1, dtype=torch.int32)
                for seen, reader in self._log:
                    self._remember(seen, reader)
                self._log.clear()
        if self._reader is not None:
            seen = elements(self._reader, region)
            others = (seen != -1) & (seen != block)
            if bool(others.any()):
                number = int(seen[others][0])
                who = "several blocks" if number == _MANY else f"block {self.block_index(number)}"
                raise Fault(f"race: an element of {name} is written that {who} of this launch read")
        return self.writer

    def _remember(self, region: Region, block: int) -> None:
        if self._reader is None:
            self._reader = torch.full((self.storage.numel(),), -1, dtype=torch.int32)
        seen = elements(self._reader, region)
        overwrite(self._reader, region, torch.where((seen == -1) | (seen == block), block, _MANY).to(torch.int32))

    def _unshared(self, seen: torch.Tensor, block: int, what: str) -> None:
        """Fault if an element of `seen` was written by another block; blocks run in order, so those are below `block`."""
        if seen.numel() == 0 or int(seen.amin()) >= block:
            return
        others = (seen < block) & (seen != -2 - block)
        if bool(others.any()):
            number = int(seen[others][0])
            writer = self.block_index(number if number >= 0 else -2 - number)
            who = "several blocks" if number == _MANY else f"block {writer}"
            raise Fault(f"race: {what} {who} of this launch wrote")


class Recorder:
    """What a run of launches wrote: `launches` are the names of the kernels in order, `unwritten` what they left out."""

    def __init__(self) -> None:
        self.launches: list[str] = []
        self._written: dict[tuple[int, int], torch.Tensor] = {}
        self._kept: list[torch.Tensor] = []  # so that no storage is freed and its address reused

    def note(self, kernel: str, tracks: dict[tuple[int, int], Track]) -> None:
        """Take in one launch that has run."""
        self.launches.append(kernel)
        for key, track in tracks.items():
            if track.writer is not None:
                written = track.writer != _NOBODY
                self._kept.append(track.storage)
                self._written[key] = written | self._written[key] if key in self._written else written

    def unwritten(self, tensor: torch.Tensor) -> torch.Tensor:
        """Where `tensor` was never written by a kernel of this run: a bool tensor of its shape."""
        written = self._written.get(storage_key(tensor))
        if written is None:
            return torch.ones(tensor.shape, dtype=torch.bool)
        return ~written.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def storage_key(tensor: torch.Tensor) -> tuple[int, int]:
    """What tells one memory from another: where its storage begins, and the size of an element."""
    return tensor.untyped_storage().data_ptr(), tensor.element_size()


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of the storage of `tensor`, as a 1D tensor."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((count,), (1,), 0)
