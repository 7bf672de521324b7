"""What is derived from a spec's equations, and what is refused where."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from ssdgen.derive import chunk_form, recurrence
from ssdgen.derive.recurrence import LOG2E
from ssdgen.diagnostics import Source, SpecError
from ssdgen.ir.expr import Apply, Const, Contract, Expr, Ref
from ssdgen.ir.recurrence import Recurrence
from ssdgen.spec import load_source, read_layer

HEAD = """language 1
layer tried "tried"
axes b t h p n
inputs
"""
TAIL = """
schedule
  chunk = 64
  plan = three_kernel
"""
INPUTS = {
    "x": "  x[b t h p] : f32",
    "k": "  k[b t h n] : f32",
    "q": "  q[b t h n] : f32",
    "f": "  f[b t h] : f32",
    "g": "  g[b t h] : f32 <= 0",
    "gp": "  gp[b t h p] : f32 <= 0",
    "gn": "  gn[b t h n] : f32 <= 0",
    "A": "  A[h] : f32 < 0",
    "M": "  M[h p n] : f32",
}


def derive(inputs: str, update: str, output: str = "S[t] . q", lets: str = "", axes: str = "y[b t h p]") -> Recurrence:
    declared = "\n".join(INPUTS[name] for name in inputs.split())
    state = f"state S[b h p n] : f32\n      S[t] = {update}"
    text = f"{HEAD}{declared}\n{lets}\n{state}\noutput {axes} : f32\n       y = {output}\n{TAIL}"
    return recurrence(read_layer(Source("tried.ssd", text)))


@pytest.mark.parametrize(
    ("inputs", "decay", "kind", "log2"),
    [
        ("", "", "none", "0"),
        ("", "0.9 *", "constant", "log2(0.9)"),
        ("", "0.25 *", "constant", "-2"),
        ("", "(1 - 2^(-5 - index(h))) *", "constant", "log1p(-exp2(-5 - index(h))) * 1.4426950408889634"),
        ("A", "exp(A) *", "constant", "A * LOG2E"),
        ("g", "exp(g) *", "token", "g * LOG2E"),
        ("g", "2^g *", "token", "g"),
        ("f", "sigmoid(f) *", "token", "logsigmoid(f) * LOG2E"),
        ("f", "(1 - sigmoid(f)) *", "token", "logsigmoid(-f) * LOG2E"),
        ("f", "1 / (1 + exp(f)) *", "token", "-(softplus(f) * LOG2E)"),
        ("f g", "sigmoid(f) * exp(g) *", "token", "logsigmoid(f) * LOG2E + g * LOG2E"),
        ("f", "sqrt(sigmoid(f)) *", "token", "0.5 * logsigmoid(f) * LOG2E"),
        ("g", "exp(g)^3 *", "token", "3 * g * LOG2E"),
        ("gn", "exp(gn) *", "channel", "gn * LOG2E"),
    ],
)
def test_decays_are_taken_to_log_space_and_their_kind_is_read_off_their_axes(
    inputs: str, decay: str, kind: str, log2: str
) -> None:
    transition = derive(f"x k q {inputs}", f"{decay} S[t-1] + outer(x, k)").states[0].transition
    assert (transition.kind, str(transition.log2_decay)) == (kind, log2.replace("LOG2E", str(LOG2E)))


def test_lets_keep_their_names_and_are_opened_only_for_a_logarithm() -> None:
    rec = derive(
        "x k q f A", "keep * S[t-1] + step * outer(x, k)", lets="let step = softplus(f)\n    keep = exp(A * step)"
    )
    assert str(rec.states[0].transition.log2_decay) == f"A * step * {LOG2E}"
    assert str(rec.states[0].terms[0].weight) == "step"


@pytest.mark.parametrize(
    ("inputs", "written", "terms"),
    [
        ("", "outer(x, k)", ["(1) * row(x) * column(k)"]),
        ("f", "f * x * k", ["(f) * row(x) * column(k)"]),
        ("f", "-f * outer(x, k) / 2", ["(-f / 2) * row(x) * column(k)"]),
        ("", "outer(x / size(p), k / sqrt(size(n)))", ["(1 / size(p) / sqrt(size(n))) * row(x) * column(k)"]),
        ("f", "(f + 1) * outer(x, k)", ["(f + 1) * row(x) * column(k)"]),
        ("f", "f * (outer(x, k) - outer(x, q))", ["(f) * row(x) * column(k)", "(-f) * row(x) * column(q)"]),
        ("", "outer(x, k + q)", ["(1) * row(x) * column(k + q)"]),
        ("", "outer(silu(x), tanh(k))", ["(1) * row(silu(x)) * column(tanh(k))"]),
        ("f", "f * outer(x[t-1], k[t-1])", ["(f) * row[t-1](x) * column[t-1](k)"]),
        ("", "outer(x, k[t-1])", ["(1) * row(x) * column(k[t-1])"]),
        ("", "outer(exp(x[t-1]), exp(k[t-1]))", ["(1) * row(exp(x[t-1])) * column(exp(k[t-1]))"]),
    ],
)
def test_inputs_are_factored_into_weight_row_and_column(inputs: str, written: str, terms: list[str]) -> None:
    state = derive(f"x k q {inputs}", f"S[t-1] + {written}").states[0]
    assert [str(t) for t in state.terms] == terms


def test_the_column_axis_is_the_one_that_reads_contract() -> None:
    rec = derive("x k", "S[t-1] + outer(x, k)", output="S[t] . x", axes="y[b t h n]")
    assert (rec.states[0].row_axis, rec.states[0].column_axis) == ("n", "p")


def test_equal_reads_are_read_once() -> None:
    rec = derive("x k q", "S[t-1] + outer(x, k)", output="(S[t] . q) * silu(S[t] . q) + S[t-1] . q")
    assert [str(r.name) + str(r.at) for r in rec.readouts] == ["read_S0", "read_S_2-1"]
    assert str(rec.outputs[0].value) == "read_S * silu(read_S) + read_S_2"


@pytest.mark.parametrize(
    ("code", "where", "inputs", "update", "output"),
    [
        ("D001", "tanh(outer(x, k))", "x k q", "S[t-1] + tanh(outer(x, k))", "S[t] . q"),
        ("D001", "M", "x k q M", "S[t-1] + outer(x, k) + M", "S[t] . q"),
        ("D002", "exp(gp)", "x k q gp", "exp(gp) * S[t-1] + outer(x, k)", "S[t] . q"),
        ("D003", "S[t] . x", "x k q", "S[t-1] + outer(x, k)", "(S[t] . q) * ((S[t] . x) . k)"),
        ("D005", "M", "x k M", "S[t-1] + outer(x, k)", "S[t] . M"),
        ("D006", "S[b h p n]", "x k q", "0.5 * S[t-1]", "(S[t] . q) * (q . k) + x"),
    ],
)
def test_what_has_no_chunked_form_is_refused_at_its_term(
    code: str, where: str, inputs: str, update: str, output: str
) -> None:
    with pytest.raises(SpecError) as caught:
        derive(inputs, update, output)
    [diagnostic] = caught.value.diagnostics
    assert diagnostic.code == code
    line = caught.value.source.line(diagnostic.span.line)
    assert line[diagnostic.span.column - 1 : diagnostic.span.end_column - 1] == where


X, K, Q = Ref("x", ("b", "h", "p"), True), Ref("k", ("b", "h", "n"), True), Ref("q", ("b", "h", "n"), True)
S = Ref("S", ("b", "h", "p", "n"), True)


@pytest.mark.parametrize(
    ("code", "output", "added"),
    [
        ("D004", Apply("tanh", (S,)), Const(0)),
        ("D004", Contract(S, Apply("mul", (Q, Contract(S, Q, "n"))), "n"), Const(0)),
        ("D007", Apply("mul", (Contract(S, Q, "n"), Contract(X, X, "h"))), Const(0)),
        ("D008", Contract(S, Q, "n"), Apply("mul", (Contract(S, Q, "n"), K))),
    ],
)
def test_a_layer_that_no_spec_could_say_is_refused_too(code: str, output: Expr, added: Expr) -> None:
    """The derivation relies on what `read_layer` checks, and says so when it is not the case."""
    layer = derive("x k q", "S[t-1] + outer(x, k)").layer
    state = replace(layer.states[0], input=Apply("add", (layer.states[0].input, added)))
    wrong = replace(layer, states=(state,), outputs=(replace(layer.outputs[0], value=output),))
    with pytest.raises(SpecError) as caught:
        recurrence(wrong)
    assert [d.code for d in caught.value.diagnostics] == [code]


def test_states_that_decay_alike_share_a_sum_and_a_normaliser_shares_the_scores() -> None:
    form = chunk_form(recurrence(read_layer(load_source("mlstm"))))
    assert ([d.name for d in form.decays], [w.name for w in form.weights]) == (["decay"], ["write"])
    assert [s.name for s in form.scores] == ["score"]
    assert [i.score for r in form.reads for i in r.interactions] == ["score", "score"]


def test_a_chunk_form_prints_its_jump_formula() -> None:
    form = chunk_form(recurrence(read_layer(load_source("mamba2"))))
    assert (
        str(form)
        == """\
mamba2: a chunk of L tokens that starts from S

decay[i] = A * step * 1.4426950408889634    log2, one a token and head
s[i] = decay[0] + ... + decay[i]

S_end = 2^s[L-1] S
  + sum_j 2^(s[L-1] - s[j]) step[j] x[j] (x) B[j]
score[i,j] = (C[i] . B[j]) 2^(s[i] - s[j]) step[j]    j <= i
read_S[i] = 2^s[i] S . C[i]
  + sum_j score[i,j] x[j]

y = read_S + D * x
  when z: y = y * silu(z)

one token:
S = 2^(A * step * 1.4426950408889634) S + step x (x) B
read_S = S . C"""
    )


def test_deriving_does_not_load_sympy() -> None:
    """`ssdgen check` derives, and must start fast."""
    program = """
import sys
from ssdgen.derive import chunk_form, prove, recurrence
from ssdgen.spec import load_source, read_layer
chunk_form(recurrence(read_layer(load_source("mamba2"))))
assert "sympy" not in sys.modules and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
