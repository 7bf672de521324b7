"""Modules emitted for XLA compute what the spec says: in every dtype, at every length, differentiated, in vmap and jit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import export

from ssdgen.diagnostics import Source
from ssdgen.emit import emit
from ssdgen.emit.package import package
from ssdgen.run.cases import Trial, sizes_for
from ssdgen.run.checks import relative_error
from ssdgen.run.inputs import Case, draw
from ssdgen.run.load import load
from ssdgen.run.reference import reference
from ssdgen.run.verify import run_trial
from tests.emit.test_modules import COLLIDING
from tests.xla.subject import SPECS, Subject, array, arrays, made, subject, tensor

DTYPES = {"f32": 1e-5, "bf16": 5e-3}


def case_of(s: Subject, tokens: int, **others: Any) -> Case:
    return Case(sizes_for(s.layer, tokens), **others)


@pytest.mark.parametrize("name", SPECS)
def test_equals_the_token_loop(name: str) -> None:
    """Two whole chunks side by side and a shorter one, from a state of the caller, whose heads share groups."""
    subject(name).check(case_of(subject(name), 21))


@pytest.mark.parametrize("name", ["mamba2", "gla"])
def test_products_of_bfloat16(name: str) -> None:
    """Operands are rounded to bfloat16 and nothing else is: the result keeps the bound of the kernels."""
    subject(name).check(case_of(subject(name), 21, dtype="bf16"))


@pytest.mark.parametrize(("tokens", "dtype"), [(0, "f32"), (1, "f16"), (8, "f64")])
def test_lengths(tokens: int, dtype: Any) -> None:
    subject("mamba2").check(case_of(subject("mamba2"), tokens, dtype=dtype))


def test_blocks_of_chunks_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence of more chunks than are computed side by side: four blocks in a loop, a chunk behind it, a shorter one."""
    s = subject("mamba2")
    monkeypatch.setattr(s.module._rt, "BLOCK", 2)
    s.check(case_of(s, 4 * 9 + 1), chunk=4)


@pytest.mark.parametrize(("tokens", "chunk", "strong"), [(64, 16, slice(0, None, 8)), (256, 4, None)])
def test_strong_decays_do_not_drown_weak_ones(tokens: int, chunk: int, strong: slice | None) -> None:
    """Float32 sums of both are finite, their differences wrong: a token's log2 decay is clamped, behind one strong decay in
    eight, and from chunk to chunk each sum is one of its own, where whole chunks of strong decays alternate with weak ones."""
    s = subject("mamba2")
    inputs = draw(s.layer, case_of(s, tokens, absent=frozenset({"dt_bias"})))
    inputs.tensors["A"] = torch.full_like(inputs.tensors["A"], -1e5)
    weak = torch.randn(inputs.tensors["dt"].shape, generator=torch.Generator().manual_seed(0)) - 14  # steps around 1e-6
    inputs.tensors["dt"] = weak
    if strong is not None:
        weak[:, strong] = 100.0
    else:
        weak.unflatten(1, (-1, 2, chunk))[:, :, 0] = 100.0
    outputs, finals = reference(s.layer, inputs.tensors, {}, inputs.states)
    wanted = (*outputs.values(), *finals.values())
    errors = [relative_error(tensor(a), b) for a, b in zip(s.call(inputs, chunk), wanted, strict=True)]
    assert max(errors) < 3e-5, errors


@pytest.mark.parametrize(("name", "dtype"), [("mamba2", "bf16"), ("gla", "f32"), ("retnet", "f32"), ("mlstm", "f32")])
def test_steps_equal_the_whole_sequence(name: str, dtype: Any) -> None:
    """Token by token, states handed on: what `forward` gives for all of them."""
    s = subject(name)
    inputs = draw(s.layer, case_of(s, 3, dtype=dtype))
    want = s.call(inputs, chunk=8)
    given = arrays(inputs.keywords())
    arguments = inputs.arguments
    moving = {
        arguments.get(t.name, t.name): t.axes.index(s.layer.time) for t in s.layer.inputs if s.layer.time in t.axes
    }
    states = [given.pop(f"{state.name}0") for state in s.layer.states]
    step = jax.jit(s.module.step)
    for t in range(3):
        now = {k: jnp.take(v, t, moving[k]) if k in moving else v for k, v in given.items()}
        y, *states = step(*states, **now)
        assert relative_error(tensor(y), tensor(want[0][:, t])) < DTYPES[dtype]
    for state, final in zip(states, want[1:], strict=True):
        assert state.dtype == jnp.float32
        assert relative_error(tensor(state), tensor(final)) < DTYPES[dtype]


def test_a_step_that_looks_back_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"mamba3: no steps are emitted for .*reads the token before"):
        subject("mamba3").module.step(jnp.zeros(1))


@pytest.mark.parametrize(("name", "dtype"), [("mamba2", "bf16"), ("mamba2", "f32"), ("gla", "f32"), ("mlstm", "f32")])
def test_gradients_equal_those_of_the_other_portable_form(name: str, dtype: Any) -> None:
    """With respect to every input and initial state, through whole chunks and a shorter one, in the dtype of each."""
    s = subject(name)
    inputs = draw(s.layer, case_of(s, 11, dtype=dtype))
    other = emit(s.plan, portable_only=bool(s.plan.refused))
    leaves = {k: v.double().requires_grad_() for k, v in inputs.keywords().items() if isinstance(v, torch.Tensor)}
    results = load(other.name, package([other])).forward(**leaves)
    weights = [torch.randn(v.shape, generator=torch.Generator().manual_seed(i)) for i, v in enumerate(results)]
    sum((v * w).sum() for v, w in zip(results, weights, strict=True)).backward()

    def loss(given: dict[str, jax.Array]) -> jax.Array:
        found = s.module.forward(**given, chunk=4)
        return sum(jnp.sum(v.astype(jnp.float32) * array(w)) for v, w in zip(found, weights, strict=True))

    given = arrays(inputs.keywords())
    gradients = jax.jit(jax.grad(loss))(given)
    assert {k: g.dtype for k, g in gradients.items()} == {k: v.dtype for k, v in given.items()}
    errors = {k: relative_error(tensor(g), leaves[k].grad) for k, g in gradients.items()}
    assert set(errors) == set(leaves)
    assert max(errors.values()) < GRADIENTS[dtype], errors


def test_the_gradient_where_nothing_decays_is_whole() -> None:
    """A decay of exactly 1 is where its clamp begins; below 2^-128, where it ends, there is none."""
    s = subject("simple_gla")
    inputs = draw(s.layer, case_of(s, 12))
    inputs.tensors["g"][:, ::3], inputs.tensors["g"][:, 10] = 0, -1000
    leaves = {k: v.double().requires_grad_() for k, v in inputs.tensors.items()}
    outputs, _ = reference(s.layer, leaves, {}, inputs.states)
    outputs["y"].sum().backward()
    got = jax.jit(jax.grad(lambda g: s.module.forward(**{**arrays(inputs.keywords()), "g": g}, chunk=4)[0].sum()))
    gradient = tensor(got(array(inputs.tensors["g"])))
    assert relative_error(gradient, leaves["g"].grad) < 1e-4
    assert not gradient[:, 10].any()


GRADIENTS = {"f32": 1e-5, "bf16": 2e-2}
"""In bf16 a gradient is rounded once, and those of decays are small differences of sums of rounded products."""


def test_vmap_is_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapped over, calls of one sequence each are a call of several."""
    s = subject("mamba2")
    alone = {t.name for t in s.layer.inputs if s.layer.batch not in t.axes}
    forward = s.module.forward

    def mapped(**given: Any) -> tuple[jax.Array, ...]:
        chunk = given.pop("chunk")
        whole = {k: v for k, v in given.items() if k in alone}
        rows = {k: v[:, None] for k, v in given.items() if k not in alone}
        return tuple(v[:, 0] for v in jax.vmap(lambda row: forward(**row, **whole, chunk=chunk))(rows))

    monkeypatch.setattr(s.module, "forward", mapped)
    s.check(case_of(s, 9), chunk=4)


@pytest.mark.parametrize("name", SPECS)
def test_lowers_for_every_platform(name: str) -> None:
    """`forward` and `step` are einsums and loops alone, for cpu, cuda and tpu: of which the last is lowered and run nowhere."""
    s = subject(name)
    long = name == "mamba2"  # more chunks than are computed side by side take turns
    given = arrays(draw(s.layer, case_of(s, 2 * 64 * 4 if long else 8, dtype="bf16")).keywords())
    text = lowered(lambda given: s.module.forward(**given, chunk=4), given)
    assert ("stablehlo.while" in text) == long
    if s.plan.step.portable is None:
        return
    arguments, time = draw(s.layer, case_of(s, 1)).arguments, s.layer.time
    moving = {arguments.get(t.name, t.name): t.axes.index(time) for t in s.layer.inputs if time in t.axes}
    states = {state.name: given.pop(f"{state.name}0") for state in s.layer.states}
    lowered(
        lambda given: s.module.step(**given),
        states | {k: jnp.take(v, 0, moving[k]) if k in moving else v for k, v in given.items()},
    )


def lowered(call: Callable[..., Any], given: dict[str, Any]) -> str:
    """The StableHLO of a call, which has no custom call in it."""
    text = str(export.export(jax.jit(call), platforms=("cpu", "cuda", "tpu"))(given).mlir_module())
    assert "stablehlo." in text
    assert "custom_call" not in text
    return text


def test_arrays_of_numpy_are_taken() -> None:
    s = subject("linear_attention")
    given = arrays(draw(s.layer, case_of(s, 4)).keywords())
    got = s.module.forward(**{k: np.asarray(v) for k, v in given.items()})
    np.testing.assert_allclose(got[0], s.module.forward(**given)[0])


def changed(given: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {**given, **others}


BAD = {
    "`B`[b t g n] is missing": ({"B": None}, TypeError),
    "`B` must have the dtype of `x`, float32, got bfloat16": ({"B": jnp.zeros((2, 5, 2, 24), jnp.bfloat16)}, TypeError),
    "`dt` must be float32 or bfloat16 or float16 or float64, got int32": ({"dt": jnp.zeros((2, 5, 4), int)}, TypeError),
    "`A` must be an array of jax or numpy, got list": ({"A": [1.0]}, TypeError),
    "`D` must be [h p] (rank 2) or [h] (rank 1), got shape [1, 4, 40]": ({"D": jnp.zeros((1, 4, 40))}, ValueError),
    "`C`[b t g n] has shape [2, 5, 2, 23], but axis n is 24 in `B`": ({"C": jnp.zeros((2, 5, 2, 23))}, ValueError),
    "3 groups (axis g, of `B`) do not divide 4 heads": (
        {"B": jnp.zeros((2, 5, 3, 24)), "C": jnp.zeros((2, 5, 3, 24))},
        ValueError,
    ),
    "`S0` must be float32 or float64, got bfloat16": ({"S0": jnp.zeros((2, 4, 40, 24), jnp.bfloat16)}, TypeError),
    "`dt_min` must be in [0, inf], got -1": ({"dt_min": -1.0}, ValueError),
    "`dt_max` must be a number, got str": ({"dt_max": "1"}, TypeError),
    "`chunk` must be a positive integer, got 0": ({"chunk": 0}, ValueError),
}


@pytest.mark.parametrize("message", BAD)
def test_wrong_arguments_are_named(message: str) -> None:
    s = subject("mamba2")
    given = arrays(draw(s.layer, case_of(s, 5)).keywords())
    change, kind = BAD[message]
    with pytest.raises(kind) as caught:
        jax.eval_shape(lambda: s.module.forward(**changed(given, **change)))
    assert message in str(caught.value)
    assert str(caught.value).startswith("mamba2: ")


NAMES = [
    {"gate": "jax", "key": "now", "query": "states", "let": "product", "state": "call", "output": "walk"},
    {"gate": "LAYER", "key": "jnp", "query": "chunks", "let": "precision", "state": "token", "output": "dtype"},
]


@pytest.mark.parametrize("names", NAMES)
def test_names_never_collide(names: dict[str, str]) -> None:
    """A spec may call its tensors what the module calls its own variables."""
    s = made(Source("names.ssd", COLLIDING.format(**names)))
    s.check(Case({"batch": 1, "time": 9, "head": 2, "chunk": 3, "token": 4}))


SHARED = """\
language 1
layer shared "Two axes of groups, and a layout of the caller's"

axes    b t h e g p n
groups  g shares h, e shares h

inputs
  v[b t e p]             : f32
  k[b t g n], q[b t h n] : like v
  f[b t h]               : f32

state   S[b h n p] : f32
        S[t] = sigmoid(f) * S[t-1] + outer(k, v)

output  y[b t h p] : like v
        y = S[t-1] . q

schedule
  layout v = b e t p
  layout y = b h t p
"""


def test_several_groups_and_layouts() -> None:
    """Heads that share two inputs in groups of different lengths are expanded; arrays are taken and given as laid out."""
    s = made(Source("shared.ssd", SHARED))
    s.check(Case({"b": 2, "t": 9, "h": 4, "e": 4, "g": 2, "p": 3, "n": 5}), chunk=4)
    s.check(replace(Case({"b": 1, "t": 4, "h": 4, "e": 1, "g": 2, "p": 3, "n": 5}), dtype="f64"), chunk=4)


FIXED = """\
language 1
layer fixed "A decay a channel that no token changes"

axes    b t h p n

inputs
  v[b t h p]             : f32
  k[b t h n], q[b t h n] : like v
  A[h n]                 : f32 < 0

state   S[b h p n] : f32
        S[t] = exp(A) * S[t-1] + outer(v, k)

output  y[b t h p] : like v
        y = S[t] . q
"""


def test_a_decay_of_channels_that_no_token_changes() -> None:
    """It has no tokens to be cut from, in either portable form."""
    s = made(Source("fixed.ssd", FIXED))
    s.check(case_of(s, 9), chunk=4)
    other = emit(s.plan, portable_only=True)
    checks = run_trial("portable", s.plan, load(other.name, package([other])), Trial("fixed", case_of(s, 70)))
    assert all(c.passed for c in checks), [str(c) for c in checks]
