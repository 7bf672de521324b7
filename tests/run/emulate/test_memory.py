"""Loads, stores, races between blocks, and what a run never wrote."""

from __future__ import annotations

import pytest
import torch

from ssdgen.run.emulate import EmulationError, emulation, launch
from tests.run.emulate import memory_kernels as k

NAN = float("nan")


def test_copy_clips_its_last_tile() -> None:
    x, y = torch.randn(100), torch.full((100,), NAN)
    launch(k.copy, (13,), (x, y, 8))
    assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_undetermined_padding_is_poison_in_floats(dtype: torch.dtype) -> None:
    x, y = torch.ones(5, dtype=dtype), torch.zeros(8, dtype=dtype)
    launch(k.widen, (1,), (x, y, 8))
    assert torch.equal(y[:5], x)
    assert y[5:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8])
def test_undetermined_padding_is_large_in_integers(dtype: torch.dtype) -> None:
    x, y = torch.ones(5, dtype=dtype), torch.zeros(8, dtype=dtype)
    launch(k.widen, (1,), (x, y, 8))
    assert (y[5:] > torch.iinfo(dtype).max // 3).all()


def test_padding_modes() -> None:
    x, y = torch.ones(5), torch.full((8,), NAN)
    launch(k.widen_zero, (1,), (x, y, 8))
    assert y.tolist() == [1.0] * 5 + [0.0] * 3
    launch(k.widen_infinite, (1,), (x, y, 8))
    assert y.tolist() == [1.0] * 5 + [-float("inf")] * 3
    with pytest.raises(EmulationError, match="padding NEG_INF of x, which holds int32"):
        launch(k.widen_infinite, (1,), (x.int(), y.int(), 8))


def test_poison_survives_maximum_and_stops_at_where() -> None:
    """`max(poison, 0)` is as undetermined as the poison, though a GPU's maximum prefers a number to NaN."""
    x, y = torch.ones(5), torch.zeros(8)
    launch(k.poisoned_maximum, (1,), (x, y, 8))
    assert y[5:].isnan().all()
    launch(k.masked_poison, (1,), (x, y, 8))
    assert y.tolist() == [1.0] * 5 + [-1.0] * 3


def test_maximum_prefers_a_number_to_nan() -> None:
    x, y = torch.tensor([NAN, -1.0, 2.0, 3.0]), torch.zeros(16)
    launch(k.maximum_zero, (1,), (x, y, 4))
    assert y[:4].tolist() == [0.0, 0.0, 2.0, 3.0]
    assert y[4:8].isnan().tolist() == [True, False, False, False]
    assert y[8] == 3.0
    assert y[9].isnan()


@pytest.mark.parametrize("index", [-1, 2, 1000])
@pytest.mark.parametrize("kernel", [k.load_at, k.store_at])
def test_a_tile_wholly_outside_is_an_error(kernel: object, index: int) -> None:
    x, y = torch.ones(16), torch.zeros(16)
    with pytest.raises(
        EmulationError, match=rf"a tile wholly outside [xy]: tile index \({index},\), tile shape \(8,\)"
    ):
        launch(kernel, (1,), (x, y, index, 8))


def test_every_tile_is_outside_an_empty_array() -> None:
    with pytest.raises(EmulationError, match="wholly outside"):
        launch(k.copy, (1,), (torch.ones(0), torch.zeros(0), 8))


def test_check_bounds_false_is_a_promise() -> None:
    x, y = torch.randn(16), torch.zeros(16)
    launch(k.unchecked, (2,), (x, y, 8))
    assert torch.equal(x, y)
    with pytest.raises(EmulationError, match="without check_bounds"):
        launch(k.unchecked, (2,), (x[:15], y, 8))


@pytest.mark.parametrize("shape", [(32, 64), (20, 50)])
def test_order(shape: tuple[int, int]) -> None:
    x = torch.randn(shape)
    for kernel in (k.transposed_load, k.transposed_store):
        y = torch.full(shape[::-1], NAN)
        launch(kernel, (2, 4), (x, y, 16, 16))
        assert torch.equal(y, x.t())


def test_strided_views_and_the_memory_around_them() -> None:
    """Arrays are views of one NaN-filled buffer; nothing around them is read or written."""
    buffer = torch.full((7, 40, 3), NAN)
    x, y = buffer[1, 2:35:2, 1], buffer[4, 3:37:2, 2]
    x.copy_(torch.randn(17))
    launch(k.copy_zero_padded, (3,), (x, y, 8))
    assert torch.equal(x, y)
    assert int((~buffer.isnan()).sum()) == 34


def test_stride_zero_loads_but_does_not_store() -> None:
    y = torch.zeros(16)
    launch(k.copy, (2,), (torch.tensor([3.0]).expand(16), y, 8))
    assert y.tolist() == [3.0] * 16
    with pytest.raises(EmulationError, match="race: one element of y is written from several of a tile"):
        launch(k.copy, (1,), (torch.ones(16), torch.zeros(1).expand(16), 8))


def test_a_loaded_tile_does_not_follow_the_memory() -> None:
    x = torch.zeros(16)
    launch(k.add_one_in_place, (2,), (x, 8))
    assert x.tolist() == [2.0] * 16


# --- races


def test_two_blocks_that_write_one_element() -> None:
    y = torch.zeros(8)
    launch(k.write_all_at_zero, (1,), (y, 8))
    with pytest.raises(EmulationError, match=r"an element of y is written that block \(0, 0, 0\) of this launch wrote"):
        launch(k.write_all_at_zero, (2,), (y, 8))


def test_tiles_that_overlap_because_two_arguments_do() -> None:
    buffer = torch.ones(20)
    with pytest.raises(EmulationError, match="race"):
        launch(k.copy, (2,), (buffer[:16], buffer[4:], 8))


def test_reading_what_another_block_wrote() -> None:
    with pytest.raises(EmulationError, match=r"block \(1,\).*element of x is read that block \(0, 0, 0\)"):
        launch(k.read_neighbour, (4,), (torch.ones(32), 8))


def test_writing_what_another_block_read_before() -> None:
    """The same race in the other order of blocks, which running them in sequence hides."""
    with pytest.raises(EmulationError, match=r"block \(1,\).*element of x is written that block \(0, 0, 0\).*read"):
        launch(k.read_next, (4,), (torch.ones(32), 8))
    with pytest.raises(EmulationError, match="written that several blocks of this launch read"):
        launch(k.exchange, (2,), (torch.ones(8), torch.zeros(8)))
    launch(k.read_next, (1,), (torch.ones(8), 8))


def test_launches_do_not_race_with_each_other() -> None:
    x, y = torch.ones(16), torch.zeros(16)
    launch(k.copy, (2,), (x, y, 8))
    launch(k.copy, (2,), (y, x, 8))
    launch(k.copy, (2,), (x, y, 8))


# --- atomics, gathers, scatters


def test_atomic_add_from_several_blocks() -> None:
    x, total = torch.randn(64), torch.zeros(1)
    launch(k.count, (8,), (total, x, 8))
    torch.testing.assert_close(total[0], x.sum())
    again = torch.zeros(1)
    launch(k.count, (8,), (again, x, 8))
    assert torch.equal(total, again)


def test_atomic_and_plain_writes_race() -> None:
    with pytest.raises(EmulationError, match=r"written that block \(0, 0, 0\) of this launch wrote"):
        launch(k.count_and_overwrite, (2,), (torch.zeros(1),))


def test_atomic_add_with_repeated_indices() -> None:
    bins, old = torch.zeros(4), torch.zeros(8)
    launch(k.histogram, (1,), (bins, torch.tensor([0, 1, 1, 3, 3, 3, 9, -1], dtype=torch.int32), old))
    assert bins.tolist() == [1.0, 2.0, 0.0, 3.0]
    assert old[:6].tolist() == [0.0, 0.0, 1.0, 0.0, 1.0, 2.0]


def test_gather_pads_what_is_outside() -> None:
    x, y = torch.randn(5, 6), torch.zeros(4, 8)
    launch(k.gather_rows, (1,), (x, torch.tensor([4, 0, 7, -1], dtype=torch.int32), y))
    assert torch.equal(y[:2, :6], x[[4, 0]])
    assert (y[2:] == -1).all()
    assert (y[:, 6:] == -1).all()


def test_a_mask_keeps_what_is_not_checked_inside() -> None:
    """An element that the mask leaves out is not touched, so it may be outside; cuTile checks the others for nobody."""
    x, y = torch.randn(6), torch.zeros(6)
    launch(k.gather_masked, (1,), (x, y, 6))
    assert torch.equal(x, y)
    with pytest.raises(EmulationError, match=r"ct\.gather without check_bounds of an element outside x"):
        launch(k.gather_masked, (1,), (x, y, 7))


def test_scatter_leaves_out_what_is_outside_or_masked() -> None:
    x, y = torch.randn(4, 8), torch.zeros(5, 7)
    launch(k.scatter_rows, (1,), (x, torch.tensor([4, 0, 7, 2], dtype=torch.int32), y))
    assert torch.equal(y[[4, 0, 2], :6], x[[0, 1, 3], :6])
    assert int((y != 0).sum()) == 18
    with pytest.raises(EmulationError, match=r"ct\.scatter writes one element of y more than once"):
        launch(k.scatter_rows, (1,), (x, torch.tensor([4, 4, 7, 2], dtype=torch.int32), y))


def test_slices() -> None:
    x, y = torch.randn(100), torch.zeros(1)
    launch(k.sum_slice, (1,), (x, y, 13, 50, 8))
    torch.testing.assert_close(y[0], x[13:50].sum())
    for start, stop in ((-1, 5), (5, 101), (7, 6)):
        with pytest.raises(EmulationError, match=r"slice \["):
            launch(k.sum_slice, (1,), (x, y, start, stop, 8))


# --- the recorder


def test_unwritten_elements_over_several_launches() -> None:
    x, y, z = torch.ones(40), torch.empty(40), torch.empty(40)
    with emulation() as run:
        launch(k.copy, (2,), (x, y, 8))
        assert run.unwritten(y).tolist() == [False] * 16 + [True] * 24
        launch(k.store_at, (1,), (x, y, 4, 8))
    assert run.unwritten(y).tolist() == [False] * 16 + [True] * 16 + [False] * 8
    assert run.unwritten(z).all()
    assert run.unwritten(x).all()
    assert run.unwritten(y[::2]).tolist() == [False] * 8 + [True] * 8 + [False] * 4
    assert run.launches == ["copy", "store_at"]


def test_launches_outside_are_not_recorded() -> None:
    x, y = torch.ones(16), torch.empty(16)
    with emulation() as run:
        pass
    launch(k.copy, (2,), (x, y, 8))
    assert run.launches == []
    assert run.unwritten(y).all()
