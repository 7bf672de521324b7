"""What a kernel reads of an array that it writes in place it reads before: a second load would see new values.

The compiler makes such loads: on an H200 one made a convolution wrong that the emulator, which runs the text, finds right.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from generated import causal_conv, mamba2, mlstm, norms, projection
from ssdgen.build.worker import Compiled, answer
from ssdgen.ir.build import CompileRequest, ConstantArg, array_arg
from ssdgen.ir.layer import Dtype
from ssdgen.run.recorded import Call, StepCall, record_step, recording
from tests.build import rolling
from tests.build.machine_code import accesses, disassembled, read_again

DTYPES = (torch.float32, torch.bfloat16)
STATES: tuple[Dtype, ...] = ("f32", "bf16")


def text_of(request: CompileRequest) -> str:
    made = answer(replace(request, arch="sm_90"))
    assert isinstance(made, Compiled), made
    return disassembled(made.cubin)


def test_a_second_load_is_seen() -> None:
    """In a kernel of its own: this check can fail. Where a compiler no longer makes it, this test says so."""
    shapes: dict[str, tuple[int, ...]] = {
        "x": (1, 256),
        "weight": (1544, 256),
        "taps": (1544, 4),
        "y": (1, 1544),
        "cache": (1, 1544, 3),
    }
    arrays = [array_arg(name, "f32", shape) for name, shape in shapes.items()]
    constants = [ConstantArg("TILE_K", 256), ConstantArg("TILE_O", 4), ConstantArg("WIDTH", 4)]
    hints = (("occupancy", 4), ("num_worker_warps", 4))
    text = text_of(CompileRequest(rolling.__file__, "rolling", (*arrays, *constants), hints, arch=""))
    assert read_again(text)


def convolutions() -> None:
    for dtype, d, w, b, t, steady in itertools.product(DTYPES, (1792,), (4,), (1,), (1, 4), (False, True)):
        cache, x = torch.empty(b, d, w - 1, dtype=dtype), torch.empty(b, t, d, dtype=dtype)
        taps, bias = torch.empty(d, w, dtype=dtype), torch.empty(d, dtype=dtype)
        causal_conv.steps(cache, x, taps, bias, activation="silu", steady=steady)


def norms_in_place() -> None:
    for dtype, length, gated in itertools.product(DTYPES, (768,), (False, True)):
        x, add = torch.empty(3, length), torch.empty(3, length, dtype=dtype)
        norms.rms_norm(x, torch.empty(length, dtype=dtype), add=add, gate=add if gated else None)


def products() -> None:
    for dtype, o, k in ((DTYPES[1], 768, 1536), (DTYPES[1], 2560, 5120), (DTYPES[0], 60, 120)):
        x, weight, norm = torch.empty(1, k, dtype=dtype), torch.empty(o, k, dtype=dtype), torch.empty(k, dtype=dtype)
        projection.project(x, weight, norm=norm, onto=torch.empty(1, o), steady=True)


@pytest.mark.parametrize("calls", [convolutions, norms_in_place, products])
def test_what_is_updated_in_place_is_read_before(calls: Callable[[], None]) -> None:
    with recording(mamba2) as launches, torch.no_grad():
        calls()
    _check(launches)


@pytest.mark.parametrize("module", [mamba2, mlstm])
def test_states_are_read_before_they_are_written(module: Any) -> None:
    """Of one token, steady or not, in float32 and bfloat16."""
    axes = {a for i in module.LAYER.inputs for a in i.axes}
    sizes = {
        a: n
        for a, n in {"b": 1, "t": 1, "h": 24, "g": 1, "p": 64, "n": 128}.items()
        if a in axes | {"b", "t", "h", "p", "n"}
    }
    launches = []
    for state, steady in itertools.product(STATES, (False, True)):
        launches += record_step(module, StepCall(Call(sizes, "bf16"), state, steady=steady))
    _check(launches)


def _check(launches: Any) -> None:
    """No load behind a store of what is loaded; and what is updated in place is seen to be both loaded and stored."""
    for request in dict.fromkeys(launch.request for launch in launches):
        text = text_of(request)
        found = accesses(text)
        both = {a.array for a in found if a.kind == "load"} & {a.array for a in found if a.kind == "store"} - {None}
        assert both, request
        assert not read_again(text), request
