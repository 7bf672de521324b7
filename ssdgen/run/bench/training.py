"""`ssdgen bench training`: one training step of a model of mixers, with our kernels and with mamba_ssm's in their place.

A step is forward pass, loss, backward pass and AdamW, under bf16 autocast, launched one by one as a training loop does. All
models have the same parameters and see the same tokens; nothing but the scan inside the mixers differs, so what else a
mixer does, its convolution in plain torch among it, weighs the same on both sides. Every scan is timed by itself too, forward
and backward under a CUDA graph, at the inputs that the first mixer of the model gives it.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from ssdgen.run.bench.forward import Progress
from ssdgen.run.bench.measure import Meter, Replay, described, rounds
from ssdgen.run.bench.others import MAMBA_SSM
from ssdgen.run.bench.rows import DEFAULT, OURS, Document, Environment, Ratio, Spread, TrainingStep
from ssdgen.run.bench.shapes import Shape
from ssdgen.run.bench.truth import L2_TIMES
from ssdgen.run.inputs import Inputs

STEP, SCAN = "training step", "scan, forward + backward"
"""What is compared; in a document the `axis` of a ratio."""
PEERS = (MAMBA_SSM,)
CHUNKS = (128, 256)
"""Tokens of a chunk of mamba_ssm's, each a model of its own."""
RATE = 3e-4
ALIKE = 0.1
"""How far the gradients of a peer's model may be from those of ours at the first step, a relative norm: both round to bf16 in
every layer, and what differs altogether is off by more than 1."""
HOW = "steps launched one by one, in turn; scans under CUDA graphs, inputs rotated"

Scan = Callable[..., tuple[Tensor, ...]]
"""What a mixer calls as the `forward` of its module; the first result is y."""

Mixers = Callable[..., nn.Module]
"""What makes a mixer of a spec, with `width`, `heads` and `sizes`; its attribute `module` has the scan."""


@dataclass(frozen=True, slots=True)
class Size:
    """A model and its batch; the default is the 130M model of Mamba-2, with tied embeddings."""

    layers: int = 24
    width: int = 768
    heads: int = 24
    p: int = 64
    n: int = 128
    vocabulary: int = 50288
    batch: int = 8
    tokens: int = 2048

    @property
    def shape(self) -> Shape:
        """What each of its scans computes."""
        return Shape(self.batch, self.tokens, self.heads, 1, self.p, self.n)


class Timer(Protocol):
    """What times steps, on whatever device."""

    def microseconds(self, work: Callable[[], object]) -> float:
        """Until all of `work` is done, the device idle before it."""

    def peak_bytes(self, work: Callable[[], object]) -> int | None:
        """Peak memory of `work` beyond what was there before."""


class CudaTimer:
    """Times on the current CUDA device."""

    def microseconds(self, work: Callable[[], object]) -> float:
        """By the clock of the host, which a training loop waits by."""
        torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return 1e6 * (time.perf_counter() - begun)

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """By torch's allocator."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


class Model(nn.Module):
    """Mixers behind norms on a residual stream, between tied embeddings; `scan` in place of the mixers' own."""

    def __init__(self, mixer: Mixers, size: Size, scan: Scan | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        sizes = {"p": size.p, "n": size.n}
        self.mixers = nn.ModuleList(
            mixer("mamba2", width=size.width, heads=size.heads, sizes=sizes) for _ in range(size.layers)
        )
        self.norms = nn.ModuleList(nn.RMSNorm(size.width) for _ in range(size.layers + 1))
        changed: Any = self.mixers if scan is not None else ()
        for each in changed:
            each.module = SimpleNamespace(forward=scan)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [b t] -> scores of the next [b t vocabulary]."""
        u = self.embedding(tokens)
        for norm, mixer in zip(self.norms, self.mixers, strict=False):
            u = u + mixer(norm(u))
        return linear(self.norms[-1](u), self.embedding.weight)


class Trainer:
    """A model with its optimizer and the tokens it is trained on, always the same."""

    def __init__(self, mixer: Mixers, size: Size, scan: Scan | None, device: str) -> None:
        torch.manual_seed(0)
        self.model = Model(mixer, size, scan).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, fused=device == "cuda")
        text = torch.randint(size.vocabulary, (size.batch, size.tokens + 1), generator=torch.Generator().manual_seed(1))
        self.text = text.to(device)

    def loss(self) -> Tensor:
        """The mean loss of a token, nats."""
        with torch.autocast(self.text.device.type, torch.bfloat16):
            scores = self.model(self.text[:, :-1])
            return cross_entropy(scores.flatten(0, 1), self.text[:, 1:].flatten())

    def gradients(self) -> tuple[float, list[Tensor]]:
        """The loss, and the gradients of all parameters, which stay as they are."""
        loss = self.loss()
        found = torch.autograd.grad(loss, list(self.model.parameters()))
        return float(loss.detach()), list(found)

    def step(self) -> None:
        """One step."""
        self.loss().backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def resident_bytes(self) -> int:
        """Parameters and the optimizer's state."""
        states = [x for state in self.optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        return sum(x.nbytes for x in (*self.model.parameters(), *states))

    def scan_inputs(self) -> tuple[Scan, dict[str, Tensor]]:
        """The scan of the first mixer, and what it is called with."""
        mixer: Any = self.model.mixers[0]
        module, found = mixer.module, {}

        def noting(**named: Any) -> tuple[Tensor, ...]:
            found.update({name: x.detach() for name, x in named.items() if isinstance(x, Tensor)})
            return module.forward(**named)  # type: ignore[no-any-return]

        mixer.module = SimpleNamespace(forward=noting)
        with torch.no_grad():
            self.loss()
        mixer.module = module
        return module.forward, found


def training(
    mixer: Mixers,
    meter: Meter,
    timer: Timer,
    environment: Environment,
    count: int,
    seconds: float,
    *,
    size: Size | None = None,
    peers: Sequence[str] = PEERS,
    device: str = "cuda",
    progress: Progress = lambda done, total, what: None,
    save: Callable[[Document], None] = lambda document: None,
) -> Document:
    """The document of a run with models of `mixer`: each by itself first, then scans in turn, and steps of all in turn."""
    size = size or Size()
    rows: dict[str, TrainingStep] = {}
    ours: list[Tensor] = []
    trainers: dict[str, Trainer] = {}
    calls: dict[str, Replay] = {}
    wanted = [(OURS, DEFAULT, None), *((p, f"chunk {c}", c) for p in peers for c in CHUNKS)]
    for number, (family, name, chunk) in enumerate(wanted):
        key = f"{family} {name}"
        progress(number, len(wanted), key)
        rows[key] = TrainingStep(str(size.shape), size.layers, size.width, family, name)
        try:
            trainer = Trainer(mixer, size, None if chunk is None else theirs(chunk), device)
            loss, gradients = trainer.gradients()
            ours = ours or gradients
            row = replace(rows[key], loss=loss, difference=_difference(gradients, ours))
            del gradients
            if row.difference is None or not row.difference <= ALIKE:
                rows[key] = replace(row, note="another model: its gradients are not those of ours, so not timed")
                continue
            rows[key] = _alone(row, trainer, timer)
            calls[key] = meter.capture(both_passes(*trainer.scan_inputs()), _sets(trainer, environment))
            trainers[key] = trainer
        except Exception as error:  # code of others and its compiler: what stops them must not stop the rest
            rows[key] = replace(rows[key], note=described(error))
    ours.clear()
    scans = rounds(calls, count, seconds / 4)
    steps = {key: _timed(trainer, timer) for key, trainer in trainers.items()}
    for key, spread in rounds(steps, count, seconds / 2).items():
        rows[key] = replace(rows[key], step_us=spread, scan_us=scans.get(key))
    made = tuple(rows.values())
    document = Document("training", environment, HOW, steps=made, ratios=tuple(_ratios(made)))
    save(document)
    return document


def theirs(chunk: int) -> Scan:
    """mamba_ssm's scan as a mixer calls ours. ImportError if it is not here."""
    scan: Any = importlib.import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined

    def forward(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **named: Any) -> tuple[Tensor, ...]:
        options = {name: named[name] for name in ("D", "z", "dt_bias")}
        return (scan(x, dt, A, B, C, chunk, **options, dt_softplus=True),)

    return forward


def both_passes(scan: Scan, given: Mapping[str, Tensor]) -> Callable[[Inputs], tuple[Tensor, ...]]:
    """A call of the scan and of its gradients, of all of its inputs."""
    names = list(given)

    def call(inputs: Inputs) -> tuple[Tensor, ...]:
        leaves = {name: inputs.tensors[name].detach().requires_grad_() for name in names}
        y = scan(**leaves)[0]
        return torch.autograd.grad(y, list(leaves.values()), inputs.tensors["d_y"])

    return call


def stored_bytes(scan: Scan, given: Mapping[str, Tensor]) -> int:
    """What a call of the scan keeps for its backward pass beyond its inputs and y."""
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = scan(**leaves)[0]
    known = {x.untyped_storage().data_ptr() for x in (*leaves.values(), y)}
    return sum(size for place, size in kept.items() if place not in known)


def _difference(gradients: Sequence[Tensor], ours: Sequence[Tensor]) -> float:
    """The relative norm of the difference of all gradients."""
    off = sum(float((a - b).double().square().sum()) for a, b in zip(gradients, ours, strict=True))
    return math.sqrt(off / sum(float(b.double().square().sum()) for b in ours))


def _alone(row: TrainingStep, trainer: Trainer, timer: Timer) -> TrainingStep:
    """`row` with what one model takes by itself, after a step that makes the optimizer's state."""
    stored = stored_bytes(*trainer.scan_inputs())
    trainer.step()
    peak = timer.peak_bytes(trainer.step)
    return replace(row, stored_bytes=stored, peak_bytes=None if peak is None else peak + trainer.resident_bytes())


def _sets(trainer: Trainer, environment: Environment) -> list[Inputs]:
    """Inputs of a scan, copies of those it was called with, so many that none is found in the L2 cache."""
    _, given = trainer.scan_inputs()
    y = torch.zeros_like(given["x"], memory_format=torch.contiguous_format)
    generator = torch.Generator(y.device).manual_seed(2)
    d_y = torch.randn(y.shape, generator=generator, device=y.device).to(y.dtype)
    every = {**given, "d_y": d_y}
    number = max(1, math.ceil(L2_TIMES * environment.l2_bytes / sum(x.nbytes for x in every.values())))
    return [Inputs({name: _copied(x) for name, x in every.items()}, {}, {}) for _ in range(number)]


def _copied(x: Tensor) -> Tensor:
    """The same values with the same strides, in memory of their own."""
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return copy.copy_(x)


def _timed(trainer: Trainer, timer: Timer) -> Replay:
    return lambda: timer.microseconds(trainer.step)


def _ratios(rows: Sequence[TrainingStep]) -> list[Ratio]:
    """Of ours to the fastest of each peer, of whole steps and of scans."""
    ours, out = rows[0], []
    for axis, field in ((STEP, "step_us"), (SCAN, "scan_us")):
        for peer in dict.fromkeys(r.family for r in rows[1:]):
            times: dict[str, Spread] = {
                r.name: getattr(r, field) for r in rows if r.family == peer and getattr(r, field)
            }
            mine: Spread | None = getattr(ours, field)
            if mine is None or not times:
                reason = "ours has no time" if mine is None else "the peer has no time"
                out.append(Ratio(ours.shape, ours.name, peer, "", None, reason, axis))
                continue
            best = min(times, key=lambda name: times[name].median)
            out.append(Ratio(ours.shape, ours.name, peer, best, times[best].median / mine.median, "", axis))
    return out
