"""Which kernel computes which gradient: by what the chunk kernel has to sum for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ssdgen.ir.adjoint import Adjoint, Contribution, Gradient
from ssdgen.ir.expr import Ref, axes_of
from ssdgen.ir.layer import Layer
from ssdgen.plan.builder import Unsupported
from ssdgen.plan.gradients.units import unit_of


@dataclass(frozen=True, slots=True)
class Sorted:
    """The gradients of lets and inputs by kind.

    rows      elementwise in what a token and head has along the row axis: stored head by head
    gated     the same, of optional inputs, which gate an output
    columns   products over a row axis or over tokens, along the column axis: summed over the heads of a group
    scalars   of what a token and head has one number of: left to the token kernel
    nothing   names of inputs that no output depends on
    """

    rows: tuple[Gradient, ...]
    gated: tuple[Gradient, ...]
    columns: tuple[Gradient, ...]
    scalars: tuple[Gradient, ...]
    nothing: tuple[str, ...]


def sort(adjoint: Adjoint) -> Sorted:
    """Sort the gradients of `adjoint`; Unsupported for one that no kernel computes yet."""
    layer = adjoint.form.recurrence.layer
    kinds = dict(_quantities(adjoint))
    found: dict[str, list[Gradient]] = {"row": [], "gate": [], "column": [], "scalar": []}
    nothing = []
    optional = {t.name for t in layer.inputs if t.optional}
    for gradient in (*adjoint.lets, *adjoint.inputs):
        if not isinstance(gradient.of, Ref):
            raise Unsupported("the gradient of a product `.` within an expression")
        if not gradient.terms:
            nothing.append(gradient.of.name)
            continue
        kind = _kind(gradient, kinds)
        _check(layer, gradient, kind)
        gated = gradient.of.name in optional
        if gated != any(term.when is not None for term in gradient.terms) or (gated and kind != "row"):
            raise Unsupported(f"`{gradient.of.name}`, which is more or less than a gate")
        kinds[gradient.name] = kind
        found["gate" if gated else kind].append(gradient)
    lets = {let.name for let in layer.lets}
    if any(to_name(g) in lets for g in found["column"]):
        raise Unsupported("the gradient of a `let` along a column axis")
    rows, gates, columns, scalars = (tuple(found[kind]) for kind in ("row", "gate", "column", "scalar"))
    return Sorted(rows, gates, columns, scalars, tuple(name for name in nothing if name not in lets))


def _quantities(adjoint: Adjoint) -> Iterator[tuple[str, str]]:
    """The kind of each gradient inside the chunk, by name."""
    yield from ((d.name, "row") for d in adjoint.outputs)
    yield from ((x.name, "row") for x in adjoint.gates)
    yield from ((x.name, "row") for x in adjoint.reads)
    yield from ((x.name, "row") for x in adjoint.rows)
    yield from ((x.name, "column") for x in adjoint.writes)
    yield from ((x.name, "column") for x in adjoint.vectors)
    yield from ((x.name, "scalar") for x in adjoint.weights)
    yield from ((x.name, "scalar") for x in adjoint.decays)


def _kind(gradient: Gradient, kinds: dict[str, str]) -> str:
    found = {kinds[term.quantity] for term in gradient.terms}
    if len(found) > 1:
        raise Unsupported(f"`{to_name(gradient)}`, which is used both along channels and for them")
    return found.pop()


def to_name(gradient: Gradient) -> str:
    """The name of what a gradient is of."""
    assert isinstance(gradient.of, Ref)
    return gradient.of.name


def _check(layer: Layer, gradient: Gradient, kind: str) -> None:
    """Refuse what the kernel of a kind cannot sum."""
    name = to_name(gradient)
    if any(term.ahead for term in gradient.terms):
        raise Unsupported(f"`{name}` of the token before")
    groups = {g.axis for g in layer.groups if g.axis in gradient.axes}
    if groups and kind != "column":
        raise Unsupported(f"`{name}`, which the heads of a group share, is no column")
    summed = {frozenset(term.summed) for term in gradient.terms}
    if len(summed) > 1:
        raise Unsupported(f"`{name}`, which is summed in two ways")
    over = next(iter(summed))
    sums_tokens = layer.time in over
    if sums_tokens != (layer.batch in over) or (kind == "column" and sums_tokens):
        raise Unsupported(f"`{name}`, whose gradient is summed over {' and '.join(sorted(over))}")
    if kind == "column":
        for term in gradient.terms:
            check_scalar(layer, name, term)


def check_scalar(layer: Layer, name: str, term: Contribution) -> None:
    """Refuse a factor of a column's gradient that is more than a number of a token and head."""
    other = [a for a in axes_of(term.factor) if a not in (layer.batch, layer.head)]
    if other:
        raise Unsupported(f"`{name}` within an expression along `{other[0]}`")


def check_form(adjoint: Adjoint) -> None:
    """Refuse forms whose chunk kernel is not written yet."""
    form = adjoint.form
    if any(r.at == -1 for r in form.reads):
        raise Unsupported("a read of the state before a token")
    if any(t.lag for s in form.states for t in s.terms):
        raise Unsupported("an input of the token before")
    if any(term.when for g in adjoint.reads for term in g.terms):
        raise Unsupported("a gate that reads a state")
    gates = [g.tensor for g in adjoint.gates]
    if len(gates) != len(set(gates)) or any(len(o.gates) > 1 for o in form.outputs):
        raise Unsupported("an output with several gates")
    unit_of(form)
