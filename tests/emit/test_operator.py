"""`forward` as an operator: gradients through kernels, in the emulator, against float64 autograd of the portable form."""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from generated import _operator, _runtime, mamba2, mlstm
from ssdgen.run.checks import BOUNDS, one_thread, poisoned_memory, relative_error
from ssdgen.run.emulate import launch
from ssdgen.run.inputs import Case, draw
from ssdgen.spec import load_source, read_layer

SPECS = ("mamba2", "mlstm", "retnet", "linear_attention", "simple_gla", "state_space_duality")
TOKENS = 300
"""Three blocks of two chunks, the last of one and a half."""

BOUND = BOUNDS["tf32"]
"""Gradient kernels multiply in TF32; of the portable form only the states that blocks begin with are."""

SUMMED = {"A": 8, "dt_bias": 2}
"""How many times the bound gradients may be off that are sums over tokens: there they cancel (see `ssdgen.run.gradients`)."""


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of two chunks, so that a few hundred tokens are several."""
    monkeypatch.setattr(_operator, "BLOCK_CHUNKS", 2)


def inputs_of(name: str, tokens: int = TOKENS, batch: int = 2, **case: Any) -> dict[str, Any]:
    """Arguments of a `forward`, everything present."""
    layer = read_layer(load_source(name))
    sizes = {a.name: 32 for a in layer.axes} | {layer.batch: batch, layer.time: tokens, layer.head: 4}
    sizes |= {g.axis: 2 for g in layer.groups}
    return dict(draw(layer, Case(sizes, **{"dtype": "f32", **case}), "cpu").keywords())


def leaves_of(inputs: dict[str, Any], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The tensors of a call, of which all are differentiated."""
    tensors = {k: v for k, v in inputs.items() if isinstance(v, Tensor)}
    return {k: v.detach().to(dtype or v.dtype, copy=True).requires_grad_() for k, v in tensors.items()}


def in_order(module: ModuleType, named: dict[str, Any]) -> tuple[Any, ...]:
    """All arguments of a `forward`, as its operator takes them."""
    parameters = inspect.signature(module.forward).parameters.values()
    return tuple(named.get(p.name, None if p.default is p.empty else p.default) for p in parameters)


Loss = Callable[[tuple[Tensor, ...]], Tensor]


def weighted(which: slice = slice(None)) -> Loss:
    """A sum of some results times numbers that depend on nothing but their place."""

    def loss(values: tuple[Tensor, ...]) -> Tensor:
        chosen = values[which]
        return sum((v.double() * (1 + torch.arange(v.numel()).reshape(v.shape) % 7)).sum() for v in chosen)  # type: ignore[return-value]

    return loss


def gradients(forward: Any, inputs: dict[str, Any], loss: Loss, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    leaves = leaves_of(inputs, dtype)
    values = forward(**{**inputs, **leaves})
    found = torch.autograd.grad(loss(values), list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def emulated(forward: Any, inputs: dict[str, Any], loss: Loss) -> dict[str, Tensor]:
    """The gradients where kernels run."""
    with one_thread(), poisoned_memory(), _runtime.launcher(launch):
        return gradients(forward, inputs, loss)


def compare(got: dict[str, Tensor], want: dict[str, Tensor], bound: float = BOUND) -> None:
    for name, value in want.items():
        assert got[name].shape == value.shape
        assert relative_error(got[name], value) <= bound * SUMMED.get(name, 1), name


@pytest.mark.parametrize("name", SPECS)
def test_every_gradient(name: str) -> None:
    """Of every input and initial state, for gradients at outputs and final states, over several blocks."""
    module, inputs = importlib.import_module(f"generated.{name}"), inputs_of(name)
    got = emulated(module.forward, inputs, weighted())
    compare(got, gradients(module.forward, inputs, weighted(), torch.float64))
    assert all(got[k].dtype == inputs[k].dtype for k in got)


@pytest.fixture
def kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No gradient is that of the portable form."""
    monkeypatch.setattr(
        _operator.Operator, "_add", lambda *arguments: pytest.fail("the portable form is differentiated")
    )


@pytest.mark.usefixtures("kernels_alone")
@pytest.mark.parametrize("which", [slice(0, 1), slice(1, 2), slice(2, 3)])
def test_where_gradients_arrive(which: slice) -> None:
    """At the output, the final state or the kept states alone."""
    inputs = {**inputs_of("mamba2"), "states_every": 64}
    compare(
        emulated(mamba2.forward, inputs, weighted(which)),
        gradients(mamba2.forward, inputs, weighted(which), torch.float64),
    )


@pytest.mark.usefixtures("kernels_alone")
@pytest.mark.parametrize("every", [64, 128, 192])
def test_kept_states(every: int) -> None:
    """Blocks of states that are kept, and those of the gradient, need not be the same."""
    inputs = {**inputs_of("mlstm"), "states_every": every}
    compare(emulated(mlstm.forward, inputs, weighted()), gradients(mlstm.forward, inputs, weighted(), torch.float64))


@pytest.mark.usefixtures("kernels_alone")
@pytest.mark.parametrize("packing", ["cu_seqlens", "seq_idx", "mask", "holes"])
def test_packed(packing: str) -> None:
    """No gradient crosses a boundary; that of a token which belongs to no sequence is 0, also if it holds NaN."""
    inputs = inputs_of("mamba2", tokens=150, batch=1 if packing == "cu_seqlens" else 2)
    rows = inputs["x"].shape[0]
    if packing == "cu_seqlens":
        inputs["cu_seqlens"] = torch.tensor([0, 0, 70, 150])
        inputs["S0"] = torch.randn(3, *inputs["S0"].shape[1:], generator=torch.Generator().manual_seed(0))
    elif packing == "seq_idx":
        inputs["seq_idx"] = (torch.arange(150) // 60).expand(rows, 150)
    else:
        token = torch.arange(150).expand(rows, 150)
        inputs["mask"] = token % 3 > 0 if packing == "holes" else (token >= 7) & (token < 131)
        for name in ("x", "dt", "B", "C", "z"):
            inputs[name][~inputs["mask"]] = torch.nan
    extra = {name: inputs.pop(name) for name in ("cu_seqlens", "seq_idx", "mask") if name in inputs}
    forward = lambda **named: mamba2.forward(**named, **extra)  # noqa: E731
    got = emulated(forward, inputs, weighted())
    compare(got, gradients(forward, inputs, weighted(), torch.float64))
    if "mask" in extra:
        assert not any(got[name][~extra["mask"]].any() for name in ("x", "dt", "B", "C", "z"))


def test_narrower_inputs() -> None:
    """D of one number a head has a gradient of one number a head; absent inputs have none."""
    inputs = inputs_of("mamba2", forms={"D": ("h",)}, absent=frozenset({"z", "dt_bias", "S0"}))
    assert inputs["D"].dim() == 1
    assert not {"z", "dt_bias", "S0"} & set(inputs)
    compare(emulated(mamba2.forward, inputs, weighted()), gradients(mamba2.forward, inputs, weighted(), torch.float64))


def test_every_pair_of_inputs_that_need_no_gradient() -> None:
    """fla #245: the others get theirs, bit for bit."""
    inputs = inputs_of("mamba2", tokens=70)
    names = [n for n, v in inputs.items() if isinstance(v, Tensor)]

    def some(needed: set[str]) -> dict[str, Tensor]:
        tensors = {n: inputs[n].detach().clone().requires_grad_(n in needed) for n in names}
        values = mamba2.OPERATOR.call(*in_order(mamba2, {**inputs, **tensors}))
        if not needed:
            assert not any(v.requires_grad for v in values)
            return {}
        leaves = {n: tensors[n] for n in names if n in needed}
        found = torch.autograd.grad(weighted()(values), list(leaves.values()))
        return dict(zip(leaves, found, strict=True))

    every = some(set(names))
    for without in [set(names), set(), *map(set, itertools.combinations(names, 2))]:
        for name, gradient in some(set(names) - without).items():
            assert torch.equal(gradient, every[name]), (name, without)


@pytest.mark.parametrize("tokens", [0, 1, 64, 128, 129])
def test_lengths(tokens: int) -> None:
    inputs = inputs_of("mamba2", tokens=tokens)
    compare(emulated(mamba2.forward, inputs, weighted()), gradients(mamba2.forward, inputs, weighted(), torch.float64))


def test_bfloat16() -> None:
    """Gradients have the dtypes of their tensors, and the error of one rounding and of bf16 products."""
    inputs = inputs_of("mamba2", dtype="bf16")
    got = emulated(mamba2.forward, inputs, weighted())
    assert got["x"].dtype == torch.bfloat16
    compare(got, gradients(mamba2.forward, inputs, weighted(), torch.float64), BOUNDS["bf16"])


@pytest.mark.parametrize("name", SPECS)
def test_the_scalars_of_tokens_are_made_once(name: str) -> None:
    """The forward pass keeps weights and running sums of decays, so that the gradients launch no kernel for them; the gradients
    have the same bits as without. A call whose states the caller asks for keeps none, and gradients in other chunks take
    none."""
    module, inputs = importlib.import_module(f"generated.{name}"), inputs_of(name)
    makes = int(name not in ("retnet", "linear_attention"))
    launched: list[str] = []

    def noted(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        launched.append(kernel._pyfunc.__name__)
        launch(kernel, grid, arguments)

    def found(**more: Any) -> dict[str, Tensor]:
        launched.clear()
        with one_thread(), poisoned_memory(), _runtime.launcher(noted):
            return gradients(module.forward, {**inputs, **more}, weighted(slice(0, 1)))

    once = found()
    assert launched.count("chunk_cumsum") == makes
    twice = found(states_every=128)
    assert launched.count("chunk_cumsum") == 2 * makes
    assert all(torch.equal(once[k], twice[k]) for k in once)
    chunk = module.CONFIGS[torch.float32].chunk
    other = found(config=replace(module.CONFIGS[torch.float32], chunk=chunk // 2))
    assert launched.count("chunk_cumsum") == 2 * makes
    compare(other, once)


def test_repeated_bit_for_bit() -> None:
    inputs = inputs_of("mlstm")
    one, two = (emulated(mlstm.forward, inputs, weighted()) for _ in range(2))
    assert all(torch.equal(one[k], two[k]) for k in one)


def test_little_but_inputs_is_stored() -> None:
    """Memory between forward and backward is that of the arguments, and a weight and a sum of decays in float32 of each token
    and head, in whole chunks."""
    inputs = inputs_of("mamba2")
    leaves, stored = leaves_of(inputs), {}
    with (
        one_thread(),
        _runtime.launcher(launch),
        torch.autograd.graph.saved_tensors_hooks(lambda x: stored.setdefault(x.data_ptr(), x), lambda x: x),
    ):
        mamba2.forward(**{**inputs, **leaves})
    for x in leaves.values():
        del stored[x.data_ptr()]
    b, t, h = inputs["dt"].shape
    assert [x.nbytes for x in stored.values()] == [4 * b * h * -(-t // 64) * 64] * 2


def test_checkpointed() -> None:
    inputs = inputs_of("mamba2", tokens=130)
    again = lambda **named: checkpoint(mamba2.forward, use_reentrant=False, **named)  # noqa: E731
    one, two = (emulated(f, inputs, weighted()) for f in (mamba2.forward, again))
    assert all(torch.equal(one[k], two[k]) for k in one)


def test_autocast_changes_nothing() -> None:
    inputs = inputs_of("mamba2", tokens=130)

    def cast(**named: Any) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            values: tuple[Tensor, ...] = mamba2.forward(**named)
        return values

    one, two = (emulated(f, inputs, weighted()) for f in (mamba2.forward, cast))
    assert all(torch.equal(one[k], two[k]) for k in one)


def test_a_second_derivative_is_refused() -> None:
    """It would come out as 0, not as an error, since the first is not made of what autograd can see."""
    leaves = leaves_of(inputs_of("retnet", tokens=20))
    retnet = importlib.import_module("generated.retnet")
    with one_thread(), _runtime.launcher(launch):
        y, _ = retnet.forward(**leaves)
        with pytest.raises(NotImplementedError, match="retnet: a gradient of kernels cannot be differentiated again"):
            torch.autograd.grad(y.sum(), leaves["q"], create_graph=True)


@pytest.mark.parametrize(
    ("name", "every"), [*((name, None) for name in SPECS), *((name, 64) for name in ("mamba2", "mlstm"))]
)
def test_opcheck(name: str, every: int | None) -> None:
    """torch's own checks: schema, fake implementation, autograd, tracing with sizes that are not known."""
    module, inputs = importlib.import_module(f"generated.{name}"), inputs_of(name, tokens=70)
    arguments = {**inputs, **leaves_of(inputs), "states_every": every, "config": ""}
    torch.library.opcheck(module.OPERATOR._operator, in_order(module, arguments))


def test_a_file_under_two_names() -> None:
    """As a checkout has it where ssdgen is installed, too: defined twice, the first operator crashed the process."""
    other = importlib.import_module("ssdgen.generated.retnet")
    retnet = importlib.import_module("generated.retnet")
    assert other is not retnet
    assert other.OPERATOR._operator.name() != retnet.OPERATOR._operator.name()


@pytest.mark.parametrize("name", ["mamba2", "retnet"])
def test_opcheck_of_gradients(name: str) -> None:
    """The operator that a traced call's gradients are, with kernels that an emulator runs."""
    module, inputs = importlib.import_module(f"generated.{name}"), inputs_of(name, tokens=70)
    operator = module.OPERATOR
    given = in_order(module, inputs)
    y, state, kept = torch.randn(2, 70, 4, 32), torch.randn(2, 4, 32, 32), torch.randn(2, 1, 4, 32, 32)
    states = [given[i] for i in operator._tensors[len(operator._specs) :]]
    packing = (None, torch.arange(140).reshape(2, 70) // 64, None)
    arguments = (*given[: len(operator._specs) + len(module.LAYER.scalars)], *states, *packing, 64, y, state, kept)
    with one_thread(), _runtime.launcher(launch):
        torch.library.opcheck(operator._kernels, arguments)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    """One graph in which the call is one node; the same values and gradients."""
    inputs = inputs_of("mamba2", tokens=70)

    def call(**named: Any) -> tuple[Tensor, ...]:
        return mamba2.OPERATOR.call(*in_order(mamba2, named))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    compare(gradients(compiled, inputs, weighted()), gradients(call, inputs, weighted()), 1e-6)


def test_a_config_as_text() -> None:
    config = mamba2.Config(chunk=32, intra="bf16x2", segments=3)
    assert _operator._config(mamba2.Config, _operator._text(config)) == config
    assert _operator._config(mamba2.Config, _operator._text(None)) is None


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"dt": None}, TypeError, r"mamba2: `dt`\[b t h\] is missing"),
        ({"B": 1.0}, TypeError, "mamba2: `B` must be a torch.Tensor, got float"),
        ({"dt_min": "0"}, TypeError, "mamba2: `dt_min` must be a number, got str"),
        ({"config": mlstm.Config()}, TypeError, "mamba2: `config` must be a mamba2.Config, got Config"),
        ({"config": 64}, TypeError, "mamba2: `config` must be a mamba2.Config, got int"),
        ({"states_every": 64.0}, TypeError, "`states_every` must be a number of tokens, an int, got float"),
        ({"states_every": 63}, ValueError, "`states_every` must be a multiple of the chunk"),
        ({"C": torch.zeros(2, 70, 2, 16)}, ValueError, "`C`.* axis n is"),
    ],
)
def test_mistakes(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    """A call that is differentiated is checked as any other."""
    inputs = inputs_of("mamba2", tokens=70)
    inputs["x"].requires_grad_()
    with one_thread(), _runtime.launcher(launch), pytest.raises(error, match=message):
        mamba2.forward(**{**inputs, **changed})


def test_kept_states_of_a_shorter_chunk_than_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tuning table may have chosen one: states at multiples of 96 tokens are at no end of chunks of 64, which gradients are
    computed in by default."""
    inputs = inputs_of("mamba2")
    short = mamba2.Config(chunk=32, scores="tf32", carried="tf32", intra="tf32", state="tf32")

    def chosen(layer: Any, config: Any, configs: Any, **key: Any) -> Any:
        return config or (short if configs is mamba2.CONFIGS else configs[torch.float32])

    monkeypatch.setattr(mamba2._tuned, "chosen", chosen)
    inputs["states_every"] = 96
    got = emulated(mamba2.forward, inputs, weighted(slice(2, 3)))
    compare(got, gradients(mamba2.forward, inputs, weighted(slice(2, 3)), torch.float64))
