"""What the peers' own searches found, recorded, so that a run need not search again.

The JSON is one object: `{"format": 1, "searches": [Search, ...]}`. A search is one kernel of a peer on one GPU: what it was
searched for (`key`: a shape, or the arguments that Triton keys its search by), what won, every candidate with its
microseconds (null if it failed), and the versions it was found with.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ssdgen.diagnostics import UserError
from ssdgen.files import write

FORMAT = 1
Options = Mapping[str, Any]
"""A candidate: its options by name."""


@dataclass(frozen=True, slots=True)
class Search:
    """The outcome of one search. `complete`: every candidate of the peer's own space was tried."""

    peer: str
    kernel: str
    key: tuple[Any, ...]
    winner: Options
    complete: bool
    log: tuple[tuple[str, float | None], ...] = ()
    versions: Mapping[str, str] | None = None

    @property
    def place(self) -> tuple[str, str, tuple[Any, ...]]:
        """What tells it from other searches on the same GPU."""
        return self.peer, self.kernel, self.key


@dataclass(frozen=True, slots=True)
class Winners:
    """The searches known on one GPU; a later one of the same place replaces an earlier one."""

    searches: tuple[Search, ...] = ()

    def find(self, peer: str, kernel: str, key: Sequence[Any]) -> Search | None:
        """The search of exactly this."""
        return next((s for s in self.searches if s.place == (peer, kernel, tuple(key))), None)

    def of(self, peer: str) -> tuple[Search, ...]:
        """All searches of a peer."""
        return tuple(s for s in self.searches if s.peer == peer)

    def with_all(self, found: Iterable[Search]) -> Winners:
        """With `found` beside what was known; a complete search is not replaced by one that is not."""
        known = {s.place: s for s in self.searches}
        for search in found:
            old = known.get(search.place)
            if old is None or search.complete or not old.complete:
                known[search.place] = search
        return Winners(tuple(known.values()))


def read_winners(path: Path, gpu: str) -> Winners:
    """What is recorded in a file for `gpu`; nothing if there is no file. UserError for one that is something else."""
    if not path.exists():
        return Winners()
    return Winners(tuple(s for s in _searches(path) if (s.versions or {}).get("gpu") == gpu))


def write_winners(path: Path, winners: Winners, versions: Mapping[str, str]) -> None:
    """Record searches; those without versions get `versions`. What the file holds of other GPUs stays."""
    others = [s for s in _searches(path) if (s.versions or {}).get("gpu") != versions["gpu"]] if path.exists() else []
    mine = [s if s.versions else replace(s, versions=dict(versions)) for s in winners.searches]
    lines = ",\n".join(json.dumps(asdict(s), default=str) for s in (*others, *mine))
    write(path, f'{{"format": {FORMAT}, "searches": [\n{lines}\n]}}\n')


def _searches(path: Path) -> list[Search]:
    hint = "it is written by `ssdgen bench forward --search-peers`; name another with --winners"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise UserError(f"{path} records searches in format {data['format']}, not {FORMAT}", hint)
        return [_search(entry) for entry in data["searches"]]
    except OSError as error:
        raise UserError(f"cannot read {path}: {(error.strerror or str(error)).lower()}", hint) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} records no searches: {error}", hint) from error


def _search(entry: Mapping[str, Any]) -> Search:
    log = tuple((str(name), us) for name, us in entry["log"])
    key = tuple(entry["key"])
    return Search(entry["peer"], entry["kernel"], key, entry["winner"], entry["complete"], log, entry["versions"])
