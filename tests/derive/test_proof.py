"""A proof that cannot fail proves nothing: every field of a chunk form, altered, is refuted."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest

from ssdgen.derive import ProofError, chunk_form, prove, recurrence
from ssdgen.diagnostics import Source
from ssdgen.ir.chunkform import ChunkForm
from ssdgen.spec import builtin_specs, load_source, read_layer
from tests.derive.alterations import alterations

SEVERAL_OF_ALL = """
language 1
layer several "Reads of the state before, two decays, two terms, a normaliser, a gate"
axes b t h p n
inputs
  q[b t h n], k[b t h n] : f32
  v[b t h p], z[b t h p] : f32
  f[b t h], i[b t h] : f32
  r[b t h p] : f32 optional
state S[b h p n] : f32
      S[t] = sigmoid(f) * S[t-1] + i * outer(v, k) - sigmoid(f) * outer(z, q)
      N[b h n] : f32
      N[t] = (1 - sigmoid(i)) * N[t-1] + i * k
output y[b t h p] : f32
       y = (S[t-1] . q + S[t] . k) / max(abs(N[t-1] . q), 1)
       when r: y = y * silu(r)
schedule
  chunk = 64
  plan = three_kernel
"""


def form_of(name: str) -> ChunkForm:
    source = Source("several.ssd", SEVERAL_OF_ALL) if name == "several" else load_source(name)
    return chunk_form(recurrence(read_layer(source)))


@pytest.mark.parametrize("name", builtin_specs())
def test_every_built_in_spec_is_proved_within_a_second(name: str) -> None:
    form = form_of(name)
    prove(form)
    start = time.process_time()
    proof = prove(form)
    assert time.process_time() - start < 1
    assert str(proof).startswith(f"{name}: {len(proof.statements)} statements proved\n")


@pytest.mark.parametrize("name", ["mlstm", "mamba3", "gla", "several"])
def test_every_field_of_a_chunk_form_is_proved(name: str) -> None:
    form = form_of(name)
    survived = [what for what, altered in alterations(form) if statement_that_fails(altered) is None]
    assert not survived


def test_the_alterations_reach_every_field() -> None:
    altered = {what for what, _ in alterations(form_of("several"))}
    for path in (
        "decays.[1]kind",
        "weights.[0]value",
        "states.[1]terms.[0]column.axes",
        "scores.[0]at",
        "outputs.[0]gates",
    ):
        assert any(what.startswith(path) for what in altered), path


@pytest.mark.parametrize("name", ["linear_attention", "gla"])
def test_the_recurrence_that_is_shown_is_the_one_that_was_proved(name: str) -> None:
    form = form_of(name)
    altered = [(what, replace(form, recurrence=rec)) for what, rec in alterations(form.recurrence)]
    assert not [what for what, other in altered if statement_that_fails(other) is None]


@pytest.mark.parametrize("name", ["mamba3", "gla", "several"])
def test_a_wrong_derivation_is_refuted_by_mathematics_and_not_by_a_comparison(name: str) -> None:
    """Alter the Recurrence and derive the chunk form from it: both agree, and both are wrong."""
    form = form_of(name)
    survived = []
    for what, altered in alterations(form.recurrence):
        try:
            failed = statement_that_fails(chunk_form(altered))
        except KeyError:  # a name that leads nowhere
            continue
        if failed is None or "says the same" in failed:
            survived.append(what)
    assert not survived


def statement_that_fails(form: ChunkForm) -> str | None:
    try:
        prove(form)
    except ProofError as error:
        return error.statement
    return None


@pytest.mark.parametrize("name", ["mamba3", "several"])
def test_names_of_shared_things_are_free_as_long_as_they_agree(name: str) -> None:
    form = form_of(name)
    prove(renamed(form))


def renamed(form: ChunkForm) -> ChunkForm:
    decays = {d.name: f"a{i}" for i, d in enumerate(form.decays)}
    weights = {w.name: f"w{i}" for i, w in enumerate(form.weights)}
    scores = {s.name: f"g{i}" for i, s in enumerate(form.scores)}
    return replace(
        form,
        decays=tuple(replace(d, name=decays[d.name]) for d in form.decays),
        weights=tuple(replace(w, name=weights[w.name]) for w in form.weights),
        states=tuple(
            replace(s, decay=decays[s.decay], terms=tuple(replace(t, weight=weights[t.weight]) for t in s.terms))
            for s in form.states
        ),
        scores=tuple(
            replace(s, name=scores[s.name], decay=decays[s.decay], weight=weights[s.weight]) for s in form.scores
        ),
        reads=tuple(
            replace(
                r,
                decay=decays[r.decay],
                interactions=tuple(replace(i, score=scores[i.score]) for i in r.interactions),
            )
            for r in form.reads
        ),
    )


def test_what_failed_is_said() -> None:
    form = form_of("mamba2")
    decay = replace(form.decays[0], log2=form.weights[0].value)
    with pytest.raises(ProofError, match=re.escape("not proved: S[t] = 2^(step) S[t-1] + (step) (x) (x) (B)")):
        prove(replace(form, decays=(decay,)))
