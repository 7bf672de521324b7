"""The whole model: against transformers' own, whose weights it loads, and against a loop over tokens in float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus
from torch.utils._python_dispatch import TorchDispatchMode

from ssdgen.diagnostics import UserError
from ssdgen.generated import _runtime, mamba2
from ssdgen.ir.build import ConstantArg
from ssdgen.models.config import Config
from ssdgen.models.loop import Decoder
from ssdgen.models.mamba2 import Mamba2
from ssdgen.models.peer import plain
from ssdgen.run.checks import BOUNDS, relative_error
from ssdgen.run.emulate import emulation, launch
from ssdgen.run.recorded import recording
from tests.models.folders import SMALL, random_weights, write_folder

ROUNDING = 2e-6
"""Of logits in float32, a relative norm: some roundings of 6e-8 a layer."""

ROUNDING_BF16 = 2e-2
"""The same in bf16: some roundings of 2e-3 a layer."""

SMALLEST: dict[str, Any] = {
    "num_heads": 4, "head_dim": 16, "hidden_size": 32, "state_size": 24, "n_groups": 1, "chunk_size": 16,
    "num_hidden_layers": 2, "vocab_size": 50, "initializer_range": 0.5,
}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "groups": {"n_groups": 2, "time_step_limit": (0.02, 0.05)},
    "odd heads": {"num_heads": 3, "head_dim": 24, "hidden_size": 36, "chunk_size": 8},
    "tied": {"tie_word_embeddings": True, "chunk_size": 256, "num_hidden_layers": 3},
    "biases": {"use_bias": True, "use_conv_bias": False, "conv_kernel": 3, "n_groups": 4},
    "narrow residual": {"residual_in_fp32": False, "state_size": 40, "chunk_size": 32},
}


@pytest.fixture(autouse=True)
def _plain() -> Iterator[None]:
    """transformers on CPU tensors, also where kernels of others are installed."""
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    with plain(modeling):
        yield


def theirs(tmp_path: Path, change: Mapping[str, Any]) -> Any:
    """transformers' model with random weights, and its folder."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**{**SMALLEST, **change})).eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            if name.endswith(("bias", "D", "A_log", "norm.weight")):  # which it begins all alike
                x.add_(0.3 * torch.rand(x.shape))
    model.save_pretrained(tmp_path / "model")
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers(tmp_path: Path, name: str) -> None:
    """Logits to float32 rounding, of whole rows and behind a prefill in two pieces; and 64 greedy tokens the same.

    Theirs are of whole rows: where they go token by token, they leave `time_step_limit` out.
    """
    model = theirs(tmp_path, CONFIGS[name])
    ours = Mamba2.load(tmp_path / "model")
    prompt = torch.randint(0, 50, (2, 37))
    made: list[list[int]] = [[], []]
    for chunk in Decoder(ours, 2).run(prompt.tolist(), 64, at_once=50):
        made = [row + new for row, new in zip(made, chunk, strict=True)]
    whole = torch.cat((prompt, torch.tensor(made)), 1)
    with torch.no_grad():
        want = model(whole).logits
    assert relative_error(ours.logits(whole), want) <= ROUNDING
    assert torch.equal(want[:, 36:-1].argmax(-1), whole[:, 37:])


def test_bf16_tokens_differ_only_where_the_margin_is_small(tmp_path: Path) -> None:
    """In bf16 both are off by roundings; where the likeliest token leads by more than that, both take it."""
    model = theirs(tmp_path, CONFIGS["groups"]).bfloat16()
    weights = tmp_path / "model"
    tokens = torch.randint(0, 50, (4, 100))
    with torch.no_grad():
        want = model(tokens).logits
    exact = Mamba2.load(weights, dtype=torch.float64).logits(tokens)
    got = Mamba2.load(weights, dtype=torch.bfloat16).logits(tokens)
    assert relative_error(got, exact) <= ROUNDING_BF16
    first, second = exact.topk(2).values.unbind(-1)
    bound = 2 * max(float((x - exact).abs().max()) for x in (got, want))
    clear = first - second > bound
    assert clear.float().mean() > 0.5
    assert torch.equal(got.argmax(-1)[clear], want.argmax(-1)[clear])


def reference(config: Config, weights: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits[t vocab] of one row, token by token in float64, from the definition alone."""
    w = {name: x.double() for name, x in weights.items()}
    c = config
    seen = [torch.zeros(c.taps, c.convolved, dtype=torch.float64) for _ in range(c.layers)]
    states = [torch.zeros(c.heads, c.channels, c.state, dtype=torch.float64) for _ in range(c.layers)]

    def norm(x: Tensor, weight: Tensor, parts: int = 1) -> Tensor:
        x = x.reshape(parts, -1)
        return (x / (x.square().mean(1, keepdim=True) + c.eps).sqrt()).reshape(-1) * weight

    rows = []
    for token in tokens.tolist():
        u = w["embedding"][token]
        for i in range(c.layers):
            layer = {name.removeprefix(f"layers.{i}."): x for name, x in w.items() if name.startswith(f"layers.{i}.")}
            into = layer["in_proj.weight"] @ norm(u, layer["norm"]) + layer.get("in_proj.bias", 0)
            z, xBC, dt = into.split([c.inner, c.convolved, c.heads])
            seen[i] = torch.cat((seen[i][1:], xBC[None]))
            xBC = silu((seen[i] * layer["conv.weight"].T).sum(0) + layer.get("conv.bias", 0))
            x, B, C = xBC.split([c.inner, c.groups * c.state, c.groups * c.state])
            x = x.reshape(c.heads, c.channels)
            B, C = (v.reshape(c.groups, -1).repeat_interleave(c.heads // c.groups, 0) for v in (B, C))
            step = softplus(dt + layer["dt_bias"]).clamp(c.step_min, c.step_max)
            decay = torch.exp(-torch.exp(layer["A_log"]) * step)
            states[i] = decay[:, None, None] * states[i] + (step[:, None] * x)[:, :, None] * B[:, None, :]
            y = (states[i] * C[:, None, :]).sum(2) + layer["D"].reshape(c.heads, -1) * x
            y = y.reshape(-1)
            if not c.gated_norm:
                y = y * silu(z)
            elif c.norm_before_gate:
                y = norm(y, layer["gated_norm"], c.norm_groups) * silu(z)
            else:
                y = norm(y * silu(z), layer["gated_norm"], c.norm_groups)
            u = u + layer["out_proj.weight"] @ y + layer.get("out_proj.bias", 0)
        rows.append(w["embedding" if c.tied else "head"] @ norm(u, w["norm"]))
    return torch.stack(rows)


@pytest.mark.parametrize(
    "change",
    [
        {"norm_groups": 3, "groups": 3, "tied": True},
        {"norm_before_gate": True, "groups": 3, "norm_groups": 3, "projection_bias": True},
        {"gated_norm": False, "channel_skip": True},
        {"conv_bias": False, "step_min": 0.05, "step_max": 0.2},
    ],
)
def test_every_option_of_state_spaces(change: dict[str, Any]) -> None:
    """mamba_ssm runs on GPUs only, so its layers are written out here; in float64 all digits must agree."""
    config = replace(SMALL, **change)
    weights = random_weights(config)
    model = Mamba2(config, weights, torch.float64)
    tokens = torch.randint(0, config.vocab, (1, 21))
    want = reference(config, weights, tokens[0])
    assert relative_error(model.logits(tokens)[0], want) <= 1e-12
    cache = model.init_cache(1)
    got = [model.prefill(tokens[:, :9], cache, at_once=4), *(model.step(t, cache) for t in tokens[:, 9:].unbind(1))]
    assert relative_error(torch.cat(got), want[8:]) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_left_padding_reaches_nothing(dtype: torch.dtype) -> None:
    """transformers PR 32677: padding leaked into the state. Bit for bit what is kept of padding is nothing."""
    config = replace(SMALL, projection_bias=True, step_min=0.01)
    model = Mamba2(config, random_weights(config), dtype)
    tokens = torch.randint(0, config.vocab, (1, 30))
    for pad in (0, 1, 7, 29):
        kept = []
        for garbage in (5, 33):
            cache = model.init_cache(2)
            row = tokens.clone()
            row[:, :pad] = garbage
            logits = model.prefill(row.expand(2, -1), cache, torch.tensor([pad, 0]), at_once=16)
            kept.append((logits[0], cache.states[:, 0], cache.convolution[:, 0]))
        assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))
        alone = model.init_cache(1)
        logits = model.prefill(tokens[:, pad:], alone)
        for got, want in zip(kept[0], (logits[0], alone.states[:, 0], alone.convolution[:, 0]), strict=True):
            assert relative_error(got, want) <= (ROUNDING if dtype == torch.float32 else ROUNDING_BF16)


def test_weights_that_are_given_are_checked() -> None:
    weights = random_weights(SMALL)
    with pytest.raises(ValueError, match=r"weights missing or unknown: norm$"):
        Mamba2(SMALL, {name: x for name, x in weights.items() if name != "norm"})
    with pytest.raises(ValueError, match=r"weight `norm` must have shape \[24\], got \[1\]"):
        Mamba2(SMALL, {**weights, "norm": torch.ones(1)})
    with pytest.raises(ValueError, match=r"not in torch\.int32"):
        Mamba2(SMALL, weights, torch.int32)
    with pytest.raises(ValueError, match=r"`tokens` must be \[b t\] and hold some"):
        Mamba2(SMALL, weights).prefill(torch.zeros(1, 0, dtype=torch.int64), Mamba2(SMALL, weights).init_cache(1))


def test_a_state_spaces_folder_gives_the_same_model(tmp_path: Path) -> None:
    config = replace(SMALL, tied=True, groups=2, heads=4, channels=12, norm_groups=2, stop=(), pad=None)
    weights = random_weights(config)
    model = Mamba2.load(write_folder(tmp_path / "model", config, "state-spaces", weights, "bin"))
    tokens = torch.randint(0, config.vocab, (1, 12))
    assert torch.equal(model.logits(tokens), Mamba2(config, weights).logits(tokens))


def test_too_little_memory_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "model", SMALL, "transformers", random_weights(SMALL))

    def full(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("ssdgen.models.mamba2._placed", full)
    with pytest.raises(UserError, match=r"its weights take 0\.0 GiB, which cpu has not free"):
        Mamba2.load(folder)


def test_random_weights_give_finite_logits() -> None:
    config = replace(SMALL, projection_bias=True)
    model = Mamba2.random(config, dtype=torch.bfloat16, seed=3)
    logits = model.logits(torch.randint(0, config.vocab, (1, 50)))
    assert logits.isfinite().all()


@pytest.mark.parametrize("change", [{}, {"groups": 3, "norm_groups": 3, "norm_before_gate": True}])
def test_kernels_in_the_emulator(change: dict[str, Any]) -> None:
    """A prefill, whose products are in TF32, and steps behind it, which are in float32; four launches a layer, five
    where the norm of y is one by itself."""
    config = replace(SMALL, **change)
    model = Mamba2(config, random_weights(config))
    tokens = torch.randint(0, config.vocab, (1, 20))
    want = model.logits(tokens)[0]
    cache = model.init_cache(1)
    with _runtime.launcher(launch):
        first = model.prefill(tokens[:, :18], cache)
        with emulation() as run:
            second = model.step(tokens[:, 18], cache)
        third = model.step(tokens[:, 19], cache)
    names = ["multiply_row", "roll", "token_step", *(["normalise"] if change else []), "multiply_row"]
    assert run.launches == names * config.layers + ["multiply_row"]
    assert relative_error(torch.cat((first, second, third)), want[17:]) <= BOUNDS["tf32"]


class Embedded(TorchDispatchMode):
    """Notes where PyTorch's embedding comes among the launches."""

    def __init__(self, launches: list[Any]) -> None:
        super().__init__()
        self.launches, self.places = launches, list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.embedding.default:
            self.places.append(len(self.launches))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_step_is_steady_behind_the_embedding(rows: int, layers: int) -> None:
    """What is promised: between any two kernels that have the same state or cache PyTorch's embedding waits for all before it.
    So it is behind a prefill of one token too, and in a model of one layer."""
    config = replace(SMALL, layers=layers)
    model = Mamba2.random(config, dtype=torch.bfloat16)
    cache, token = model.init_cache(rows), torch.zeros(rows, dtype=torch.int64)
    with recording(mamba2) as launches, Embedded(launches) as embedded:
        model.prefill(token[:, None], cache)
        prefilled = len(launches)
        model.step(token, cache)
        stepped = len(launches) - prefilled
        model.step(token, cache)
    assert embedded.places == [0, prefilled, prefilled + stepped]
    steps = [launch.request for launch in launches[prefilled:] if launch.request.kernel in ("roll", "token_step")]
    assert [r.kernel for r in steps] == ["roll", "token_step"] * 2 * layers
    for request in steps:
        assert ConstantArg("STEADY", True) in request.signature, request.kernel
