"""What the Mamba-2 model for XLA takes on the device here, beside mamba2-jax: prefill of a prompt, and tokens of a device loop.

    python -m ssdgen.models.bench_jax --sizes 130m,2.7b --seconds 5 --json model_jax.json

Both have random weights that are made on the device and do the same work: logits of the last token behind a prompt and the
cache, then greedy tokens of one row from that cache in a loop that is one program. In turn, round by round; a time is the
median. mamba2-jax takes no products in bfloat16 of its own: its weights are cast, its activations stay float32, and XLA
widens the weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ssdgen.diagnostics import UserError
from ssdgen.models.config import SIZES, Config
from ssdgen.models.mamba2_jax import CHUNK, ROOM, Mamba2, decoded, prefilled
from ssdgen.run.bench.environment import version

TOKENS = 4096
"""Tokens of the prompt."""

MODES = {"default": ("float32", "default"), "highest": ("float32", "highest"), "bf16": ("bfloat16", "default")}
"""The dtype of the weights, and jax.default_matmul_precision: on a GPU `default` is TF32, `highest` float32."""

PEER = "mamba2-jax"
FEWEST = 3
"""Rounds that are measured at least."""

Work = Callable[[], Any]
"""Queues work on the device; what it returns is there when the work is done."""


@dataclass(frozen=True)
class Row:
    """One model in one mode. Milliseconds of a prefill, tokens a second of the loop, 2 * parameters * tokens operations over
    the prefill's time; `note` says why there are none. Seconds of compilation, and the rounds that the medians are of."""

    model: str
    size: str
    mode: str
    prefill_ms: float | None = None
    tokens_per_second: float | None = None
    tflops: float | None = None
    compile_s: float | None = None
    rounds: int = 0
    note: str = ""


def rows(
    config: Config, size: str, mode: str, seconds: float, tokens: int = TOKENS, chunk: int = CHUNK
) -> Iterator[Row]:
    """Ours and mamba2-jax of a configuration that rows call `size`, in one of MODES, measured in turn for `seconds` behind
    their compilation; `chunk` is that of ours."""
    dtype, precision = MODES[mode]
    prompt = jax.random.randint(jax.random.key(1), (1, tokens), 0, config.vocab)
    makers = {
        "ssdgen": functools.partial(ours, config, dtype, prompt, chunk),
        PEER: functools.partial(peer, config, dtype, prompt),
    }
    found: dict[str, tuple[Work, Work]] = {}
    compiled: dict[str, float] = {}
    with jax.default_matmul_precision(precision):
        for name, make in makers.items():
            try:
                found[name] = make()
            except ImportError as error:
                yield Row(name, size, mode, note=f"not measured: {error}; pip install mamba2-jax==1.1.2")
                continue
            start = time.perf_counter()
            for work in found[name]:
                jax.block_until_ready(work())
            compiled[name] = time.perf_counter() - start
        times = in_turn(found, seconds)
    for name, (prefills, loops) in times.items():
        seconds_a_prefill = median(prefills)
        yield Row(
            name,
            size,
            mode,
            prefill_ms=1e3 * seconds_a_prefill,
            tokens_per_second=ROOM / median(loops),
            tflops=2 * config.parameters * tokens / seconds_a_prefill / 1e12,
            compile_s=compiled[name],
            rounds=len(loops),
        )


def in_turn(works: dict[str, tuple[Work, Work]], seconds: float) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds of each model's prefill and loop, in rounds of all of them."""
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in works}
    end = time.perf_counter() + seconds
    while any(len(loops) < FEWEST for _, loops in times.values()) or (times and time.perf_counter() < end):
        for name, pair in works.items():
            for work, found in zip(pair, times[name], strict=True):
                start = time.perf_counter()
                jax.block_until_ready(work())
                found.append(time.perf_counter() - start)
    return times


def ours(config: Config, dtype: str, prompt: Array, chunk: int = CHUNK) -> tuple[Work, Work]:
    """The prefill and the loop of our model, of ROOM tokens. A cache is handed from call to call: it is donated."""
    model = Mamba2.random(config, jnp.dtype(dtype).type, precision=None)
    kept: dict[str, Any] = {"cache": model.init_cache(1), "going": None}

    def prefill() -> Any:
        scores, kept["cache"] = prefilled(config, model.weights, prompt, kept["cache"], None, None, chunk)
        return scores, kept["cache"]

    def loop() -> Any:
        start = (jnp.zeros(1, jnp.int32), jnp.zeros(1, bool), jax.random.key(0))
        made, kept["cache"], *kept["going"] = decoded(
            config, model.weights, kept["cache"], *(kept["going"] or start), jnp.int32(ROOM), precision=None
        )
        return made

    return prefill, loop


def peer(config: Config, dtype: str, prompt: Array) -> tuple[Work, Work]:
    """The same of mamba2-jax, which has no loop of its own: its cached forward in a `lax.fori_loop`, greedy, the cache donated.

    Its prefill applies the head to the last token alone, as ours does; its own `forward` does so to all.
    """
    other: Any = importlib.import_module("mamba2_jax")
    nnx: Any = importlib.import_module("flax.nnx")
    sizes = other.Mamba2Config(
        vocab_size=config.vocab,
        hidden_size=config.width,
        state_size=config.state,
        head_dim=config.channels,
        num_hidden_layers=config.layers,
        tie_word_embeddings=config.tied,
    )
    graph, state = nnx.split(other.Mamba2ForCausalLM(sizes, rngs=nnx.Rngs(0)))
    state = jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, state)
    kept: dict[str, Any] = {"cache": other.create_empty_cache(sizes, 1), "token": jnp.zeros(1, jnp.int32)}

    def next_scores(state: Any, tokens: Array, cache: Any) -> tuple[Array, Any]:
        model = nnx.merge(graph, state)
        out = model.backbone(input_ids=tokens, cache=cache)
        return out["last_hidden_state"][:, -1] @ model.backbone.embedder.embedding[:].T, out["cache"]

    def decode(state: Any, cache: Any, token: Array, count: Array) -> tuple[Array, Any, Array]:
        def one(number: Array, carried: tuple[Array, Any, Array]) -> tuple[Array, Any, Array]:
            token, cache, made = carried
            scores, after = next_scores(state, token[:, None], cache)
            same = jax.tree.map(lambda new, old: new.astype(old.dtype), after, cache)
            token = jnp.argmax(scores, -1).astype(jnp.int32)
            return token, same, lax.dynamic_update_slice(made, token[:, None], (0, number))

        made: tuple[Array, Any, Array] = lax.fori_loop(0, count, one, (token, cache, jnp.zeros((1, ROOM), jnp.int32)))
        return made

    whole = jax.jit(lambda state, tokens: next_scores(state, tokens, None))
    several = jax.jit(decode, donate_argnums=1)

    def prefill() -> Any:
        return whole(state, prompt)

    def loop() -> Any:
        kept["token"], kept["cache"], made = several(state, kept["cache"], kept["token"], jnp.int32(ROOM))
        return made

    return prefill, loop


def measured_apart(size: str, modes: Sequence[str], seconds: float) -> tuple[Row, ...]:
    """The rows of a size in a process of its own, where no other library holds the device's memory, nor jax it afterwards.

    Raises RuntimeError, which says what the process said last, if it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        options = ["--sizes", size, "--modes", ",".join(modes), "--seconds", str(seconds), "--json", str(file)]
        command = [sys.executable, "-m", "ssdgen.models.bench_jax", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise RuntimeError(f"python -m ssdgen.models.bench_jax {' '.join(options)}: {said[-1]}")
        return tuple(Row(**row) for row in json.loads(file.read_text(encoding="utf-8"))["rows"])


def environment() -> dict[str, str]:
    """What rows are measured on."""
    found = {
        "device": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    return found | {name: version(name) for name in ("jax", "jaxlib", "flax", PEER)}


def text(row: Row) -> str:
    """A row for a person."""
    head = f"{row.size:6}{row.mode:9}{row.model:12}"
    if row.note:
        return head + row.note
    numbers = f"{row.prefill_ms:9.2f} ms{row.tflops:8.1f} TFLOP/s{row.tokens_per_second:10.0f} tokens/s"
    return f"{head}{numbers}   {row.rounds} rounds, compiled in {row.compile_s:.0f} s"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: prints rows as they come, and writes them to a file."""
    parser = argparse.ArgumentParser(
        prog="python -m ssdgen.models.bench_jax", description="The model for XLA, measured."
    )
    parser.add_argument("--sizes", default="130m,2.7b", help=f"some of {', '.join(SIZES)}")
    parser.add_argument("--modes", default=",".join(MODES), help=f"some of {', '.join(MODES)}")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each size and mode, behind compilation")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of the prompt")
    parser.add_argument("--chunk", type=int, default=CHUNK, help="tokens a chunk, of ours")
    parser.add_argument("--layers", type=int, help="another number of layers than the model has")
    parser.add_argument("--json", type=Path, help="the file that rows are written to")
    options = parser.parse_args(arguments)
    sizes, modes = options.sizes.split(","), options.modes.split(",")
    odd = [w for w in sizes if w not in SIZES] + [w for w in modes if w not in MODES]
    if odd:
        raise UserError(f"{odd[0]} is no size or mode", f"sizes: {', '.join(SIZES)}; modes: {', '.join(MODES)}")
    found: list[Row] = []
    for size in sizes:
        config = dataclasses.replace(SIZES[size], layers=options.layers) if options.layers else SIZES[size]
        for mode in modes:
            for row in rows(config, size, mode, options.seconds, options.tokens, options.chunk):
                print(text(row), flush=True)
                found.append(row)
            if options.json:
                data = {
                    "environment": environment(),
                    "tokens": options.tokens,
                    "chunk": options.chunk,
                    "rows": [asdict(r) for r in found],
                }
                options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"{error}")
