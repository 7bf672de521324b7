"""The checks of continuation fail when something is wrong: each alteration of an emitted module is caught by one."""

from __future__ import annotations

from types import ModuleType

import pytest

from ssdgen.derive import chunk_form, recurrence
from ssdgen.emit import emit
from ssdgen.emit.package import package
from ssdgen.ir.plan import Plan
from ssdgen.ir.report import Gate
from ssdgen.plan import plan as plan_of
from ssdgen.run.emulate import EmulationError
from ssdgen.run.load import load
from ssdgen.run.verify import continued
from ssdgen.spec import load_source, read_layer
from tests.cases.subject import BOTH, subject


@pytest.mark.parametrize("gate", BOTH)
def test_a_module_passes(gate: Gate) -> None:
    of = subject("mlstm")
    checks = list(continued(gate, of.plan, of.module))
    assert len(checks) > 40
    assert not [str(c) for c in checks if not c.passed]


def test_what_looks_back_at_an_input_is_skipped() -> None:
    """Its state is not all that goes on from token to token."""
    plan = plan_of(chunk_form(recurrence(read_layer(load_source("mamba3")))))
    emitted = emit(plan, portable_only=True)
    (check,) = continued("portable", plan, load(emitted.name, package([emitted])))
    assert check.skipped
    assert "token before" in check.note


LAST_OF_BLOCK = "end % every == 0 and end <= length"
ALTERED: dict[str, tuple[Gate, str, str, str]] = {
    "a block that is not whole": ("emulation", "mlstm.py", LAST_OF_BLOCK, "end % every == 0"),
    "the block before": ("emulation", "mlstm.py", "CHUNK // every", "CHUNK // every - 1"),
    "another tile of rows": ("emulation", "mlstm.py", "block, head, p_tile, 0)", "block, head, 0 * p_tile, 0)"),
    "a segment that is not whole": ("emulation", "mlstm.py", "if (segment + 1) * every <= length:", "if True:"),
    "the segment after": ("emulation", "mlstm.py", "first + segment", "first + segment + 1"),
    "another row's sequence": ("emulation", "mlstm.py", "first = start // every", "first = 0"),
    "a vector from the blocks of every row": ("emulation", "mlstm.py", " " * 16 + "if p_tile == 0:", " " * 16 + "if True:"),
    "a state of a part of the chunk": ("emulation", "mamba2.py", "(decay_end - decay_sum_tile))  #", "(decay_end))  #"),
    "no initial state": ("emulation", "mamba2.py", "S0 is not None", "False"),
    "memory that no sequence has": ("emulation", "_blocks.py", "torch.zeros if packed", "torch.empty if packed"),
    "no initial state in torch": ("portable", "mamba2.py", "S = S.to(dtype, copy=True)", "S = 0 * S.to(dtype)"),
    "states in another order": ("portable", "_blocks.py", "stack(values, 1)", "stack(values[::-1], 1)"),
    "a chunk for a block": ("portable", "_blocks.py", "end % every == 0 and end <= length", "end <= length"),
    "sequences one behind the other": ("portable", "_blocks.py", "start // every, lines[row]", "0, ()"),
}  # fmt: skip


@pytest.mark.parametrize("what", ALTERED)
def test_an_alteration_is_caught(what: str) -> None:
    gate, file, old, new = ALTERED[what]
    name = "mlstm" if file == "mlstm.py" else "mamba2"
    plan = plan_of(chunk_form(recurrence(read_layer(load_source(name)))))
    files = package([emit(plan)])
    assert old in files[file], old
    at = files[file].index("def walk_out") if gate == "emulation" and file != "_blocks.py" else 0
    files[file] = files[file][:at] + files[file][at:].replace(old, new, 1)
    assert fails(gate, plan, load(name, files))


def fails(gate: Gate, plan: Plan, module: ModuleType) -> bool:
    """Whether a check fails, or the emulator or torch refuses what the module does."""
    try:
        return any(not c.passed for c in continued(gate, plan, module))
    except (EmulationError, RuntimeError):
        return True
