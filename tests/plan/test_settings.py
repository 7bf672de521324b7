"""`--config` reaches every knob of a form, and refuses what no kernel takes with what it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ssdgen.derive import chunk_form, recurrence
from ssdgen.diagnostics import Source, UserError
from ssdgen.ir.chunkform import ChunkForm
from ssdgen.plan import configure, default_config, knob_space, plan, variant
from ssdgen.plan.describe import describe
from ssdgen.plan.settings import check_used
from ssdgen.spec import load_source, read_layer

WITH_KERNELS = ("mamba2", "state_space_duality", "retnet", "linear_attention", "simple_gla", "mlstm")


def form_of(name: str) -> ChunkForm:
    return chunk_form(recurrence(read_layer(load_source(name))))


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_every_value_of_the_space_can_be_set(name: str) -> None:
    """What a search goes through, `--config` takes; the default comes first, and each value makes another module."""
    form = form_of(name)

    def module(settings: dict[str, str]) -> object:
        made = plan(form, configure(form, settings))
        return variant(made.config), made.knobs

    for knob in knob_space(form):
        plans = ("three_kernel",) if knob.name == "persistent" else ("segmented", "three_kernel")
        points = [[module({"plan": p} | {knob.name: value}) for value in knob.values] for p in plans]
        if knob.kind != "accuracy":  # a precision is set for all dtypes at once
            assert knob.name == "plan" or all(of[0] == module({"plan": p}) for p, of in zip(plans, points, strict=True))
        assert any(all(a != b for i, a in enumerate(of) for b in of[:i]) for of in points), knob.name


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_the_space_has_every_field_and_what_changes_the_text(name: str) -> None:
    """Structural knobs are those that a variant names; the others are the fields of the emitted Config of some plan."""
    form = form_of(name)
    space = knob_space(form)
    structural = [k.name for k in space if k.kind == "structural"]
    assert structural == [pair.split("=")[0] for pair in variant(default_config(form)).split()]
    plans = [plan(form, configure(form, {"plan": p})) for p in ("three_kernel", "segmented", "single_walk")]
    fields = {knob.name for made in plans for knob in made.knobs}
    assert {k.name for k in space if k.kind != "structural"} == fields
    assert {"segments", "chunk", "warps_compute_out", "occupancy_compute_out"} <= fields


def test_what_is_declared_is_tried_first() -> None:
    knobs = {k.name: k.values for k in knob_space(form_of("mamba2"))}
    assert knobs["warps_compute_out"] == ("0", "8", "4")
    assert knobs["share_scores_from"] == ("4", "0", "1")
    assert knobs["chunk"][:2] == ("64", "128")
    assert knobs["latency_scores"][0] == "2"
    assert knobs["layout_x"] == ("b,t,h,p",)
    assert len(knobs["swap"]) == 16


def test_numbers_come_in_the_order_in_which_they_matter() -> None:
    """A search that runs out of time has tried the first ones."""
    names = [k.name for k in knob_space(form_of("mamba2")) if k.kind == "numeric"]
    places = [names.index(name) for name in (
        "segments", "share_scores_from", "latency_x", "latency_scores", "state_latency_x", "state_latency_S",
        "occupancy_compute_out", "occupancy_fwd_pass_state", "occupancy_group_scores", "state_tile_p", "chunk",
        "occupancy_chunk_cumsum", "warps_chunk_cumsum", "tile_h",
    )]  # fmt: skip
    assert places == sorted(places)


def test_a_form_without_kernels_has_no_space() -> None:
    assert knob_space(form_of("gla")) == ()


@pytest.mark.parametrize(
    ("settings", "message", "hint"),
    [
        ({"warps_compute_out": "6"}, "--config warps_compute_out=6 is none of", "one of 0, 4, 8"),
        ({"weighted": "left"}, "--config weighted=left is none of", "one of row, column"),
        ({"share_scores_from": "1025"}, "--config share_scores_from=1025 is none of", "one of 0 to 1024"),
        ({"segments": "-1"}, "--config segments=-1 is none of", "one of 0 to 1024"),
        ({"persistent": "1"}, "--config persistent=1 is none of", "one of no, yes"),
        ({"swap": "none,state"}, "--config swap=none is none of", "one of scores, carried, intra, state"),
        ({"latency_scores": "0"}, "--config latency_scores=0 is none of", "one of 1 to 10"),
        ({"tile_h": "1"}, "--config tile_h=1 is none of", "one of 2, 4, 8"),
        ({"layout_x": "b,t,h"}, "--config layout_x=b,t,h is no order of its axes", "its axes are b,t,h,p"),
        ({"internal_step": "b t h"}, "--config internal_step=b t h is no order", "its axes are b,t,h"),
        ({"warps_compute": "8"}, "mamba2 has no knob `warps_compute`", "did you mean `warps_compute_out`?"),
        ({"persistent": "yes"}, "plan=segmented does not go with persistent=yes", "one wave by construction"),
        ({"plan": "single_walk", "persistent": "yes"}, "plan=single_walk does not go with", "plan=three_kernel"),
    ],
)
def test_what_is_refused(settings: dict[str, str], message: str, hint: str) -> None:
    with pytest.raises(UserError) as error:
        configure(form_of("mamba2"), settings)
    assert message in error.value.message
    assert hint in error.value.hint


def test_settings_that_go_together_come_in_any_order() -> None:
    form = form_of("mamba2")
    points = [
        configure(form, {"persistent": "yes", "plan": "three_kernel"}),
        configure(form, {"plan": "three_kernel", "persistent": "yes"}),
    ]
    assert points[0] == points[1]
    assert points[0].persistent


def test_the_order_of_swapped_products_is_no_variant() -> None:
    form = form_of("mamba2")
    texts = {variant(configure(form, {"swap": swap})) for swap in ("state,intra", "intra,state", "intra,state,intra")}
    assert len(texts) == 1
    assert "swap=intra,state" in texts.pop()


def test_a_spec_takes_the_first_alternative_of_each_knob() -> None:
    schedule = """
schedule
  plan = three_kernel | segmented
  persistent = yes | no
  weighted = column | row
  segments = 8
  warps compute_out = 8
  share_scores_from = 0 | 4
"""
    text = load_source("linear_attention").text.split("schedule")[0] + schedule.lstrip()
    form = chunk_form(recurrence(read_layer(Source("knobs.ssd", text))))
    config = default_config(form)
    assert (config.persistent, config.weighted, config.segments) == (True, "column", 8)
    assert (config.warps, config.share_scores_from) == ((("compute_out", 8),), 0)
    assert [k.values[:2] for k in knob_space(form) if k.name == "persistent"] == [("yes", "no")]
    with pytest.raises(UserError, match="plan=segmented does not go with persistent=yes"):
        configure(form, {"plan": "segmented"})


def test_a_plan_shows_its_knobs() -> None:
    """`ssdgen plan` shows the structural knobs in one line and every field of Config with its default."""
    form = form_of("mamba2")
    lines = describe(plan(form, configure(form, {"warps_compute_out": "4", "segments": "3"}))).splitlines()
    assert lines[1] == variant(default_config(form))
    shown = {line.split()[0]: line.split()[1] for line in lines[4 : lines.index("buffers between kernels") - 1]}
    assert (shown["warps_compute_out"], shown["segments"], shown["latency_scores"]) == ("4", "3", "2")
    persistent = describe(plan(form, configure(form, {"plan": "three_kernel", "persistent": "yes"})))
    assert "as many blocks as the GPU holds" in persistent


@pytest.mark.parametrize("name", ["segmented", "single_walk"])
def test_a_plan_of_one_wave_has_no_persistent_kernel(name: str) -> None:
    """A Config made by hand is refused as the command line is, not emitted without a word."""
    form = form_of("retnet")
    made = plan(form, replace(configure(form, {"plan": name}), persistent=True))
    assert (
        made.refused
        == f"{name} with a persistent kernel: the grids of other plans than three_kernel are one wave by construction"
    )
    assert not made.kernels


def test_a_knob_that_no_kernel_has_is_refused() -> None:
    """`--config segments=4` of the published plan would be taken and change nothing."""
    form = form_of("mamba2")
    published = {"plan": "three_kernel", "segments": "4"}
    with pytest.raises(UserError, match="no kernel of plan=three_kernel has the knob `segments`"):
        check_used(plan(form, configure(form, published)), published)
    check_used(plan(form, configure(form, {"segments": "4"})), {"segments": "4"})
