"""The generation loop. On a GPU a step, sampling included, is one CUDA graph, and the host looks at what came every few tokens.

    decoder = Decoder(model, batch=2, stop=(0,))
    for tokens in decoder.run([[5, 7, 9], [3]], most=100):   # the next tokens of every row, as lists
        ...

A row that has ended is masked on the device: it gets the padding token from then on. The host copies `every` tokens at a time
into pinned memory, and queues the next ones before it looks at them, so that the GPU does not wait for it. Memory is
allocated when the decoder is made, and does not grow with the length of the texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ssdgen.models.config import check_tokens
from ssdgen.models.mamba2 import AT_ONCE, Mamba2
from ssdgen.models.sampling import Sampling, choose

EVERY = 8
"""Tokens between two looks of the host."""


@dataclass(frozen=True)
class Chunk:
    """Tokens on their way to the host: [b k] in its memory, and what waits until they are there."""

    tokens: Tensor
    wait: Callable[[], object]


class Decoder:
    """Continues `batch` rows of tokens at a time with a model; it owns their cache, and may be used again and again.

    sampling: how tokens are chosen; random numbers go on from run to run
    stop: tokens that end a row
    pad: what a row has behind its end, on the device; the host does not see it
    every: tokens between two looks of the host; EVERY if absent, on the CPU, where a look costs nothing, 1
    graph: whether so many steps are captured as a CUDA graph; without, every kernel is launched by itself

    Raises ValueError for tokens that are not in the vocabulary, and for a batch or `every` below 1.
    """

    def __init__(
        self,
        model: Mamba2,
        batch: int = 1,
        *,
        sampling: Sampling | None = None,
        stop: Sequence[int] = (),
        pad: int = 0,
        every: int | None = None,
        graph: bool = True,
    ) -> None:
        device = model.device
        if every is None:
            every = EVERY if device.type == "cuda" else 1
        if type(batch) is not int or type(every) is not int or batch < 1 or every < 1:
            raise ValueError(f"batch and every must be integers from 1, got {batch!r} and {every!r}")
        check_tokens((*stop, pad), model.config.vocab)
        self.model, self.batch, self.sampling, self.stop = model, batch, sampling or Sampling(), frozenset(stop)
        self.every = every
        self.cache = model.init_cache(batch)
        self._generator = torch.Generator(device).manual_seed(self.sampling.seed)
        stops = torch.zeros(model.config.vocab, dtype=torch.bool)
        stops[list(self.stop)] = True
        self._stops = stops.to(device)
        self._pad = torch.tensor(pad, device=device)
        self._ended = torch.zeros(batch, dtype=torch.bool, device=device)
        self._recent = torch.zeros((batch, self.every), dtype=torch.int64, device=device)
        pinned = device.type == "cuda"
        self._seen = [torch.zeros(self._recent.shape, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._graph = self._captured() if device.type == "cuda" and graph else None

    def run(self, prompts: Sequence[Sequence[int]], most: int, at_once: int = AT_ONCE) -> Iterator[list[list[int]]]:
        """The next tokens of every row, as they come, up to its stop token, which is its last, or `most` of them.

        prompts: a row each, a sequence or a tensor, of at least one token; rows of different lengths are padded on the left,
        which changes nothing
        at_once: prompt tokens of all rows together that are computed at once

        Raises ValueError for prompts that do not fit, before anything is computed.
        """
        prompts = [p.tolist() if hasattr(p, "tolist") else p for p in prompts]
        if len(prompts) != self.batch or not all(prompts):
            raise ValueError(f"{self.batch} prompts of at least one token are wanted, got {list(map(len, prompts))}")
        if type(most) is not int or type(at_once) is not int or most < 1 or at_once < 1:
            raise ValueError(f"most and at_once must be integers from 1, got {most!r} and {at_once!r}")
        for prompt in prompts:
            check_tokens(prompt, self.model.config.vocab)
        return self._run(*self._rows(prompts), most, at_once)

    def _run(self, tokens: Tensor, padding: Tensor | None, most: int, at_once: int) -> Iterator[list[list[int]]]:
        self.cache.reset()
        self._ended.zero_()
        self._take(self.model.prefill(tokens, self.cache, padding, at_once), self.every - 1)
        chunks = self._chunks(most)
        ahead: Chunk | None = None
        running, left = set(range(self.batch)), most
        while running and left:
            chunk = next(chunks) if ahead is None else ahead
            # The device goes on with the next tokens while the host looks at these.
            ahead = next(chunks, None) if self._graph is not None else None
            chunk.wait()
            rows = [self._until_stop(row[:left]) if i in running else [] for i, row in enumerate(chunk.tokens.tolist())]
            left -= min(left, chunk.tokens.shape[1])
            running -= {i for i in running if rows[i][-1] in self.stop}
            yield rows

    def _chunks(self, most: int) -> Iterator[Chunk]:
        """The token that the prefill gave, then `every` at a time; each chunk is queued when it is asked for."""
        yield self._on_its_way(self._seen[0], self.every - 1)
        for number in range(1, 1 + -(-(most - 1) // self.every)):
            if self._graph is not None:
                self._graph.replay()
            else:
                self._advance()
            yield self._on_its_way(self._seen[number % 2], 0)

    def _on_its_way(self, seen: Tensor, first: int) -> Chunk:
        """The recent tokens from place `first` on; all are copied, since only what is contiguous is copied without waiting."""
        seen.copy_(self._recent, non_blocking=True)
        if not self._recent.is_cuda:
            return Chunk(seen[:, first:], lambda: None)
        there = torch.cuda.Event()  # type: ignore[no-untyped-call]
        there.record(torch.cuda.current_stream(self.model.device))
        return Chunk(seen[:, first:], there.synchronize)

    def _advance(self) -> None:
        """The next `every` tokens of all rows, on the device."""
        for place in range(self.every):
            self._take(self.model.step(self._recent[:, place - 1], self.cache), place)

    def _take(self, logits: Tensor, place: int) -> None:
        """Choose the tokens behind logits[b vocab], and note them and which rows they end."""
        token = choose(logits, self.sampling, self._generator)
        if self.stop:
            token = torch.where(self._ended, self._pad, token)
            self._ended |= self._stops[token]
        self._recent[:, place].copy_(token)

    def _captured(self) -> torch.cuda.CUDAGraph:
        """`_advance` as a CUDA graph. It runs once before, so that nothing is compiled or searched within."""
        with torch.cuda.device(self.model.device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._take(self.model.step(self._recent[:, 0], self.cache), 0)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(self._generator)
            with torch.cuda.graph(graph):
                self._advance()
        return graph

    def _rows(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
        """Prompts [b t] in the host's memory, and on the device how much padding each has at its left; None if none has any."""
        longest = max(map(len, prompts))
        pinned = self.model.device.type == "cuda"
        tokens = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], pin_memory=pinned)
        padding = torch.tensor([longest - len(p) for p in prompts], pin_memory=pinned)
        return tokens, padding.to(self.model.device, non_blocking=True) if padding.any() else None

    def _until_stop(self, row: list[int]) -> list[int]:
        end = next((i for i, token in enumerate(row) if token in self.stop), len(row) - 1)
        return row[: end + 1]
