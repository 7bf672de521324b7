"""Kernels of one statement each that cuTile's compiler, or the emulator, or both refuse.

Every kernel has the same parameters: bf16, f32, i32 and f16 arrays of shape (32, 32), an f32 array of shape (32,), and
an int, a float and a bool that are known at run time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda.tile as ct

from tests.run.emulate.accepted_kernels import SHAPE, whole

REFUSED: list[tuple[Any, str]] = []
STRICTER: list[tuple[Any, str]] = []
LOOSER: list[Any] = []


def refused(message: str) -> Callable[[Callable[..., None]], None]:
    """Both must refuse it, the emulator with `message`."""
    return lambda kernel: REFUSED.append((ct.kernel(kernel), message))


def stricter(message: str) -> Callable[[Callable[..., None]], None]:
    """The front end takes it, the emulator refuses it on purpose."""
    return lambda kernel: STRICTER.append((ct.kernel(kernel), message))


def looser(kernel: Callable[..., None]) -> None:
    """The front end refuses it and the emulator cannot tell: why compiling is a gate of its own."""
    LOOSER.append(ct.kernel(kernel))


# --- stores: a dtype may widen, never narrow


@refused("cannot implicitly cast float32 to bfloat16")
def store_f32_in_bf16(b, f, i, h, v, n, r, flag):
    ct.store(b, (0, 0), whole(f))


@refused("cannot implicitly cast float16 to bfloat16")
def store_f16_in_bf16(b, f, i, h, v, n, r, flag):
    ct.store(b, (0, 0), whole(h))


@refused("cannot implicitly cast float32 to int32")
def store_f32_in_i32(b, f, i, h, v, n, r, flag):
    ct.store(i, (0, 0), whole(f))


@refused("cannot implicitly cast tfloat32 to float32")
def store_tf32_in_f32(b, f, i, h, v, n, r, flag):
    ct.store(f, (0, 0), whole(f).astype(ct.tfloat32))


@refused("cannot implicitly cast float32 to bfloat16")
def store_run_time_float_in_bf16(b, f, i, h, v, n, r, flag):
    ct.store(b, (0, 0), r)


@stricter("does not store into f, of rank 2")  # tileiras refuses it, with "Return code 3" and no location
def store_of_another_rank(b, f, i, h, v, n, r, flag):
    ct.store(f, (0, 0), ct.zeros((32,), ct.float32))


# --- promotion


@refused("does not take two booleans")
def two_booleans(b, f, i, h, v, n, r, flag):
    _ = (whole(f) > 0) + (whole(f) > 1)


@refused("Implicit promotion of bfloat16 and float16")
def bf16_with_f16(b, f, i, h, v, n, r, flag):
    _ = whole(b) + whole(h)


@refused("Implicit promotion of bfloat16 and float16")
def compare_bf16_with_f16(b, f, i, h, v, n, r, flag):
    _ = whole(b) == whole(h)


@refused("2147483648 is not a value of int32")
def constant_too_large(b, f, i, h, v, n, r, flag):
    _ = n + 2**31


@refused("do not broadcast")
def shapes_that_do_not_broadcast(b, f, i, h, v, n, r, flag):
    _ = whole(f) + ct.zeros((16,), ct.float32)


@refused("floor takes floats")
def floor_of_int(b, f, i, h, v, n, r, flag):
    _ = ct.floor(whole(i))


@refused("same dtype, got bool and int32|same dtype, got bool_ and int32")
def mask_and_int(b, f, i, h, v, n, r, flag):
    _ = (whole(f) > 0) & whole(i)


@refused("integers or booleans")
def and_of_floats(b, f, i, h, v, n, r, flag):
    _ = whole(f) & whole(f)


# --- tfloat32 is for mma only


@refused("tfloat32 is not arithmetic")
def tf32_sum(b, f, i, h, v, n, r, flag):
    _ = whole(f).astype(ct.tfloat32) + 1.0


@refused("tfloat32 is not arithmetic")
def tf32_reduction(b, f, i, h, v, n, r, flag):
    _ = ct.sum(whole(f).astype(ct.tfloat32), axis=0)


@stricter("tfloat32 is not arithmetic")
def tf32_exp(b, f, i, h, v, n, r, flag):
    _ = ct.exp2(whole(f).astype(ct.tfloat32))


@stricter("tfloat32 is not arithmetic")
def tf32_negative(b, f, i, h, v, n, r, flag):
    _ = -whole(f).astype(ct.tfloat32)


@stricter("tfloat32 is not arithmetic")
def tf32_comparison(b, f, i, h, v, n, r, flag):
    _ = whole(f).astype(ct.tfloat32) > 0


# --- matrix products


@refused("must have the same dtype")
def mma_of_two_dtypes(b, f, i, h, v, n, r, flag):
    _ = ct.mma(whole(b), whole(f), whole(f))


@refused("Unsupported acc dtype bfloat16")
def mma_into_bf16(b, f, i, h, v, n, r, flag):
    _ = ct.mma(whole(b), whole(b), whole(b))


@refused("the accumulator has shape")
def mma_into_another_shape(b, f, i, h, v, n, r, flag):
    _ = ct.mma(whole(b), whole(b), ct.zeros((32, 1), ct.float32))


@refused("ct.mma of shapes")
def mma_of_shapes_that_do_not_fit(b, f, i, h, v, n, r, flag):
    _ = ct.mma(whole(b), ct.load(b, (0, 0), (16, 32)), whole(f))


@stricter("runs as scalar code")
def mma_of_f32(b, f, i, h, v, n, r, flag):
    _ = ct.mma(whole(f), whole(f), whole(f))


# --- control flow and constants


@refused("is not a scalar")
def branch_on_one_element(b, f, i, h, v, n, r, flag):
    if ct.load(v, (0,), (1,)) > 0:
        ct.store(f, (0, 0), 0.0)


@refused("is not a scalar")
def and_of_tiles(b, f, i, h, v, n, r, flag):
    _ = (whole(f) > 0) and (whole(f) > 1)


@refused("expects a constant")
def int_of_a_run_time_value(b, f, i, h, v, n, r, flag):
    _ = int(r)


@refused("float() expects a constant")
def float_of_a_run_time_value(b, f, i, h, v, n, r, flag):
    _ = float(n)


@refused("has no len")
def len_of_a_tile(b, f, i, h, v, n, r, flag):
    _ = len(whole(f))


@refused("not a compile-time constant")
def ensure_constant(b, f, i, h, v, n, r, flag):
    _ = ct.ensure_constant(n)


@refused("ct.static_assert failed: never")
def failing_static_assert(b, f, i, h, v, n, r, flag):
    ct.static_assert(1 > 2, "never")


# --- loads and indices


@refused("not a power of two")
def load_three(b, f, i, h, v, n, r, flag):
    _ = ct.load(f, (0, 0), (3, 32))


@refused("must be a constant integer")
def load_of_a_run_time_shape(b, f, i, h, v, n, r, flag):
    _ = ct.load(f, (0, 0), (n, 32))


@refused("must be a constant integer")
def load_of_the_shape_of_an_array(b, f, i, h, v, n, r, flag):
    _ = ct.load(f, (0, 0), (f.shape[0], 32))


@refused("1 indices for an array of rank 2")
def load_with_too_few_indices(b, f, i, h, v, n, r, flag):
    _ = ct.load(f, (0,), SHAPE)


@refused("has rank 1, expected 2")
def load_of_too_few_dimensions(b, f, i, h, v, n, r, flag):
    _ = ct.load(f, (0, 0), (32,))


@refused("must be signed integers")
def load_at_a_float(b, f, i, h, v, n, r, flag):
    _ = ct.load(f, (0, r), SHAPE)


@refused("must be signed integers")
def load_at_a_bool(b, f, i, h, v, n, r, flag):
    _ = ct.load(f, (flag, 0), SHAPE)


@refused("latency is between 1 and 10")
def load_with_latency_11(b, f, i, h, v, n, r, flag):
    _ = ct.load(f, (0, 0), SHAPE, latency=11)


# --- shapes


@refused("not by 0; use ct.extract")
def index_of_a_tile(b, f, i, h, v, n, r, flag):
    _ = whole(f)[0, 0]


@refused("index 2 is outside")
def extract_outside(b, f, i, h, v, n, r, flag):
    _ = ct.extract(whole(f), (2, 0), (16, 32))


@refused("takes a tuple of one or two tiles")
def cat_of_three(b, f, i, h, v, n, r, flag):
    _ = ct.cat((whole(f), whole(f), whole(f)), 0)


@refused("the dtypes must be the same")
def cat_of_two_dtypes(b, f, i, h, v, n, r, flag):
    _ = ct.cat((whole(f), whole(b)), 0)


@refused("cannot be reshaped")
def reshape_to_another_size(b, f, i, h, v, n, r, flag):
    _ = whole(f).reshape((16, 32))


@refused("takes two axes")
def transpose_of_three_axes(b, f, i, h, v, n, r, flag):
    _ = whole(f)[None].transpose()


@refused("takes two axes or none")
def transpose_with_one_axis(b, f, i, h, v, n, r, flag):
    _ = whole(f).transpose(0)


@refused("out of range for rank 2")
def sum_over_a_missing_axis(b, f, i, h, v, n, r, flag):
    _ = ct.sum(whole(f), axis=2)


@refused("ct.bitcast from float32 to bfloat16")
def bitcast_to_another_width(b, f, i, h, v, n, r, flag):
    _ = ct.bitcast(whole(f), ct.bfloat16)


# --- custom reductions and scans


@refused("cannot implicitly cast float32 to bfloat16")
def scan_that_widens(b, f, i, h, v, n, r, flag):
    _ = ct.scan(whole(b), 0, lambda p, q: p.astype(ct.float32) + q, 0.0)


@refused("need as many identities")
def scan_with_too_few_identities(b, f, i, h, v, n, r, flag):
    _ = ct.scan((whole(f), whole(f)), 0, lambda p, q, s, t: (p, q), (1.0,))


# --- what the emulator cannot see


@looser
def loop_variable_in_a_shape(b, f, i, h, v, n, r, flag):
    for j in range(1, 2):
        _ = ct.load(f, (0, 0), (j, 32))


@looser
def loop_variable_is_typed_loosely(b, f, i, h, v, n, r, flag):
    for j in range(2):
        product = whole(b) * (j * 0.5)
        ct.static_assert(product.dtype == ct.bfloat16)  # float32 on the GPU


@looser
def run_time_index_of_a_tuple(b, f, i, h, v, n, r, flag):
    _ = (1, 2, 3, 4)[n]


@looser
def range_downwards(b, f, i, h, v, n, r, flag):
    for _ in range(n, 0, -1):
        pass
