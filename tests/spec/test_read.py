"""What a right spec means: roles of axes, resolved references, bounds, the filled-in schedule."""

from __future__ import annotations

import keyword
import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ssdgen.diagnostics import NOWHERE, Source, SpecError
from ssdgen.ir.constants import evaluate
from ssdgen.ir.expr import OPS, Apply, Const, Contract, Expr, Index, Ref, Size, walk
from ssdgen.ir.layer import INFINITY, Group, Interval, Layer
from ssdgen.ir.schedule import Choice, Layout, Schedule
from ssdgen.spec import builtin_specs, load_source, read_layer

TINY = """\
language 1
layer tiny "A spec for tests"
axes b t h p n
inputs
  x[b t h p] : f32
  a[b t h] : f32 in (0, 1]
  B[b t h n], C[b t h n] : f32
state
  S[b h p n] : f32
  S[t] = a * S[t-1] + outer(x, B)
output
  y[b t h p] : like x
  y = S[t] . C
"""

SKETCH = """\
language 1
layer mamba2 "Mamba-2 state space duality (Dao and Gu 2024, arXiv 2405.21060)"

axes    b t h g p n                  # batch, time, head, group, head channel, state channel
groups  g shares h                   # heads of one group share B and C
sizes   p = 64, n = 128              # what is compiled ahead of time and tuned; other sizes compile on first use

inputs
  x[b t h p]          : bf16 | f16 | f32
  dt[b t h]           : f32
  A[h]                : f32 < 0
  B[b t g n], C[b t g n] : like x
  D[h] or D[h p]      : f32 = 0      # a neutral default: absent means 0
  dt_bias[h]          : f32 = 0
  z[b t h p]          : like x optional
  param dt_min = 0, dt_max = inf     # run-time scalars

let     step = clamp(softplus(dt + dt_bias), dt_min, dt_max)

state   S[b h p n] : f32
        S[t] = exp(A * step) * S[t-1] + step * outer(x, B)

output  y[b t h p] : like x
        y = S[t] . C + D * x
        when z: y = y * silu(z)      # present or absent: two named kernels

schedule
  chunk  = 64 | 128
  mma    = scores: bf16, carried: bf16, intra: tf32 | bf16, state: bf16
  layout x = b t h p                 # order in memory of the tensors that callers pass
  internal dt = b h t                # transposed copies that kernels make for TMA
  swap   = carried, intra            # operand swapping; a default for each architecture
  latency x = 3 | 5, B = 3 | 5
  plan   = three_kernel | segmented | single_walk
"""


def read(text: str) -> Layer:
    return read_layer(Source("test.ssd", text))


def test_the_sketch_of_the_design() -> None:
    """The first spec that anyone wrote down stays right, comments included."""
    layer = read(SKETCH)
    assert (layer.name, layer.batch, layer.time, layer.head) == ("mamba2", "b", "t", "h")
    assert layer.title.startswith("Mamba-2 state space duality")
    assert layer.groups == (Group("g", "h"),)
    assert (layer.size("p"), layer.size("n"), layer.size("h")) == (64, 128, None)
    assert [t.name for t in layer.inputs] == ["x", "dt", "A", "B", "C", "D", "dt_bias", "z"]
    assert [t.name for t in layer.inputs if t.required] == ["x", "dt", "A", "B", "C"]
    assert layer.tensor("A").range == Interval(high=0.0, high_open=True)
    assert (layer.tensor("B").like, layer.tensor("B").dtypes) == ("x", ("bf16", "f16", "f32"))
    assert (layer.tensor("D").axes, layer.tensor("D").narrower, layer.tensor("D").default) == (
        ("h", "p"),
        (("h",),),
        0.0,
    )
    assert layer.tensor("z").optional
    assert [(p.name, p.default, str(p.range)) for p in layer.params] == [
        ("dt_min", 0.0, "[0, inf]"),
        ("dt_max", INFINITY, "[0, inf]"),
    ]
    (state,) = layer.states
    assert str(state.decay) == "exp(A * step)"
    assert str(state.input) == "step * x * B"
    (output,) = layer.outputs
    assert isinstance(output.value, Apply)
    assert output.value.args[0] == Contract(Ref("S", ("b", "h", "p", "n"), True), Ref("C", ("b", "h", "n"), True), "n")
    assert [(g.tensor, str(g.value)) for g in output.gates] == [("z", "y * silu(z)")]


def test_references_carry_axes_without_time_and_groups() -> None:
    by_name = {e.name: e for s in read(SKETCH).states for e in walk(s.update) if isinstance(e, Ref)}
    assert by_name["B"] == Ref("B", ("b", "h", "n"), True)
    assert by_name["A"] == Ref("A", ("h",), False)
    assert by_name["step"] == Ref("step", ("b", "h"), True)
    assert by_name["S"] == Ref("S", ("b", "h", "p", "n"), True, 1)


def test_an_output_in_its_gate_is_a_reference_without_time() -> None:
    (gate,) = read(SKETCH).outputs[0].gates
    assert Ref("y", ("b", "h", "p"), True) in list(walk(gate.value))


def test_the_schedule_of_the_sketch() -> None:
    schedule = read(SKETCH).schedule
    assert schedule.chunk == (64, 128)
    assert schedule.layouts == (Layout("x", ("b", "t", "h", "p")),)
    assert schedule.internals == (Layout("dt", ("b", "h", "t")),)
    assert schedule.swap == ("carried", "intra")
    assert schedule.latency == (Choice("x", (3, 5)), Choice("B", (3, 5)))
    assert schedule.plan == ("three_kernel", "segmented", "single_walk")
    choices = {(m.dtype, m.product): m.precisions for m in schedule.mma}
    assert len(choices) == 12
    assert choices["bf16", "intra"] == ("tf32", "bf16")
    assert choices["f32", "intra"] == ("tf32",)
    assert choices["f16", "scores"] == ("tf32",)


def test_precisions_of_a_dtype_override_what_follows_from_bf16() -> None:
    text = TINY + "schedule\n  mma = state: tf32x3\n  mma f32 = scores: tf32x3 | tf32\n"
    choices = {(m.dtype, m.product): m.precisions for m in read(text).schedule.mma}
    assert choices["f32", "scores"] == ("tf32x3", "tf32")
    assert choices["f16", "scores"] == ("tf32",)
    assert choices["bf16", "scores"] == ("bf16",)
    assert choices["f32", "state"] == ("tf32x3",)


EVERY_KNOB = """\
schedule
  swap = none
  weighted = column | row
  latency a = 2, scores = 2 | 4
  state_latency a = 1
  occupancy compute_out = 0 | 2
  warps compute_out = 4 | 8, group_scores = 0
  share_scores_from = 4 | 0 | 1024
  segments = 0 | 8
  persistent = no | yes
  plan = segmented | three_kernel
"""


def test_every_knob_can_be_declared() -> None:
    schedule = read(TINY + EVERY_KNOB).schedule
    assert schedule.swap == ()
    assert schedule.weighted == ("column", "row")
    assert schedule.latency == (Choice("a", (2,)), Choice("scores", (2, 4)))
    assert schedule.state_latency == (Choice("a", (1,)),)
    assert schedule.occupancy == (Choice("compute_out", (0, 2)),)
    assert schedule.warps == (Choice("compute_out", (4, 8)), Choice("group_scores", (0,)))
    assert schedule.share_scores_from == (4, 0, 1024)
    assert schedule.segments == (0, 8)
    assert schedule.persistent == (False, True)
    assert schedule.plan == ("segmented", "three_kernel")


def test_no_schedule_is_the_default_one() -> None:
    schedule = read(TINY).schedule
    assert schedule == Schedule(mma=schedule.mma)
    assert len(schedule.mma) == 12


def test_axes_have_names_of_ones_own() -> None:
    axes = {"b": "batch", "t": "time", "h": "head", "p": "value", "n": "key"}
    text = TINY.replace("axes b t h p n", "axes batch time head value key")
    text = re.sub(r"\[([a-z ]+)\]", lambda m: "[" + " ".join(axes[a] for a in m[1].split()) + "]", text)
    text = text.replace("[t-1]", "[time-1]")
    layer = read(text)
    assert (layer.batch, layer.time, layer.head) == ("batch", "time", "head")
    assert "S[time-1]" in str(layer)


@pytest.mark.parametrize(
    "name", [*keyword.kwlist, "T", "b", "ct", "torch", "self", "S0", "print", "_", "x_", "state", "let", "axes"]
)
def test_any_word_may_name_a_tensor(name: str) -> None:
    """The printer renames; a spec's author need not know Python, cuTile or the emitted code."""
    if name in ("or", "in"):
        with pytest.raises(SpecError):
            read(TINY.replace("a[b t h]", f"{name}[b t h]").replace("a * S", f"{name} * S"))
        return
    layer = read(TINY.replace("a[b t h]", f"{name}[b t h]").replace("a * S", f"{name} * S"))
    assert layer.inputs[1].name == name
    assert layer.states[0].decay == Ref(name, ("b", "h"), True)


def test_numbers_keep_their_kind() -> None:
    layer = read(TINY.replace("a * S", "a * (1 - 0.5) * 1e-3 / 1 * S"))
    assert [c.value for c in walk(layer.states[0].decay) if isinstance(c, Const)] == [1, 0.5, 0.001, 1]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("a^2", Apply("pow", (Ref("a", ("b", "h"), True), Const(2)))),
        ("a^-(1/2)", Apply("pow", (Ref("a", ("b", "h"), True), Const(-0.5)))),
        ("2^(-a)", Apply("exp2", (Apply("neg", (Ref("a", ("b", "h"), True),)),))),
        ("-a^2", Apply("neg", (Apply("pow", (Ref("a", ("b", "h"), True), Const(2))),))),
        ("rsqrt(size(n))", Apply("div", (Const(1), Apply("sqrt", (Size("n"),))))),
        ("index(h)", Index("h")),
        ("a - a - a", Apply("sub", (Apply("sub", (Ref("a", ("b", "h"), True),) * 2), Ref("a", ("b", "h"), True)))),
        (
            "B . C * a",
            Apply(
                "mul",
                (
                    Contract(Ref("B", ("b", "h", "n"), True), Ref("C", ("b", "h", "n"), True), "n"),
                    Ref("a", ("b", "h"), True),
                ),
            ),
        ),
    ],
)
def test_how_an_expression_is_read(written: str, meant: Expr) -> None:
    layer = read(TINY.replace("state\n", f"let u = {written}\nstate\n").replace("outer(x, B)", "u * outer(x, B)"))
    assert layer.lets[0].value == meant


def test_a_state_may_stand_on_either_side_of_its_read() -> None:
    one, other = read(TINY.replace("S[t] . C", "C . S[t]")), read(TINY)
    assert one.outputs == other.outputs


def test_lagged_inputs_and_reads_before_the_token() -> None:
    layer = read(TINY.replace("outer(x, B)", "outer(x[t-1], B[t-1])").replace("S[t] . C", "S[t-1] . C"))
    assert str(layer.states[0].input) == "x[t-1] * B[t-1]"
    assert Ref("S", ("b", "h", "p", "n"), True, 1) in list(walk(layer.outputs[0].value))


def test_a_lagged_decay_is_zero_before_the_first_token() -> None:
    with pytest.raises(SpecError, match="not provably above 0"):
        read(TINY.replace("a * S", "a[t-1] * S"))


@pytest.mark.parametrize(
    ("declaration", "interval"),
    [
        ("param k = 1", "[0, inf]"),
        ("param k = -1", "[-inf, 0]"),
        ("param k : f32 = 0", "[-inf, inf]"),
        ("param k : f32 > 0 = 1", "(0, inf]"),
        ("param k : f32 in [-1, inf) = 1", "[-1, inf)"),
    ],
)
def test_ranges_of_params(declaration: str, interval: str) -> None:
    text = TINY.replace("state\n", f"inputs {declaration}\nstate\n").replace("outer(x, B)", "k * outer(x, B)")
    assert str(read(text).params[0].range) == interval


@pytest.mark.parametrize("name", builtin_specs())
def test_spans_point_at_what_was_written(name: str) -> None:
    layer = read_layer(load_source(name))
    for ref in (e for s in layer.states for e in walk(s.update) if isinstance(e, Ref)):
        line = layer.source.line(ref.span.line)
        assert line[ref.span.column - 1 :].startswith(ref.name)
    named = [(a.name, a.span) for a in layer.axes] + [(i.name, i.span) for i in layer.inputs]
    named += [(p.name, p.span) for p in layer.params] + [(let.name, let.span) for let in layer.lets]
    named += [(s.name, s.span) for s in layer.states] + [(o.name, o.span) for o in layer.outputs]
    for item, span in named:
        assert span != NOWHERE
        assert layer.source.line(span.line)[span.column - 1 :].startswith(item)


ROW = Ref("x", ("b", "h", "p"), True)
VALUES: list[Expr] = [ROW, Ref("a", ("b", "h"), True), Ref("x", ("b", "h", "p"), True, 1), Const(1), Const(0.25)]
VALUES += [Size("n"), Index("h"), Const(1234567), Const(0.1234567891)]


@st.composite
def exprs(draw: st.DrawFn, depth: int = 4) -> Expr:
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        leaf: Expr = draw(st.sampled_from(VALUES))
        return leaf
    op = draw(st.sampled_from([*sorted(OPS), "dot"]))
    if op == "dot":
        return Contract(Apply("mul", (ROW, draw(exprs(depth - 1)))), ROW, "p")
    if op == "pow":
        return Apply("pow", (draw(exprs(depth - 1)), draw(st.sampled_from([Const(2), Const(-1), Const(0.5)]))))
    return Apply(op, tuple(draw(exprs(depth - 1)) for _ in range(OPS[op])))


def is_number_or_varies(expr: Expr) -> bool:
    """Whether `expr` is no impossible number, such as log(-1), which a spec may not have."""
    try:
        evaluate(expr)
        return not (isinstance(expr, Apply) and expr.op == "div" and evaluate(expr.args[1]) == 0)
    except (ArithmeticError, ValueError):
        return False


@settings(max_examples=100, deadline=None)
@given(exprs())
def test_printed_expressions_read_back(expr: Expr) -> None:
    """What ssdgen prints is the language: reading it back gives an expression that prints the same."""
    assume(all(is_number_or_varies(e) for e in walk(expr)))
    value = read(TINY.replace("S[t] . C", f"S[t] . C + ({expr}) * x")).outputs[0].value
    assert isinstance(value, Apply)
    product = value.args[1]
    assert isinstance(product, Apply)
    assert str(product.args[0]) == str(expr)


def test_blocks_may_stand_in_any_order_and_several_times() -> None:
    head, axes, inputs, state, output = re.split(r"^(?=axes|inputs|state|output)", TINY, flags=re.MULTILINE)
    first, second = inputs.split("  B[")
    shuffled = read(head + output + f"inputs\n  B[{second}" + state + axes + first)
    assert {t.name for t in shuffled.inputs} == {t.name for t in read(TINY).inputs}
    assert (shuffled.states, shuffled.outputs) == (read(TINY).states, read(TINY).outputs)


def test_one_layout_of_lines_is_as_good_as_another() -> None:
    same = TINY.replace("state\n  S[b", "state S[b").replace(
        "a * S[t-1] + outer(x, B)", "a *\n      S[t-1] + outer(\nx,\n\n  B)"
    )
    assert read(same) == read(TINY)
