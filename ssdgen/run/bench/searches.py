"""The searches that peers make by themselves: replayed from what is recorded, made again, and written down.

TileGym calls cuda.tile's `exhaustive_search` for each of its kernels; Triton's autotuners keep what won in a dictionary.
Neither is changed: the first gets another function to call, the second finds its dictionary filled.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from ssdgen.run.bench.shapes import Shape
from ssdgen.run.bench.winners import Search, Winners

TILEGYM = "TileGym"
WON: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "chunk_cumsum_kernel": {"occupancy": (4,)},
    "fwd_pass_state_kernel": {"SWAP": (False,), "BHT": (True,), "BLOCK_STATE": (16, 32), "BDD_LAT": (4,)},
    "compute_out_swap_kernel": {"BLOCK_STATE": (64, 128), "occupancy": (2,), "LATENCY": (3,), "H_LAT": (3, 4)},
    "compute_out_kernel": {"BLOCK_STATE": (32, 64), "occupancy": (1,), "H_LAT": (3,)},
}
"""What won in complete searches on an H200: all that is tried of a shape for which nothing is recorded."""


@dataclass
class TileSearch:
    """Stands in for `exhaustive_search` in TileGym's module.

    Takes what is recorded for `shape` and `chunk`, or for the nearest shape of the same channels; without that it searches
    among WON. With `again` it searches everything, or, with `part` (i, n), every n-th candidate from the i-th, which compiles
    them. `found` and `notes` say what it did.
    """

    real: Callable[..., Any]
    winners: Winners
    again: bool = False
    part: tuple[int, int] | None = None
    shape: Shape | None = None
    chunk: int = 64
    found: list[Search] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def start(self, shape: Shape, chunk: int) -> None:
        """What comes next is searched for this shape."""
        self.shape, self.chunk = shape, chunk
        self.notes.clear()

    def __call__(
        self, configs: Iterable[Any], stream: Any, grid: Any, kernel: Any, args: Any, hints: Any = None, **options: Any
    ) -> Any:
        """What `exhaustive_search` returns, or as much of it as TileGym reads."""
        assert self.shape is not None
        name, every = str(kernel._pyfunc.__name__), list(configs)
        if not self.again:
            known = self._recorded(name, every)
            if known is not None:
                return SimpleNamespace(best=SimpleNamespace(config=known))
        tried = self._candidates(name, every)
        result = self.real(tried, stream, grid, kernel, args, hints, **{**options, "quiet": True})
        log = [(str(vars(m.config)), float(m.mean_us)) for m in result.successes]
        failed = [(str(vars(config)), None) for config, *_ in result.failures]
        complete = len(tried) == len(every)
        key = (self.chunk, str(self.shape))
        self.found.append(Search(TILEGYM, name, key, vars(result.best.config), complete, (*log, *failed)))
        return result

    def _recorded(self, name: str, every: list[Any]) -> Any:
        assert self.shape is not None
        exact = self.winners.find(TILEGYM, name, (self.chunk, str(self.shape)))
        near = sorted(
            (s for s in self.winners.of(TILEGYM) if s.kernel == name and s.key[0] == self.chunk),
            key=lambda s: distance(self.shape, s.key[1]),
        )
        for search in (exact, *near):
            same = None if search is None else next((c for c in every if vars(c) == search.winner), None)
            if search is None or same is None or math.isinf(distance(self.shape, search.key[1])):
                continue
            if search is not exact:
                self.notes.append(f"{name} as at {search.key[1]}")
            return same
        return None

    def _candidates(self, name: str, every: list[Any]) -> list[Any]:
        if self.part is not None:
            return part_of(every, self.part)
        if self.again:
            return every
        few = [c for c in every if all(vars(c)[k] in v for k, v in WON.get(name, {}).items())]
        self.notes.append(f"{name} searched among what won at other shapes")
        return few or every


@dataclass(frozen=True, slots=True)
class PartSearch:
    """Stands in for `exhaustive_search` where only `part` (i, n) of the candidates is to be compiled."""

    real: Callable[..., Any]
    part: tuple[int, int]

    def __call__(self, configs: Iterable[Any], *arguments: Any, **options: Any) -> Any:
        """What `real` finds among every n-th candidate from the i-th."""
        return self.real(part_of(list(configs), self.part), *arguments, **options)


def part_of(every: list[Any], part: tuple[int, int]) -> list[Any]:
    """For `part` (i, n) every n-th candidate from the i-th, or the first of all if that is none: a call needs a winner."""
    first, step = part
    return every[first::step] or every[:1]


def search_part(kernels: Any, part: tuple[int, int]) -> None:
    """Make TileGym's module search only `part` of its candidates, whatever it searched in this process before."""
    before = kernels.exhaustive_search
    kernels.exhaustive_search = PartSearch(before.real if isinstance(before, PartSearch) else before, part)
    for found in [value for name, value in vars(kernels).items() if name.endswith("_tune_cache")]:
        found.clear()


def distance(shape: Shape | None, other: str) -> float:
    """How unlike two shapes are: infinite for other channels, else the sum of the factors between their lengths, in log2."""
    numbers = [int(word) for word in other.split(",")]
    if shape is None or (shape.p, shape.n) != tuple(numbers[4:]):
        return math.inf
    mine = (shape.b, shape.t, shape.h, shape.g)
    return sum(abs(math.log2(a / b)) for a, b in zip(mine, numbers, strict=False))


def autotuners(package: str) -> dict[str, Any]:
    """Triton's autotuners in the modules of a package that are loaded, by their kernels' names."""
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if module is not None and (name == package or name.startswith(f"{package}.")):
            for value in list(vars(module).values()):
                for tuner in _tuners(value):
                    found.setdefault(_kernel_name(tuner), tuner)
    return found


def _tuners(value: Any) -> Iterator[Any]:
    """`value` and what it wraps, as far as they are autotuners: dictionaries of what won, and configurations."""
    seen = 0
    while value is not None and seen < 8:
        if isinstance(getattr(value, "cache", None), dict) and isinstance(getattr(value, "configs", None), list):
            yield value
        value, seen = getattr(value, "fn", None), seen + 1


def _kernel_name(tuner: Any) -> str:
    fn = tuner.fn
    while hasattr(fn, "fn"):
        fn = fn.fn
    return f"{fn.__module__}.{fn.__name__}"


def replay(tuners: Mapping[str, Any], winners: Winners, peer: str) -> int:
    """Fill the autotuners with what is recorded for `peer`; how many searches that saves."""
    count = 0
    for search in winners.of(peer):
        tuner = tuners.get(search.kernel)
        config = None if tuner is None else next((c for c in tuner.configs if c.all_kwargs() == search.winner), None)
        if tuner is not None and config is not None:
            tuner.cache[tuple(search.key)] = config
            count += 1
    return count


def made(tuners: Mapping[str, Any], peer: str, known: Winners) -> list[Search]:
    """The searches that the autotuners have made beyond `known`; the times of candidates where Triton still has them."""
    out = []
    for kernel, tuner in tuners.items():
        new = [(k, c) for k, c in tuner.cache.items() if known.find(peer, kernel, k) is None]
        timings = getattr(tuner, "configs_timings", None) or {}
        log = tuple((str(config), _microseconds(time)) for config, time in timings.items()) if len(new) == 1 else ()
        out += [Search(peer, kernel, tuple(k), c.all_kwargs(), True, log) for k, c in new]
    return out


def _microseconds(time: Any) -> float | None:
    """Triton's milliseconds, one number or the median first."""
    milliseconds = float(time[0] if isinstance(time, list | tuple) else time)
    return 1000 * milliseconds if math.isfinite(milliseconds) else None
