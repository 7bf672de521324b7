"""transformers' own Mamba-2 of the same size, for `ssdgen bench model` to stand beside."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ssdgen.compat.transformers import FUNCTIONS
from ssdgen.models.config import Config


@contextmanager
def plain(module: ModuleType) -> Iterator[None]:
    """Within it the mixers of a module of transformers compute in plain torch: where mamba_ssm or causal_conv1d is installed,
    they call those, whose kernels take no CPU tensors."""
    before = {name: getattr(module, name) for name in FUNCTIONS}
    vars(module).update({name: inspect.unwrap(function) for name, function in before.items()})
    try:
        yield
    finally:
        vars(module).update(before)


class Transformers:
    """A model with random weights, made on the device. ImportError without transformers 5."""

    def __init__(self, config: Config, device: str, dtype: torch.dtype) -> None:
        module = importlib.import_module("transformers.models.mamba2")
        kernels = [name for name in ("mamba_ssm", "causal_conv1d") if importlib.util.find_spec(name)]
        self.how = f"with {' and '.join(kernels)}" if kernels and device != "cpu" else "in plain torch"
        self._device = device
        self._modeling = importlib.import_module("transformers.models.mamba2.modeling_mamba2")
        with torch.device(device):
            model = module.Mamba2ForCausalLM(
                module.Mamba2Config(
                    num_heads=config.heads, head_dim=config.channels, vocab_size=config.vocab, hidden_size=config.width,
                    state_size=config.state, num_hidden_layers=config.layers, n_groups=config.groups,
                    tie_word_embeddings=config.tied, expand=config.inner // config.width,
                )
            )  # fmt: skip
        self._model: Any = model.to(dtype).eval()
        self._cache: Any = None

    @torch.no_grad()
    def prefill(self, tokens: Tensor) -> float:
        """Seconds for the logits behind tokens[1 t]; steps go on from there."""
        self._wait()
        begun = time.perf_counter()
        with self._functions():
            self._cache = self._model(tokens, use_cache=True, logits_to_keep=1).cache_params
        self._wait()
        return time.perf_counter() - begun

    @torch.no_grad()
    def step(self, count: int) -> float:
        """Seconds for a token, of so many, each read back."""
        token = torch.zeros((1, 1), dtype=torch.int64, device=self._device)
        self._wait()
        begun = time.perf_counter()
        with self._functions():
            for _ in range(count):
                token = self._model(token, cache_params=self._cache, use_cache=True).logits.argmax(-1)
                token.tolist()
        return (time.perf_counter() - begun) / count

    def _functions(self) -> AbstractContextManager[None]:
        return plain(self._modeling) if self._device == "cpu" else nullcontext()

    def _wait(self) -> None:
        if self._device != "cpu":
            torch.cuda.synchronize()
