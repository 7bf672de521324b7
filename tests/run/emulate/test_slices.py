"""What kernels of packed sequences stand on: slices of the token axis whose bounds come out of an int32 table."""

from __future__ import annotations

import pytest
import torch

from ssdgen.run.emulate import EmulationError, emulation, launch
from tests.run.emulate import memory_kernels as k

TABLE = torch.tensor([[0, 0, 5, 0], [0, 5, 5, 0], [0, 5, 22, 0], [1, 3, 4, 0], [0, 0, 0, 0]], dtype=torch.int32)
"""Row, start, stop, 0: an empty sequence between two others, one token inside another row, and an unused entry."""


def test_tile_indices_count_from_the_slice_and_stores_clip_at_its_end() -> None:
    x, y = torch.randn(64), torch.zeros(64)
    with emulation() as run:
        launch(k.copy_slice, (1,), (x, y, 13, 50, 8))
    assert torch.equal(y[13:50], x[13:50])
    assert not y[:13].any()
    assert not y[50:].any()
    inside = torch.zeros(64, dtype=torch.bool)
    inside[13:50] = True
    assert torch.equal(run.unwritten(y), ~inside), "what a slice wrote is noted in the array it is of"


def test_what_is_past_a_slice_is_padding_though_the_array_goes_on() -> None:
    x, y = torch.ones(64), torch.zeros(8)
    launch(k.load_past_slice, (1,), (x, y, 13, 26, 8))
    assert y[:5].tolist() == [1.0] * 5
    assert y[5:].isnan().all()
    with pytest.raises(EmulationError, match=r"wholly outside x\.slice\(0, 13, 21\)"):
        launch(k.load_past_slice, (1,), (x, y, 13, 21, 8))


@pytest.mark.parametrize("bounds", [(-1, 5), (5, 4), (0, 65), (64, 64)])
def test_bounds_of_a_slice(bounds: tuple[int, int]) -> None:
    """0 <= start < N and start <= stop <= N: a slice of nothing does not begin at the end of the array."""
    with pytest.raises(EmulationError, match=r"slice \[.*of axis 0 of x, which has 64"):
        launch(k.copy_slice, (1,), (torch.ones(64), torch.ones(64), *bounds, 8))


def test_an_empty_slice_inside_the_array_is_one_to_which_nothing_is_done() -> None:
    launch(k.copy_slice, (1,), (torch.ones(64), torch.ones(64), 63, 63, 8))


def test_slices_of_two_blocks_that_overlap_race() -> None:
    table = torch.tensor([[0, 0, 5, 0], [0, 4, 9, 0]], dtype=torch.int32)
    x = torch.ones(1, 16)
    with pytest.raises(EmulationError, match=r"race: an element of y\.slice\(1, 4, 9\) is written"):
        launch(k.pack, (2,), (x, x.clone(), table, x, True, 4))


def test_sequences_from_a_table() -> None:
    """Entries of an int32 table are a tile index, bounds of slices and of a loop; a block without tokens returns early."""
    x, y, unused = torch.randn(2, 22), torch.full((2, 22), float("nan")), torch.zeros(1)
    launch(k.pack, (5,), (x, y, TABLE, unused, True, 4))
    for row, start, stop, _ in TABLE.tolist():
        torch.testing.assert_close(y[row, start:stop], x[row, start:stop].cumsum(0))
    assert y[1, :3].isnan().all()
    assert y[1, 4:].isnan().all()


def test_the_same_kernel_without_a_table() -> None:
    """A `ct.Constant[bool]` chooses the branch; the table is a dead array then."""
    x, y, unused = torch.randn(2, 22), torch.full((2, 22), float("nan")), torch.zeros(1)
    launch(k.pack, (2,), (x, y, torch.zeros(1, 1, dtype=torch.int32), unused, False, 4))
    torch.testing.assert_close(y, x.cumsum(1))


def test_entries_extracted_from_a_tile_of_the_table() -> None:
    x, y = torch.randn(2, 22), torch.zeros(2, 22)
    launch(k.pack_by_row, (5,), (x, y, TABLE, torch.zeros(1), True, 32))
    torch.testing.assert_close(y[0], torch.cat((x[0, :5].cumsum(0), x[0, 5:].cumsum(0))))


def test_an_entry_that_is_no_integer_bounds_nothing() -> None:
    x = torch.ones(1, 16)
    with pytest.raises(EmulationError, match="must be signed integers"):
        launch(k.pack, (1,), (x, x.clone(), torch.tensor([[0.0, 0.0, 5.0, 0.0]]), x, True, 4))
