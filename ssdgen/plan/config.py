"""The default point of a schedule, and the fields that a module's Config has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from ssdgen.ir.chunkform import ChunkForm
from ssdgen.ir.plan import Config, Knob
from ssdgen.ir.schedule import KERNELS, PRODUCTS, Precision, Product, Schedule

DTYPES: tuple[Literal["bf16", "f16", "f32"], ...] = ("bf16", "f16", "f32")

TILE_MIN = 32
TILE_MAX_DEFAULT = 64
TILE_HEADS = 8


def tile_for(size: int | None) -> int:
    """The default tile of an axis: the power of two that holds `size`, between 32 and 64."""
    tile = TILE_MIN
    while tile < min(size or TILE_MAX_DEFAULT, TILE_MAX_DEFAULT):
        tile *= 2
    return tile


def default_config(form: ChunkForm) -> Config:
    """The first alternative of every knob; a tile that is not declared follows from the declared size of its axis."""
    layer = form.recurrence.layer
    schedule = layer.schedule
    channel_axes = dict.fromkeys(a for s in form.states for a in (s.row_axis, s.column_axis) if a is not None)
    tiles = {layer.head: TILE_HEADS} | {a: tile_for(layer.size(a)) for a in channel_axes}
    tiles |= {c.name: c.values[0] for c in schedule.tile}
    state_tiles = {a: tile_for(layer.size(a)) for a in channel_axes}
    state_tiles |= {c.name: c.values[0] for c in schedule.state_tile}
    return Config(
        plan=schedule.plan[0],
        layouts=tuple((x.name, x.axes) for x in schedule.layouts),
        internals=tuple((x.name, x.axes) for x in schedule.internals),
        swap=schedule.swap,
        weighted=schedule.weighted[0],
        persistent=schedule.persistent[0],
        chunk=schedule.chunk[0],
        tile=tuple(tiles.items()),
        state_tile=tuple(state_tiles.items()),
        latency=tuple((c.name, c.values[0]) for c in schedule.latency),
        state_latency=tuple((c.name, c.values[0]) for c in schedule.state_latency),
        occupancy=tuple((c.name, c.values[0]) for c in schedule.occupancy),
        warps=tuple((c.name, c.values[0]) for c in schedule.warps),
        share_scores_from=schedule.share_scores_from[0],
        segments=schedule.segments[0],
        precision=tuple((d, p, precision_of(schedule, d, p)) for d in DTYPES for p in PRODUCTS),
    )


def precision_of(schedule: Schedule, dtype: str, product: Product) -> Precision:
    """The default precision of a product for inputs of a dtype."""
    for choice in schedule.mma:
        if (choice.dtype, choice.product) == (dtype, product):
            return choice.precisions[0]
    return "bf16" if dtype == "bf16" else "tf32"


def knobs(config: Config, products: tuple[Product, ...], roles: Mapping[str, str]) -> tuple[Knob, ...]:
    """The fields of the emitted Config: what kernels of this form really take, in a fixed order.

    `roles` are the names of the kernels of each role that there is.
    """
    every = tuple(DTYPES)
    out = [Knob("chunk", "tokens a chunk", tuple((d, config.chunk) for d in every))]
    out += [Knob(f"tile_{a}", f"tile of axis {a}", tuple((d, size) for d in every)) for a, size in config.tile]
    for axis, size in config.state_tile:
        doc = f"tile of axis {axis} of a state that walks the chunks"
        out.append(Knob(f"state_tile_{axis}", doc, tuple((d, size) for d in every)))
    for product in products:
        values = {d: p for d, q, p in config.precision if q == product}
        out.append(Knob(product, f"operands of the `{product}` product", tuple(values.items()), "precision"))
    out += [Knob(f"latency_{n}", f"latency hint of {n}", tuple((d, v) for d in every)) for n, v in config.latency]
    for name, value in config.state_latency:
        doc = f"latency hint of {name} where a state walks the chunks"
        out.append(Knob(f"state_latency_{name}", doc, tuple((d, value) for d in every)))
    doc = "heads a group from which they share the `scores` product, 0 for never"
    out.append(Knob("share_scores_from", doc, tuple((d, config.share_scores_from) for d in every)))
    doc = "pieces of a sequence that are walked at once, 0 to let the size of the GPU choose"
    out.append(Knob("segments", doc, tuple((d, config.segments) for d in every)))
    hints = (
        ("occupancy", config.occupancy, "blocks of {} a multiprocessor, 0 to let the compiler choose"),
        ("warps", config.warps, "worker warps of a block of {}, 0 to let the compiler choose"),
    )
    for hint, declared, doc in hints:
        for role in KERNELS:
            if role in roles:
                value = dict(declared).get(role, 0)
                out.append(Knob(f"{hint}_{role}", doc.format(roles[role]), tuple((d, value) for d in every), "hint"))
    return tuple(out)
