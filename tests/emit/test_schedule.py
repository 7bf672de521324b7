"""No construct of the schedule is decoration: each changes the emitted module in a pinned way, and stays right.

A golden file holds what a construct changes against the same spec without it, as a diff without its surroundings.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ssdgen.derive import chunk_form, recurrence
from ssdgen.diagnostics import Source
from ssdgen.emit import ModuleSource, emit
from ssdgen.emit.package import package
from ssdgen.plan import plan
from ssdgen.run.cases import Trial
from ssdgen.run.inputs import Case
from ssdgen.run.load import load
from ssdgen.run.verify import run_trial
from ssdgen.spec import read_layer

GOLDEN = Path(__file__).parent / "golden"

SPEC = """\
language 1
layer small "A gated recurrence with every kind of operand"

axes    b t h g p n
groups  g shares h
sizes   p = 64, n = 64

inputs
  x[b t h p]             : bf16 | f16 | f32
  dt[b t h]              : f32
  B[b t g n], C[b t g n] : like x
  D[h]                   : f32 = 0

let     step = softplus(dt)

state   S[b h p n] : f32
        S[t] = exp(-step) * S[t-1] + step * outer(x, B)

output  y[b t h p] : like x
        y = S[t] . C + D * x
"""

CONSTRUCTS = {
    "chunk": "chunk = 128",
    "mma_scores": "mma = scores: tf32",
    "mma_carried": "mma = carried: tf32x3",
    "mma_intra": "mma = intra: tf32",
    "mma_state": "mma = state: tf32",
    "mma_f32": "mma f32 = scores: tf32x3, carried: tf32x3, intra: tf32x3, state: tf32x3",
    "mma_f16": "mma f16 = scores: bf16",
    "layout_x": "layout x = b h t p",
    "layout_dt": "layout dt = b h t",
    "layout_B": "layout B = g b t n",
    "layout_y": "layout y = b h t p",
    "internal": "internal step = b t h",
    "internal_dt": "internal dt = h b t",
    "swap_scores": "swap = scores",
    "swap_carried": "swap = carried",
    "swap_intra": "swap = intra",
    "swap_state": "swap = state",
    "swap_all": "swap = scores, carried, intra, state",
    "latency_x": "latency x = 5",
    "latency_S": "plan = three_kernel\n  latency S = 4",
    "state_latency": "state_latency x = 2, S = 4",
    "latency_y": "latency y = 2",
    "tile": "tile p = 32",
    "three_kernel_tile": "plan = three_kernel\n  tile p = 32, n = 128",
    "state_tile": "state_tile p = 32, n = 32",
    "latency_scores": "latency scores = 2\n  share_scores_from = 1",
    "weighted": "weighted = column",
    "warps": "warps compute_out = 8",
    "share_scores_from": "share_scores_from = 2",
    "segments": "segments = 2",
    "plan_single_walk": "plan = single_walk",
    "plan_three_kernel": "plan = three_kernel",
    "persistent": "plan = three_kernel\n  persistent = yes",
    "three_kernel_weighted": "plan = three_kernel\n  weighted = column",
    "three_kernel_swapped": "plan = three_kernel\n  swap = scores, carried, intra, state",
    "three_kernel_layouts": "plan = three_kernel\n  layout x = b h t p\n  layout y = b h t p\n  internal step = b t h",
    "occupancy": "occupancy chunk_cumsum = 4, group_scores = 2, fwd_pass_state = 2, compute_out = 2",
}


def emitted(schedule: str = "") -> ModuleSource:
    text = SPEC + (f"\nschedule\n  {schedule}\n" if schedule else "")
    return emit(plan(chunk_form(recurrence(read_layer(Source("small.ssd", text))))))


@pytest.fixture(scope="module")
def plain() -> list[str]:
    return emitted().text.splitlines()


def test_plain_module(golden: Callable[[Path, str], None]) -> None:
    """The whole module of a spec without a schedule."""
    golden(GOLDEN / "plain.py.txt", emitted().text)


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_construct_changes_the_module(name: str, plain: list[str], golden: Callable[[Path, str], None]) -> None:
    lines = emitted(CONSTRUCTS[name]).text.splitlines()
    changes = [d for d in difflib.unified_diff(plain, lines, n=0, lineterm="") if d[:3] not in ("---", "+++", "@@ ")]
    changes = [d for d in changes if "SPEC_DIGEST" not in d]
    assert changes, f"`{CONSTRUCTS[name]}` changes nothing"
    golden(GOLDEN / f"{name}.diff", f"# {CONSTRUCTS[name]}\n" + "\n".join(changes) + "\n")


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("name", CONSTRUCTS)
def test_construct_is_right(name: str, dtype: str) -> None:
    """The kernels that a construct gives, in the emulator, and the portable path, against the float64 token loop."""
    module = emitted(CONSTRUCTS[name])
    chunk = module.plan.config.chunk
    sizes = {"b": 1, "t": chunk + 9, "h": 4, "g": 2, "p": 40, "n": 72}
    trial = Trial(name, Case(sizes, dtype="bf16" if dtype == "bf16" else "f32", seed=11))
    imported = load(module.name, package([module]))
    checks = [c for gate in ("portable", "emulation") for c in run_trial(gate, module.plan, imported, trial)]
    assert len(checks) == 4
    assert not [str(c) for c in checks if not c.passed]


@pytest.mark.parametrize("occupancy", [1, 2])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_a_persistent_kernel_does_everything_with_few_blocks(
    dtype: str, occupancy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """36 places by the 3 or 6 blocks that a GPU of 3 multiprocessors holds: each block loops, and the last turn is not full."""
    module = emitted(CONSTRUCTS["persistent"] + f"\n  occupancy compute_out = {occupancy}")
    imported = load(module.name, package([module]))
    cut = importlib.import_module("._cut", imported.__package__)
    monkeypatch.setattr(cut, "multiprocessors", lambda x: 3)
    assert cut.held(36, occupancy, torch.empty(1)) == 3 * occupancy
    sizes = {"b": 1, "t": 2 * module.plan.config.chunk + 9, "h": 4, "g": 2, "p": 140, "n": 72}
    trial = Trial("few", Case(sizes, dtype="bf16" if dtype == "bf16" else "f32", seed=5))
    assert not [str(c) for c in run_trial("emulation", module.plan, imported, trial) if not c.passed]


def test_a_caller_passes_arrays_in_the_order_of_the_layout() -> None:
    """`layout x = b h t p` is the order of the dimensions of the array that is passed, and a rank in another order is not
    taken for it."""
    module = emitted("layout x = b h t p")
    imported = load(module.name, package([module]))
    b, t, h, g, p, n = 1, 5, 2, 1, 8, 4
    x, dt = torch.randn(b, h, t, p), torch.randn(b, t, h)
    keys = torch.randn(2, b, t, g, n)
    assert imported.forward(x, dt, keys[0], keys[1])[0].shape == (b, t, h, p)
    with pytest.raises(ValueError, match=r"`dt`\[b t h\].*axis t is 2 in `x`"):
        imported.forward(x.transpose(1, 2), dt, keys[0], keys[1])
