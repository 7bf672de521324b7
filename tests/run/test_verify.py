"""Verification itself: it fails when something is wrong, and says what and by how much."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import re
from types import ModuleType
from typing import Any

import pytest
import torch

from ssdgen.derive import chunk_form, recurrence
from ssdgen.diagnostics import Source
from ssdgen.emit import emit
from ssdgen.emit.package import package
from ssdgen.ir.layer import Layer
from ssdgen.ir.plan import Plan
from ssdgen.ir.report import Check, Report, to_json
from ssdgen.ir.schedule import PRECISIONS
from ssdgen.plan import plan as plan_of
from ssdgen.run.cases import Trial, can_be_absent, combinations, kernel_trials, portable_trials, sizes_for
from ssdgen.run.checks import BOUNDS, Expected, bound, compare, poisoned_memory, relative_error
from ssdgen.run.inputs import Case, Memory, draw, may_be_zero
from ssdgen.run.load import load
from ssdgen.run.packing import packings
from ssdgen.run.peers import peer_checks
from ssdgen.run.verify import run_trial, verify
from ssdgen.spec import builtin_specs, load_source, read_layer

LAYERS = {name: read_layer(load_source(name)) for name in builtin_specs()}
WITH_KERNELS = ("mamba2", "state_space_duality", "retnet", "linear_attention", "simple_gla", "mlstm")


@functools.cache
def built(name: str) -> tuple[Plan, ModuleType]:
    """A spec's plan and its module, freshly emitted; of one without kernels, the portable path alone."""
    plan = plan_of(chunk_form(recurrence(LAYERS[name])))
    source = emit(plan, portable_only=name not in WITH_KERNELS)
    return plan, load(source.name, package([source]))


# The gates, over the specs.


@pytest.mark.parametrize("name", LAYERS)
def test_portable(name: str) -> None:
    """The chunked form in plain torch equals the token loop: every length, term and combination."""
    report = verify(*built(name), ["portable"])
    assert report.passed, str(report)


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_emulation(name: str) -> None:
    """The emitted kernels' bodies equal the token loop at every dtype and precision."""
    report = verify(*built(name), ["emulation"])
    assert report.passed, str(report)
    assert not any(c.skipped for c in report.checks if "packed sequences" not in c.note)


@pytest.mark.parametrize("name", sorted(set(LAYERS) - set(WITH_KERNELS)))
def test_no_kernels_yet(name: str) -> None:
    """A spec without kernels is skipped there with the reason, and does not count as verified."""
    report = verify(*built(name), ["emulation"])
    assert [c.skipped for c in report.checks] == [True]
    assert report.checks[0].note
    assert not report.passed


@pytest.mark.parametrize("name", LAYERS)
def test_peers(name: str) -> None:
    """What others wrote for the same layer computes the same."""
    checks = list(peer_checks(LAYERS[name], built(name)[1].forward))
    assert all(c.passed or c.skipped for c in checks), str(Report(name, tuple(checks)))


def test_peers_beside_kernels_that_need_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where mamba_ssm and causal_conv1d are installed, transformers calls them; on the CPU its own code is compared."""
    theirs = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    for name in ("causal_conv1d_fn", "mamba2_chunk_scan"):

        @functools.wraps(inspect.unwrap(getattr(theirs, name)))
        def kernel(*arguments: object, **named: object) -> None:
            raise ValueError("a pointer to the CPU")

        monkeypatch.setattr(theirs, name, kernel)
    made = [c for c in peer_checks(LAYERS["mamba2"], built("mamba2")[1].forward, gpu=False) if "transformers" in c.name]
    assert len(made) == 4
    assert all(c.passed for c in made)
    with pytest.raises(ValueError, match="pointer"):
        theirs.mamba2_chunk_scan()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_hardware(name: str) -> None:
    report = verify(*built(name), ["hardware"])
    assert report.passed, str(report)


# Each gate can fail on its own.


class Broken:
    """A module whose forward returns something else than the real one's."""

    def __init__(self, module: ModuleType, spoil: Any) -> None:
        self.Config, self.CONFIGS = module.Config, module.CONFIGS
        self.__package__ = module.__package__
        self._forward, self._spoil = module.forward, spoil

    def forward(self, **arguments: Any) -> Any:
        y, *states = self._forward(**arguments)
        return self._spoil(y, states)


SPOILERS = {
    "a nan": lambda y, states: (y.index_fill(1, torch.tensor([0]), math.nan), *states),
    "one head of many": lambda y, states: (y * (1 + 1e-4 * (torch.arange(y.shape[2]) == 0))[:, None], *states),
    "the final state": lambda y, states: (y, states[0] * 1.0001),
    "another dtype": lambda y, states: (y.double(), *states),
    "another shape": lambda y, states: (y[:, :-1], *states),
    "initial instead of final state": lambda y, states: (y, torch.zeros_like(states[0])),
}


@pytest.mark.parametrize("what", SPOILERS)
def test_a_wrong_result_fails(what: str) -> None:
    plan, module = built("simple_gla")
    broken: Any = Broken(module, SPOILERS[what])
    trial = Trial("t", Case(sizes_for(LAYERS["simple_gla"], 70)))
    assert all(c.passed for c in run_trial("portable", plan, module, trial))
    assert not all(c.passed for c in run_trial("portable", plan, broken, trial))


def test_a_refused_call_fails() -> None:
    """An error instead of a result is a failed check with the error's text, not the end of the verification."""
    plan, module = built("simple_gla")

    def refuse(y: torch.Tensor, states: list[torch.Tensor]) -> None:
        raise ValueError("cannot do that")

    broken: Any = Broken(module, refuse)
    (check,) = run_trial("portable", plan, broken, Trial("t", Case(sizes_for(LAYERS["simple_gla"], 5))))
    assert not check.passed
    assert "cannot do that" in check.note


MUTATIONS = {
    "a token reads itself not": (r">= token", "> token"),
    "a state is not decayed over a chunk": (r"exp2\(decay_end\) \* ", ""),
    "the carried term is not decayed": (r"exp2\(decay_sum_tile\)", "exp2(decay_sum_tile * 0.0)"),
    "scores without their weight": (r"decay_left \* step_tile\[", "decay_left * ct.exp2(step_tile * 0.0)["),
    "the state without its weight": (r"step_tile \* exp2", "exp2"),
    "heads in the wrong group": (r"head // \(heads // (\w+)\.shape\[2\]\)", r"head % \1.shape[2]"),
    "a token past the end decays": (r"valid = token < length", "valid = token <= length"),
    "strong decays are cut off": (r"-128\.0", "-0.1"),
    "a token does not read itself": (r"own = scores_own \* step_tile", "own = 0.0 * step_tile"),
    "scores without their scale": (r"scores \* scores_scale\[:, None\]", "scores"),
    "no skip connection": (r"D_tile = load\(D,", "D_tile = 0.0 * load(D,"),
    "another gate": (r"silu\(", "("),
    "no limits": (r"step_tile = clamp\(([^\n]*), dt_min, dt_max\)", r"step_tile = \1"),
    "another head's initial state": (r"load\(S0, \(sequence, head,", "load(S0, (sequence, 0,"),
}


@pytest.mark.parametrize("what", MUTATIONS)
def test_a_wrong_kernel_fails(what: str) -> None:
    """One thing changed in the text of the kernels, and their emulation no longer equals the token loop."""
    plan, _ = built("mamba2")
    source = emit(plan)
    at = source.text.index("def forward(")
    kernels, count = re.subn(*MUTATIONS[what], source.text[:at])
    assert count, "the kernels no longer read like this: change the mutation"
    module = load(source.name, {**package([source]), "mamba2.py": kernels + source.text[at:]})
    exact: dict[str, int | str] = {k.name: "tf32x3" for k in plan.knobs if k.kind == "precision"}
    params = {"dt_min": 0.005, "dt_max": 0.05}
    way = {"share_scores_from": int("scores_" in MUTATIONS[what][0])}
    trial = Trial("t", Case(sizes_for(LAYERS["mamba2"], 133), params=params), {**exact, **way})
    assert all(c.passed for c in run_trial("emulation", plan, built("mamba2")[1], trial))
    assert not all(c.passed for c in run_trial("emulation", plan, module, trial))


# Errors and bounds.


def test_relative_error() -> None:
    want = torch.tensor([3.0, 4.0])
    assert relative_error(torch.tensor([3.0, 4.5]), want) == pytest.approx(0.1)
    assert relative_error(torch.tensor([0.25]), torch.zeros(1)) == 0.25
    assert math.isnan(relative_error(torch.tensor([math.nan]), torch.ones(1)))
    assert math.isnan(relative_error(torch.ones(1), torch.tensor([math.nan])))
    assert relative_error(torch.ones(2), torch.ones(1)) == math.inf
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0.0


def test_nan_never_passes() -> None:
    nan = torch.tensor([math.nan])
    for got, want in ((nan, torch.ones(1)), (torch.ones(1), nan), (nan, nan)):
        (check,) = compare("portable", "t", {"y": got}, {"y": Expected(want, torch.float32, 1.0)})
        assert not check.passed


def test_bounds() -> None:
    """The numbers the project promises; a change here is a change of the promise."""
    assert BOUNDS == {
        **{"f64": 1e-12, "f32": 1e-5, "tf32x3": 1e-5, "tf32": 1e-3, "f16": 1e-3, "bf16x2": 1e-3, "bf16": 5e-3}
    }
    assert bound(torch.float32, ["tf32x3", "tf32"]) == 1e-3
    assert bound(torch.bfloat16, ["tf32x3"]) == 5e-3
    assert bound(torch.float64) == 1e-12


def test_poisoned_memory() -> None:
    """What was never written is NaN inside, and the switches are as before afterwards."""
    with poisoned_memory():
        assert torch.empty(4, dtype=torch.bfloat16).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


# Inputs.


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("memory", ["plain", "slices", "transposed", "expanded", "surrounded"])
def test_inputs_are_what_the_layer_declares(name: str, memory: Any) -> None:
    """Shapes, dtypes and ranges as declared; finite; nothing is zero; the memory is as asked for."""
    layer = LAYERS[name]
    inputs = draw(layer, Case(sizes_for(layer, 70), memory=memory))
    for tensor in layer.inputs:
        x = inputs.tensors[tensor.name]
        assert x.shape == tuple(sizes_for(layer, 70)[a] for a in tensor.axes)
        assert x.isfinite().all()
        assert (x != 0).all() or not may_be_zero(tensor.range)
        low, high = tensor.range.low, tensor.range.high
        assert ((x >= low) & (x <= high)).all()
        if memory == "slices" and tensor.axes[:2] == (layer.batch, layer.time):
            assert not x.is_contiguous()
        if memory == "expanded" and tensor.axes[:2] == (layer.batch, layer.time):
            assert x.stride(0) == 0
        if memory == "surrounded":
            assert x.untyped_storage().nbytes() > x.numel() * x.element_size()
    assert set(inputs.states) == {s.name for s in layer.states}


def test_memories_hold_the_same_values() -> None:
    """Only `expanded` changes values; the others are the same numbers elsewhere."""
    layer = LAYERS["mamba2"]
    plain = draw(layer, Case(sizes_for(layer, 9)))
    memories: tuple[Memory, ...] = ("slices", "transposed", "surrounded")
    for memory in memories:
        other = draw(layer, Case(sizes_for(layer, 9), memory=memory))
        assert all(torch.equal(plain.tensors[n], other.tensors[n]) for n in plain.tensors)


def test_steps_are_realistic() -> None:
    """A raw dt is such that its softplus lies between 0.001 and 0.1, so that no decay is trivial."""
    layer = LAYERS["mamba2"]
    step = torch.nn.functional.softplus(draw(layer, Case(sizes_for(layer, 500))).tensors["dt"])
    assert step.min() >= 0.0009
    assert step.max() <= 0.11
    assert 0.005 < step.median() < 0.02


def test_dtypes() -> None:
    """`dtype` is that of x and what is like it; gates stay float32 unless the call is uniform; float64 is everywhere."""
    layer = LAYERS["mamba2"]
    sizes = sizes_for(layer, 3)
    some = draw(layer, Case(sizes, dtype="bf16")).tensors
    assert (some["x"].dtype, some["B"].dtype, some["dt"].dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert draw(layer, Case(sizes, dtype="bf16", uniform=True)).tensors["dt"].dtype == torch.bfloat16
    assert all(x.dtype == torch.float64 for x in draw(layer, Case(sizes, dtype="f64")).tensors.values())


# Trials.


@pytest.mark.parametrize("name", LAYERS)
def test_trials_cover_the_layer(name: str) -> None:
    """Every input on its own and left out, every length around a chunk, every dtype and precision; no name twice."""
    layer: Layer = LAYERS[name]
    plan, _ = built(name)
    chunk = plan.config.chunk
    portable = list(portable_trials(plan))
    kernels = list(kernel_trials(plan))
    for trials in (portable, kernels):
        names = [t.name for t in trials]
        assert len(names) == len(set(names))
        zeroed = set().union(*(t.case.zero for t in trials))
        assert zeroed == {t.name for t in layer.inputs if may_be_zero(t.range)} | {f"{s.name}0" for s in layer.states}
        assert set().union(*(t.case.absent for t in trials)) == set(can_be_absent(layer))
    lengths = {t.case.sizes[layer.time] for t in portable}
    assert lengths >= {0, 1, chunk - 1, chunk, chunk + 1, 3 * chunk + 5}
    assert {t.case.dtype for t in portable} == {"f64", "f32", "f16", "bf16"}
    assert {t.case.dtype for t in kernels} == {"f32", "f16", "bf16"}
    precisions = {v for t in kernels for v in t.config.values() if isinstance(v, str)}
    assert precisions == (set(PRECISIONS) if not plan.refused else set())


def test_sizes_can_be_chosen() -> None:
    plan, _ = built("simple_gla")
    trials = list(portable_trials(plan, {"n": 16, "t": 77}))
    assert {t.case.sizes["n"] for t in trials} == {16}
    assert 77 in {t.case.sizes["t"] for t in trials}


def test_combinations() -> None:
    assert len(set(combinations(LAYERS["mamba2"]))) == 16


# The report.


def report() -> Report:
    return Report(
        "spec",
        (
            Check("short: y", "portable", 1.2e-7, 1e-5, True),
            Check("a longer name: S", "emulation", math.nan, 1e-3, False, "holds nan or inf"),
            Check("kernels", "hardware", 0.0, 0.0, False, "no CUDA device", skipped=True),
        ),
    )


def test_report_text() -> None:
    """One aligned line a check, the measured error beside its bound."""
    assert str(report()).splitlines() == [
        "spec on cpu",
        "  ok    portable   short: y          error 1.2e-07  bound 1.0e-05",
        "  FAIL  emulation  a longer name: S  error     nan  bound 1.0e-03  holds nan or inf",
        "  skip  hardware   kernels                                         no CUDA device",
        "2 checks, 1 failed, 1 skipped",
    ]


def test_report_json() -> None:
    """It is what json takes, numbers that are none included."""
    data = json.loads(json.dumps(to_json(report()), allow_nan=False))
    assert data["passed"] is False
    assert data["checks"][1]["error"] == "nan"


def test_a_report_of_nothing_does_not_pass() -> None:
    only_skipped = dataclasses.replace(report(), checks=report().checks[2:])
    assert not only_skipped.passed
    assert not Report("spec", ()).passed


CANCELLING = """\
language 1
layer cancelling "One over a read of random sign: where it is small, rounding is magnified"

axes    b t h n

inputs
  k[b t h n], q[b t h n] : bf16 | f32
  f[b t h]               : f32

state   N[b h n] : f32
        N[t] = sigmoid(f) * N[t-1] + exp(min(k, 4))

output  y[b t h] : f32
        y = 1 / max(abs(N[t] . q), 1)
"""


def test_a_failure_says_if_the_equations_magnify_rounding() -> None:
    """An author can tell an ill-conditioned output from a wrong kernel: the check still fails, and its note says why."""
    planned = plan_of(chunk_form(recurrence(read_layer(Source("cancelling.ssd", CANCELLING)))))
    module = load("cancelling", package([emit(planned)]))
    others = (
        *(p.name for p in packings(planned.config.chunk)),
        "pieces cut at",
        "states ",
        "steps, bf16",
    )  # without notes
    checks = [c for c in verify(planned, module, ["emulation"]).checks if not c.name.startswith(others)]
    failed = [c for c in checks if not (c.passed or c.skipped)]
    assert failed
    assert all("ill-conditioned: a relative change of the inputs changes this" in c.note for c in failed)
