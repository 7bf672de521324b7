"""The peers' own searches: replayed from what is recorded, narrowed, made again completely, and written down."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ssdgen.diagnostics import UserError
from ssdgen.run.bench.searches import TILEGYM, TileSearch, autotuners, distance, made, replay
from ssdgen.run.bench.shapes import Shape
from ssdgen.run.bench.winners import Search, Winners, read_winners, write_winners

A = Shape(4, 16384, 8, 1, 64, 128)
NEAR = Shape(4, 4096, 8, 1, 64, 128)
FAR = Shape(1, 131072, 64, 8, 64, 128)
OTHER_STATE = Shape(4, 16384, 8, 1, 64, 64)
SPACE = [SimpleNamespace(BLOCK_STATE=s, occupancy=o, LATENCY=3, H_LAT=3) for s in (32, 64, 128) for o in (1, 2)]
VERSIONS = {"gpu": "NVIDIA H200", "driver": "580"}


def real(configs: list[Any], *rest: Any, quiet: bool = False) -> Any:
    """As cuda.tile's: the last of the candidates wins, the first fails."""
    assert quiet
    found = [SimpleNamespace(config=c, mean_us=float(100 - i)) for i, c in enumerate(configs)]
    return SimpleNamespace(best=found[-1], successes=found[1:], failures=[(configs[0], ValueError, "no")])


def searched(search: TileSearch, shape: Shape = A, name: str = "compute_out_swap_kernel", chunk: int = 64) -> Any:
    kernel = SimpleNamespace(_pyfunc=SimpleNamespace(__name__=name))
    search.start(shape, chunk)
    return search(iter(SPACE), None, None, kernel, None, None).best.config


def recorded(shape: Shape, config: Any, chunk: int = 64, kernel: str = "compute_out_swap_kernel") -> Search:
    return Search(TILEGYM, kernel, (chunk, str(shape)), vars(config), True, (), VERSIONS)


def test_a_recorded_winner_is_taken_without_a_search() -> None:
    search = TileSearch(real, Winners((recorded(NEAR, SPACE[1]), recorded(A, SPACE[0]))))
    assert searched(search) is SPACE[0]
    assert (search.found, search.notes) == ([], [])


def test_the_nearest_shape_of_the_same_channels_stands_in() -> None:
    """And says so; another state size or chunk has other candidates."""
    search = TileSearch(real, Winners((recorded(FAR, SPACE[0]), recorded(NEAR, SPACE[1]))))
    assert searched(search) is SPACE[1]
    assert search.notes == [f"compute_out_swap_kernel as at {NEAR}"]
    for other in (recorded(OTHER_STATE, SPACE[0]), recorded(A, SPACE[0], chunk=128)):
        search = TileSearch(real, Winners((other,)))
        searched(search)
        assert "searched among what won" in search.notes[0]


def test_without_a_record_only_what_won_elsewhere_is_tried() -> None:
    search = TileSearch(real, Winners())
    assert vars(searched(search)) == {"BLOCK_STATE": 128, "occupancy": 2, "LATENCY": 3, "H_LAT": 3}
    (found,) = search.found
    assert len(found.log) == 2
    assert not found.complete


def test_a_search_again_tries_everything_and_is_logged() -> None:
    search = TileSearch(real, Winners((recorded(A, SPACE[0]),)), again=True)
    assert searched(search) is SPACE[-1]
    (found,) = search.found
    assert found.complete
    assert found.key == (64, str(A))
    assert found.winner == vars(SPACE[-1])
    assert len(found.log) == len(SPACE)
    assert found.log[-1] == (str(vars(SPACE[0])), None)


def test_parts_of_a_search_cover_it() -> None:
    """What parallel processes compile is all that the one that measures will try."""
    tried: list[Any] = []

    def note(configs: list[Any], *rest: Any, quiet: bool = False) -> Any:
        tried.extend(configs)
        return real(configs, quiet=quiet)

    for i in range(4):
        searched(TileSearch(note, Winners(), again=True, part=(i, 4)))
    assert sorted(map(id, tried)) == sorted(map(id, SPACE))


def test_distance() -> None:
    assert distance(A, str(A)) == 0
    assert 0 < distance(A, str(NEAR)) < distance(A, str(FAR)) < float("inf")
    assert distance(A, str(OTHER_STATE)) == float("inf")


@dataclass(frozen=True)
class Candidate:
    warps: int

    def all_kwargs(self) -> dict[str, int]:
        return {"BLOCK": 64, "num_warps": self.warps}


@dataclass
class Tuner:
    """An autotuner of Triton's: `cache` is filled by its search, `configs_timings` by the last one."""

    fn: Any
    configs: list[Candidate] = field(default_factory=lambda: [Candidate(2), Candidate(4)])
    cache: dict[tuple[Any, ...], Candidate] = field(default_factory=dict)
    configs_timings: dict[Candidate, Any] = field(default_factory=dict)


def package(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tuner]:
    import sys

    module: Any = ModuleType("peer_x.kernels")
    module.kernel, module.alias, module.number, module.other = tuner, tuner, 3, SimpleNamespace(cache={}, configs=())
    monkeypatch.setitem(sys.modules, "peer_x.kernels", module)
    return autotuners("peer_x")


@pytest.fixture
def tuner() -> Tuner:
    def kernel() -> None: ...

    return Tuner(SimpleNamespace(fn=kernel))


def test_tritons_winners_go_round(tuner: Tuner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Searched in one process, recorded, replayed in another: the dictionary is filled and nothing is searched."""
    tuners = package(tuner, monkeypatch)
    assert list(tuners.values()) == [tuner]
    tuner.cache[(128, 64, "torch.bfloat16", True)] = tuner.configs[1]
    tuner.configs_timings = {tuner.configs[0]: [0.02, 0.01, 0.03], tuner.configs[1]: float("inf")}
    (search,) = made(tuners, "peer", Winners())
    assert [us for _, us in search.log] == [20, None]
    write_winners(tmp_path / "w.json", Winners((search,)), VERSIONS)
    again = read_winners(tmp_path / "w.json", "NVIDIA H200")
    assert made(tuners, "peer", again) == []
    fresh = Tuner(tuner.fn)
    assert replay({search.kernel: fresh}, again, "peer") == 1
    assert fresh.cache == tuner.cache
    assert replay({search.kernel: Tuner(tuner.fn)}, again, "another peer") == 0


def test_a_file_keeps_what_is_known_of_other_gpus(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    write_winners(path, Winners((Search("p", "k", (1,), {"a": 1}, True),)), {"gpu": "B300"})
    write_winners(path, Winners((Search("p", "k", (1,), {"a": 2}, True),)), VERSIONS)
    assert [s.winner for s in read_winners(path, "B300").searches] == [{"a": 1}]
    assert [s.winner for s in read_winners(path, "NVIDIA H200").searches] == [{"a": 2}]
    assert read_winners(tmp_path / "none.json", "B300") == Winners()


def test_a_complete_search_is_not_replaced_by_a_narrow_one() -> None:
    complete, narrow = Search("p", "k", (1,), {"a": 1}, True), Search("p", "k", (1,), {"a": 2}, False)
    assert Winners((complete,)).with_all([narrow]).searches == (complete,)
    assert Winners((narrow,)).with_all([complete]).searches == (complete,)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": 1}', '{"format": 9, "searches": []}', json.dumps({"searches": 3})]
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "w.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"w\.json"):
        read_winners(path, "B300")


def test_a_key_that_is_no_json_is_written_as_text(tmp_path: Path) -> None:
    """Minutes of searching are not lost to an argument of a peer's kernel."""
    path = tmp_path / "w.json"
    write_winners(path, Winners((Search("p", "k", (1, Path("x")), {"a": 1}, True),)), VERSIONS)
    assert read_winners(path, "NVIDIA H200").searches[0].key == (1, "x")
