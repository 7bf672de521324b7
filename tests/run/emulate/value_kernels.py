"""Kernels that compute one kind of thing each."""

from __future__ import annotations

import operator

import cuda.tile as ct


@ct.kernel
def arithmetic(x, y, out):
    a, b = ct.load(x, (0,), (16,)), ct.load(y, (0,), (16,))
    ct.store(out, (0, 0), (a + b)[None])
    ct.store(out, (1, 0), (a - 2.1 * b)[None])
    ct.store(out, (2, 0), (1.1 - a)[None])
    ct.store(out, (3, 0), (a / b)[None])
    ct.store(out, (4, 0), (a // b)[None])
    ct.store(out, (5, 0), (a % b)[None])
    ct.store(out, (6, 0), ct.minimum(a, b)[None])
    ct.store(out, (7, 0), ct.where(a > b, a, -b)[None])


@ct.kernel
def integers(x, y, out):
    a, b = ct.load(x, (0,), (16,)), ct.load(y, (0,), (16,))
    ct.store(out, (0, 0), (a // b)[None])
    ct.store(out, (1, 0), (a % b)[None])
    ct.store(out, (2, 0), (a * b - a)[None])
    ct.store(out, (3, 0), ct.maximum(a, b)[None])
    ct.store(out, (4, 0), (a & 3 | b << 2)[None])
    ct.store(out, (5, 0), abs(a)[None])


@ct.kernel
def integer_scalars(out, a, b):
    ct.store(out, (0,), a // b)
    ct.store(out, (1,), a % b)
    ct.store(out, (2,), ct.cdiv(a, b))
    ct.store(out, (3,), -a)
    ct.store(out, (4,), min(a, b))


@ct.kernel
def multiply_scalars(out, a, b):
    ct.store(out, (0,), a * b)


@ct.kernel
def multiply_tiles(x, out, a):
    ct.store(out, (0,), ct.load(x, (0,), (4,)) * a)


@ct.kernel
def divide_by(out, a, b):
    ct.store(out, (0,), a // b)


@ct.kernel
def functions(x, out):
    t = ct.load(x, (0,), (16,))
    ct.store(out, (0, 0), ct.exp(t)[None])
    ct.store(out, (1, 0), ct.exp2(t)[None])
    ct.store(out, (2, 0), ct.log(t)[None])
    ct.store(out, (3, 0), ct.log2(t)[None])
    ct.store(out, (4, 0), ct.sqrt(t)[None])
    ct.store(out, (5, 0), ct.rsqrt(t)[None])
    ct.store(out, (6, 0), ct.tanh(t)[None])
    ct.store(out, (7, 0), ct.sin(t)[None])


@ct.kernel
def flushed(x, out):
    t = ct.load(x, (0,), (4,))
    ct.store(out, (0,), ct.exp2(t))
    ct.store(out, (1,), ct.exp2(t, flush_to_zero=True))


@ct.kernel
def to_tf32(x, out, n: ct.Constant[int]):
    ct.store(out, (0,), ct.load(x, (0,), (n,)).astype(ct.tfloat32).astype(ct.float32))


@ct.kernel
def to_int(x, out):
    ct.store(out, (0,), ct.load(x, (0,), (4,)).astype(ct.int32))


@ct.kernel
def bits(x, out):
    ct.store(out, (0,), ct.bitcast(ct.load(x, (0,), (4,)), ct.int32))


@ct.kernel
def product(x, y, acc, out, dtype_of: ct.Constant[int]):
    a, b = ct.load(x, (0, 0), (16, 32)), ct.load(y, (0, 0), (32, 8))
    if dtype_of == 1:
        a, b = a.astype(ct.tfloat32), b.astype(ct.tfloat32)
    ct.store(out, (0, 0), ct.mma(a, b, ct.load(acc, (0, 0), (16, 8))))


@ct.kernel
def batched_product(x, y, out):
    a, b = ct.load(x, (0, 0, 0), (2, 16, 32)), ct.load(y, (0, 0), (32, 8))
    ct.store(out, (0, 0, 0), ct.mma(a, b, ct.zeros((2, 16, 8), ct.float32)))


@ct.kernel
def reductions(x, out):
    t = ct.load(x, (0, 0), (8, 16))
    ct.store(out, (0, 0), ct.sum(t, axis=0)[None])
    ct.store(out, (1, 0), ct.max(t, axis=0)[None])
    ct.store(out, (2, 0), ct.min(t, axis=0)[None])
    ct.store(out, (3, 0), ct.prod(t, axis=0)[None])
    ct.store(out, (4, 0), ct.reduce(t, 0, operator.add, 0.0)[None])
    ct.store(out, (5, 0), ct.broadcast_to(ct.sum(t), (1, 16)))


@ct.kernel
def narrow_sum(x, out, n: ct.Constant[int]):
    t = ct.load(x, (0,), (n,))
    ct.store(out, (0,), ct.sum(t))
    ct.store(out, (1,), ct.extract(ct.cumsum(t), (n - 1,), ()))


@ct.kernel
def scans(x, out):
    t = ct.load(x, (0, 0), (8, 16))
    ct.store(out, (0, 0, 0), ct.cumsum(t, axis=1)[None])
    ct.store(out, (1, 0, 0), ct.cumsum(t, axis=0, reverse=True)[None])
    ct.store(out, (2, 0, 0), ct.cumprod(t, axis=1)[None])
    ct.store(out, (3, 0, 0), ct.scan(t, 1, operator.add, 0.0)[None])
    ct.store(out, (4, 0, 0), ct.scan(t, 0, operator.add, 0.0, reverse=True)[None])


@ct.function
def then(a0, b0, a1, b1):
    """The affine map s -> a0 s + b0 followed by s -> a1 s + b1."""
    return a0 * a1, b0 * a1 + b1


@ct.kernel
def recurrence(a, b, out):
    decay, term = ct.load(a, (0,), (16,)), ct.load(b, (0,), (16,))
    ct.store(out, (0,), ct.scan((decay, term), 0, then, (1.0, 0.0))[1])
    ct.store(out, (16,), ct.reduce((decay, term), 0, then, (1.0, 0.0))[1])


@ct.kernel
def wrong_identity(b, out):
    ct.store(out, (0,), ct.scan(ct.load(b, (0,), (16,)), 0, operator.add, 1.0))


@ct.kernel
def moves(x, out):
    t = ct.load(x, (0, 0), (4, 8))
    ct.store(out, (0, 0), ct.permute(t, (1, 0)))
    ct.store(out, (0, 1), t.transpose())
    ct.store(out, (0, 2), t.reshape((8, 4)))
    left, right = ct.extract(t, (0, 0), (4, 4)), ct.extract(t, (0, 1), (4, 4))
    ct.store(out, (0, 3), ct.cat((left, right), 0))
    ct.store(out, (0, 4), t.insert((0, 1), left).reshape((8, 4)))


@ct.kernel
def small_block(x, b, out, n: ct.Constant[int]):
    """About what a block of an emitted kernel does, for its speed."""
    i = ct.bid(0)
    decay = ct.load(x, (i, 0), (1, n), padding_mode=ct.PaddingMode.ZERO).reshape((n,))
    tile = ct.load(b, (i, 0, 0), (1, n, n), padding_mode=ct.PaddingMode.ZERO).reshape((n, n))
    acc = ct.zeros((n, n), ct.float32)
    for _ in range(4):
        row = ct.arange(n, dtype=ct.int32)
        weight = ct.exp2(ct.where(row[:, None] >= row[None, :], decay[:, None] - decay[None, :], -1e30))
        acc = ct.mma(tile, tile.transpose(), acc) * weight
    ct.store(out, (i, 0, 0), acc[None].astype(out.dtype))
