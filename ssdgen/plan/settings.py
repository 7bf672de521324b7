"""`--config KEY=VALUE`: a point of a schedule in words. The keys are those of the emitted Config and the structural knobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, TypeVar

from ssdgen.diagnostics import UserError
from ssdgen.ir.chunkform import ChunkForm
from ssdgen.ir.expr import Axes
from ssdgen.ir.plan import Config, Plan
from ssdgen.ir.schedule import ALLOWED, KERNELS, PERSISTENT, PLANS, PRECISIONS, PRODUCTS, SIDES
from ssdgen.plan.config import default_config
from ssdgen.plan.decays import scalar_names
from ssdgen.plan.plans import ONE_WAVE
from ssdgen.plan.tokens import stored_scalars

HEAD_TILES = (2, 4, 8, 16, 32, 64, 128, 256)
YES_NO = ("no", "yes")
NO_PRODUCT = "none"

W = TypeVar("W", bound=str)
V = TypeVar("V")
Setter = Callable[[Config, str], Config]


def configure(form: ChunkForm, settings: Mapping[str, str]) -> Config:
    """The default configuration of `form` with `settings` (`chunk`: `128`, `intra`: `bf16`, `swap`: `intra,state`) applied.

    A precision goes for every input dtype. Raises UserError for a key that this form does not have, a value no kernel takes,
    and knobs that exclude each other.
    """
    config = default_config(form)
    setters = _setters(form, config)
    for key, value in settings.items():
        if key not in setters:
            near = get_close_matches(key, setters, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"its knobs are {', '.join(setters)}"
            raise UserError(f"{form.recurrence.layer.name} has no knob `{key}`", hint)
        config = setters[key](config, value)
    if config.persistent and config.plan != PERSISTENT:
        hint = f"{ONE_WAVE}; choose persistent=no or plan={PERSISTENT}"
        raise UserError(f"plan={config.plan} does not go with persistent=yes", hint)
    return config


def structure(config: Config) -> dict[str, str]:
    """The knobs that change the text of a module, each with its value as `configure` takes it, in a fixed order."""
    words = {
        "plan": config.plan,
        "swap": ",".join(p for p in PRODUCTS if p in config.swap) or NO_PRODUCT,
        "weighted": config.weighted,
        "persistent": YES_NO[config.persistent],
    }
    words |= {f"layout_{name}": ",".join(axes) for name, axes in sorted(config.layouts)}
    return words | {f"internal_{name}": ",".join(axes) for name, axes in sorted(config.internals)}


def check_used(plan: Plan, settings: Mapping[str, str]) -> None:
    """UserError for a numeric knob among `settings` that no kernel of `plan` has: it would change nothing."""
    fields = {knob.name for knob in plan.knobs} | set(structure(plan.config))
    for key in settings:
        if not plan.refused and key not in fields:
            raise UserError(
                f"no kernel of plan={plan.config.plan} has the knob `{key}`", f"it has {', '.join(sorted(fields))}"
            )


def variant(config: Config) -> str:
    """`structure(config)` in one line: which of the texts of a spec a module is."""
    return " ".join(f"{key}={value}" for key, value in structure(config).items())


def _setters(form: ChunkForm, config: Config) -> dict[str, Setter]:
    layer = form.recurrence.layer
    setters: dict[str, Setter] = {
        "plan": lambda c, v: replace(c, plan=_word("plan", v, PLANS)),
        "swap": lambda c, v: replace(c, swap=() if v == NO_PRODUCT else _set("swap", v, PRODUCTS)),
        "weighted": lambda c, v: replace(c, weighted=_word("weighted", v, SIDES)),
        "persistent": lambda c, v: replace(c, persistent=_word("persistent", v, YES_NO) == "yes"),
        "chunk": lambda c, v: replace(c, chunk=_number("chunk", v, ALLOWED["chunk"])),
        "segments": lambda c, v: replace(c, segments=_number("segments", v, ALLOWED["segments"])),
        "share_scores_from": lambda c, v: replace(
            c, share_scores_from=_number("share_scores_from", v, ALLOWED["share_scores_from"])
        ),
    }
    for axis, _ in config.tile:
        setters[f"tile_{axis}"] = _number_of("tile", axis, HEAD_TILES if axis == layer.head else ALLOWED["tile"])
    for axis, _ in config.state_tile:
        setters[f"state_tile_{axis}"] = _number_of("state_tile", axis, ALLOWED["tile"])
    for product in PRODUCTS:
        setters[product] = _precision(product)
    arrays = {t.name: t.axes for t in layer.inputs} | {o.name: o.axes for o in layer.outputs}
    for name in (*arrays, *(s.name for s in layer.states), "scores"):
        setters[f"latency_{name}"] = _number_of("latency", name, ALLOWED["latency"])
        setters[f"state_latency_{name}"] = _number_of("state_latency", name, ALLOWED["latency"])
    for role in KERNELS:
        setters[f"occupancy_{role}"] = _number_of("occupancy", role, ALLOWED["occupancy"])
        setters[f"warps_{role}"] = _number_of("warps", role, ALLOWED["warps"])
    for name, axes in arrays.items():
        setters[f"layout_{name}"] = _order("layout", "layouts", name, axes)
    for name in dict.fromkeys(n for scalar in stored_scalars(form) for n in scalar_names(form, scalar)):
        setters[f"internal_{name}"] = _order("internal", "internals", name, (layer.batch, layer.time, layer.head))
    return setters


def _number_of(knob: str, name: str, allowed: range | tuple[int, ...]) -> Setter:
    """The setter of a knob that has a number for each of several names."""

    def put(config: Config, value: str) -> Config:
        changed: Any = {knob: _put(getattr(config, knob), name, _number(f"{knob}_{name}", value, allowed))}
        return replace(config, **changed)

    return put


def _order(knob: str, field: str, name: str, axes: Axes) -> Setter:
    """The setter of an order of axes, `layout_x=b,h,t,p`."""

    def put(config: Config, value: str) -> Config:
        order = tuple(word.strip() for word in value.split(","))
        if sorted(order) != sorted(axes):
            hint = f"its axes are {','.join(axes)}, in any order, each once"
            raise UserError(f"--config {knob}_{name}={value} is no order of its axes", hint)
        changed: Any = {field: _put(getattr(config, field), name, order)}
        return replace(config, **changed)

    return put


def _precision(product: str) -> Setter:
    def put(config: Config, value: str) -> Config:
        chosen = _word(product, value, PRECISIONS)
        return replace(
            config, precision=tuple((d, p, chosen if p == product else old) for d, p, old in config.precision)
        )

    return put


def _put(pairs: Iterable[tuple[str, V]], name: str, value: V) -> tuple[tuple[str, V], ...]:
    return tuple((dict(pairs) | {name: value}).items())


def _number(key: str, text: str, allowed: range | tuple[int, ...]) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) not in allowed:
        shown = f"{allowed[0]} to {allowed[-1]}" if isinstance(allowed, range) else ", ".join(map(str, allowed))
        raise UserError(f"--config {key}={text} is none of the values a kernel takes", f"{key} is one of {shown}")
    return int(text)


def _word(key: str, text: str, allowed: tuple[W, ...]) -> W:
    for word in allowed:
        if word == text:
            return word
    raise UserError(
        f"--config {key}={text} is none of the values a kernel takes", f"{key} is one of {', '.join(allowed)}"
    )


def _set(key: str, text: str, allowed: tuple[W, ...]) -> tuple[W, ...]:
    """Some of the allowed words, in their order."""
    words = [_word(key, word.strip(), allowed) for word in text.split(",")]
    return tuple(word for word in allowed if word in words)
