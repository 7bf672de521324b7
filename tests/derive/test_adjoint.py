"""Which gradients are derived, how they print, and that their proof can fail: every field, altered, is refuted."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ssdgen.derive import ProofError, chunk_form, prove_adjoint, recurrence
from ssdgen.derive.adjoint import adjoint
from ssdgen.derive.adjoint_whole_prover import Whole
from ssdgen.diagnostics import Source
from ssdgen.ir.adjoint import Adjoint, Gradient
from ssdgen.spec import builtin_specs, load_source, read_layer
from tests.derive.alterations import alterations

GOLDEN = Path(__file__).parent / "golden"

LOOKING_BACK = """
language 1
layer looking_back "A lagged term, a group, lets, a product inside an output that has its axis, a constant weight"
axes b t h g p n
groups g shares h
inputs
  x[b t h p], u[b t h p] : f32
  B[b t g n] : f32
  A[h] : f32 < 0
  f[b t h] : f32
let rate = A * A
    step = softplus(f) * rate
    alike = x . u
state S[b h p n] : f32
      S[t] = exp(A * step) * S[t-1] + 0.5 * outer(x[t-1], B[t-1]) + step * alike * outer(u, B)
output y[b t h p] : f32
       y = (S[t] . B) * (x . u) + A * x
schedule
  chunk = 64
  plan = three_kernel
"""

TWO_DECAYS = """
language 1
layer two_decays "Two states that decay apart, one read before its token, one without rows, and a gate"
axes b t h p n
inputs
  q[b t h n], k[b t h n] : f32
  v[b t h p] : f32
  f[b t h], i[b t h] : f32
  r[b t h p] : f32 optional
state S[b h n p] : f32
      S[t] = sigmoid(f) * S[t-1] + i * outer(k, v)
      N[b h n] : f32
      N[t] = sigmoid(i) * N[t-1] - k
output y[b t h p] : f32
       y = (S[t-1] . q) * (N[t] . q)
       when r: y = y * r
schedule
  chunk = 64
  plan = three_kernel
"""

SPECS = {"two_decays": TWO_DECAYS, "looking_back": LOOKING_BACK}


def derived(name: str) -> Adjoint:
    source = Source(f"{name}.ssd", SPECS[name]) if name in SPECS else load_source(name)
    return adjoint(chunk_form(recurrence(read_layer(source))))


@pytest.mark.parametrize("name", [*builtin_specs(), *SPECS])
def test_how_it_prints(name: str, golden: Callable[[Path, str], None]) -> None:
    """Protects what kernels will be printed from, down to the order of terms."""
    golden(GOLDEN / f"adjoint_{name}.txt", f"{derived(name)}\n")


@pytest.mark.parametrize("name", [*builtin_specs(), *SPECS])
def test_every_adjoint_is_proved_within_a_few_seconds(name: str) -> None:
    """Protects the proof from becoming a thing one waits for."""
    gradients = derived(name)
    start = time.process_time()
    proof = prove_adjoint(gradients)
    assert time.process_time() - start < 4
    assert len(proof.statements) >= 2 + len(gradients.rows) + len(gradients.writes) + len(gradients.inputs)


def statement_that_fails(gradients: Adjoint) -> str | None:
    try:
        prove_adjoint(gradients)
    except ProofError as error:
        return error.statement
    return None


THE_SAME = re.compile(r".*= -max\(abs\(read_N\), 1\)")
"""What is no alteration: it stands under a square."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gla", "mlstm", "two_decays", "looking_back"])
def test_every_field_of_an_adjoint_is_proved(name: str) -> None:
    """Protects every printed field: a proof that cannot fail proves nothing."""
    survived = [what for what, altered in alterations(derived(name)) if statement_that_fails(altered) is None]
    assert [what for what in survived if not THE_SAME.fullmatch(what)] == []


def test_the_alterations_reach_every_field() -> None:
    """Protects the test above from an empty list."""
    altered = {what for name in SPECS for what, _ in alterations(derived(name))}
    for path in (
        "gates.[0]factor",
        "reads.[0]terms.[0]summed",
        "states.[0]reads.[0]",
        "scores.[0]parts.[0]row",
        "rows.[0]terms.[0]weight",
        "rows.[0]reads.[0]score",
        "writes.[0]terms.[0]state",
        "vectors.[0]at",
        "weights.[0]writes",
        "decays.[0]states",
        "lets.[0]of",
        "inputs.[0]terms.[0]ahead",
        "inputs.[0]terms.[0]when",
    ):
        assert any(what.startswith(path) for what in altered), path


def of_input(gradients: Adjoint, name: str) -> Gradient:
    return next(g for g in gradients.inputs if g.name == f"d_{name}")


def altered_input(gradients: Adjoint, name: str, **fields: Any) -> Adjoint:
    """The gradients with fields of the first contribution to an input replaced."""
    old = of_input(gradients, name)
    new = replace(old, terms=(replace(old.terms[0], **fields), *old.terms[1:]))
    return replace(gradients, inputs=tuple(new if g is old else g for g in gradients.inputs))


@pytest.mark.parametrize(
    ("name", "of", "fields"),
    [
        ("mamba2", "A", {"summed": ("b",)}),
        ("mamba2", "A", {"summed": ("t",)}),
        ("mamba2", "D", {"summed": ("b", "t", "n")}),
        ("mamba2", "B", {"summed": ()}),
        ("mamba2", "z", {"when": None}),
        ("mamba2", "x", {"when": "z"}),
        ("mamba3", "B", {"ahead": 0}),
        ("looking_back", "x", {"ahead": 1}),
    ],
)
def test_a_wrong_sum_token_or_condition_is_refuted_where_it_stands(name: str, of: str, fields: dict[str, Any]) -> None:
    """Protects the sums over batch, time and heads, and the tokens and the choices that a contribution is for."""
    failed = statement_that_fails(altered_input(derived(name), of, **fields))
    assert failed is not None
    assert failed.startswith(f"d_{of} is the gradient of {of}")


def test_the_proof_from_end_to_end_refutes_alone_what_other_statements_do() -> None:
    """Protects the last statement, which the others leave nothing to refute, from being one that cannot fail."""
    refuted = 0

    def fail(detail: str) -> NoReturn:
        raise ProofError("from end to end", detail)

    for _, altered in alterations(derived("linear_attention")):
        failed = statement_that_fails(altered)
        if failed and " is the gradient of " in failed:
            with pytest.raises(ProofError, match="from end to end"):
                Whole(altered, (), fail).prove()
            refuted += 1
    assert refuted > 30


def test_what_failed_is_said() -> None:
    gradients = derived("mamba2")
    wrong = replace(gradients.writes[0], scores=())
    with pytest.raises(ProofError, match=re.escape("not proved: d_write is the gradient of the column B times step")):
        prove_adjoint(replace(gradients, writes=(wrong,)))


def test_states_that_decay_alike_share_what_they_can() -> None:
    """Protects the sharing: a normaliser costs no product of its own."""
    gradients = derived("mlstm")
    assert (len(gradients.scores), len(gradients.writes), len(gradients.vectors), len(gradients.decays)) == (1, 1, 1, 1)
    assert [p.read for p in gradients.scores[0].parts] == ["read_C", "read_N"]


def test_what_depends_on_no_input_has_no_gradient() -> None:
    """Protects kernels from work that nobody asked for: a decay by the head's index, a weight by a size."""
    gradients = derived("retnet")
    assert (gradients.decays, gradients.weights) == ((), ())
    assert [g.name for g in derived("mamba2").inputs] == ["d_x", "d_dt", "d_A", "d_B", "d_C", "d_D", "d_dt_bias", "d_z"]


def test_names_of_inputs_come_first() -> None:
    """Protects a caller: the gradient of the let `write` is `d_write`, whatever else wants that name."""
    gradients = derived("mlstm")
    assert gradients.lets[0].name == "d_write"
    assert gradients.writes[0].name == "d_write_2"
