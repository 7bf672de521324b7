"""The causal convolution beside emitted modules: its kernels in the emulator and its portable form, against a float64 loop."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from generated import _conv, _runtime, causal_conv
from ssdgen.run.checks import BOUNDS, poisoned_memory, relative_error
from ssdgen.run.emulate import emulation, launch

NAN = float("nan")
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
BOUND = {BF16: BOUNDS["bf16"], F16: BOUNDS["f16"], F32: 1e-6, F64: BOUNDS["f64"]}
"""Of a relative norm: rounding of the result, and of the four products before it."""

PATHS = ("portable", "emulation")


@contextmanager
def path(name: str) -> Iterator[None]:
    """Within it calls take this path, and new memory holds NaN."""
    with poisoned_memory(), _runtime.launcher(launch) if name == "emulation" else nullcontext():
        yield


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, cache: Tensor, silu: bool) -> tuple[Tensor, Tensor]:
    """The loop over tokens in float64: y[b t d] and the cache [b d w-1] after them."""
    x, weight, window = x.double(), weight.double(), cache.double()
    outputs = []
    for t in range(x.shape[1]):
        seen = torch.cat((window, x[:, t, :, None]), 2)
        total = (seen * weight).sum(2) + (0 if bias is None else bias.double())
        outputs.append(total / (1 + (-total).exp()) if silu else total)
        window = seen[:, :, 1:]
    return (torch.stack(outputs, 1) if outputs else x), window


class Case:
    """Random arguments of a call. Tensors lie in larger ones that hold NaN, as slices of a projection do."""

    def __init__(
        self, b: int, t: int, d: int, w: int, dtype: torch.dtype, entries: int | None = None, seed: int = 0
    ) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.x = self.inside((b, t, d), dtype)
        self.weight, self.bias = self.inside((d, w), dtype), self.inside((d,), dtype)
        self.initial = self.inside((b if entries is None else entries, d, w - 1), dtype)

    def inside(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of normal numbers with NaN before, between and behind its rows."""
        around = torch.full([n + 3 for n in shape], NAN, dtype=dtype)
        inner = around[tuple(slice(1, n + 1) for n in shape)]
        return inner.copy_(torch.randn(shape, generator=self.random))


def check(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    for name, a, b in zip(("y", "final"), got, want, strict=True):
        assert a.dtype == dtype
        assert relative_error(a, b) <= (BOUND[dtype] if name == "y" else 0.0), name


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("t", [0, 1, 2, 3, 16, 33, 70])
def test_every_length(name: str, dtype: torch.dtype, t: int) -> None:
    """No token, fewer than the cache keeps, tiles that are whole and not; 130 channels are a tile and two more."""
    case = Case(2, t, 130, 4, dtype)
    with path(name):
        got = causal_conv.forward(
            case.x, case.weight, case.bias, initial=case.initial, activation="silu", return_final=True
        )
    check(got, reference(case.x, case.weight, case.bias, case.initial, True), dtype)


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("w", causal_conv.WIDTHS)
@pytest.mark.parametrize("options", list(itertools.product([False, True], repeat=3)))
def test_every_width_and_option(name: str, w: int, options: tuple[bool, bool, bool]) -> None:
    silu, biased, carried = options
    case = Case(1, 21, 5, w, F32)
    bias, initial = case.bias if biased else None, case.initial if carried else None
    with path(name):
        got = causal_conv.forward(
            case.x, case.weight, bias, initial=initial, activation="silu" if silu else None, return_final=True
        )
    before = torch.zeros_like(case.initial) if initial is None else initial
    check(got, reference(case.x, case.weight, bias, before, silu), F32)


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("dtypes", [(BF16, F32), (F32, BF16), (F16, BF16)])
def test_weights_of_another_dtype(name: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    case, other = Case(2, 20, 9, 4, dtypes[0]), Case(2, 20, 9, 4, dtypes[1])
    with path(name):
        y = causal_conv.forward(case.x, other.weight, other.bias)
    zeros = torch.zeros_like(case.initial)
    assert y.dtype == dtypes[0]
    assert relative_error(y, reference(case.x, other.weight, other.bias, zeros, False)[0]) <= BOUND[dtypes[0]]


@pytest.mark.parametrize("name", PATHS)
def test_silu_of_large_arguments(name: str) -> None:
    """exp(-x) overflows where x is very negative; the result is still 0, and x itself where x is large."""
    x = torch.tensor([-1e4, -200.0, -100.0, -60.0, -1.0, 0.0, 1.0, 60.0, 200.0, 1e4])[None, :, None]
    weight = torch.tensor([[0.0, 1.0]])
    with path(name):
        y = causal_conv.forward(x, weight, activation="silu")
    torch.testing.assert_close(y.double(), torch.nn.functional.silu(x.double()), rtol=1e-5, atol=1e-24)


@pytest.mark.parametrize("name", PATHS)
def test_the_convolution_of_torch(name: str) -> None:
    """The same as conv1d with a group a channel, padded by w - 1 zeros, of [b d t] seen as [b t d]."""
    case = Case(2, 50, 12, 4, F32)
    want = torch.nn.functional.conv1d(case.x.mT, case.weight[:, None], case.bias, padding=3, groups=12)[:, :, :50]
    with path(name):
        transposed = causal_conv.forward(case.x.mT.contiguous().mT, case.weight, case.bias)
        y = causal_conv.forward(case.x, case.weight, case.bias)
    assert torch.equal(y, transposed)
    assert relative_error(y.mT, want) <= 1e-6


@pytest.mark.parametrize("name", PATHS)
@settings(deadline=None, max_examples=25)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5), w=st.sampled_from([2, 3, 4, 7]))
def test_pieces_are_the_whole(name: str, lengths: list[int], w: int) -> None:
    """Wherever a sequence is cut, the cache carries over all that is needed, bit for bit."""
    case = Case(2, sum(lengths), 3, w, F32)
    with path(name):
        y, final = causal_conv.forward(case.x, case.weight, initial=case.initial, return_final=True)
        cache, pieces = case.initial, []
        for piece in case.x.split(lengths, 1):
            out, cache = causal_conv.forward(piece, case.weight, initial=cache, return_final=True)
            pieces.append(out)
    assert torch.equal(torch.cat(pieces, 1), y)
    assert torch.equal(cache, final)


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("dtype", [BF16, F32])
@settings(deadline=None, max_examples=15)
@given(t=st.integers(1, 20), w=st.sampled_from([2, 4, 5]), at_once=st.integers(1, 20))
def test_steps_are_forward(name: str, dtype: torch.dtype, t: int, w: int, at_once: int) -> None:
    """Token by token and a few at a time, more than a block takes too: outputs and cache of `forward`, bit for bit.

    Without silu, whose vectorised form on a CPU rounds otherwise than that of the elements left over.
    """
    case = Case(2, t, 5, w, dtype)
    with path(name):
        y, final = causal_conv.forward(case.x, case.weight, case.bias, initial=case.initial, return_final=True)
        one, several = case.initial.clone(), case.initial.clone()
        ones = [causal_conv.step(one, token, case.weight, case.bias) for token in case.x.unbind(1)]
        some = [causal_conv.steps(several, x, case.weight, case.bias) for x in case.x.split(at_once, 1)]
    assert torch.equal(torch.stack(ones, 1), y)
    assert torch.equal(torch.cat(some, 1), y)
    assert torch.equal(one, final)
    assert torch.equal(several, final)


@pytest.mark.parametrize("name", PATHS)
@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 5, 16, 17, 40]), min_size=1, max_size=6),
    w=st.sampled_from([2, 4, 8]),
    carried=st.booleans(),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_packed_sequences_are_each_alone(
    name: str, lengths: list[int], w: int, carried: bool, dtype: torch.dtype
) -> None:
    case = Case(1, sum(lengths), 4, w, F32, entries=len(lengths))
    initial = case.initial if carried else None
    edges = torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)
    with path(name):
        y, final = causal_conv.forward(
            case.x, case.weight, case.bias, initial=initial, cu_seqlens=edges, return_final=True
        )
        for i, (start, stop) in enumerate(itertools.pairwise(edges.tolist())):
            alone, end = causal_conv.forward(
                case.x[:, start:stop], case.weight, case.bias, return_final=True,
                initial=None if initial is None else initial[i : i + 1],
            )  # fmt: skip
            assert torch.equal(y[:, start:stop], alone)
            assert torch.equal(final[i : i + 1], end)


@pytest.mark.parametrize("name", PATHS)
@settings(deadline=None, max_examples=15)
@given(seq_idx=st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=1, max_size=40), w=st.sampled_from([2, 4]))
def test_seq_idx_resets_where_it_changes(name: str, seq_idx: list[int], w: int) -> None:
    """The initial cache enters the first sequence of a row; the final one is that of the last, zero before its first token."""
    case = Case(2, len(seq_idx), 4, w, F32)
    index = torch.tensor([seq_idx, seq_idx[::-1]])
    with path(name):
        y, final = causal_conv.forward(
            case.x, case.weight, case.bias, initial=case.initial, seq_idx=index, return_final=True
        )
    for row in range(2):
        start, cache = 0, case.initial[row : row + 1]
        for _, same in itertools.groupby(index[row].tolist()):
            stop = start + len(list(same))
            want, cache = reference(case.x[row : row + 1, start:stop], case.weight, case.bias, cache, False)
            assert relative_error(y[row : row + 1, start:stop], want) <= BOUND[F32]
            start, last, cache = stop, cache, torch.zeros_like(case.initial[:1])
        assert torch.equal(final[row : row + 1].double(), last)


@pytest.mark.parametrize("name", PATHS)
def test_no_sequences_at_all(name: str) -> None:
    case = Case(1, 0, 4, 4, F32, entries=0)
    with path(name):
        y, final = causal_conv.forward(
            case.x, case.weight, cu_seqlens=torch.tensor([0]), initial=case.initial, return_final=True
        )
    assert y.shape == (1, 0, 4)
    assert final.shape == (0, 4, 3)


@pytest.mark.parametrize("name", PATHS)
def test_out_is_written_and_nothing_around_it(name: str) -> None:
    case = Case(2, 40, 6, 4, BF16)
    around = torch.full((2, 42, 9), 7.0, dtype=BF16)
    out = around[:, 1:41, 2:8]
    with path(name):
        want = causal_conv.forward(case.x, case.weight, case.bias)
        got = causal_conv.forward(case.x, case.weight, case.bias, out=out)
    assert got is out
    assert torch.equal(out, want)
    assert around.ne(7).sum() <= out.numel()
    out.fill_(7)
    assert around.eq(7).all()


def test_kernels_write_all_of_it_in_one_launch() -> None:
    case = Case(1, 70, 130, 4, BF16, entries=4)
    edges = torch.tensor([0, 3, 3, 40, 70], dtype=torch.int32)
    with path("emulation"), emulation() as run:
        y, final = causal_conv.forward(case.x, case.weight, cu_seqlens=edges, initial=case.initial, return_final=True)
    assert run.launches == ["convolve"]
    assert not run.unwritten(y).any()
    assert not run.unwritten(final).any()


@pytest.mark.parametrize("name", PATHS)
def test_rows_of_slot_minus_one_touch_nothing(name: str) -> None:
    """vllm PR 33937: a padding slot of -1 aliased a live cache."""
    case = Case(4, 1, 6, 4, F32, entries=5)
    pool = case.initial.clone()
    slots = torch.tensor([3, -1, 0, -1], dtype=torch.int32)
    out = torch.full((4, 6), 7.0)
    with path(name):
        y = causal_conv.step(pool.clone(), case.x[:, 0], case.weight, case.bias, state_indices=slots)
        got = causal_conv.step(pool, case.x[:, 0], case.weight, case.bias, state_indices=slots, out=out)
    assert got is out
    want, rolled = reference(case.x[[0, 2]], case.weight, case.bias, case.initial[[3, 0]], False)
    assert relative_error(y[[0, 2]], want[:, 0]) <= BOUND[F32]
    assert y[[1, 3]].eq(0).all()
    assert torch.equal(out[[0, 2]], y[[0, 2]])
    assert out[[1, 3]].eq(7).all()
    assert torch.equal(pool[[3, 0]].double(), rolled)
    assert torch.equal(pool[[1, 2, 4]], case.initial[[1, 2, 4]])


def test_a_step_with_out_allocates_nothing() -> None:
    """For CUDA graphs: all that torch is asked for between the call and the launch is views."""

    class Operators(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: set[str] = set()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.add(func._schema.name)
            return func(*args, **(kwargs or {}))

    case = Case(4, 1, 6, 4, BF16)
    out, x = torch.empty(4, 6, dtype=BF16), case.x[:, 0]
    launched: list[Any] = []
    with _runtime.launcher(lambda kernel, grid, args: launched.append(kernel)), Operators() as operators:
        causal_conv.step(case.initial, x, case.weight, case.bias, activation="silu", out=out)
    assert launched == [_conv.roll]
    assert operators.names <= {"aten::unsqueeze", "aten::slice", "aten::alias", "aten::squeeze"}


def test_what_int32_does_not_reach_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over batch, then over time: each piece goes on from the inputs before it. The limit is lowered, not x lengthened."""
    case = Case(3, 100, 4, 4, BF16)
    x = case.x.contiguous()
    keywords: dict[str, Any] = {"initial": case.initial, "activation": "silu", "return_final": True}
    with path("emulation"):
        y, final = causal_conv.forward(x, case.weight, **keywords)
        for limit in (900, 350):
            monkeypatch.setattr(_runtime, "LIMIT", limit)
            with emulation() as run:
                cut = causal_conv.forward(x, case.weight, **keywords)
            assert len(run.launches) >= 3
            assert torch.equal(cut[0], y)
            assert torch.equal(cut[1], final)
    assert len(run.launches) > 3


@pytest.mark.parametrize("packing", [{}, {"cu_seqlens": torch.tensor([0, 2, 2, 9])}])
def test_gradients(packing: dict[str, Tensor]) -> None:
    """Of every input, the cache in and the cache out, in float64 against finite differences."""
    entries = 3 if packing else 1
    arguments = [torch.randn(s, dtype=F64, requires_grad=True) for s in ((1, 9, 2), (2, 4), (2,), (entries, 2, 3))]

    def call(x: Tensor, weight: Tensor, bias: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
        return causal_conv.forward(x, weight, bias, initial=initial, activation="silu", return_final=True, **packing)

    assert torch.autograd.gradcheck(call, arguments)


def test_where_a_gradient_is_wanted_no_kernel_runs() -> None:
    """Kernels have none: the portable form runs where kernels would, on the same device."""
    case = Case(1, 20, 4, 4, F32)
    with path("emulation"), emulation() as run:
        y = causal_conv.forward(case.x, case.weight.clone().requires_grad_())
        assert y.requires_grad
        assert run.launches == []
        with torch.no_grad():
            causal_conv.forward(case.x, case.weight.clone().requires_grad_())
    assert run.launches == ["convolve"]


def test_compiled_is_eager() -> None:
    case = Case(2, 30, 5, 4, F32)
    pool = case.initial.clone()

    def call(x: Tensor, initial: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, final = causal_conv.forward(x, case.weight, case.bias, initial=initial, activation="silu", return_final=True)
        return y, final, causal_conv.step(pool, x[:, 0], case.weight, case.bias)

    eager = (*call(case.x, case.initial), pool.clone())
    pool.copy_(case.initial)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    got = (*compiled(case.x, case.initial), pool)
    assert all(torch.equal(a, b) for a, b in zip(got, eager, strict=True))


X, W, CACHE = torch.zeros(2, 5, 6), torch.zeros(6, 4), torch.zeros(2, 6, 3)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": None}, TypeError, r"`x`\[b t d\] is missing"),
        ({"x": torch.zeros(2, 6)}, ValueError, r"`x` must be \[b t d\]"),
        ({"x": X.int()}, TypeError, "`x` must be bfloat16 or float16 or float32"),
        ({"weight": torch.zeros(5, 4)}, ValueError, r"`weight`\[d w\] has shape \[5, 4\], but axis d is 6 in `x`"),
        ({"weight": torch.zeros(6, 9)}, ValueError, r"`weight`\[d w\] must have 2 to 8 taps \(axis w\), got 9"),
        ({"weight": torch.zeros(6, 1)}, ValueError, "taps"),
        ({"weight": torch.zeros(6, 1, 4)}, ValueError, r"`weight` must be \[d w\]"),
        ({"bias": torch.zeros(5)}, ValueError, "`bias`"),
        ({"initial": CACHE[:1]}, ValueError, r"`initial`\[b d w-1\] must have shape \[2, 6, 3\], got \[1, 6, 3\]"),
        ({"initial": CACHE.bfloat16()}, TypeError, "`initial` must have the dtype of `x`, torch.float32"),
        ({"initial": 0}, TypeError, "`initial` must be a torch.Tensor, got int"),
        ({"initial": CACHE.to("meta")}, ValueError, "`initial` is on meta"),
        ({"activation": "relu"}, ValueError, "`activation` must be 'silu' or None, got 'relu'"),
        ({"out": X[:, :4]}, ValueError, r"`out`\[b t d\] must have shape"),
        ({"cu_seqlens": torch.tensor([0, 5])}, ValueError, "`cu_seqlens` cuts axis t of a batch of 1"),
        ({"x": X[:1], "cu_seqlens": torch.tensor([0, 4])}, ValueError, "`cu_seqlens` must begin at 0"),
        (
            {"x": X[:1], "cu_seqlens": torch.tensor([0, 2, 5]), "initial": CACHE[:1]},
            ValueError,
            r"`initial`\[sequences d w-1\] must have shape \[2, 6, 3\]",
        ),
        ({"seq_idx": torch.zeros(2, 4, dtype=torch.int32)}, ValueError, r"`seq_idx`\[b t\] has shape \[2, 4\]"),
        ({"out": X.clone(), "weight": W.clone().requires_grad_()}, NotImplementedError, "with `out`"),
    ],
)
@pytest.mark.parametrize("name", PATHS)
def test_bad_calls_of_forward(name: str, change: dict[str, Any], error: type[Exception], message: str) -> None:
    with path(name), pytest.raises(error, match=f"causal_conv: .*{message}"):
        causal_conv.forward(**{"x": X, "weight": W, **change})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": X}, ValueError, r"`x` must be a torch.Tensor \[b d\] \(rank 2\), got shape \[2, 5, 6\]"),
        ({"x": None}, ValueError, "`x` must be a torch.Tensor"),
        ({"out": X}, ValueError, "`out` must be a torch.Tensor"),
        ({"cache": CACHE[:1]}, ValueError, r"`cache`\[b d w-1\] must have shape \[2, 6, 3\]"),
        ({"cache": CACHE.half()}, TypeError, "`cache` must have the dtype of `x`"),
        (
            {"cache": CACHE[:, :, :2], "slots": [0, 1]},
            ValueError,
            r"`cache`\[slots d w-1\] must have shape \[any, 6, 3\]",
        ),
        ({"slots": [0, 2]}, ValueError, "`state_indices` must be -1 or a slot below 2, got 2"),
        ({"slots": [0, -2]}, ValueError, "`state_indices` must be -1 or a slot below 2, got -2"),
        ({"slots": [1, 1]}, ValueError, "`state_indices` has a slot twice"),
        ({"slots": [0]}, ValueError, r"`state_indices`\[b\] must have shape \[2\], got \[1\]"),
        ({"steady": 1}, TypeError, "`steady` must be True or False, got 1"),
        ({"state_indices": torch.tensor([0, 1])}, TypeError, "`state_indices` must be an int32 torch.Tensor"),
        ({"weight": W.clone().requires_grad_()}, NotImplementedError, "`cache` in place"),
    ],
)
@pytest.mark.parametrize("name", PATHS)
def test_bad_calls_of_step(name: str, change: dict[str, Any], error: type[Exception], message: str) -> None:
    if "slots" in change:
        change = {**change, "state_indices": torch.tensor(change["slots"], dtype=torch.int32)}
        del change["slots"]
    with path(name), pytest.raises(error, match=f"causal_conv: .*{message}"):
        causal_conv.step(**{"cache": CACHE.clone(), "x": X[:, 0], "weight": W, **change})


def test_kernels_do_not_write_over_what_they_read() -> None:
    x = torch.zeros(2, 5, 6)
    with path("emulation"), pytest.raises(ValueError, match="`out` is the memory of `x`"):
        causal_conv.forward(x, W, out=x)


def test_init_cache() -> None:
    cache = causal_conv.init_cache(2, 6, 4, dtype=BF16)
    assert cache.shape == (2, 6, 3)
    assert cache.dtype == BF16
    assert not cache.any()
