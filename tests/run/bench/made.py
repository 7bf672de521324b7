"""Documents as a run would make them, from a model of time: for tests and for looking at the pictures."""

from __future__ import annotations

from dataclasses import replace

from ssdgen.run.bench.decode import SHAPES as DECODE_SHAPES
from ssdgen.run.bench.decode import STATE_DTYPES, moved_bytes
from ssdgen.run.bench.growth import AXES, BESIDE, bends, shapes_on
from ssdgen.run.bench.measure import figures
from ssdgen.run.bench.rows import (
    ATTENTION,
    DEFAULT,
    LOOP,
    OURS,
    Document,
    Environment,
    Row,
    Scale,
    Spread,
    Technique,
    means,
    ratios,
)
from ssdgen.run.bench.shapes import SHAPES, Shape

ENVIRONMENT = Environment(
    gpu="NVIDIA H200", multiprocessors=132, l2_bytes=60 << 20, driver="580.1", cuda="13.0", torch="2.11.0", triton="3.6.0",
    cuda_tile="1.7.0", python="3.12.3", date="2026-11-30", command="ssdgen bench forward --out DIR", bandwidth=4.3e12,
    matmul_flops=7.5e14, peers={"TileGym": "1.5.1"},
)  # fmt: skip

SPEED = {
    (OURS, DEFAULT): 2.6,
    (OURS, "three_kernel"): 7.0,
    ("TileGym", "chunk 64"): 5.6,
    ("mamba_ssm", "chunk 128"): 9.4,
    ("mamba_ssm", "chunk 256"): 8.6,
    ("fla", "simple_gla"): 7.9,
}
"""Times over that of the compulsory traffic."""


def row(shape: Shape, family: str, name: str, us: float, error: float = 1.7e-3, axis: str = "") -> Row:
    plain = Row(str(shape), family, name, error, error, 5e-3, sets=2, axis=axis)
    beside = replace(
        plain, eager_us=us + 20, host_us=80.0, extra_bytes=1000, extra_share={OURS: 0.17, "fla": 0.6}.get(family, 0.8)
    )
    if family == OURS:
        moved = shape.compulsory_bytes * 3 // 2
        beside = replace(beside, launched_bytes=moved, floor_us=1e6 * moved / ENVIRONMENT.bandwidth)
    return figures(beside.timed(Spread(us, 0.98 * us, 1.03 * us)), shape, ENVIRONMENT)


def time(shape: Shape, factor: float) -> float:
    """Microseconds: traffic, and a floor of launches and of GPUs that are not full."""
    work = 1e6 * shape.compulsory_bytes / ENVIRONMENT.bandwidth * factor * (shape.n / 128) ** (0.15 * (factor > 3))
    return work + 6 * factor


def forward() -> Document:
    rows = tuple(row(shape, family, name, time(shape, f)) for shape in SHAPES for (family, name), f in SPEED.items())
    found = ratios(rows, DEFAULT)
    return Document(
        "forward", ENVIRONMENT, "rotated", rows, found, means(found), tuple(scale(s) for s in SHAPES for s in [s])
    )


def scale(shape: Shape, axis: str = "") -> Scale:
    return Scale(str(shape), LOOP, 40.0 * shape.t, axis=axis)


def attention(shape: Shape, axis: str = "") -> Scale:
    return Scale(str(shape), ATTENTION, 8 + 4e-9 * shape.b * shape.h * shape.t**2 * shape.p / 2, axis=axis)


def growth() -> Document:
    rows = []
    beside = []
    for axis, lengths in AXES.items():
        for shape in shapes_on(axis, lengths):
            for (family, name), f in SPEED.items():
                if (family, name) == (OURS, DEFAULT) or (family in ("TileGym", "mamba_ssm") and axis in BESIDE):
                    rows.append(row(shape, family, name, time(shape, f), axis=axis))
            if axis == "t":
                beside += [scale(shape, axis), attention(shape, axis)]
    found = ratios(rows, DEFAULT)
    return Document(
        "growth", ENVIRONMENT, "rotated", tuple(rows), found, means(found), tuple(beside), bends=bends(rows, AXES)
    )


def ablation() -> Document:
    changes = {
        "best": 1.0, "latency hints off": 1.31, "operand swapping on": 1.08, "transposed layouts off": 1.12,
        "bf16 in intra": 0.97, "shared C.B on": None, "tuning off": 1.22,
    }  # fmt: skip
    techniques = tuple(
        Technique(
            str(shape), name, "a=1", 2e-3, None if worth is None else Spread(100 * worth, 99 * worth, 103 * worth), worth,
            1234567, "" if worth else "not available: no knob",
        )
        for shape in (SHAPES[0], SHAPES[4], SHAPES[6])
        for name, worth in changes.items()
    )  # fmt: skip
    return Document("ablation", ENVIRONMENT, "rotated", techniques=techniques)


def decode() -> Document:
    """Steps at two shapes, ours faster with states of bfloat16."""
    us = {("f32", OURS): 90.0, ("f32", "mamba_ssm"): 105.0, ("bf16", OURS): 50.0, ("bf16", "mamba_ssm"): 104.0}
    rows = []
    for shape in DECODE_SHAPES[:2]:
        for (dtype, family), time_us in us.items():
            plain = Row(f"{shape}, {dtype} state", family, DEFAULT, 1.7e-3, 1e-7, 5e-3)
            moved = moved_bytes(DECODE_SHAPES[2], STATE_DTYPES[dtype])
            timed = plain.timed(Spread(time_us, 0.98 * time_us, 1.03 * time_us))
            rows.append(replace(timed, bandwidth=1e6 * moved / time_us))
    found = ratios(rows, DEFAULT)
    scale = (Scale(str(DECODE_SHAPES[0]), "one step", 4.0, "0 bytes allocated by 100 steps"),)
    return Document("decode", ENVIRONMENT, "inputs rotated", tuple(rows), found, means(found), scale)
