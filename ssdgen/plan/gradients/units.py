"""What a block of the chunk kernel has: the heads of a group whose vectors and columns are the same, or one head."""

from __future__ import annotations

from ssdgen.ir.chunkform import ChunkForm
from ssdgen.plan.builder import Unsupported
from ssdgen.plan.shared import group_of


def unit_of(form: ChunkForm) -> str | None:
    """The group axis whose heads have all vectors and columns in common; None if every head has its own.

    Unsupported where it is neither.
    """
    groups = {group_of(form, score) for score in form.scores}
    if len(groups) > 1:
        raise Unsupported("scores of which heads share some")
    group = next(iter(groups), None)
    if group is None and form.recurrence.layer.groups:
        raise Unsupported("scores of which heads share one factor")
    return group
