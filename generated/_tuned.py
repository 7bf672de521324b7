"""The tuning table at run time: which Config a call runs with if its caller names none.

A measured one where a table has the call's key, else what a few rules make of the default. Tables are JSON files called
`tuned_*.json`: those in the user's cache folder win over those that lie beside this file. A table that cannot be read, or
of another format, is left out with one warning, and so is what an entry says that no Config takes.

Copied verbatim beside the modules that ssdgen emits; it imports nothing of ssdgen.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

FORMAT = 1
"""The format of a table; a table of another one is left out."""

GRADIENTS = "gradients"
"""What the key of a call has among its modes where it is its gradients that are computed."""

MOST_MEMOISED = 4096
"""Calls (by exact sizes) whose Config is kept; a process that makes more of them starts again."""

ConfigType = TypeVar("ConfigType")


class Layer(Protocol):
    """What is used here of an emitted module's LAYER: the names of its axes, and of its groups {axis: shared by}."""

    @property
    def name(self) -> str: ...
    @property
    def batch(self) -> str: ...
    @property
    def time(self) -> str: ...
    @property
    def head(self) -> str: ...
    @property
    def groups(self) -> Mapping[str, str]: ...


@dataclass(frozen=True)
class Shape:
    """What of a call's sizes a Config depends on: `walks` are batch x heads, `per_group` the heads that share an input,
    `channels` every other axis with its length.
    """

    walks: int
    tokens: int
    per_group: int
    channels: tuple[tuple[str, int], ...]

    @property
    def text(self) -> str:
        """The class of the shape, for a key: walks to the nearest half power of two, tokens to the nearest power, the
        rest exactly (tiles depend on it). One tuned shape stands for its class.
        """
        walks, tokens = _nearest(self.walks, 2), _nearest(self.tokens, 1)
        sizes = " ".join(f"{axis}={size}" for axis, size in self.channels)
        return f"walks={walks} tokens={tokens} per_group={self.per_group} {sizes}".rstrip()


def _nearest(size: int, steps: int) -> int:
    """The power of two, or with `steps` of the `steps`-th root of two, that is nearest to `size` in log space."""
    return round(2 ** (round(steps * math.log2(size)) / steps)) if size > 0 else 0


def shape_of(layer: Layer, size: Mapping[str, int]) -> Shape:
    """The shape of a call from the length of every axis."""
    heads = size.get(layer.head, 1)
    groups = [size[g] for g, shared in layer.groups.items() if shared == layer.head and g in size]
    known = {layer.batch, layer.time, layer.head, *layer.groups, "<sequence>"}
    channels = tuple(sorted((axis, length) for axis, length in size.items() if axis not in known))
    walks = size.get(layer.batch, 1) * heads
    return Shape(walks, size.get(layer.time, 1), heads // max(1, max(groups, default=heads)), channels)


@dataclass(frozen=True)
class Key:
    """What a tuned Config holds for, every field of it: another GPU, compiler, dtype or variant is another key."""

    digest: str
    variant: str
    present: tuple[str, ...]
    gpu: str
    cuda_tile: str
    dtypes: tuple[str, ...]
    shape: str


@dataclass(frozen=True)
class Entry:
    """A line of a table: the fields of the best Config found for a key, and what was measured with it."""

    key: Key
    config: Mapping[str, int | str]
    measured: Mapping[str, Any] = field(default_factory=dict)


class TableError(ValueError):
    """A table, or an entry of one, that cannot be used; the message says why."""


def parse(text: str) -> tuple[Entry, ...]:
    """The entries of a table's text. Raises TableError for what is no table of this format."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TableError(f"it is no JSON ({error})") from error
    if not isinstance(data, dict) or "format" not in data:
        raise TableError("it is no tuning table")
    if data["format"] != FORMAT:
        raise TableError(f"it has format {data['format']!r}, read here is {FORMAT}")
    entries = data.get("entries")
    if not isinstance(entries, list):
        raise TableError("it has no list of entries")
    return tuple(_entry(entry, number) for number, entry in enumerate(entries, 1))


def _entry(data: Any, number: int) -> Entry:
    try:
        given = dict(data["key"])
        parts = {f.name: given.pop(f.name) for f in fields(Key)}
        lists = {name: tuple(parts[name]) for name in ("present", "dtypes")}
        config, measured = dict(data["config"]), dict(data.get("measured", {}))
    except (KeyError, TypeError, ValueError) as error:
        raise TableError(f"entry {number} lacks a part ({type(error).__name__}: {error})") from error
    words = [v for name, v in parts.items() if name not in lists] + [*lists["present"], *lists["dtypes"], *config]
    if given or not all(isinstance(word, str) for word in words):
        raise TableError(f"entry {number} has a key of another form")
    return Entry(Key(**{**parts, **lists}), config, measured)


def to_text(entries: Sequence[Entry]) -> str:
    """The text of a table, one entry a key (the last one given), in a fixed order so that versions can be compared."""
    by_key = {entry.key: entry for entry in entries}

    def plain(entry: Entry) -> dict[str, Any]:
        key = {f.name: getattr(entry.key, f.name) for f in fields(Key)}
        return {"key": key, "config": dict(entry.config), "measured": dict(entry.measured)}

    ordered = sorted(by_key.values(), key=lambda entry: repr(entry.key))
    return json.dumps({"format": FORMAT, "entries": [plain(entry) for entry in ordered]}, indent=1) + "\n"


def user_folder() -> Path:
    """Where a user's tables are, as ssdgen's other caches: `SSDGEN_CACHE_DIR`, else `ssdgen` in the user's cache folder."""
    if chosen := os.environ.get("SSDGEN_CACHE_DIR"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path(os.path.expanduser("~")) / ".cache") / "ssdgen"


def shipped_folder() -> Path:
    """Where the tables that came with the modules are."""
    return Path(__file__).resolve().parent


@functools.cache
def _tables() -> dict[Key, tuple[Entry, Path]]:
    """Every entry of every table with its file, the user's last so that they win."""
    found: dict[Key, tuple[Entry, Path]] = {}
    for folder in (shipped_folder(), user_folder()):
        for path in sorted(folder.glob("tuned_*.json")):
            try:
                entries = parse(path.read_text(encoding="utf-8"))
            except (TableError, OSError, UnicodeDecodeError) as error:
                _warn(path, f"the tuning table is left out: {error}")
                continue
            found |= {entry.key: (entry, path) for entry in entries}
    return found


@functools.cache
def _warn(path: Path, what: str) -> None:
    """Warn of `what`, once in a process."""
    warnings.warn(f"{path}: {what}", RuntimeWarning, stacklevel=2)


_EDITION = 0


def edition() -> int:
    """How many times tables were forgotten: a Config that was chosen holds for one edition."""
    return _EDITION


def forget() -> None:
    """Read the tables again at the next call: for who has written one."""
    global _EDITION
    _EDITION += 1
    _tables.cache_clear()
    _MEMO.clear()


@dataclass(frozen=True)
class Gpu:
    """What of a GPU a Config depends on."""

    name: str
    multiprocessors: int


_ASSUMED: ContextVar[Gpu | None] = ContextVar("ssdgen_assumed_gpu", default=None)
_SEGMENTS: ContextVar[int] = ContextVar("ssdgen_assumed_segments", default=0)


def gpu_of(x: Tensor) -> Gpu | None:
    """The GPU that `x` is on; on the CPU the one that is assumed, or none, as in what torch.compile traces."""
    if x.is_cuda:
        return _gpu(x.get_device())
    return None if torch.compiler.is_compiling() else _ASSUMED.get()


@functools.cache
def _gpu(device: int) -> Gpu:
    properties = torch.cuda.get_device_properties(device)
    return Gpu(properties.name, int(properties.multi_processor_count))


@contextmanager
def assumed(gpu: Gpu, segments: int = 0) -> Iterator[None]:
    """Within it, calls on CPU tensors are configured and cut as on `gpu`, unless `segments` is 0 into so many segments: for
    compiling ahead of time what it will launch."""
    tokens = _ASSUMED.set(gpu), _SEGMENTS.set(segments)
    try:
        yield
    finally:
        _ASSUMED.reset(tokens[0])
        _SEGMENTS.reset(tokens[1])


@functools.cache
def compiler_version() -> str:
    """The version of cuda-tile; empty where it is not installed."""
    try:
        return importlib.metadata.version("cuda-tile")
    except importlib.metadata.PackageNotFoundError:
        return ""


def dtype_names(dtypes: Sequence[torch.dtype]) -> tuple[str, ...]:
    """The dtypes of a call, as keys have them."""
    return tuple(str(dtype).removeprefix("torch.") for dtype in dtypes)


_MEMO: dict[tuple[Any, ...], Any] = {}


def chosen(
    layer: Layer,
    config: ConfigType | None,
    defaults: Mapping[torch.dtype, ConfigType],
    *,
    digest: str,
    variant: str,
    present: tuple[str, ...],
    size: Mapping[str, int],
    dtypes: tuple[torch.dtype, ...],
    x: Tensor,
    rules: Sequence[Rule] | None = None,
) -> ConfigType:
    """The configuration of a call: the caller's, else a tuned one, else the default as `heuristic` changes it by RULES, or by
    `rules`.

    `digest` is the spec's and `variant` the structural knobs that the module was emitted with; `present` are the optional
    inputs (and modes) of the call, `size` the length of every axis, `dtypes` those of the inputs that may differ, the
    leading one's first. Off the GPU it is the default itself, so that what is emulated or portable depends on no machine.
    Raises TypeError for a `config` that is no Config.
    """
    if config is not None:
        kind = type(defaults[torch.float32])
        if not isinstance(config, kind):
            given = type(config).__name__
            raise TypeError(f"{layer.name}: `config` must be a {layer.name}.{kind.__name__}, got {given}")
        return config
    device = x.get_device()
    call = (digest, variant, present, dtypes, device, *size.values())
    found: ConfigType | None = _MEMO.get(call)
    if found is None:
        default = defaults.get(dtypes[0], defaults[torch.float32])
        gpu = gpu_of(x)
        if gpu is None:
            return default
        shape = shape_of(layer, size)
        key = Key(digest, variant, present, gpu.name, compiler_version(), dtype_names(dtypes), shape.text)
        found = tuned(key, default) or heuristic(default, shape, gpu.multiprocessors, RULES if rules is None else rules)
        if x.is_cuda:
            if len(_MEMO) >= MOST_MEMOISED:
                _MEMO.clear()
            _MEMO[call] = found
        elif _SEGMENTS.get() and hasattr(found, "segments"):
            found = replace(found, segments=_SEGMENTS.get())  # type: ignore[type-var]
    return found


def present(optional: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of what is given and not None: optional inputs of a call, and its modes."""
    return tuple([name for name, value in optional.items() if value is not None])


def tuned(key: Key, default: ConfigType) -> ConfigType | None:
    """What the tables have for `key`, with the fields of `default` where they say nothing; None if it has nothing."""
    hit = _tables().get(key)
    if hit is None:
        return None
    entry, path = hit
    known = {f.name for f in fields(default)}  # type: ignore[arg-type]
    unknown = sorted(set(entry.config) - known)
    if unknown:
        _warn(path, f"no Config of this module has {', '.join(unknown)}; that is left out ({entry.key.shape})")
    try:
        return _changed(default, {name: value for name, value in entry.config.items() if name in known})
    except (TypeError, ValueError) as error:
        _warn(path, f"an entry is left out ({entry.key.shape}): {error}")
        return None


def _changed(config: ConfigType, values: Mapping[str, Any]) -> ConfigType:
    return replace(config, **values)  # type: ignore[type-var]


@dataclass(frozen=True)
class Rule:
    """A field's value where nothing was measured.

    `value` gets the default's value, the shape and the number of multiprocessors; `name` may end with `*`, which stands
    for an axis whose length it then gets as well (None if the call has no such axis). A rule with `beside` is for modules
    whose Config has that field too.
    """

    name: str
    value: Callable[[Any, Shape, int, int | None], Any]
    reason: str
    beside: str = ""


def _no_longer(value: int, axis: int | None) -> int:
    """A tile of at most the power of two that holds `axis`, 32 at least."""
    return value if axis is None else min(value, max(32, 1 << max(0, axis - 1).bit_length()))


def _widest(shape: Shape) -> int:
    """The longest axis of heads' channels and states."""
    return max((length for _, length in shape.channels), default=1)


def _sharing(shape: Shape) -> int:
    """Heads a group from which they share scores that are not long: where an axis is at most 32 those are made faster than they
    are read."""
    return 4 if min((length for _, length in shape.channels), default=1) > 32 else 16


def _if_shared(shape: Shape, then: int, otherwise: int | None) -> int | None:
    """What fits heads that share scores, and those that do not."""
    return then if shape.per_group >= _sharing(shape) else otherwise


def _by_width(value: Any, shape: Shape, *, narrow: Any = None, middle: Any = None, wide: Any = None) -> Any:
    """What fits the longest axis: at most 64, between, or more than 128; `value` for None."""
    found = narrow if _widest(shape) <= 64 else wide if _widest(shape) > 128 else middle
    return value if found is None else found


def _walked(name: str, value: Callable[[Any, Shape], Any], reason: str) -> Rule:
    """A rule for the plan whose walks of segments were timed on an H200, in bf16."""
    return Rule(name, lambda v, s, sms, axis: value(v, s), reason, beside="segments")


RULES: tuple[Rule, ...] = (
    Rule("tile_*", lambda v, s, sms, axis: _no_longer(v, axis), "a tile longer than its axis computes padding"),
    Rule("state_tile_*", lambda v, s, sms, axis: _no_longer(v, axis), "a tile longer than its axis computes padding"),
    _walked(
        "share_scores_from",
        lambda v, s: _by_width(v, s, narrow=v and max(v, _sharing(s)), wide=0),
        "long scores take longer to read than to make: unshared 253 us instead of 304 at 4,16384,8,1,64,256; and so do short"
        " ones of few columns: 76 instead of 95 at 4,16384,8,1,64,32, but of 64 columns, with the next three, 95 instead of 90",
    ),
    _walked(
        "latency_x",
        lambda v, s: _by_width(v, s, narrow=_if_shared(s, 4, 5), wide=8),
        "with the next two 201 us instead of 251 at 4,16384,8,1,64,256; where short scores are shared 111 instead of 118 at"
        " 1,24576,32,1,64,64 and 122 instead of 127 at 6,2048,48,1,64,64",
    ),
    _walked(
        "latency_B",
        lambda v, s: _by_width(v, s, narrow=_if_shared(s, 1, 4), middle=_if_shared(s, 1, None), wide=4),
        "see latency_x; at 128 columns 79.0 us instead of 80.0 at 8,2048,24,1,64,128, elsewhere within 0.6 %",
    ),
    _walked("latency_C", lambda v, s: _by_width(v, s, narrow=_if_shared(s, 2, 4), wide=3), "see latency_x"),
    _walked(
        "state_latency_x", lambda v, s: _by_width(v, s, wide=1), "with the next 1.4 % at five shapes of 256 columns"
    ),
    _walked("state_latency_B", lambda v, s: _by_width(v, s, wide=1), "see state_latency_x"),
)
"""Each rule changes one field, or one for each axis; later ones see what earlier ones made of the default. A field that a
module's Config lacks is no error: one list serves all modules."""


def heuristic(default: ConfigType, shape: Shape, sms: int, rules: Sequence[Rule] = RULES) -> ConfigType:
    """`default` with what `rules` say for a shape on a GPU of `sms` multiprocessors. `segments` = 0 stays: the launch
    chooses it.
    """
    values = {f.name: getattr(default, f.name) for f in fields(default)}  # type: ignore[arg-type]
    axes = dict(shape.channels)
    for rule in rules:
        if rule.beside and rule.beside not in values:
            continue
        stem = rule.name.removesuffix("*")
        names = [rule.name] if stem == rule.name else [f"{stem}{axis}" for axis in axes]
        for name in names:
            if name in values:
                values[name] = rule.value(values[name], shape, sms, axes.get(name.removeprefix(stem)))
    return _changed(default, values)
