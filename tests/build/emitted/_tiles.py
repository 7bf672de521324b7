"""Device helpers, as an emitted package has them beside its modules."""

from __future__ import annotations

import cuda.tile as ct


@ct.function
def dot(a: ct.Tile, b: ct.Tile, acc: ct.Tile) -> ct.Tile:
    return ct.mma(a.astype(ct.bfloat16), b.astype(ct.bfloat16), acc)


@ct.function
def wrong(a: ct.Tile) -> ct.Tile:
    return ct.mma(a, a.astype(ct.float16), a)
