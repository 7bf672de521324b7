"""The kernel `group_scores`: products of two tokens' vectors that all heads of a group share, computed once a group."""

from __future__ import annotations

from ssdgen.ir.chunkform import ChunkForm, Score
from ssdgen.ir.expr import ONE, Apply, Contract, Index, Ref, walk
from ssdgen.ir.plan import (
    KEY,
    NUMBERS,
    Config,
    Dot,
    GroupKernel,
    HalfScale,
    Let,
    Parameter,
    Slot,
    Statement,
    Store,
    Workspace,
    Zeros,
)
from ssdgen.plan.lower import inline, retime, where
from ssdgen.plan.names import SHARED
from ssdgen.plan.place import CHUNK_TABLE, chunk_position, declare_packed
from ssdgen.plan.walk import WalkBuilder, tile_constant

ROLE = "group_scores"
FIELD = "share_scores_from"
"""The field of the emitted Config that says from how many heads a group on it pays."""
UNSHARED = 4
"""Tokens of a buffer that no kernel uses: kernels are compiled for rows of whole 16 bytes."""


def product_key(score: Score) -> str:
    """What tells apart the products vector . column of two tokens; scores with equal ones share it."""
    return f"{score.vector} . {score.column}"


def product_name(form: ChunkForm, score: Score) -> str:
    """The name of the product of a score: `scores`, and a number from the second on."""
    keys = list(dict.fromkeys(product_key(form.score(i.score)) for r in form.reads for i in r.interactions))
    at = keys.index(product_key(score))
    return f"scores_{at + 1}" if at else "scores"


def group_of(form: ChunkForm, score: Score) -> str | None:
    """The group axis whose heads share the product of a score; None if each head has its own."""
    layer = form.recurrence.layer
    lets = {let.name: let.value for let in layer.lets}
    used = [e for side in (score.vector, score.column) for e in walk(inline(side, lets))]
    inputs = {t.name: t for t in layer.inputs}
    axes = {a for e in used if isinstance(e, Ref) and e.name in inputs for a in inputs[e.name].axes}
    axes |= {e.axis for e in used if isinstance(e, Index)}
    groups = [g.axis for g in layer.groups if g.axis in axes]
    return groups[0] if len(groups) == 1 and layer.head not in axes else None


def shared_scores(form: ChunkForm) -> tuple[Score, ...]:
    """One score for each product that a group can share."""
    found = {product_key(s): s for s in reversed(form.scores) if group_of(form, s) is not None and not s.lag}
    return tuple(reversed(found.values()))


def masked_once(form: ChunkForm, score: Score) -> bool:
    """Whether the product of `score` can be zero already where no token may look: all that use it look as far."""
    same = [s for s in form.scores if product_key(s) == product_key(score)]
    return group_of(form, score) is not None and len({s.at for s in same}) == 1


def scores_parameter(form: ChunkForm, score: Score) -> Parameter:
    """The buffer of a product: [batch, group, time, key], a row of a chunk's keys for each token, over the scale of the row."""
    layer, group = form.recurrence.layer, group_of(form, score)
    assert group is not None
    name = f"shared_{product_name(form, score)}"
    return Parameter(name, "workspace", name, (layer.batch, group, layer.time, KEY), "scores")


def token_parameter(form: ChunkForm, score: Score) -> Parameter:
    """A buffer [batch, group, number, time] beside the product's, with the `numbers` of each token."""
    layer, group = form.recurrence.layer, group_of(form, score)
    assert group is not None
    name = f"shared_{product_name(form, score)}_token"
    return Parameter(name, "workspace", name, (layer.batch, group, NUMBERS, layer.time), "f32")


def numbers(form: ChunkForm, score: Score) -> dict[str, str]:
    """What is stored for each token beside its scores, in this order, and what it is."""
    scale = {"scale": "what a token's scores are divided by"}
    own = {"own": "its score with itself"}
    return scale | own if reads_itself(form, score) else scale


def reads_itself(form: ChunkForm, score: Score) -> bool:
    """Whether a token's score with itself can be kept apart in float32: the heaviest one, since nothing has decayed."""
    return masked_once(form, score) and score.at == 0


def group_kernel(form: ChunkForm, config: Config, score: Score) -> GroupKernel:
    """The kernel that computes the product of `score`, one of `shared_scores`, for every group and chunk."""
    layer, group = form.recurrence.layer, group_of(form, score)
    assert group is not None
    builder = WalkBuilder(form, config, (score.axis,))
    builder.place[group] = Slot(group, f"group_{group}", "1")
    builder.place[score.axis] = Slot(score.axis, "0", tile_constant(score.axis))
    declare_packed(builder, CHUNK_TABLE)
    builder.places["workspace"][KEY] = Slot(KEY, "0", "CHUNK")
    body: list[Statement] = []
    vector = builder.row(body, score.vector, score.axis, "vector")
    keys = retime(builder.column(body, score.column, score.axis), layer.time, KEY)
    target = Ref(builder.names.of("value", product_name(form, score)), (layer.time, KEY))
    body += [Zeros(target), Dot(target, (vector, keys), score.axis, target, builder.constant("scores"))]
    values: dict[str, Ref] = {}
    if reads_itself(form, score):
        same = Apply("eq", (Ref("token", (layer.time,)), Ref("token", (KEY,))))
        itself = Contract(where(same, target), ONE, KEY)
        values["own"] = builder.name_value(body, f"{target.name}_own", itself, "of a token with itself")
    seen = builder.causal(body, -1 if masked_once(form, score) else 0, target.axes)
    body.append(Let(target, where(seen, target)))  # so that no later token has a part in the scale
    scale = values["scale"] = Ref(builder.names.fresh(f"{target.name}_scale"), (layer.time,))
    body.append(HalfScale(scale, target, KEY))
    buffer = builder.declare(scores_parameter(form, score))
    body.append(Store(buffer, builder.slots(buffer), Apply("div", (target, scale)), target.axes))
    array = builder.declare(token_parameter(form, score))
    for at, what in enumerate(numbers(form, score)):
        builder.place[NUMBERS] = Slot(NUMBERS, str(at), "1")
        body.append(Store(array, builder.slots(array), values[what], values[what].axes))
    builder.constant("chunk")
    builder.constant(f"tile_{score.axis}", f"size_{score.axis}")
    builder.finish(body)
    token = ["token = ct.arange(CHUNK, dtype=ct.int32)"] if "token" in builder.used else []
    return GroupKernel(
        name=f"group_{product_name(form, score)}",
        role=ROLE,
        doc="Products of every token of one chunk with those that it reads, before any decay: the same for all heads of a"
        " group.",
        parameters=builder.ordered_parameters(),
        grid=("cut.lanes * cut.slots", f"size_{group}"),
        position=(*chunk_position(builder), f"group_{group} = ct.bid(1)", *token, *builder.position),
        occupancy=f"occupancy_{ROLE}",
        condition=SHARED.lower(),
        body=tuple(body),
    )


def group_workspaces(form: ChunkForm, score: Score) -> tuple[Workspace, ...]:
    """The buffers of the product of `score`, padded to whole chunks; of UNSHARED tokens where heads are not to share."""
    parameter = scores_parameter(form, score)
    group = parameter.axes[1]
    lanes, tokens = ("cut.lanes", f"size_{group}"), f"cut.slots * config.chunk if shared else {UNSHARED}"
    doc = f"{product_key(score)} of each token and those before it in a chunk, over the token's scale"
    beside, notes = token_parameter(form, score), numbers(form, score)
    return (
        Workspace(parameter.name, parameter.axes, (*lanes, tokens, "config.chunk"), parameter.dtype, doc),
        Workspace(beside.name, beside.axes, (*lanes, str(len(notes)), tokens), "f32", ", and ".join(notes.values())),
    )
