"""One forward call of a built-in spec on a ragged shape and three tokens stepped through, for compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \\
        python bench/ragged_once.py mamba2

Without torch's caching allocator every tensor is an allocation of its own, so that a read past its end is seen. Run it once
without the sanitizer first: the compiler's output is then cached on disk. Exits 1 if the result is wrong.
"""

from __future__ import annotations

import sys

import torch
from variants import module_of, spec_of

from ssdgen import pipeline
from ssdgen.ir.layer import Layer
from ssdgen.run.cases import sizes_for
from ssdgen.run.checks import relative_error
from ssdgen.run.inputs import Case, Inputs, draw
from ssdgen.run.reference import reference
from ssdgen.run.steps import Steps
from ssdgen.spec import load_source, read_layer

TOKENS, TOKENS_STEPPED = 201, 3
BOUND = 5e-3


def ragged_inputs(layer: Layer) -> Inputs:
    """The call: everything present, nothing a multiple of anything."""
    return draw(layer, Case(sizes_for(layer, TOKENS), dtype="bf16"), "cuda")


def main(name: str) -> int:
    """Run it; print each value's error."""
    layer = read_layer(load_source(spec_of(name)))
    module = module_of(name)
    inputs = ragged_inputs(layer)
    values = module.forward(**inputs.keywords())
    torch.cuda.synchronize()
    on_cpu = [{k: v.cpu() for k, v in x.items()} for x in (inputs.tensors, inputs.states)]
    outputs, finals = reference(layer, on_cpu[0], inputs.params, on_cpu[1])
    compared = [(key, want, got) for (key, want), got in zip({**outputs, **finals}.items(), values, strict=True)]
    steps = Steps("hardware", pipeline.plan(pipeline.derive(spec_of(name))[0], {}), module, lambda call: call(), "cuda")
    stepped = steps.walked(inputs, [state.clone() for state in inputs.states.values()], TOKENS_STEPPED)
    torch.cuda.synchronize()
    for (key, want), time, got in zip(outputs.items(), steps.times(), stepped, strict=True):
        compared.append((f"{key} of steps", want.narrow(time, 0, TOKENS_STEPPED), got))
    worst = 0.0
    for key, want, got in compared:
        error = relative_error(got.cpu(), want)
        print(f"{name} {key}: error {error:.1e}, bound {BOUND:.1e}")
        worst = max(worst, error) if error == error else float("inf")
    return 0 if worst <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
