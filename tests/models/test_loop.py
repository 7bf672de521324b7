"""The generation loop and the choice of tokens, on the CPU; on a GPU: tests/models/test_gpu.py."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ssdgen.models.loop import Decoder
from ssdgen.models.mamba2 import Mamba2
from ssdgen.models.sampling import Sampling, choose
from tests.models.folders import SMALL, random_weights

MODEL = Mamba2(SMALL, random_weights(SMALL))
PROMPTS = [[3, 9, 4, 4, 1, 30], [7], [12, 0, 8]]


def rows_of(decoder: Decoder, prompts: list[list[int]], most: int) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in prompts]
    for chunk in decoder.run(prompts, most):
        rows = [row + new for row, new in zip(rows, chunk, strict=True)]
    return rows


def test_a_batch_is_each_row_alone() -> None:
    """Rows of other lengths, padded on the left; and a decoder that is used again."""
    decoder = Decoder(MODEL, 3)
    together = rows_of(decoder, PROMPTS, 20)
    assert together == [rows_of(Decoder(MODEL), [prompt], 20)[0] for prompt in PROMPTS]
    assert all(len(row) == 20 for row in together)
    assert rows_of(decoder, PROMPTS, 20) == together


def test_rows_end_with_their_stop_token() -> None:
    """The others go on; when all have ended, so does the loop."""
    free = rows_of(Decoder(MODEL, 3), PROMPTS, 40)
    stop = (free[0][4], free[2][11])
    rows = rows_of(Decoder(MODEL, 3, stop=stop, pad=1), PROMPTS, 40)
    for row, whole in zip(rows, free, strict=True):
        ends = [i for i, token in enumerate(whole) if token in stop]
        assert row == (whole[: ends[0] + 1] if ends else whole)
    chunks = list(Decoder(MODEL, 1, stop=stop).run(PROMPTS[:1], 1000))
    assert len(chunks) == 1 + free[0].index(stop[0]) or len(chunks) == 1 + free[0].index(stop[1])


@pytest.mark.parametrize("every", [3, 8])
@pytest.mark.parametrize("ahead", [False, True])
def test_looks_of_the_host_change_nothing(every: int, ahead: bool) -> None:
    """Several tokens at a time, also with the next ones queued before it looks, as on a GPU: rows end where they did."""
    stop = (rows_of(Decoder(MODEL, 3), PROMPTS, 40)[0][4],)
    for most in (1, 2, 9, 20):
        decoder = Decoder(MODEL, 3, stop=stop, every=every)
        if ahead:
            decoder._graph = SimpleNamespace(replay=decoder._advance)  # type: ignore[assignment]
        assert rows_of(decoder, PROMPTS, most) == rows_of(Decoder(MODEL, 3, stop=stop), PROMPTS, most)


def test_ended_rows_are_masked_where_they_are() -> None:
    """Behind its stop token a row feeds the padding token to the model, whatever its logits say."""
    free = rows_of(Decoder(MODEL, 2), PROMPTS[:2], 6)
    decoder = Decoder(MODEL, 2, stop=(free[0][1],), pad=1)
    list(decoder.run(PROMPTS[:2], 6))
    assert decoder._recent[0, -1] == 1
    assert decoder._ended.tolist() == [True, free[0][1] in free[1]]


def test_draws_follow_the_softmax() -> None:
    """20,000 draws of four tokens: each share within five standard deviations, at two temperatures."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    count = 20000
    for temperature in (1.0, 0.5):
        generator = torch.Generator().manual_seed(1)
        drawn = choose(logits.expand(count, -1), Sampling(temperature), generator)
        shares = torch.bincount(drawn, minlength=4) / count
        wanted = (logits / temperature).softmax(0)
        assert ((shares - wanted).abs() <= 5 * (wanted * (1 - wanted) / count).sqrt()).all()


def test_top_k_draws_of_the_likeliest_only() -> None:
    logits = torch.randn(200, 50)
    allowed = logits.topk(3).indices
    drawn = choose(logits, Sampling(100.0, top_k=3), torch.Generator().manual_seed(0))
    assert (drawn[:, None] == allowed).any(1).all()
    assert not torch.equal(drawn, logits.argmax(-1))
    assert torch.equal(choose(logits, Sampling(1.0, top_k=1), torch.Generator()), logits.argmax(-1))
    assert torch.equal(choose(logits, Sampling()), logits.argmax(-1))
    assert torch.equal(choose(logits, Sampling(1e-38)), logits.argmax(-1))


def test_a_seed_gives_the_same_text() -> None:
    texts = [rows_of(Decoder(MODEL, sampling=Sampling(1.0, 10, seed)), [[5, 6]], 15) for seed in (4, 4, 5)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Decoder(MODEL, 0), "batch and every must be integers from 1"),
        (lambda: Decoder(MODEL, 1.5), "batch and every must be integers from 1, got 1.5"),
        (lambda: Decoder(MODEL, every=0), "batch and every must be integers from 1, got 1 and 0"),
        (lambda: Decoder(MODEL, stop=[1.5]), "tokens are integers, got 1.5"),
        (lambda: Decoder(MODEL, stop=[40]), "token 40 is not in the vocabulary of 40"),
        (lambda: Decoder(MODEL).run([[1, 40]], 3), "token 40 is not in the vocabulary of 40"),
        (lambda: Decoder(MODEL).run([[]], 3), "1 prompts of at least one token are wanted"),
        (lambda: Decoder(MODEL).run([[1], [2]], 3), "1 prompts of at least one token"),
        (lambda: Decoder(MODEL).run([[1]], 0), "most and at_once must be integers from 1, got 0"),
        (lambda: Decoder(MODEL).run([[1]], 3, at_once=-1), "most and at_once must be integers from 1, got 3 and -1"),
        (
            lambda: MODEL.prefill(torch.ones(1, 2, dtype=torch.int64), MODEL.init_cache(2)),
            "1 rows, and the cache is of 2",
        ),
        (lambda: Mamba2.load("nowhere", device="nonsense"), "on a device that torch knows, .* not on 'nonsense'"),
        (lambda: Mamba2.load("nowhere", dtype="bf16"), "a model computes in one of torch.float32, .* not in 'bf16'"),
        (lambda: MODEL.step(torch.ones(2, dtype=torch.int64), MODEL.init_cache(1)), "2 rows, and the cache is of 1"),
        (lambda: MODEL.logits(torch.ones(2, dtype=torch.int64)), r"must be \[b t\] and hold some, got shape \[2\]"),
        (lambda: MODEL.logits(torch.full((1, 2), 40)), "not in the vocabulary of 40"),
        (lambda: Sampling(-1.0), "temperature must be a number from 0"),
        (lambda: Sampling(math.nan), "temperature"),
        (lambda: Sampling(1.0, -1), "top_k must be an integer from 0"),
    ],
)
def test_bad_calls(call: Any, message: str) -> None:
    """Said by the call itself, not at the first token."""
    with pytest.raises(ValueError, match=message):
        call()


def test_prompts_may_be_tensors() -> None:
    rows = [[1, 2], [3, 4]]
    assert list(Decoder(MODEL, 2).run(torch.tensor(rows), 3)) == list(Decoder(MODEL, 2).run(rows, 3))
