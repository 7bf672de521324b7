"""What a call looks like up to its values: the length of every axis, and the dtype of every input."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ssdgen.diagnostics import UserError
from ssdgen.ir.layer import Dtype, Layer, Tensor


def sizes_of(layer: Layer, shape: Mapping[str, int]) -> dict[str, int]:
    """The length of every axis of a layer: as `shape` has it, else the declared size, 1 for groups.

    Raises UserError for an unknown axis, a length below 1, a missing one, or groups that do not divide the heads.
    """
    known = [axis.name for axis in layer.axes]
    for axis, length in shape.items():
        if axis not in known:
            raise UserError(f"{layer.name} has no axis `{axis}`", f"its axes are {', '.join(known)}")
        if length < 1:
            raise UserError(f"axis {axis} has length {length}", "lengths are 1 or more")
    groups = {group.axis: 1 for group in layer.groups}
    declared = {axis.name: axis.size for axis in layer.axes if axis.size is not None}
    sizes = {**groups, **declared, **shape}
    if missing := [axis for axis in known if axis not in sizes]:
        hint = f"for example --shape {','.join(f'{axis}=...' for axis in missing)}"
        raise UserError(f"the shape does not say how long {', '.join(missing)} is", hint)
    for group in layer.groups:
        if sizes[group.shared] % sizes[group.axis]:
            raise UserError(f"{sizes[group.axis]} groups ({group.axis}) do not divide {sizes[group.shared]} heads")
    return {axis: sizes[axis] for axis in known}


def leaders(layer: Layer) -> frozenset[str]:
    """The inputs whose dtype is that of a call: those that others are like, or all where none is like another."""
    likes = [t.like for t in layer.inputs] + [o.like for o in layer.outputs]
    return frozenset(name for name in likes if name) or frozenset(t.name for t in layer.inputs)


def input_dtype(layer: Layer, tensor: Tensor, dtype: Dtype, uniform: bool = False) -> Dtype:
    """The dtype of an input in a call of `dtype`: that of leaders, and of all that take it if `uniform`, else its first."""
    leader = layer.tensor(tensor.like) if tensor.like else tensor
    leads = leader.name in leaders(layer) or uniform
    return dtype if leads and dtype in leader.dtypes else leader.dtypes[0]


def check_optional(layer: Layer, names: Iterable[str]) -> None:
    """Raise UserError for a name that is no optional input of the layer."""
    known = [t.name for t in layer.inputs if t.optional]
    for name in names:
        if name not in known:
            hint = f"it has {', '.join(known)}" if known else "it has none"
            raise UserError(f"{layer.name} has no optional input `{name}`", hint)


def check_dtype(layer: Layer, dtype: Dtype) -> None:
    """Raise UserError for a dtype that no leading input of the layer has."""
    taken = [d for name in sorted(leaders(layer)) for d in layer.tensor(name).dtypes]
    if dtype not in taken:
        raise UserError(f"{layer.name} takes no {dtype}", f"it takes {', '.join(dict.fromkeys(taken))}")
