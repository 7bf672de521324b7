"""What users of one-token steps ran into elsewhere, each turned into what must happen here."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ssdgen.ir.report import Gate
from ssdgen.run.cases import Trial, sizes_for
from ssdgen.run.checks import relative_error
from ssdgen.run.inputs import Case, draw
from ssdgen.run.steps import Steps
from ssdgen.run.verify import emulated, expected, running
from tests.cases.subject import BOTH, mamba2_sizes, subject

both = pytest.mark.parametrize("gate", BOTH)
names = pytest.mark.parametrize(
    "name", ["mamba2", "state_space_duality", "retnet", "linear_attention", "simple_gla", "mlstm"]
)


def steps_of(gate: Gate, name: str = "mamba2") -> Steps:
    of = subject(name)
    return Steps(gate, of.plan, of.module, running(gate, of.module), "cpu")


def assert_near_the_loop(steps: Steps, case: Case) -> None:
    """T steps are the token loop, in float32 to 1e-5, else to a rounding of the dtype."""
    inputs = steps.drawn(case)
    states = steps.entering(inputs, case)
    outputs = steps.walked(inputs, states, case.sizes["t"])
    wanted = expected("portable", steps.plan, inputs, Trial("steps", case))
    for value, want in zip([*outputs, *states], wanted.values(), strict=True):
        assert value.dtype == want.dtype
        assert relative_error(value, want.value) <= want.bound


@both
@names
def test_step_and_forward_agree_and_repeat(gate: Gate, name: str) -> None:
    """mamba #1024: step and forward disagree from run to run. 1e-4 in float32, bitwise equal when repeated."""
    steps = steps_of(gate, name)
    case = Case(sizes_for(steps.layer, 9), seed=1)
    inputs = steps.drawn(case)
    runs = []
    for _ in range(2):
        states = steps.entering(inputs, case)
        runs.append([*steps.walked(inputs, states, 9), *states])
    products = [k.name for k in steps.plan.knobs if k.kind == "precision"]
    values = subject(name).call(gate, inputs, **dict.fromkeys(products, "tf32x3"))
    assert all(map(torch.equal, *runs))
    assert max(relative_error(a, b) for a, b in zip(runs[0], values, strict=True)) < 1e-4


@both
@names
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_steady_steps_are_steps(gate: Gate, name: str, state: torch.dtype) -> None:
    """Bit for bit, of odd sizes, one token and several; in the emulator every block of either kernel waits."""
    steps = steps_of(gate, name)
    case = Case({**sizes_for(steps.layer, 4), "p": 19, "n": 33}, dtype="bf16", seed=3)
    inputs = steps.drawn(case)
    runs = []
    for steady in (False, True):
        states = steps.entering(inputs, case, state)
        first = steps.call("step", states, steps.at(inputs, 0), inputs, steady=steady)
        rest = steps.call("steps", states, steps.among(inputs, 1, 4), inputs, steady=steady)
        runs.append([*first, *rest, *states])
    assert all(map(torch.equal, *runs))


@both
@pytest.mark.parametrize("form", [None, ("h",), ("h", "p")])
def test_d_in_every_form(gate: Gate, form: tuple[str, ...] | None) -> None:
    """mamba #887 #888: D of shape (H, P) wrong in the step. Absent, (h,) and (h, p): step and forward agree."""
    absent = frozenset({"D"}) if form is None else frozenset()
    assert_near_the_loop(steps_of(gate), Case(mamba2_sizes(t=4), absent=absent, forms={"D": form} if form else {}))


@both
def test_padding_slots_alias_no_live_state(gate: Gate) -> None:
    """vllm PR #33937: the padding slot -1 aliases a live state. Slots [3, -1, 0, -1]: the others unchanged bit for bit."""
    steps = steps_of(gate)
    inputs = steps.drawn(Case({**mamba2_sizes(t=1), "b": 4}))
    pool = torch.randn(5, *steps.entering(inputs, Case({**mamba2_sizes(t=1), "b": 4}))[0].shape[1:])
    first = pool.clone()
    indices = torch.tensor([3, -1, 0, -1])
    (y,) = steps.call("step", [pool], steps.at(inputs, 0), inputs, state_indices=indices)
    assert torch.equal(pool[[1, 2, 4]], first[[1, 2, 4]])
    assert not torch.equal(pool[[0, 3]], first[[0, 3]])
    assert torch.equal(y[[1, 3]], torch.zeros_like(y[[1, 3]]))
    moved = first[[3, 3, 0, 0]].clone()
    (alone,) = steps.call("step", [moved], steps.at(inputs, 0), inputs)
    assert torch.equal(y[[0, 2]], alone[[0, 2]])
    assert torch.equal(pool[[3, 0]], moved[[0, 2]])


def test_a_state_of_bfloat16_does_not_drift_away() -> None:
    """mlx-lm PR #988: a bf16 state rewritten at each token drifts. float32 by default, bf16 within 2e-2 of it at the end of
    2048 tokens (measured: 5e-3), H=32, P=64, N=128."""
    module = subject("mamba2").module
    sizes = {"b": 1, "t": 2048, "h": 32, "g": 1, "p": 64, "n": 128}
    layer = subject("mamba2").layer
    inputs = draw(layer, Case(sizes, dtype="bf16"), generated_on="cpu")
    wide, narrow = module.init_state(1, 32), module.init_state(1, 32, dtype=torch.bfloat16)
    assert wide.dtype == torch.float32
    steps = steps_of("portable")
    tokens = steps.among(inputs, 0, 2048)
    one, other = (steps.call("steps", [s], tokens, inputs)[0][:, -64:].float() for s in (wide, narrow))
    assert relative_error(narrow.float(), wide) < 2e-2
    assert relative_error(other, one) < 2e-2


@pytest.mark.parametrize(
    "sizes",
    [
        {"h": 3, "p": 5, "n": 8},
        {"h": 11, "p": 19, "n": 33},
        {"h": 4, "p": 8, "n": 1},
        {"h": 1, "p": 512, "n": 16},
        {"h": 2, "p": 80, "n": 96},
        {"h": 2, "p": 64, "n": 256},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_sizes(sizes: dict[str, int], dtype: Any) -> None:
    """vllm's grid, mamba #387, flashinfer #3397 and PR #2865: odd numbers of heads and channels, wide heads, P != N."""
    assert_near_the_loop(steps_of("emulation"), Case({"b": 2, "t": 3, "g": 1, **sizes}, dtype=dtype))


def test_more_columns_than_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="256 at most, got 272"):
        assert_near_the_loop(steps_of("emulation"), Case({"b": 1, "t": 1, "h": 1, "g": 1, "p": 16, "n": 272}))


def test_strong_decay_forgets() -> None:
    """A = -1e5 and steps of 100: what was is 0, and nothing overflows."""
    for gate in BOTH:
        steps = steps_of(gate)
        inputs = steps.drawn(Case(mamba2_sizes(t=2)))
        inputs.tensors["A"] = torch.full_like(inputs.tensors["A"], -1e5)
        inputs.tensors["dt"] = torch.full_like(inputs.tensors["dt"], 100.0)
        big, small = (torch.full((2, 4, 40, 24), v) for v in (1e30, 0.0))
        for state in (big, small):
            steps.walked(inputs, [state], 2)
        assert torch.equal(big, small)
        assert bool(big.isfinite().all())


@both
def test_empty_calls(gate: Gate) -> None:
    """No sequence, and no token: states stay, outputs have the right shape."""
    steps = steps_of(gate)
    for sizes in ({"b": 0, "t": 2}, {"b": 2, "t": 0}):
        case = Case({**mamba2_sizes(), **sizes})
        inputs = steps.drawn(case)
        states = steps.entering(inputs, case)
        first = states[0].clone()
        (y,) = steps.call("steps", states, steps.among(inputs, 0, sizes["t"]), inputs)
        assert y.shape == (sizes["b"], sizes["t"], 4, 40)
        assert torch.equal(states[0], first)


class Recorded(TorchDispatchMode):
    """Notes the operations on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_nothing_is_allocated_in_front_of_kernels() -> None:
    """A step with `out` may be captured in a CUDA graph: its host side only looks at memory, from the second call on."""
    of = subject("mamba2")
    case = Case({**mamba2_sizes(t=1), "b": 2}, absent=frozenset({"D"}))
    steps = steps_of("emulation")
    inputs = steps.drawn(case)
    tensors = steps.at(inputs, 0)
    states, out = steps.entering(inputs, case), torch.empty(2, 4, 40)
    runtime = __import__(f"{of.module.__package__}._runtime", fromlist=["launcher"])
    seen = []
    with runtime.launcher(lambda kernel, grid, args: seen.append(grid)), torch.no_grad():
        for _ in range(2):
            with Recorded() as recorded:
                of.module.step(*states, **tensors, out=out)
    views = {"unsqueeze", "expand", "detach"}
    values = {"aminmax", "_local_scalar_dense"}  # of the declared range of A, which is looked at on the CPU alone
    assert set(recorded.operations) <= views | values
    assert len(seen) == 2


@names
def test_outputs_are_differentiable_on_the_cpu(name: str) -> None:
    """The gradients of a step's outputs are those of `forward` of one token, and the caller's states carry no graph."""
    of = subject(name)
    layer = of.layer
    case = Case(sizes_for(layer, 1), dtype="f64")
    found = []
    for function in ("step", "forward"):
        inputs = draw(layer, case)
        leaves = [x.requires_grad_() for x in inputs.tensors.values()]
        steps = steps_of("portable", name)
        if function == "step":
            states = [s.clone() for s in inputs.states.values()]
            y = of.module.step(*states, **steps.at(inputs, 0))
            assert not any(s.requires_grad for s in states)
        else:
            y = of.module.forward(**inputs.keywords())[0]
        y.square().sum().backward()
        found.append([x.grad for x in leaves])
    for one, other in zip(*found, strict=True):
        assert one is not None
        assert relative_error(one.reshape(other.shape), other) < 1e-12


def test_gradients_of_kernels_are_refused() -> None:
    steps, of = steps_of("emulation"), subject("mamba2")
    inputs = steps.drawn(Case(mamba2_sizes(t=1)))
    tensors = {n: x.requires_grad_() if n == "x" else x for n, x in steps.at(inputs, 0).items()}
    with emulated(of.module), pytest.raises(NotImplementedError, match="kernels of steps have no gradient"):
        of.module.step(torch.zeros(2, 4, 40, 24), **tensors)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_traces_the_whole_portable_step(backend: str) -> None:
    """mamba #740: crashes, NaN. The same results compiled and eager, in one graph."""
    steps, of = steps_of("portable"), subject("mamba2")
    inputs = steps.drawn(Case(mamba2_sizes(t=1)))
    torch.compiler.reset()
    compiled = torch.compile(of.module.step, fullgraph=True, backend=backend)
    one, other = (torch.ones(2, 4, 40, 24) for _ in range(2))
    with torch.no_grad():
        values = compiled(one, **steps.at(inputs, 0)), of.module.step(other, **steps.at(inputs, 0))
    assert relative_error(*values) < 1e-6
    assert relative_error(one, other) < 1e-6


def test_rolling_back() -> None:
    """Speculative decoding: after a state before a token is copied back, the rest follows as if nothing had been."""
    steps = steps_of("portable")
    case = Case(mamba2_sizes(t=5))
    inputs = steps.drawn(case)
    (state,) = steps.entering(inputs, case)
    kept = torch.full((2, 5, 4, 40, 24), math.nan)
    (y,) = steps.call("steps", [state], steps.among(inputs, 0, 5), inputs, before=kept)
    end = state.clone()
    state.copy_(kept[:, 3])
    (again,) = steps.call("steps", [state], steps.among(inputs, 3, 5), inputs)
    assert torch.equal(again, y[:, 3:])
    assert torch.equal(state, end)


@both
def test_what_is_kept_of_a_sequence_without_a_slot(gate: Gate) -> None:
    """Its row of `before` stays as it is; the others hold the slots' states, in the dtype of the buffer."""
    steps = steps_of(gate)
    inputs = steps.drawn(Case(mamba2_sizes(t=2)))
    pool = torch.randn(3, 4, 40, 24)
    kept = torch.full((2, 2, 4, 40, 24), 7.0, dtype=torch.bfloat16)
    where = {"state_indices": torch.tensor([-1, 2]), "before": kept}
    first = pool[2].clone()
    steps.call("steps", [pool], steps.among(inputs, 0, 2), inputs, **where)
    assert torch.equal(kept[0], torch.full_like(kept[0], 7.0))
    assert torch.equal(kept[1, 0], first.bfloat16())
