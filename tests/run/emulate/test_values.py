"""What device functions compute, against torch."""

from __future__ import annotations

import math
import time

import pytest
import torch

from ssdgen.run.emulate import EmulationError, launch
from tests.run.emulate import value_kernels as k

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", FLOATS)
def test_arithmetic_rounds_in_the_dtype_of_its_operands(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(16).to(dtype), (torch.rand(16) + 0.5).to(dtype)
    out = torch.zeros(8, 16, dtype=dtype)
    launch(k.arithmetic, (1,), (a, b, out))
    two, one = (torch.tensor(c, dtype=dtype) for c in (2.1, 1.1))  # a constant has the dtype of its tile
    expected = [a + b, a - two * b, one - a, a / b, torch.floor(a / b), torch.remainder(a, b)]
    expected += [torch.minimum(a, b), torch.where(a > b, a, -b)]
    for row, value in zip(out, expected, strict=True):
        assert torch.equal(row, value)


def test_integers_divide_downwards() -> None:
    torch.manual_seed(0)
    a = torch.randint(-100, 100, (16,), dtype=torch.int32)
    b = torch.tensor([3, -7] * 8, dtype=torch.int32)
    out = torch.zeros(6, 16, dtype=torch.int32)
    launch(k.integers, (1,), (a, b, out))
    assert out[0].tolist() == [x // y for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert out[1].tolist() == [x % y for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert torch.equal(out[2], a * b - a)
    assert torch.equal(out[3], torch.maximum(a, b))
    assert torch.equal(out[4], a & 3 | b << 2)
    assert torch.equal(out[5], a.abs())


@pytest.mark.parametrize(("a", "b"), [(7, 2), (-7, 2), (7, -2), (-7, -2)])
def test_integer_scalars(a: int, b: int) -> None:
    out = torch.zeros(5, dtype=torch.int32)
    launch(k.integer_scalars, (1,), (out, a, b))
    assert out.tolist() == [a // b, a % b, math.ceil(a / b), -a, min(a, b)]


def test_int32_overflow_is_an_error() -> None:
    out = torch.zeros(4, dtype=torch.int32)
    launch(k.multiply_scalars, (1,), (out, 2**15, 2**15))
    with pytest.raises(EmulationError, match="integer overflow: 2147483648 is not a value of int32"):
        launch(k.multiply_scalars, (1,), (out, 2**16, 2**15))
    x = torch.tensor([1, 2, 3, 2**20], dtype=torch.int32)
    launch(k.multiply_tiles, (1,), (x, out, 2**10))
    with pytest.raises(EmulationError, match="integer overflow"):
        launch(k.multiply_tiles, (1,), (x, out, 2**11))
    with pytest.raises(EmulationError, match="division by zero"):
        launch(k.divide_by, (1,), (out, 1, 0))


@pytest.mark.parametrize("dtype", FLOATS)
def test_functions(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.rand(16) + 0.1).to(dtype)
    out = torch.zeros(8, 16, dtype=dtype)
    launch(k.functions, (1,), (x, out))
    names = ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sin")
    for row, name in zip(out, names, strict=True):
        torch.testing.assert_close(row, getattr(torch, name)(x))


def test_flush_to_zero() -> None:
    x, out = torch.tensor([-10.0, -126.0, -127.0, -140.0]), torch.zeros(8)
    launch(k.flushed, (1,), (x, out))
    assert out[3] == 2.0**-140
    assert out[4:].tolist() == [2.0**-10, 2.0**-126, 0.0, 0.0]


def test_tf32_rounds_to_nearest_even() -> None:
    """Ten bits of mantissa: halves go to the even neighbour, infinities and NaN stay, the largest goes to infinity."""
    step = 2.0**-10
    largest = torch.finfo(torch.float32).max
    x = torch.tensor(
        [1 + step / 2, 1 + 1.5 * step, 1 + step * 0.51, -1 - step / 2, -1 - 1.5 * step, math.pi, 0.0, -0.0]
    )
    x = torch.cat([x, torch.tensor([math.inf, -math.inf, math.nan, largest, 2.0**-140, 1 + step, 5.0, -7.0])])
    out = torch.zeros(16)
    launch(k.to_tf32, (1,), (x, out, 16))
    assert out[:6].tolist() == [1, 1 + 2 * step, 1 + step, -1, -1 - 2 * step, 3.140625]
    assert math.copysign(1, out[7].item()) == -1
    assert out[8:10].tolist() == [math.inf, -math.inf]
    assert out[10].isnan()
    assert out[11] == math.inf
    assert out[13:].tolist() == [1 + step, 5.0, -7.0]
    many = torch.randn(4096) * 10
    rounded = torch.zeros(4096)
    launch(k.to_tf32, (1,), (many, rounded, 4096))
    assert ((rounded - many).abs() <= many.abs() * 2.0**-11).all()
    assert (rounded.view(torch.int32) & 0x1FFF == 0).all()


def test_casts_and_bits() -> None:
    out = torch.zeros(4, dtype=torch.int32)
    launch(k.to_int, (1,), (torch.tensor([1.9, -1.9, 0.0, 1e6]), out))
    assert out.tolist() == [1, -1, 0, 1000000]
    for bad in (math.nan, 1e10, -math.inf):
        with pytest.raises(EmulationError, match="out of range, or NaN, is cast to int32"):
            launch(k.to_int, (1,), (torch.tensor([bad, 0.0, 0.0, 0.0]), out))
    x = torch.tensor([1.0, -2.0, 0.0, 3.5])
    launch(k.bits, (1,), (x, out))
    assert torch.equal(out, x.view(torch.int32))


@pytest.mark.parametrize(("dtype", "tf32"), [(torch.bfloat16, 0), (torch.float16, 0), (torch.float32, 1)])
def test_mma_multiplies_what_its_operands_were_rounded_to(dtype: torch.dtype, tf32: int) -> None:
    torch.manual_seed(0)
    x, y, acc = torch.randn(16, 32).to(dtype), torch.randn(32, 8).to(dtype), torch.randn(16, 8)
    out = torch.zeros(16, 8)
    launch(k.product, (1,), (x, y, acc, out, tf32))
    a, b = x.double(), y.double()
    if tf32:
        for t in (a, b):
            mantissa, exponent = torch.frexp(t)
            t.copy_(torch.ldexp(torch.round(mantissa * 2**11), exponent - 11))
    exact = a @ b + acc.double()
    assert (out - exact).norm() / exact.norm() < 3e-7
    if tf32:
        unrounded = x.double() @ y.double() + acc.double()
        assert (out - unrounded).norm() / unrounded.norm() > 1e-5


def test_batched_mma_broadcasts() -> None:
    x, y, out = torch.randn(2, 16, 32).bfloat16(), torch.randn(32, 8).bfloat16(), torch.zeros(2, 16, 8)
    launch(k.batched_product, (1,), (x, y, out))
    torch.testing.assert_close(out, x.float() @ y.float())


@pytest.mark.parametrize("dtype", FLOATS)
def test_reductions(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, out = torch.randn(8, 16).to(dtype), torch.zeros(6, 16, dtype=dtype)
    launch(k.reductions, (1,), (x, out))
    expected = [x.sum(0), x.amax(0), x.amin(0), x.prod(0), x.sum(0), x.sum().expand(16)]
    for row, value in zip(out, expected, strict=True):
        torch.testing.assert_close(row, value, rtol=4 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)


def test_a_narrow_sum_rounds_at_every_step() -> None:
    """Which is why bf16 must not feed a reduction: rounding once at the end would look better than the GPU does."""
    torch.manual_seed(0)
    x, out = torch.rand(512).bfloat16(), torch.zeros(2, dtype=torch.bfloat16)
    launch(k.narrow_sum, (1,), (x, out, 512))
    pairs = x
    while len(pairs) > 1:
        pairs = pairs[0::2] + pairs[1::2]
    assert out[0] == pairs[0]
    assert out[0] != x.float().sum().bfloat16()
    running = x.float().cumsum(0)[-1].item()
    assert 0 < abs(out[1].item() - running) < 0.02 * running
    wide = torch.zeros(2)
    launch(k.narrow_sum, (1,), (x.float(), wide, 512))
    torch.testing.assert_close(wide, x.float().sum().expand(2))


def test_scans() -> None:
    torch.manual_seed(0)
    x, out = torch.randn(8, 16), torch.zeros(5, 8, 16)
    launch(k.scans, (1,), (x, out))
    backwards = x.flip(0).cumsum(0).flip(0)
    for got, value in zip(out, [x.cumsum(1), backwards, x.cumprod(1), x.cumsum(1), backwards], strict=True):
        torch.testing.assert_close(got, value)


def test_scan_and_reduce_of_tuples_keep_the_order() -> None:
    """The function is associative and not commutative, so a swapped pair would show."""
    torch.manual_seed(0)
    a, b, out = torch.rand(16), torch.randn(16), torch.zeros(17)
    launch(k.recurrence, (1,), (a, b, out))
    s, expected = 0.0, []
    for decay, term in zip(a.tolist(), b.tolist(), strict=True):
        s = decay * s + term
        expected.append(s)
    torch.testing.assert_close(out, torch.tensor([*expected, s]))


def test_the_identity_of_a_scan_is_used() -> None:
    out = torch.zeros(16)
    launch(k.wrong_identity, (1,), (torch.zeros(16), out))
    assert (out != 0).any()


def test_moves() -> None:
    x, out = torch.randn(4, 8), torch.zeros(8, 20)
    launch(k.moves, (1,), (x, out))
    inserted = torch.cat([x[:, :4], x[:, :4]], 1).reshape(8, 4)
    expected = [x.t(), x.t(), x.reshape(8, 4), torch.cat([x[:, :4], x[:, 4:]]), inserted]
    assert torch.equal(out, torch.cat(expected, 1))


def test_speed() -> None:
    """A few hundred blocks of small tiles take well under a second a hundred: CI runs hundreds of launches."""
    n, blocks = 64, 300
    x, b, out = torch.rand(blocks, n), torch.randn(blocks, n, n).bfloat16(), torch.empty(blocks, n, n).bfloat16()
    started = time.process_time()
    launch(k.small_block, (blocks,), (x, b, out, n))
    assert (time.process_time() - started) / blocks < 1e-2
