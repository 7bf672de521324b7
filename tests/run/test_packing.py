"""The checks of packed sequences: they cover what they say, and each can fail."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from ssdgen.derive import chunk_form, recurrence
from ssdgen.diagnostics import Source
from ssdgen.emit import emit
from ssdgen.emit.package import package
from ssdgen.ir.report import Gate
from ssdgen.plan import plan as plan_of
from ssdgen.run.checks import relative_error
from ssdgen.run.inputs import Case, Inputs, draw
from ssdgen.run.load import load
from ssdgen.run.packing import Packing, packings
from ssdgen.run.reference import reference
from ssdgen.run.verify import packed
from ssdgen.spec import read_layer
from tests.cases.subject import BOTH, EXACT, Subject, subject

Spoil = Callable[[ModuleType, dict[str, Any]], Any]


@pytest.fixture(scope="module")
def attention() -> Subject:
    return subject("simple_gla")


def test_every_kind_of_sequence_is_tried() -> None:
    """Lengths 0, 1, 5, around a chunk and over several; no tokens at all; left and right padding, holes, a row of none."""
    made = list(packings(64))
    assert made[0].values == ((0, 0, 1, 6, 6, 69, 133, 198, 398),)
    assert {p.plane[1] for p in made} >= {0, 70}
    index = next(p for p in made if p.kind == "seq_idx")
    assert len(set(index.values)) == len(index.values), "rows differ"
    masks = [row for p in made if p.kind == "mask" for row in p.values]
    assert {(row[0], row[-1]) for row in masks} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert any(not any(row) for row in masks)
    assert {p.narrow for p in made if p.kind != "mask"} == {True, False}


@pytest.mark.parametrize(
    ("packing", "parts"),
    [
        (Packing("", "cu_seqlens", ((0, 2, 2, 3),)), [(0, (0, 1), 0, True), (0, (), 1, True), (0, (2,), 2, True)]),
        (Packing("", "mask", ((1, 0, 1), (0, 0, 0))), [(0, (0, 2), 0, True), (1, (), 1, True)]),
        (
            Packing("", "seq_idx", ((4, 4, 2), (1, 1, 1))),
            [(0, (0, 1), 0, True), (0, (2,), 0, False), (1, (0, 1, 2), 1, True)],
        ),
    ],
)
def test_parts(packing: Packing, parts: list[tuple[Any, ...]]) -> None:
    assert [(p.row, p.tokens, p.entry, p.enters) for p in packing.parts()] == parts


def ignored(name: str) -> Spoil:
    def forward(module: ModuleType, arguments: dict[str, Any]) -> Any:
        given = arguments.pop(name, None)
        if given is None or name != "cu_seqlens":
            return module.forward(**arguments)
        S0 = arguments.pop("S0")
        y, S = module.forward(**arguments, S0=S0[:1])
        return y, S.expand(S0.shape)

    return forward


def changed(change: Callable[[torch.Tensor, torch.Tensor], Any]) -> Spoil:
    return lambda module, arguments: change(*module.forward(**arguments))


def reversed_in_time(module: ModuleType, arguments: dict[str, Any]) -> Any:
    """A token sees a later one: the mean of a tensor over all tokens leaks into every output."""
    y, S = module.forward(**arguments)
    return y + 1e-6 * arguments["v"].mean(), S


LATE_GATE = """\
language 1
layer late_gate "A gate whose tokens come last, of more axes than the input that outputs are like"

axes    b t h p n
sizes   p = 32, n = 32

inputs
  u[b t h]               : bf16 | f16 | f32
  v[b t h p]             : like u
  k[b t h n], q[b t h n] : like u
  z[b h p t]             : like u optional

state   S[b h p n] : f32
        S[t] = 0.9 * S[t-1] + u * outer(v, k)

output  y[b t h p] : like u
        y = S[t] . q
        when z: y = y * silu(z)
"""


@pytest.mark.parametrize("gate", BOTH)
@pytest.mark.parametrize("absent", [{"S0"}, {"S0", "z"}], ids=["with z", "without z"])
def test_an_absent_gate_is_not_cut(gate: Gate, absent: set[str]) -> None:
    """What stands in for an absent input may have fewer axes, and its tokens elsewhere: it is no part of a sequence."""
    plan = plan_of(chunk_form(recurrence(read_layer(Source("late_gate.ssd", LATE_GATE)))))
    source = emit(plan)
    late = Subject(plan, load(source.name, package([source])))
    inputs = draw(late.layer, Case({"b": 1, "t": 70, "h": 2, "p": 32, "n": 32}, absent=frozenset(absent)))
    packed = Inputs(inputs.tensors | {"cu_seqlens": torch.tensor([0, 30, 70])}, {}, {})
    y, S = late.call(gate, packed, **(EXACT if gate == "emulation" else {}))
    for i, tokens in enumerate((slice(0, 30), slice(30, 70))):
        own = {name: x[..., tokens] if name == "z" else x[:, tokens] for name, x in inputs.tensors.items()}
        outputs, finals = reference(late.layer, own, {}, {})
        assert relative_error(y[:, tokens], outputs["y"]) <= 1e-5
        assert relative_error(S[i : i + 1], finals["S"]) <= 1e-5


SPOILERS: dict[str, Spoil] = {
    "cu_seqlens are ignored": ignored("cu_seqlens"),
    "seq_idx is ignored": ignored("seq_idx"),
    "the mask is ignored": ignored("mask"),
    "the first state for all": changed(lambda y, S: (y, S[:1].expand(S.shape))),
    "one bit of an output": changed(lambda y, S: (torch.nextafter(y, y + 1), S)),
    "masked outputs": changed(lambda y, S: (torch.where(y == 0, 1e-9, y), S)),
    "a later token": reversed_in_time,
}


class Broken:
    def __init__(self, module: ModuleType, forward: Spoil) -> None:
        self.__package__ = module.__package__
        self._module, self._forward = module, forward

    def forward(self, **arguments: Any) -> Any:
        return self._forward(self._module, arguments)


def test_what_is_right_passes(attention: Subject) -> None:
    assert all(c.passed for c in packed("portable", attention.plan, attention.module))


@pytest.mark.parametrize("what", SPOILERS)
def test_what_is_wrong_fails(attention: Subject, what: str) -> None:
    broken: Any = Broken(attention.module, SPOILERS[what])
    assert not all(c.passed for c in packed("portable", attention.plan, broken))


def test_what_is_not_there_yet_is_skipped_with_the_reason(attention: Subject) -> None:
    def refuse(module: ModuleType, arguments: dict[str, Any]) -> Any:
        raise NotImplementedError("not yet")

    broken: Any = Broken(attention.module, refuse)
    (check,) = packed("portable", attention.plan, broken)
    assert check.skipped
    assert check.note == "not yet"
