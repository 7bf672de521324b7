"""Random inputs for any layer: realistic values, every dtype, awkward memory, and nothing that is zero by accident.

A fault that zeros hide is the common one (an input of zeros makes a missing term invisible), so values are random,
within their declared range, and shaped by how the layer uses them: an input of a softplus yields steps between 0.001
and 0.1, a log gate is the logsigmoid of something around 3, a gate's argument sits where sigmoid is near 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from ssdgen.ir.expr import Apply, Axes, Expr, Ref, rewrite, walk
from ssdgen.ir.layer import Interval, Layer, Tensor
from ssdgen.plan.names import arguments, initial_key
from ssdgen.plan.shapes import input_dtype, leaders

Dtype = Literal["bf16", "f16", "f32", "f64"]
DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "f64": torch.float64,
}
Memory = Literal["plain", "slices", "transposed", "expanded", "surrounded"]
"""plain: contiguous; slices: all per-token inputs of a dtype are columns of one buffer; transposed: dimensions in
reverse order in memory; expanded: every batch entry is the same memory (stride 0); surrounded: a view into a larger
buffer. Whatever of a buffer no input covers is NaN."""


@dataclass(frozen=True, slots=True)
class Case:
    """What to draw. `sizes` gives every axis its length; names in `absent` (`D`, `S0`) are left out, in `zero` are 0.

    `dtype` is that of the inputs that others are `like`, and theirs; the rest have the first dtype they declare, or
    `dtype` too if `uniform` and they may. `forms` chooses a narrower declared form of an input (`{"D": ("h",)}`);
    `params` overrides run-time scalars.
    """

    sizes: Mapping[str, int]
    dtype: Dtype = "f32"
    uniform: bool = False
    absent: frozenset[str] = frozenset()
    zero: frozenset[str] = frozenset()
    forms: Mapping[str, Axes] = field(default_factory=dict)
    params: Mapping[str, float] = field(default_factory=dict)
    memory: Memory = "plain"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs of one call by name; absent ones are in no dictionary. `states` are initial states by state name."""

    tensors: dict[str, torch.Tensor]
    params: dict[str, float]
    states: dict[str, torch.Tensor]
    arguments: Mapping[str, str] = field(default_factory=dict)

    def keywords(self) -> dict[str, torch.Tensor | float]:
        """The arguments of an emitted `forward`, all by keyword: the state `S` as `S0`, `lambda` as `arguments` has it."""
        tensors = {self.arguments.get(n, n): v for n, v in self.tensors.items()}
        params = {self.arguments.get(n, n): v for n, v in self.params.items()}
        initial = {self.arguments.get(initial_key(n), f"{n}0"): v for n, v in self.states.items()}
        return {**tensors, **params, **initial}


def draw(layer: Layer, case: Case, device: torch.device | str = "cpu", generated_on: str = "cpu") -> Inputs:
    """Random inputs of `layer` as `case` wants them, on `device`.

    A case has the same values wherever they go, unless large ones are `generated_on` the GPU to save time and memory.
    """
    generator = torch.Generator(generated_on).manual_seed(case.seed)
    precision = torch.float64 if generated_on == "cpu" else torch.float32
    uses = uses_of(layer)
    tensors: dict[str, torch.Tensor] = {}
    for tensor in layer.inputs:
        axes = array_axes(layer, tensor, case.forms.get(tensor.name))
        shape = [case.sizes[a] for a in axes]
        normal = torch.randn(shape, generator=generator, dtype=precision, device=generated_on)
        value = _values(tensor, uses, layer.time in axes, normal)
        if tensor.name in case.absent:
            continue
        if tensor.name in case.zero:
            value = torch.zeros_like(value)
        tensors[tensor.name] = value.to(dtype_of(layer, tensor, case)).to(device)
    states: dict[str, torch.Tensor] = {}
    for state in layer.states:
        shape = [case.sizes[a] for a in state.axes]
        value = torch.randn(shape, generator=generator, dtype=precision, device=generated_on)
        if f"{state.name}0" in case.zero:
            value = torch.zeros_like(value)
        if f"{state.name}0" not in case.absent:
            states[state.name] = value.to(torch.float64 if case.dtype == "f64" else DTYPES[state.dtype]).to(device)
    leading = {name: array_axes(layer, layer.tensor(name), case.forms.get(name))[:2] for name in tensors}
    per_token = [name for name, axes in leading.items() if axes == (layer.batch, layer.time)]
    return Inputs(_arranged(tensors, per_token, case.memory), dict(case.params), states, arguments(layer))


def array_axes(layer: Layer, tensor: Tensor, form: Axes | None = None) -> Axes:
    """The axes of the array a caller passes for `tensor`, in order: as declared, unless the schedule gives a layout."""
    if form is not None and form != tensor.axes:
        return form
    return next((layout.axes for layout in layer.schedule.layouts if layout.name == tensor.name), tensor.axes)


def in_order_of_equations(layer: Layer, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Inputs as a caller passes them, with their dimensions in the order of the equations."""
    out = {}
    for name, x in tensors.items():
        tensor = layer.tensor(name)
        form = next(f for f in (tensor.axes, *tensor.narrower) if len(f) == x.dim())
        order = array_axes(layer, tensor, form)
        out[name] = x.permute([order.index(a) for a in form])
    return out


def dtype_of(layer: Layer, tensor: Tensor, case: Case) -> torch.dtype:
    """The dtype of `tensor` in a call that `case` describes."""
    if case.dtype == "f64":
        return torch.float64
    return DTYPES[input_dtype(layer, tensor, case.dtype, case.uniform)]


def takes(layer: Layer, dtype: Dtype) -> bool:
    """Whether a call of `layer` may have `dtype`; float64 is taken by the portable form of every layer."""
    return dtype == "f64" or any(dtype in layer.tensor(name).dtypes for name in leaders(layer))


@dataclass(frozen=True, slots=True)
class Uses:
    """Names of inputs that go into a softplus, and of those whose sigmoid or logsigmoid decays a state."""

    softplus: frozenset[str]
    gate: frozenset[str]


def uses_of(layer: Layer) -> Uses:
    """How a layer uses its inputs, as far as values have to fit it."""
    lets = {let.name: let.value for let in layer.lets}

    def inlined(e: Expr) -> Expr | None:
        return rewrite(lets[e.name], inlined) if isinstance(e, Ref) and e.name in lets else None

    def inside(expr: Expr, ops: tuple[str, ...]) -> set[str]:
        found = (e for e in walk(rewrite(expr, inlined)) if isinstance(e, Apply) and e.op in ops)
        return {r.name for e in found for r in walk(e) if isinstance(r, Ref)}

    updates = [s.update for s in layer.states]
    decays = [s.decay for s in layer.states]
    return Uses(
        frozenset(name for e in updates for name in inside(e, ("softplus",))),
        frozenset(name for e in decays for name in inside(e, ("sigmoid", "logsigmoid"))),
    )


def _values(tensor: Tensor, uses: Uses, per_token: bool, normal: torch.Tensor) -> torch.Tensor:
    """Values for `tensor` out of standard normal ones."""
    low, high = tensor.range.low, tensor.range.high
    if tensor.name in uses.softplus:
        step = _steps(normal)
        return step + torch.log(-torch.expm1(-step)) if per_token else 0.1 * normal  # the inverse of softplus
    if tensor.name in uses.gate:
        return normal + 2
    if math.isfinite(low) and math.isfinite(high):
        return low + (high - low) * torch.sigmoid(normal + 2)
    if high <= 0:
        return torch.nn.functional.logsigmoid(normal + 3) if per_token else -(1 + 15 * _uniform(normal))
    if low >= 0:
        return _steps(normal) if normal.dim() == 3 else normal.abs() + 0.01
    return normal


def _uniform(normal: torch.Tensor) -> torch.Tensor:
    """Uniform between 0 and 1."""
    return 0.5 * (1 + torch.erf(normal / math.sqrt(2)))


def _steps(normal: torch.Tensor) -> torch.Tensor:
    """Log-uniform between 0.001 and 0.1."""
    return torch.exp(math.log(0.001) + _uniform(normal) * math.log(100.0))


def may_be_zero(interval: Interval) -> bool:
    """Whether 0 is in `interval`."""
    above = interval.low < 0 or (interval.low == 0 and not interval.low_open)
    below = interval.high > 0 or (interval.high == 0 and not interval.high_open)
    return above and below


def _arranged(tensors: dict[str, torch.Tensor], per_token: list[str], memory: Memory) -> dict[str, torch.Tensor]:
    """The same values in other memory (`expanded` repeats the first batch entry)."""
    match memory:
        case "plain":
            return tensors
        case "transposed":
            return {name: _transposed(x) for name, x in tensors.items()}
        case "surrounded":
            return {name: surrounded(x) for name, x in tensors.items()}
        case "expanded":
            return {n: x[:1].expand(x.shape) if n in per_token and x.shape[0] else x for n, x in tensors.items()}
        case "slices":
            out = dict(tensors)
            for dtype in dict.fromkeys(tensors[n].dtype for n in per_token):
                out.update(_slices({n: tensors[n] for n in per_token if tensors[n].dtype == dtype}))
            return out


def _transposed(x: torch.Tensor) -> torch.Tensor:
    back = list(range(x.dim()))[::-1]
    return x.permute(back).contiguous().permute(back)


def surrounded(x: torch.Tensor, margin: int = 3) -> torch.Tensor:
    """`x` as a view into a buffer with `margin` NaNs before and after it in every dimension."""
    buffer = torch.full([n + 2 * margin for n in x.shape], math.nan, dtype=x.dtype, device=x.device)
    view = buffer[tuple(slice(margin, margin + n) for n in x.shape)]
    view.copy_(x)
    return view


def _slices(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors [b, t, ...] as columns of one buffer [b, t, width] whose remaining columns are NaN."""
    first = next(iter(tensors.values()))
    widths = {name: math.prod(x.shape[2:]) for name, x in tensors.items()}
    gap = 5
    width = sum(widths.values()) + gap * (len(widths) + 1)
    buffer = torch.full([*first.shape[:2], width], math.nan, dtype=first.dtype, device=first.device)
    out, start = {}, gap
    for name, x in tensors.items():
        view = buffer[:, :, start : start + widths[name]].view(x.shape) if widths[name] else x
        out[name] = view.copy_(x)
        start += widths[name] + gap
    return out
