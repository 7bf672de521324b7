"""`--config KEY=VALUE`: a point of a schedule in words. The keys are those of the emitted Config, plus `swap` and `plan`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import TypeVar

from ssdgen.diagnostics import UserError
from ssdgen.ir.chunkform import ChunkForm
from ssdgen.ir.plan import Config
from ssdgen.ir.schedule import KERNELS, PLANS, PRECISIONS, PRODUCTS
from ssdgen.plan.config import default_config

LATENCIES = range(1, 11)
OCCUPANCIES = range(1, 33)
CHUNKS = (16, 32, 64, 128, 256)
TILES = (32, 64, 128, 256)

W = TypeVar("W", bound=str)
Setter = Callable[[Config, str], Config]


def configure(form: ChunkForm, settings: Mapping[str, str]) -> Config:
    """The default configuration of `form` with `settings` (`chunk`: `128`, `intra`: `bf16`, `swap`: `intra,state`) applied.

    A precision goes for every input dtype. Raises UserError for a key that this form does not have or a value no kernel takes.
    """
    config = default_config(form)
    setters = _setters(form, config)
    for key, value in settings.items():
        if key not in setters:
            near = get_close_matches(key, setters, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"its knobs are {', '.join(setters)}"
            raise UserError(f"{form.recurrence.layer.name} has no knob `{key}`", hint)
        config = setters[key](config, value)
    return config


def _setters(form: ChunkForm, config: Config) -> dict[str, Setter]:
    layer = form.recurrence.layer
    setters: dict[str, Setter] = {
        "chunk": lambda c, v: replace(c, chunk=_number("chunk", v, CHUNKS)),
        "plan": lambda c, v: replace(c, plan=_word("plan", v, PLANS)),
        "swap": lambda c, v: replace(c, swap=tuple(_word("swap", w, PRODUCTS) for w in v.split(",") if w != "none")),
    }
    for axis, _ in config.tile:
        setters[f"tile_{axis}"] = _tile(axis)
    for axis, _ in config.state_tile:
        setters[f"state_tile_{axis}"] = _state_tile(axis)
    for product in PRODUCTS:
        setters[product] = _precision(product)
    for name in (*(t.name for t in layer.inputs), *(s.name for s in layer.states), *(o.name for o in layer.outputs)):
        setters[f"latency_{name}"] = _latency(name)
        setters[f"state_latency_{name}"] = _state_latency(name)
    for role in KERNELS:
        setters[f"occupancy_{role}"] = _occupancy(role)
    return setters


def _tile(axis: str) -> Setter:
    return lambda c, v: replace(c, tile=_put(c.tile, axis, _number(f"tile_{axis}", v, TILES)))


def _state_tile(axis: str) -> Setter:
    return lambda c, v: replace(c, state_tile=_put(c.state_tile, axis, _number(f"state_tile_{axis}", v, TILES)))


def _latency(name: str) -> Setter:
    return lambda c, v: replace(c, latency=_put(c.latency, name, _number(f"latency_{name}", v, LATENCIES)))


def _state_latency(name: str) -> Setter:
    key = f"state_latency_{name}"
    return lambda c, v: replace(c, state_latency=_put(c.state_latency, name, _number(key, v, LATENCIES)))


def _occupancy(role: str) -> Setter:
    return lambda c, v: replace(c, occupancy=_put(c.occupancy, role, _number(f"occupancy_{role}", v, OCCUPANCIES)))


def _precision(product: str) -> Setter:
    def put(config: Config, value: str) -> Config:
        chosen = _word(product, value, PRECISIONS)
        return replace(
            config, precision=tuple((d, p, chosen if p == product else old) for d, p, old in config.precision)
        )

    return put


def _put(pairs: tuple[tuple[str, int], ...], name: str, value: int) -> tuple[tuple[str, int], ...]:
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
