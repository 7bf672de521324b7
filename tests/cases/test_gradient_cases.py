"""The rows of CASES.md that gradients have a part in, each a test named after it: kernels in the emulator against autograd
through the float64 loop over tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from generated import _runtime, mamba2, mamba2_gradients, simple_gla
from ssdgen.ir.report import Gate
from ssdgen.run.checks import BOUNDS, one_thread, poisoned_memory, relative_error
from ssdgen.run.inputs import Case, Inputs, Memory, draw
from ssdgen.run.reference import reference
from ssdgen.run.verify import emulated
from ssdgen.spec import load_source, read_layer
from tests.cases.subject import BOTH, EXACT, mamba2_sizes

Gradients = dict[str, Tensor]
CANCELS = {"A": 8, "dt_bias": 4}
"""How many times the bound a gradient may be off that is a sum over tokens whose terms cancel."""
INFINITY = float("inf")
LAYER = read_layer(load_source("mamba2"))
ORDER = [i.name for i in LAYER.inputs]


def weights(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """What arrives at y and at the final state, numbers that bf16 has."""
    generator = torch.Generator().manual_seed(9)
    shape = (*inputs.tensors["x"].shape[::3][:1], *inputs.tensors["x"].shape[2:], inputs.tensors["B"].shape[-1])
    return tuple(torch.randn(s, generator=generator).bfloat16() for s in (inputs.tensors["x"].shape, shape))  # type: ignore[return-value]


def kernels(inputs: Inputs, **config: int | str) -> Gradients:
    """The gradients of a call, with changes of the Config of the gradient kernels."""
    y, state = weights(inputs)
    limits = tuple(inputs.params.get(name, default) for name, default in (("dt_min", 0.0), ("dt_max", INFINITY)))
    tensors = [inputs.tensors.get(name) for name in ORDER]
    chosen = replace(mamba2_gradients.CONFIGS[inputs.tensors["x"].dtype], **config)
    with one_thread(), poisoned_memory(), emulated(mamba2):
        found = mamba2_gradients.GRADIENTS(tensors, limits, (inputs.states.get("S"),), None, (y,), (state,), chosen)
    named = zip([*ORDER, "S0"], found, strict=True)
    present = {**inputs.tensors, **{f"{s}0": x for s, x in inputs.states.items()}}
    return {name: gradient for name, gradient in named if name in present}


def loop(inputs: Inputs) -> Gradients:
    """The same by the loop over tokens."""
    leaves = {name: x.double().requires_grad_() for name, x in inputs.tensors.items()}
    states = {s: x.double().requires_grad_() for s, x in inputs.states.items()}
    with one_thread(), torch.enable_grad():
        outputs, finals = reference(LAYER, leaves, inputs.params, states)
        loss = sum((v * w.double()).sum() for v, w in zip((outputs["y"], finals["S"]), weights(inputs), strict=True))
        named = {**leaves, **{f"{s}0": x for s, x in states.items()}}
        assert isinstance(loss, Tensor)
        return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def compare(got: Mapping[str, Tensor], want: Mapping[str, Tensor], bound: float) -> None:
    for name, value in want.items():
        assert got[name].isfinite().all(), name
        assert relative_error(got[name], value) <= bound * CANCELS.get(name, 1), name


@pytest.mark.parametrize("length", [257, 300])
def test_ragged_length_and_gradients_at_every_chunk_size(length: int) -> None:
    """mamba 352, 353: NaN gradients in bf16 when S is no multiple of 256. fla 984: dk wrong at Q=64 only."""
    inputs = draw(LAYER, Case(mamba2_sizes(b=1, t=length, h=2, g=1, p=32, n=32), dtype="bf16", seed=31))
    want = loop(inputs)
    for chunk in (16, 32, 64, 128, 256):
        compare(kernels(inputs, chunk=chunk), want, BOUNDS["bf16"])


TILES: tuple[dict[str, int], ...] = (
    {"state_tile_p": 32, "state_tile_n": 32},
    {"state_tile_p": 128, "state_tile_n": 32, "segments": 2},
    {"tile_h": 2, "shares": 2},
    {"tile_h": 16, "shares": 3, "segments": 3},
)


def test_tile_configs() -> None:
    """mamba PR 537: wrong gradient for some block sizes."""
    inputs = draw(LAYER, Case(mamba2_sizes(b=1, t=150, h=6, g=2, p=40, n=70), seed=32))
    want = kernels(inputs, **EXACT)
    compare(want, loop(inputs), BOUNDS["tf32x3"])
    for tiles in TILES:
        compare(kernels(inputs, **EXACT, **tiles), want, BOUNDS["tf32x3"])


@pytest.mark.parametrize("chunk", [64, 256])
def test_strong_decay(chunk: int) -> None:
    """mamba PR 713, vllm PR 37501: a decay sum rounds to a positive number and exp overflows.

    A = -1e5, steps up to 100, half of them 0: finite, and equal to float64. What decays so much gets no gradient at all.
    """
    drawn = draw(LAYER, Case(mamba2_sizes(b=1, t=300, h=2, g=1, p=32, n=32), seed=5))
    generator = torch.Generator().manual_seed(6)
    raw = 100 * torch.rand(drawn.tensors["dt"].shape, generator=generator)
    asleep = torch.rand(raw.shape, generator=generator) < 0.5
    tensors = drawn.tensors | {"dt": raw.masked_fill(asleep, -1e4), "A": torch.full((2,), -1e5)}
    inputs = Inputs({k: v for k, v in tensors.items() if k != "dt_bias"}, {}, drawn.states)
    want = loop(inputs)
    assert not want["A"].any()
    compare(kernels(inputs, chunk=chunk, **EXACT), want, 3e-5)


@pytest.mark.parametrize("gate", BOTH)
def test_no_decay(gate: Gate) -> None:
    """Not in CASES.md: a decay of exactly 1 is where its clamp begins, and of less than 2^-128 where it ends. The gradient is
    whole there, and 0; it was halved in the portable form, and what float32 leaves of a sum that cancels in the kernels."""
    layer = read_layer(load_source("simple_gla"))
    inputs = draw(layer, Case({"b": 1, "t": 70, "h": 2, "p": 32, "n": 32}, dtype="f32", seed=38))
    inputs.tensors["g"][:, ::3], inputs.tensors["g"][:, 10] = 0, -1000

    def gradient(call: Callable[[Gradients], Tensor], dtype: torch.dtype) -> Tensor:
        leaves = {name: x.to(dtype, copy=True).requires_grad_() for name, x in inputs.tensors.items()}
        return torch.autograd.grad(call(leaves).sum(), leaves["g"])[0]

    want = gradient(lambda leaves: reference(layer, leaves)[0]["y"], torch.float64)
    with one_thread(), emulated(simple_gla) if gate == "emulation" else nullcontext():
        got = gradient(lambda leaves: simple_gla.forward(**leaves)[0], torch.float32)
    assert relative_error(got, want) < (1e-4 if gate == "portable" else BOUNDS["tf32"])
    assert not got[:, 10].any()


def test_softplus() -> None:
    """TileOPs PR 1118: of a raw step of 90 the gradient goes through as it is, of -20 a part in 5e8 does."""
    inputs = draw(LAYER, Case(mamba2_sizes(b=1, t=4, h=2, g=1, p=32, n=32), seed=33))
    raw = torch.tensor([[[90.0, -20.0], [-20.0, 30.0], [0.0, 90.0], [-80.0, 1.0]]])
    inputs = replace(inputs, tensors={**inputs.tensors, "dt": raw, "A": torch.tensor([-1e-3, -1e-2])})
    got, want = (g["dt"] for g in (kernels(inputs, **EXACT), loop(inputs)))
    assert torch.allclose(got.double(), want, rtol=1e-4, atol=0)


def test_dt_limits() -> None:
    """transformers PR 48989: limits (1e-3, 0.1) clamp, and outside of them the gradient is 0; inside it is what it is."""
    inputs = draw(LAYER, Case(mamba2_sizes(b=1, t=70, h=2, g=1, p=32, n=32), seed=34))
    generator = torch.Generator().manual_seed(7)
    step = 10 ** (4 * torch.rand(inputs.tensors["dt"].shape, generator=generator) - 4)  # 1e-4 to 1
    tensors = {**inputs.tensors, "dt": torch.log(torch.expm1(step))} | {"dt_bias": torch.zeros(2)}
    limited = replace(inputs, tensors=tensors, params={"dt_min": 1e-3, "dt_max": 0.1})
    got = kernels(limited, **EXACT)
    outside = (step < 0.99e-3) | (step > 0.101)
    assert outside.any()
    assert not got["dt"][outside].any()
    inside = (step > 1.01e-3) & (step < 0.099)
    assert got["dt"][inside].all()
    compare(got, loop(limited), BOUNDS["tf32x3"])
    free = replace(limited, params={"dt_min": 0.0, "dt_max": INFINITY})
    assert kernels(free, **EXACT)["dt"].all()


OPTIONAL = ("z", "D", "dt_bias", "S0")


def test_optional_inputs() -> None:
    """fla 245: a None input gives the wrong number of gradients. Every pair of one that is absent and one that needs a gradient
    alone, by autograd; what is absent has none."""
    drawn = draw(LAYER, Case(mamba2_sizes(b=1, t=9, h=2, g=1, p=32, n=32), seed=35))
    named: dict[str, Any] = {**drawn.keywords()}
    wanted: dict[str | None, Gradients] = {}

    def gradients(absent: str | None, needed: set[str]) -> Gradients:
        given = {n: x.clone().requires_grad_(n in needed) for n, x in named.items() if n != absent}
        with one_thread(), poisoned_memory(), emulated(mamba2):
            y, S = mamba2.forward(**given)
            leaves = {n: given[n] for n in given if n in needed}
            found = torch.autograd.grad(y.sum() + S.sum(), list(leaves.values()))
        return dict(zip(leaves, found, strict=True))

    for absent, alone in itertools.product((None, *OPTIONAL), named):
        if absent == alone:
            continue
        if absent not in wanted:
            wanted[absent] = gradients(absent, set(named) - {absent})
            assert set(wanted[absent]) == set(named) - {absent}
        (got,) = gradients(absent, {alone}).values()
        assert torch.equal(got, wanted[absent][alone]), (absent, alone)


def test_strides_and_out_of_bounds() -> None:
    """mamba 351, 643, fla 519 and 1142: slices of one buffer, other orders of memory, NaN behind every row: the gradients are
    those of contiguous inputs, bit for bit."""
    kinds: tuple[Memory, ...] = ("slices", "transposed", "surrounded")
    case = Case(mamba2_sizes(b=2, t=70, h=3, g=1, p=20, n=24), seed=36)
    want = kernels(draw(LAYER, case))
    for memory in kinds:
        got = kernels(draw(LAYER, replace(case, memory=memory)))
        for name, gradient in want.items():
            assert torch.equal(got[name], gradient), (memory, name)


@pytest.mark.parametrize(("heads", "p", "length"), [(3, 5, 119), (4, 8, 17), (11, 19, 65)])
def test_odd_sizes(heads: int, p: int, length: int) -> None:
    """vllm's grid: heads and channels of no power of two, few tokens in the last chunk."""
    inputs = draw(LAYER, Case(mamba2_sizes(b=1, t=length, h=heads, g=1, p=p, n=31), seed=37))
    compare(kernels(inputs, **EXACT), loop(inputs), BOUNDS["tf32x3"])


def test_after_a_call_under_inference_mode() -> None:
    """What stands in for absent inputs is made once, and may have been made where no gradients are kept."""
    given = {
        "x": torch.randn(1, 20, 2, 4), "dt": torch.randn(1, 20, 2), "A": -torch.ones(2),
        "B": torch.randn(1, 20, 1, 4), "C": torch.randn(1, 20, 1, 4),
    }  # fmt: skip
    _runtime._constant.cache_clear()
    with torch.inference_mode():
        mamba2.forward(**given)
    leaves = {name: x.requires_grad_() for name, x in given.items()}
    mamba2.forward(**leaves)[0].sum().backward()
    assert all(x.grad is not None for x in leaves.values())
