"""The kernels of steps compile for every architecture, and are nothing but memory traffic there."""

from __future__ import annotations

import pytest

from ssdgen.build.compile import build
from ssdgen.derive import chunk_form, recurrence
from ssdgen.emit import emit
from ssdgen.emit.package import package
from ssdgen.ir.build import DEFAULT_ARCHITECTURES, CompileRequest
from ssdgen.plan import plan as plan_of
from ssdgen.run.launches import compile_requests
from ssdgen.run.load import load
from ssdgen.spec import load_source, read_layer


def requests(name: str, architectures: tuple[str, ...]) -> list[CompileRequest]:
    plan = plan_of(chunk_form(recurrence(read_layer(load_source(name)))))
    source = emit(plan)
    every = compile_requests(plan, load(source.name, package([source])), architectures, ["bf16"])
    return [r for r in every if r.kernel.startswith("token_step")]


@pytest.mark.parametrize(
    ("name", "architectures"), [("mamba2", DEFAULT_ARCHITECTURES), ("mlstm", ("sm_90",)), ("retnet", ("sm_90",))]
)
def test_steps_compile_without_spills(name: str, architectures: tuple[str, ...]) -> None:
    """States of float32 and bfloat16, steady ones, slots, kept states: no registers spilled, no tensor cores, no TMA."""
    wanted = requests(name, architectures)
    labels = {r.label for r in wanted}
    assert {"bf16", "bf16 steady", "bf16 with bf16 slots", "bf16 with 4 tokens"} <= labels
    built = build(wanted)
    assert not [str(f) for f in built.failures]
    for kernel in built.kernels:
        used = kernel.resources
        assert (used.spilled_bytes, used.mma, used.tma_loads, used.tma_stores) == (0, (), 0, 0), str(kernel.request)
