"""Models of transformers with Mamba-2 mixers on our functions: the same logits as from its own torch path, and gradients."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from ssdgen.compat import transformers as ours
from ssdgen.models.peer import plain
from ssdgen.run.checks import relative_error

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 50, "intermediate_size": 48}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2}
MIXER = {"mamba_d_state": 24, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mamba2": (
        "Mamba2", "Mamba2Mixer", {"num_heads": 4, "head_dim": 16, "state_size": 24, "n_groups": 2, "chunk_size": 16}
    ),
    "bamba": ("Bamba", "BambaMixer", {**ATTENTION, **MIXER, "attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1", "FalconH1Mixer", {**ATTENTION, **MIXER, "head_dim": 8, "mamba_d_ssm": 64}),
    "granitemoehybrid": (
        "GraniteMoeHybrid", "GraniteMoeHybridMambaLayer",
        {**ATTENTION, **MIXER, "layer_types": ["mamba", "attention"], "num_local_experts": 2, "num_experts_per_tok": 1,
         "shared_intermediate_size": 16},
    ),
    "nemotron_h": (
        "NemotronH", "NemotronHMamba2Mixer",
        {**ATTENTION, "head_dim": 8, "ssm_state_size": 24, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2,
         "chunk_size": 16, "layers_block_type": ["mamba", "attention"]},
    ),
    "zamba2": (
        "Zamba2", "Zamba2MambaMixer",
        {**ATTENTION, "mamba_d_state": 24, "n_mamba_heads": 4, "mamba_ngroups": 2, "mamba_expand": 2, "chunk_size": 16,
         "layers_block_type": ["mamba", "hybrid"], "attention_head_dim": 16, "num_mem_blocks": 1},
    ),
}  # fmt: skip
"""By module: the name of the family, the class of its mixer, and the smallest sizes with attention beside it."""


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """transformers' own functions are those in plain torch, also where kernels of others are installed."""
    pytest.importorskip("transformers")
    with ExitStack() as stack:
        for name in MODELS:
            stack.enter_context(plain(importlib.import_module(f"transformers.models.{name}.modeling_{name}")))
        yield
        ours.restore()


def small(name: str) -> Any:
    module = importlib.import_module(f"transformers.models.{name}")
    family, _, options = MODELS[name]
    torch.manual_seed(0)
    config = getattr(module, f"{family}Config")(**{**SIZES, **options, "initializer_range": 0.3})
    model = getattr(module, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, x in model.named_parameters():
            if key.endswith(("D", "A_log", "dt_bias")):
                x.add_(0.3 * torch.rand(x.shape))
    return model


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Of a prefill, then token by token."""
    with torch.no_grad():
        begun = model(tokens[:, :33], use_cache=True)
        rows, cache = [begun.logits], begun.get("past_key_values", begun.get("cache_params"))
        name = "past_key_values" if begun.get("past_key_values") is not None else "cache_params"
        for i in range(33, tokens.shape[1]):
            rows.append(model(tokens[:, i : i + 1], use_cache=True, **{name: cache}).logits)
    return torch.cat(rows, 1)


@pytest.mark.parametrize("name", MODELS)
def test_the_same_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 to 1e-5; each of four functions is called, and by `restore` transformers has its own again."""
    model, tokens = small(name), torch.randint(0, 50, (2, 36))
    want = logits(model, tokens)
    called = set()
    for function in ours.FUNCTIONS:
        before = ours.FUNCTIONS[function]

        def noted(*arguments: Any, _before: Any = before, _name: str = function, **options: Any) -> Any:
            called.add(_name)
            return _before(*arguments, **options)

        monkeypatch.setitem(ours.FUNCTIONS, function, noted)
    assert ours.use_kernels(model) == (MODELS[name][1],)
    assert relative_error(logits(model, tokens), want) <= 1e-5
    assert called == set(ours.FUNCTIONS) - {"mamba2_split_conv1d_scan_combined"}
    called.clear()
    ours.restore()
    assert torch.equal(logits(model, tokens), want)
    assert not called


def test_gradients() -> None:
    model = small("mamba2").train()
    tokens = torch.randint(0, 50, (2, 40))

    def gradients() -> list[torch.Tensor]:
        loss = model(tokens, labels=tokens, use_cache=False).loss
        return list(torch.autograd.grad(loss, list(model.parameters())))

    want = gradients()
    ours.use_kernels(model)
    for got, other in zip(gradients(), want, strict=True):
        assert relative_error(got, other) <= 1e-4


def test_what_is_no_such_model_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no Mamba-2 mixer of transformers 5"):
        ours.use_kernels(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got str"):
        ours.use_kernels("mamba2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`activation` must be silu, swish or None, got 'gelu'"):
        ours.causal_conv1d_fn(torch.zeros(1, 2, 3), torch.zeros(2, 4), activation="gelu")
    with pytest.raises(ValueError, match="keeps 2 inputs, too few for the taps"):
        ours.causal_conv1d_update(torch.zeros(1, 2, 1), torch.zeros(1, 2, 2), torch.zeros(2, 4))
