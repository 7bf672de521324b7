"""Kernels as the emitter writes them, with the marks of a spec that does not exist."""

from __future__ import annotations

import cuda.tile as ct

from ._tiles import dot, wrong


@ct.kernel
def gram(x: ct.Array, y: ct.Array, L: ct.Constant[int]) -> None:
    acc = ct.full((L, L), 0.0, ct.float32)
    for i in range(ct.cdiv(x.shape[1], L)):
        a = ct.load(x, index=(ct.bid(0), i), shape=(L, L))
        acc = dot(a, ct.transpose(a), acc)
    ct.store(y, index=(ct.bid(0), 0), tile=acc)


@ct.kernel
def scale(x: ct.Array, y: ct.Array, factor: float, L: ct.Constant[int]) -> None:
    # layer.ssd:7
    a = ct.load(x, index=(ct.bid(0), 0), shape=(L, L))
    ct.store(y, index=(ct.bid(0), 0), tile=(a * factor).astype(y.dtype))


@ct.kernel
def narrows(x: ct.Array, y: ct.Array, L: ct.Constant[int]) -> None:
    # layer.ssd:12
    a = ct.load(x, index=(ct.bid(0), 0), shape=(L, L))

    # layer.ssd:21 in the block of the step
    wide = a.astype(ct.float64)
    ct.store(y, index=(ct.bid(0), 0), tile=wide)
    # layer.ssd:30
    ct.store(y, index=(ct.bid(0), 1), tile=a)


@ct.kernel
def calls_wrong(x: ct.Array, y: ct.Array, L: ct.Constant[int]) -> None:
    a = ct.load(x, index=(ct.bid(0), 0), shape=(L, L))
    ct.store(y, index=(ct.bid(0), 0), tile=wrong(a))  # layer.ssd:40


@ct.kernel
def unmarked(x: ct.Array, y: ct.Array, L: ct.Constant[int]) -> None:
    ct.store(y, index=(ct.bid(0),), tile=ct.load(x, index=(0, 0), shape=(L, L)))


@ct.kernel
def too_big(x: ct.Array, y: ct.Array, L: ct.Constant[int]) -> None:
    # layer.ssd:50
    a = ct.full((8192, 4096), 0.0, ct.float32)
    # layer.ssd:51
    ct.store(y, index=(ct.bid(0), 0), tile=a)
