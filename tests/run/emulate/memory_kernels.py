"""Kernels that read and write memory, well or badly."""

from __future__ import annotations

import cuda.tile as ct


@ct.kernel
def copy(x, y, n: ct.Constant[int]):
    i = ct.bid(0)
    ct.store(y, (i,), ct.load(x, (i,), (n,)))


@ct.kernel
def copy_zero_padded(x, y, n: ct.Constant[int]):
    i = ct.bid(0)
    ct.store(y, (i,), ct.load(x, (i,), (n,), padding_mode=ct.PaddingMode.ZERO))


@ct.kernel
def widen(x, y, n: ct.Constant[int]):
    """Shows the padding: y is longer than x."""
    ct.store(y, (0,), ct.load(x, (0,), (n,)))


@ct.kernel
def widen_zero(x, y, n: ct.Constant[int]):
    ct.store(y, (0,), ct.load(x, (0,), (n,), padding_mode=ct.PaddingMode.ZERO))


@ct.kernel
def widen_infinite(x, y, n: ct.Constant[int]):
    ct.store(y, (0,), ct.load(x, (0,), (n,), padding_mode=ct.PaddingMode.NEG_INF))


@ct.kernel
def poisoned_maximum(x, y, n: ct.Constant[int]):
    ct.store(y, (0,), ct.maximum(ct.load(x, (0,), (n,)), 0.0))


@ct.kernel
def masked_poison(x, y, n: ct.Constant[int]):
    inside = ct.arange(n, dtype=ct.int32) < x.shape[0]
    ct.store(y, (0,), ct.where(inside, ct.load(x, (0,), (n,)), -1.0))


@ct.kernel
def maximum_zero(x, y, n: ct.Constant[int]):
    t = ct.load(x, (0,), (n,), padding_mode=ct.PaddingMode.ZERO)
    ct.store(y, (0,), ct.maximum(t, 0.0))
    ct.store(y, (1,), ct.maximum(t, 0.0, propagate_nan=True))
    ct.store(y, (2 * n,), ct.max(t, axis=0))
    ct.store(y, (2 * n + 1,), ct.max(t, propagate_nan=True))


@ct.kernel
def load_at(x, y, index, n: ct.Constant[int]):
    ct.store(y, (0,), ct.load(x, (index,), (n,)))


@ct.kernel
def store_at(x, y, index, n: ct.Constant[int]):
    ct.store(y, (index,), ct.load(x, (0,), (n,)))


@ct.kernel
def unchecked(x, y, n: ct.Constant[int]):
    i = ct.bid(0)
    ct.store(y, (i,), ct.load(x, (i,), (n,), check_bounds=False), check_bounds=False)


@ct.kernel
def transposed_load(x, y, m: ct.Constant[int], n: ct.Constant[int]):
    i, j = ct.bid(0), ct.bid(1)
    t = ct.load(x, (j, i), (n, m), order=(1, 0), padding_mode=ct.PaddingMode.ZERO)
    ct.store(y, (j, i), t)


@ct.kernel
def transposed_store(x, y, m: ct.Constant[int], n: ct.Constant[int]):
    i, j = ct.bid(0), ct.bid(1)
    t = ct.load(x, (i, j), (m, n), padding_mode=ct.PaddingMode.ZERO)
    ct.store(y, (i, j), t, order="F")


@ct.kernel
def add_one_in_place(x, n: ct.Constant[int]):
    i = ct.bid(0)
    before = ct.load(x, (i,), (n,))
    ct.store(x, (i,), before + 1)
    ct.store(x, (i,), before + 2)


@ct.kernel
def write_all_at_zero(y, n: ct.Constant[int]):
    ct.store(y, (0,), ct.zeros((n,), ct.float32))


@ct.kernel
def read_neighbour(x, n: ct.Constant[int]):
    i = ct.bid(0)
    ct.store(x, (i,), ct.load(x, (ct.maximum(i - 1, 0),), (n,)))


@ct.kernel
def read_next(x, n: ct.Constant[int]):
    i = ct.bid(0)
    ct.store(x, (i,), ct.load(x, (ct.minimum(i + 1, ct.num_blocks(0) - 1),), (n,)))


@ct.kernel
def exchange(x, y):
    """Writes where another block read, but only after having read there itself."""
    i = ct.bid(0)
    t = ct.load(x, (0,), (4,)) + ct.load(x, (1,), (4,))
    ct.store(y, (i,), t)
    if i == 1:
        ct.store(x, (0,), t)


@ct.kernel
def count(total, x, n: ct.Constant[int]):
    ct.atomic_add(total, 0, ct.sum(ct.load(x, (ct.bid(0),), (n,))))


@ct.kernel
def count_and_overwrite(total):
    if ct.bid(0) == 0:
        ct.atomic_add(total, 0, 1.0)
    else:
        ct.store(total, (0,), 0.0)


@ct.kernel
def histogram(bins, x, old):
    where = ct.load(x, (0,), (8,))
    ct.store(old, (0,), ct.atomic_add(bins, where, 1.0))


@ct.kernel
def gather_rows(x, rows, y):
    r = ct.load(rows, (0,), (4,))
    c = ct.arange(8, dtype=ct.int32)
    ct.store(y, (0, 0), ct.gather(x, (r[:, None], c[None, :]), padding_value=-1.0))


@ct.kernel
def gather_masked(x, y, n):
    i = ct.arange(8, dtype=ct.int32)
    ct.scatter(y, i, ct.gather(x, i, mask=i < n, check_bounds=False), mask=i < n, check_bounds=False)


@ct.kernel
def scatter_rows(x, rows, y):
    r = ct.load(rows, (0,), (4,))
    c = ct.arange(8, dtype=ct.int32)
    ct.scatter(y, (r[:, None], c[None, :]), ct.load(x, (0, 0), (4, 8)), mask=c[None, :] < 6)


@ct.kernel
def sum_slice(x, y, start, stop, n: ct.Constant[int]):
    part = x.slice(0, start, stop)
    total = ct.zeros((), ct.float32)
    for i in range(ct.num_tiles(part, 0, (n,))):
        total = total + ct.sum(ct.load(part, (i,), (n,), padding_mode=ct.PaddingMode.ZERO))
    ct.store(y, (0,), total)


@ct.kernel
def copy_slice(x, y, start, stop, n: ct.Constant[int]):
    """Tile by tile, each relative to the slice's first element."""
    part, out = x.slice(0, start, stop), y.slice(0, start, stop)
    for i in range(ct.num_tiles(part, 0, (n,))):
        ct.store(out, (i,), ct.load(part, (i,), (n,)))


@ct.kernel
def load_past_slice(x, y, start, stop, n: ct.Constant[int]):
    ct.store(y, (0,), ct.load(x.slice(0, start, stop), (1,), (n,)))


@ct.kernel
def pack(x, y, table, unused, packed: ct.Constant[bool], n: ct.Constant[int]):
    """Running sums of rows of x, cut where the table says; a block without tokens leaves at once."""
    i = ct.bid(0)
    if packed:
        row = ct.load(table, (i, 0), (1, 1)).reshape(())
        start = ct.load(table, (i, 1), (1, 1)).item()
        stop = ct.load(table, (i, 2), (1, 1)).item()
        if stop <= start:
            return
        tokens, out = x.slice(1, start, stop), y.slice(1, start, stop)
    else:
        row, tokens, out = i, x, y
    total = ct.zeros((1, 1), dtype=ct.float32)
    for c in range(ct.cdiv(tokens.shape[1], n)):
        tile = ct.load(tokens, (row, c), (1, n), padding_mode=ct.PaddingMode.ZERO)
        ct.store(out, (row, c), ct.cumsum(tile, axis=1) + total)
        total = total + ct.sum(tile, axis=1, keepdims=True)


@ct.kernel
def pack_by_row(x, y, table, unused, packed: ct.Constant[bool], n: ct.Constant[int]):
    """As `pack` for one tile a row of the table, which is loaded whole."""
    entry = ct.load(table, (ct.bid(0), 0), (1, 4)).reshape((4,))
    row = ct.extract(entry, (0,), (1,)).item()
    start = ct.extract(entry, (1,), (1,)).item()
    stop = ct.extract(entry, (2,), (1,)).item()
    if stop <= start:
        return
    tile = ct.load(x.slice(1, start, stop), (row, 0), (1, n), padding_mode=ct.PaddingMode.ZERO)
    ct.store(y.slice(1, start, stop), (row, 0), ct.cumsum(tile, axis=1))
