"""Kernels that cuTile's compiler and the emulator take, with what both must find to hold in them.

Every kernel has the same parameters: bf16, f32, i32 and f16 arrays of shape (32, 32), an f32 array of shape (32,), and
an int, a float and a bool that are known at run time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda.tile as ct

SHAPE = (32, 32)

ACCEPTED: list[Any] = []


def accepted(kernel: Callable[..., None]) -> None:
    """Both must take it; what it static_asserts holds in both."""
    ACCEPTED.append(ct.kernel(kernel))


def whole(array: Any) -> Any:
    """The whole of an array of shape (32, 32)."""
    return ct.load(array, (0, 0), (32, 32))


# --- stores: a dtype may widen, never narrow


@accepted
def store_wider(b, f, i, h, v, n, r, flag):
    ct.store(f, (0, 0), whole(b))
    ct.store(f, (0, 0), whole(h))
    ct.store(f, (0, 0), whole(i))
    ct.store(f, (0, 0), whole(f) > 0)
    ct.store(i, (0, 0), whole(f) > 0)


@accepted
def store_constant_in_bf16(b, f, i, h, v, n, r, flag):
    ct.store(b, (0, 0), 1.5)


# --- promotion


@accepted
def promotion(b, f, i, h, v, n, r, flag):
    plus_constant = whole(b) + 1.5
    ct.static_assert(plus_constant.dtype == ct.bfloat16)
    from_constant = 1 - whole(b)
    ct.static_assert(from_constant.dtype == ct.bfloat16)
    times_run_time = whole(b) * r
    ct.static_assert(times_run_time.dtype == ct.float32)
    with_f32 = whole(b) + whole(f)
    ct.static_assert(with_f32.dtype == ct.float32)
    with_i32 = whole(b) + whole(i)
    ct.static_assert(with_i32.dtype == ct.bfloat16)
    int_and_float = whole(i) * 0.5
    ct.static_assert(int_and_float.dtype == ct.float32)
    quotient = whole(i) / 2
    ct.static_assert(quotient.dtype == ct.float32)
    whole_quotient = whole(b) // 2
    ct.static_assert(whole_quotient.dtype == ct.bfloat16)
    square = whole(b) ** 2
    ct.static_assert(square.dtype == ct.bfloat16)
    folded = whole(b) * ct.exp2(2.0) + ct.maximum(1.0, 2.0)
    ct.static_assert(folded.dtype == ct.bfloat16)


@accepted
def promotion_of_bool(b, f, i, h, v, n, r, flag):
    mask = whole(f) > 0
    plus = mask + 1
    ct.static_assert(plus.dtype == ct.int32)
    times = mask * whole(f)
    ct.static_assert(times.dtype == ct.float32)
    counted = ct.sum(mask, axis=0)
    ct.static_assert(counted.dtype == ct.int32)
    scalar = flag * n
    ct.static_assert(scalar.dtype == ct.int32)


@accepted
def scalars(b, f, i, h, v, n, r, flag):
    block = ct.bid(0) + 1
    ct.static_assert(block.dtype == ct.int32)
    length = f.shape[0]
    ct.static_assert(length.dtype == ct.int32)
    ct.static_assert(r.dtype == ct.float32)
    positive = n > 0
    ct.static_assert(positive.dtype == ct.bool_)
    tiles = ct.num_tiles(f, 0, SHAPE)
    ct.static_assert(tiles.dtype == ct.int32)
    half = ct.cdiv(n, 2)
    ct.static_assert(half.dtype == ct.int32)
    ratio = ct.bid(0) / 2
    ct.static_assert(ratio.dtype == ct.float32)
    quotient, rest = divmod(n, 2)
    ct.static_assert(rest.dtype == ct.int32 and quotient.dtype == ct.int32)


@accepted
def dtypes_of_functions(b, f, i, h, v, n, r, flag):
    from_int = ct.exp(whole(i))
    ct.static_assert(from_int.dtype == ct.float32)
    narrow_sum = ct.sum(whole(b), axis=0)
    ct.static_assert(narrow_sum.dtype == ct.bfloat16)
    narrow_scan = ct.cumsum(whole(b), axis=0)
    ct.static_assert(narrow_scan.dtype == ct.bfloat16)
    mixed = ct.where(whole(f) > 0, whole(b), whole(f))
    ct.static_assert(mixed.dtype == ct.float32)
    kept = ct.where(whole(f) > 0, whole(b), 0.0)
    ct.static_assert(kept.dtype == ct.bfloat16)
    constants = ct.where(whole(f) > 0, 1.0, 0.0)
    ct.static_assert(constants.dtype == ct.float32)
    by_number = ct.where(whole(i), whole(f), 0.0)
    ct.static_assert(by_number.dtype == ct.float32)
    negated = ~(whole(f) > 0)
    ct.static_assert(negated.dtype == ct.bool_)
    nan = ct.isnan(whole(f))
    ct.static_assert(nan.dtype == ct.bool_)
    product = whole(b) @ whole(b)
    ct.static_assert(product.dtype == ct.bfloat16)
    ramp = ct.arange(32, dtype=ct.float32)
    ct.static_assert(ramp.dtype == ct.float32)


@accepted
def masks(b, f, i, h, v, n, r, flag):
    mask = (whole(f) > 0) | flag
    both = mask & True
    ct.static_assert(both.dtype == ct.bool_)


# --- tfloat32 is for mma only


@accepted
def tf32_moves(b, f, i, h, v, n, r, flag):
    t = whole(f).astype(ct.tfloat32)
    moved = ct.cat((t.transpose(), ct.where(whole(f) > 0, t, 0.0)), 0)
    ct.static_assert(moved.dtype == ct.tfloat32)
    zeros = ct.zeros(SHAPE, ct.tfloat32)
    ct.static_assert(zeros.dtype == ct.tfloat32)
    narrow = whole(b).astype(ct.tfloat32)
    ct.static_assert(narrow.dtype == ct.tfloat32)
    ct.store(f, (0, 0), t.astype(ct.float32))


# --- matrix products


@accepted
def products(b, f, i, h, v, n, r, flag):
    from_bf16 = ct.mma(whole(b), whole(b), whole(f))
    ct.static_assert(from_bf16.dtype == ct.float32)
    from_f16 = ct.mma(whole(h), whole(h), whole(f))
    ct.static_assert(from_f16.dtype == ct.float32)
    in_f16 = ct.mma(whole(h), whole(h), whole(h))
    ct.static_assert(in_f16.dtype == ct.float16)
    t = whole(f).astype(ct.tfloat32)
    from_tf32 = ct.mma(t, t.transpose(), whole(f))
    ct.static_assert(from_tf32.dtype == ct.float32)
    row = ct.mma(ct.load(b, (0, 0), (1, 32)), whole(b), ct.zeros((1, 32), ct.float32))
    ct.static_assert(row.shape == (1, 32))


# --- control flow and constants


@accepted
def branches(b, f, i, h, v, n, r, flag):
    if n:
        ct.store(f, (0, 0), 0.0)
    if flag and 0 < n < 5 and n != 4:
        ct.store(f, (0, 0), 1.0)
    x = 1 if n > 0 else 2
    ct.store(i, (0, 0), x)


# --- loads and indices


@accepted
def loads(b, f, i, h, v, n, r, flag):
    scalar = ct.load(f, (0, 0), ())
    ct.static_assert(scalar.shape == ())
    turned = ct.load(f, (0, 0), (32, 16), order=(1, 0), latency=10, allow_tma=False)
    ct.static_assert(turned.shape == (32, 16))
    padded = ct.load(v, 0, 64, padding_mode="ZERO")
    ct.static_assert(padded.shape == (64,))
    part = ct.load(f.slice(0, n, n + 5), (0, 0), SHAPE, padding_mode=ct.PaddingMode.ZERO)
    ct.store(f, (0, 0), part, latency=3)


# --- shapes


@accepted
def new_axes(b, f, i, h, v, n, r, flag):
    middle = whole(f)[:, None, :]
    ct.static_assert(middle.shape == (32, 1, 32))
    first = whole(f)[None]
    ct.static_assert(first.shape == (1, 32, 32))
    last = whole(f)[..., None]
    ct.static_assert(last.shape == (32, 32, 1))
    inferred = whole(f).reshape((64, -1))
    ct.static_assert(inferred.shape == (64, 16))
    total = ct.sum(whole(f))
    ct.static_assert(total.shape == ())
    kept = ct.max(whole(f), axis=1, keepdims=True)
    ct.static_assert(kept.shape == (32, 1))
    corner = whole(f).insert((0, 0), 0.0).extract((1, 1), (16, 16))
    ct.static_assert(corner.shape == (16, 16))


# --- custom reductions and scans


@accepted
def custom(b, f, i, h, v, n, r, flag):
    def affine(a0, b0, a1, b1):
        return a0 * a1, b0 * a1 + b1

    largest = ct.reduce(whole(f), 0, lambda p, q: ct.maximum(p, q), 0.0)
    ct.static_assert(largest.shape == (32,))
    decay, state = ct.scan((whole(f), whole(f)), 1, affine, (1.0, 0.0))
    ct.static_assert(decay.shape == SHAPE and state.dtype == ct.float32)
