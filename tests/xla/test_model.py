"""The language model for XLA: against transformers' own, whose weights it loads; its loop, its programs."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import export

from ssdgen.models.config import Config
from ssdgen.models.mamba2_jax import ROOM, Mamba2, choose, decode, decoded, prefilled, scored, step
from ssdgen.run.checks import relative_error
from tests.models.folders import random_weights
from tests.xla.subject import tensor

ROUNDING = 2e-6
"""Of logits in float32, a relative norm: some roundings of 6e-8 a layer."""

ROUNDING_BF16 = 2e-2
"""The same in bf16: some roundings of 2e-3 a layer."""

CONFIGS: dict[str, dict[str, Any]] = {
    "one group": {},
    "groups": {
        "tie_word_embeddings": True,
        "n_groups": 2,
        "time_step_limit": (0.02, 0.05),
        "use_bias": True,
        "conv_kernel": 3,
    },
}


@functools.cache
def theirs(name: str) -> Any:
    """transformers' model with random weights."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"num_heads": 4, "head_dim": 16, "hidden_size": 32, "state_size": 24, "n_groups": 1, "chunk_size": 16}
    others = {"num_hidden_layers": 2, "vocab_size": 50, "initializer_range": 0.5}
    model = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**{**sizes, **others, **CONFIGS[name]})).eval()
    with torch.no_grad():
        for weight, x in model.named_parameters():
            if weight.endswith(("bias", "D", "A_log", "norm.weight")):  # which it begins all alike
                x.add_(0.3 * torch.rand(x.shape))
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of transformers."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name in CONFIGS:
        theirs(name).save_pretrained(root / name)
    return root


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers(folder: Path, name: str) -> None:
    """Logits to float32 rounding, of rows longer than a chunk; and 64 greedy tokens the same, from prefill and loop."""
    ours = Mamba2.load(folder / name)
    prompt = torch.randint(0, 50, (2, 37), generator=torch.Generator().manual_seed(0))
    made = ours.generate(prompt.tolist(), 64)
    whole = torch.cat((prompt, torch.from_numpy(made)), 1)
    with torch.no_grad():
        want = theirs(name)(whole).logits
    assert relative_error(tensor(scored(ours.config, ours.weights, whole.numpy(), chunk=32)), want) <= ROUNDING
    assert torch.equal(want[:, 36:-1].argmax(-1), whole[:, 37:])


def test_bfloat16(folder: Path) -> None:
    """Prefill and steps in bf16 are as far from the truth as its roundings are."""
    ours = Mamba2.load(folder / "groups", dtype=jnp.bfloat16)
    tokens = torch.randint(0, 50, (3, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = theirs("groups")(tokens).logits
    before = ours.init_cache(3)
    _, cache = prefilled(ours.config, ours.weights, tokens[:, :-1].numpy(), before)
    assert all(x.is_deleted() for layer in before for x in layer), "a donated cache is updated where it is"
    scores, cache = jax.jit(step, static_argnames="config")(ours.config, ours.weights, tokens[:, -1].numpy(), cache)
    assert {x.dtype.name for layer in cache for x in layer} == {"bfloat16", "float32"}
    assert relative_error(tensor(scores), want[:, -1]) <= ROUNDING_BF16


TINY = Config(width=16, layers=1, vocab=24, heads=2, channels=16, state=8, tied=False)


@pytest.fixture(scope="module")
def tiny() -> Mamba2:
    return Mamba2(TINY, {name: x.numpy() for name, x in random_weights(TINY).items()})


def test_one_executable_makes_any_number_of_tokens(tiny: Mamba2) -> None:
    """Also more than there is room for: rows go on where they were, so that greedy tokens do not depend on the number."""
    decoded.clear_cache()
    longest = tiny.generate([[5, 7]], ROOM + 40)
    assert len(set(longest[0].tolist())) > 3
    for most in (1, 2, 17, ROOM, ROOM + 1):
        np.testing.assert_array_equal(tiny.generate([[5, 7]], most), longest[:, :most])
    assert decoded._cache_size() == 1


def test_padded_rows_are_what_they_are_alone(tiny: Mamba2) -> None:
    together = tiny.generate([[5, 7, 9], [3]], 12)
    np.testing.assert_array_equal(together[1:], tiny.generate([[3]], 12))


def test_rows_end(tiny: Mamba2) -> None:
    """A row has padding behind its stop token, and nothing is made once all have ended."""
    free = tiny.generate([[5, 7], [3, 3]], 30)
    stop = int(free[0][3])
    first = [int(np.argmax(row == stop)) if stop in row else 29 for row in free]
    ended = tiny.generate([[5, 7], [3, 3]], 30, stop=[stop], pad=23)
    assert ended.shape[1] == max(first) + 1
    for row, whole, end in zip(ended, free, first, strict=True):
        np.testing.assert_array_equal(row[: end + 1], whole[: end + 1])
        assert (row[end + 1 :] == 23).all()


def test_sampling(tiny: Mamba2) -> None:
    """The same seed draws the same tokens, another one others; of the few likeliest, none is drawn that is not among them."""
    draw = functools.partial(tiny.generate, [[5, 7]], 20, temperature=1.0)
    np.testing.assert_array_equal(draw(seed=1), draw(seed=1))
    assert not np.array_equal(draw(seed=1), draw(seed=2))
    scores = jnp.asarray(np.random.default_rng(0).normal(size=(400, 24)), jnp.float32)
    drawn = np.asarray(choose(scores, jax.random.key(0), temperature=2.0, top_k=3))
    ranks = (np.asarray(scores) > np.take_along_axis(np.asarray(scores), drawn[:, None], 1)).sum(1)
    assert set(ranks.tolist()) == {0, 1, 2}
    np.testing.assert_array_equal(choose(scores, jax.random.key(0)), np.asarray(scores).argmax(1))


def test_bad_calls_are_named(tiny: Mamba2) -> None:
    for arguments, message in (
        (([[1], []], 3), "prompts of at least one token"),
        (([[24]], 3), "token 24 is not in the vocabulary of 24"),
        (([[1.7]], 3), "tokens are integers, got 1.7"),
        (([[1]], 0), "at least one token is to be made, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny.generate(*arguments)
    with pytest.raises(ValueError, match="token 9999 is not in the vocabulary of 24"):
        tiny.generate([[1]], 3, stop=(9999,))
    with pytest.raises(ValueError, match="token -1 is not in the vocabulary of 24"):
        tiny.logits([[1, -1]])
    with pytest.raises(ValueError, match=r"must be integers \[b t\], got int64 \[2\]"):
        tiny.logits([1, 2])
    with pytest.raises(ValueError, match="float32 or bfloat16, not in float16"):
        Mamba2(TINY, {}, jnp.dtype("float16"))
    assert Mamba2.random(TINY, "bfloat16").dtype == jnp.bfloat16


def test_the_loop_lowers_for_every_platform(tiny: Mamba2) -> None:
    """One loop, no custom call, for cpu, cuda and tpu: of which the last is lowered here and run nowhere."""
    call = jax.jit(functools.partial(decode, TINY, temperature=0.7, top_k=5), donate_argnames="cache")
    start = (tiny.init_cache(1), jnp.zeros(1, jnp.int32), jnp.zeros(1, bool), jax.random.key(0))
    exported = export.export(call, platforms=("cpu", "cuda", "tpu"))(tiny.weights, *start, jnp.int32(3))
    text = str(exported.mlir_module())
    assert "stablehlo.while" in text
    annotated = text.replace(
        "custom_call @Sharding", ""
    )  # JAX 0.6 marks a random key so: where it lies, not what is done
    assert "custom_call" not in annotated
