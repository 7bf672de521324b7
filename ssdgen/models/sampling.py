"""Choosing the next token from logits, where they are: nothing waits for the device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen.

    temperature: logits are divided by it; 0 takes the likeliest token
    top_k: only so many of the likeliest are in the draw, and those as likely as the last of them; 0 for all
    seed: of the random numbers
    """

    temperature: float = 0.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be a number from 0, got {self.temperature!r}")
        if type(self.top_k) is not int or self.top_k < 0:
            raise ValueError(f"top_k must be an integer from 0, got {self.top_k!r}")


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator | None = None) -> Tensor:
    """A token for every row of logits[b vocab]: [b], int64.

    Drawn by the Gumbel-max trick: log p + g is largest at token i with probability p(i) if every g is -log of a number of the
    exponential distribution. So there is no sum over the vocabulary, and no search in one.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, -1, sorted=False).values.amin(-1, keepdim=True)
        logits = logits.masked_fill(logits < least, -math.inf)
    noise = torch.empty_like(logits).exponential_(generator=generator)
    below = logits - logits.amax(-1, keepdim=True)  # so that no quotient overflows
    return (below / sampling.temperature - noise.log()).argmax(-1)
