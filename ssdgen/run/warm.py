"""Compiling, before the first call, all that a deployment launches: every variant and class of shape of an emitted module.

`cuda.tile` keeps compiled kernels on disk (`CUDA_TILE_CACHE_DIR`). Their key is made from the kernel's code with the path and
lines of its file, the class of every argument, the hints and the architecture, so what is compiled here from the module
where it lies is what its launches find: no GPU is needed for that. Where there is one, the calls are made as well, and a
fresh process shows how long its first call takes.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Literal, get_args

import torch

from ssdgen.build.worker import Compiled, cuda_tile_cache
from ssdgen.diagnostics import UserError
from ssdgen.files import make_folder
from ssdgen.ir.build import CompileRequest
from ssdgen.ir.layer import Dtype
from ssdgen.run.load import load_file
from ssdgen.run.recorded import (
    Call,
    StepCall,
    blank,
    dtype_of,
    gradients_of,
    record,
    record_gradients,
    record_step,
    takes_packed,
)
from ssdgen.run.tune.compile import Compiler
from ssdgen.run.tune.device import H200, Device, assumed, here
from ssdgen.run.tune.remote import Died, Remote, serve
from ssdgen.run.warm_conv import conv_sizes, convolved, is_convolution

BATCH, TOKENS, HEADS = 2, 4096, 8
"""The shape that is warmed if none is asked for, beside the sizes that the module declares."""

PERIOD = 2048
"""Tokens after which the number of chunks is a multiple of 16 for every chunk up to 128."""

SHORT = 64
"""Tokens that are one chunk, whichever of 64 and more a chunk has."""

EVERY = 256
"""Tokens between states that are kept: a multiple of every chunk that a module may choose."""

STEPS = (4, 16)
"""Tokens of several steps at once, of either class."""

Also = Literal["gradients", "states", "steps"]
ALSO: tuple[Also, ...] = get_args(Also)
"""What is compiled on request: gradients, calls with `states_every`, `steps` of several tokens."""

TIMEOUT = 300.0
PROCESSES = 4
"""How many processes make calls on the GPU at a time."""

START = "import sys; sys.path[:] = sys.argv[1:]; from ssdgen.run.warm import main; main()"
PROGRAM = [sys.executable, "-I", "-B", "-c", START, *sys.path]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that was compiled or found in the cache, the seconds that took, and why it failed if it did."""

    request: CompileRequest
    seconds: float
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Warmed:
    """What was done for one module or model: its kernels, the calls they are for, and, where there is a GPU, how many seconds
    the first call of a fresh process took more than the second, or what kept it from that.
    """

    path: Path
    device: Device
    cache: Path
    calls: int
    kernels: tuple[Kernel, ...]
    first_call_extra: float | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The kernels of so many calls; `calls` are those that can be made on a GPU as they are, the plainest first."""

    count: int
    requests: list[CompileRequest]
    calls: list[Call] = field(default_factory=list)


def module_path(target: str) -> Path:
    """The file of an emitted module: a path to it, or a dotted name that can be imported (`generated.mine`).

    Raises UserError for what is neither, and for a spec, whose module has no place yet.
    """
    path = Path(target)
    if path.suffix == ".ssd":
        hint = f"ssdgen generate {target} -o DIR, then ssdgen warm DIR/{path.stem}.py"
        raise UserError(f"{target} is a spec: compiled kernels belong to the file of a module", hint)
    if path.suffix == ".py":
        if not path.is_file():
            raise UserError(f"there is no module {target}", "ssdgen generate writes one")
        return path.resolve()
    for name in (target, f"ssdgen.generated.{target}"):
        try:
            found = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            continue
        if found is not None and found.origin is not None and Path(found.origin).is_file():
            return Path(found.origin).resolve()
    raise UserError(
        f"`{target}` is no emitted module and no checkpoint",
        "name a module's file, what a program imports it as, or a folder with a config.json",
    )


def warm(
    path: Path,
    shapes: Sequence[Mapping[str, int]] = (),
    dtypes: Sequence[Dtype] = ("bf16",),
    arch: str | None = None,
    jobs: int | None = None,
    heard: Callable[[Kernel, int, int], None] = lambda kernel, done, total: None,
    also: Collection[Also] = (),
) -> Warmed:
    """Compile what the module at `path`, an emitted one or `causal_conv.py` beside it, launches for `shapes`, every optional
    input absent and present, tokens of every class, with the configurations that it would choose, for this GPU or for `arch`,
    of which one with the multiprocessors of an H200 is assumed. `also` says what beside `forward` and `step` is compiled.

    `heard` is told of each kernel, how many are done and how many there are. Raises UserError if the cache is off, or for
    a shape that the module refuses.
    """
    module = _loaded(path)
    wanted = _of_convolution if is_convolution(module) else _of_module
    return filled(path, partial(wanted, module, shapes, dtypes, also), arch, jobs, heard)


def filled(
    path: Path,
    wanted: Callable[[Device], Wanted],
    arch: str | None,
    jobs: int | None,
    heard: Callable[[Kernel, int, int], None],
) -> Warmed:
    """Compile what is `wanted` for this GPU, or for `arch`, of the module or model at `path`; see `warm`."""
    cache = cuda_tile_cache()
    if cache is None:
        raise UserError("the cache of cuda.tile is off, so nothing could be kept", "unset CUDA_TILE_CACHE_DIR")
    for folder in (*reversed(cache.parents), cache):
        make_folder(folder)
    has_gpu = torch.cuda.is_available()
    device = here() if has_gpu else H200
    if arch is not None and arch != device.arch:
        device = replace(device, arch=arch, name=f"a GPU of {arch} with {device.multiprocessors} multiprocessors")
    work = wanted(device)
    requests, calls = work.requests, work.calls
    if not has_gpu and arch is None:
        raise UserError("there is no GPU here to warm the cache for", "name the one of the deployment: --arch sm_90")
    kernels: list[Kernel] = []
    with Compiler(device.arch, jobs, cache, TIMEOUT) as compiler:
        for place, (answer,) in compiler.compiled([(request,) for request in requests]):
            if isinstance(answer, Compiled):
                kernel = Kernel(requests[place], answer.seconds)
            else:
                kernel = Kernel(requests[place], 0.0, answer.message)
            kernels.append(kernel)
            heard(kernel, len(kernels), len(requests))
    extra, problem = None, ""
    if has_gpu and arch is None and calls:
        _, problem = _launched_really(path, calls, PROCESSES)
        extra, again = _launched_really(path, calls[:1], 1)
        problem = problem or again
    return Warmed(path, device, cache, work.count, tuple(kernels), extra, problem)


def _of_module(
    module: ModuleType,
    shapes: Sequence[Mapping[str, int]],
    dtypes: Sequence[Dtype],
    also: Collection[Also],
    device: Device,
) -> Wanted:
    """The calls of an emitted module that are compiled for, and the kernels of these and of what is asked for beside them."""
    calls = list(calls_of(module, shapes, dtypes))
    requests = [r for call in calls for r in launched(module, call, device)]
    steps = list(step_calls_of(module, shapes, dtypes))
    requests += [r for step in steps for r in stepped(module, step, device)]
    if "steps" in also:
        requests += [r for step in several_steps(module, steps) for r in stepped(module, step, device)]
    kept = [replace(call, states_every=EVERY) for call in calls] if "states" in also else []
    requests += [r for call in kept for r in launched(module, call, device)]
    if kept or "gradients" in also:
        requests += [r for call in calls for r in kept_at_ends(module, call, device)]
    if "gradients" in also:
        requests += [r for call in (*calls, *kept) for r in differentiated(module, call, device)]
    return Wanted(len(calls), list(dict.fromkeys(requests)), calls)


def _of_convolution(
    module: ModuleType,
    shapes: Sequence[Mapping[str, int]],
    dtypes: Sequence[Dtype],
    also: Collection[Also],
    device: Device,
) -> Wanted:
    """The same of the causal convolution, whose calls here are the plainest ones: nothing of it depends on the device, and its
    gradients are plain torch's."""
    several = [conv_sizes(module, shape, BATCH, TOKENS) for shape in shapes or ({},)]
    each = list(itertools.product(several, dtypes))
    calls = [Call(sizes, dtype, present) for sizes, dtype in each for present in ((), ("bias",))]
    requests = [r for sizes, dtype in each for r in convolved(module, sizes, dtype, near(sizes["t"]), "steps" in also)]
    return Wanted(len(calls), list(dict.fromkeys(requests)), calls)


def launched(module: ModuleType, call: Call, device: Device) -> tuple[CompileRequest, ...]:
    """The kernels that `call` would launch on `device`, with the Config that the module chooses there itself."""
    try:
        with assumed(module, device):
            return tuple(launch.request for launch in record(module, call, None))
    except (ValueError, TypeError, NotImplementedError) as error:
        sizes = ",".join(f"{axis}={length}" for axis, length in call.sizes.items())
        raise UserError(f"{module.LAYER.name} refuses the shape {sizes}: {error}") from error


def calls_of(module: ModuleType, shapes: Sequence[Mapping[str, int]], dtypes: Sequence[Dtype]) -> Iterator[Call]:
    """One call of every class for each shape: dtypes, optional inputs, forms of inputs without a time axis, initial states,
    tokens, and packed sequences where the module takes them and the batch is 1. The plainest call is the first.
    """
    layer = module.LAYER
    optional = [i.name for i in layer.inputs if i.optional]
    subsets = [s for n in range(len(optional) + 1) for s in itertools.combinations(optional, n)]
    for shape in shapes or ({},):
        sizes = _sizes(module, shape)
        packed = (False, True) if takes_packed(module) and sizes[layer.batch] == 1 else (False,)
        for dtype, present, forms, initial, packs, tokens in itertools.product(
            dtypes, subsets, _forms(module), (False, True), packed, near(sizes[layer.time])
        ):
            yield Call({**sizes, layer.time: tokens}, dtype, present, forms, initial, packs)


def step_calls_of(
    module: ModuleType, shapes: Sequence[Mapping[str, int]], dtypes: Sequence[Dtype]
) -> Iterator[StepCall]:
    """One call of `step` of every class for each shape, whose batch and heads it has: dtypes, optional inputs, forms of inputs
    without a time axis, states of float32 and bfloat16, a state a sequence, steady or not, or int32 slots of a pool."""
    layer = module.LAYER
    if not hasattr(module, "StepConfig"):
        return
    optional = [i.name for i in layer.inputs if i.optional]
    subsets = [s for n in range(len(optional) + 1) for s in itertools.combinations(optional, n)]
    states: tuple[Dtype, ...] = ("f32", "bf16")
    for shape in shapes or ({},):
        sizes = {**_sizes(module, shape), layer.time: 1}
        for dtype, present, forms, state in itertools.product(dtypes, subsets, _forms(module), states):
            plain = StepCall(Call(sizes, dtype, present, forms), state)
            yield from (plain, replace(plain, steady=True), replace(plain, pooled=True))


def several_steps(module: ModuleType, steps: Iterable[StepCall]) -> Iterator[StepCall]:
    """The same steps of several tokens, with and without the states before each kept."""
    for step, tokens, keeps in itertools.product(steps, STEPS, (False, True)):
        sizes = {**step.call.sizes, module.LAYER.time: tokens}
        yield replace(step, call=replace(step.call, sizes=sizes), keeps=keeps)


def differentiated(module: ModuleType, call: Call, device: Device) -> tuple[CompileRequest, ...]:
    """The kernels of the gradients of `call` on `device`, for gradients at outputs alone and at final states too: with the
    Config that the module chooses, and whether one block has all heads of a group or several share them, which depends on
    batch and tokens; and where the call keeps states for them, which `kept_at_ends` has."""
    gradients = gradients_of(module)
    if gradients is None:
        return ()
    default = gradients.CONFIGS[dtype_of(module, call, gradients.GRADIENTS.leader)]
    configs = [None, *(replace(default, shares=n) for n in (1, 2))] if hasattr(default, "shares") else [None]
    with assumed(module, device):
        several = [
            record_gradients(module, call, config, finals=finals) for config in configs for finals in (False, True)
        ]
        several += [record_gradients(module, call, None, starts_every=every) for every, _ in _segments(module, call)]
    return tuple(launch.request for launches in several for launch in launches)


def kept_at_ends(module: ModuleType, call: Call, device: Device) -> tuple[CompileRequest, ...]:
    """The kernels that `call` would launch on `device` if it kept its states at the ends of its segments, as for gradients."""
    requests: list[CompileRequest] = []
    for every, segments in _segments(module, call):
        with assumed(module, device, segments):
            requests += [launch.request for launch in record(module, replace(call, states_every=every), None)]
    return tuple(requests)


def _segments(module: ModuleType, call: Call) -> Iterator[tuple[int, int]]:
    """(tokens of a segment, segments) for calls of the class of `call` to have one, few or 16 states at the ends of segments;
    nothing where a call is packed or has blocks of its own."""
    length, dtype = call.sizes[module.LAYER.time], dtype_of(module, call, module.LAYER.inputs[0].name)
    chunk = module.CONFIGS.get(dtype, module.CONFIGS[torch.float32]).chunk
    chunks = -(-length // chunk)
    for count in (1, 2, 16) if not call.packed and not call.states_every else ():
        for segments in (count, count + 1):
            every = -(-chunks // segments) * chunk
            if every < length and length // every == count and -(-length // every) == segments:
                yield every, segments


def stepped(module: ModuleType, call: StepCall, device: Device) -> tuple[CompileRequest, ...]:
    """The kernels that a call of `step` would launch on `device`."""
    with assumed(module, device):
        return tuple(launch.request for launch in record_step(module, call))


def near(tokens: int) -> tuple[int, ...]:
    """Lengths of every class, those of long sequences about `tokens`: chunks a multiple of 16 or not, or one; in each a
    multiple of 16, or of 8, 4, 2 or 1 at most, since a stride of so many rows may be one of 16 where the length is none; and
    one token. `tokens` itself is the first.
    """
    whole = max(1, round(tokens / PERIOD)) * PERIOD
    each = (end - less for end in (whole, whole + 128, SHORT) for less in (0, 8, 4, 2, 1))
    return tuple(dict.fromkeys((tokens, *each, 1)))


def _forms(module: ModuleType) -> list[tuple[tuple[str, int], ...]]:
    """Every way to pass the inputs without a time axis that may be left out or be narrower, as `Call.forms` has it."""
    choices = []
    for spec in module.LAYER.inputs:
        ranks = [len(form) for form in (spec.axes, *spec.narrower)] + ([0] if spec.default is not None else [])
        if len(ranks) > 1 and not spec.optional:
            choices.append([(spec.name, rank) for rank in ranks])
    return list(itertools.product(*choices))


def _sizes(module: ModuleType, shape: Mapping[str, int]) -> dict[str, int]:
    layer = module.LAYER
    parameters = inspect.signature(module.init_state).parameters
    declared = {name: p.default for name, p in parameters.items() if type(p.default) is int}
    axes = dict.fromkeys(a for i in layer.inputs for a in i.axes)
    sizes = {layer.batch: BATCH, layer.time: TOKENS, layer.head: HEADS, **dict.fromkeys(layer.groups, 1), **declared}
    for axis, length in shape.items():
        if axis not in axes or length < 1:
            raise UserError(f"{layer.name} has no axis `{axis}` of length {length}", f"its axes are {', '.join(axes)}")
    sizes |= shape
    if missing := [axis for axis in axes if axis not in sizes]:
        raise UserError(f"the shape does not say how long {', '.join(missing)} is", f"--shape {missing[0]}=64")
    return {axis: sizes[axis] for axis in axes}


def _loaded(path: Path) -> ModuleType:
    try:
        module = load_file(path)
    except Exception as error:  # what a file of the user's raises when it is imported is theirs to read
        raise UserError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    emitted = all(hasattr(module, name) for name in ("LAYER", "CONFIGS", "forward", "init_state"))
    if not emitted and not is_convolution(module):
        raise UserError(f"{path} is no module that ssdgen emitted", "ssdgen generate writes one")
    return module


def _launched_really(path: Path, calls: Sequence[Call], jobs: int) -> tuple[float, str]:
    """Make every call on the GPU, in `jobs` processes: the longest that a first call took beyond the second, and a problem.

    What was compiled ahead is found then; a class that was not is compiled by its own launch, and so is found later.
    """
    with ThreadPoolExecutor(jobs) as threads:
        results = list(threads.map(lambda first: _share(path, calls[first::jobs]), range(min(jobs, len(calls)))))
    return max(extra for extra, _ in results), next((problem for _, problem in results if problem), "")


def _share(path: Path, calls: Sequence[Call]) -> tuple[float, str]:
    extra, problem = 0.0, ""
    with Remote(program=PROGRAM) as remote:
        for call in calls:
            try:
                answer = remote.ask((path, call), TIMEOUT)
            except Died as error:
                answer = str(error)
            if isinstance(answer, str):
                problem = answer
            else:
                extra = max(extra, answer[0] - answer[1])
    return extra, problem


def first_calls(path: Path, call: Call) -> tuple[float, float]:
    """The seconds of two equal calls on the GPU, which is ready before."""
    module = load_file(path)
    arguments = {name: x.to("cuda") if isinstance(x, torch.Tensor) else x for name, x in blank(module, call).items()}
    seconds = []
    for _ in range(2):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        with torch.no_grad():
            module.forward(**arguments)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return seconds[0], seconds[1]


def main() -> None:
    """The process that makes calls: it answers (path, call) with the seconds of two of them, or with what went wrong."""
    serve(lambda task: first_calls(*task))
