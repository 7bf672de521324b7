"""The modules of gradients: what is in them, and calls of their kernels in the emulator."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from generated import _gradients, _runtime, mamba2, mamba2_gradients, simple_gla
from ssdgen.ir.build import ConstantArg
from ssdgen.run.checks import BOUNDS, one_thread, poisoned_memory, relative_error
from ssdgen.run.emulate import launch
from ssdgen.run.inputs import Case, draw
from ssdgen.run.recorded import Call, record, record_gradients, starts_of
from ssdgen.spec import load_source, read_layer

GENERATED = Path(mamba2.__file__).parent
MODULES = ("linear_attention", "mamba2", "mlstm", "retnet", "simple_gla", "state_space_duality")
LONGEST_MODULE, LONGEST_KERNEL = 710, 125
LONGEST = {"mlstm": 1025}
"""Two states have two walks in each direction."""
EXACT = dict.fromkeys(("scores", "carried", "intra", "state"), "tf32x3")


def values(layer: Any, inputs: dict[str, Any]) -> list[Any]:
    return [inputs.get(i.name) for i in layer.inputs]


def called(tokens: int = 300, **config: Any) -> tuple[tuple[Tensor | None, ...], dict[str, Any], Tensor, Tensor]:
    """The gradients of a call of mamba2 with two groups of four heads: (found, inputs, at y, at the final state)."""
    layer = read_layer(load_source("mamba2"))
    sizes = {"b": 2, "t": tokens, "h": 8, "g": 2, "p": 32, "n": 64}
    inputs = dict(draw(layer, Case(sizes, dtype="f32", seed=3), "cpu").keywords())
    generator = torch.Generator().manual_seed(1)
    d_y = torch.randn(inputs["x"].shape, generator=generator)
    d_state = torch.randn(inputs["S0"].shape, generator=generator)
    chosen = replace(mamba2_gradients.CONFIGS[torch.float32], **config)
    with one_thread(), poisoned_memory(), _runtime.launcher(launch):
        found = mamba2_gradients.GRADIENTS(
            values(mamba2.LAYER, inputs), (0.0, float("inf")), (inputs["S0"],), None, (d_y,), (d_state,), chosen
        )
    return found, inputs, d_y, d_state


def names() -> list[str]:
    return [*(i.name for i in mamba2.LAYER.inputs), "S0"]


def off(got: tuple[Tensor | None, ...], want: tuple[Tensor | None, ...]) -> dict[str, float]:
    return {
        n: relative_error(a, b) for n, a, b in zip(names(), got, want, strict=True) if a is not None and b is not None
    }


def test_what_has_a_module() -> None:
    """The specs that have kernels have those of gradients; `gla` and `mamba3` have neither."""
    found = sorted(p.name.removesuffix("_gradients.py") for p in GENERATED.glob("[!_]*_gradients.py"))
    assert tuple(found) == MODULES
    assert _gradients.beside("generated.mamba2")
    assert not _gradients.beside("generated.gla")


@pytest.mark.parametrize("name", MODULES)
def test_it_can_be_read(name: str) -> None:
    """A module and each kernel of it is no longer than a person takes in, and its lines fit a screen."""
    text = (GENERATED / f"{name}_gradients.py").read_text()
    lines = text.splitlines()
    assert len(lines) <= LONGEST.get(name, LONGEST_MODULE)
    assert max(map(len, lines)) <= 120
    kernels = re.split(r"^@ct\.kernel$", text, flags=re.MULTILINE)[1:]
    kernels[-1] = kernels[-1].partition("\ndef launch(")[0]
    assert max(len(k.strip().splitlines()) for k in kernels) <= LONGEST_KERNEL


def test_what_heads_share_is_computed_once() -> None:
    """Products of the inputs of a group alone stand before the loop over its heads, sums over heads behind it."""
    text = (GENERATED / "mamba2_gradients.py").read_text()
    kernel = text[text.index("def chunk_gradients(") : text.index("def token_gradients(")]
    before, _, loop = kernel.partition("for head in range(")
    assert "scores = dot(B_tile, ct.transpose(C_tile), scores, SCORES)" in before
    assert "scores = dot" not in loop
    assert (
        loop.index("store_direct(d_decay_sum,")
        < loop.index("d_B_tile = dot(d_score_sum, C_tile")
        < loop.index("store(d_B,")
    )


@pytest.mark.parametrize("segments", [1, 2, 3, 5])
def test_segments_do_not_matter(segments: int) -> None:
    """A state that jumps over the segments before, and its gradient over those behind, arrive as if walked."""
    want, *_ = called(segments=1)
    got, *_ = called(segments=segments)
    assert max(off(got, want).values()) < 1e-5


@pytest.mark.parametrize("shares", [1, 2, 3, 4, 9])
def test_shares_do_not_matter(shares: int) -> None:
    """Heads of a group on several blocks, evenly or not: their parts are added up in a fixed order."""
    want, *_ = called(tokens=130, shares=1, **EXACT)
    got, *_ = called(tokens=130, shares=shares, **EXACT)
    assert max(off(got, want).values()) < 1e-6


@pytest.mark.parametrize("chunk", [16, 32, 128])
def test_chunks_do_not_matter(chunk: int) -> None:
    """Every size of a chunk gives the same within what TF32 rounds; A's is a sum that cancels."""
    want, *_ = called(tokens=150)
    got, *_ = called(tokens=150, chunk=chunk)
    found = off(got, want)
    assert found.pop("A") < 8 * BOUNDS["tf32"]
    assert max(found.values()) < BOUNDS["tf32"]


def test_repeated_bit_for_bit() -> None:
    one, *_ = called(tokens=130, shares=2, segments=2)
    two, *_ = called(tokens=130, shares=2, segments=2)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True) if a is not None and b is not None)


def test_float32_to_rounding() -> None:
    """With products of three in TF32, gradients are those of float64 to float32's rounding, sums that cancel too."""
    found, inputs, d_y, d_state = called(tokens=150, segments=2, **EXACT)
    leaves = {k: v.double().requires_grad_() for k, v in inputs.items() if isinstance(v, Tensor)}
    y, state = mamba2.forward(**{**inputs, **leaves})
    order = [n for n in names() if n in leaves]
    want = torch.autograd.grad([y, state], [leaves[n] for n in order], [d_y.double(), d_state.double()])
    got = dict(zip(names(), found, strict=True))
    for name, value in zip(order, want, strict=True):
        assert relative_error(got[name], value) < BOUNDS["tf32x3"], name


def test_sequences_as_if_alone() -> None:
    """Packed sequences of any length, none and one token among them: each has the gradients of its own call, bit for bit where
    it is walked in one piece."""
    lengths = [70, 0, 1, 64, 129, 3]
    layer = read_layer(load_source("mamba2"))
    sizes = {"b": 1, "t": sum(lengths), "h": 4, "g": 2, "p": 32, "n": 32}
    inputs = dict(draw(layer, Case(sizes, dtype="f32", seed=4), "cpu").keywords())
    generator = torch.Generator().manual_seed(2)
    shape = (len(lengths), *inputs["S0"].shape[1:])
    states, d_states = (torch.randn(shape, generator=generator) for _ in range(2))
    d_y = torch.randn(inputs["x"].shape, generator=generator)
    edges = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    config = replace(mamba2_gradients.CONFIGS[torch.float32], segments=1)
    by_time = {i.name for i in mamba2.LAYER.inputs if "t" in i.axes}

    def run(given: dict[str, Any], state: Tensor, cu: Tensor | None, at_y: Tensor, at_state: Tensor) -> dict[str, Any]:
        with one_thread(), poisoned_memory(), _runtime.launcher(launch):
            found = mamba2_gradients.GRADIENTS(
                values(mamba2.LAYER, given), (0.0, float("inf")), (state,), cu, (at_y,), (at_state,), config
            )
        return dict(zip(names(), found, strict=True))

    packed = run(inputs, states, edges, d_y, d_states)
    sums: dict[str, Tensor] = {}
    for i, (start, stop) in enumerate(zip(edges.tolist(), edges.tolist()[1:], strict=False)):
        part = {n: v[:, start:stop] if n in by_time and v is not None else v for n, v in inputs.items()}
        alone = run(part, states[i : i + 1], None, d_y[:, start:stop], d_states[i : i + 1])
        for name in by_time:
            assert torch.equal(packed[name][:, start:stop], alone[name]), (name, i)
        assert torch.equal(packed["S0"][i : i + 1], alone["S0"]), i
        for name in ("A", "D", "dt_bias"):
            sums[name] = sums.get(name, torch.zeros(())) + alone[name]
    for name, total in sums.items():
        assert relative_error(packed[name], total) < 1e-6, name


@pytest.mark.parametrize("name", MODULES)
def test_states_that_segments_begin_with_are_kept(name: str) -> None:
    """Where a sequence is cut, `forward` keeps for its gradients the states that segments begin with: no kernel walks to them
    again, and the gradients are those of a walk in one piece."""
    module = importlib.import_module(f"generated.{name}")
    layer = read_layer(load_source(name))
    sizes = {a.name: a.size or 32 for a in layer.axes} | {g.axis: 2 for g in layer.groups}
    sizes |= {layer.batch: 2, layer.time: 300, layer.head: 4}
    inputs = draw(layer, Case(sizes, dtype="f32", seed=3), "cpu").keywords()
    launched: list[str] = []

    def noted(kernel: Any, grid: tuple[int, ...], args: Sequence[Any]) -> None:
        launched.append(kernel._pyfunc.__name__)
        launch(kernel, grid, args)

    def gradients(segments: int) -> tuple[Tensor, ...]:
        leaves = {n: x.clone().requires_grad_() if isinstance(x, Tensor) else x for n, x in inputs.items()}
        generator = torch.Generator().manual_seed(1)
        with one_thread(), poisoned_memory(), _runtime.launcher(noted):
            found = module.forward(**leaves, config=replace(module.CONFIGS[torch.float32], segments=segments))
            assert len(found) == len(layer.outputs) + len(layer.states)
            loss = sum((x * torch.randn(x.shape, generator=generator)).sum() for x in found)
            return torch.autograd.grad(loss, [x for x in leaves.values() if isinstance(x, Tensor)])

    whole = gradients(1)
    launched.clear()
    cut = gradients(3)
    walks = [k for k in launched if k.startswith(("segment_states", "entry_states"))]
    states = len(layer.states)
    assert ["segment_states"] * states + ["entry_states"] * states == [
        k.rpartition("_")[0] if states > 1 else k for k in walks
    ]
    for got, want in zip(cut, whole, strict=True):
        assert relative_error(got, want) < 1e-5


def test_one_D_a_head() -> None:
    """The gradient of D[h] is the sum of that of the D[h p] it stands for; and a D[h p] that repeats one number a head is no
    D[h]: each of its channels has a gradient of its own."""
    layer = read_layer(load_source("mamba2"))
    sizes = {"b": 2, "t": 150, "h": 4, "g": 2, "p": 32, "n": 64}
    inputs = dict(draw(layer, Case(sizes, dtype="f32", seed=3, forms={"D": ("h",)}), "cpu").keywords())
    d_y = torch.randn(inputs["x"].shape, generator=torch.Generator().manual_seed(1))

    def gradient(D: Tensor) -> Tensor:
        with one_thread(), poisoned_memory(), _runtime.launcher(launch):
            found = mamba2_gradients.GRADIENTS(
                values(mamba2.LAYER, {**inputs, "D": D}), (0.0, float("inf")), (None,), None, (d_y,), (None,),
                replace(mamba2_gradients.CONFIGS[torch.float32], **EXACT),
            )  # fmt: skip
        return found[[i.name for i in mamba2.LAYER.inputs].index("D")]

    repeated = inputs["D"][:, None].expand(4, 32)
    whole, one = gradient(repeated.contiguous()), gradient(inputs["D"])
    assert whole.std(1).min() > 0
    assert torch.equal(gradient(repeated), whole)
    assert one.shape == (4,)
    assert relative_error(one, whole.sum(1)) < 1e-6


def test_lengths_of_a_class_compile_nothing() -> None:
    """Tokens, batch and segments are run-time values: another length of the same class launches what is compiled already. A
    class is whether chunks are a multiple of 16, and whether several blocks share a group."""

    def kernels(tokens: int, batch: int) -> set[Any]:
        sizes = {"b": batch, "t": tokens, "h": 8, "g": 1, "p": 64, "n": 128}
        config = replace(mamba2_gradients.CONFIGS[torch.bfloat16], segments=2)
        return {launch.request for launch in record_gradients(mamba2, Call(sizes, "bf16", initial=True), config)}

    for several in (((8192, 2), (16384, 4), (32768, 3)), ((8256, 2), (8320, 5)), ((1024, 2), (2048, 2))):
        (first, *others) = [kernels(tokens, batch) for tokens, batch in several]
        assert len({r.kernel for r in first}) == 10
        assert all(other == first for other in others)


def test_how_many_blocks_share_the_heads() -> None:
    """Enough to fill the GPU, and none without a head."""
    x = torch.zeros(())
    assert _gradients.shares(0, 1024, 8, x) == 1
    assert _gradients.shares(0, 32, 80, x) == 5
    assert _gradients.shares(0, 1, 8, x) == 8
    assert _gradients.shares(3, 1024, 8, x) == 3
    assert (
        _gradients.shares(7, 1024, 8, x) == 4
    )  # two heads each; seven blocks would leave some with one and one with none


def test_how_many_segments() -> None:
    """One where walks fill the GPU, several where they do not, and never more than there are chunks."""
    x = torch.zeros(())
    assert _gradients.segments(0, 256, 32, x) == 8
    assert _gradients.segments(0, 32, 192, x) == 1
    assert _gradients.segments(0, 1, 4, x) == 1
    assert _gradients.segments(5, 256, 32, x) == 5


@pytest.mark.parametrize(
    ("sizes", "every"),
    [
        ({"b": 4, "t": 16384, "h": 8}, 2048),
        ({"b": 8, "t": 2048, "h": 24}, 0),
        ({"b": 4, "t": 4096, "h": 8}, 512),
        ({"b": 1, "t": 8192, "h": 80}, 43 * 64),
        ({"b": 4, "t": 16384, "h": 8, "n": 256}, 4096),
        ({"b": 1, "t": 131072, "h": 64}, 32768),
        ({"b": 2, "t": 4096, "h": 24, "p": 128}, 13 * 64),
    ],
)
def test_states_are_kept_at_the_ends_of_the_segments_there_are(sizes: dict[str, int], every: int) -> None:
    """A forward pass walks the same segments as one that keeps nothing, so that its values are the same bit for bit, and asks
    no chunk whether it ends a block, which would take it out of the compiler's pipeline. Where there is one segment nothing is
    kept, nor where the caller's Config cuts gradients otherwise."""
    call = Call({"g": 1, "p": 64, "n": 128, **sizes}, "bf16")
    assert starts_of(mamba2, call) == every
    (plain,) = (la for la in record(mamba2, call, None) if la.request.kernel == "walk_out")
    if every:
        (walk,) = (
            la for la in record(mamba2, replace(call, states_every=every), None) if la.request.kernel == "walk_out"
        )
        flags = {a.name: a.value for a in walk.request.signature if isinstance(a, ConstantArg)}
        assert walk.grid == plain.grid
        assert (flags["KEPT"], flags["ENDS"]) == (False, True)
        assert starts_of(mamba2, call, replace(mamba2_gradients.CONFIGS[torch.bfloat16], segments=7)) == 0
    else:
        assert plain.grid[1] == 1


def test_what_int32_does_not_reach_is_left_to_the_portable_form() -> None:
    """Entry states of 64 tokens each count too: here they are the largest array."""
    sizes = {"b": 1, "t": 1 << 18, "h": 64, "g": 1, "p": 64, "n": 256}
    x = torch.empty(0)
    assert not _gradients.reached(mamba2.LAYER, sizes, [x])
    assert _gradients.reached(mamba2.LAYER, {**sizes, "t": 1 << 10}, [x])
    assert not _gradients.reached(mamba2.LAYER, {**sizes, "t": 1 << 10, "p": 257}, [x]), "no tile has so many rows"


def test_more_sequences_than_int32_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many there are is known when they are counted: each has a chunk of its own, however short."""
    layer = read_layer(load_source("simple_gla"))
    inputs = dict(draw(layer, Case({"b": 1, "t": 64, "h": 2, "p": 32, "n": 32}, dtype="f32"), "cpu").keywords())
    monkeypatch.setattr(_runtime, "LIMIT", 10 * 2 * 32 * 32)
    given = (values(simple_gla.LAYER, inputs), (), (None,), None, (None,), (None,))
    with _runtime.launcher(lambda *arguments: None):
        _gradients.of("generated.simple_gla")(*given, seq_idx=torch.arange(64)[None] // 8)
        with pytest.raises(ValueError, match=r"simple_gla: gradients of 16 packed sequences, .* pass fewer at once"):
            _gradients.of("generated.simple_gla")(*given, seq_idx=torch.arange(64)[None] // 4)


def test_a_module_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are found beside the module, wherever that lies, and only if they are there."""
    package = ModuleType("lies_elsewhere")
    package.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    for name, digests in {"same": "11", "edited": "12"}.items():
        (tmp_path / f"{name}.py").write_text(f"SPEC_DIGEST = {digests[0]}\n")
        (tmp_path / f"{name}_gradients.py").write_text(f"SPEC_DIGEST, GRADIENTS = {digests[1]}, 1\n")
        assert _gradients.beside(f"lies_elsewhere.{name}")
    assert _gradients.of("lies_elsewhere.same") == 1
    with pytest.raises(RuntimeError, match=r"edited_gradients.py was emitted from another spec than .*edited.py; run"):
        _gradients.of("lies_elsewhere.edited")
    assert not _gradients.beside("lies_elsewhere.without")
    assert _gradients.of("generated.simple_gla").layer is simple_gla.LAYER
