"""Rows of the list of what users of such kernels run into, as far as the forward pass is concerned; a test a row.

Rows that need what does not exist yet, with the topic of the work that brings it:

    step, cache slots                                  one-token step and its caches
    tuning, cache                                      the tuner and its table
    first call (a warm-up command)                     tuning and caches
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from ssdgen.diagnostics import Source, SpecError
from ssdgen.ir.build import array_arg
from ssdgen.ir.report import Gate
from ssdgen.run.cases import combinations
from ssdgen.run.checks import relative_error
from ssdgen.run.emulate import launch
from ssdgen.run.inputs import Case, Inputs, Memory, draw
from ssdgen.run.reference import reference
from ssdgen.spec import load_source, read_layer
from tests.cases.subject import BOTH, EXACT, Subject, mamba2_sizes, subject

both = pytest.mark.parametrize("gate", BOTH)


@pytest.fixture
def mamba2() -> Subject:
    return subject("mamba2")


@both
@pytest.mark.parametrize("length", [257, 300])
def test_ragged_length(mamba2: Subject, gate: Gate, length: int) -> None:
    """mamba 352, 353: NaN when S is not a multiple of the chunk. Q=256, S=257 and 300 in bf16."""
    case = Case(mamba2_sizes(b=1, t=length, h=2, g=1, p=32, n=32), dtype="bf16")
    mamba2.check(gate, case, {"chunk": 256})


@pytest.mark.parametrize("chunk", [40, 50])
def test_odd_chunk(mamba2: Subject, chunk: int) -> None:
    """mamba 449: S=200 with Q=40 or 50 gave NaN. Here the spec is refused, and so is the configuration of a call."""
    source = load_source("mamba2")
    line = next(line for line in source.text.splitlines() if line.split()[:1] == ["chunk"])
    odd = Source("odd.ssd", source.text.replace(line, f"  chunk = {chunk}"))
    with pytest.raises(SpecError, match="power of two"):
        read_layer(odd)
    inputs = draw(mamba2.layer, Case(mamba2_sizes(t=200)))
    with pytest.raises(ValueError, match="chunk"):
        mamba2.call("emulation", inputs, chunk=chunk)


@both
def test_strong_decay(mamba2: Subject, gate: Gate) -> None:
    """mamba PR 713, vllm PR 37501: a decay sum rounds to a positive number and exp overflows.

    A = -1e5, steps up to 100, half of them 0, Q=256: finite, and equal to float64 within the bound.
    """
    case = Case(mamba2_sizes(b=1, t=300, h=2, g=1, p=32, n=32), seed=5)
    drawn = draw(mamba2.layer, case)
    generator = torch.Generator().manual_seed(6)
    raw = 100 * torch.rand(drawn.tensors["dt"].shape, generator=generator)
    asleep = torch.rand(raw.shape, generator=generator) < 0.5
    tensors = drawn.tensors | {"dt": raw.masked_fill(asleep, -1e4), "A": torch.full((2,), -1e5)}
    inputs = Inputs({k: v for k, v in tensors.items() if k != "dt_bias"}, {}, drawn.states)
    outputs, finals = reference(mamba2.layer, inputs.tensors, {}, inputs.states)
    config = {"chunk": 256} | (EXACT if gate == "emulation" else {})
    for got, want in zip(mamba2.call(gate, inputs, **config), [*outputs.values(), *finals.values()], strict=True):
        assert relative_error(got, want) <= 3e-5


def _steps(mamba2: Subject, gate: Gate, raw: list[float], **params: float) -> torch.Tensor:
    """The step a raw dt becomes: the final state after one token of x = B = 1, one head a value."""
    h = len(raw)
    ones = torch.ones(1, 1, h, 1)
    tensors = {"x": ones, "dt": torch.tensor([[raw]]), "A": -torch.ones(h), "B": ones[:, :, :1], "C": ones[:, :, :1]}
    config = EXACT if gate == "emulation" else {}
    return mamba2.call(gate, Inputs(tensors, params, {}), **config)[1].flatten()


@pytest.mark.parametrize("name", ["B", "C"])
def test_one_large_token(mamba2: Subject, name: str) -> None:
    """Scores that a group shares are stored in float16: B or C of one token is 2^20 times the others', its input is gone a
    token later, and every token still has the output that float64 gives it, not only the largest ones.
    """
    case = Case(
        mamba2_sizes(b=1, t=64, h=2, g=1, p=32, n=32), dtype="bf16", absent=frozenset({"D", "z", "dt_bias", "S0"})
    )
    drawn = draw(mamba2.layer, case)
    tensors = {k: v.clone() for k, v in drawn.tensors.items()} | {"A": torch.full((2,), -1.0)}
    tensors[name][:, 10] *= 2.0**20
    tensors["dt"][:, 11] = 40.0
    inputs = Inputs(tensors, {}, {})
    outputs, _ = reference(mamba2.layer, inputs.tensors, {}, {})
    got, want = mamba2.call("emulation", inputs, share_scores_from=1)[0], outputs["y"]
    worst = max(relative_error(got[:, t], want[:, t]) for t in range(64))
    assert worst <= 2e-2  # bf16: 5e-3 of the whole, more of one token


@both
@pytest.mark.parametrize("share", [0, 1])
def test_a_later_token_changes_nothing(mamba2: Subject, gate: Gate, share: int) -> None:
    """Other values of all inputs from token 40 on, far larger ones: what comes before is the same bit for bit, also where
    scores that heads share are scaled to be stored."""
    inputs = draw(mamba2.layer, Case(mamba2_sizes(b=1, t=64, h=2, g=1, p=32, n=32), dtype="bf16"))
    later = {k: v.clone() for k, v in inputs.tensors.items()}
    for name in ("x", "dt", "B", "C", "z"):
        later[name][:, 40:] = 100 * later[name][:, 40:].flip(1)
    config = {"share_scores_from": share} if gate == "emulation" else {}
    one, other = (mamba2.call(gate, replace(inputs, tensors=t), **config)[0] for t in (inputs.tensors, later))
    assert torch.equal(one[:, :40], other[:, :40])
    assert not torch.equal(one[:, 40:], other[:, 40:])


@both
def test_softplus(mamba2: Subject, gate: Gate) -> None:
    """TileOPs PR 1118: raw dt of 90 gives 90, and -20 gives 2.06e-9, not 0."""
    steps = _steps(mamba2, gate, [90.0, -20.0, 0.0])
    torch.testing.assert_close(steps, torch.tensor([90.0, 2.0611536e-9, math.log(2)]), rtol=2e-6, atol=0)


@both
def test_dt_limits(mamba2: Subject, gate: Gate) -> None:
    """transformers PR 48989: a floor of 0.001 was invented. Without limits 1e-4 and 0.5 stay; with them they are clamped."""
    raw = [math.log(math.expm1(1e-4)), math.log(math.expm1(0.5)), math.log(math.expm1(0.05))]
    torch.testing.assert_close(_steps(mamba2, gate, raw), torch.tensor([1e-4, 0.5, 0.05]), rtol=1e-5, atol=0)
    limited = _steps(mamba2, gate, raw, dt_min=1e-3, dt_max=0.1)
    torch.testing.assert_close(limited, torch.tensor([1e-3, 0.1, 0.05]), rtol=1e-5, atol=0)


def test_dt_limits_gradient(mamba2: Subject) -> None:
    """transformers PR 48989: where a limit clamps the step, its gradient is 0; elsewhere it is not."""
    drawn = draw(mamba2.layer, Case(mamba2_sizes(b=1, t=3, h=1, g=1, p=4, n=4), dtype="f64"))
    raw = torch.tensor([1e-4, 0.5, 0.05], dtype=torch.float64).expm1().log().view(1, 3, 1).requires_grad_()
    tensors = drawn.tensors | {"dt": raw}
    del tensors["dt_bias"]
    y, _ = mamba2.call("portable", Inputs(tensors, {"dt_min": 1e-3, "dt_max": 0.1}, drawn.states))
    torch.autograd.backward(y.sum())
    assert raw.grad is not None
    assert (raw.grad.flatten() != 0).tolist() == [False, False, True]


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_of_A(mamba2: Subject, gate: Gate, dtype: torch.dtype) -> None:
    """mamba PR 923: exp(A) computed in bf16. A may come in bf16, but everything made of it is float32."""
    inputs = draw(mamba2.layer, Case(mamba2_sizes(), seed=8))
    inputs.tensors["A"] = inputs.tensors["A"].to(dtype)
    config = EXACT if gate == "emulation" else {}
    outputs, finals = reference(mamba2.layer, inputs.tensors, {}, inputs.states)
    for got, want in zip(mamba2.call(gate, inputs, **config), [*outputs.values(), *finals.values()], strict=True):
        assert relative_error(got, want) <= 1e-5


@both
def test_wide_head(mamba2: Subject, gate: Gate) -> None:
    """mamba 387: P=512 with one head asked for 664 KB of shared memory. P is tiled."""
    mamba2.check(gate, Case(mamba2_sizes(b=1, t=65, h=1, g=1, p=512, n=32)), EXACT if gate == "emulation" else None)


@both
@pytest.mark.parametrize(("p", "n", "chunk"), [(64, 64, 128), (32, 128, 64), (128, 32, 64)])
def test_sizes(mamba2: Subject, gate: Gate, p: int, n: int, chunk: int) -> None:
    """flashinfer 3397: H=128, P=64, G=8, N=64, Q=128 did not compile while N=128 did. N != Q and P != N both work."""
    heads = 128 if gate == "portable" else 16
    mamba2.check(gate, Case(mamba2_sizes(b=1, t=130, h=heads, g=8, p=p, n=n), dtype="bf16"), {"chunk": chunk})


@both
@pytest.mark.parametrize(("p", "n"), [(80, 96), (33, 31), (1, 1), (256, 256)])
def test_padding(mamba2: Subject, gate: Gate, p: int, n: int) -> None:
    """flashinfer PR 2865: N=96. Tiles are larger than P=80, N=96, and what lies around the tensors is NaN."""
    case = Case(mamba2_sizes(b=1, t=67, h=2, g=1, p=p, n=n), memory="surrounded")
    mamba2.check(gate, case, EXACT if gate == "emulation" else None)


@both
@pytest.mark.parametrize("heads", [3, 5, 11])
@pytest.mark.parametrize("memory", ["slices", "transposed", "expanded"])
def test_strides(mamba2: Subject, gate: Gate, heads: int, memory: Memory) -> None:
    """mamba 351, 643, fla 519: odd numbers of heads; x, B, C and dt as slices of one buffer, transposed, stride 0."""
    case = Case(mamba2_sizes(t=67, h=heads, g=1), memory=memory)
    mamba2.check(gate, case, EXACT if gate == "emulation" else None)


@both
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize(("heads", "p"), [(3, 5), (4, 8), (11, 19)])
def test_odd_sizes(mamba2: Subject, gate: Gate, dtype: str, heads: int, p: int) -> None:
    """vllm's grid: H in 3, 4, 11, P in 5, 8, 19, S=119 with the smallest chunk; its chunk of 17 is refused above."""
    case = Case(mamba2_sizes(b=1, t=119, h=heads, g=1, p=p, n=16), dtype=dtype)  # type: ignore[arg-type]
    mamba2.check(gate, case, {"chunk": 16})


@both
@pytest.mark.parametrize("form", ["absent", "h", "h p"])
def test_D(mamba2: Subject, gate: Gate, form: str) -> None:
    """mamba 887, 888: D of shape (H, P) was wrong. Absent, (H,) and (H, P)."""
    if form == "absent":
        case = Case(mamba2_sizes(), seed=9, absent=frozenset({"D"}))
    else:
        case = Case(mamba2_sizes(), seed=9, forms={"D": tuple(form.split())})
    mamba2.check(gate, case, EXACT if gate == "emulation" else None)


def test_one_D_a_head(mamba2: Subject) -> None:
    """D of one number a head is read as one number, of which registers keep no row, and gives the bits of a whole row of it."""
    inputs = draw(mamba2.layer, Case(mamba2_sizes(), dtype="bf16", forms={"D": ("h",)}))
    rows = inputs.tensors | {"D": inputs.tensors["D"][:, None].repeat(1, 40)}
    one, many = (mamba2.call("emulation", replace(inputs, tensors=t)) for t in (inputs.tensors, rows))
    assert all(torch.equal(a, b) for a, b in zip(one, many, strict=True))
    runtime = importlib.import_module("._runtime", mamba2.module.__package__)
    flags: list[object] = []

    def record(kernel: object, grid: object, args: tuple[object, ...]) -> None:
        names = list(inspect.signature(kernel._pyfunc).parameters)  # type: ignore[attr-defined]
        flags.extend(a for a, name in zip(args, names, strict=True) if name == "D_UNIFORM_P")

    with runtime.launcher(record):
        for tensors in (inputs.tensors, rows):
            mamba2.module.forward(**replace(inputs, tensors=tensors).keywords())
    assert flags == [True, False]


@both
def test_index_overflow(mamba2: Subject, gate: Gate) -> None:
    """mamba 1015: offsets wrap in int32, dt being a slice of long rows. Equal to contiguous input.

    The second sequence starts more than 2^31 elements after the first, in memory that is never touched in between.
    """
    inputs = draw(mamba2.layer, Case(mamba2_sizes(b=2, t=20)))
    dt = inputs.tensors["dt"]
    far = torch.empty_strided(dt.shape, (2**31 + 16, 18_560, 1), dtype=dt.dtype)
    far.copy_(dt)
    contiguous = mamba2.call(gate, inputs)
    values = mamba2.call(gate, Inputs(inputs.tensors | {"dt": far}, {}, inputs.states))
    assert all(torch.equal(a, b) for a, b in zip(values, contiguous, strict=True))


@pytest.mark.parametrize(("limit", "pieces"), [(60_000, 3), (30_000, 9), (12_000, 15)])
def test_big_states(mamba2: Subject, limit: int, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunk states of more than 2^31 elements: the call is cut over batch and then time, the state handed on.

    Here with limits so small that a piece is one sequence, two chunks of one, or one chunk.
    """
    runtime = importlib.import_module("._runtime", mamba2.module.__package__)
    launches: list[str] = []
    inputs = draw(mamba2.layer, Case(mamba2_sizes(b=3, t=300), seed=13))
    whole = mamba2.call("emulation", inputs, **EXACT)
    monkeypatch.setattr(runtime, "LIMIT", limit)

    def counted(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        launches.append(kernel._pyfunc.__name__)
        assert all(a.numel() <= limit for a in args if isinstance(a, torch.Tensor) and 0 not in a.stride())
        launch(kernel, grid, args)

    with runtime.launcher(counted):
        cut = mamba2.module.forward(**inputs.keywords(), config=replace(mamba2.module.CONFIGS[torch.float32], **EXACT))
    assert launches.count("walk_out") == pieces
    for a, b in zip(cut, whole, strict=True):
        assert relative_error(a, b) <= 1e-6


def test_many_heads(mamba2: Subject) -> None:
    """Batch times heads above 65,535, the limit of a grid's second and third axis."""
    runtime = importlib.import_module("._runtime", mamba2.module.__package__)
    grids: list[tuple[int, ...]] = []
    inputs = draw(mamba2.layer, Case(mamba2_sizes(b=3, t=1, h=40_000, g=1, p=1, n=1), dtype="bf16"))
    with runtime.launcher(lambda kernel, grid, args: grids.append(grid)):
        mamba2.module.forward(**inputs.keywords())
    assert max(grid[0] for grid in grids) >= 120_000
    assert all(length <= 65_535 for grid in grids for length in grid[1:])


def test_long_sequence(mamba2: Subject) -> None:
    """131,072 tokens: the result does not depend on the chunk, at the accuracy of float64."""
    inputs = draw(mamba2.layer, Case(mamba2_sizes(b=1, t=131_072, h=1, g=1, p=2, n=3), dtype="f64"))
    for a, b in zip(mamba2.call("portable", inputs, chunk=64), mamba2.call("portable", inputs, chunk=256), strict=True):
        assert relative_error(a, b) <= 1e-12


TILES: list[Mapping[str, int]] = [
    *({"chunk": c} for c in (16, 32, 128)),
    *({"tile_p": p, "state_tile_p": p, "state_tile_n": n} for p, n in ((32, 128), (128, 32), (64, 64))),
    *({"segments": s, "share_scores_from": n} for s, n in ((1, 0), (2, 1), (5, 2), (9, 0))),
]


@pytest.mark.parametrize("config", TILES, ids=str)
def test_tile_configs(mamba2: Subject, config: Mapping[str, int]) -> None:
    """mamba PR 537: wrong for some block sizes. Every chunk and tile gives the same result."""
    mamba2.check("emulation", Case(mamba2_sizes(t=150, p=72, n=136, b=1, h=2, g=1)), {**EXACT, "segments": 2, **config})


@both
def test_out_of_bounds(mamba2: Subject, gate: Gate) -> None:
    """fla 1142: S=65 reads past the end, which zeroed memory hid. Here it is NaN on every side."""
    case = Case(mamba2_sizes(t=65), memory="surrounded")
    mamba2.check(gate, case, EXACT if gate == "emulation" else None)


@both
def test_initial_state(mamba2: Subject, gate: Gate) -> None:
    """vllm PR 22034: the initial state was dropped when the batch is 1."""
    case = Case(mamba2_sizes(b=1), zero=frozenset({"x"}))
    mamba2.check(gate, case, EXACT if gate == "emulation" else None)


@both
def test_empty(mamba2: Subject, gate: Gate) -> None:
    """FlashKDA PR 32: no tokens. The final state is the initial one, bit for bit; also without sequences or heads."""
    inputs = draw(mamba2.layer, Case(mamba2_sizes(t=0)))
    y, S = mamba2.call(gate, inputs)
    assert y.shape == (2, 0, 4, 40)
    assert torch.equal(S, inputs.states["S"])
    assert S is not inputs.states["S"]
    y, S = mamba2.call(gate, draw(mamba2.layer, Case(mamba2_sizes(b=0))))
    assert y.shape == (0, 70, 4, 40)
    assert S.shape == (0, 4, 40, 24)


@both
def test_masked_tokens(mamba2: Subject, gate: Gate) -> None:
    """transformers PR 32677: padding leaks into the state. A token whose raw dt is -inf leaves the state untouched.

    Masked tokens stand on the left and inside; the result at the others equals that of the sequence without them.
    """
    inputs = draw(mamba2.layer, Case(mamba2_sizes(b=1, t=90), seed=11))
    kept = torch.ones(90, dtype=torch.bool)
    kept[:7] = kept[60:70] = False
    raw = inputs.tensors["dt"].clone()
    raw[:, ~kept] = -math.inf
    config = EXACT if gate == "emulation" else {}
    y, S = mamba2.call(gate, Inputs(inputs.tensors | {"dt": raw}, {}, inputs.states), **config)
    short = {n: v[:, kept] if v.dim() > 2 else v for n, v in inputs.tensors.items()}
    y_short, S_short = mamba2.call(gate, Inputs(short, {}, inputs.states), **config)
    assert relative_error(y[:, kept], y_short) <= 1e-5
    assert relative_error(S, S_short) <= 1e-5


def test_state_dtype(mamba2: Subject) -> None:
    """mlx-lm PR 988: a bf16 state that is rewritten each token drifts. Float32 by default: 2,048 tokens stay in bound."""
    case = Case(mamba2_sizes(b=1, t=2048, h=2, g=1, p=64, n=128), dtype="bf16")
    mamba2.check("portable", case)
    assert mamba2.module.init_state(1, 2, p=64, n=128).dtype == torch.float32


@both
def test_mixed_dtypes(mamba2: Subject, gate: Gate) -> None:
    """mamba 854: x in bf16 with C in float32 does not compile. Refused up front, by name."""
    inputs = draw(mamba2.layer, Case(mamba2_sizes(), dtype="bf16"))
    inputs.tensors["C"] = inputs.tensors["C"].float()
    with pytest.raises(TypeError, match=r"\bC\b.*bfloat16.*float32"):
        mamba2.call(gate, inputs)


@both
@pytest.mark.parametrize(
    "absent", list(combinations(read_layer(load_source("mamba2")))), ids=lambda s: "+".join(sorted(s))
)
def test_optional_inputs(mamba2: Subject, gate: Gate, absent: frozenset[str]) -> None:
    """fla 245: a None input. Every combination of D, dt_bias, z and S0 being absent."""
    case = Case(mamba2_sizes(b=1, t=67, h=2, g=1, p=33, n=20), absent=absent)
    mamba2.check(gate, case, EXACT if gate == "emulation" else None)


def test_optional_inputs_gradients(mamba2: Subject) -> None:
    """fla 245: on the CPU every present input gets a gradient of its own shape, whichever others are absent."""
    for absent in combinations(mamba2.layer):
        inputs = draw(mamba2.layer, Case(mamba2_sizes(b=1, t=5, h=2, g=1, p=3, n=3), dtype="f64", absent=absent))
        leaves = [v.requires_grad_() for v in (*inputs.tensors.values(), *inputs.states.values())]
        y, S = mamba2.call("portable", inputs)
        torch.autograd.backward(y.sum() + S.sum())
        assert all(leaf.grad is not None and leaf.grad.shape == leaf.shape for leaf in leaves)


def test_recompiles(mamba2: Subject) -> None:
    """sglang PR 40451: 192 compiles in 17 minutes. Ten lengths need at most one compile a class of shapes.

    cuTile compiles a kernel once for its constants and the classes of its arrays' lengths and strides.
    """
    seen: set[object] = set()
    names = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.int32: "i32"}

    def record(kernel: object, grid: object, args: tuple[object, ...]) -> None:
        key: list[object] = [kernel]
        kinds = inspect.signature(kernel._pyfunc).parameters.values()  # type: ignore[attr-defined]
        for a, kind in zip(args, kinds, strict=True):
            if kind.annotation in ("int", "float"):
                key.append("scalar")
            elif isinstance(a, torch.Tensor):
                key.append(array_arg("", names[a.dtype], a.shape, a.stride()))  # type: ignore[arg-type]
            else:
                key.append(a)
            if isinstance(a, torch.Tensor) and not a.is_contiguous():
                key.append("strided")
        seen.add(tuple(key))

    runtime = importlib.import_module("._runtime", mamba2.module.__package__)
    counts = []
    with runtime.launcher(record):
        for length in (1000, 1008, 1024, 1100, 1500, 1600, 2000, 2001, 3000, 3200):
            inputs = draw(mamba2.layer, Case(mamba2_sizes(b=1, t=length, h=2, g=1, p=64, n=128), dtype="bf16"))
            mamba2.module.forward(**inputs.keywords())
            counts.append(len(seen))
    kernels = counts[0]
    assert kernels >= 3
    assert counts[-1] <= 4 * kernels, counts


@both
def test_determinism(mamba2: Subject, gate: Gate) -> None:
    """What people ask for most: the same call gives the same bits."""
    inputs = draw(mamba2.layer, Case(mamba2_sizes(), dtype="bf16"))
    for a, b in zip(mamba2.call(gate, inputs), mamba2.call(gate, inputs), strict=True):
        assert torch.equal(a, b)


@both
def test_cut_in_two(mamba2: Subject, gate: Gate) -> None:
    """What people ask for most: state in and out, so that a sequence can be cut into pieces at any token."""
    inputs = draw(mamba2.layer, Case(mamba2_sizes(t=150), seed=12))
    config = EXACT if gate == "emulation" else {}
    whole = mamba2.call(gate, inputs, **config)
    halves, states = [], inputs.states
    for piece in (slice(0, 83), slice(83, 150)):
        tensors = {n: v[:, piece] if v.dim() > 2 else v for n, v in inputs.tensors.items()}
        y, S = mamba2.call(gate, Inputs(tensors, {}, states), **config)
        halves.append(y)
        states = {"S": S}
    assert relative_error(torch.cat(halves, 1), whole[0]) <= 1e-5
    assert relative_error(states["S"], whole[1]) <= 1e-5
