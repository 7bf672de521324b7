"""What an emitted module launches for calls of the class that is used most, as requests to compile ahead of time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, combinations
from types import ModuleType

from ssdgen.ir.build import CompileRequest
from ssdgen.ir.layer import Dtype, Layer
from ssdgen.ir.plan import Plan, WalkKernel
from ssdgen.run.inputs import DTYPES, takes
from ssdgen.run.recorded import Call, StepCall, gradients_of, record, record_gradients, record_step

UNDECLARED_SIZE = 64


def compile_requests(
    plan: Plan,
    module: ModuleType,
    architectures: Iterable[str],
    dtypes: Iterable[Dtype],
    note: str = "",
    packed: bool = False,
    states: bool = False,
) -> tuple[CompileRequest, ...]:
    """Every kernel that `module`, emitted from `plan`, launches for aligned inputs of `dtypes`, once an architecture.

    Shapes are those of the class that is used most: the declared sizes, a multiple of 16 tokens, one group; every optional
    input once present and once absent; steps and gradients too; with `packed` those for packed sequences, if the plan has
    any; with `states` those that keep states at the ends of blocks, which segments are or have two of. A dtype that the layer
    does not take gives nothing. `note` ends every label.
    """
    layer = plan.form.recurrence.layer
    found: dict[CompileRequest, list[str]] = {}
    for dtype in dtypes:
        if not takes(layer, dtype):
            continue
        subsets = _subsets([t.name for t in layer.inputs if t.optional])
        ways = [(present, False, 0) for present in subsets]
        ways += [((), True, 0)] if packed and isinstance(plan.kernels[-1], WalkKernel) else []
        ways += [((), False, chunks) for chunks in ((1, 2) if states else ())]
        for way in ways:
            for request in _launched(plan, module, dtype, *way):
                found.setdefault(replace(request, label=""), []).append(request.label)
            for request in _differentiated(plan, module, dtype, *way):
                found.setdefault(replace(request, label=""), []).append(request.label)
        for request in _stepped(plan, module, dtype, subsets):
            found.setdefault(replace(request, label=""), []).append(request.label)
    labelled = [replace(request, label=f"{_common(labels)} {note}".strip()) for request, labels in found.items()]
    return tuple(replace(request, arch=arch) for arch in architectures for request in labelled)


def _subsets(names: list[str]) -> list[tuple[str, ...]]:
    """Every set of optional inputs, the empty one first."""
    return list(chain.from_iterable(combinations(names, n) for n in range(len(names) + 1)))


def _common(labels: list[str]) -> str:
    """One label for a kernel that several calls launch: the plainest of each dtype."""
    plainest = {label.split()[0]: label for label in sorted(labels, key=len, reverse=True)}
    dtypes = " ".join(dict.fromkeys(label.split()[0] for label in labels))
    return dtypes + "".join(dict.fromkeys(label.removeprefix(dtype) for dtype, label in plainest.items()))


def _launched(
    plan: Plan, module: ModuleType, dtype: Dtype, present: tuple[str, ...], packed: bool, block: int
) -> list[CompileRequest]:
    """The kernels of one call, with initial states; unless `block` is 0 states are kept at the ends of so many chunks."""
    config = module.CONFIGS[DTYPES[dtype]]
    if hasattr(config, "segments"):  # a sequence this short would be one segment, and leave kernels out
        config = replace(config, segments=2)
    call, label = _aligned_call(plan, dtype, present, packed, block * config.chunk)
    return [launch.request for launch in record(module, call, config, label)]


def _differentiated(
    plan: Plan, module: ModuleType, dtype: Dtype, present: tuple[str, ...], packed: bool, block: int
) -> list[CompileRequest]:
    """The kernels of the gradients of one call, with initial states, where gradients arrive at the final ones too."""
    call, label = _aligned_call(plan, dtype, present, packed, block * module.CONFIGS[DTYPES[dtype]].chunk)
    gradients = gradients_of(module)
    if gradients is None:
        return []
    config = replace(gradients.CONFIGS[DTYPES[dtype]], segments=2)  # as in a call of the forward pass
    several = [record_gradients(module, call, config, label)]
    if not packed and not block:
        several.append(record_gradients(module, call, config, f"{label} started", starts_every=config.chunk))
    return [launch.request for launches in several for launch in launches]


def _stepped(plan: Plan, module: ModuleType, dtype: Dtype, subsets: Iterable[tuple[str, ...]]) -> list[CompileRequest]:
    """The kernels of one token with states of float32, for every set of optional inputs, also steady, of a pool of slots with
    states of bfloat16, and of several tokens with the states before each kept. With the config of calls that fill a GPU."""
    if not plan.step.kernels:
        return []
    layer = plan.form.recurrence.layer
    sizes = _aligned(layer, 1)
    calls = [
        (StepCall(Call(sizes, dtype, present)), " ".join(f"with {name}" for name in present)) for present in subsets
    ]
    calls.append((StepCall(Call(sizes, dtype), steady=True), "steady"))
    calls.append((StepCall(Call(sizes, dtype), "bf16", pooled=True), "with bf16 slots"))
    calls.append((StepCall(Call({**sizes, layer.time: 4}, dtype), keeps=True), "with 4 tokens"))
    return [
        launch.request
        for call, label in calls
        for launch in record_step(module, call, module.STEP.config, label=f"{dtype} {label}".strip())
    ]


def _aligned_call(
    plan: Plan, dtype: Dtype, present: tuple[str, ...], packed: bool, states_every: int = 0
) -> tuple[Call, str]:
    """A call of four chunks with initial states, and its label."""
    layer = plan.form.recurrence.layer
    sizes = _aligned(layer, 4 * plan.config.chunk) | ({layer.batch: 1} if packed else {})
    flags = [name for name, on in (("packed", packed), ("states kept", states_every)) if on]
    label = " ".join([dtype, *(f"with {name}" for name in present), *flags])
    return Call(sizes, dtype, present, initial=True, packed=packed, states_every=states_every), label


def _aligned(layer: Layer, tokens: int) -> dict[str, int]:
    channels = {a.name: a.size or UNDECLARED_SIZE for a in layer.axes}
    return channels | {layer.batch: 2, layer.time: tokens, layer.head: 8} | {g.axis: 1 for g in layer.groups}
