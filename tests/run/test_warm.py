"""Warm-up: the calls it compiles for are of every class that a deployment makes, and it fills the cache launches look in."""

from __future__ import annotations

import itertools
import math
import sqlite3
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ssdgen import pipeline
from ssdgen.build.worker import cuda_tile_cache
from ssdgen.diagnostics import UserError
from ssdgen.emit.package import package
from ssdgen.files import write_all
from ssdgen.ir.build import ArrayArg
from ssdgen.run import warm as warm_module
from ssdgen.run.load import load_file
from ssdgen.run.recorded import Call, StepCall, blank, record, record_gradients, recording, starts_of
from ssdgen.run.tune.compile import Compiler
from ssdgen.run.tune.device import H200, assumed
from ssdgen.run.warm import (
    EVERY,
    calls_of,
    differentiated,
    kept_at_ends,
    launched,
    module_path,
    near,
    several_steps,
    step_calls_of,
    stepped,
    warm,
)
from ssdgen.run.warm_conv import conv_sizes, convolved

GENERATED = Path(__file__).resolve().parents[2] / "generated"
SIZES = {"b": 2, "t": 4096, "h": 8, "g": 1, "p": 64, "n": 128}


@pytest.fixture(scope="module")
def mamba2() -> ModuleType:
    return load_file(GENERATED / "mamba2.py")


def test_lengths_of_every_class_are_near() -> None:
    """A multiple of 16 tokens, of 8, 4, 2 or 1 at most, and of 16 chunks or not, of 64 as of 128 tokens."""

    def classes(lengths: tuple[int, ...], chunk: int) -> set[tuple[int, bool]]:
        return {(math.gcd(n, 16), -(-n // chunk) % 16 == 0) for n in lengths}

    for tokens in (2048, 4000, 4096, 131072):
        for chunk in (64, 128):
            assert len(classes(near(tokens), chunk)) == 10, (tokens, chunk)
    assert near(100)[0] == 100
    assert {1, 63, 64} <= set(near(100)), "one token, one chunk"


def test_every_option_is_called(mamba2: ModuleType) -> None:
    calls = list(calls_of(mamba2, [{"b": 1, "h": 4, "t": 2048}], ["bf16", "f32"]))
    assert calls[0].present == ()
    assert {c.dtype for c in calls} == {"bf16", "f32"}
    assert {c.present for c in calls} == {(), ("z",)}
    assert {dict(c.forms)["D"] for c in calls} == {0, 1, 2}
    assert {dict(c.forms)["dt_bias"] for c in calls} == {0, 1}
    assert {c.sizes["b"] for c in calls} == {1}
    assert {c.initial for c in calls} == {False, True}
    assert {c.packed for c in calls} == {False, True}
    assert not any(c.packed for c in calls_of(mamba2, [{"b": 2}], ["bf16"])), "cu_seqlens is for a batch of 1"
    assert len(calls) == len({str(c) for c in calls})


def test_steps_are_called_too(mamba2: ModuleType) -> None:
    calls = list(step_calls_of(mamba2, [{"b": 1, "h": 4}], ["bf16"]))
    kinds = ((False, False), (False, True), (True, False))
    assert {(c.state, c.pooled, c.steady) for c in calls} == {(s, *kind) for s in ("f32", "bf16") for kind in kinds}
    assert {c.call.present for c in calls} == {(), ("z",)}
    assert {dict(c.call.forms)["D"] for c in calls} == {0, 1, 2}
    kernels = {r.kernel for r in stepped(mamba2, calls[-1], H200)}
    assert kernels == {"token_step"}


def test_steps_that_are_compiled(mamba2: ModuleType) -> None:
    """No later step of the same batch and heads finds a class that was not warmed, whatever it promises."""
    warmed = {r for c in step_calls_of(mamba2, [{"b": 2, "h": 8}], ["bf16"]) for r in stepped(mamba2, c, H200)}
    call = Call({**SIZES, "t": 1}, "bf16", ("z",), (("D", 1), ("dt_bias", 1)))
    plain, steady = (set(stepped(mamba2, StepCall(call, steady=promise), H200)) for promise in (False, True))
    assert plain <= warmed
    assert steady <= warmed
    assert not plain & steady


@pytest.mark.parametrize("heads", [8, 3])
def test_what_a_call_of_any_length_launches_is_compiled(mamba2: ModuleType, heads: int) -> None:
    """No later call of the same batch and heads finds a class that was not warmed. With three heads a stride of so many tokens
    is a multiple of 16, or not, as the tokens are."""
    calls = calls_of(mamba2, [{"b": 2, "h": heads, "t": 4096}], ["bf16"])
    warmed = {r for c in calls for r in launched(mamba2, c, H200)}
    for tokens in (1, 2, 16, 64, 65, 128, 200, 1000, 2048, 3000, 3001, 4096, 5002, 5003, 9999, 65536):
        for present, initial in itertools.product(((), ("z",)), (False, True)):
            call = Call({**SIZES, "h": heads, "t": tokens}, "bf16", present, (("D", 1), ("dt_bias", 0)), initial)
            assert set(launched(mamba2, call, H200)) <= warmed, tokens


@pytest.mark.parametrize("share", [0, 4])
def test_arrays_begin_at_multiples_of_16_bytes(mamba2: ModuleType, share: int) -> None:
    """For any number of groups, so that kernels are compiled for one class of addresses."""
    config = replace(mamba2.CONFIGS[torch.bfloat16], share_scores_from=share)
    for b, g in ((1, 1), (3, 1), (1, 2)):
        for launch in record(mamba2, Call({**SIZES, "b": b, "g": g}, "bf16"), config):
            arrays = [a for a in launch.request.signature if isinstance(a, ArrayArg)]
            assert all(a.aligned for a in arrays), launch.request.kernel


def test_an_input_that_begins_elsewhere_is_another_class(mamba2: ModuleType) -> None:
    arguments = blank(mamba2, Call(SIZES, "bf16", (), (("D", 1), ("dt_bias", 0))))
    arguments["A"] = (-torch.ones(SIZES["h"] + 1))[1:]
    with recording(mamba2) as launches, torch.no_grad():
        mamba2.forward(**arguments)
    classes = {a.name: a.aligned for a in launches[0].request.signature if isinstance(a, ArrayArg)}
    assert {name for name, aligned in classes.items() if not aligned} == {"A"}


def test_blank_tensors_pass_the_modules_own_checks(mamba2: ModuleType) -> None:
    arguments = blank(mamba2, Call(SIZES, "f16", ("z",), (("D", 0),), initial=True))
    assert "D" not in arguments
    assert arguments["x"].dtype == torch.float16
    assert arguments["dt"].dtype == torch.float32
    assert bool((arguments["A"] < 0).all())
    assert arguments["S0"].shape == (2, 8, 64, 128)
    for name in ("retnet", "simple_gla", "mlstm", "linear_attention"):
        module = load_file(GENERATED / f"{name}.py")
        assert any(launched(module, call, H200) for call in calls_of(module, (), ["bf16"]))


def test_only_modules_have_kernels_to_warm(tmp_path: Path) -> None:
    assert module_path(str(GENERATED / "mamba2.py")) == (GENERATED / "mamba2.py").resolve()
    assert module_path("generated.mamba2").name == "mamba2.py"
    for target, message in (
        ("specs/mine.ssd", "is a spec"),
        (str(tmp_path / "no.py"), "there is no module"),
        ("no.such.module", "is no emitted module"),
    ):
        with pytest.raises(UserError, match=message):
            module_path(target)
    (tmp_path / "foreign.py").write_text("x = 1")
    with pytest.raises(UserError, match="is no module that ssdgen emitted"):
        warm(tmp_path / "foreign.py")


def test_a_cache_that_is_off_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_TILE_CACHE_DIR", "off")
    with pytest.raises(UserError, match=r"the cache of cuda\.tile is off"):
        warm(GENERATED / "mamba2.py")
    monkeypatch.delenv("CUDA_TILE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cuda_tile_cache() == Path("/somewhere/cutile-python")


def test_the_cache_folder_is_where_cuda_tile_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its convention is written here once more, since asking it imports the compiler."""
    from cuda.tile._context import init_context_config_from_env

    for value in ("/somewhere", "off", "0", "None", None):
        if value is None:
            monkeypatch.delenv("CUDA_TILE_CACHE_DIR")
        else:
            monkeypatch.setenv("CUDA_TILE_CACHE_DIR", value)
        wanted = init_context_config_from_env().cache_dir
        assert str(cuda_tile_cache()) == str(wanted)


def test_compiling_fills_the_cache_and_is_not_done_again(tmp_path: Path) -> None:
    source = pipeline.emit(pipeline.plan(pipeline.derive("linear_attention")[0], {}))
    (tmp_path / "package").mkdir()
    write_all(tmp_path / "package", package([source]))
    module = load_file(tmp_path / "package" / "linear_attention.py")
    requests = launched(module, next(calls_of(module, (), ["bf16"])), H200)
    mark = b"from the cache"
    cubins = []
    for _ in range(2):
        with Compiler("sm_90", 1, tmp_path / "cache") as compiler:
            (answers,) = [answers for _, answers in compiler.compiled([requests[:1]])]
            assert [place for place, _ in compiler.compiled([requests[:1]])] == [0], "known in this process"
        cubins.append(answers[0].cubin)  # type: ignore[union-attr]
        with sqlite3.connect(tmp_path / "cache" / "cache.db") as cache:
            assert cache.execute("SELECT COUNT(*) FROM cache").fetchone() == (1,)
            (blob,) = cache.execute("SELECT blob FROM cache").fetchone()
            cache.execute("UPDATE cache SET blob = ?, blob_size = ?", (blob + mark, len(blob + mark)))
    assert cubins[1] == cubins[0] + mark, "another process takes what it finds, and compiles nothing"
    assert answers[0].cubin[:4] == b"\x7fELF"  # type: ignore[union-attr]


def test_gradients_of_any_length_are_compiled(mamba2: ModuleType) -> None:
    """No later call that is differentiated finds a class that was not warmed."""
    calls = list(calls_of(mamba2, [{"b": 2, "h": 8, "t": 4096}], ["bf16"]))
    warmed = {r for call in calls for r in differentiated(mamba2, call, H200)}
    assert {r.kernel for r in warmed} >= {"entry_states", "chunk_gradients", "token_gradients"}
    for tokens in (1, 64, 65, 1000, 2048, 3001, 4096, 9999, 65536):
        for present, initial, finals in itertools.product(((), ("z",)), (False, True), (False, True)):
            call = Call({**SIZES, "t": tokens}, "bf16", present, (("D", 1), ("dt_bias", 0)), initial)
            launches = record_gradients(mamba2, call, finals=finals)
            assert {launch.request for launch in launches} <= warmed, (tokens, present, initial, finals)


def test_states_kept_for_gradients_are_warmed(mamba2: ModuleType) -> None:
    """What a call of any length launches that keeps its states at the ends of its segments, and the gradients from those."""
    calls = list(calls_of(mamba2, [{"b": 2, "h": 8, "t": 4096}], ["bf16"]))
    warmed = {r for call in calls for r in (*kept_at_ends(mamba2, call, H200), *differentiated(mamba2, call, H200))}
    kept = 0
    for tokens, batch, heads in ((4096, 2, 8), (3001, 2, 24), (16384, 4, 8), (9999, 3, 8), (65536, 2, 24)):
        for present in ((), ("z",)):
            call = Call({**SIZES, "t": tokens, "b": batch, "h": heads}, "bf16", present, (("D", 1), ("dt_bias", 0)))
            with assumed(mamba2, H200):
                every = starts_of(mamba2, call)
                kept += every > 0
                launches = record(mamba2, replace(call, states_every=every), None)
                launches += record_gradients(mamba2, call, starts_every=every)
            walks = {la.request for la in launches if la.request.kernel in ("walk_out", "entry_states")}
            assert walks <= warmed, (tokens, batch, heads, present)
    assert kept >= 8


def test_several_steps_and_kept_states(mamba2: ModuleType) -> None:
    """What `--also steps` and `--also states` add: kernels with other flags, and arrays of other lengths."""
    steps = list(step_calls_of(mamba2, [{"b": 2}], ["bf16"]))
    several = list(several_steps(mamba2, steps))
    assert len(several) == 4 * len(steps)
    assert {(s.call.sizes["t"] % 16 == 0, s.keeps) for s in several} == set(itertools.product((False, True), repeat=2))
    one = {r for s in steps[:4] for r in stepped(mamba2, s, H200)}
    assert not one & {r for s in several[:4] for r in stepped(mamba2, s, H200) if s.keeps}
    call = next(calls_of(mamba2, [{"b": 2}], ["bf16"]))
    kept = set(launched(mamba2, replace(call, states_every=EVERY), H200)) - set(launched(mamba2, call, H200))
    assert [r.kernel for r in kept] == ["walk_out"]


CONV = {"b": 2, "t": 4096, "d": 1792, "w": 4}


def test_calls_of_the_convolution_of_any_length_are_compiled() -> None:
    """What a Mamba layer calls on slices of its projection, at batch 1 also packed, finds no class that was not warmed."""
    conv = load_file(GENERATED / "causal_conv.py")
    weight, bias = torch.empty(1792, 4, dtype=torch.bfloat16), torch.empty(1792, dtype=torch.bfloat16)
    for b in (1, 2):
        warmed = set(convolved(conv, {**CONV, "b": b}, "bf16", near(4096), several=True))
        cache, slots = torch.empty(b, 1792, 3, dtype=torch.bfloat16), torch.arange(b, dtype=torch.int32)
        for tokens in (1, 2, 16, 31, 32, 64, 480, 481, 1000, 2048, 3001, 4064, 4096, 65536):
            x = torch.empty(b, tokens, 4384, dtype=torch.bfloat16)[..., 1536:3328]
            with recording(conv) as launches, torch.no_grad():
                y, _ = conv.forward(x, weight, bias, initial=cache, activation="silu", return_final=True)
                conv.forward(x, weight, activation="silu", out=torch.empty_like(y))
                conv.step(cache, x[:, 0], weight, bias, activation="silu", state_indices=slots)
                conv.steps(cache, x[:, :16], weight, bias, activation="silu")
                conv.step(cache, x[:, 0], weight, bias, activation="silu", steady=True)
                conv.steps(cache, x[:, :16], weight, bias, activation="silu", steady=True)
                if b == 1 and tokens > 1:
                    edges = torch.tensor([0, tokens // 3, tokens], dtype=torch.int32)
                    conv.forward(x, weight, bias, cu_seqlens=edges, activation="silu")
            assert {launch.request for launch in launches} <= warmed, (b, tokens)


def test_shapes_of_the_convolution() -> None:
    conv = load_file(GENERATED / "causal_conv.py")
    assert conv_sizes(conv, {"d": 96}, 2, 4096) == {"b": 2, "t": 4096, "w": 4, "d": 96}
    for shape, message in (
        ({"b": 1}, "does not say how long d is"),
        ({"d": 96, "h": 8}, "no axis `h`"),
        ({"d": 0}, "no axis `d` of length 0"),
        ({"d": 96, "w": 9}, "no axis `w` of length 9"),
    ):
        with pytest.raises(UserError, match=message):
            conv_sizes(conv, shape, 2, 4096)


def test_warm_takes_the_convolution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ssdgen warm generated/causal_conv.py` finds its kernels compiled, or what is wrong with them, as of any module."""
    monkeypatch.setenv("CUDA_TILE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(warm_module, "Compiler", FewCompiled)
    warmed = warm(GENERATED / "causal_conv.py", [{"d": 96, "t": 64}], ["bf16"], "sm_90", 1)
    assert {k.request.kernel for k in warmed.kernels} == {"convolve", "roll"}
    assert not any(k.problem for k in warmed.kernels)
    assert list((tmp_path / "cache" / "ssdgen").iterdir())


class FewCompiled(Compiler):
    """A compiler that compiles the last kernel alone, and says so of all."""

    def compiled(self, groups: Any) -> Any:
        requests = [request for (request,) in groups]
        ((_, answers),) = super().compiled([requests[-1:]])
        yield from ((place, answers) for place in range(len(requests)))
