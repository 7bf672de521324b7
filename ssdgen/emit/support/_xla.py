"""What modules emitted for XLA share: checks of what a caller passes, products, and states that go from chunk to chunk.

Copied verbatim beside the modules that ssdgen emits; it imports nothing of ssdgen. All of it can be traced: shapes and
dtypes are checked, values of arrays are not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

Axes = tuple[str, ...]

BF16, F16, F32, F64 = (np.dtype(t) for t in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64))
HIGHEST = lax.Precision.HIGHEST

BLOCK = 64
"""Chunks computed side by side. More of them take turns, so that memory does not grow with the sequence, nor the product
that gives them their first states with its square."""


@dataclass(frozen=True)
class Input:
    """What is known of an input: axes in the order of its array's dimensions, dtypes, and the range of its values.

    `narrower` are accepted forms with fewer axes; `default` stands for an absent input; `optional` ones may be None.
    """

    name: str
    axes: Axes
    dtypes: tuple[Any, ...]
    like: str = ""
    narrower: tuple[Axes, ...] = ()
    default: float | None = None
    optional: bool = False
    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False


@dataclass(frozen=True)
class Scalar:
    """A run-time scalar and the range it must be in."""

    name: str
    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False


@dataclass(frozen=True)
class Layer:
    """The interface of a layer: its name for messages, inputs, scalars, groups {axis: shared by}, values {name: axes},
    and the dtype of each output, or the name of the input that has it."""

    name: str
    batch: str
    time: str
    head: str
    inputs: tuple[Input, ...]
    scalars: tuple[Scalar, ...]
    groups: Mapping[str, str]
    states: Mapping[str, Axes]
    outputs: Mapping[str, Axes]
    dtypes: Mapping[str, Any]


@dataclass(frozen=True)
class Call:
    """What is known of a checked call: the length of every axis, the dtype to compute in, and those of inputs, states and
    outputs by name."""

    size: dict[str, int]
    dtype: Any
    inputs: dict[str, Any]
    states: dict[str, Any]
    outputs: dict[str, Any]


def check(
    layer: Layer,
    values: Mapping[str, Any],
    states: Mapping[str, Any],
    scalars: Mapping[str, Any],
    step: bool = False,
) -> Call:
    """Check the shape and dtype of every input and state, and the range of every scalar that is a number.

    step: a call of one token, where nothing has an axis of time and states may be bfloat16. Raises TypeError for a missing
    input, what is no array, or a dtype; ValueError for a rank, a size or a range.
    """
    sizes: dict[str, tuple[int, str]] = {}
    for spec in layer.inputs:
        value = values[spec.name]
        if value is None:
            if spec.default is None and not spec.optional:
                raise TypeError(f"{layer.name}: `{spec.name}`[{' '.join(spec.axes)}] is missing")
            continue
        forms = [tuple(a for a in axes if not (step and a == layer.time)) for axes in (spec.axes, *spec.narrower)]
        axes = _check_array(layer.name, spec.name, value, forms)
        _check_dtype(layer.name, spec, value, values)
        _check_sizes(layer.name, spec.name, axes, value, sizes)
    for name, axes in layer.states.items():
        value, argument = states[name], name if step else f"{name}0"
        if value is None and not step:
            continue
        _check_array(layer.name, argument, value, [axes])
        wide = (F32, BF16, F64) if step else (F32, F64)
        if value.dtype not in wide:
            raise TypeError(f"{layer.name}: `{argument}` must be {_names(wide)}, got {value.dtype}")
        _check_sizes(layer.name, argument, axes, value, sizes)
    size = {axis: length for axis, (length, _) in sizes.items()}
    for group, shared in layer.groups.items():
        if group in size and (size[group] < 1 or size[shared] % size[group]):
            raise ValueError(
                f"{layer.name}: {size[group]} groups (axis {group}, of `{sizes[group][1]}`) do not divide {size[shared]} heads"
                f" (axis {shared}, of `{sizes[shared][1]}`)"
            )
    for scalar in layer.scalars:
        _check_scalar(layer.name, scalar, scalars[scalar.name])
    inputs, before = ({name: v.dtype for name, v in group.items() if v is not None} for group in (values, states))
    dtype = F64 if F64 in (*inputs.values(), *before.values()) else F32
    outputs = {
        name: inputs[d] if isinstance(d, str) else F64 if dtype == F64 else d for name, d in layer.dtypes.items()
    }
    return Call(size, dtype, inputs, before, outputs)


def check_chunk(layer: Layer, chunk: int) -> None:
    """ValueError unless `chunk`, a length at which the program is traced, is a positive integer."""
    if type(chunk) is not int or chunk < 1:
        raise ValueError(f"{layer.name}: `chunk` must be a positive integer, got {chunk!r}")


def _check_array(layer: str, name: str, value: Any, forms: Sequence[Axes]) -> Axes:
    """The form whose rank `value` has."""
    if not isinstance(value, jax.Array | np.ndarray):
        raise TypeError(f"{layer}: `{name}` must be an array of jax or numpy, got {type(value).__name__}")
    for axes in forms:
        if len(axes) == value.ndim:
            return axes
    expected = " or ".join(f"[{' '.join(a)}] (rank {len(a)})" for a in forms)
    raise ValueError(f"{layer}: `{name}` must be {expected}, got shape {list(value.shape)} (rank {value.ndim})")


def _check_dtype(layer: str, spec: Input, value: Any, values: Mapping[str, Any]) -> None:
    if spec.like:
        leader = values[spec.like]
        if isinstance(leader, jax.Array | np.ndarray) and value.dtype != leader.dtype:
            raise TypeError(
                f"{layer}: `{spec.name}` must have the dtype of `{spec.like}`, {leader.dtype}, got {value.dtype}; convert it"
                f" with `.astype({spec.like}.dtype)`"
            )
        return
    allowed = (*spec.dtypes, F64)
    if value.dtype not in allowed:
        raise TypeError(f"{layer}: `{spec.name}` must be {_names(allowed)}, got {value.dtype}")


def _check_sizes(layer: str, name: str, axes: Axes, value: Any, sizes: dict[str, tuple[int, str]]) -> None:
    for axis, size in zip(axes, value.shape, strict=True):
        known, owner = sizes.setdefault(axis, (size, name))
        if known != size:
            raise ValueError(
                f"{layer}: `{name}`[{' '.join(axes)}] has shape {list(value.shape)}, but axis {axis} is {known} in `{owner}`"
            )


def _check_scalar(layer: str, spec: Scalar, value: Any) -> None:
    if isinstance(value, jax.Array):
        return  # traced, or on a device: its value would have to be waited for
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(f"{layer}: `{spec.name}` must be a number, got {type(value).__name__}")
    above = value > spec.low if spec.low_open else value >= spec.low
    below = value < spec.high if spec.high_open else value <= spec.high
    if not (above and below):
        bounds = f"{'(' if spec.low_open else '['}{spec.low:g}, {spec.high:g}{')' if spec.high_open else ']'}"
        raise ValueError(f"{layer}: `{spec.name}` must be in {bounds}, got {value:g}")


def _names(dtypes: Sequence[Any]) -> str:
    return " or ".join(str(d) for d in dtypes)


def expand(spec: Input, value: Array | None, size: Mapping[str, int]) -> Array:
    """An input without a time axis in its widest form: absent, its default; narrower, repeated."""
    shape = [size[a] for a in spec.axes]
    if value is None:
        return jnp.full(shape, spec.default, F32)
    if value.ndim == len(shape):
        return value
    axes = next(a for a in spec.narrower if len(a) == value.ndim)
    return jnp.broadcast_to(value.reshape([size[a] if a in axes else 1 for a in spec.axes]), shape)


def initial(layer: Layer, name: str, given: Array | None, call: Call) -> Array:
    """A state before the first token: as given, else zeros."""
    return (
        jnp.zeros([call.size[a] for a in layer.states[name]], call.dtype) if given is None else given.astype(call.dtype)
    )


def by_group(x: Array, at: int, groups: int) -> Array:
    """`x` with its axis of heads, dimension `at`, as two: groups, and the heads of each."""
    return x.reshape(*x.shape[:at], groups, x.shape[at] // groups, *x.shape[at + 1 :])


def by_head(x: Array, at: int) -> Array:
    """`x` with dimensions `at`, groups, and `at + 1`, the heads of each, as one."""
    return x.reshape(*x.shape[:at], x.shape[at] * x.shape[at + 1], *x.shape[at + 2 :])


def per_head(x: Array, at: int, heads: int) -> Array:
    """`x` with its group axis (dimension `at`) repeated to one entry a head."""
    return jnp.repeat(x, heads // x.shape[at], axis=at)


def shifted(x: Array, at: int) -> Array:
    """`x` one token later along dimension `at`, zero at the first."""
    length = x.shape[at]
    first = jnp.zeros_like(lax.slice_in_dim(x, 0, min(1, length), axis=at))
    return jnp.concatenate((first, lax.slice_in_dim(x, 0, max(0, length - 1), axis=at)), at)


def minimum(a: Array | float, b: Array | float) -> Array:
    """The smaller of two values; where an array equals a number, the gradient is the array's, not half of it."""
    if isinstance(a, int | float):
        a, b = b, a
    return jnp.where(a > b, b, a) if isinstance(b, int | float) else jnp.minimum(a, b)


def maximum(a: Array | float, b: Array | float) -> Array:
    """The larger of two values; where an array equals a number, the gradient is the array's, not half of it."""
    if isinstance(a, int | float):
        a, b = b, a
    return jnp.where(a < b, b, a) if isinstance(b, int | float) else jnp.maximum(a, b)


def summed(x: Array, at: int) -> Array:
    """The sums of `x` through each place of dimension `at`: as many masked sums at once, which is one kernel for XLA, where a
    cumulative sum is a chain of small ones."""
    place = jnp.arange(x.shape[at])
    through = (place[None, :] <= place[:, None]).reshape(*(1,) * at, len(place), len(place), *(1,) * (x.ndim - at - 1))
    return jnp.sum(jnp.where(through, jnp.expand_dims(x, at), 0.0), at + 1)


def einsum(subscripts: str, left: Array, right: Array, precision: Any, dtype: Any) -> Array:
    """The einsum of two arrays, made with its axes as a product of matrices has them, those of both, of `left`, of `right`,
    and then transposed: the last axis of `right` stays one piece of memory. Left to itself, jax.numpy chooses another order."""
    operands, wanted = subscripts.split("->")
    first, second = operands.split(",")
    both, own = [a for a in first if a in second], [a for a in first + second if not (a in first and a in second)]
    order = "".join(a for a in both + own if a in wanted)
    product = jnp.einsum(f"{operands}->{order}", left, right, precision=precision, preferred_element_type=dtype)
    found: Array = jnp.transpose(product, [order.index(a) for a in wanted])
    return found


Product = Callable[[str, Array, Array], Array]


def products(leader: Any, dtype: Any, precision: Any) -> tuple[Product, Any]:
    """The einsum of two arrays for inputs of dtype `leader`: of bfloat16 its operands are too, else of `dtype`, multiplied
    with `precision`; sums are in `dtype`. And how states are multiplied, which stay in `dtype`: beside products of bfloat16
    the device's default will do."""
    narrow = leader == BF16 and dtype == F32
    operand, how = (BF16, lax.Precision.DEFAULT) if narrow else (dtype, precision)

    def product(subscripts: str, left: Array, right: Array) -> Array:
        return einsum(subscripts, left.astype(operand), right.astype(operand), how, dtype)

    return product, how


Chunk = Callable[[tuple[Array, ...], tuple[Any, ...]], tuple[tuple[Array, ...], tuple[Array, ...]]]


def walk(
    chunks: Chunk,
    states: tuple[Array, ...],
    tokens: Sequence[tuple[Array | None, int]],
    outputs: Sequence[tuple[int, tuple[int, ...], Any]],
    length: int,
    chunk: int,
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Run `chunks` over a sequence, as many chunks at a time as BLOCK: its outputs, and the states behind it.

    chunks: (states before, values of each chunk's tokens) -> (states behind, outputs of each chunk's tokens)
    tokens: values of every token, or None, and which dimension time is
    outputs: of each, which dimension time is, the whole shape, the dtype
    length, chunk: tokens of the sequence, and of a chunk; what is left over behind whole chunks is a shorter one, so that
    nothing is padded
    """
    pieces: list[tuple[Array, ...]] = []
    start = 0
    for blocks, count, size in _spans(length, chunk):
        stop = start + blocks * count * size
        now = tuple(None if v is None else _cut(v, at, start, stop, blocks, count) for v, at in tokens)
        if blocks == 1:
            states, found = chunks(states, tuple(None if v is None else v[0] for v in now))
            found = tuple(v[None] for v in found)
        else:
            states, found = lax.scan(chunks, states, now)
        pieces.append(tuple(_joined(v, at) for v, (at, _, _) in zip(found, outputs, strict=True)))
        start = stop
    if not pieces:
        return tuple(jnp.zeros(shape, dtype) for _, shape, dtype in outputs), states
    columns = zip(*pieces, strict=True)
    joined = [jnp.concatenate(c, at) if len(c) > 1 else c[0] for c, (at, _, _) in zip(columns, outputs, strict=True)]
    return tuple(joined), states


def _spans(length: int, chunk: int) -> Iterator[tuple[int, int, int]]:
    """(blocks, chunks a block, tokens a chunk) for each part of a sequence that is computed by itself, in order."""
    full, rest = divmod(length, chunk)
    blocks, chunks = divmod(full, BLOCK)
    if blocks:
        yield blocks, BLOCK, chunk
    if chunks:
        yield 1, chunks, chunk
    if rest:
        yield 1, 1, rest


def _cut(x: Array, at: int, start: int, stop: int, blocks: int, chunks: int) -> Array:
    """The tokens from `start` to `stop` of dimension `at`, as [blocks, chunks, ..., tokens, ...]."""
    part = lax.slice_in_dim(x, start, stop, axis=at)
    split = part.reshape(*x.shape[:at], blocks, chunks, (stop - start) // (blocks * chunks), *x.shape[at + 1 :])
    return jnp.moveaxis(split, (at, at + 1), (0, 1))


def _joined(x: Array, at: int) -> Array:
    """[blocks, chunks, ..., tokens, ...] as one dimension of tokens, `at`."""
    moved = jnp.moveaxis(x, (0, 1), (at, at + 1))
    return moved.reshape(*moved.shape[:at], math.prod(moved.shape[at : at + 3]), *moved.shape[at + 3 :])


def entries(log2: Array | float, gained: Array, state: Array, precision: Any) -> tuple[Array, Array]:
    """The state that each chunk begins with, [C, ...], and the one behind the last: the jump formula with chunks for tokens.

        entry[z] = 2^(log2[0] + ... + log2[z-1]) state + sum_(c<z) 2^(log2[c+1] + ... + log2[z-1]) gained[c]

    log2: [C or 1, ...], or a number: the sum of the log2 decays over each chunk, its dimensions as those of `gained` or 1
    gained: [C, ...]: what each chunk adds
    state: [...]: before the first

    Each exponent is a sum of its own, not the difference of two: whole chunks of strong decays would drown weak ones in it.
    """
    chunks = gained.shape[0]
    gained = jnp.broadcast_to(gained, (chunks, *state.shape))
    ends = jnp.asarray(log2, gained.dtype)
    ends = ends.reshape((1,) * gained.ndim) if ends.ndim == 0 else ends
    ends = jnp.broadcast_to(ends, (chunks, *ends.shape[1:]))
    if chunks == 1:
        return state[None], jnp.exp2(ends[0]) * state + gained[0]
    z, c, k = (jnp.arange(chunks).reshape([chunks if i == at else 1 for i in range(ends.ndim + 2)]) for at in range(3))
    sums = jnp.sum(jnp.where((c < k) & (k < z), ends, 0.0), 2)  # [C, C, ...]: behind chunk c, up to chunk z
    before = jnp.sum(jnp.where(k < z, ends, 0.0), 2)[:, 0]  # [C, ...]: up to chunk z
    left = jnp.where((c < z)[:, :, 0], jnp.exp2(sums), 0.0)
    single = tuple(i for i, length in enumerate(left.shape) if i > 1 and length == 1)
    letters = "zcabdefghij"[: left.ndim]
    kept = "".join(c for i, c in enumerate(letters) if i not in single)
    product = f"{kept},c{letters[2:]}->z{letters[2:]}"
    entry = einsum(product, jnp.squeeze(left, single), gained, precision, gained.dtype) + jnp.exp2(before) * state
    return entry, jnp.exp2(ends[-1]) * entry[-1] + gained[-1]
