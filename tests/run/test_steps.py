"""The checks of steps fail when something is wrong with them: each alteration of an emitted module is caught by one."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest

from ssdgen.derive import chunk_form, recurrence
from ssdgen.diagnostics import Source
from ssdgen.emit import emit
from ssdgen.emit.package import package
from ssdgen.ir.build import ConstantArg
from ssdgen.ir.layer import Dtype
from ssdgen.ir.plan import Plan
from ssdgen.ir.report import Gate
from ssdgen.plan import plan as plan_of
from ssdgen.run.emulate import EmulationError
from ssdgen.run.load import load
from ssdgen.run.recorded import Call, StepCall, record_step
from ssdgen.run.verify import stepped
from ssdgen.spec import load_source, read_layer
from tests.cases.subject import subject

SPEC = """\
language 1
layer all_of_it "Both kinds of read, a normaliser, groups, a transposed state, two outputs of two dtypes, a gate"
axes b t h g p n
groups g shares h
inputs
  q[b t g n], k[b t g n] : like v
  v[b t h p]             : bf16 | f32
  f[b t h]               : f32
  D[h]                   : f32 = 0
  z[b t h p]             : like v optional
  param floor = 0.5

state S[b h n p] : f32
      S[t] = sigmoid(f) * S[t-1] + 2 * outer(exp(k), v)
      N[b h n] : f32
      N[t] = sigmoid(f) * N[t-1] + k

output y[b t h p] : like v
       y = S[t] . q / max(abs(N[t-1] . q), floor) + D * v
       when z: y = y * silu(z)
       w[b t h p] : f32
       w = S[t-1] . exp(q)
"""


def planned() -> Plan:
    return plan_of(chunk_form(recurrence(read_layer(Source("all_of_it.ssd", SPEC)))))


@pytest.mark.parametrize("gate", ["portable", "emulation"])
def test_a_layer_with_all_of_it(gate: Gate) -> None:
    plan = planned()
    module = emit(plan)
    checks = list(stepped(gate, plan, load(module.name, package([module]))))
    assert len(checks) > 60
    assert not [str(c) for c in checks if not c.passed]


ALTERED: dict[str, tuple[Gate, str, str, str]] = {
    "the state is not carried on": ("emulation", "mamba2.py", "            S_tile = ct.astype(S_now, S.dtype)\n", ""),
    "the state is not rounded between tokens": (
        "emulation", "mamba2.py", "S_tile = ct.astype(S_now, S.dtype)", "S_tile = S_now",
    ),
    "what is kept is after the token": (
        "emulation", "mamba2.py", "S_tile, WHOLE)\n            dt_tile", "S_tile * 1.5, WHOLE)\n            dt_tile",
    ),
    "a term without its weight": ("emulation", "mamba2.py", "(step_tile * x_tile)[:, None]", "x_tile[:, None]"),
    "no decay": ("emulation", "mamba2.py", "decay * ct.astype(S_tile, ct.float32)", "ct.astype(S_tile, ct.float32)"),
    "tiles that stick out pass for whole ones": ("emulation", "mamba2.py", "whole = ", "whole = True or "),
    "the read slot is written": ("emulation", "mamba2.py", "slot_at(write_indices", "slot_at(state_indices"),
    "a steady block that does not wait": (
        "emulation", "mamba2.py", "            ct.grid_dependency_control_wait()\n", "            pass\n",
    ),
    "a steady step of slots": ("emulation", "_step.py", "steady and read is None", "steady"),
    "a slot that is to be left out": ("emulation", "_direct.py", "(slot >= 0) & (slot < count), slot, -1", "slot < 0, 0, slot"),
    "outputs of sequences without a slot": ("emulation", "_step.py", "else torch.zeros", "else torch.empty"),
    "the normaliser is written while others read it": (
        "emulation", "mlstm.py", "        if into >= 0:\n",
        "        store_direct(N, (into, head, 0), (1, 1, TILE_N), N_tile, WHOLE)\n        if into >= 0:\n",
    ),
    "no decay in torch": ("portable", "mamba2.py", "    S.mul_(decay[:, :, None, None])\n", ""),
    "the read before the move": ("portable", "mamba2.py", "step[:, :, None] * x)", "step[:, :, None] * x * 0)"),
    "rows in another order": ("portable", "_step.py", "targets[kept], new.index", "targets[kept].flip(0), new.index"),
    "one copy for all tokens": ("portable", "_step.py", "kept.select(at + 1, token)", "kept.select(at + 1, 0)"),
}  # fmt: skip


@pytest.mark.parametrize("what", ALTERED)
def test_an_alteration_is_caught(what: str) -> None:
    gate, file, old, new = ALTERED[what]
    name = "mlstm" if file == "mlstm.py" else "mamba2"
    plan = plan_of(chunk_form(recurrence(read_layer(load_source(name)))))
    files = package([emit(plan)])
    assert files[file].count(old) >= 1, old
    at = files[file].rindex("def token_step") if file.endswith("2.py") and gate == "emulation" else 0
    files[file] = files[file][:at] + files[file][at:].replace(old, new, 1)
    assert fails(gate, plan, load(name, files))


def fails(gate: Gate, plan: Plan, module: ModuleType) -> bool:
    """Whether a check fails, or the emulator refuses a race or a tile outside of its array."""
    try:
        return any(not c.passed for c in stepped(gate, plan, module))
    except EmulationError:
        return True


@pytest.mark.parametrize(
    ("batch", "state", "tiles"),
    [(1, "f32", 8), (1, "bf16", 8), (16, "f32", 2), (16, "bf16", 2), (64, "f32", 1), (64, "bf16", 1)],
)
def test_tiles_of_steps(batch: int, state: Dtype, tiles: int) -> None:
    """What an H200 was fastest with at 80 heads of 64 channels: 8 rows a tile for few blocks, 32 for more, then all of them."""
    sizes = {"b": batch, "t": 1, "h": 80, "g": 1, "p": 64, "n": 128}
    (launch,) = record_step(subject("mamba2").module, StepCall(Call(sizes, "bf16"), state))
    assert launch.grid == (batch * 80, tiles)


def test_states_are_indexed_with_int64_and_without_tma() -> None:
    """A pool may hold more than 2^31 elements, and a slot of one be a small part of a cache of many layers."""
    source = emit(plan_of(chunk_form(recurrence(read_layer(load_source("mamba2"))))))
    module = load(source.name, package([source]))
    sizes = {"b": 2, "t": 1, "h": 8, "g": 1, "p": 64, "n": 128}
    (launch,) = record_step(module, StepCall(Call(sizes, "bf16"), "bf16", pooled=True))
    wide = {a.name for a in launch.request.signature if getattr(a, "wide", False)}
    assert wide == {"S", "S_before"}
    assert launch.grid == (16, 8), "a tile of 8 rows a block: there are few of them"


@pytest.mark.parametrize("name", ["mamba2", "state_space_duality", "retnet", "linear_attention", "simple_gla", "mlstm"])
def test_what_is_steady(name: str) -> None:
    """A call that promises so, of states of its own, one token or several; both kernels where there are two, as the second
    reads nothing that the first writes. Not of slots, and not where the call makes a default itself."""
    of = subject(name)
    sizes = {a.name: 64 for a in of.layer.axes} | {"b": 2, "t": 1, "h": 8} | {g.axis: 1 for g in of.layer.groups}
    one = Call(sizes, "bf16")
    absent = tuple((i.name, 0) for i in of.module.LAYER.inputs if i.default is not None)

    def steady(call: StepCall) -> set[object]:
        constants = [a for launch in record_step(of.module, call) for a in launch.request.signature]
        return {a.value for a in constants if isinstance(a, ConstantArg) and a.name == "STEADY"}

    assert steady(StepCall(one)) == {False}
    assert steady(StepCall(one, steady=True)) == {True}
    assert steady(StepCall(replace(one, sizes={**sizes, "t": 3}), keeps=True, steady=True)) == {True}
    assert steady(StepCall(one, pooled=True, steady=True)) == {False}
    if absent:
        assert steady(StepCall(replace(one, forms=absent), steady=True)) == {False}
