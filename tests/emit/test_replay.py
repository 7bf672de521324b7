"""Calls that come again: launched from what was written down, they give what the usual way gives, and refuse what it refuses.

The driver's stand-in runs kernels in the emulator from the words that the driver would read, on CPU tensors.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from generated import _driver, _replay, _runtime, _step, _tuned, mamba2, mamba2_gradients, mlstm
from ssdgen.run.checks import one_thread, poisoned_memory
from ssdgen.run.emulate import launch
from ssdgen.run.inputs import Case, draw
from ssdgen.spec import load_source, read_layer
from tests.emit.driver import EmulatedDriver

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedDriver]:
    """What calls go to, none of which has come before."""
    fake = EmulatedDriver()
    monkeypatch.setattr(_driver, "DRIVER", fake)
    with one_thread(), poisoned_memory(), _runtime.launcher(launch):
        yield fake
    flags = (False, True)
    steps = [_step._calls(m.STEP, n, steady) for m in (mamba2, mlstm) for n in flags for steady in flags]
    keeping = (mamba2.OPERATOR._keeping, mlstm.OPERATOR._keeping)
    for calls in (mamba2.OPERATOR._calls, mlstm.OPERATOR._calls, *keeping, mamba2_gradients.GRADIENTS._calls, *steps):
        calls._seen.clear()
        calls._kept.clear()


def inputs_of(name: str = "mamba2", seed: int = 0, **case: Any) -> dict[str, Any]:
    """Arguments of a `forward`, everything present."""
    layer = read_layer(load_source(name))
    sizes = {a.name: 32 for a in layer.axes} | {layer.batch: 1, layer.time: 100, layer.head: 2}
    sizes |= {g.axis: 1 for g in layer.groups}
    return dict(draw(layer, Case(sizes, **{"dtype": "f32", "seed": seed, **case}), "cpu").keywords())


def usual(module: ModuleType, inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """The values of a call that goes the usual way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSDGEN_DEBUG", "1")
        values: tuple[Tensor, ...] = module.forward(**inputs)
    return values


def same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(("name", "memory"), [("mamba2", "plain"), ("mamba2", "slices"), ("mlstm", "plain")])
def test_a_call_that_comes_again(name: str, memory: str, driver: EmulatedDriver) -> None:
    """From the third on, with other tensors, other memory and other numbers in them; slices of one buffer too."""
    module: ModuleType = {"mamba2": mamba2, "mlstm": mlstm}[name]
    calls = [inputs_of(name, seed, memory=memory) for seed in range(4)]
    for inputs in calls[:2]:
        module.forward(**inputs)
    assert not driver.launched
    for inputs in calls[2:]:
        driver.launched.clear()
        got = module.forward(**inputs)
        assert driver.launched[0] == "chunk_cumsum"
        assert len(driver.launched) > 1
        assert same(got, usual(module, inputs))


def test_states_that_are_kept(driver: EmulatedDriver) -> None:
    """So many tokens apart are a kind of their own."""
    for every in (64, 64, 128, 64, 64):
        inputs = {**inputs_of(seed=every), "states_every": every}
        assert same(mamba2.forward(**inputs), usual(mamba2, inputs))
    assert driver.launched.count("walk_out") == 2


def test_several_launches_are_one(driver: EmulatedDriver) -> None:
    """One graph for a kind and a stream, whose parameters are those of each call; one launch alone needs none."""
    for seed in range(5):
        inputs = inputs_of(seed=seed)
        assert same(mamba2.forward(**inputs), usual(mamba2, inputs))
    assert (driver.made, driver.whole) == (1, 3)
    driver.current = 8
    for seed in range(2):
        mamba2.forward(**inputs_of(seed=seed))
    assert (driver.made, driver.whole) == (2, 5)
    for seed in range(4):
        (S,), inputs = step_of("mamba2", seed, torch.float32)
        mamba2.step(S, **inputs)
    assert driver.launched[-1] == "token_step"
    assert (driver.made, driver.whole) == (2, 5)


def test_results_are_laid_out_as_ever(driver: EmulatedDriver) -> None:
    """Made like one of the caller's or not: an x whose single row has a stride of its own is contiguous all the same."""
    inputs = inputs_of()
    wide = torch.stack((inputs["x"], inputs["x"]), 1)[:, 0]
    assert wide.is_contiguous()
    for x in (inputs["x"], wide):
        given = {**inputs, "x": x}
        for _ in range(3):
            got = mamba2.forward(**given)
        assert [v.stride() for v in got] == [v.stride() for v in usual(mamba2, given)]
    assert driver.whole == 2


def test_where_no_graph_is_made(driver: EmulatedDriver) -> None:
    """Launches go one by one where the driver refuses it, and into a graph that somebody captures."""
    driver.graphs = False
    for seed in range(4):
        inputs = inputs_of(seed=seed)
        assert same(mamba2.forward(**inputs), usual(mamba2, inputs))
    assert driver.launched.count("walk_out") == 2
    assert (driver.made, driver.whole) == (0, 0)


def test_a_graph_is_not_launched_into_one(driver: EmulatedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call within somebody's capture goes one by one, and one behind it is one again."""
    inputs = inputs_of()
    for captures, whole in ((False, 0), (False, 0), (True, 0), (False, 1), (True, 1), (False, 2)):
        monkeypatch.setattr(driver, "capturing", lambda captures=captures: captures)
        assert same(mamba2.forward(**inputs), usual(mamba2, inputs))
        assert driver.whole == whole
    assert driver.made == 1
    assert driver.launched.count("walk_out") == 4


@pytest.mark.parametrize("absent", [("S0", "D", "dt_bias", "z"), ("z",)])
def test_what_is_absent(absent: tuple[str, ...], driver: EmulatedDriver) -> None:
    """Stand-ins for absent inputs and the default of others are no caller's tensors."""
    for seed in range(3):
        inputs = {k: v for k, v in inputs_of(seed=seed).items() if k not in absent}
        got = mamba2.forward(**inputs)
    assert driver.launched
    assert same(got, usual(mamba2, inputs))


def test_gradients(driver: EmulatedDriver) -> None:
    """Both passes, of D in either form; and where states are kept for gradients, with which segments begin."""
    cut = dataclasses.replace(mamba2.CONFIGS[torch.float32], segments=2)
    for narrow, config in ((False, None), (True, None), (True, cut)):
        driver.launched.clear()
        for seed in range(4):
            inputs = {**inputs_of(seed=seed), "config": config}
            if narrow:
                inputs["D"] = inputs["D"][:, 0].clone()
            leaves = {k: v.requires_grad_() for k, v in inputs.items() if isinstance(v, Tensor)}
            y, S = mamba2.forward(**inputs)
            arriving = torch.ones_like(y), torch.ones_like(S)
            got = torch.autograd.grad((y, S), list(leaves.values()), arriving)
        assert "chunk_gradients" in driver.launched
        assert driver.launched.count("segment_states") == (2 if config else 0), (
            "those of the forward pass, of two calls"
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SSDGEN_DEBUG", "1")
            want = torch.autograd.grad(mamba2.forward(**inputs), list(leaves.values()), arriving)
        assert same(got, want)


def test_a_gradient_that_nobody_needs(driver: EmulatedDriver) -> None:
    """Inputs without a gradient get none, whichever the call that was written down asked for."""
    for needed in ("x", "A", "D"):
        for seed in range(2):
            inputs = inputs_of(seed=seed)
            inputs[needed].requires_grad_()
            torch.autograd.backward(mamba2.forward(**inputs)[0].sum())
            assert [k for k, v in inputs.items() if isinstance(v, Tensor) and v.grad is not None] == [needed]


def step_of(name: str, seed: int, kind: torch.dtype) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """States, and the inputs of a step, slices of one row where they are alike."""
    module: ModuleType = {"mamba2": mamba2, "mlstm": mlstm}[name]
    inputs = inputs_of(name, seed, memory="slices")
    names = {i.name for i in module.LAYER.inputs if "t" in i.axes}
    one = {k: v[:, 0] if k in names else v for k, v in inputs.items() if k[-1] != "0" and isinstance(v, Tensor)}
    states = module.init_state(1, 2, p=32, n=32, dtype=kind)
    return tuple(torch.randn_like(s) for s in (states if isinstance(states, tuple) else (states,))), one


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["mamba2", "mlstm"])
def test_steps(name: str, kind: torch.dtype, driver: EmulatedDriver) -> None:
    """States are moved where they are, whichever they are, and outputs written where the caller says."""
    module: ModuleType = {"mamba2": mamba2, "mlstm": mlstm}[name]
    for seed in range(4):
        states, inputs = step_of(name, seed, kind)
        copies = tuple(s.clone() for s in states)
        driver.launched.clear()
        got = module.step(*states, **inputs)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SSDGEN_DEBUG", "1")
            want = module.step(*copies, **inputs)
        assert same((got, *states), (want, *copies))
    assert driver.launched[0] == "token_step"
    for _ in range(3):
        slots, out = torch.tensor([0], dtype=torch.int32), torch.full_like(got, torch.nan)
        states = tuple(torch.cat((s, s)) for s in states[:1]) if name == "mamba2" else states
        copies = tuple(s.clone() for s in states)
        driver.launched.clear()
        assert module.step(*states, **inputs, state_indices=slots, out=out) is out
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SSDGEN_DEBUG", "1")
            want = module.step(*copies, **inputs, state_indices=slots)
        assert same((out, *states), (want, *copies))
        states = tuple(s[:1] for s in states)
    assert driver.launched[0] == "token_step"


def test_steady_steps_are_of_another_kind(driver: EmulatedDriver) -> None:
    """Whichever comes first, each is written down for itself, and launches its own kernel."""
    for steady in (False, True, False, True, False, True):
        (S,), inputs = step_of("mamba2", 0, torch.float32)
        mamba2.step(S, **inputs, steady=steady)
    parameters = inspect.signature(mamba2.token_step._pyfunc).parameters
    place = [name for name, p in parameters.items() if "Constant" in str(p.annotation)].index("STEADY")
    assert [f.constants[place] for f in driver.functions] == [False, True]
    assert driver.launched == ["token_step"] * 2


def test_a_step_that_somebody_differentiates(driver: EmulatedDriver) -> None:
    """It is refused, though one like it was made."""
    (S,), inputs = step_of("mamba2", 0, torch.float32)
    for _ in range(3):
        mamba2.step(S, **inputs)
    assert driver.launched
    inputs["x"] = inputs["x"].detach().requires_grad_()
    with pytest.raises(NotImplementedError, match="kernels of steps have no gradient"):
        mamba2.step(S, **inputs)
    with torch.no_grad():
        mamba2.step(S, **inputs)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"dt": torch.ones(1, 100, 2).double()}, TypeError, "`dt` must be"),
    ({"B": torch.ones(1, 99, 1, 32)}, ValueError, "axis t is 100"),
    ({"B": torch.ones(1, 100, 1, 32).bfloat16()}, TypeError, "dtype of `x`"),
    ({"A": None}, TypeError, "`A`.* is missing"),
    ({"C": torch.ones(1, 100, 1, 32).tolist()}, TypeError, r"must be a torch\.Tensor"),
    ({"dt_min": -1.0}, ValueError, "`dt_min` must be in"),
    ({"dt_min": np.float32(0.0)}, TypeError, "`dt_min` must be a number"),
    ({"dt_min": torch.zeros(())}, TypeError, "`dt_min` must be a number"),
    ({"config": {"chunk": 64}}, TypeError, "`config` must be"),
    ({"states_every": 64.0}, TypeError, "must be a number of tokens"),
    ({"states_every": 65}, ValueError, "multiple of the chunk"),
    ({"cu_seqlens": torch.tensor([0.0])}, TypeError, "`cu_seqlens` must be"),
    ({"S0": torch.ones(1, 2, 32, 32).double()}, TypeError, "`S0` must be float32"),
    ({"x": torch.ones(1, 100, 2, 32, device="meta")}, ValueError, "the first input on meta"),
]


@pytest.mark.parametrize(("change", "error", "text"), WRONG)
def test_what_is_wrong_is_refused_as_ever(
    change: dict[str, Any], error: type[Exception], text: str, driver: EmulatedDriver
) -> None:
    """However often the like of it was right."""
    inputs = {**inputs_of(), "dt_min": 0.0}
    for _ in range(3):
        mamba2.forward(**inputs)
    assert driver.launched
    for _ in range(3):
        with pytest.raises(error, match=text):
            mamba2.forward(**{**inputs, **change})


def kind(inputs: dict[str, Any]) -> Any:
    names = mamba2.OPERATOR._names
    arguments = tuple({**dict.fromkeys(names), "dt_min": 0.0, "dt_max": math.inf, **inputs}[n] for n in names)
    inputs_and_states = arguments[:8] + arguments[10:11]
    return mamba2.OPERATOR._calls._kind(arguments, inputs_and_states)


def test_all_that_launches_depend_on_is_in_the_kind(driver: EmulatedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The class of address of each tensor, shapes, strides, dtypes, what is absent, numbers, the Config, the tables."""
    inputs = inputs_of()
    x = inputs["x"]
    wide = torch.zeros(1, 100, 2, 64)
    others = [
        {**inputs, "dt_max": 1.0},
        {**inputs, "S0": None},
        {**inputs, "x": torch.zeros(x.numel() + 1)[1:].view(x.shape)},
        {**inputs, "x": wide[..., :32]},
        {**inputs, "dt": inputs["dt"].bfloat16()},
        {**inputs, "D": inputs["D"][:, 0]},
        {**inputs, "config": mamba2.Config()},
        {**inputs, "config": dataclasses.replace(mamba2.Config(), chunk=128)},
        {**inputs, "x": x[:, :64]},
        {**inputs, "states_every": 64},
        {**inputs, "states_every": 128},
    ]
    kinds = [kind(inputs), *map(kind, others)]
    assert None not in kinds
    _tuned.forget()
    kinds.append(kind(inputs))
    assert len(set(kinds)) == len(kinds)
    assert kind(inputs_of(seed=1)) == kind(inputs)
    for special in ({"mask": x}, {"seq_idx": x}, {"cu_seqlens": x}, {"states_every": 64.0}):
        assert kind({**inputs, **special}) is None
    monkeypatch.setenv("SSDGEN_DEBUG", "1")
    assert kind(inputs) is None


def test_a_tensor_that_is_passed_twice_goes_the_usual_way(driver: EmulatedDriver) -> None:
    """By addresses B and C are one there, but not in the next call."""
    inputs = inputs_of()
    for _ in range(4):
        mamba2.forward(**{**inputs, "C": inputs["B"]})
    assert not driver.launched
    assert same(mamba2.forward(**inputs), usual(mamba2, inputs))


def test_copies_go_the_usual_way(driver: EmulatedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where strides reach too far a kernel takes a copy, which is of this call alone."""
    monkeypatch.setattr(_runtime, "LIMIT", 8000)
    inputs = inputs_of(memory="slices")
    for _ in range(4):
        got = mamba2.forward(**inputs)
    assert not driver.launched
    assert same(got, usual(mamba2, inputs))


def test_a_launch_that_is_refused(driver: EmulatedDriver) -> None:
    """The usual way knows what to do, or to say."""
    inputs = inputs_of()
    for _ in range(3):
        want = mamba2.forward(**inputs)
    driver.refuse = {"walk_out"}
    driver.launched.clear()
    assert same(mamba2.forward(**inputs), want)
    assert driver.launched[-1] == "walk_out"


def test_a_thread_without_a_context(driver: EmulatedDriver) -> None:
    """One that autograd began, before anything else ran in it: PyTorch's is made its own, and the call goes on."""
    inputs = inputs_of()
    for _ in range(2):
        mamba2.forward(**inputs)
    driver.bound = False
    got = mamba2.forward(**inputs)
    assert driver.bound
    assert driver.launched[-1] == "walk_out"
    assert same(got, usual(mamba2, inputs))


def test_another_stream(driver: EmulatedDriver) -> None:
    """Launches go to the stream that is current, whichever was when they were written down."""
    inputs = inputs_of()
    for driver.current in (7, 7, 7, 8, 9, 7):
        mamba2.forward(**inputs)
    assert driver.launched.count("walk_out") == 4


def test_calls_inside_of_calls_share_no_words(driver: EmulatedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """As two threads would make them: a second call between the launches of a first one."""
    first, second = inputs_of(seed=1), inputs_of(seed=2)
    want = [usual(mamba2, inputs) for inputs in (first, second)]
    for _ in range(3):
        mamba2.forward(**first)
    got: list[tuple[Tensor, ...]] = []
    run = driver.launch

    def interrupted(config: int, function: int, parameters: int, extra: None) -> int:
        if not got:
            got.append(())
            got[0] = mamba2.forward(**second)
        return run(config, function, parameters, extra)

    monkeypatch.setattr(driver, "launch", interrupted)
    assert same(mamba2.forward(**first), want[0])
    assert same(got[0], want[1])


def test_no_more_kinds_are_kept_than_that(driver: EmulatedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_replay, "MOST", 3)
    calls = _replay.Calls(lambda x, config: (x,), mamba2.CONFIGS, 1, 0, 0)
    for length in range(1, 20):
        calls(torch.zeros(length), None)
        calls(torch.zeros(length), None)
        assert len(calls._seen) <= 3
        assert len(calls._kept) <= 3


def test_no_graph_is_written_down(driver: EmulatedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are loaded by the driver while no graph is captured; what was written down before is launched into one."""
    inputs = inputs_of()
    monkeypatch.setattr(driver, "capturing", lambda: True)
    for _ in range(3):
        mamba2.forward(**inputs)
    assert not driver.launched
    monkeypatch.setattr(driver, "capturing", lambda: False)
    mamba2.forward(**inputs)
    monkeypatch.setattr(driver, "capturing", lambda: True)
    mamba2.forward(**inputs)
    assert driver.launched


def test_the_words_are_those_that_cuda_tile_passes() -> None:
    """In a process of its own, whose CUDA driver only writes down what it is asked: kernels, grids, and every parameter."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(Path(__file__).with_name("launched_by_cuda_tile.py"))]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    assert "5 launches alike" in found.stdout
