"""Device functions of the emitted kernels: products of a chosen precision, and elementwise functions safe in float32.

Copied verbatim beside the modules that ssdgen emits.
"""

from __future__ import annotations

import math

import cuda.tile as ct

LOG2E = math.log2(math.e)
ZERO = ct.PaddingMode.ZERO

BF16, TF32, TF32X3, BF16X2 = 0, 1, 2, 3
"""Precisions of `dot`: operands in bf16, in TF32, or split in two halves: of TF32 for the accuracy of float32, or of bf16,
which leaves bf16 operands whole."""


@ct.function
def load(
    array: ct.Array,
    index: tuple[int, ...],
    shape: tuple[int, ...],
    order: tuple[int, ...] | str = "C",
    latency: int | None = None,
    uniform: tuple[bool, ...] = (),
) -> ct.Tile:
    """The tile of `array` at `index`, in tiles of `shape`, without the dimensions of length 1; zero outside the array.

    `order`: the array's dimensions, permuted. `uniform`: whether the array is the same all along a dimension; there one element
    is read, and a thread keeps a number in place of a row.
    """
    read = ct.static_eval(tuple(1 if n < len(uniform) and uniform[n] else length for n, length in enumerate(shape)))
    tile = ct.load(array, index, read, order=order, padding_mode=ZERO, latency=latency)
    return ct.reshape(ct.broadcast_to(tile, shape), ct.static_eval(tuple(n for n in shape if n != 1)))


@ct.function
def store(
    array: ct.Array, index: tuple[int, ...], shape: tuple[int, ...], tile: ct.Tile, latency: int | None = None
) -> None:
    """Write `tile` as a tile of `shape` at `index`, rounded to the dtype of `array`; what lies outside it is dropped."""
    ct.store(array, index, ct.astype(ct.reshape(tile, shape), array.dtype), latency=latency)


@ct.function
def rows(tile: ct.Tile) -> tuple[ct.Tile, ct.Tile]:
    """The rows of a tile [2, L]."""
    length: int = tile.shape[1]
    first, second = ct.extract(tile, (0, 0), (1, length)), ct.extract(tile, (1, 0), (1, length))
    return ct.reshape(first, (length,)), ct.reshape(second, (length,))


@ct.function
def dot(left: ct.Tile, right: ct.Tile, total: ct.Tile, precision: int) -> ct.Tile:
    """total + left @ right on the tensor cores: left [M, K], right [K, N], total [M, N] in float32."""
    if precision == BF16:
        return ct.mma(ct.astype(left, ct.bfloat16), ct.astype(right, ct.bfloat16), total)
    if precision == TF32:
        return ct.mma(ct.astype(left, ct.tfloat32), ct.astype(right, ct.tfloat32), total)
    if precision == BF16X2:
        return dot_halves(left, right, total)
    left_high = ct.astype(left, ct.tfloat32)
    right_high = ct.astype(right, ct.tfloat32)
    left_low = ct.astype(ct.astype(left, ct.float32) - ct.astype(left_high, ct.float32), ct.tfloat32)
    right_low = ct.astype(ct.astype(right, ct.float32) - ct.astype(right_high, ct.float32), ct.tfloat32)
    total = ct.mma(left_low, right_high, total)
    total = ct.mma(left_high, right_low, total)
    return ct.mma(left_high, right_high, total)


@ct.function
def dot_halves(left: ct.Tile, right: ct.Tile, total: ct.Tile) -> ct.Tile:
    """total + left @ right with operands in bf16, and what rounding takes from one of another dtype as a product more."""
    left_high, right_high = ct.astype(left, ct.bfloat16), ct.astype(right, ct.bfloat16)
    if left.dtype != ct.bfloat16:
        left_low = ct.astype(ct.astype(left, ct.float32) - ct.astype(left_high, ct.float32), ct.bfloat16)
        total = ct.mma(left_low, right_high, total)
    if right.dtype != ct.bfloat16:
        right_low = ct.astype(ct.astype(right, ct.float32) - ct.astype(right_high, ct.float32), ct.bfloat16)
        total = ct.mma(left_high, right_low, total)
    return ct.mma(left_high, right_high, total)


@ct.function
def inner(left: ct.Tile, right: ct.Tile, precision: int) -> ct.Tile:
    """The sum of left * right [M, K] over K: the diagonal of left @ right' on the tensor cores, which take operands from
    shared memory."""
    rows: int = left.shape[0]
    row = ct.arange(rows, dtype=ct.int32)
    product = dot(left, ct.transpose(right), ct.zeros((rows, rows), dtype=ct.float32), precision)
    return ct.sum(ct.where(row[:, None] == row[None, :], product, 0.0), axis=1)


@ct.function
def sum_pair(a: ct.Tile, b: ct.Tile) -> tuple[ct.Tile, ct.Tile]:
    """The sums of two tiles of one shape over their second axis, in one pass through the threads of a block."""
    a_sum, b_sum = ct.reduce((a, b), 1, add_pairs, (0.0, 0.0))
    return a_sum, b_sum


@ct.function
def sum_four(a: ct.Tile, b: ct.Tile, c: ct.Tile, d: ct.Tile) -> tuple[ct.Tile, ct.Tile, ct.Tile, ct.Tile]:
    """The same of two pairs, in one pass if all four are of one shape."""
    if a.shape[0] == c.shape[0] and a.shape[1] == c.shape[1]:
        a_sum, b_sum, c_sum, d_sum = ct.reduce((a, b, c, d), 1, add_fours, (0.0, 0.0, 0.0, 0.0))
        return a_sum, b_sum, c_sum, d_sum
    a_sum, b_sum = sum_pair(a, b)
    c_sum, d_sum = sum_pair(c, d)
    return a_sum, b_sum, c_sum, d_sum


@ct.function
def sum_five(
    a: ct.Tile, b: ct.Tile, c: ct.Tile, d: ct.Tile, e: ct.Tile
) -> tuple[ct.Tile, ct.Tile, ct.Tile, ct.Tile, ct.Tile]:
    """The same of four and one more."""
    if a.shape[0] == c.shape[0] and a.shape[1] == c.shape[1] and a.shape[0] == e.shape[0] and a.shape[1] == e.shape[1]:
        a_sum, b_sum, c_sum, d_sum, e_sum = ct.reduce((a, b, c, d, e), 1, add_fives, (0.0, 0.0, 0.0, 0.0, 0.0))
        return a_sum, b_sum, c_sum, d_sum, e_sum
    a_sum, b_sum, c_sum, d_sum = sum_four(a, b, c, d)
    return a_sum, b_sum, c_sum, d_sum, ct.sum(e, axis=1)


@ct.function
def add_pairs(a: ct.Tile, b: ct.Tile, c: ct.Tile, d: ct.Tile) -> tuple[ct.Tile, ct.Tile]:
    """(a, b) + (c, d)."""
    return a + c, b + d


@ct.function
def add_fours(
    a: ct.Tile, b: ct.Tile, c: ct.Tile, d: ct.Tile, e: ct.Tile, f: ct.Tile, g: ct.Tile, h: ct.Tile
) -> tuple[ct.Tile, ct.Tile, ct.Tile, ct.Tile]:
    """(a, b, c, d) + (e, f, g, h)."""
    return a + e, b + f, c + g, d + h


@ct.function
def add_fives(
    a: ct.Tile, b: ct.Tile, c: ct.Tile, d: ct.Tile, e: ct.Tile,
    f: ct.Tile, g: ct.Tile, h: ct.Tile, i: ct.Tile, j: ct.Tile,
) -> tuple[ct.Tile, ct.Tile, ct.Tile, ct.Tile, ct.Tile]:  # fmt: skip
    """(a, b, c, d, e) + (f, g, h, i, j)."""
    return a + f, b + g, c + h, d + i, e + j


@ct.function
def exp2(x: ct.Tile) -> ct.Tile:
    """2^x by the hardware's approximation; results below 2^-126 are 0."""
    return ct.exp2(x, flush_to_zero=True)


@ct.function
def f16_scale(x: ct.Tile, axis: int) -> ct.Tile:
    """What to divide x by along an axis before it is stored in float16: the largest |x| becomes 2^15, so that one 2^29 times
    smaller still keeps all its bits. Never 0."""
    return ct.maximum(ct.max(ct.abs(x), axis=axis), 1e-30) * (1.0 / 32768.0)


@ct.function
def await_previous(later: bool = False) -> None:
    """Wait for what the kernel before wrote; the kernel behind may take up its position meanwhile.

    Every kernel of a plan calls it, also one that reads nothing of the kernel before: who waits for that one has then waited
    for both. So `later`, a flag of the compiler, leaves the waiting to the kernel itself, which does it in every block, before
    it writes anything: what it reads until then no kernel may write that still runs.
    """
    ct.grid_dependency_control_launch_dependents()
    if not later:
        ct.grid_dependency_control_wait()


@ct.function
def chunk_at(table: ct.Array, place: int) -> tuple[int, int, int]:
    """(row, first token, stop token) of a chunk of packed sequences; of a place without a chunk, some token's."""
    row = ct.load(table, (place, 0), (1, 4))
    start, stop = ct.extract(row, (0, 1), (1, 1)).item(), ct.extract(row, (0, 2), (1, 1)).item()
    return ct.extract(row, (0, 0), (1, 1)).item(), start, ct.maximum(stop, start + 1)


@ct.function
def has_chunk(table: ct.Array, place: int) -> bool:
    """Whether there is a chunk at a place of packed sequences."""
    row = ct.load(table, (place, 0), (1, 4))
    start, stop = ct.extract(row, (0, 1), (1, 1)).item(), ct.extract(row, (0, 2), (1, 1)).item()
    present: bool = start < stop
    return present


@ct.function
def segment_at(table: ct.Array, place: int) -> tuple[int, int, int, int, int, int, bool]:
    """(sequence, row, first token, stop token, place of its sequence's first chunk, index in it, whether it is the last) of a
    segment of packed sequences; a place without a segment has no tokens and is never the last."""
    row = ct.load(table, (place, 0), (1, 8))
    sequence = ct.maximum(ct.extract(row, (0, 0), (1, 1)).item(), 0)
    batch, start = ct.extract(row, (0, 1), (1, 1)).item(), ct.extract(row, (0, 2), (1, 1)).item()
    stop, slot = ct.extract(row, (0, 3), (1, 1)).item(), ct.extract(row, (0, 4), (1, 1)).item()
    segment, last = ct.extract(row, (0, 5), (1, 1)).item(), ct.extract(row, (0, 6), (1, 1)).item()
    return sequence, batch, start, stop, slot, segment, last > 0


@ct.function
def clamp(x: ct.Tile, low: float, high: float) -> ct.Tile:
    """min(max(x, low), high)."""
    return ct.minimum(ct.maximum(x, low), high)


@ct.function
def quotient(x: ct.Tile, y: ct.Tile) -> ct.Tile:
    """x / y by the hardware's approximation, within two last places for |y| from 2^-126 to 2^126: the exact one takes a dozen
    instructions and a branch an element."""
    return ct.truediv(x, y, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)


@ct.function
def log1p_series(x: ct.Tile) -> ct.Tile:
    """log(1 + x) for x in [-0.5, 1], to float32 accuracy also where x is far below 1.

    With s = x / (2 + x), |s| <= 1/3, log(1 + x) = 2 atanh(s) = 2 (s + s^3/3 + s^5/5 + ...).
    """
    s = quotient(x, 2.0 + x)
    q = s * s
    series = 1.0 / 13.0 + q * (1.0 / 15.0)
    series = 1.0 / 11.0 + q * series
    series = 1.0 / 9.0 + q * series
    series = 1.0 / 7.0 + q * series
    series = 1.0 / 5.0 + q * series
    series = 1.0 / 3.0 + q * series
    return 2.0 * s * (1.0 + q * series)


@ct.function
def log1p(x: ct.Tile) -> ct.Tile:
    """log(1 + x), accurate where x is small."""
    near = ct.minimum(ct.maximum(x, -0.5), 1.0)
    return ct.where(x == near, log1p_series(near), ct.log(1.0 + x))


@ct.function
def softplus(x: ct.Tile) -> ct.Tile:
    """log(1 + exp(x))."""
    return ct.maximum(x, 0.0) + log1p_series(ct.exp(-ct.abs(x)))


@ct.function
def log_sigmoid(x: ct.Tile) -> ct.Tile:
    """log(1 / (1 + exp(-x)))."""
    return ct.minimum(x, 0.0) - log1p_series(ct.exp(-ct.abs(x)))


@ct.function
def sigmoid(x: ct.Tile) -> ct.Tile:
    """1 / (1 + exp(-x)); off by |x| 2^-24 and a few last places."""
    return quotient(1.0, 1.0 + exp2(x * -LOG2E))


@ct.function
def silu(x: ct.Tile) -> ct.Tile:
    """x * sigmoid(x)."""
    return quotient(x, 1.0 + exp2(x * -LOG2E))


@ct.function
def sign(x: ct.Tile) -> ct.Tile:
    """-1, 0 or 1."""
    return ct.where(x > 0.0, 1.0, 0.0) - ct.where(x < 0.0, 1.0, 0.0)


@ct.function
def above(x: ct.Tile, low: ct.Tile | float) -> ct.Tile:
    """1 where x > low, else 0."""
    return ct.where(x > low, 1.0, 0.0)


@ct.function
def within(x: ct.Tile, low: float, high: float) -> ct.Tile:
    """1 where low <= x <= high, else 0."""
    return ct.where((x >= low) & (x <= high), 1.0, 0.0)
