"""Random recurrences of the language: the chunk form, proved, computes what the token loop computes."""

from __future__ import annotations

import re

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdgen.derive import chunk_form, prove, recurrence
from ssdgen.diagnostics import Source
from ssdgen.ir.layer import Layer
from ssdgen.run.reference import reference
from ssdgen.spec import read_layer
from tests.derive.evaluate import evaluate

DECAYS = [
    "",
    "0.9 *",
    "0.5 *",
    "(1 - 2^(-2 - index(h))) *",
    "exp(A) *",
    "exp(g) *",
    "exp(A * softplus(f)) *",
    "sigmoid(f) *",
    "(1 - sigmoid(f)) *",
    "sigmoid(f) * exp(g) *",
    "sqrt(sigmoid(f)) *",
    "exp(g)^2 *",
    "1 / (1 + exp(f)) *",
    "2^g *",
    "keep *",
    "exp(gc) *",
    "exp(gc + g) *",
    "sigmoid(f) * exp(gc) *",
    "exp(Ac) *",
]
WEIGHTS = ["", "w *", "step *", "softplus(f) *", "0.5 *", "-", "(1 - w) * step *", "w^2 *", "A *"]
ROWS = ["x", "silu(x)", "x / size(p)", "(x + u)", "scaled"]
COLUMNS = ["B", "B / sqrt(size(n))", "tanh(B)", "(2 * B)", "C"]
VECTORS = ["C", "B", "(C / sqrt(size(n)))"]
INPUTS = {
    "x": "x[b t h p] : f32",
    "u": "u[b t h p] : f32",
    "B": "B[b t {group} n] : f32",
    "C": "C[b t {group} n] : f32",
    "f": "f[b t h] : f32",
    "w": "w[b t h] : f32",
    "g": "g[b t h] : f32 <= 0",
    "gc": "gc[b t h n] : f32 <= 0",
    "A": "A[h] : f32 < 0",
    "Ac": "Ac[h n] : f32 < 0",
    "D": "D[h] or D[h p] : f32 = 0",
    "z": "z[b t h p] : f32 optional",
}
LETS = {"step": "softplus(f + A)", "keep": "exp(A * step)", "scaled": "x * w"}


@st.composite
def inputs_of_a_state(draw: st.DrawFn, vector_state: bool) -> str:
    terms = []
    for _ in range(draw(st.integers(1, 3))):
        weight = draw(st.sampled_from(WEIGHTS))
        lagged = draw(st.integers(0, 3)) == 0
        row, column = ("x[t-1]", "B[t-1]") if lagged else (draw(st.sampled_from(ROWS)), draw(st.sampled_from(COLUMNS)))
        terms.append(f"{weight} {column}" if vector_state else f"{weight} outer({row}, {column})")
    return " + ".join(f"({t})" for t in terms)


@st.composite
def specs(draw: st.DrawFn) -> str:
    order = draw(st.sampled_from(["p n", "n p"]))
    decay = draw(st.sampled_from(DECAYS))
    equations = [f"state S[b h {order}] : f32", f"      S[t] = {decay} S[t-1] + {draw(inputs_of_a_state(False))}", ""]
    reads = [f"(S[t{draw(st.sampled_from(['', '-1']))}] . {draw(st.sampled_from(VECTORS))})"]
    if draw(st.booleans()):
        reads.append(f"(S[t{draw(st.sampled_from(['', '-1']))}] . {draw(st.sampled_from(VECTORS))})")
    value = " + ".join(reads)
    if draw(st.booleans()):
        other = decay if draw(st.booleans()) else draw(st.sampled_from(DECAYS))
        equations += ["      N[b h n] : f32", f"      N[t] = {other} N[t-1] + {draw(inputs_of_a_state(True))}", ""]
        value = f"({value}) / max(abs(N[t] . {draw(st.sampled_from(VECTORS))}), 1)"
    equations += ["output y[b t h p] : f32", f"       y = {value} + D * x"]
    if draw(st.booleans()):
        equations.append("       when z: y = y * silu(z)")
    return declared("\n".join(equations), draw(st.sampled_from(["h", "g"])))


def declared(equations: str, group: str) -> str:
    """A spec of `equations` that declares what they use and no more."""
    used = names_in(equations)
    for name in reversed(LETS):
        used |= names_in(LETS[name]) if name in used else set()
    grouped = group == "g" and used & {"B", "C"}
    lines = ["language 1", 'layer drawn "drawn"', f"axes b t h {'g ' if grouped else ''}p n"]
    lines += ["groups g shares h"] if grouped else []
    lines += ["inputs", *(f"  {text.format(group=group)}" for name, text in INPUTS.items() if name in used)]
    lines += [f"let {name} = {value}" for name, value in LETS.items() if name in used]
    return "\n".join([*lines, equations, "schedule", "  chunk = 64", "  plan = three_kernel", ""])


def names_in(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z_]\w*", text))


def random_inputs(layer: Layer, tokens: int) -> dict[str, torch.Tensor | None]:
    sizes = {"b": 2, "t": tokens, "h": 4, "g": 2, "p": 3, "n": 5}
    tensors: dict[str, torch.Tensor | None] = {}
    for t in layer.inputs:
        value = torch.randn([sizes[a] for a in t.axes], dtype=torch.float64)
        tensors[t.name] = -value.abs() if t.range.high <= 0 else value
    return tensors


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm().clamp_min(1e-300)) if expected.numel() else 0.0


@settings(max_examples=40, deadline=None)
@given(specs(), st.integers(0, 11), st.integers(1, 6), st.integers(0, 1000))
def test_the_chunk_form_is_proved_and_computes_what_the_token_loop_does(
    text: str, tokens: int, chunk: int, seed: int
) -> None:
    layer = read_layer(Source("drawn.ssd", text))
    form = chunk_form(recurrence(layer))
    prove(form)
    torch.manual_seed(seed)
    tensors = random_inputs(layer, tokens)
    sizes = {"b": 2, "h": 4, "p": 3, "n": 5}
    states = {s.name: torch.randn([sizes[a] for a in s.axes], dtype=torch.float64) for s in layer.states}
    expected, finals = reference(layer, tensors, {}, states)
    got, jumped = evaluate(form, tensors, states, chunk)
    for name in expected:
        assert got[name].shape == expected[name].shape
        assert relative_error(got[name], expected[name]) < 1e-10, f"{name} of\n{text}"
    for name in finals:
        assert relative_error(jumped[name], finals[name]) < 1e-10, f"{name} of\n{text}"
