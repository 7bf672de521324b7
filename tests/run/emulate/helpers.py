"""Device functions that kernels of another module use."""

from __future__ import annotations

import cuda.tile as ct


@ct.function
def square(t):
    return t * t


def plain_square(t):
    return t * t


@ct.function
def adds_wrong_shape(t):
    return t + ct.zeros((4,), ct.float32)
