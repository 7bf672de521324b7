"""The search of gradient kernels: its space, what a candidate is measured on, and that calls find what was found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ssdgen.emit.support._tuned import GRADIENTS, parse
from ssdgen.run.checks import one_thread
from ssdgen.run.inputs import Case, draw
from ssdgen.run.recorded import gradients_of, record_gradients
from ssdgen.run.tune.device import H200, assumed
from ssdgen.run.tune.prune import Estimate, estimated
from ssdgen.run.tune.search import Found, Measured
from ssdgen.run.tune.space import Candidate, GradientSpace
from ssdgen.run.tune.table import add
from ssdgen.run.tune.tune import _call as call_of
from ssdgen.run.tune.tune import _case, entries_of, preview
from ssdgen.run.tune.worker import CANCELS, Setup, Task, Timed, _call, distances
from ssdgen.run.verify import emulated
from tests.run.tune.conftest import SIZES, form_of


@pytest.fixture
def space(emitted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GradientSpace:
    monkeypatch.setenv("SSDGEN_CACHE_DIR", str(tmp_path))
    return GradientSpace(form_of("mamba2"), "bf16", SIZES, emitted)


def test_its_space_is_the_config_of_the_gradients(space: GradientSpace) -> None:
    """Every field but precisions moves, no structural knob does, and no chunk is shorter than calls are known to bear."""
    default = space.default(Candidate())
    moved = space.numeric(Candidate())
    assert set(moved) == {name for name, value in vars(default).items() if isinstance(value, int)}
    assert all(getattr(default, name) == values[0] for name, values in moved.items())
    assert moved["chunk"] == (64, 128)
    assert space.structural == {}
    assert next(iter(moved)) == "segments"


def test_a_preview_needs_no_gpu(space: GradientSpace) -> None:
    p = preview(space.form, SIZES, gradients=True, only=["latency", "shares"])
    assert p.considered == len(p.candidates) + len(p.removed)
    first = p.candidates[0]
    assert first.candidate == Candidate()
    assert {launch.request.kernel for launch in first.launches} >= {"entry_states", "chunk_gradients"}
    names = {name for e in p.candidates for name, _ in e.candidate.fields}
    assert names == {"latency_x", "latency_B", "latency_C", "latency_d_y", "latency_S", "shares"}


def test_a_candidate_is_held_to_the_defaults_gradients(space: GradientSpace) -> None:
    """Of every input that is there, also of those that are sums over tokens, whose bound is wider."""
    layer = space.form.recurrence.layer
    case = Case({**SIZES, "b": 1, "t": 70, "h": 2, "p": 32, "n": 32}, "f32", absent=frozenset({"z", "S0"}))
    module = space.variant(Candidate()).module
    file, inputs = str(module.__file__), draw(layer, case)
    with one_thread(), emulated(module):
        found = []
        for chunk in (64, 128):
            call, bounds = _call(Task(file, (("chunk", chunk),)), Setup(layer, case, file, gradients=True), inputs)
            found.append(call())
    places = [i.name for i in module.LAYER.inputs if i.name != "z"]
    assert len(found[0]) == len(bounds) == len(places)
    sums = {name for name, bound in zip(places, bounds, strict=True) if bound == pytest.approx(2e-3 * CANCELS)}
    assert sums == {"A", "D", "dt_bias"}
    errors = distances(found[1], found[0])
    assert all(error <= bound for error, bound in zip(errors, bounds, strict=True))
    assert max(errors) > 0, "another chunk rounds otherwise"


def test_what_was_found_is_what_runs(space: GradientSpace, tmp_path: Path) -> None:
    """The entry is one of gradients: a differentiated call takes it, and no other call does."""
    layer = space.form.recurrence.layer
    case = _case(layer, SIZES, "bf16", ())
    call = call_of(layer, case, "bf16")
    module = space.variant(Candidate()).module
    measured = []
    for candidate, us in ((Candidate(), 10.0), (Candidate(fields=(("warps_chunk_gradients", 4),)), 9.0)):
        estimate = estimated(space, candidate, call, H200)
        assert isinstance(estimate, Estimate)
        measured.append(Measured(candidate, Timed(us, 0.1, 0.0, 0.0), estimate))
    found = Found(default=measured[0], measured=measured)
    (entry,) = entries_of(space, case, H200, found)
    assert entry.key.present == (GRADIENTS,)
    add(tmp_path / "tuned_mamba2.json", [entry])
    assert parse((tmp_path / "tuned_mamba2.json").read_text()) == (entry,)

    def warps(config: object = None) -> set[tuple[tuple[str, int], ...]]:
        with assumed(module, H200):
            launches = record_gradients(module, call, config, finals=False)
        return {launch.request.hints for launch in launches if launch.request.kernel == "chunk_gradients"}

    default = gradients_of(module).CONFIGS[torch.bfloat16]
    assert warps() == warps(replace(default, warps_chunk_gradients=4)) != warps(default)


def test_a_spec_whose_gradients_have_no_kernels(space: GradientSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = SimpleNamespace(refused="", gradients=SimpleNamespace(refused="a read of the state before a token"))
    assert space._refused(refused) == "a read of the state before a token"  # type: ignore[arg-type]
