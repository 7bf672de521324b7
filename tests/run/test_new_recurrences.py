"""Four recurrences that no part of ssdgen has heard of go through the whole pipeline unchanged.

They differ from the built-in ones in their decay and in their weights: a sigmoid gate with a squared step; a constant
decay and weight, read before the token; two inputs, one through a feature map that does not vanish on padding; a
vector state alone, whose decay leaves nothing of the initial state, and where no dtype is like another.
"""

from __future__ import annotations

import pytest

from ssdgen.derive import chunk_form, prove, recurrence
from ssdgen.diagnostics import Source
from ssdgen.emit import emit
from ssdgen.emit.package import package
from ssdgen.plan import plan as plan_of
from ssdgen.run.gates import every_gate
from ssdgen.run.load import load
from ssdgen.spec import read_layer

SQUARED_STEP = """\
language 1
layer squared_step "A sigmoid gate; every token is written with the square of its step"

axes    b t h p n
sizes   p = 64, n = 64

inputs
  u[b t h p]             : bf16 | f16 | f32
  f[b t h], s[b t h]     : f32
  K[b t h n], Q[b t h n] : like u

let     weight = s^2

state   S[b h p n] : f32
        S[t] = sigmoid(f) * S[t-1] + weight * outer(u, K)

output  y[b t h p] : like u
        y = S[t] . Q
"""

HALF = """\
language 1
layer half "A constant decay and a constant weight, read before the token is written"

axes    b t h p n
sizes   p = 32, n = 64

inputs
  u[b t h p]             : bf16 | f16 | f32
  K[b t h n], Q[b t h n] : like u

state   S[b h n p] : f32
        S[t] = 0.9 * S[t-1] + 0.5 * outer(K, u)

output  y[b t h p] : like u
        y = S[t-1] . Q + u
"""

TWO_INPUTS = """\
language 1
layer two_inputs "Two rank-1 inputs, one of them through a feature map that is 1 where its input is 0"

axes    b t h g p n
groups  g shares h
sizes   p = 32, n = 16

inputs
  u[b t h p], w[b t h p] : like K
  K[b t g n], Q[b t g n] : bf16 | f16 | f32
  J[b t h n]             : like K
  g_log[b t h]           : f32 <= 0
  beta[b t h]            : f32 = 1

state   S[b h p n] : f32
        S[t] = exp(g_log) * S[t-1] + outer(u, relu(K) + 1) + sigmoid(beta) * outer(w, J)

output  y[b t h p] : like K
        y = S[t] . (relu(Q) + 1)

schedule
  chunk  = 32
  swap   = scores, state
"""

VECTOR = """\
language 1
layer vector "A vector state alone; a learned decay far from 1; no tensor is like another"

axes    b t h n
sizes   n = 64

inputs
  a[h]                   : f32 in (0, 1)
  k[b t h n], q[b t h n] : bf16 | f32

state   N[b h n] : f32
        N[t] = (1 - a) / 4 * N[t-1] + k

output  y[b t h] : f32
        y = N[t] . q
"""

SPECS = {"squared_step": SQUARED_STEP, "half": HALF, "two_inputs": TWO_INPUTS, "vector": VECTOR}


@pytest.mark.parametrize("name", SPECS)
def test_new_recurrence(name: str) -> None:
    """Derived, proved, emitted, compiled; the portable path and the emulated kernels equal the token loop."""
    form = chunk_form(recurrence(read_layer(Source("new.ssd", SPECS[name]))))
    plan = plan_of(form)
    assert not plan.refused
    source = emit(plan)
    module = load(source.name, package([source]))
    report = every_gate(prove(form), plan, module, ("proof", "portable", "emulation", "compile"))
    assert report.passed, str(report)
    assert not any(c.skipped for c in report.checks if "packed sequences" not in c.note)
