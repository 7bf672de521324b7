"""Whole models on a GPU: logits within the bound, the loop without a synchronisation, memory that does not grow."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ssdgen.compat.transformers import restore, use_kernels
from ssdgen.generated import norms, projection
from ssdgen.models.config import SIZES, Config
from ssdgen.models.loop import Decoder
from ssdgen.models.mamba2 import Mamba2
from ssdgen.models.peer import plain
from ssdgen.models.sampling import Sampling
from ssdgen.run.checks import BOUNDS, relative_error
from tests.models.folders import random_weights, write_folder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

MEDIUM = Config(width=256, layers=4, vocab=1000, heads=8, groups=2)
ODD = Config(
    width=60, layers=2, vocab=77, heads=3, channels=40, groups=3, norm_groups=3, state=48, taps=3, tied=False,
    projection_bias=True, norm_before_gate=True, step_max=0.5,
)  # fmt: skip
BOUND = {torch.float32: 1e-3, torch.bfloat16: 1.5e-2}
"""Of logits, a relative norm: products of a prefill in TF32, and roundings to bf16, over four layers. In the emulator they are
off by 1.6e-4 and 6.7e-3."""


def copied(config: Config, dtype: torch.dtype) -> tuple[Mamba2, Mamba2]:
    """A model on the GPU, and the same weights in float64 on the CPU."""
    weights = {name: x.to(dtype) for name, x in random_weights(config).items()}
    on_gpu = {name: x.cuda() for name, x in weights.items()}
    return Mamba2(config, on_gpu, dtype), Mamba2(config, weights, torch.float64)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("config", [MEDIUM, ODD])
@pytest.mark.parametrize("batch", [1, 3])
def test_logits(config: Config, dtype: torch.dtype, batch: int) -> None:
    """Behind a prefill in two pieces, with padding where there are several rows, and behind each of some steps."""
    model, exact = copied(config, dtype)
    tokens = torch.randint(0, config.vocab, (batch, 150))
    padding = torch.tensor([0, 5, 70][:batch])
    want = exact.logits(tokens, padding)
    cache = model.init_cache(batch)
    rows = [model.prefill(tokens[:, :140].cuda(), cache, padding.cuda() if batch > 1 else None, at_once=64 * batch)]
    rows += [model.step(tokens[:, i].cuda(), cache) for i in range(140, 150)]
    for i, got in enumerate(rows):
        assert relative_error(got.cpu(), want[:, 139 + i]) <= BOUND[dtype]


def test_greedy_tokens_are_the_likeliest() -> None:
    """The graph and single launches give the same; and none is less likely in float64 than another by more than the bound."""
    model, exact = copied(MEDIUM, torch.float32)
    prompts, texts = [[3, 5, 7, 11], [400, 2, 8, 9]], []
    for decoder in (Decoder(model, 2), Decoder(model, 2, graph=False)):
        rows: list[list[int]] = [[], []]
        for chunk in decoder.run(prompts, 64):
            rows = [row + new for row, new in zip(rows, chunk, strict=True)]
        texts.append(rows)
    assert texts[0] == texts[1]
    made = torch.tensor(texts[0])
    assert made.shape == (2, 64)
    logits = exact.logits(torch.cat((torch.tensor(prompts), made), 1))[:, 3:-1]
    behind = logits.amax(-1) - logits.gather(-1, made[:, :, None])[:, :, 0]
    assert behind.max() <= 2 * BOUND[torch.float32] * logits.abs().max()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8), Sampling(1.2, 40)])
@pytest.mark.parametrize("batch", [1, 3])
def test_nothing_waits_for_the_device(sampling: Sampling, batch: int) -> None:
    """Prefill with padding, sampling, ended rows and the host's looks, where torch raises for every synchronisation."""
    model, _ = copied(MEDIUM, torch.bfloat16)
    decoder = Decoder(model, batch, sampling=sampling, stop=(7,), pad=1)
    prompts = [[1, 2, 3, 4], [5], [6, 8]][:batch]
    with no_synchronisation():
        for _ in range(2):
            rows: list[list[int]] = [[] for _ in prompts]
            for chunk in decoder.run(prompts, 50, at_once=2 * batch):
                rows = [row + new for row, new in zip(rows, chunk, strict=True)]
    assert all(7 not in row[:-1] and (len(row) == 50 or row[-1] == 7) for row in rows)


def test_draws_differ_from_token_to_token_and_not_with_the_seed() -> None:
    """A graph whose random numbers were captured with it would draw the same ones every time."""
    model, _ = copied(replace(MEDIUM, layers=1), torch.float32)
    texts = [
        [t for (row,) in Decoder(model, sampling=Sampling(50.0, 0, seed)).run([[1]], 65) for t in row]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0])) > 32
    assert texts[0][1:9] != texts[0][9:17]


def test_memory_does_not_grow_with_the_context() -> None:
    """Allocated bytes are the same behind 1 K and 128 K tokens."""
    model = Mamba2.random(replace(SIZES["130m"], layers=2), "cuda", torch.bfloat16)
    decoder = Decoder(model)
    found = []
    for tokens in (1024, 131072):
        for _ in decoder.run([torch.randint(0, 50000, (tokens,)).tolist()], 40):
            pass
        gc.collect()
        found.append(torch.cuda.memory_allocated())
    assert found[0] == found[1]


def test_a_published_size_gives_finite_logits() -> None:
    model = Mamba2.random(SIZES["130m"], "cuda", torch.bfloat16)
    cache = model.init_cache(1)
    assert model.prefill(torch.randint(0, 50000, (1, 1000)), cache).isfinite().all()
    assert model.step(torch.tensor([5], device="cuda"), cache).isfinite().all()


@pytest.mark.parametrize(
    ("k", "o"), [(768, 3352), (1536, 768), (2560, 10576), (5120, 2560), (2560, 50288), (100, 77), (20480, 3)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norm_product_and_addition(k: int, o: int, dtype: torch.dtype) -> None:
    """At the sizes of the smallest and largest published model, and some that nothing divides; the truth in float64."""
    x, weight, norm = (torch.randn(s, device="cuda") for s in ((1, k), (o, k), (k,)))
    weight, norm, onto = (weight * k**-0.5).to(dtype), norm.to(dtype), torch.randn(1, o, device="cuda")
    u = x.double() / (x.double().square().mean() + 1e-5).sqrt() * norm.double()
    want = u @ weight.double().T
    bound = BOUNDS["bf16" if dtype == torch.bfloat16 else "f32"]
    assert relative_error(projection.project(x, weight, norm=norm), want) <= bound
    want = want + onto.double()
    assert relative_error(projection.project(x, weight, norm=norm, onto=onto), want) <= bound


@pytest.mark.parametrize(("rows", "d", "groups"), [(4096, 2560, 1), (1, 768, 1), (300, 5120, 8), (7, 100, 2)])
def test_norms(rows: int, d: int, groups: int) -> None:
    """The residual in float32 with a bf16 result added, and a gate that is a slice of wider rows."""
    x, add = torch.randn(rows, d, device="cuda"), torch.randn(rows, d, device="cuda").bfloat16()
    weight, gate = (
        torch.randn(d, device="cuda").bfloat16(),
        torch.randn(rows, 3 * d, device="cuda").bfloat16()[:, d : 2 * d],
    )
    sums = x + add.float()
    parts = sums.double().view(rows, groups, -1)
    want = (parts / (parts.square().mean(-1, keepdim=True) + 1e-5).sqrt()).view(rows, d) * weight.double()
    want = want * torch.nn.functional.silu(gate.double())
    y = norms.rms_norm(x, weight, groups=groups, add=add, gate=gate)
    assert torch.equal(x, sums)
    assert relative_error(y, want) <= BOUNDS["bf16"]


def test_a_checkpoint_on_the_gpu(tmp_path: Path) -> None:
    weights = random_weights(MEDIUM, dtype=torch.bfloat16)
    model = Mamba2.load(write_folder(tmp_path / "model", MEDIUM, "transformers", weights), "cuda", torch.bfloat16)
    tokens = torch.randint(0, MEDIUM.vocab, (1, 9))
    want = Mamba2(MEDIUM, weights, torch.float64).logits(tokens)
    assert relative_error(model.logits(tokens.cuda()).cpu(), want) <= BOUND[torch.bfloat16]


def test_a_model_of_transformers_on_our_kernels() -> None:
    """In bf16 on the GPU, prefill and steps, against its own torch path in float32 on the CPU."""
    module = pytest.importorskip("transformers.models.mamba2")
    config = module.Mamba2Config(
        hidden_size=128,
        num_heads=4,
        head_dim=64,
        n_groups=2,
        num_hidden_layers=2,
        vocab_size=300,
        initializer_range=0.3,
    )
    model = module.Mamba2ForCausalLM(config).eval()
    tokens = torch.randint(0, 300, (2, 70))
    with torch.no_grad():
        with plain(importlib.import_module("transformers.models.mamba2.modeling_mamba2")):
            want = model(tokens).logits
        model = model.to("cuda", torch.bfloat16)
        assert use_kernels(model) == ("Mamba2Mixer",)
        try:
            begun = model(tokens[:, :66].cuda(), use_cache=True)
            rows = [begun.logits]
            for i in range(66, 70):
                step = model(tokens[:, i : i + 1].cuda(), cache_params=begun.cache_params, use_cache=True)
                rows.append(step.logits)
        finally:
            restore()
    assert relative_error(torch.cat(rows, 1).cpu(), want) <= 2 * BOUND[torch.bfloat16]
