"""What is left out before anything is measured, and why: by the launches alone, by a model of their time, by the compiler.

The model knows two things of a kernel: the bytes that it moves by the plan's roofline, which have to pass at the bandwidth
of a copy, and its blocks: one multiprocessor alone draws at most `GREED` times its share of the bandwidth, so few blocks do
not reach all of it. That tells plans, segments and tiles apart, and nothing finer: it only removes what is hopeless.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ssdgen.build.elf import CubinError, read_cubin
from ssdgen.build.worker import Answer, Rejected
from ssdgen.diagnostics import UserError
from ssdgen.ir.build import CompileRequest
from ssdgen.plan.roofline import Work
from ssdgen.run.recorded import Call, Launch
from ssdgen.run.tune.device import Device, assumed
from ssdgen.run.tune.space import Candidate, Space

LAUNCH_SECONDS = 2e-6
GREED = 2.0
HOPELESS = 2.5
"""A candidate that the model gives more than this times the best so far is not measured."""

SPILL_LIMIT = 256
"""Bytes a thread may spill; what spills less is measured, since it may still be the fastest."""


@dataclass(frozen=True, slots=True)
class Removed:
    """A candidate that is not measured, or has no speed: at which step it fell out, and the details."""

    candidate: Candidate
    step: str
    why: str


@dataclass(frozen=True, slots=True)
class Estimate:
    """A candidate that could be measured: its launches and the seconds the model gives them."""

    candidate: Candidate
    module_path: str
    launches: tuple[Launch, ...]
    seconds: float

    @property
    def requests(self) -> tuple[CompileRequest, ...]:
        """The kernels it needs, each once."""
        return tuple(dict.fromkeys(launch.request for launch in self.launches))

    @property
    def identity(self) -> object:
        """Equal for candidates that launch the same."""
        return tuple((launch.request, launch.grid) for launch in self.launches)


def estimated(space: Space, candidate: Candidate, call: Call, device: Device) -> Estimate | Removed:
    """The launches of a candidate and their modelled time, or why it cannot run."""
    try:
        variant = space.variant(candidate)
    except UserError as error:
        return Removed(candidate, "no kernels", error.message)
    try:
        if long := _longer_than_its_axis(dict(candidate.fields), call.sizes, variant.plan.form.recurrence.layer.time):
            return Removed(candidate, "computes padding", long)
        with assumed(variant.module, device):
            launches = space.launches(candidate, call)
    except (ValueError, TypeError, NotImplementedError) as error:
        return Removed(candidate, "refused by the module", str(error))
    blocks = {launch.request.kernel: launch.blocks for launch in launches}
    works = space.works(candidate, call, launches, device.multiprocessors)
    seconds = sum(modelled(work, blocks[work.kernel], device) for work in works)
    return Estimate(candidate, str(variant.module.__file__), launches, seconds)


def modelled(work: Work, blocks: int, device: Device) -> float:
    """The seconds that a kernel takes at least, roughly."""
    share = min(1.0, GREED * blocks / device.multiprocessors)
    return LAUNCH_SECONDS + work.bytes / (device.bandwidth * share)


def _longer_than_its_axis(moved: Mapping[str, object], sizes: Mapping[str, int], time: str) -> str:
    """The moved field whose tile is longer than the power of two that holds its axis; empty if none is."""
    for name, value in moved.items():
        axis = time if name == "chunk" else name.removeprefix("state_").removeprefix("tile_")
        if (name == "chunk" or "tile_" in name) and axis in sizes and isinstance(value, int):
            longest = max(32, 1 << max(0, sizes[axis] - 1).bit_length())
            if value > longest:
                return f"{name}={value} for {sizes[axis]} along {axis}"
    return ""


def compiled_badly(answer: Answer, request: CompileRequest, device: Device) -> tuple[str, str] | None:
    """The step at which a compiled kernel falls out, and why; None if it may run."""
    if isinstance(answer, Rejected):
        return "does not compile", f"{request.kernel}: {' '.join(answer.message.split())[:200]}"
    try:
        used = read_cubin(answer.cubin)
    except CubinError as error:
        return "does not compile", f"{request.kernel}: {error}"
    if used.shared_bytes > device.shared_limit:
        return "too much shared memory", f"{request.kernel}: {used.shared_bytes // 1024} KB"
    if used.spilled_bytes > SPILL_LIMIT:
        return "spills", f"{request.kernel}: {used.spilled_bytes} bytes a thread"
    return None
