"""Which kernel computes which gradient, and which forms are left to the portable form, with the reason."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import pytest

from ssdgen.derive import chunk_form, recurrence
from ssdgen.derive.adjoint import adjoint
from ssdgen.ir.adjoint import Adjoint
from ssdgen.ir.gradients import GradientPlan
from ssdgen.ir.plan import Statement, Store, When, flattened
from ssdgen.plan import plan
from ssdgen.plan.gradients import gradient_plan
from ssdgen.plan.gradients.arriving import depends_on_reads
from ssdgen.plan.gradients.sort import sort
from ssdgen.spec import load_source, read_layer

HEAD = """language 1
layer probe "A probe"

axes    b t h g p n
groups  g shares h
sizes   p = 32, n = 32

inputs
  x[b t h p]             : bf16 | f16 | f32
  w[b t h]               : f32 | bf16
"""
STATE = """
state   S[b h p n] : f32
        S[t] = sigmoid(w) * S[t-1] + outer({row}, {column})

output  y[b t h p] : like x
        y = {output}
"""


def adjoint_of(spec: str) -> Adjoint:
    return adjoint(chunk_form(recurrence(read_layer(load_source(spec)))))


def planned(
    folder: Path, inputs: str, output: str, row: str = "x", column: str = "B", let: str = ""
) -> tuple[Adjoint, GradientPlan]:
    """The gradients of a small layer."""
    file = folder / "probe.ssd"
    file.write_text(f"{HEAD}{inputs}\n{let}{STATE.format(row=row, column=column, output=output)}")
    found = adjoint_of(str(file))
    return found, gradient_plan(found)


COLUMNS = "  B[b t g n], C[b t g n] : like x\n"


@pytest.mark.parametrize(
    ("inputs", "output", "column", "reason"),
    [
        (COLUMNS, "S[t-1] . C", "B", "a read of the state before a token"),
        ("  B[b t g n], C[b t h n] : like x\n", "S[t] . C", "B", "scores of which heads share one factor"),
        (COLUMNS, "S[t] . C", "tanh(B)", "`B` within an expression along `n`"),
        (
            COLUMNS + "  u[b t g p] : like x\n",
            "(S[t] . C) * u",
            "B",
            "`u`, which the heads of a group share, is no column",
        ),
    ],
)
def test_what_has_no_kernels(tmp_path: Path, inputs: str, output: str, column: str, reason: str) -> None:
    _, found = planned(tmp_path, inputs, output, column=column)
    assert found.refused == reason
    assert found.kernels == ()


def test_a_refused_gradient_leaves_the_forward_pass(tmp_path: Path) -> None:
    """A spec whose gradients lack kernels has its own all the same."""
    found, gradients = planned(tmp_path, COLUMNS, "S[t] . C", column="tanh(B)")
    assert gradients.refused
    whole = plan(found.form, adjoint=found)
    assert whole.kernels
    assert not whole.refused
    assert whole.gradients == gradients


@pytest.mark.parametrize(
    ("name", "rows", "gated", "columns", "scalars"),
    [
        ("mamba2", {"x", "D"}, {"z"}, {"B", "C"}, {"step", "dt", "A", "dt_bias"}),
        ("simple_gla", {"v"}, set(), {"q", "k"}, {"g"}),
        ("mlstm", {"v"}, set(), {"q", "k"}, {"write", "i", "f"}),
        ("retnet", {"v"}, set(), {"q", "k"}, set()),
    ],
)
def test_where_gradients_are_computed(
    name: str, rows: set[str], gated: set[str], columns: set[str], scalars: set[str]
) -> None:
    """By what has to be summed: nothing, the heads of a group, or numbers of a token alone."""
    found = sort(adjoint_of(name))
    kinds = (found.rows, found.gated, found.columns, found.scalars)
    names = tuple({getattr(g.of, "name", "") for g in several} for several in kinds)
    assert names == (rows, gated, columns, scalars)
    assert found.nothing == ()


def test_a_row_that_is_a_let(tmp_path: Path) -> None:
    """What a row is made of has its gradient in the chunk's kernel, through that of the row."""
    inputs = COLUMNS + "  r[b t h p] : like x\n"
    found, gradients = planned(tmp_path, inputs, "S[t] . C", row="v", let="let     v = tanh(x) * r\n")
    assert not gradients.refused
    assert [getattr(g.of, "name", "") for g in sort(found).rows] == ["v", "x", "r"]
    assert {r.of for r in gradients.results} == {"x", "w", "B", "C", "r"}


def test_an_input_that_nothing_depends_on(tmp_path: Path) -> None:
    """Its gradient is zero, and no kernel's."""
    _, gradients = planned(tmp_path, COLUMNS + "  r[b t h p] : like x\n", "S[t] . C + 0 * r")
    (result,) = [r for r in gradients.results if r.of == "r"]
    assert result.name == ""


@pytest.mark.parametrize(
    ("name", "reads", "kernels"),
    [
        ("mamba2", False, 7),
        ("linear_attention", False, 5),
        ("retnet", False, 5),
        ("simple_gla", False, 7),
        ("mlstm", True, 12),
    ],
)
def test_kernels(name: str, reads: bool, kernels: int) -> None:
    """What is read is made again only where an output bends it; without decays of its own nothing is left for tokens."""
    found = adjoint_of(name)
    gradients = gradient_plan(found)
    assert depends_on_reads(found) == reads
    assert len(gradients.kernels) == kernels
    assert ("read_gradients" in [k.name for k in gradients.kernels]) == reads
    assert {r.of for r in gradients.results} == {t.name for t in found.form.recurrence.layer.inputs}


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("name", ["mamba2", "mlstm", "retnet"])
def test_every_buffer_is_written_by_one_kernel(name: str, uniform: bool) -> None:
    """Two kernels that store into one buffer would depend on their order; as they are compiled where inputs are passed in their
    narrower forms, and where they are not."""
    written: dict[str, list[str]] = {}
    for kernel in gradient_plan(adjoint_of(name)).kernels:
        parts = [getattr(kernel, part, ()) for part in ("body", "before", "enter", "step", "once", "each")]
        parts += [
            getattr(kernel, "after", ())
            if hasattr(kernel, "once")
            else [s for _, b in getattr(kernel, "after", ()) for s in b]
        ]
        flags = {p.name for p in kernel.parameters if p.name.endswith("_FLAT")}
        stores = {s.array for part in parts for s in compiled(part, flags, uniform) if isinstance(s, Store)}
        for array in stores:
            written.setdefault(array, []).append(kernel.name)
    assert written
    assert {array: kernels for array, kernels in written.items() if len(kernels) > 1} == {}


def compiled(statements: Iterable[Statement], flags: Collection[str], value: bool) -> Iterator[Statement]:
    """Every statement but those that are left out where the `flags` have a value."""
    for s in statements:
        if isinstance(s, When) and s.flag in flags:
            yield from compiled(s.body if value else s.otherwise, flags, value)
        else:
            yield from flattened([s])
