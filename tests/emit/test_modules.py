"""The modules in generated/ read as if written by hand, and names of a spec never collide with those of the code."""

from __future__ import annotations

import ast
from itertools import islice, product

import pytest
import torch

from ssdgen.derive import chunk_form, recurrence
from ssdgen.diagnostics import Source
from ssdgen.emit import emit
from ssdgen.emit.package import package
from ssdgen.ir.report import Check
from ssdgen.plan import Unsupported, plan
from ssdgen.plan.settings import configure
from ssdgen.resources import resource_dir
from ssdgen.run import steps
from ssdgen.run.cases import Trial
from ssdgen.run.inputs import Case
from ssdgen.run.load import load
from ssdgen.run.verify import run_trial, stepped
from ssdgen.spec import load_source, read_layer

WITH_KERNELS = ("mamba2", "state_space_duality", "retnet", "linear_attention", "simple_gla", "mlstm")
MODULE_LINES, KERNEL_LINES = 760, 108
"""A module holds one text of each kernel, in which optional inputs, packed sequences, shared products, initial states and
states between are flags: longer than one without options, and far shorter than the 2^5 copies it stands for. About 170 lines
of it are the steps: their kernel, two functions, the launch, the portable form; twelve are the operator of `forward`."""


def kernels(tree: ast.Module) -> list[ast.FunctionDef]:
    return [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.decorator_list]


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_measures_of_a_hand_written_module(name: str) -> None:
    """At most so many lines a module, and a kernel; every parameter is used, every assignment read, no value named twice."""
    text = (resource_dir("generated") / f"{name}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MODULE_LINES
    for kernel in kernels(ast.parse(text)):
        assert (kernel.end_lineno or 0) - kernel.lineno < KERNEL_LINES, kernel.name
        read = {n.id for n in ast.walk(kernel) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        written = {n.id for n in ast.walk(kernel) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        unused = ({a.arg for a in kernel.args.args} | written) - {"_"}
        assert not unused - read, f"{kernel.name}: {unused - read}"
        named: dict[str, str] = {}
        for node in ast.walk(kernel):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call | ast.BinOp | ast.UnaryOp):
                name_of_value = ast.unparse(node.targets[0])
                assert named.setdefault(ast.unparse(node.value), name_of_value) == name_of_value


@pytest.mark.parametrize("name", [*WITH_KERNELS, *(f"{n}_gradients" for n in WITH_KERNELS)])
def test_kernels_divide_by_reciprocals(name: str) -> None:
    """An exact division takes a dozen instructions and a branch an element: on an H200 those of shared scores were 8 % of a
    forward pass of 4 x 16384 tokens. What lacks axes of the quotient is inverted once, and the product is taken; a step
    divides numbers only."""
    tree = ast.parse((resource_dir("generated") / f"{name}.py").read_text(encoding="utf-8"))
    found = [
        k
        for k in kernels(tree)
        if "ct.kernel" in map(ast.unparse, k.decorator_list) and not k.name.startswith("token_step")
    ]
    divisions = [n for k in found for n in ast.walk(k) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Div)]
    assert [ast.unparse(n) for n in divisions if ast.unparse(n.left) != "1.0"] == []


def test_only_a_decay_that_varies_is_summed_by_a_kernel() -> None:
    """A constant decay has a closed form and no decay needs none: no `chunk_cumsum` is emitted for them."""
    launched = {
        n: [k.name for k in plan(chunk_form(recurrence(read_layer(load_source(n))))).kernels] for n in WITH_KERNELS
    }
    assert [n for n, names in launched.items() if "chunk_cumsum" in names] == [
        "mamba2",
        "state_space_duality",
        "simple_gla",
        "mlstm",
    ]


@pytest.mark.parametrize(("name", "reason"), [("gla", "key channels"), ("mamba3", "token before")])
def test_refused_until_its_own_issue(name: str, reason: str) -> None:
    planned = plan(chunk_form(recurrence(read_layer(load_source(name)))))
    with pytest.raises(Unsupported, match=reason):
        emit(planned)
    assert not planned.kernels
    assert "_portable(" in emit(planned, portable_only=True).text


def test_a_step_without_kernels_is_portable_or_says_why_not() -> None:
    """A decay over key channels is natural for one token; an input of the token before is in no state."""
    gla = plan(chunk_form(recurrence(read_layer(load_source("gla")))))
    assert gla.step.portable is not None
    assert not gla.step.kernels
    mamba3 = emit(plan(chunk_form(recurrence(read_layer(load_source("mamba3"))))), portable_only=True)
    module = load(mamba3.name, package([mamba3]))
    for function in (module.step, module.steps):
        with pytest.raises(NotImplementedError, match=r"mamba3: no steps are emitted for .*reads the token before"):
            function(torch.zeros(1))


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_a_module_says_which_variant_it_is(name: str) -> None:
    """`VARIANT` is what `--config` takes to emit the same text again; beside the digest it keys what a search has found."""
    form = chunk_form(recurrence(read_layer(load_source(name))))
    settings = {"plan": "three_kernel", "swap": "state,intra", "weighted": "column", "persistent": "yes"}
    module = emit(plan(form, configure(form, settings)))
    said = str(load(module.name, package([module])).VARIANT)
    assert said.startswith("plan=three_kernel swap=intra,state weighted=column persistent=yes")
    again = configure(form, dict(pair.split("=") for pair in said.split()))
    assert emit(plan(form, again)).text == module.text
    assert module.text.rstrip().splitlines()[-2].startswith("SPEC_DIGEST")


def test_emitting_twice_gives_the_same_text() -> None:
    form = chunk_form(recurrence(read_layer(load_source("mamba2"))))
    assert emit(plan(form)).text == emit(plan(form)).text


COLLIDING = """\
language 1
layer names "Names that Python, torch, cuTile and the emitted code want for themselves"

axes    batch time head chunk token

inputs
  lambda[batch time head chunk]   : bf16 | f32
  {gate}[batch time head]         : f32
  {key}[batch time head token]    : like lambda
  {query}[batch time head token]  : like lambda

let     {let} = sigmoid({gate})

state   {state}[batch head chunk token] : f32
        {state}[time] = {let} * {state}[time-1] + (1 - {let}) * outer(lambda, {key})

output  {output}[batch time head chunk] : like lambda
        {output} = {state}[time] . {query}
"""
NAMES = [
    {"gate": "config", "key": "range", "query": "ct", "let": "torch", "state": "first", "output": "rows"},
    {"gate": "CHUNK", "key": "TILE_TOKEN", "query": "SCORES", "let": "head_tile", "state": "x", "output": "length"},
    {"gate": "decay_sum", "key": "column", "query": "causal", "let": "score", "state": "carry", "output": "vector"},
    {"gate": "dot", "key": "load", "query": "softplus_", "let": "sigmoid_", "state": "LOG2E", "output": "forward"},
    {"gate": "whole", "key": "WHOLE", "query": "state_indices", "let": "steps", "state": "STEP", "output": "into"},
    {"gate": "out", "key": "before", "query": "_step", "let": "slot", "state": "STEP_before", "output": "token_step"},
    {"gate": "states_every", "key": "every", "query": "S_states", "let": "first", "state": "S", "output": "kept"},
    {"gate": "steady", "key": "STEADY", "query": "later", "let": "into", "state": "S", "output": "await_previous"},
    {"gate": "float", "key": "S_entry", "query": "lambda_", "let": "step", "state": "S", "output": "lambda_tile"},
]


@pytest.mark.parametrize(("names", "dtype"), list(product(NAMES, ["bf16", "f32"])))
def test_names_never_collide(names: dict[str, str], dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A spec may call its tensors what it likes; the printer renames, and the module still computes what the spec says.

    Of steps, each kind of call once: a name is what it is in every trial.
    """
    of_steps = steps.step_trials
    monkeypatch.setattr(steps, "step_trials", lambda layer, gate: islice(of_steps(layer, gate), 1))
    monkeypatch.setattr(steps, "NAMES", {torch.float32: "f32"})
    layer = read_layer(Source("names.ssd", COLLIDING.format(**names)))
    module = emit(plan(chunk_form(recurrence(layer))))
    sizes = {"batch": 1, "time": 70, "head": 2, "chunk": 33, "token": 40}
    trial = Trial("names", Case(sizes, dtype="bf16" if dtype == "bf16" else "f32"))
    imported = load(module.name, package([module]))
    checks = []
    for gate in ("portable", "emulation"):
        checks += run_trial(gate, module.plan, imported, trial)
        checks += stepped(gate, module.plan, imported) if dtype == "f32" else []
    assert not [str(c) for c in checks if not c.passed]


STATE_NAMES = COLLIDING.replace("{gate}[batch", "S0[batch").replace("{gate}", "S0")


DERIVED = """\
language 1
layer derived "A weight called like a buffer that is made from the name of a decay or a state"

axes    b t h p n

inputs
  g[b t h], f[b t h]     : f32
  v[b t h p], k[b t h n] : bf16 | f32

let     {name} = g^2

state   S[b h p n] : f32
        S[t] = sigmoid(f) * S[t-1] + {name} * outer(v, k)

output  y[b t h p] : like v
        y = S[t] . k + S[t-1] . k
"""


def checks_of_shared_scores(value: str, share: int) -> list[Check]:
    """The checks of an output of DERIVED whose heads share `k`, from `share` heads a group on."""
    text = DERIVED.format(name="w").replace("axes    b t h p n\n", "axes    b t h m p n\ngroups  m shares h\n")
    text = text.replace("k[b t h n]", "k[b t m n]").replace("S[t] . k + S[t-1] . k", value)
    module = emit(plan(chunk_form(recurrence(read_layer(Source("derived.ssd", text))))))
    assert "shared_scores" in module.text
    sizes = {"b": 1, "t": 140, "h": 4, "m": 2, "p": 33, "n": 40}
    exact: dict[str, int | str] = {k.name: "tf32x3" for k in module.plan.knobs if k.kind == "precision"}
    trial = Trial("derived", Case(sizes), {**exact, "share_scores_from": share})
    return run_trial("emulation", module.plan, load(module.name, package([module])), trial)


@pytest.mark.parametrize("share", [0, 1])
def test_a_shared_product_may_be_read_in_two_ways(share: int) -> None:
    """By tokens that see themselves and by others that do not: shared scores hold what the first see."""
    checks = checks_of_shared_scores("S[t] . k + S[t-1] . k", share)
    assert not [str(c) for c in checks if not c.passed]


@pytest.mark.parametrize(
    "value", ["S[t] . k", "S[t] . k + w * v", "v - S[t] . k", "tanh(S[t] . k)", "S[t] . k + (S[t] . k)^2"]
)
def test_what_a_token_reads_of_itself(value: str) -> None:
    """Apart from shared scores it is in every output: with a term that it joins, of another form, or that reads twice."""
    assert not [str(c) for c in checks_of_shared_scores(value, 1) if not c.passed]


@pytest.mark.parametrize("plan_name", ["three_kernel", "segmented"])
@pytest.mark.parametrize("name", ["decay_sum", "decay_before", "S_entry", "S_part", "S_left", "S_final", "decay_sum_"])
def test_a_weight_may_be_called_like_a_buffer(name: str, plan_name: str) -> None:
    """Two buffers of one name would be one buffer, and the result silently wrong."""
    form = chunk_form(recurrence(read_layer(Source("derived.ssd", DERIVED.format(name=name)))))
    module = emit(plan(form, configure(form, {"plan": plan_name})))
    trial = Trial("derived", Case({"b": 1, "t": 140, "h": 2, "p": 33, "n": 40}))
    imported = load(module.name, package([module]))
    checks = [c for g in ("portable", "emulation") for c in run_trial(g, module.plan, imported, trial)]
    assert not [str(c) for c in checks if not c.passed]


@pytest.mark.parametrize("other", ["_rt", "_portable", "S_final"])
def test_an_input_may_be_called_like_an_initial_state(other: str) -> None:
    """The gate `S0` beside the state `S`: the caller's argument for the initial state gets an underscore."""
    text = STATE_NAMES.format(key=other, query="q", let="keep", state="S", output="y")
    module = emit(plan(chunk_form(recurrence(read_layer(Source("names.ssd", text))))))
    trial = Trial("names", Case({"batch": 1, "time": 70, "head": 2, "chunk": 33, "token": 40}))
    checks = [
        c
        for g in ("portable", "emulation")
        for c in run_trial(g, module.plan, load(module.name, package([module])), trial)
    ]
    assert not [str(c) for c in checks if not c.passed]
