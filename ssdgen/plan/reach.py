"""How far states remember: chunks of which nothing is left at the end of a segment have no part in it, and are not read.

The kernel of `_reach.py` finds them from the running sums of a decay that tokens have; with any other decay, and with none,
all chunks are read.
"""

from __future__ import annotations

from collections.abc import Iterable

from ssdgen.ir.chunkform import ChunkForm, ChunkState
from ssdgen.ir.plan import SEGMENTS, Config, Parameter, Reach
from ssdgen.plan.builder import KernelBuilder
from ssdgen.plan.decays import scalar_axes


def reaches(form: ChunkForm, config: Config, back: bool = False) -> tuple[Reach, ...]:
    """One for each decay of tokens that a state has; with `back` for walks back, too."""
    decays = dict.fromkeys(s.decay for s in form.states if form.decay(s.decay).kind == "token")
    sums = {d: f"{d}_sum" for d in decays}
    return tuple(
        Reach(name, scalar_axes(form, config, name), f"{d}_oldest", f"{d}_newest" if back else "")
        for d, name in sums.items()
    )


def remembered(builder: KernelBuilder, state: ChunkState) -> list[str]:
    """The assignment of `begin`, the first chunk that a walk to the end of a segment starts from; none if that is its first."""
    if not _forgets(builder.form, state):
        return []
    oldest = _load(builder, f"{state.decay}_oldest")
    return [f"oldest = {oldest}", "begin = ct.maximum(segment * per_segment, oldest)  # what is older is forgotten"]


def reached(builder: KernelBuilder, state: ChunkState) -> list[str]:
    """The assignments that leave of the `chunks` of a walk back those that the beginning of its segment reaches."""
    if not _forgets(builder.form, state):
        return []
    newest = _load(builder, f"{state.decay}_newest")
    return [f"newest = {newest}", "chunks = ct.minimum(chunks, newest + 1 - begin)  # no newer one is reached"]


def since(builder: KernelBuilder, states: Iterable[ChunkState], entering: str) -> list[str]:
    """The assignment of `since`, the first segment of which anything is left where this one begins; none if that is the first
    of all, as it is wherever the flag `entering` says that a state enters that one."""
    every = tuple(states)
    if not all(_forgets(builder.form, s) for s in every):
        return []
    arrays = [_declared(builder, f"{d}_oldest") for d in dict.fromkeys(s.decay for s in every)]
    calls = [f"_reach.segment_since({a}, lane, head, origin, segment, per_segment, {entering})" for a in arrays]
    return [f"since = {calls[0]}", *(f"since = ct.minimum(since, {call})" for call in calls[1:])]


def until(builder: KernelBuilder, state: ChunkState, arriving: str) -> list[str]:
    """The assignment of `until`, behind the last segment that the end of this one reaches; none if that is behind all, as it
    is wherever the flag `arriving` says that a gradient arrives there."""
    if not _forgets(builder.form, state):
        return []
    newest = _declared(builder, f"{state.decay}_newest")
    return [f"until = _reach.segment_until({newest}, lane, head, origin, segment, per_segment, segments, {arriving})"]


def _forgets(form: ChunkForm, state: ChunkState) -> bool:
    return form.decay(state.decay).kind == "token"


def _declared(builder: KernelBuilder, name: str) -> str:
    """The array of a chunk for each segment of a walk."""
    layer = builder.layer
    return builder.declare(Parameter(name, "workspace", name, (SEGMENTS, layer.batch, layer.head), "i32"))


def _load(builder: KernelBuilder, name: str) -> str:
    """The load of that of this segment."""
    return f"load({_declared(builder, name)}, (origin + segment, lane, head), (1, 1, 1))"
