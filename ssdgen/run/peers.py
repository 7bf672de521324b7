"""Implementations that someone else wrote, to compare the built-in specs with.

On the CPU: the Mamba-2 of transformers (its mixer's plain torch path) and the `naive` functions of fla-core, which are
loaded as single files because the packages around them import Triton. Each peer is compared in float32 with an emitted
`forward` on the peer's own inputs. A package that is not installed is a skipped check with the reason. Those that need a
GPU are in `gpu_peers`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType

import torch

from ssdgen.ir.layer import Layer
from ssdgen.ir.report import Check
from ssdgen.run.checks import BOUNDS, Expected, compare
from ssdgen.run.gpu_peers import Forward, gpu_peer_checks
from ssdgen.spec import load_source


def peer_checks(layer: Layer, forward: Forward, gpu: bool = True) -> Iterator[Check]:
    """`forward` of a built-in spec against every implementation of it by others; none if there is none.

    Those that need a GPU have one if torch does and `gpu` allows it. A spec that only has the name of a built-in one is
    compared with nothing: it may well mean something else.
    """
    if layer.name not in PEERS or layer.source.text != load_source(layer.name).text:
        return
    for name, peer in PEERS[layer.name].items():
        try:
            yield from peer(name, forward)
        except ImportError as missing:
            yield Check(name, "peer", 0.0, 0.0, passed=False, skipped=True, note=f"not compared: {missing}")
    yield from gpu_peer_checks(layer, forward, "cuda" if gpu and torch.cuda.is_available() else None)


def _compare(name: str, got: tuple[torch.Tensor, ...], want: dict[str, torch.Tensor]) -> list[Check]:
    named = dict(zip(want, got, strict=False))
    return compare("peer", name, named, {k: Expected(v, torch.float32, BOUNDS["f32"]) for k, v in want.items()})


@contextmanager
def _plain_mamba2() -> Iterator[ModuleType]:
    """transformers' Mamba2 in plain torch. ImportError if it is not installed.

    Where it finds mamba_ssm or causal_conv1d, its functions call their kernels, which take no CPU tensors.
    """
    module = importlib.import_module("transformers.models.mamba2.modeling_mamba2")
    names = [name for name in ("causal_conv1d_fn", "mamba2_chunk_scan") if hasattr(module, name)]
    before = {name: getattr(module, name) for name in names}
    vars(module).update({name: inspect.unwrap(function) for name, function in before.items()})
    try:
        yield module
    finally:
        vars(module).update(before)


def _transformers_mixer(name: str, forward: Forward) -> list[Check]:
    """What transformers' Mamba2Mixer hands to its norm, from the x, B, C, dt that its projection and convolution make."""
    with _plain_mamba2() as module:
        return _mixer_checks(name, forward, module)


def _mixer_checks(name: str, forward: Forward, module: ModuleType) -> list[Check]:
    torch.manual_seed(3)
    b, t, h, g, p, n = 2, 45, 4, 2, 16, 24
    checks = []
    for limit in ((0.0, math.inf), (0.01, 0.05)):
        config = module.Mamba2Config(
            num_heads=h, head_dim=p, hidden_size=h * p // 2, state_size=n, n_groups=g, chunk_size=16,
            num_hidden_layers=1, time_step_limit=limit,
        )  # fmt: skip
        mixer = module.Mamba2Mixer(config, layer_idx=0).eval()
        with torch.no_grad():
            mixer.D.copy_(torch.randn(h))
            mixer.A_log.copy_(torch.log(1 + 15 * torch.rand(h)))
        seen = _Recorder()
        mixer.register_module("norm", seen)
        mixer.register_module("out_proj", torch.nn.Identity())
        hidden = torch.randn(b, t, config.hidden_size)
        with torch.no_grad():
            mixer(hidden)
            _, xBC, dt = torch.split(mixer.in_proj(hidden), [h * p, h * p + 2 * g * n, h], dim=-1)
            xBC = torch.nn.functional.silu(mixer.conv1d(xBC.transpose(1, 2))[..., :t].transpose(1, 2))
            x, B, C = torch.split(xBC, [h * p, g * n, g * n], dim=-1)
            got = forward(
                x=x.view(b, t, h, p), dt=dt, A=-mixer.A_log.exp(), B=B.view(b, t, g, n), C=C.view(b, t, g, n),
                D=mixer.D, dt_bias=mixer.dt_bias, dt_min=limit[0], dt_max=limit[1],
            )  # fmt: skip
        assert seen.value is not None
        checks += _compare(f"{name}, dt limit {limit}", got, {"y": seen.value.reshape(b, t, h, p)})
    return checks


class _Recorder(torch.nn.Module):
    """Stands where the mixer's norm was, and keeps what came."""

    value: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        self.value = hidden
        return hidden


def _transformers_scan(name: str, forward: Forward, *, softplus: bool) -> list[Check]:
    """transformers' chunked scan on its own, with an initial state and the final one; without softplus it clamps steps too."""
    with _plain_mamba2() as module:
        scan = getattr(module, "mamba2_chunk_scan", None)
    if scan is None:
        raise ImportError("this version of transformers has no mamba2_chunk_scan")
    torch.manual_seed(4)
    b, t, h, g, p, n = 2, 77, 6, 3, 20, 12
    x, dt = torch.randn(b, t, h, p), torch.randn(b, t, h) - (4 if softplus else 0)
    B, C = torch.randn(b, t, g, n), torch.randn(b, t, g, n)
    A, D, bias, S0 = -1 - 15 * torch.rand(h), torch.randn(h), torch.randn(h), torch.randn(b, h, p, n)
    y, S = scan(
        x,
        dt,
        A,
        B,
        C,
        chunk_size=16,
        D=D,
        dt_bias=bias,
        dt_softplus=softplus,
        initial_states=S0,
        return_final_states=True,
    )
    got = forward(x=x, dt=dt, A=A, B=B, C=C, D=D, dt_bias=bias, S0=S0)
    return _compare(name, got, {"y": y, "S": S})


def _fla(operation: str) -> ModuleType:
    """fla/ops/<operation>/naive.py alone. ImportError if fla-core or einops is not installed."""
    try:
        found = importlib.metadata.distribution("fla-core").locate_file(f"fla/ops/{operation}/naive.py")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError("no package fla-core") from None
    spec = importlib.util.spec_from_file_location(f"_fla_{operation}_naive", str(found))
    if spec is None or spec.loader is None:
        raise ImportError(f"fla-core has no fla/ops/{operation}/naive.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _qkv(t: int = 77, dim: int = 24, value_dim: int = 40) -> dict[str, torch.Tensor]:
    """Queries, keys [b t h k] and values [b t h v]."""
    torch.manual_seed(5)
    return {name: torch.randn(2, t, 3, d) for name, d in (("q", dim), ("k", dim), ("v", value_dim))}


def _log_gates(*shape: int) -> torch.Tensor:
    return torch.nn.functional.logsigmoid(torch.randn(*shape) + 2)


def _fla_retention(name: str, forward: Forward) -> list[Check]:
    naive = _fla("retention").naive_retention
    i = _qkv()
    y = naive(*(x.transpose(1, 2) for x in i.values())).transpose(1, 2)
    return _compare(name, forward(**i), {"y": y})


def _fla_linear_attention(name: str, forward: Forward) -> list[Check]:
    naive = _fla("linear_attn").naive_recurrent_linear_attn
    i, start = _qkv(), torch.randn(2, 3, 24, 40)
    y, S = naive(**i, initial_state=start, output_final_state=True)
    return _compare(name, forward(**i, S0=start.mT), {"y": y, "S": S.mT})


def _fla_simple_gla(name: str, forward: Forward) -> list[Check]:
    naive = _fla("simple_gla").naive_recurrent_simple_gla
    i, start = _qkv(), torch.randn(2, 3, 24, 40)
    g = _log_gates(2, 77, 3)
    y, S = naive(**i, g=g, initial_state=start, output_final_state=True)
    return _compare(name, forward(**i, g=g, S0=start.mT), {"y": y, "S": S.mT})


def _fla_gla(name: str, forward: Forward) -> list[Check]:
    naive = _fla("gla").naive_recurrent_gla
    i, start = _qkv(), torch.randn(2, 3, 24, 40)
    g = _log_gates(2, 77, 3, 24)
    y, S = naive(**i, gk=g, initial_state=start, output_final_state=True)
    return _compare(name, forward(**i, g=g, S0=start.mT), {"y": y, "S": S.mT})


PEERS: dict[str, dict[str, Callable[[str, Forward], list[Check]]]] = {
    "mamba2": {
        "transformers Mamba2Mixer": _transformers_mixer,
        "transformers chunk scan": partial(_transformers_scan, softplus=True),
    },
    "state_space_duality": {"transformers chunk scan": partial(_transformers_scan, softplus=False)},
    "retnet": {"fla naive_retention": _fla_retention},
    "linear_attention": {"fla naive_recurrent_linear_attn": _fla_linear_attention},
    "simple_gla": {"fla naive_recurrent_simple_gla": _fla_simple_gla},
    "gla": {"fla naive_recurrent_gla": _fla_gla},
}
"""By the name of a built-in spec: implementations by others."""
