"""What ours is measured beside: TileGym's cuTile kernels, mamba_ssm's and fla's Triton kernels.

`pip install "ssdgen[bench]" tilegym mamba-ssm fla-core` gets them all; each is left out, with a note, if it is not here.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch

from ssdgen.plan.roofline import Roofline
from ssdgen.run.bench.searches import TILEGYM, TileSearch, autotuners, made, replay
from ssdgen.run.bench.shapes import Shape
from ssdgen.run.bench.truth import Values, gla_truth, mamba2_truth, of_call
from ssdgen.run.bench.winners import Search, Winners
from ssdgen.run.gpu_peers import Call, mamba_ssm, tilegym, tilegym_kernels
from ssdgen.run.inputs import Inputs

MAMBA_SSM, FLA = "mamba_ssm", "fla"
INSTALL = "pip install tilegym mamba-ssm fla-core"
PACKAGES: Mapping[str, str] = {TILEGYM: "tilegym", MAMBA_SSM: "mamba-ssm", FLA: "fla-core"}
VARIANTS: Mapping[str, tuple[str, ...]] = {
    TILEGYM: ("chunk 64", "chunk 128"),
    MAMBA_SSM: ("chunk 128", "chunk 256"),
    FLA: ("simple_gla",),
}
"""Of several the fastest is the peer's. fla computes the same recurrence without D, from finished inputs of each head."""

Variant = tuple[str, str]
"""A peer and one of its variants."""
CHOICES: Mapping[str, tuple[Variant, ...]] = {
    **{peer: tuple((peer, v) for v in variants) for peer, variants in VARIANTS.items()},
    **{f"{peer} {v}": ((peer, v),) for peer, variants in VARIANTS.items() for v in variants},
}
"""What `--peers` takes: a peer, or one of its variants."""


@dataclass(frozen=True, slots=True)
class Contender:
    """Something that is measured: who wrote it, what it is called, how it is called at a shape, and what it should return.

    `function` tells apart what is computed: contenders of the same share a truth. `floor` is the roofline of ours.
    """

    family: str
    name: str
    call: Call
    function: str
    truth: Callable[[Inputs], Values]
    values: Callable[[tuple[torch.Tensor, ...]], Values]
    note: Callable[[], str] = lambda: ""
    floor: Callable[[Inputs], Roofline] | None = None


@dataclass
class Others:
    """The peers in this process: `winners` is what their searches are replayed from, unless `again`."""

    modules: Mapping[str, ModuleType]
    winners: Winners
    again: bool = False
    part: tuple[int, int] | None = None
    missing: dict[str, str] = field(default_factory=dict)
    _tiles: tuple[ModuleType, TileSearch] | None = None

    def contenders(self, shape: Shape, variants: Iterable[Variant]) -> list[Contender]:
        """The `variants` at a shape, of those that are here."""
        out = []
        for peer, variant in variants:
            try:
                contender = self.contender(shape, peer, variant)
            except ImportError as error:
                self.missing[peer] = " ".join(str(error).split())
                continue
            if contender is not None:
                out.append(contender)
        return out

    def contender(self, shape: Shape, peer: str, variant: str) -> Contender | None:
        """One variant at a shape; None if it does not take it. ImportError if it is not here."""
        truth = partial(mamba2_truth, self.modules["mamba2"], shape)
        if peer == FLA:
            return self._fla(shape, variant)
        chunk = int(variant.removeprefix("chunk "))
        if peer == MAMBA_SSM:
            call = mamba_ssm(chunk)
            self._replay(peer)
            return Contender(peer, variant, _first_two(call), "mamba2", truth, partial(_plain, shape))
        kernels, search = self._tilegym()
        known = any(s.key[0] == chunk for s in self.winners.of(TILEGYM))
        if shape.t % chunk or (chunk != 64 and not known and not self.again):
            return None
        plain = tilegym(chunk, kernels)
        notes: list[str] = []

        def searching(inputs: Inputs) -> tuple[torch.Tensor, ...]:
            search.start(shape, chunk)
            result = plain(inputs)
            notes.extend(n for n in search.notes if n not in notes)
            return result

        return Contender(peer, variant, searching, "mamba2", truth, partial(_plain, shape), lambda: "; ".join(notes))

    def searches(self, known: Winners) -> list[Search]:
        """What has been searched for in this process beyond `known`."""
        out = list(self._tiles[1].found) if self._tiles else []
        for peer in (MAMBA_SSM, FLA):
            out += made(autotuners(peer), peer, known)
        return out

    def _tilegym(self) -> tuple[ModuleType, TileSearch]:
        if self._tiles is None:
            kernels: Any = tilegym_kernels(quick=False)
            search = TileSearch(kernels.exhaustive_search, self.winners, self.again, self.part)
            kernels.exhaustive_search = search
            self._tiles = kernels, search
        return self._tiles

    def _replay(self, peer: str) -> None:
        if not self.again:
            replay(autotuners(peer), self.winners, peer)

    def _fla(self, shape: Shape, variant: str) -> Contender:
        chunk_simple_gla = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla
        self._replay(FLA)
        prepared: dict[int, tuple[Inputs, tuple[torch.Tensor, ...]]] = {}

        def ready(inputs: Inputs) -> tuple[torch.Tensor, ...]:
            if id(inputs) not in prepared:
                prepared[id(inputs)] = inputs, gla_inputs(inputs)
            return prepared[id(inputs)][1]

        def call(inputs: Inputs) -> tuple[torch.Tensor, ...]:
            with torch.no_grad():
                y, state = chunk_simple_gla(*ready(inputs), scale=1.0, output_final_state=True)
            return y, state

        def truth(inputs: Inputs) -> Values:
            return gla_truth(self.modules["simple_gla"], shape, *ready(inputs))

        def values(result: tuple[torch.Tensor, ...]) -> Values:
            return of_call(shape, result[0], result[1].transpose(-1, -2))

        return Contender(FLA, variant, call, "simple_gla", truth, values)


def gla_inputs(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """q = C, k = B, v = x dt and g = A dt of every head, as chunk_simple_gla takes them: made outside the time."""
    t = inputs.tensors
    step = torch.nn.functional.softplus(t["dt"].float() + t["dt_bias"].float())
    heads = t["x"].shape[2] // t["B"].shape[2]
    q, k = (t[name].repeat_interleave(heads, 2) for name in ("C", "B"))
    v = (t["x"].float() * step[..., None]).to(t["x"].dtype)
    return q, k, v, t["A"].float() * step


def versions() -> dict[str, str]:
    """The versions of the peers that pip installed."""
    out = {}
    for peer, package in PACKAGES.items():
        try:
            out[peer] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            out[peer] = "not installed by pip"
    return out


def _plain(shape: Shape, result: tuple[torch.Tensor, ...]) -> Values:
    return of_call(shape, result[0], result[1])


def _first_two(call: Call) -> Call:
    return lambda inputs: call(inputs)[:2]
