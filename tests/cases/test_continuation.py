"""A sequence in pieces is the sequence, and the states that a caller keeps between are those of its prefixes.

What prefix caches of serving engines rely on: states at the ends of blocks of tokens, from any of which a call goes on.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdgen.emit import emit
from ssdgen.emit.package import package
from ssdgen.ir.report import Gate
from ssdgen.plan import plan as plan_of
from ssdgen.plan.settings import configure
from ssdgen.run.cases import sizes_for
from ssdgen.run.checks import poisoned_memory, relative_error
from ssdgen.run.emulate import launch
from ssdgen.run.inputs import Case, Dtype, Inputs, draw
from ssdgen.run.load import load
from tests.cases.subject import BOTH, EXACT, Subject, mamba2_sizes, subject

CHUNK = 16
RUNS: dict[tuple[Gate, Dtype], float] = {
    ("portable", "f32"): 1e-5,
    ("portable", "f64"): 1e-12,
    ("emulation", "f32"): 1e-5,  # of products in tf32x3
    ("emulation", "bf16"): 5e-3,
}
"""Where a call runs, in which dtype, and how far apart two ways to the same value may be: relative norms."""

names = st.sampled_from(["mamba2", "retnet", "linear_attention", "simple_gla", "mlstm"])
runs = st.sampled_from(list(RUNS))
lengths = st.integers(1, 75)


def drawn(of: Subject, length: int, dtype: Dtype, seed: int = 0) -> Inputs:
    sizes = {**sizes_for(of.layer, length), of.layer.head: 2} | {g.axis: 1 for g in of.layer.groups}
    return draw(of.layer, Case(sizes, dtype=dtype, seed=seed))


def call(of: Subject, gate: Gate, inputs: Inputs, every: int | None = None, **more: Any) -> tuple[torch.Tensor, ...]:
    """Outputs, final states and with `every` those between, computed in short chunks and two segments."""
    config: dict[str, Any] = {"chunk": CHUNK, "segments": 2}
    leading = inputs.tensors[of.plan.leader].dtype
    if gate == "emulation" and leading == torch.float32:
        config |= EXACT
    chosen = replace(of.module.CONFIGS.get(leading, of.module.Config()), **config)
    keywords = Arguments(inputs, {"states_every": every, "config": chosen, **more})
    with torch.no_grad():
        return of.call(gate, keywords)


class Arguments(Inputs):
    """Inputs with other keywords besides."""

    def __init__(self, inputs: Inputs, more: dict[str, Any]) -> None:
        super().__init__(inputs.tensors, inputs.params, inputs.states, inputs.arguments)
        object.__setattr__(self, "more", more)

    def keywords(self) -> dict[str, Any]:
        return {**super().keywords(), **self.more}  # type: ignore[attr-defined]


def tokens(of: Subject, inputs: Inputs, first: int, stop: int) -> Inputs:
    """Some tokens of inputs whose layouts are those of the equations, as the built-in specs have them."""
    time = of.layer.time
    tensors = {
        name: x.narrow(axes.index(time), first, stop - first) if time in (axes := of.layer.tensor(name).axes) else x
        for name, x in inputs.tensors.items()
    }
    return replace(inputs, tensors=tensors)


def entering(of: Subject, inputs: Inputs, states: tuple[torch.Tensor, ...]) -> Inputs:
    return replace(inputs, states={s.name: x for s, x in zip(of.layer.states, states, strict=True)})


def split(of: Subject, values: tuple[torch.Tensor, ...]) -> tuple[tuple[torch.Tensor, ...], ...]:
    """Outputs, final states, and the states between."""
    outputs, states = len(of.layer.outputs), len(of.layer.states)
    return values[:outputs], values[outputs : outputs + states], values[outputs + states :]


def near(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...], bound: float) -> None:
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert relative_error(a, b) <= bound


@settings(max_examples=30, deadline=None)
@given(names, runs, lengths, st.lists(st.integers(0, 75), max_size=3), st.integers(0, 9))
def test_pieces_are_the_sequence(name: str, run: tuple[Gate, Dtype], length: int, cuts: list[int], seed: int) -> None:
    """Cut anywhere, also twice at one place or at the ends: a piece without tokens hands its states on."""
    of, (gate, dtype) = subject(name), run
    inputs = drawn(of, length, dtype, seed)
    now, outputs, finals = inputs, [], ()
    for first, stop in itertools.pairwise(sorted([0, *(min(c, length) for c in cuts), length])):
        values, finals, _ = split(of, call(of, gate, tokens(of, now, first, stop)))
        outputs.append(values)
        now = entering(of, inputs, finals)
    whole, end, _ = split(of, call(of, gate, inputs))
    near(tuple(torch.cat(pieces, 1) for pieces in zip(*outputs, strict=True)), whole, RUNS[run])
    near(finals, end, RUNS[run])


@settings(max_examples=30, deadline=None)
@given(names, runs, lengths, st.integers(1, 3), st.integers(0, 9))
def test_states_between_are_those_of_prefixes(
    name: str, run: tuple[Gate, Dtype], length: int, chunks: int, seed: int
) -> None:
    """Asking for them changes nothing else, bit for bit; each is the final state of its prefix, and a call goes on from it."""
    of, (gate, dtype), every = subject(name), run, chunks * CHUNK
    inputs = drawn(of, length, dtype, seed)
    plain = call(of, gate, inputs)
    values = call(of, gate, inputs, every)
    assert all(torch.equal(a, b) for a, b in zip(values, plain, strict=False))
    whole, end, between = split(of, values)
    assert len(between) == len(end)
    for kept, final in zip(between, end, strict=True):
        assert kept.shape == (final.shape[0], length // every, *final.shape[1:])
        assert kept.dtype == final.dtype
    for i in range(length // every):
        stop, kept = (i + 1) * every, tuple(x[:, i] for x in between)
        near(kept, split(of, call(of, gate, tokens(of, inputs, 0, stop)))[1], RUNS[run])
        rest, last, _ = split(of, call(of, gate, entering(of, tokens(of, inputs, stop, length), kept)))
        near(rest, tuple(y[:, stop:] for y in whole), RUNS[run])
        near(last, end, RUNS[run])


@settings(max_examples=15, deadline=None)
@given(names, st.sampled_from(BOTH), st.integers(0, 4), st.integers(0, 9))
def test_steps_go_on_from_any_of_them(name: str, gate: Gate, block: int, seed: int) -> None:
    """Prefill, then decode from the middle: `step` and `steps` give what `forward` gives from there."""
    of, length = subject(name), 5 * CHUNK + 6
    inputs = drawn(of, length, "f32", seed)
    whole, _, between = split(of, call(of, gate, inputs, CHUNK))
    first = (block + 1) * CHUNK
    names = {n: inputs.arguments.get(n, n) for n in inputs.tensors}
    for several in (False, True):
        states = [x[:, block].clone() for x in between]
        now = tokens(of, inputs, first, first + 6).tensors
        if several:
            found = of.module.steps(*states, **{names[n]: x for n, x in now.items()})
            got = found if isinstance(found, tuple) else (found,)
        else:
            timed = {n: of.layer.time in of.layer.tensor(n).axes for n in now}
            each = []
            for t in range(6):
                one = {names[n]: x.select(1, t) if timed[n] else x for n, x in now.items()}
                found = of.module.step(*states, **one)
                each.append(found if isinstance(found, tuple) else (found,))
            got = tuple(torch.stack(y, 1) for y in zip(*each, strict=True))
        near(got, tuple(y[:, first : first + 6] for y in whole), 2e-5)


@settings(max_examples=25, deadline=None)
@given(names, st.integers(CHUNK, 75), st.data())
def test_no_later_token_changes_them(name: str, length: int, data: st.DataObject) -> None:
    """Bit for bit: what a cache holds for a prefix is good for every sequence that begins with it."""
    of = subject(name)
    inputs = drawn(of, length, "f32")
    first = data.draw(st.integers(CHUNK, length))
    other = drawn(of, length, "f32", seed=1)
    time = of.layer.time
    mixed = {}
    for n, x in inputs.tensors.items():
        axes = of.layer.tensor(n).axes
        mixed[n] = x.clone()
        if time in axes:
            mixed[n].narrow(axes.index(time), first, length - first).copy_(
                other.tensors[n].narrow(axes.index(time), first, length - first)
            )
    before = split(of, call(of, "portable", inputs, CHUNK))[2]
    after = split(of, call(of, "portable", replace(inputs, tensors=mixed), CHUNK))[2]
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[:, : first // CHUNK], b[:, : first // CHUNK])


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["mamba2", "mlstm"]), runs, st.lists(st.integers(0, 50), min_size=1, max_size=4), st.integers(1, 2)
)
def test_states_of_packed_sequences(name: str, run: tuple[Gate, Dtype], cut: list[int], chunks: int) -> None:
    """Sequence s has its states from place cu_seqlens[s] // every on, counted from its own first token; the rest are 0."""
    of, (gate, dtype), every = subject(name), run, chunks * CHUNK
    edges = torch.tensor([0, *cut]).cumsum(0)
    length = int(edges[-1])
    inputs = drawn(of, length, dtype)
    first = {n: x[:1] if of.layer.batch in of.layer.tensor(n).axes else x for n, x in inputs.tensors.items()}
    states = {n: torch.randn(len(cut), *x.shape[1:], dtype=x.dtype) for n, x in inputs.states.items()}
    inputs = replace(inputs, tensors=first, states=states)
    between = split(of, call(of, gate, inputs, every, cu_seqlens=edges))[2]
    wanted = tuple(torch.zeros_like(x) for x in between)
    assert {x.shape[1] for x in between} == {length // every}
    for s, (start, stop) in enumerate(itertools.pairwise(edges.tolist())):
        own = replace(tokens(of, inputs, start, stop), states={n: x[s : s + 1] for n, x in states.items()})
        alone = split(of, call(of, gate, own, every))[2]
        for out, x in zip(wanted, alone, strict=True):
            out[:, start // every : start // every + x.shape[1]] = x
    near(between, wanted, RUNS[run])
    for got, want in zip(between, wanted, strict=True):
        assert torch.equal(got.eq(0).flatten(2).all(-1), want.eq(0).flatten(2).all(-1))


@pytest.mark.parametrize("name", ["mamba2", "retnet", "linear_attention", "simple_gla", "mlstm"])
@pytest.mark.parametrize("edges", [None, [0, 52, 52, 150, 197]])
@pytest.mark.parametrize("length", [6 * CHUNK, 6 * CHUNK + 5])
def test_blocks_that_are_segments(name: str, edges: list[int] | None, length: int) -> None:
    """Then a state is stored behind the walk of a segment, also of the last one if that is a whole block; those stored in the
    walk, of shorter blocks, are the same bit for bit."""
    of, segment = subject(name), 3 * CHUNK
    inputs = drawn(of, length if edges is None else edges[-1], "f32")
    packed: dict[str, Any] = {}
    if edges is not None:
        first = {n: x[:1] if of.layer.batch in of.layer.tensor(n).axes else x for n, x in inputs.tensors.items()}
        states = {n: torch.randn(len(edges) - 1, *x.shape[1:]) for n, x in inputs.states.items()}
        inputs, packed = replace(inputs, tensors=first, states=states), {"cu_seqlens": torch.tensor(edges)}
    chunks = -(-(length if edges is None else edges[-1]) // CHUNK)
    config = replace(of.module.CONFIGS[torch.float32], chunk=CHUNK, segments=-(-chunks // 3), **EXACT)
    found = {}
    for every in (segment, CHUNK):
        flags: list[tuple[bool, bool]] = []

        def noted(kernel: Any, grid: tuple[int, ...], given: Any, into: list[tuple[bool, bool]] = flags) -> None:
            names = list(inspect.signature(kernel._pyfunc).parameters)
            if "ENDS" in names:
                into.append((given[names.index("KEPT")], given[names.index("ENDS")]))
            launch(kernel, grid, given)

        arguments = Arguments(inputs, {"states_every": every, "config": config, **packed})
        runtime = importlib.import_module("._runtime", of.module.__package__)
        with torch.no_grad(), poisoned_memory(), runtime.launcher(noted):
            found[every] = of.module.forward(**arguments.keywords())
        assert flags == [(every != segment, every == segment)]
    values, _, kept = split(of, found[segment])
    assert all(torch.equal(a, b) for a, b in zip(values, split(of, found[CHUNK])[0], strict=True))
    for got, finer in zip(kept, split(of, found[CHUNK])[2], strict=True):
        wanted = torch.zeros_like(got)
        for start, stop in itertools.pairwise(edges or [0, length]):
            for block in range((stop - start) // segment):
                wanted[:, start // segment + block] = finer[:, start // CHUNK + 3 * block + 2]
        assert torch.equal(got, wanted)


def test_gradients_reach_the_tokens_before() -> None:
    """A loss on a state between has the gradient that it has as a final state of the prefix; later tokens have none."""
    of = subject("mamba2")
    inputs = draw(of.layer, Case(mamba2_sizes(b=1, t=40, h=2, g=1, p=3, n=3), dtype="f64"))
    x = inputs.tensors["x"].requires_grad_()
    config = of.module.Config(chunk=CHUNK)
    *_, kept = of.module.forward(**inputs.keywords(), states_every=CHUNK, config=config)
    assert kept.dtype == torch.float64
    for i in range(2):
        (got,) = torch.autograd.grad((kept[:, i] ** 2).sum(), x, retain_graph=True)
        prefix = tokens(of, inputs, 0, (i + 1) * CHUNK)
        S = of.module.forward(**prefix.keywords(), config=config)[1]
        (want,) = torch.autograd.grad((S**2).sum(), x)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        assert not got[:, (i + 1) * CHUNK :].any()


@pytest.mark.parametrize("plan_name", ["three_kernel", "single_walk"])
@pytest.mark.parametrize("name", ["mamba2", "mlstm"])
def test_other_plans(name: str, plan_name: str) -> None:
    """`three_kernel` stores the states that enter chunks too, rounded for a product: not those that a caller keeps."""
    form = subject(name).plan.form
    emitted = emit(plan_of(form, configure(form, {"plan": plan_name})))
    of = Subject(emitted.plan, load(emitted.name, package([emitted])))
    case = Case(sizes_for(of.layer, 3 * CHUNK + 5))
    config = of.module.Config(chunk=CHUNK, **EXACT)
    got = of.call("emulation", Arguments(draw(of.layer, case), {"states_every": 2 * CHUNK, "config": config}))
    want = of.call("portable", Arguments(draw(of.layer, case), {"states_every": 2 * CHUNK, "config": config}))
    near(got, want, 1e-5)


@pytest.mark.parametrize("limit", [40_000, 9_000])
def test_arrays_that_int32_does_not_reach(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Pieces of a long call are whole blocks; the last may have none. Bit for bit what one piece gives."""
    of = subject("mamba2")
    inputs = draw(of.layer, Case({"b": 3, "t": 200, "h": 2, "g": 1, "p": 32, "n": 32}, seed=3))
    config = replace(of.module.CONFIGS[torch.float32], chunk=CHUNK, segments=1)
    arguments = Arguments(inputs, {"states_every": 3 * CHUNK, "config": config})
    whole = of.call("emulation", arguments)
    monkeypatch.setattr(importlib.import_module("._runtime", of.module.__package__), "LIMIT", limit)
    cut = of.call("emulation", arguments)
    assert whole[-1].shape[1] == 4
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))


@pytest.mark.parametrize("gate", BOTH)
def test_no_tokens_have_no_states_between(gate: Gate) -> None:
    of = subject("mamba2")
    inputs = draw(of.layer, Case(mamba2_sizes(t=0)))
    _, S, kept = of.call(gate, Arguments(inputs, {"states_every": 64}))
    assert torch.equal(S, inputs.states["S"])
    assert kept.shape == (2, 0, 4, 40, 24)


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "no multiple": (96, ValueError, r"multiple of the chunk.*64 tokens, got 96; pass a multiple of 64, or a `config`.*=32"),
    "no chunk fits": (100, ValueError, r"multiple of the chunk.*64 tokens, got 100; pass a multiple of 64$"),
    "zero": (0, ValueError, r"`states_every`.*got 0; pass a multiple of 64$"),
    "negative": (-64, ValueError, r"`states_every`.*got -64"),
    "a number": (64.0, TypeError, r"`states_every` must be a number of tokens, an int, got float"),
    "a bool": (True, TypeError, r"`states_every`.*got bool"),
}  # fmt: skip


@pytest.mark.parametrize("gate", BOTH)
@pytest.mark.parametrize("what", WRONG)
def test_wrong_blocks(gate: Gate, what: str) -> None:
    every, error, message = WRONG[what]
    of = subject("mamba2")
    with pytest.raises(error, match=message):
        of.call(gate, Arguments(draw(of.layer, Case(mamba2_sizes(t=5))), {"states_every": every}))


def test_what_the_message_says_to_pass_is_taken() -> None:
    of = subject("mamba2")
    config = replace(of.module.CONFIGS[torch.float32], chunk=32)
    inputs = draw(of.layer, Case(mamba2_sizes(t=200)))
    kept = of.call("portable", Arguments(inputs, {"states_every": 96, "config": config}))[-1]
    assert kept.shape[1] == 2


def test_masked_tokens_are_no_blocks() -> None:
    of = subject("mamba2")
    inputs = draw(of.layer, Case(mamba2_sizes(t=70)))
    mask = torch.ones(2, 70, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"`states_every` counts tokens.*`mask`.*pack the rows with `cu_seqlens`"):
        of.call("portable", Arguments(inputs, {"states_every": 64, "mask": mask}))
