"""Every knob of a form, with the values that are worth trying: what a search goes through, and what `configure` takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from ssdgen.ir.chunkform import ChunkForm
from ssdgen.ir.plan import Knob, Plan
from ssdgen.ir.schedule import PLANS, PRECISIONS, PRODUCTS, SIDES, PlanName
from ssdgen.plan.plans import plan
from ssdgen.plan.settings import NO_PRODUCT, YES_NO, configure, structure

TRIED: dict[str, tuple[int, ...]] = {
    "chunk": (32, 64, 128),
    "share_scores_from": (0, 1),
    "shares": (0, 1, 2, 4, 8),
    "occupancy": (0, 1, 2, 3, 4),
    "warps": (0, 4, 8),
    "state_tile": (32, 64, 128, 256),
    "tile": (32, 64, 128, 256),
    "segments": (0, 1, 2, 4, 8, 16, 32, 64),
    "latency": (1, 2, 3, 4, 5, 6, 8),
    "state_latency": (1, 2, 3, 4, 5, 6, 8),
}
"""The numbers worth trying of a knob, or of all knobs `KNOB_NAME`."""

ORDER = (
    "segments",
    "share_scores_from",
    "latency",
    "state_latency",
    "occupancy_compute_out",
    "occupancy_fwd_pass_state",
    "occupancy_group_scores",
    "state_tile",
    "chunk",
    "occupancy",
    "warps",
    "tile",
)
"""The knobs by how much they changed the time on an H200, those that matter most first; `latency` are all `latency_NAME`. A
search that runs out of time has tried the first ones."""

GRADIENT_ORDER = (
    "segments",
    "shares",
    "latency",
    "state_latency",
    "warps_chunk_gradients",
    "state_tile",
    "occupancy",
    "warps",
    "tile",
    "chunk",
)
"""The same of the kernels of gradients, those first of which most of the time is known to depend."""

HEAD_TILES = (2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class SpaceKnob:
    """A knob, called and with values as `--config` has them: the declared alternatives first, the default the first of all.

    A `structural` one changes the text of a module. The others are fields of the emitted Config, of some plans perhaps:
    `numeric` ones change nothing but the time, `accuracy` ones the rounding of a product.
    """

    name: str
    kind: Literal["structural", "numeric", "accuracy"]
    values: tuple[str, ...]


def knob_space(form: ChunkForm) -> tuple[SpaceKnob, ...]:
    """Every knob of `form`, the numeric ones in `ORDER`; none if no plan has kernels for it. Not every combination is
    possible: `configure` raises UserError for one that is not."""
    plans = {name: plan(form, configure(form, {"plan": name, "persistent": "no"})) for name in PLANS}
    possible = {name: made for name, made in plans.items() if not made.refused}
    if not possible:
        return ()
    fields = {knob.name: knob for made in possible.values() for knob in made.knobs}
    numeric = sorted((k for k in fields.values() if k.kind != "precision"), key=lambda k: _rank(k.name))
    return (
        *_structural(form, possible),
        *(SpaceKnob(k.name, "numeric", _numbers(form, k)) for k in numeric),
        *(SpaceKnob(k.name, "accuracy", _precisions(form, k)) for k in fields.values() if k.kind == "precision"),
    )


def gradient_space(plan: Plan) -> tuple[SpaceKnob, ...]:
    """Every knob of the kernels of a plan's gradients, which have no structural ones; none if there are no kernels. A chunk is
    not shorter than the default's, by whose entry states calls are known to be within reach of int32."""
    gradients = plan.gradients
    if gradients is None or gradients.refused:
        return ()
    head, out = plan.form.recurrence.layer.head, []
    for knob in sorted(gradients.plan.knobs, key=lambda k: _rank(k.name, GRADIENT_ORDER)):
        defaults = tuple(map(str, dict(knob.defaults).values()))
        if knob.kind == "precision":
            out.append(SpaceKnob(knob.name, "accuracy", _first(defaults, PRECISIONS)))
            continue
        kind, name = _split(knob.name)
        tried = HEAD_TILES if (kind, name) == ("tile", head) else TRIED[kind]
        least = int(defaults[0]) if kind == "chunk" else 0
        out.append(SpaceKnob(knob.name, "numeric", _first(defaults, (str(n) for n in tried if n >= least))))
    return tuple(out)


def _structural(form: ChunkForm, possible: Mapping[PlanName, Plan]) -> Iterable[SpaceKnob]:
    layer = form.recurrence.layer
    schedule, default = layer.schedule, structure(configure(form, {}))
    subsets = (",".join(s) or NO_PRODUCT for n in range(len(PRODUCTS) + 1) for s in combinations(PRODUCTS, n))
    declared = [name for name in schedule.plan if name in possible]
    yield SpaceKnob("plan", "structural", _first(declared, possible))
    yield SpaceKnob("swap", "structural", _first([default["swap"]], subsets))
    yield SpaceKnob("weighted", "structural", _first(schedule.weighted, SIDES))
    yield SpaceKnob("persistent", "structural", _first((YES_NO[p] for p in schedule.persistent), YES_NO))
    batch, time, head = layer.batch, layer.time, layer.head
    orders = [",".join(order) for order in ((batch, head, time), (batch, time, head), (head, batch, time))]
    for key, value in default.items():
        if key.startswith("layout_"):  # what callers pass is theirs to choose
            yield SpaceKnob(key, "structural", (value,))
        elif key.startswith("internal_"):
            yield SpaceKnob(key, "structural", _first([value], orders))


def _numbers(form: ChunkForm, knob: Knob) -> tuple[str, ...]:
    schedule = form.recurrence.layer.schedule
    kind, name = _split(knob.name)
    declared = getattr(schedule, kind)
    if name:
        declared = next((choice.values for choice in declared if choice.name == name), ())
    tried = HEAD_TILES if (kind, name) == ("tile", form.recurrence.layer.head) else TRIED[kind]
    return _first(map(str, (*declared, *dict(knob.defaults).values())), map(str, tried))


def _precisions(form: ChunkForm, knob: Knob) -> tuple[str, ...]:
    declared = (p for m in form.recurrence.layer.schedule.mma if m.product == knob.name for p in m.precisions)
    return _first(declared, PRECISIONS)


def _rank(field: str, order: tuple[str, ...] = ORDER) -> int:
    named = (i for i, name in enumerate(order) if field == name or field.startswith(f"{name}_"))
    return next(named, len(order))


def _split(field: str) -> tuple[str, str]:
    """A field of Config as the knob that it belongs to and the name it is for: (`tile`, `n`), or (`chunk`, ``)."""
    if field in TRIED:
        return field, ""
    kind = next(k for k in TRIED if field.startswith(f"{k}_"))
    return kind, field.removeprefix(f"{kind}_")


def _first(declared: Iterable[str], others: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*declared, *others)))
