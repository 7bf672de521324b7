"""Comparing with kernels that others wrote for a GPU: what they are given, and what is made of what they return.

The packages are stood in for by modules that compute the layer with its reference, so that no GPU is needed.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ssdgen.ir.report import Check
from ssdgen.run import peers
from ssdgen.run.checks import one_thread
from ssdgen.run.gpu_peers import APART, PARAMS, gpu_peer_checks, tilegym, tilegym_kernels
from ssdgen.run.inputs import Inputs
from ssdgen.run.reference import reference
from ssdgen.spec import load_source, read_layer

LAYER = read_layer(load_source("mamba2"))
MAMBA_SSM, TILEGYM = "mamba_ssm.ops.triton.ssd_combined", "tilegym.ops.cutile.mamba2"
Values = tuple[torch.Tensor, ...]


def truth(inputs: dict[str, torch.Tensor], params: dict[str, float], start: torch.Tensor) -> Values:
    """What the spec says, as kernels return it: y in bf16, the final state in f32."""
    given = {name: x for name, x in inputs.items() if x is not None}
    with one_thread():
        outputs, finals = reference(LAYER, given, params, {"S": start})
    return outputs["y"].bfloat16(), finals["S"].float()


def ours(**arguments: Any) -> Values:
    params = {name: arguments.pop(name) for name in PARAMS}
    return truth(arguments, params, arguments.pop("S0"))


@dataclass
class Others:
    """The stand-ins; what they return goes through `spoil`, what they were given is kept."""

    spoil: Callable[[torch.Tensor, torch.Tensor], Values] = lambda y, S: (y, S)
    seen: dict[str, Any] = field(default_factory=dict)

    def mamba_ssm(self, x: Any, dt: Any, A: Any, B: Any, C: Any, chunk_size: int, **named: Any) -> tuple[Any, ...]:
        self.seen["mamba_ssm"] = {"chunk_size": chunk_size, "x": x, **named}
        assert named["dt_softplus"]
        inputs = {"x": x, "dt": dt, "A": A, "B": B, "C": C} | {n: named[n] for n in ("D", "z", "dt_bias")}
        low, high = named["dt_limit"]
        y, S = self.spoil(*truth(inputs, {"dt_min": low, "dt_max": high}, named["initial_states"]))
        return y, None, dt, None, None, S

    def tilegym(self, x: Any, a: Any, b: Any, c: Any, d: Any, dt: Any, init_state: Any, chunk_size: int = 64) -> Values:
        self.seen["tilegym"] = {
            "x": x,
            "chunk_size": chunk_size,
            "d": d,
            "step": dt,
            "tuned": not os.environ.get(SEARCH),
        }
        raw = dt + torch.log(-torch.expm1(-dt))  # whose softplus it is
        inputs = {"x": x, "dt": raw, "A": a, "B": b, "C": c, "D": d}
        return self.spoil(*truth(inputs, {"dt_min": 0.0, "dt_max": math.inf}, init_state))


SEARCH = "TILEGYM_DISABLE_AUTOTUNE"


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Others:
    made = Others()
    kernels: Any = ModuleType(MAMBA_SSM)
    kernels._mamba_chunk_scan_combined_fwd = made.mamba_ssm
    monkeypatch.setitem(sys.modules, MAMBA_SSM, kernels)
    tiles: Any = ModuleType(TILEGYM)
    tiles.mamba2_chunk_forward = made.tilegym
    monkeypatch.setitem(sys.modules, TILEGYM, tiles)
    monkeypatch.delenv(SEARCH, raising=False)
    return made


def checks(forward: Callable[..., Values] = ours) -> dict[str, Check]:
    return {check.name: check for check in gpu_peer_checks(LAYER, forward, "cpu")}


def test_ours_beside_theirs(others: Others) -> None:
    """One line for y and one for the final state, the measured distance beside twice the bound of bf16."""
    made = checks()
    assert list(made) == ["mamba_ssm Triton: y", "mamba_ssm Triton: S", "TileGym cuTile: y", "TileGym cuTile: S"]
    assert all(c.passed and c.gate == "peer" and c.bound == APART == 0.01 for c in made.values())


def test_they_are_given_what_they_take(others: Others) -> None:
    """D of one number a head, bf16, an initial state; TileGym finished steps, a multiple of its chunk, and no search."""
    checks()
    scan, tiles = others.seen["mamba_ssm"], others.seen["tilegym"]
    assert scan["x"].dtype == tiles["x"].dtype == torch.bfloat16
    assert scan["D"].dim() == tiles["d"].dim() == 1
    assert scan["z"] is not None
    assert scan["initial_states"].abs().min() > 0
    assert PARAMS["dt_min"] <= tiles["step"].min() < tiles["step"].max() <= PARAMS["dt_max"]
    assert tiles["x"].shape[1] % tiles["chunk_size"] == 0
    assert not tiles["tuned"]
    assert SEARCH not in os.environ


@pytest.mark.parametrize(
    ("what", "value"),
    [("y", lambda y, S: (1.02 * y, S)), ("S", lambda y, S: (y, 1.02 * S)), ("y", lambda y, S: (y * math.nan, S))],
)
def test_a_difference_fails(others: Others, what: str, value: Callable[[torch.Tensor, torch.Tensor], Values]) -> None:
    others.spoil = value
    made = checks()
    assert {name for name, c in made.items() if not c.passed} == {
        f"mamba_ssm Triton: {what}",
        f"TileGym cuTile: {what}",
    }
    assert not any(c.skipped for c in made.values())


def test_ours_that_raises_fails(others: Others) -> None:
    def broken(**arguments: Any) -> Values:
        raise ValueError("x must have 4 dimensions")

    made = checks(broken)
    assert [(c.passed, c.skipped, c.note) for c in made.values()] == [
        (False, False, "ValueError: x must have 4 dimensions")
    ] * 2


def test_theirs_that_raises_is_skipped(others: Others) -> None:
    """Whatever stops code of others, their compiler's own exceptions included, is not our failure."""

    class CompilationError(Exception):
        pass

    def broken(y: torch.Tensor, S: torch.Tensor) -> Values:
        raise CompilationError("no such\n  architecture")

    others.spoil = broken
    assert [(c.skipped, c.note) for c in checks().values()] == [
        (True, "not compared: CompilationError: no such architecture")
    ] * 2


def test_a_package_that_is_missing_is_skipped(others: Others, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MAMBA_SSM, None)
    monkeypatch.setitem(sys.modules, TILEGYM, None)
    monkeypatch.setitem(sys.modules, "peers", None)
    made = checks()
    assert list(made) == ["mamba_ssm Triton", "TileGym cuTile"]
    assert all(c.skipped and c.note.startswith("not compared: ") for c in made.values())
    assert "mamba_ssm" in made["mamba_ssm Triton"].note
    assert "tilegym" in made["TileGym cuTile"].note


def test_kernels_without_their_package(others: Others, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module `peers` may offer TileGym's kernels where the package is not; one of that name that does not is no error."""
    kernels = sys.modules[TILEGYM]
    monkeypatch.setitem(sys.modules, TILEGYM, None)
    offering: Any = SimpleNamespace(tilegym=lambda quick: kernels)
    monkeypatch.setitem(sys.modules, "peers", offering)
    assert checks()["TileGym cuTile: y"].passed
    monkeypatch.setitem(sys.modules, "peers", ModuleType("peers"))
    assert checks()["TileGym cuTile"].skipped


def test_steps_are_made_once_for_an_input(others: Others) -> None:
    """So that timing them times the kernels; and an input that is gone does not lend its steps to another."""
    call, steps = tilegym(64), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        tensors = {"x": torch.randn(1, 64, 1, 2), "dt": torch.randn(1, 64, 1), "A": -torch.ones(1), "D": torch.ones(1)}
        tensors |= {name: torch.randn(1, 64, 1, 3) for name in ("B", "C")} | {"dt_bias": torch.zeros(1)}
        inputs = Inputs(tensors, {}, {})
        call(inputs)
        first = others.seen["tilegym"]["step"]
        call(inputs)
        assert others.seen["tilegym"]["step"] is first
        steps.append(first)
    assert torch.equal(steps[0], steps[1])
    assert not torch.equal(steps[1], steps[2])


@pytest.mark.parametrize(
    ("has_gpu", "allowed", "device"), [(True, True, "cuda"), (True, False, None), (False, True, None)]
)
def test_where_peers_run(monkeypatch: pytest.MonkeyPatch, has_gpu: bool, allowed: bool, device: str | None) -> None:
    """On the GPU where there is one, unless the CPU was asked for."""
    places: list[str | None] = []

    def note(layer: object, forward: object, place: str | None) -> Iterator[Check]:
        places.append(place)
        yield from ()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(peers, "gpu_peer_checks", note)
    monkeypatch.setattr(peers, "PEERS", {"mamba2": {}})
    assert list(peers.peer_checks(LAYER, ours, allowed)) == []
    assert places == [device]


def test_without_a_gpu_the_report_says_so() -> None:
    made = list(gpu_peer_checks(LAYER, ours, None))
    assert [(c.name, c.skipped, c.note) for c in made] == [
        ("mamba_ssm Triton", True, "not compared: it needs a CUDA device"),
        ("TileGym cuTile", True, "not compared: it needs a CUDA device"),
    ]
    assert list(gpu_peer_checks(read_layer(load_source("retnet")), ours, None)) == []


def test_a_narrow_search_is_never_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is left of what TileGym would search, all of that is searched: a peer without a time is no comparison."""

    def module(few: dict[int, list[str]]) -> ModuleType:
        made = ModuleType("kernels")
        vars(made)["_compute_autotune_configs"] = lambda state_size: few[state_size]
        return made

    narrow, whole = module({64: [], 128: ["a"]}), module({64: ["a", "b"], 128: ["a", "b"]})
    monkeypatch.setitem(sys.modules, TILEGYM, None)
    monkeypatch.setitem(sys.modules, "peers", SimpleNamespace(tilegym=lambda quick: narrow if quick else whole))
    kernels = tilegym_kernels(quick=True)
    assert kernels._compute_autotune_configs(state_size=128) == ["a"]
    assert kernels._compute_autotune_configs(state_size=64) == ["a", "b"]
