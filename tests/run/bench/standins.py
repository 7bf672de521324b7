"""Packages of others, stood in for by modules that compute the layer with its reference: no GPU is needed."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ssdgen.run.checks import one_thread
from ssdgen.run.reference import reference
from ssdgen.spec import load_source, read_layer

LAYERS = {name: read_layer(load_source(name)) for name in ("mamba2", "simple_gla")}
SPACE = [SimpleNamespace(occupancy=2), SimpleNamespace(occupancy=4)]
Values = tuple[torch.Tensor, torch.Tensor]


def truth(layer: str, tensors: dict[str, Any]) -> Values:
    with one_thread():
        outputs, finals = reference(LAYERS[layer], {k: v for k, v in tensors.items() if v is not None})
    return next(iter(outputs.values())), next(iter(finals.values()))


@dataclass
class StandIns:
    """What each returns goes through `spoil`; `searched` is how many candidates TileGym tried each time."""

    spoil: Callable[[str, torch.Tensor], torch.Tensor] = lambda peer, y: y
    searched: list[int] = field(default_factory=list)

    def mamba_ssm(self, x: Any, dt: Any, A: Any, B: Any, C: Any, chunk: int, **named: Any) -> tuple[Any, ...]:
        assert named["dt_softplus"]
        tensors = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": named["D"], "dt_bias": named["dt_bias"]}
        y, S = truth("mamba2", tensors)
        return self.spoil(f"mamba_ssm {chunk}", y.bfloat16()), None, dt, None, None, S.float()

    def tilegym(self, module: Any) -> Callable[..., Values]:
        def mamba2_chunk_forward(
            x: Any, a: Any, b: Any, c: Any, d: Any, dt: Any, start: Any, chunk_size: int
        ) -> Values:
            assert start.abs().max() == 0
            kernel = SimpleNamespace(_pyfunc=SimpleNamespace(__name__="chunk_cumsum_kernel"))
            module.exhaustive_search(SPACE, None, None, kernel, None, None)
            raw = dt + torch.log(-torch.expm1(-dt))
            y, S = truth("mamba2", {"x": x, "dt": raw, "A": a, "B": b, "C": c, "D": d})
            return self.spoil("TileGym", y.bfloat16()), S.float()

        return mamba2_chunk_forward

    def search(self, configs: list[Any], *rest: Any, quiet: bool) -> Any:
        self.searched.append(len(configs))
        best = SimpleNamespace(config=configs[-1], mean_us=1.0)
        return SimpleNamespace(best=best, successes=[best], failures=[])

    def fla(self, q: Any, k: Any, v: Any, g: Any, scale: float, output_final_state: bool) -> Values:
        assert (scale, output_final_state) == (1.0, True)
        y, S = truth("simple_gla", {"q": q, "k": k, "v": v, "g": g})
        return self.spoil("fla", (y * math.sqrt(q.shape[-1])).bfloat16()), S.transpose(-1, -2).float()


def install(monkeypatch: pytest.MonkeyPatch, *peers: str) -> StandIns:
    """Make `peers` importable, and no others."""
    made = StandIns()
    modules: dict[str, Any] = {
        "mamba_ssm.ops.triton.ssd_combined": None,
        "tilegym.ops.cutile.mamba2": None,
        "peers": None,
        "fla.ops.simple_gla": None,
    }
    if "mamba_ssm" in peers:
        module: Any = ModuleType("mamba_ssm.ops.triton.ssd_combined")
        module._mamba_chunk_scan_combined_fwd = made.mamba_ssm
        modules[module.__name__] = module
    if "TileGym" in peers:
        module = ModuleType("tilegym.ops.cutile.mamba2")
        module.exhaustive_search, module.mamba2_chunk_forward = made.search, made.tilegym(module)
        modules[module.__name__] = module
    if "fla" in peers:
        module = ModuleType("fla.ops.simple_gla")
        module.chunk_simple_gla = made.fla
        modules[module.__name__] = module
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return made
