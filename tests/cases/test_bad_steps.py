"""A wrong call of a step is refused by a message that names the tensor, and nothing is written: neither states nor outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ssdgen.ir.report import Gate
from ssdgen.run.inputs import Case, Inputs
from ssdgen.run.steps import Steps
from ssdgen.run.verify import running
from tests.cases.subject import BOTH, mamba2_sizes, subject

both = pytest.mark.parametrize("gate", BOTH)


def steps_of(gate: Gate, name: str = "mamba2") -> Steps:
    of = subject(name)
    return Steps(gate, of.plan, of.module, running(gate, of.module), "cpu")


def state(*shape: int, **how: Any) -> Tensor:
    return torch.zeros(shape or (2, 4, 40, 24), **how)


def refuse(gate: Gate, function: str, changed: dict[str, Any], error: type[Exception], message: str) -> None:
    """The call with `changed` arguments (`S` is the state; None leaves one out) is refused, and writes nothing."""
    steps = steps_of(gate)
    inputs: Inputs = steps.drawn(Case(mamba2_sizes(t=3)))
    tensors = steps.at(inputs, 0) if function == "step" else steps.among(inputs, 0, 3)
    arguments = {
        "S": state(),
        "out": torch.full((2, 3, 4, 40), 7.0) if function == "steps" else torch.full((2, 4, 40), 7.0),
    }
    arguments |= {**tensors, **changed}
    arguments = {k: v for k, v in arguments.items() if v is not None}
    written = [
        x for k, x in arguments.items() if k in ("S", "out", "before") and isinstance(x, Tensor) and not x.is_meta
    ]
    first = [x.clone() for x in written]
    moved = arguments.pop("S")
    with pytest.raises(error, match=message):
        steps.call(function, [moved], arguments, inputs)
    assert all(map(torch.equal, written, first))


POOL = {"S": state(6, 4, 40, 24)}
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a time axis": (
        {"x": torch.randn(2, 3, 4, 40)}, ValueError,
        r"`x` has shape \[2, 3, 4, 40\].*`step` takes one token, x\[b h p\]; `steps` takes several, x\[b t h p\]",
    ),
    "rank": ({"B": torch.randn(2, 24)}, ValueError, r"`B` must be \[b g n\]"),
    "batch": ({"dt": torch.randn(3, 4)}, ValueError, r"`dt`\[b h\].*\bb is 2\b"),
    "missing": ({"C": None}, TypeError, r"\bC\b"),
    "sign": ({"A": torch.ones(4)}, ValueError, r"`A`.*-inf, 0\)"),
    "dtype": ({"B": torch.randn(2, 2, 24).half()}, TypeError, r"`B`.*dtype of `x`"),
    "scalar": ({"dt_min": -1.0}, ValueError, r"`dt_min`.*\[0, inf\]"),
    "state size": ({"S": state(2, 4, 24, 40)}, ValueError, r"`S`\[b h p n\].*\[2, 4, 24, 40\].*\bp is 40\b"),
    "state batch": ({"S": state(3, 4, 40, 24)}, ValueError, r"`S`\[b h p n\].*\bb is 2\b"),
    "state rank": ({"S": state(2, 4, 960)}, ValueError, r"`S` must be \[b h p n\] \(rank 4\)"),
    "state dtype": ({"S": state(dtype=torch.float16)}, TypeError, r"`S` must be float32 or bfloat16.*float16"),
    "state device": ({"S": state(device="meta")}, ValueError, r"`S` is on meta.*cpu"),
    "state of one memory": ({"S": torch.zeros(1, 4, 40, 24).expand(2, 4, 40, 24)}, ValueError, r"`S`.*same memory"),
    "no state": ({"S": [0.0]}, TypeError, r"`S` must be a torch\.Tensor, got list"),
    "out size": ({"out": torch.zeros(2, 4, 41)}, ValueError, r"`out of y`\[b h p\].*\bp is 40\b"),
    "out dtype": ({"out": torch.zeros(2, 4, 40).half()}, TypeError, r"`out of y` must be float32, got float16"),
    "out of one memory": ({"out": torch.zeros(1, 4, 40).expand(2, 4, 40)}, ValueError, r"`out of y`.*same memory"),
    "two outputs": ({"out": (torch.zeros(2, 4, 40),) * 2}, TypeError, r"`out` must be a tensor"),
    "indices of floats": ({**POOL, "state_indices": torch.zeros(2)}, TypeError, r"`state_indices` must be int32 or int64"),
    "indices of another length": (
        {**POOL, "state_indices": torch.zeros(3, dtype=torch.int32)}, ValueError, r"`state_indices`\[b\].*\[3\].*b is 2",
    ),
    "indices on another device": (
        {**POOL, "state_indices": torch.zeros(2, dtype=torch.int32, device="meta")}, ValueError, r"`state_indices` is on meta",
    ),
    "a slot beyond the pool": ({**POOL, "state_indices": torch.tensor([1, 6])}, ValueError, r"`state_indices` is 6 at 1.* 6 "),
    "a slot twice": ({**POOL, "state_indices": torch.tensor([3, 3])}, ValueError, r"`state_indices` has slot 3 twice, at 0"),
    "a written slot twice": (
        {**POOL, "state_indices": torch.tensor([1, 2]), "write_indices": torch.tensor([4, 4])}, ValueError,
        r"`write_indices` has slot 4 twice",
    ),
    "a written slot beyond the pool": (
        {**POOL, "state_indices": torch.tensor([1, 2]), "write_indices": torch.tensor([4, 9])}, ValueError,
        r"`write_indices` is 9 at 1",
    ),
    "a slot that another reads": (
        {**POOL, "state_indices": torch.tensor([1, 2]), "write_indices": torch.tensor([2, 4])}, ValueError,
        r"slot 2 is read at 1 of `state_indices` and updated at 0 of `write_indices`",
    ),
    "a promise that is none": ({"steady": 1}, TypeError, "`steady` must be True or False, got 1"),
    "slots to write alone": ({"write_indices": torch.tensor([0, 1])}, TypeError, r"`write_indices` goes with `state_indices`"),
}  # fmt: skip


@both
@pytest.mark.parametrize("what", WRONG)
def test_wrong_step(gate: Gate, what: str) -> None:
    refuse(gate, "step", *WRONG[what])


WRONG_SEVERAL: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no time axis": ({"x": torch.randn(2, 4, 40)}, ValueError, r"`x` has shape \[2, 4, 40\].*several, x\[b t h p\]"),
    "tokens": ({"B": torch.randn(2, 4, 2, 24)}, ValueError, r"`B`\[b t g n\].*\bt is 3\b"),
    "kept states": ({"before": torch.zeros(2, 2, 4, 40, 24)}, ValueError, r"`before of S`\[b t h p n\].*\bt is 3\b"),
    "kept dtype": ({"before": torch.zeros(2, 3, 4, 40, 24).half()}, TypeError, r"`before of S` must be float32 or bfloat16"),
    "kept in one memory": (
        {"before": torch.zeros(2, 1, 4, 40, 24).expand(2, 3, 4, 40, 24)}, ValueError, r"`before of S`.*same memory",
    ),
}  # fmt: skip


@both
@pytest.mark.parametrize("what", WRONG_SEVERAL)
def test_wrong_steps(gate: Gate, what: str) -> None:
    refuse(gate, "steps", *WRONG_SEVERAL[what])


@both
def test_several_states_come_as_a_tuple(gate: Gate) -> None:
    steps = steps_of(gate, "mlstm")
    case = Case({"b": 2, "t": 2, "h": 2, "p": 16, "n": 16})
    inputs = steps.drawn(case)
    with pytest.raises(TypeError, match=r"`before` must be a tuple of 2 tensors, for C, N"):
        steps.call("steps", steps.entering(inputs, case), steps.among(inputs, 0, 2), inputs, before=torch.zeros(1))
    pools = [torch.zeros(3, 2, 16, 16), torch.zeros(4, 2, 16)]
    with pytest.raises(ValueError, match=r"`N`\[b h n\].*\bb is 3 in `C`"):
        steps.call("step", pools, steps.at(inputs, 0), inputs, state_indices=torch.tensor([0, 1]))


@pytest.mark.parametrize("values", [{"tile_p": 48}, {"tile_p": 2}, {"warps": 3}, {"occupancy": 33}, {"occupancy": "2"}])
def test_bad_step_config(values: dict[str, Any]) -> None:
    module = subject("mamba2").module
    with pytest.raises(ValueError, match=next(iter(values))):
        module.StepConfig(**values)


def test_a_config_of_forward_is_none_of_steps() -> None:
    steps = steps_of("emulation")
    inputs = steps.drawn(Case(mamba2_sizes(t=1)))
    with pytest.raises(TypeError, match=r"`config` must be a mamba2\.StepConfig, got Config"):
        steps.call("step", [state()], steps.at(inputs, 0), inputs, config=subject("mamba2").module.Config())
