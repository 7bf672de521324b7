"""`ssdgen bench backward`: the gradient kernels and the peers' backward passes, alone and behind the forward pass.

Everyone is given the same gradient of y, in bf16, and what its own forward pass would have saved for it; like a training
step it returns the gradients of x, dt, A, B, C and D. Errors are those of the gradients of x, B and C (the largest) and of dt,
against the portable form in float64, for the heads of one group of the last sequence.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ssdgen.run.bench.forward import WARM_SHARE, Effort, Progress, with_ratios
from ssdgen.run.bench.measure import FLUSHING, Meter, measure
from ssdgen.run.bench.others import MAMBA_SSM, Contender, Variant
from ssdgen.run.bench.ours import load_module, runtime_of
from ssdgen.run.bench.rows import DEFAULT, OURS, Document, Environment, Row
from ssdgen.run.bench.searches import TILEGYM, search_part
from ssdgen.run.bench.shapes import CHUNK, Shape
from ssdgen.run.bench.shapes import SHAPES as FORWARD_SHAPES
from ssdgen.run.bench.truth import Values, input_sets
from ssdgen.run.bench.warm import Job, Setting, our_jobs, peer_jobs, short, warm
from ssdgen.run.gpu_peers import Call, mamba_ssm, tilegym, tilegym_kernels
from ssdgen.run.inputs import Inputs
from ssdgen.run.recorded import kept

SHAPES = FORWARD_SHAPES
ALONE, BOTH = "backward", "forward + backward"
"""What is measured; in a document these are the `axis` of a row."""
ROUND_SECONDS = 4.0
PEERS = (TILEGYM, MAMBA_SSM)
"""What `--peers` takes."""
VARIANTS: tuple[Variant, ...] = ((TILEGYM, "chunk 64"), (MAMBA_SSM, "chunk 128"), (MAMBA_SSM, "chunk 256"))
"""What is measured of the peers."""
NAMES = ("x", "dt", "A", "B", "C", "D")


class BackwardShape(Shape):
    """A shape whose bytes and operations are those of the backward pass."""

    @property
    def compulsory_bytes(self) -> int:
        """Reading each input and the gradient of y once, and writing the gradient of each input once."""
        y, state = 2 * self.tokens * self.h * self.p, 4 * self.b * self.h * self.p * self.n
        return 2 * (super().compulsory_bytes - y - state) + y

    @property
    def operations(self) -> int:
        """Those of the chunked form at chunk 64, C.B once a head: six products with a state or its gradient, and five of two
        tokens."""
        pairs = 2 * CHUNK * (3 * self.n + 2 * self.p)
        return self.tokens * self.h * (pairs + 12 * self.n * self.p)


class BothShape(BackwardShape):
    """A shape whose bytes and operations are those of the forward and of the backward pass."""

    @property
    def compulsory_bytes(self) -> int:
        """The sum of both."""
        return super().compulsory_bytes + Shape.compulsory_bytes.__get__(self)  # type: ignore[no-any-return]

    @property
    def operations(self) -> int:
        """The sum of both."""
        return super().operations + Shape.operations.__get__(self)  # type: ignore[no-any-return]


PASSES = {ALONE: BackwardShape, BOTH: BothShape}


@dataclass(frozen=True)
class Given:
    """The gradients of y that arrive with some inputs, and what the forward passes of some peers saved: made once, outside
    the time."""

    made: dict[tuple[str, int], tuple[Inputs, Any]]

    def of(self, inputs: Inputs, what: str, make: Callable[[], Any]) -> Any:
        """`make()`, kept for as long as the inputs are."""
        key = what, id(inputs)
        if key not in self.made:
            self.made[key] = inputs, make()
        return self.made[key][1]

    def d_y(self, inputs: Inputs) -> Tensor:
        """The gradient that arrives at y."""

        def make() -> Tensor:
            x = inputs.tensors["x"]
            generator = torch.Generator(x.device).manual_seed(7)
            return torch.randn(x.shape, generator=generator, device=x.device, dtype=torch.float32).to(x.dtype)

        found: Tensor = self.of(inputs, "d_y", make)
        return found


def backward(
    module: ModuleType,
    layer: Any,
    shapes: Sequence[Shape],
    meter: Meter,
    environment: Environment,
    effort: Effort,
    *,
    peers: Sequence[str] = (TILEGYM, MAMBA_SSM),
    device: str = "cuda",
    progress: Progress = lambda done, total, what: None,
    save: Callable[[Document], None] = lambda document: None,
    clock: Callable[[], float] = time.monotonic,
) -> Document:
    """The document of a run of `module`, the default one of Mamba-2; `save` gets it after each shape.

    On a GPU all that will run is compiled first, within a share of the effort's seconds.
    """
    end = clock() + effort.seconds
    others = Peers(module)
    variants, notes = others.those_here(peers)
    if device == "cuda":
        notes += compiled(module, shapes, variants, environment, effort, progress)
    document = Document("backward", environment, FLUSHING)
    rows: list[Row] = []
    for number, shape in enumerate(shapes):
        progress(number, len(shapes), str(shape))
        if clock() > end:
            notes.append(f"{shape} is not measured: the time was up")
            continue
        sets = input_sets(layer, shape, device, environment.l2_bytes)
        given = Given({})
        for what in (ALONE, BOTH):
            contenders = [ours(module, shape, given, what)]
            contenders += [others.contender(shape, v, given, what) for v in variants if takes(v, shape)]
            counted = PASSES[what](*astuple(shape))
            rows += measure(
                counted, contenders, sets, meter, environment, effort.rounds, ROUND_SECONDS, brief=False, axis=what
            )
            document = with_ratios(replace(document, rows=tuple(rows), notes=tuple(dict.fromkeys(notes))))
            save(document)
        del sets, given
        if device == "cuda":
            torch.cuda.empty_cache()
    return replace(document, notes=tuple(dict.fromkeys(notes)))


def compiled(
    module: ModuleType, shapes: Sequence[Shape], variants: Sequence[Variant], environment: Environment, effort: Effort,
    progress: Progress,
) -> list[str]:  # fmt: skip
    """Compile in parallel processes what will run; what went wrong, a line each."""
    jobs = jobs_of(_folder(module), shapes, variants, effort.workers)
    setting = Setting({"mamba2": _folder(module)}, "", environment.gpu, again=False)
    seconds = WARM_SHARE * effort.seconds
    return warm(jobs, setting, effort.workers, seconds, lambda i, w: progress(i, len(jobs), w))


def jobs_of(folder: str, shapes: Sequence[Shape], variants: Sequence[Variant], workers: int) -> list[Job]:
    """What to compile first: mamba_ssm, whose searches are not split, then TileGym's in parts, then our module in `folder`.

    Shapes that TileGym compiles apart share the workers, since each part compiles one candidate of each kernel at least.
    """
    whole = peer_jobs(shapes, [v for v in variants if v[0] != TILEGYM], direction="backward")
    tiled = [v for v in variants if v[0] == TILEGYM]
    taken = [s for s in shapes if all(takes(v, short(s)) for v in tiled)]
    apart = len(peer_jobs(taken, tiled, direction="backward"))
    parts = peer_jobs(taken, tiled, max(1, workers // max(1, apart)), "backward")
    return whole + parts + our_jobs(shapes, [folder], tuned=True, direction="backward")


def warmed(job: Job, setting: Setting, shape: Shape) -> Call | None:
    """What `job` calls, both passes; None for a peer's variant that does not take what is left of a long `shape`.

    ImportError if the peer is not here.
    """
    given = Given({})
    if job.family == OURS:
        return ours(load_module(Path(job.name), "mamba2"), shape, given, BOTH).call
    if not takes((job.family, job.name), short(shape)):
        return None
    module = load_module(Path(setting.modules["mamba2"]), "mamba2")
    return Peers(module, job.part).contender(shape, (job.family, job.name), given, BOTH).call


def takes(variant: Variant, shape: Shape) -> bool:
    """Whether a peer's variant takes a shape: TileGym takes whole chunks alone."""
    return variant[0] != TILEGYM or shape.t % _chunk(variant) == 0


def _chunk(variant: Variant) -> int:
    return int(variant[1].removeprefix("chunk "))


def _folder(module: ModuleType) -> str:
    return str(Path(str(module.__file__)).parent)


def ours(module: ModuleType, shape: Shape, given: Given, what: str) -> Contender:
    """Our kernels: the module's own, as autograd would call them, which has a forward pass keep states and decays for them."""
    gradients = importlib.import_module(f"{module.__name__}_gradients").GRADIENTS
    order = [i.name for i in module.LAYER.inputs]

    def call(inputs: Inputs) -> tuple[Tensor, ...]:
        tensors = [inputs.tensors.get(name) for name in order]
        keeps = given.of(inputs, "keeps", lambda: gradients.keeps(tensors, shape.sizes, None))

        def forward() -> dict[str, Any]:
            return kept(module, inputs.keywords(), keeps)

        before = forward() if what == BOTH else given.of(inputs, "kept", forward)
        found = gradients(tensors, (0.0, math.inf), (None,), None, (given.d_y(inputs),), (None,), **before)
        return tuple(found[order.index(name)] for name in NAMES)

    return _contender(module, OURS, DEFAULT, call, shape, given)


@dataclass
class Peers:
    """The peers in this process, beside our `module`. TileGym's kernels are loaded once, so that both passes and all shapes
    share what it searched for; with `part` (i, n) it tries every n-th candidate from the i-th.
    """

    module: ModuleType
    part: tuple[int, int] | None = None

    @cached_property
    def tilegym(self) -> Any:
        """TileGym's kernels. ImportError if they are not here."""
        kernels = tilegym_kernels(quick=True)
        if self.part is not None:
            search_part(kernels, self.part)
        return kernels

    @cached_property
    def mamba_ssm(self) -> Any:
        """mamba_ssm's kernels. ImportError if they are not here."""
        return importlib.import_module("mamba_ssm.ops.triton.ssd_combined")

    def those_here(self, peers: Sequence[str]) -> tuple[list[Variant], list[str]]:
        """The variants of `peers` that are here, and a note for each peer that is not."""
        notes = {}
        for peer in peers:
            try:
                _ = self.tilegym if peer == TILEGYM else self.mamba_ssm
            except ImportError as error:
                notes[peer] = f"{peer} is not here ({' '.join(str(error).split())})"
        return [v for v in VARIANTS if v[0] in peers and v[0] not in notes], list(notes.values())

    def contender(self, shape: Shape, variant: Variant, given: Given, what: str) -> Contender:
        """A variant at a shape that it takes. ImportError if it is not here."""
        peer, chunk = variant[0], _chunk(variant)
        forward = tilegym(chunk, self.tilegym) if peer == TILEGYM else mamba_ssm(chunk)
        passed = _tilegym(self.tilegym, given, chunk) if peer == TILEGYM else _mamba_ssm(self.mamba_ssm, given, chunk)

        def call(inputs: Inputs) -> tuple[Tensor, ...]:
            out = (
                forward(inputs)[0] if what == BOTH else given.of(inputs, " ".join(variant), lambda: forward(inputs)[0])
            )
            return passed(inputs, out)

        return _contender(self.module, peer, variant[1], call, shape, given)


def _tilegym(kernels: Any, given: Given, chunk: int) -> Callable[[Inputs, Tensor], tuple[Tensor, ...]]:
    """TileGym's backward: it takes finished steps, and states of zero."""

    def prepared(i: Inputs) -> tuple[Tensor, Tensor]:
        t = i.tensors
        step = torch.nn.functional.softplus(t["dt"] + t["dt_bias"])
        (b, _, h, p), n = t["x"].shape, t["B"].shape[-1]
        return step, torch.zeros(b, h, p, n, device=step.device)

    def call(i: Inputs, out: Tensor) -> tuple[Tensor, ...]:
        t = i.tensors
        step, zero = given.of(i, "tilegym", lambda: prepared(i))
        dx, da, db, dc, dd, ddt, _ = kernels.mamba2_chunk_backward(
            t["x"], t["A"], t["B"], t["C"], t["D"], step, zero, given.d_y(i), zero, chunk_size=chunk
        )
        return dx, ddt, da, db, dc, dd

    return call


def _mamba_ssm(kernels: Any, given: Given, chunk: int) -> Callable[[Inputs, Tensor], tuple[Tensor, ...]]:
    """mamba_ssm's backward: it takes y."""

    def call(i: Inputs, out: Tensor) -> tuple[Tensor, ...]:
        t = i.tensors
        found = kernels._mamba_chunk_scan_combined_bwd(
            given.d_y(i), t["x"], t["dt"], t["A"], t["B"], t["C"], out, chunk, D=t["D"], dt_bias=t["dt_bias"],
            dt_softplus=True,
        )  # fmt: skip
        return tuple(found[:6])

    return call


def _contender(module: ModuleType, family: str, name: str, call: Call, shape: Shape, given: Given) -> Contender:
    finished = family == TILEGYM  # its gradient is of the finished steps

    def truth(inputs: Inputs) -> Values:
        return true_gradients(module, shape, inputs, given.d_y(inputs), finished=finished)

    function = "mamba2 of finished steps" if finished else "mamba2"
    return Contender(family, name, call, function, truth, lambda result: compared(shape, result))


def compared(shape: Shape, result: Sequence[Tensor]) -> Values:
    """What is compared of the gradients of x, dt, A, B, C, D: those of the last sequence and the first group's heads."""
    heads = shape.h // shape.g
    x, dt, _, b, c, _ = result
    per_token = [x[-1, :, :heads], b[-1, :, :1], c[-1, :, :1]]
    scaled = [v.double().flatten(1) / v.double().norm().clamp_min(1e-30) for v in per_token]
    return Values(torch.cat(scaled, 1), dt[-1, :, :heads])


def true_gradients(module: ModuleType, shape: Shape, inputs: Inputs, d_y: Tensor, *, finished: bool) -> Values:
    """The same of the portable form in float64, block by block of tokens from the last: between blocks only states are kept."""
    heads, t = shape.h // shape.g, inputs.tensors
    part = {name: t[name][-1:, :, :heads].double() for name in ("x", "dt")}
    part |= {name: t[name][-1:, :, :1].double() for name in ("B", "C")}
    fixed = {name: t[name][:heads].double() for name in ("A", "D", "dt_bias")}
    arriving = d_y[-1:, :, :heads].double()
    config = replace(module.CONFIGS[torch.float32], chunk=64)
    block = 16 * config.chunk
    with runtime_of(module).portable(), torch.no_grad():
        values = module.forward(**part, **fixed, states_every=block, config=config)
    starts = [None, *values[-1].unbind(1)]
    d_state = torch.zeros_like(values[1])
    found: dict[str, list[Tensor]] = {name: [] for name in part}
    for number in range(math.ceil(shape.t / block) - 1, -1, -1):
        now = slice(number * block, (number + 1) * block)
        leaves = {name: x[:, now].clone().requires_grad_() for name, x in part.items()}
        start = None if starts[number] is None else starts[number].clone().requires_grad_()
        with runtime_of(module).portable(), torch.enable_grad():
            y, state = module.forward(**leaves, **fixed, S0=start, config=config)
        wanted = [*leaves.values(), *([] if start is None else [start])]
        gradients = torch.autograd.grad([y, state], wanted, [arriving[:, now], d_state])
        for name, gradient in zip(leaves, gradients, strict=False):
            found[name].insert(0, gradient)
        d_state = gradients[-1] if start is not None else d_state
    x, dt, b, c = (torch.cat(found[name], 1) for name in ("x", "dt", "B", "C"))
    if finished:
        dt = dt / torch.sigmoid(part["dt"] + fixed["dt_bias"])
    return compared(replace(shape, h=heads, g=1), (x, dt, dt, b, c, dt))
