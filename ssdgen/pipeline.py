"""The stages in order. Each is imported when it is asked for: reading a spec loads no sympy, emitting it no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ssdgen.derive import Proof
    from ssdgen.ir.chunkform import ChunkForm
    from ssdgen.ir.layer import Layer
    from ssdgen.ir.plan import Plan


def built_ins() -> tuple[str, ...]:
    """The names of the specs that come with ssdgen."""
    from ssdgen.spec import builtin_specs

    return builtin_specs()


def read(spec: str) -> Layer:
    """The layer that `spec`, a path or the name of a built-in, describes; SpecError with everything wrong with it."""
    from ssdgen.spec import load_source, read_layer

    return read_layer(load_source(spec))


def derive(spec: str) -> tuple[ChunkForm, Proof]:
    """Its chunked form and what was proved of it; SpecError if it has none, ProofError if ours is wrong."""
    from ssdgen.derive import chunk_form, prove, recurrence

    form = chunk_form(recurrence(read(spec)))
    return form, prove(form)


def plan(spec: str, settings: Mapping[str, str]) -> Plan:
    """The kernels that compute it, at the point of its schedule that `settings` move away from the default."""
    from ssdgen.plan import plan as plan_of
    from ssdgen.plan.settings import configure

    form, _ = derive(spec)
    return plan_of(form, configure(form, settings))
