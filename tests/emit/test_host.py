"""What the host functions of an emitted module do with long sequences, constants among the inputs, and wrong arguments."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch

from ssdgen.derive import chunk_form, recurrence
from ssdgen.diagnostics import Source
from ssdgen.emit import emit
from ssdgen.emit.package import package
from ssdgen.plan import plan
from ssdgen.plan.settings import configure
from ssdgen.run.cases import Trial
from ssdgen.run.checks import relative_error
from ssdgen.run.emulate import emulation
from ssdgen.run.inputs import Case, draw
from ssdgen.run.load import load
from ssdgen.run.reference import reference
from ssdgen.run.verify import emulated, run_trial
from ssdgen.spec import load_source, read_layer

EXACT = {"scores": "tf32x3", "carried": "tf32x3", "intra": "tf32x3", "state": "tf32x3"}


def module(text: str) -> ModuleType:
    emitted = emit(plan(chunk_form(recurrence(read_layer(Source("it.ssd", text))))))
    return load(emitted.name, package([emitted]))


@pytest.mark.parametrize("limit", [40_000, 9_000])
def test_arrays_that_int32_does_not_reach_are_cut(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """mamba 1015 and chunk states of more than 2^31 elements: cut over batch, then over time with the state carried on.

    The limit is lowered instead of the sequence lengthened; the result is that of one piece, bit for bit.
    """
    source = load_source("mamba2")
    layer = read_layer(source)
    mamba2 = module(source.text)
    runtime = importlib.import_module("._runtime", mamba2.__package__)
    inputs = draw(layer, Case({"b": 3, "t": 200, "h": 2, "g": 1, "p": 32, "n": 32}, seed=3))
    with emulated(mamba2):
        whole = mamba2.forward(**inputs.keywords())
        monkeypatch.setattr(runtime, "LIMIT", limit)
        with emulation() as run:
            cut = mamba2.forward(**inputs.keywords())
    assert len(run.launches) > 3
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))


def test_strides_that_int32_does_not_reach_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    source = load_source("linear_attention")
    layer = read_layer(source)
    attention = module(source.text)
    runtime = importlib.import_module("._runtime", attention.__package__)
    inputs = draw(layer, Case({"b": 1, "t": 70, "h": 2, "p": 32, "n": 32}, memory="slices"))
    assert not inputs.tensors["q"].is_contiguous()
    reached = max(sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) for x in inputs.tensors.values())
    monkeypatch.setattr(runtime, "LIMIT", reached - 1)
    assert runtime.indexable(inputs.tensors["q"]).is_contiguous()
    with emulated(attention):
        got = attention.forward(**inputs.keywords())
    outputs, _ = reference(layer, inputs.tensors, {}, inputs.states)
    assert relative_error(got[0], outputs["y"]) <= 1e-3


ONES = """\
language 1
layer ones "Rows, columns and read vectors that lack an axis or vary with the channel alone"

axes    b t h p n
sizes   p = 32, n = 32

inputs
  {inputs}
  v[b t h p], k[b t h n] : f32

state   S[b h p n] : f32
        S[t] = 0.5 * S[t-1] + {input}

output  y[b t h p] : like v
        y = S[t] . {vector} + v
"""


@pytest.mark.parametrize(
    ("inputs", "input", "vector"),
    [
        ("w[n] : f32", "outer(v, w)", "k"),
        ("w[p] : f32", "outer(w, k)", "exp(k)"),
        ("w[n] : f32", "outer(v, k)", "w"),
        ("w[h n] : f32", "outer(v, exp(k)) / 2", "(w * k)"),
        ("r[b t h] : f32 > 0", "outer(v / r, k)", "(k / r)"),
        ("w[p] : f32", "2 * k + outer(w, k)", "k"),
        ("w[b h] : f32 in (0, 1)", "w * outer(v, k)", "k"),
        ("w[h] : f32", "3 * v + w * outer(v, k)", "k"),
        ("w[h] : f32", "log(2 + index(h)) * outer(v, k) + w * outer(v, k)", "(k * index(n))"),
    ],
)
def test_operands_that_lack_an_axis(inputs: str, input: str, vector: str) -> None:
    """Every matrix product wants whole tiles: what varies along one axis alone is spread, and padding stays harmless."""
    layer = read_layer(Source("ones.ssd", ONES.format(inputs=inputs, input=input, vector=vector)))
    emitted = emit(plan(chunk_form(recurrence(layer))))
    imported = load(emitted.name, package([emitted]))
    trial = Trial("ones", Case({"b": 1, "t": 75, "h": 3, "p": 35, "n": 40}), EXACT)
    checks = [c for gate in ("portable", "emulation") for c in run_trial(gate, emitted.plan, imported, trial)]
    assert not [str(c) for c in checks if not c.passed]


def test_a_decay_next_to_one_keeps_its_accuracy() -> None:
    """RetNet's head h forgets 2^(-5-h) a token: 1 minus that is 1 in float32 from head 20 on, its logarithm is not 0."""
    source = load_source("retnet")
    layer = read_layer(source)
    retnet = module(source.text)
    inputs = draw(layer, Case({"b": 1, "t": 4096, "h": 26, "p": 1, "n": 1}))
    keep = {k: v[:, :, 19:] for k, v in inputs.tensors.items()}
    outputs, finals = reference(layer, inputs.tensors, {}, inputs.states)
    y, S = retnet.forward(**inputs.keywords())
    assert keep
    assert relative_error(S[:, 19:], finals["S"][:, 19:]) <= 1e-6
    assert relative_error(y[:, :, 19:], outputs["y"][:, :, 19:]) <= 1e-6
    with emulated(retnet):
        config = retnet.Config(**EXACT)
        y, S = retnet.forward(**inputs.keywords(), config=config)
    assert relative_error(S[:, 19:], finals["S"][:, 19:]) <= 1e-5


def test_a_config_is_a_config() -> None:
    attention = module(load_source("linear_attention").text)
    x = torch.ones(1, 1, 1, 4)
    with pytest.raises(TypeError, match=r"`config` must be a linear_attention\.Config, got dict"):
        attention.forward(x, x, x, config={"chunk": 64})
    for wrong in ({"chunk": "bf16"}, {"scores": 1}, {"tile_p": True}, {"chunk": 64.0}):
        with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` must be"):
            attention.Config(**wrong)
    with pytest.raises(ValueError, match="`tile_p` must be a power of two from 32 to 256, got 16"):
        attention.Config(tile_p=16)


@pytest.mark.parametrize("segments", [1, 2, 3, 5, 50])
def test_every_number_of_segments_gives_the_same_result(segments: int) -> None:
    """How a sequence is cut changes nothing but rounding: the last chunk is short, 7 chunks do not divide by 2, 3 or 5."""
    form = chunk_form(recurrence(read_layer(load_source("mlstm"))))
    emitted = emit(plan(form, configure(form, {"plan": "segmented"})))
    imported = load(emitted.name, package([emitted]))
    trial = Trial(
        "cut", Case({"b": 1, "t": 6 * 16 + 3, "h": 2, "p": 70, "n": 40}), {**EXACT, "chunk": 16, "segments": segments}
    )
    assert not [str(c) for c in run_trial("emulation", emitted.plan, imported, trial) if not c.passed]


@pytest.mark.parametrize(
    ("wanted", "chunks", "walks", "column", "expected"),
    [
        (0, 256, 32, 128, (8, 32)),
        (0, 256, 32, 256, (4, 64)),
        (0, 32, 192, 128, (1, 32)),
        (0, 11, 48, 128, (4, 3)),
        (0, 64, 24, 128, (8, 8)),
        (0, 1, 4, 128, (1, 1)),
        (5, 7, 1, 256, (4, 2)),
        (9, 3, 1, 128, (3, 1)),
        (1, 7, 1, 128, (1, 7)),
    ],
)
def test_segments_fill_the_gpu(wanted: int, chunks: int, walks: int, column: int, expected: tuple[int, int]) -> None:
    """32 walks of 256 chunks are cut so that two blocks run on each of 132 multiprocessors, or one where its state is wide;
    192 walks are not cut. On an H200 48 walks of 11 chunks took 23.8 us in 4 segments and 30.0 uncut; 24 of 64 were tuned to
    8."""
    linear = module(load_source("linear_attention").text)
    cut = importlib.import_module("._cut", linear.__package__)
    assert cut.segments(wanted, chunks, walks, column, multiprocessors=132) == expected


def test_a_plan_that_keeps_states_in_registers_says_how_much_it_can() -> None:
    form = chunk_form(recurrence(read_layer(load_source("linear_attention"))))
    emitted = emit(plan(form, configure(form, {"plan": "single_walk"})))
    imported = load(emitted.name, package([emitted]))
    x = torch.ones(1, 2, 1, 300)
    with emulated(imported), pytest.raises(ValueError, match=r"256 at most, got 300; use three_kernel"):
        imported.forward(x, x, x)


def test_the_portable_path_keeps_float32_under_autocast() -> None:
    """Under torch.autocast a product would be rounded to bf16 without a word."""
    source = load_source("mamba2")
    mamba2 = module(source.text)
    inputs = draw(read_layer(source), Case({"b": 1, "t": 70, "h": 2, "g": 1, "p": 8, "n": 8}))
    plain = mamba2.forward(**inputs.keywords())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = mamba2.forward(**inputs.keywords())
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


EACH_SEQUENCE = """\
language 1
layer each "A decay of each sequence and head that is the same at every token: a closed form, and no kernel that sums it"

axes    b t h p n

inputs
  a[b h]                 : f32 in (0, 1)
  v[b t h p], k[b t h n] : f32

state   S[b h p n] : f32
        S[t] = a * S[t-1] + outer(v, k)

output  y[b t h p] : like v
        y = S[t] . k
"""


def test_a_decay_of_each_sequence() -> None:
    layer = read_layer(Source("each.ssd", EACH_SEQUENCE))
    emitted = emit(plan(chunk_form(recurrence(layer))))
    assert [k.name for k in emitted.plan.kernels] == ["segment_states", "walk_out"]
    trial = Trial("each", Case({"b": 2, "t": 140, "h": 2, "p": 8, "n": 8}), EXACT)
    imported = load(emitted.name, package([emitted]))
    checks = [c for gate in ("portable", "emulation") for c in run_trial(gate, emitted.plan, imported, trial)]
    assert not [str(c) for c in checks if not c.passed]


def test_rows_and_columns_that_no_token_changes_are_refused() -> None:
    """A kernel reads the length of a sequence off what it loads of each token."""
    text = ONES.format(inputs="g[b t h], w[p], u[n] : f32", input="g * outer(w, u)", vector="k")
    planned = plan(chunk_form(recurrence(read_layer(Source("ones.ssd", text)))))
    assert planned.refused == "a state whose rows and columns are the same at every token"
