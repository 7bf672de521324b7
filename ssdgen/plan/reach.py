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
    """The assignment of `begin`, the first chunk that a walk to the end of a segment starts from."""
    if not _forgets(builder.form, state):
        return ["begin = segment * per_segment"]
    oldest = _declared(builder, f"{state.decay}_oldest")
    return [f"begin = _reach.chunk_since({oldest}, lane, head, origin, segment, per_segment)"]


def back_over(builder: KernelBuilder, state: ChunkState, ends: bool) -> tuple[str, ...]:
    """The assignments of `begin` and `chunks`, what a block walks back over: all of its segment, or, if it only `ends`, what
    the beginning of that reaches."""
    chunks = "ct.minimum(ct.cdiv(length, CHUNK), begin + per_segment) - begin"
    if ends and _forgets(builder.form, state):
        newest = _declared(builder, f"{state.decay}_newest")
        chunks = f"_reach.chunks_until({newest}, lane, head, origin, segment, per_segment, length, CHUNK)"
    return "begin = segment * per_segment", f"chunks = {chunks}"


def since(builder: KernelBuilder, states: Iterable[ChunkState]) -> tuple[list[str], str]:
    """The assignment of `since`, the first segment of which anything is left where this one begins, and the arguments of
    `range` over those before it: all, if a decay is none that tokens have.

    What enters the first of all may be taken to enter `since`, as the jump over that leaves nothing of it either.
    """
    every = tuple(states)
    if not all(_forgets(builder.form, s) for s in every):
        return [], "segment"
    arrays = [_declared(builder, f"{d}_oldest") for d in dict.fromkeys(s.decay for s in every)]
    calls = [f"_reach.segment_since({a}, lane, head, origin, segment, per_segment)" for a in arrays]
    return [f"since = {calls[0]}", *(f"since = ct.minimum(since, {call})" for call in calls[1:])], "since, segment"


def until(builder: KernelBuilder, state: ChunkState) -> list[str]:
    """The assignment of `until`, behind the last segment that the end of this one reaches; behind all with a decay that no
    token has. What arrives at the end of all may then be taken to arrive there."""
    if not _forgets(builder.form, state):
        return ["until = ct.cdiv(ct.cdiv(length, CHUNK), per_segment)"]
    newest = _declared(builder, f"{state.decay}_newest")
    return [f"until = _reach.segment_until({newest}, lane, head, origin, segment, per_segment, length, CHUNK)"]


def _forgets(form: ChunkForm, state: ChunkState) -> bool:
    return form.decay(state.decay).kind == "token"


def _declared(builder: KernelBuilder, name: str) -> str:
    """The array of a chunk for each segment of a walk."""
    layer = builder.layer
    return builder.declare(Parameter(name, "workspace", name, (SEGMENTS, layer.batch, layer.head), "i32"))
