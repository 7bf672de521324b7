"""The stages in order. Each is imported when it is asked for: reading a spec loads no sympy, emitting it no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ssdgen.ir.chunkform import ChunkForm
    from ssdgen.ir.layer import Layer
    from ssdgen.ir.plan import Plan


def read(spec: str) -> Layer:
    """The layer that `spec`, a path or the name of a built-in, describes; SpecError with everything wrong with it."""
    from ssdgen.spec import load_source, read_layer

    return read_layer(load_source(spec))


def derive(spec: str) -> ChunkForm:
    """Its chunked form, proved; SpecError if it has none, ProofError if ours is wrong."""
    from ssdgen.derive import chunk_form, prove, recurrence

    form = chunk_form(recurrence(read(spec)))
    prove(form)
    return form


def plan(spec: str, settings: Mapping[str, str]) -> Plan:
    """The kernels that compute it, at the point of its schedule that `settings` move away from the default."""
    from ssdgen.plan import configure
    from ssdgen.plan import plan as plan_of

    form = derive(spec)
    return plan_of(form, configure(form, settings))
