"""From a search to a call: what is written into the table is what an emitted module then runs with."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from ssdgen import pipeline
from ssdgen.diagnostics import UserError
from ssdgen.ir.build import ConstantArg
from ssdgen.run.load import kept, load_file
from ssdgen.run.recorded import Call, record
from ssdgen.run.tune import preview, tune
from ssdgen.run.tune.device import H200, assumed
from ssdgen.run.tune.search import Found, Measured
from ssdgen.run.tune.space import Candidate, Space
from ssdgen.run.tune.table import add, user_table
from ssdgen.run.tune.tune import _case, entries_of
from ssdgen.run.tune.worker import Timed
from tests.run.tune.conftest import SIZES, form_of


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An emitted module whose host code asks the tables, in a folder of its own, with an empty user's folder."""
    monkeypatch.setenv("SSDGEN_CACHE_DIR", str(tmp_path / "cache"))
    source = pipeline.emit(pipeline.plan(form_of("mamba2"), {}))
    return load_file(kept(tmp_path, source))


def chunk(module: ModuleType, sizes: dict[str, int], present: tuple[str, ...] = ()) -> int:
    """The chunk of the kernels that a call on an H200 would launch."""
    with assumed(module, H200):
        launches = record(module, Call(sizes, "bf16", present), None)
    constants = (a for launch in launches for a in launch.request.signature if isinstance(a, ConstantArg))
    (value,) = {int(a.value) for a in constants if a.name == "CHUNK"}
    return value


def found(space: Space, *results: tuple[Candidate, float]) -> Found:
    measured = [Measured(c, Timed(us, 0.0, 0.0, 0.0), None) for c, us in results]  # type: ignore[arg-type]
    return Found(default=measured[0], measured=measured)


def test_what_was_found_is_what_runs(module: ModuleType) -> None:
    assert chunk(module, SIZES) == 64
    form = form_of("mamba2")
    space = Space(form, "bf16", SIZES, Path(str(module.__file__)).parent)
    case = _case(form.recurrence.layer, SIZES, "bf16", ())
    results = found(space, (Candidate(), 100.0), (Candidate(fields=(("chunk", 128),)), 80.0))
    entries = entries_of(space, case, H200, results)
    (entry,) = entries
    assert entry.config["chunk"] == 128
    assert "intra" not in entry.config, "a precision is the user's"
    assert entry.measured["default_microseconds"] == 100.0
    if getattr(space.variant(Candidate()).module, "VARIANT", None) is None:
        assert entry.key.variant == "plan=segmented"
    add(user_table("mamba2"), entries)
    assert chunk(module, SIZES) == 128
    assert chunk(module, {**SIZES, "t": 4000}) == 128, "of the same class"
    assert chunk(module, {**SIZES, "t": 16384}) == 64
    assert chunk(module, SIZES, ("z",)) == 64


def test_each_variant_that_was_searched_gets_its_best(space: Space) -> None:
    case = _case(space.form.recurrence.layer, SIZES, "bf16", ())
    other, little = Candidate((("plan", "single_walk"),)), Candidate((("plan", "three_kernel"),))
    results = found(
        space, (Candidate(), 100.0), (other, 60.0), (other.moved("chunk", 128, False), 50.0), (little, 90.0)
    )
    entries = {e.key.variant.split()[0]: e for e in entries_of(space, case, H200, results)}
    assert set(entries) == {"plan=segmented", "plan=single_walk"}, "of the third too little was measured"
    assert entries["plan=single_walk"].config["chunk"] == 128


def test_a_precision_that_was_searched_is_kept(space: Space, tmp_path: Path) -> None:
    case = _case(space.form.recurrence.layer, SIZES, "bf16", ())
    narrow = Space(space.form, "bf16", SIZES, tmp_path, ["intra"])
    results = found(narrow, (Candidate(), 100.0), (Candidate(fields=(("intra", "tf32x3"),)), 80.0))
    (entry,) = entries_of(narrow, case, H200, results)
    assert entry.config["intra"] == "tf32x3"
    assert not {"scores", "carried", "state"} & set(entry.config), "those are the user's"


def test_a_preview_needs_no_gpu_and_counts_everything(space: Space) -> None:
    p = preview(space.form, {"b": 4, "t": 16384, "h": 8})
    assert p.considered == len(p.candidates) + len(p.removed)
    assert p.points > 10**9
    assert p.candidates[0].candidate == Candidate()
    assert {r.step for r in p.removed} >= {"computes padding", "no kernels"}
    assert any("does not go with persistent=yes" in r.why for r in p.removed)
    published = {"plan": "three_kernel", "persistent": "yes"}
    assert published in [dict(e.candidate.structure) for e in p.candidates]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(space: Space) -> None:
    with pytest.raises(UserError, match="no CUDA device here") as caught:
        tune(space.form, [{"b": 4, "t": 16384, "h": 8}])
    assert "--dry-run" in caught.value.hint


def test_wrong_wishes_are_told() -> None:
    layer = form_of("mamba2").recurrence.layer
    with pytest.raises(UserError, match="has no optional input `w`"):
        _case(layer, SIZES, "bf16", ["w"])
    with pytest.raises(UserError, match="has no kernels to tune"):
        preview(form_of("gla"), {a.name: 64 for a in form_of("gla").recurrence.layer.axes})
