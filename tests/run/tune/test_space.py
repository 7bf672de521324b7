"""The space: its knobs are asked of the form and the module, and every neighbour is a point that can be emitted."""

from __future__ import annotations

from pathlib import Path

import pytest

from ssdgen.diagnostics import UserError
from ssdgen.ir.schedule import PRECISIONS
from ssdgen.plan import knob_space
from ssdgen.plan.shapes import sizes_of
from ssdgen.run.tune.space import Candidate, Space
from tests.run.tune.conftest import form_of


def test_the_knobs_are_those_of_the_schedule_and_the_module(space: Space) -> None:
    numeric = space.numeric(Candidate())
    declared = space.form.recurrence.layer.schedule.plan
    assert space.structural["plan"][: len(declared)] == declared
    assert "layout_x" not in space.structural, "what is passed is the caller's"
    assert set(space.structural["internal_step"]) == {"b,h,t", "b,t,h", "h,b,t"}
    assert len(space.structural["swap"]) == 16
    assert {"chunk", "tile_p", "state_tile_p", "latency_x", "occupancy_compute_out"} <= set(numeric)
    assert not {"scores", "carried", "intra", "state"} & set(numeric), "precisions are the user's"
    assert {64, 128} <= set(numeric["chunk"])
    assert {3, 5} <= set(numeric["latency_x"])
    assert min(map(int, numeric["tile_p"])) == 32, "values that the Config refuses are none"
    assert not {"tile_n"} & set(numeric), "a field of another plan"


def test_the_space_is_that_of_the_plan(space: Space) -> None:
    """There is one definition of knobs, values and their order; a search that runs out of time has tried the first ones."""
    knobs = {k.name: k for k in knob_space(space.form)}
    numeric = space.numeric(Candidate())
    assert [name for name in knobs if name in numeric] == list(numeric)
    assert list(numeric)[:2] == ["segments", "share_scores_from"]
    assert all(list(knobs[name].values) == [str(v) for v in values] for name, values in numeric.items())
    moved = [n.fields[0][0] for n in space.neighbours(Candidate(), structural=False)]
    assert list(dict.fromkeys(moved)) == list(numeric)
    assert space.structural == {
        k.name: k.values for k in knobs.values() if k.kind == "structural" and len(k.values) > 1
    }


def test_only_what_is_named_moves(space: Space, tmp_path: Path) -> None:
    def names(*only: str) -> list[str]:
        narrow = Space(space.form, "bf16", space.sizes, tmp_path, only)
        return [*narrow.structural, *narrow.numeric(Candidate())]

    assert names("latency") == ["latency_x", "latency_B", "latency_C", "latency_S", "latency_scores"]
    assert names("chunk", "swap") == ["swap", "chunk"]
    assert names("state") == ["state"], "a precision, not the tiles of a state"
    with pytest.raises(UserError, match="has no knob `latencies` to search"):
        names("latency", "latencies")


def test_a_precision_moves_if_it_is_asked_for(space: Space, tmp_path: Path) -> None:
    narrow = Space(space.form, "bf16", space.sizes, tmp_path, ["intra"])
    moved = list(narrow.neighbours(Candidate()))
    assert {narrow.config(c).intra for c in moved} == set(PRECISIONS) - {narrow.config(Candidate()).intra}
    assert not any(
        dict(c.fields).keys() & {"scores", "carried", "intra", "state"} for c in space.neighbours(Candidate())
    )


def test_knobs_that_exclude_each_other_are_no_module_and_no_error(space: Space) -> None:
    yes = next(c for c in space.varied(Candidate()) if c.structure == (("persistent", "yes"),))
    with pytest.raises(UserError, match="does not go with persistent=yes"):
        space.variant(yes)
    published = Candidate((("plan", "three_kernel"),))
    both = next(c for c in space.varied(published) if dict(c.structure).get("persistent") == "yes")
    assert "persistent=yes" in space.variant(both).name
    back = next(c for c in space.varied(both) if dict(c.structure)["persistent"] == "no")
    assert space.variant(back).text == space.variant(published).text
    assert not any(dict(c.structure).get("persistent") == "yes" and c != both for c in space.varied(published))


def test_another_spec_has_other_knobs(tmp_path: Path) -> None:
    form = form_of("retnet")
    layer = form.recurrence.layer
    space = Space(form, "f32", sizes_of(layer, {layer.batch: 1, layer.time: 512, layer.head: 4}), tmp_path)
    names = set(space.numeric(Candidate()))
    channels = {f"tile_{a.name}" for a in layer.axes if a.size}
    assert names & channels
    assert not any(name.startswith("latency_dt") for name in names)


def test_a_neighbour_differs_in_one_knob(space: Space) -> None:
    start = Candidate()
    neighbours = list(space.neighbours(start))
    assert len(neighbours) == len(set(neighbours)) > 40
    for n in neighbours:
        assert len(n.structure) + len(n.fields) == 1
        assert n.structure or space.config(n) != space.config(start)
    assert not any(n.structure for n in space.neighbours(start, structural=False))
    assert {str(n) for n in neighbours if n.structure} >= {"plan=three_kernel", "plan=single_walk", "swap=intra"}
    assert "swap=scores,state" not in {str(n) for n in neighbours}, "two products away"


def test_a_field_that_another_plan_lacks_is_dropped(space: Space) -> None:
    here = Candidate(fields=(("chunk", 128), ("state_tile_n", 32)))
    there = next(n for n in space.neighbours(here) if n.structure == (("plan", "single_walk"),))
    assert there.fields == (("chunk", 128),)
    assert space.config(there).chunk == 128


def test_modules_stay_where_their_kernels_are_found_again(space: Space, emitted: Path) -> None:
    """A second search finds the kernels of the first in the compiler's cache, which knows them by path."""
    first = space.variant(Candidate()).module.__file__
    again = Space(space.form, "bf16", space.sizes, emitted)
    assert again.variant(Candidate()).module.__file__ == first
    assert again.variant(Candidate((("plan", "single_walk"),))).module.__file__ != first
