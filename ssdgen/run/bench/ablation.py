"""`ssdgen bench ablation`: the best configuration with one technique taken away at a time, timed in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from ssdgen.diagnostics import UserError
from ssdgen.ir.chunkform import ChunkForm
from ssdgen.ir.plan import Config
from ssdgen.plan.settings import configure
from ssdgen.run.bench.conflicts import Conflicts
from ssdgen.run.bench.forward import WARM_SHARE, Effort, Progress
from ssdgen.run.bench.measure import FLUSHING, Meter, measure
from ssdgen.run.bench.others import Contender
from ssdgen.run.bench.ours import call_of, load_module, write_module
from ssdgen.run.bench.rows import OURS, Document, Environment, Row, Technique
from ssdgen.run.bench.shapes import SHAPES, Shape
from ssdgen.run.bench.truth import input_sets, mamba2_truth, of_call
from ssdgen.run.bench.warm import Setting, our_jobs, warm

ABLATED = (SHAPES[0], SHAPES[4], SHAPES[6])
"""Long and narrow, short and wide, long and wide."""
BEST = "best"
LEAST_LATENCY = "1"
SWAPPED = "carried,intra"
"""The products whose operands hand-written kernels swap."""
SECONDS = 8.0
Settings = Mapping[str, str]
Maker = Callable[[ChunkForm, Settings], tuple[Settings, Config]]
"""Settings and the configuration that they give with a technique taken away."""


@dataclass(frozen=True, slots=True)
class Way:
    """A technique taken away: its name, the settings that differ, and the folder of the module; or why there is none."""

    name: str
    settings: str
    folder: str = ""
    note: str = ""


def ways(form: ChunkForm, best: Settings) -> list[Way]:
    """The best configuration and each way to take something from it, emitted. UserError if `best` itself is not right."""
    config = configure(form, best)
    out = [Way(BEST, text(best), str(write_module(form, config)))]
    for name, make in makers(config).items():
        try:
            settings, changed = make(form, best)
        except UserError as error:
            out.append(Way(name, "", note=f"not available: {error.message}"))
            continue
        if changed == config:
            out.append(Way(name, text(settings), note="not available: the best configuration is that"))
        else:
            out.append(Way(name, text(settings), str(write_module(form, changed))))
    return out


def makers(best: Config) -> dict[str, Maker]:
    """By name, how to take each technique from `best`; what it does not use is added instead, to see what that costs."""
    intra = next(p for d, product, p in best.precision if (d, product) == ("bf16", "intra"))
    return {
        "latency hints off": _latency_off,
        f"operand swapping {'off' if best.swap else 'on'}": _swap,
        "transposed layouts off": _transposed_off,
        "TF32 in intra" if intra == "bf16" else "bf16 in intra": partial(
            _set, "intra", "tf32" if intra == "bf16" else "bf16"
        ),
        f"shared C.B {'off' if best.share_scores_from else 'on'}": _shared,
        "tuning off": _untuned,
    }


def _set(key: str, value: str, form: ChunkForm, best: Settings) -> tuple[Settings, Config]:
    settings = {**best, key: value}
    return {key: value}, configure(form, settings)


def _latency_off(form: ChunkForm, best: Settings) -> tuple[Settings, Config]:
    """Every load as if it had to arrive at once."""
    config = configure(form, best)
    off = {f"latency_{name}": LEAST_LATENCY for name, _ in config.latency}
    off |= {f"state_latency_{name}": LEAST_LATENCY for name, _ in config.state_latency}
    return off, configure(form, {**best, **off})


def _swap(form: ChunkForm, best: Settings) -> tuple[Settings, Config]:
    """Without swapping, or with SWAPPED if `best` has none."""
    return _set("swap", "none" if configure(form, best).swap else SWAPPED, form, best)


def _shared(form: ChunkForm, best: Settings) -> tuple[Settings, Config]:
    """The scores of each head its own, or those of a group shared however few its heads if `best` shares none."""
    config = configure(form, best)
    heads = 0 if config.share_scores_from else 1
    return {"share_scores_from": str(heads)}, replace(config, share_scores_from=heads)


def _transposed_off(form: ChunkForm, best: Settings) -> tuple[Settings, Config]:
    """Per-token scalars stored as they come, heads innermost."""
    layer = form.recurrence.layer
    plain = (layer.batch, layer.time, layer.head)
    names = [let.name for let in layer.lets]
    config = replace(configure(form, best), internals=tuple((name, plain) for name in names))
    return {f"internal {name}": " ".join(plain) for name in names}, config


def _untuned(form: ChunkForm, best: Settings) -> tuple[Settings, Config]:
    """The spec's first choices, in the same plan."""
    settings = {"plan": configure(form, best).plan}
    return settings, configure(form, settings)


def text(settings: Settings) -> str:
    """Settings in one line."""
    return " ".join(f"{key}={value}" for key, value in settings.items()) or "as the spec has it"


def ablation(
    form: ChunkForm,
    best: Callable[[Shape], Settings],
    shapes: Sequence[Shape],
    meter: Meter,
    environment: Environment,
    effort: Effort,
    conflicts: Callable[[Sequence[Shape], Mapping[str, Sequence[str]]], Conflicts],
    *,
    device: str = "cuda",
    progress: Progress = lambda done, total, what: None,
    save: Callable[[Document], None] = lambda document: None,
    clock: Callable[[], float] = time.monotonic,
) -> Document:
    """The document of a run. `best` are the settings that a shape is fastest with; `conflicts` reads bank conflicts of the
    modules in folders, by shape, when all has been timed.
    """
    end = clock() + effort.seconds
    found = {shape: ways(form, best(shape)) for shape in shapes}
    notes: list[str] = []
    if device == "cuda":
        jobs = [
            job
            for shape, several in found.items()
            for job in our_jobs([shape], [w.folder for w in several if w.folder], tuned=False)
        ]
        setting = Setting({}, "", environment.gpu, again=False)
        seconds = WARM_SHARE * effort.seconds
        notes += warm(jobs, setting, effort.workers, seconds, lambda i, w: progress(i, len(jobs), w))
    document = Document("ablation", environment, FLUSHING)
    techniques: list[Technique] = []
    for number, shape in enumerate(shapes):
        progress(number, len(shapes), str(shape))
        if clock() > end:
            notes.append(f"{shape} is not measured: the time was up")
            continue
        sets = input_sets(form.recurrence.layer, shape, device, environment.l2_bytes)
        contenders = [_contender(way, shape, found[shape][0]) for way in found[shape] if way.folder]
        rows = measure(shape, contenders, sets, meter, environment, effort.rounds, SECONDS, brief=True)
        techniques += worth(found[shape], rows)
        document = replace(document, techniques=tuple(techniques), notes=tuple(notes))
        save(document)
        del sets, contenders
        if device == "cuda":
            torch.cuda.empty_cache()
    read = conflicts(shapes, {str(shape): [w.folder for w in found[shape] if w.folder] for shape in shapes})
    notes += [read.note] if read.note else []
    counted = {(str(s), w.name): read.of(str(s), w.folder) for s in shapes for w in found[s]}
    with_counts = tuple(replace(t, conflicts=counted.get((t.shape, t.technique))) for t in techniques)
    return replace(document, techniques=with_counts, notes=tuple(notes))


def _contender(way: Way, shape: Shape, best: Way) -> Contender:
    module = load_module(Path(way.folder), "mamba2")
    truth = partial(mamba2_truth, load_module(Path(best.folder), "mamba2"), shape)
    call = call_of(module, tuned=False)
    return Contender(OURS, way.name, call, "mamba2", truth, lambda r: of_call(shape, r[0], r[1]))


def worth(several: Sequence[Way], rows: Sequence[Row]) -> list[Technique]:
    """What each way makes of the best one's time, in the order of `several`."""
    by_name = {row.name: row for row in rows}
    shape = rows[0].shape if rows else ""
    best = by_name[BEST].graph_us if BEST in by_name else None
    out = []
    for way in several:
        row = by_name.get(way.name)
        if row is None:
            out.append(Technique(shape, way.name, way.settings, None, None, None, note=way.note))
            continue
        ratio = row.graph_us.median / best.median if row.graph_us and best else None
        out.append(Technique(shape, way.name, way.settings, row.error, row.graph_us, ratio, note=row.note))
    return out
