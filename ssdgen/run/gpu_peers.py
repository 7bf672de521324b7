"""Forwards by others that run on a GPU: mamba_ssm's Triton and TileGym's cuTile kernels of Mamba-2.

They are compared with ours in bf16, the dtype they are used in. Both are within the bound of bf16 of the truth, so that two
such results may be twice that apart; how far ours alone is from the truth is what the hardware gate measures.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch

from ssdgen.ir.layer import Layer
from ssdgen.ir.report import Check
from ssdgen.run.checks import BOUNDS, Expected, compare
from ssdgen.run.inputs import Case, Inputs, draw

Call = Callable[[Inputs], tuple[torch.Tensor, ...]]
"""A forward by others, on what `draw` makes for the layer with `D` of one number a head: outputs, then final states."""

Forward = Callable[..., tuple[torch.Tensor, ...]]
"""An emitted `forward`: inputs by keyword; outputs, then final states."""


def mamba_ssm(chunk: int) -> Call:
    """mamba_ssm's forward, `chunk` tokens at a time. ImportError if it is not installed."""
    scan = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")._mamba_chunk_scan_combined_fwd

    def call(i: Inputs) -> tuple[torch.Tensor, ...]:
        t = i.tensors
        results = scan(
            t["x"], t["dt"], t["A"], t["B"], t["C"], chunk, D=t["D"], z=t.get("z"), dt_bias=t["dt_bias"],
            initial_states=i.states.get("S"), dt_softplus=True, dt_limit=_limits(i),
        )  # fmt: skip
        return results[0], results[-1]

    return call


def tilegym(chunk: int, kernels: ModuleType | None = None) -> Call:
    """TileGym's forward, `chunk` tokens at a time, of which the sequence is a multiple. ImportError if it is not installed.

    It has no softplus and no `z`: the finished steps are made on the first call with some inputs, and kept. `kernels` is its
    module, by default one that searches quickly.
    """
    kernels = kernels or tilegym_kernels(quick=True)
    prepared: dict[int, tuple[Inputs, torch.Tensor, torch.Tensor]] = {}

    def call(i: Inputs) -> tuple[torch.Tensor, ...]:
        t = i.tensors
        if id(i) not in prepared:
            step = torch.nn.functional.softplus(t["dt"] + t["dt_bias"]).clamp(*_limits(i))
            (b, _, h, p), n = t["x"].shape, t["B"].shape[-1]
            zero = torch.zeros(b, h, p, n, device=step.device)
            prepared[id(i)] = i, step, i.states.get("S", zero)
        _, step, start = prepared[id(i)]
        y, final = kernels.mamba2_chunk_forward(t["x"], t["A"], t["B"], t["C"], t["D"], step, start, chunk_size=chunk)
        return y, final

    return call


def tilegym_kernels(*, quick: bool) -> ModuleType:
    """TileGym's module of Mamba-2 kernels: its package's, or that of a module `peers` that has them without the package.

    The latter leaves out most of the space that TileGym searches if `quick`. ImportError if neither is here.
    """
    try:
        return importlib.import_module("tilegym.ops.cutile.mamba2")
    except ImportError as missing:
        try:
            load: Callable[..., ModuleType] = importlib.import_module("peers").tilegym
        except (ImportError, AttributeError):
            raise missing from None
        return _filled(load(quick=True), load(quick=False)) if quick else load(quick=False)


def _filled(narrow: ModuleType, whole: ModuleType) -> ModuleType:
    """`narrow`, whose kernels are searched among few configurations, with the whole search of `whole` where none is left."""
    for name in [n for n in vars(narrow) if n.endswith("_autotune_configs")]:
        few, every = getattr(narrow, name), getattr(whole, name)
        setattr(narrow, name, lambda *a, few=few, every=every, **k: list(few(*a, **k)) or list(every(*a, **k)))
    return narrow


def _limits(i: Inputs) -> tuple[float, float]:
    return i.params.get("dt_min", 0.0), i.params.get("dt_max", math.inf)


@dataclass(frozen=True)
class GpuPeer:
    """How to get a forward by others (ImportError if it is not here), and the inputs that it does not know."""

    load: Callable[[], Call]
    unknown: frozenset[str] = frozenset()


GPU_PEERS: Mapping[str, Mapping[str, GpuPeer]] = {
    "mamba2": {
        "mamba_ssm Triton": GpuPeer(partial(mamba_ssm, 128)),
        "TileGym cuTile": GpuPeer(partial(tilegym, 64), unknown=frozenset({"z"})),
    }
}
"""By the name of a built-in spec."""

APART = 2 * BOUNDS["bf16"]
"""How far ours may be from theirs."""

TUNING = "TILEGYM_DISABLE_AUTOTUNE"
SIZES = {"b": 2, "t": 256, "h": 8, "g": 2, "p": 64, "n": 128}
PARAMS = {"dt_min": 0.005, "dt_max": 0.05}


def gpu_peer_checks(layer: Layer, forward: Forward, device: str | None) -> Iterator[Check]:
    """`forward`, emitted from a built-in spec, against everything in GPU_PEERS on `device`; None if there is none.

    A peer that is not here, or that fails on its own, is a skipped check with the reason.
    """
    for name, peer in GPU_PEERS.get(layer.name, {}).items():
        if device is None:
            yield _skipped(name, "it needs a CUDA device")
        else:
            yield from _against(name, peer, layer, forward, device)


def _against(name: str, peer: GpuPeer, layer: Layer, forward: Forward, device: str) -> list[Check]:
    case = Case(SIZES, dtype="bf16", absent=peer.unknown, forms={"D": ("h",)}, params=PARAMS, seed=6)
    inputs = draw(layer, case, device)
    try:
        with _untuned():
            theirs = [value.cpu() for value in peer.load()(inputs)]
    except Exception as error:  # code of others and its compiler: whatever stops them is no fault of ours
        return [_skipped(name, _text(error))]
    try:
        ours = [value.cpu() for value in forward(**inputs.keywords())]
    except (ValueError, TypeError, RuntimeError) as error:
        return [Check(name, "peer", math.inf, 0.0, passed=False, note=_text(error))]
    values = [o.name for o in layer.outputs] + [s.name for s in layer.states]
    expected = {key: Expected(want, want.dtype, APART) for key, want in zip(values, theirs, strict=True)}
    return compare("peer", name, dict(zip(values, ours, strict=True)), expected)


@contextmanager
def _untuned() -> Iterator[None]:
    """Within, TileGym takes its first configuration: to search for the fastest would take minutes."""
    before = os.environ.get(TUNING)
    os.environ[TUNING] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[TUNING]
        else:
            os.environ[TUNING] = before


def _skipped(name: str, why: str) -> Check:
    return Check(name, "peer", 0.0, 0.0, passed=False, skipped=True, note=f"not compared: {why}")


def _text(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
