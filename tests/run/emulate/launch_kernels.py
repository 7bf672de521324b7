"""Kernels that look at their arguments, use helpers, or fail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import cuda.tile as ct

from tests.run.emulate import helpers
from tests.run.emulate.helpers import plain_square, square

DTYPE = ct.bfloat16


@dataclass(frozen=True)
class Sizes:
    rows: int
    scale: float


@ct.kernel
def sees(x, out, n, r, flag, c: ct.Constant[int], pair, sizes):
    ct.static_assert(ct.static_eval(isinstance(c, int)))
    ct.static_assert(x.dtype == DTYPE)
    ct.static_assert(n.dtype == ct.int32)
    ct.static_assert(r.dtype == ct.float32)
    ct.static_assert(flag.dtype == ct.bool_)
    y, k = pair
    t = ct.load(x, (0,), (c,)).astype(ct.float32) * r + ct.load(y, (0,), (c,)) * k
    if flag:
        t = t + sizes.rows * sizes.scale
    for i in ct.static_iter(range(2)):
        t = t + i
    ct.store(out, (0,), t + n)


@ct.kernel
def constants(out, sizes: ct.Constant[tuple[int, bool]], dtype: ct.Constant):
    n, twice = sizes
    ct.store(out, (0,), ct.full((n,), 2 if twice else 1, ct.float32))


@ct.kernel
def wide_scalar(out, n: ct.ScalarInt64):
    ct.static_assert(n.dtype == ct.int64)
    ct.store(out, (0,), n // 2**20)


@ct.kernel
def static_length(x: Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(0,))], y):
    ct.store(y, (0,), ct.load(x, (0,), (x.shape[0],)))


@ct.kernel
def many_elements(x: ct.IndexedWithInt64, y):
    length = x.shape[0]
    ct.static_assert(length.dtype == ct.int64)
    ct.store(y, (0,), ct.load(x, (0,), (4,)))


@ct.kernel
def with_helpers(x, y):
    t = ct.load(x, (0,), (8,))
    ct.store(y, (0,), square(t) + plain_square(t) + helpers.square(t))


@ct.kernel
def fails_in_helper(x, y):
    ct.store(y, (0,), helpers.adds_wrong_shape(ct.load(x, (0,), (8,))))


@ct.kernel
def fails_in_block_two(x, y):
    i, j = ct.bid(0), ct.bid(1)
    if i == 1 and j == 2:
        ct.store(
            y,
            (9,),
            ct.load(x, (0,), (8,)),
        )


@ct.kernel
def raises(x):
    raise ct.static_exception(ValueError("no such layout"))


@ct.kernel
def undefined_name(x):
    ct.store(x, (0,), missing)  # noqa: F821


@ct.kernel
def not_emulated(x):
    x.tiled_view((8,)).load((0,))


@ct.kernel
def divisible(out, n):
    ct.store(out, (0,), ct.assume_divisible_by(n, 16))


@ct.kernel
def asserts(x):
    ct.assert_(ct.load(x, (0,), (4,)) > 0, "positive")  # noqa: PT009


@ct.kernel
def dependent(x, y, n: ct.Constant[int]):
    ct.grid_dependency_control_wait()
    ct.store(y, (ct.bid(0),), ct.load(x, (ct.bid(0),), (n,)))
    ct.grid_dependency_control_launch_dependents()


@ct.kernel
def waits_in_one_block(x, y, n: ct.Constant[int], which: ct.Constant[int]):
    if ct.bid(0) == which:
        ct.grid_dependency_control_wait()
    ct.store(y, (ct.bid(0),), ct.load(x, (ct.bid(0),), (n,)))


@ct.kernel
def lets_the_next_begin(x, y, n: ct.Constant[int]):
    ct.grid_dependency_control_launch_dependents()
    ct.store(y, (ct.bid(0),), ct.load(x, (ct.bid(0),), (n,)))
