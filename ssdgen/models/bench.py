"""`ssdgen bench model`: whole models of the published sizes with random weights, made on the device.

Every part measures in rounds and gives medians; a part that fails says so, and the rest goes on. Operations are counted as two
for each parameter and token, as for the results of others that it stands beside.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch.nn.functional import linear

from ssdgen.generated import causal_conv, mamba2, norms, projection
from ssdgen.models.config import SIZES, Config
from ssdgen.models.loop import Decoder
from ssdgen.models.mamba2 import LayerWeights, Mamba2
from ssdgen.models.peer import Transformers
from ssdgen.models.sampling import Sampling, choose
from ssdgen.run.bench.measure import described
from ssdgen.run.bench.rows import Environment, Spread
from ssdgen.run.tune.worker import captured

PROMPT, PREFILL, MADE, EAGER = 16, 4096, 256, 32
"""Tokens: of a prompt before decoding, of a prefill, made in a round, made in a round with each read back."""

BATCHES = (1, 16)
CONTEXTS = (1024, 131072)
"""Tokens after which no more may be allocated than after fewer."""

CPU_PREFILL, CPU_MADE = 2048, 8

XLA_SECONDS = 3.0
"""Of the rounds of each dtype, behind compilation."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A result: of which model and part, what, and how much; without a value it failed or was left out, and `note` says why."""

    model: str
    part: str
    name: str
    value: Spread | None
    unit: str = ""
    note: str = ""
    failed: bool = False


@dataclass(frozen=True, slots=True)
class ModelDocument:
    """The results of one run; `environment` is None where there is no GPU."""

    environment: Environment | None
    figures: tuple[Figure, ...]
    notes: tuple[str, ...] = ()
    study: str = "model"
    format: int = 1


Part = tuple[str, str, Callable[[], Iterable[Figure]]]
"""The model, the name of a part, and what measures it."""


def measured(
    parts: Iterable[Part],
    seconds: float,
    progress: Callable[[int, int | None, str], None] = lambda done, total, what: None,
    save: Callable[[tuple[Figure, ...]], None] = lambda figures: None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Figure, ...]:
    """The figures of all parts; none is begun after `seconds`. After each, those so far are saved."""
    end, found = clock() + seconds, []
    for number, (model, name, part) in enumerate(parts):
        progress(number, None, f"{model} {name}")
        if clock() > end:
            found.append(Figure(model, name, "", None, note="not measured: the time was up"))
            continue
        try:
            for figure in part():
                found.append(figure)
        except ImportError as error:
            found.append(Figure(model, name, "", None, note=f"not here: {described(error)}"))
        except Exception as error:  # a GPU's memory, a compiler, code of others: the rest goes on
            found.append(Figure(model, name, "", None, note=described(error), failed=True))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        save(tuple(found))
    return tuple(found)


def gpu_parts(sizes: Iterable[str], rounds: int, peers: bool = True) -> Iterator[Part]:
    """The parts for models of these sizes on the current GPU: for each what is aimed at, then for each the rest, so that a run
    whose time is up has a row of every size. A model is made by the first part that needs it, and freed when the one behind
    its last is asked for."""
    subjects = [OnGpu(name, SIZES[name], rounds) for name in sizes]
    for parts in (OnGpu.decode, OnGpu.prefill), (OnGpu.pieces, OnGpu.waits_for_nothing, OnGpu.memory):
        for subject in subjects:
            for part in parts:
                yield subject.name, part.__name__.replace("_", " "), partial(part, subject)
            subject.free()
    for subject in subjects:
        yield subject.name, "xla", partial(through_xla, subject.name)
    for subject in subjects if peers else ():
        yield subject.name, "transformers", partial(theirs, subject.name, subject.config, rounds)


@dataclass
class OnGpu:
    """A model in bf16 with random weights, and its parts."""

    name: str
    config: Config
    rounds: int
    device: str = "cuda"

    @cached_property
    def model(self) -> Mamba2:
        """Made when it is asked for first."""
        return Mamba2.random(self.config, self.device, torch.bfloat16)

    def free(self) -> None:
        """Let go of the model."""
        self.__dict__.pop("model", None)

    def decode(self) -> Iterator[Figure]:
        """Tokens a second of the loop on the device, and of the same step run eagerly with each token read back."""
        prompt = list(range(PROMPT))
        for batch in BATCHES:
            decoder = Decoder(self.model, batch)
            loop = Spread.of(batch * _looped(decoder, [prompt] * batch) for _ in range(self.rounds))
            share = self._bandwidth(loop.median / batch, batch)
            yield self._figure("decode", f"batch {batch}, the loop on the device", loop, "tokens/s", share)
        eager = Spread.of(self._eager() for _ in range(self.rounds))
        yield self._figure("decode", "batch 1, eager, each token read back", eager, "tokens/s")
        decoder = Decoder(self.model)
        first = _looped(decoder, [prompt])
        ratio = Spread.of(_looped(decoder, [prompt]) / self._eager() for _ in range(self.rounds))
        yield self._figure("decode", "batch 1, loop over eager", ratio, "times", f"first run {first:.0f} tokens/s")

    def prefill(self) -> Iterator[Figure]:
        """A prompt of PREFILL tokens, launched one by one and as a CUDA graph."""
        tokens = torch.randint(0, self.config.vocab, (1, PREFILL), device=self.device)
        cache = self.model.init_cache(1)
        call = partial(self.model.prefill, tokens, cache)
        for name, replay in (("launched", _launched(call)), ("as a CUDA graph", _captured(call))):
            times = [replay() for _ in range(self.rounds + 1)][1:]
            yield self._figure("prefill", f"{PREFILL} tokens, {name}", Spread.of(t / 1e3 for t in times), "ms")
            rates = Spread.of(2e-6 * self.config.parameters * PREFILL / t for t in times)
            yield self._figure("prefill", f"{PREFILL} tokens, {name}", rates, "TFLOP/s")

    def pieces(self) -> Iterator[Figure]:
        """The launches of a step, each over all layers: the weights of one are not in the cache when its turn comes again. They
        are steady as in the model: a layer's own state comes again in the next graph, which waits for the one before."""
        c, layers = self.config, self.model.layers
        bf16 = {"device": self.device, "dtype": torch.bfloat16}
        residual = torch.randn(1, c.width, device=self.device)
        y, convolved = torch.randn(1, c.inner, **bf16), torch.randn(1, c.convolved, **bf16)  # type: ignore[call-overload]
        dt, cache = torch.randn(1, c.heads, **bf16), self.model.init_cache(1)  # type: ignore[call-overload]
        x, B, C = torch.split(convolved, [c.inner, c.groups * c.state, c.groups * c.state], 1)
        x, B, C = x.view(1, c.heads, -1), B.view(1, c.groups, -1), C.view(1, c.groups, -1)

        def ours(i: int, w: LayerWeights) -> object:
            return projection.project(residual, w.in_proj, norm=w.norm, steady=True)

        def cublas(i: int, w: LayerWeights) -> object:
            return linear(norms.rms_norm(residual, w.norm), w.in_proj)

        def convolution(i: int, w: LayerWeights) -> object:
            return causal_conv.step(
                cache.convolution[i], convolved, w.conv, w.conv_bias, activation="silu", steady=True
            )

        def state(i: int, w: LayerWeights) -> object:
            z = y.view(1, c.heads, -1)
            return mamba2.step(cache.states[i], x, dt, w.A, B, C, D=w.D, dt_bias=w.dt_bias, z=z, steady=True)

        def out(i: int, w: LayerWeights) -> object:
            return projection.project(y, w.out_proj, norm=w.gated_norm, onto=residual, steady=True)

        def out_cublas(i: int, w: LayerWeights) -> object:
            return residual.add_(linear(norms.rms_norm(y, w.gated_norm), w.out_proj))

        first = layers[0]
        calls = (
            ("norm and in_proj", ours, first.in_proj.nbytes),
            ("norm and in_proj by cuBLAS", cublas, first.in_proj.nbytes),
            ("convolution", convolution, 0),
            ("state", state, 2 * cache.states[0].nbytes),
            ("norm, out_proj, addition", out, first.out_proj.nbytes),
            ("norm, out_proj, addition by cuBLAS", out_cublas, first.out_proj.nbytes),
        )
        for name, call, moved in calls:
            with torch.no_grad():
                replay = _captured(partial(_each, call, layers))
            us = Spread.of(replay() / len(layers) for _ in range(self.rounds))
            note = f"{moved / us.median / 1e6:.2f} TB/s" if moved else ""
            yield self._figure("pieces", name, us, "us a layer", note)
        head, norm = self.model.head, self.model.norm
        with torch.no_grad():
            replay = _captured(lambda: choose(projection.project(residual, head, norm=norm, steady=True), Sampling()))
        us = Spread.of(replay() for _ in range(self.rounds))
        yield self._figure("pieces", "head and choice", us, "us a token", f"{head.nbytes / us.median / 1e6:.2f} TB/s")

    def waits_for_nothing(self) -> Iterator[Figure]:
        """The whole loop, prefill and sampling included, where torch raises for every synchronisation that it makes."""
        for sampling in (Sampling(), Sampling(0.8, 40)):
            decoder = Decoder(self.model, 2, sampling=sampling, stop=(0,))
            torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in decoder.run([[1, 2, 3], [4]], 32):
                    pass
            finally:
                torch.cuda.set_sync_debug_mode("default")
            yield self._figure("loop", f"synchronisations, {sampling}", Spread(0.0, 0.0, 0.0), "")

    def memory(self) -> Iterator[Figure]:
        """Bytes allocated behind contexts of CONTEXTS tokens and some made, and by how much they differ."""
        decoder, found = Decoder(self.model), []
        for tokens in CONTEXTS:
            prompt = torch.randint(0, self.config.vocab, (tokens,)).tolist()
            for _ in decoder.run([prompt], 32):
                pass
            gc.collect()
            found.append(torch.cuda.memory_allocated())
            yield self._figure("memory", f"allocated after {tokens} tokens", Spread.of([found[-1] / 2**20]), "MiB")
        grown = Spread.of([float(found[-1] - found[0])])
        yield self._figure("memory", f"{CONTEXTS[-1]} tokens over {CONTEXTS[0]}", grown, "bytes")

    def _eager(self) -> float:
        """Tokens a second of single steps."""
        cache, token = self.model.init_cache(1), torch.zeros(1, dtype=torch.int64, device=self.device)
        begun = 0.0
        for number in range(EAGER + 2):
            if number == 2:
                begun = time.perf_counter()
            token = choose(self.model.step(token, cache), Sampling())
            token.tolist()
        return EAGER / (time.perf_counter() - begun)

    def _bandwidth(self, steps: float, batch: int) -> str:
        """What is read and written at so many steps a second: weights once, states twice."""
        states = batch * self.config.layers * self.config.inner * self.config.state * 4
        return f"{steps * (2 * self.config.parameters + 2 * states) / 1e12:.2f} TB/s"

    def _figure(self, part: str, name: str, value: Spread, unit: str, note: str = "") -> Figure:
        return Figure(self.name, part, name, value, unit, note)


def through_xla(name: str, seconds: float = XLA_SECONDS) -> Iterator[Figure]:
    """The same model through XLA beside mamba2-jax, in float32, with products in TF32, and in bf16; in a process of its own.
    ImportError if jax is not here."""
    from ssdgen.models.bench_jax import measured_apart

    for row in measured_apart(name, ("default", "bf16"), seconds):
        what = f"{row.model}, {'float32' if row.mode == 'default' else row.mode}"
        prefill, loop = f"{what}: prefill of {PREFILL} tokens", f"{what}: batch 1, the loop on the device"
        for key, value, unit in ((prefill, row.tflops, "TFLOP/s"), (loop, row.tokens_per_second, "tokens/s")):
            spread = None if value is None else Spread(value, value, value)
            yield Figure(name, "xla", key, spread, unit, row.note)


def theirs(name: str, config: Config, rounds: int, device: str = "cuda") -> Iterator[Figure]:
    """transformers' own model of that size, with mamba_ssm's kernels where they are installed."""
    peer = Transformers(config, device, torch.bfloat16)
    tokens = torch.randint(0, config.vocab, (1, PREFILL), device=device)
    times = [peer.prefill(tokens) for _ in range(rounds + 1)][1:]
    yield Figure(
        name, "transformers", f"prefill of {PREFILL} tokens", Spread.of(1e3 * t for t in times), "ms", peer.how
    )
    speeds = [1 / peer.step(EAGER) for _ in range(rounds + 1)][1:]
    yield Figure(name, "transformers", "batch 1, each token read back", Spread.of(speeds), "tokens/s", peer.how)


def on_the_cpu(
    name: str = "130m", rounds: int = 3, config: Config | None = None, tokens: int = CPU_PREFILL
) -> Iterator[Figure]:
    """Ours and transformers' in float32 in turn: a prefill of `tokens`, and steps behind it."""
    config = config or SIZES[name]
    model, peer = Mamba2.random(config), Transformers(config, "cpu", torch.float32)
    ids = torch.randint(0, config.vocab, (1, tokens))
    times: dict[str, list[float]] = {"ours": [], "transformers": [], "our step": [], "their step": []}
    for number in range(rounds + 1):
        cache, begun = model.init_cache(1), time.perf_counter()
        model.prefill(ids, cache)
        ours = time.perf_counter() - begun
        their = peer.prefill(ids)
        begun = time.perf_counter()
        for _ in range(CPU_MADE):
            choose(model.step(ids[:, 0], cache), Sampling()).tolist()
        step = (time.perf_counter() - begun) / CPU_MADE
        their_step = peer.step(CPU_MADE)
        if number:  # the first round is for what is made once
            for key, value in zip(times, (ours, their, step, their_step), strict=True):
                times[key].append(1e3 * value)
    note = f"float32, {torch.get_num_threads()} threads"
    for what, mine, other in (
        (f"prefill of {tokens} tokens", "ours", "transformers"), ("a token", "our step", "their step"),
    ):  # fmt: skip
        yield Figure(name, "cpu", f"{what}, ours", Spread.of(times[mine]), "ms", note)
        yield Figure(name, "cpu", f"{what}, transformers", Spread.of(times[other]), "ms", note)
        ratio = Spread.of(b / a for a, b in zip(times[mine], times[other], strict=True))
        yield Figure(name, "cpu", f"{what}, transformers over ours", ratio, "times", note)


def _each(call: Callable[[int, LayerWeights], object], layers: Sequence[LayerWeights]) -> list[object]:
    return [call(i, w) for i, w in enumerate(layers)]


def _looped(decoder: Decoder, prompts: list[list[int]]) -> float:
    """Steps a second of the loop, from the first token to the last, by the host's clock."""
    chunks = decoder.run(prompts, 1 + MADE)
    next(chunks)
    begun = time.perf_counter()
    for _ in chunks:
        pass
    return MADE / (time.perf_counter() - begun)


def _launched(call: Callable[[], object]) -> Callable[[], float]:
    """What times a call in microseconds by events around it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def replay() -> float:
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    return replay


def _captured(call: Callable[[], object]) -> Callable[[], float]:
    """The same of a call captured as a CUDA graph; it runs once before."""
    return _launched(captured(call))
