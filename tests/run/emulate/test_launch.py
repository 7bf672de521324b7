"""Arguments, device functions, and what an error says."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import cuda.tile as ct
import pytest
import torch

from ssdgen.run.emulate import EmulationError, dtypes, launch
from tests.run.emulate import helpers
from tests.run.emulate import launch_kernels as k
from tests.run.emulate.memory_kernels import copy
from tests.run.emulate.value_kernels import multiply_scalars


def test_arguments_arrive_as_cutile_types_them() -> None:
    x, y, out = torch.randn(8).bfloat16(), torch.randn(8), torch.zeros(8)
    launch(k.sees, (1,), (x, out, 5, 0.5, True, 8, (y, 3), k.Sizes(2, 0.25)))
    torch.testing.assert_close(out, x.float() * 0.5 + y * 3 + 0.5 + 1 + 5)


def test_constants() -> None:
    out = torch.zeros(4)
    launch(k.constants, (1,), (out, (4, True), 1.5))
    assert out.tolist() == [2.0] * 4
    for bad in (None, "text", ct.float32):
        with pytest.raises(EmulationError, match=r"constant dtype is a .*; ct\.Constant takes int, float, bool"):
            launch(k.constants, (1,), (out, (4, True), bad))


def test_sizes_of_scalars() -> None:
    out = torch.zeros(1, dtype=torch.int64)
    launch(k.wide_scalar, (1,), (out, 2**40))
    assert out.tolist() == [2**20]
    with pytest.raises(EmulationError, match="2147483648 is not a value of int32"):
        launch(multiply_scalars, (1,), (out, 2**31, 1))


def test_a_static_shape_is_a_constant() -> None:
    x, y = torch.randn(8), torch.zeros(8)
    launch(k.static_length, (1,), (x, y))
    assert torch.equal(x, y)


def test_arrays_past_int32_need_wide_indices() -> None:
    long = torch.zeros(1, dtype=torch.int8).expand(2**31)
    with pytest.raises(
        EmulationError, match=r"array x reaches past 2\^31 elements; annotate it with ct.IndexedWithInt64"
    ):
        launch(copy, (1,), (long, torch.zeros(8, dtype=torch.int8), 8))
    launch(k.many_elements, (1,), (long, torch.zeros(4, dtype=torch.int8)))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((torch.zeros(8), torch.zeros(8)), "2 arguments for the 3 parameters x, y, n"),
        ((torch.zeros(8), None, 8), "argument y is a NoneType"),
        ((torch.zeros(8), torch.zeros(8, dtype=torch.complex64), 8), "complex64 is not emulated"),
        ((torch.zeros(8), [1.0], 8), "argument y is a list"),
    ],
)
def test_wrong_arguments(args: tuple[object, ...], message: str) -> None:
    with pytest.raises(EmulationError, match=re.escape(message)) as error:
        launch(copy, (1,), args)
    assert error.value.block is None


@pytest.mark.parametrize("grid", [(), (0,), (1, 1, 1, 1), (1, 65536), [1], (2.0,), 3])
def test_wrong_grids(grid: object) -> None:
    with pytest.raises(EmulationError, match="grid"):
        launch(copy, grid, (torch.zeros(8), torch.zeros(8), 8))  # type: ignore[arg-type]


def test_tensors_of_another_device_are_refused() -> None:
    meta = torch.empty(8, device="meta")
    with pytest.raises(EmulationError, match="argument x is on meta; the emulator takes CPU tensors"):
        launch(copy, (1,), (meta, meta, 8))


def test_only_kernels_are_launched() -> None:
    with pytest.raises(TypeError, match=r"takes a cuda\.tile\.kernel, got function"):
        launch(helpers.square, (1,), ())


def test_device_functions_of_this_and_other_modules() -> None:
    x, y = torch.randn(8), torch.zeros(8)
    launch(k.with_helpers, (1,), (x, y))
    torch.testing.assert_close(y, 3 * x * x)


def test_an_error_says_kernel_block_line_and_statement() -> None:
    path = Path(k.__file__)
    with pytest.raises(EmulationError) as raised:
        launch(k.fails_in_block_two, (2, 3), (torch.zeros(8), torch.zeros(8)))
    error = raised.value
    assert (error.kernel, error.block, error.path) == ("fails_in_block_two", (1, 2), str(path))
    lines = path.read_text(encoding="utf-8").splitlines()
    first = next(i for i, line in enumerate(lines) if "def fails_in_block_two" in line)
    assert 0 < error.line - first < 8
    assert str(error).startswith(
        f"kernel fails_in_block_two, block (1, 2), {path}:{error.line}: ct.store of a tile wholly"
    )
    assert str(error).endswith(f"\n  {error.line} | {lines[error.line - 1].strip()}")


def test_an_error_in_a_device_function_shows_both_statements() -> None:
    with pytest.raises(EmulationError, match="do not broadcast") as raised:
        launch(k.fails_in_helper, (1,), (torch.zeros(8), torch.zeros(8)))
    assert raised.value.path == k.__file__
    _, statement, inside = str(raised.value).splitlines()
    assert statement.endswith("| ct.store(y, (0,), helpers.adds_wrong_shape(ct.load(x, (0,), (8,))))")
    assert inside.endswith(f"| return t + ct.zeros((4,), ct.float32)  (in {helpers.__file__})")


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (k.raises, "ValueError: no such layout"),
        (k.undefined_name, "NameError: name 'missing' is not defined"),
        (k.not_emulated, "ct.Array.tiled_view is not emulated"),
        (k.asserts, "ct.assert_ failed: positive"),
    ],
)
def test_whatever_a_kernel_raises_is_an_emulation_error(kernel: object, message: str) -> None:
    with pytest.raises(EmulationError, match=re.escape(message)):
        launch(kernel, (1,), (torch.zeros(8),))


def test_assumptions_are_checked() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    launch(k.divisible, (1,), (out, 32))
    with pytest.raises(EmulationError, match="40 is not divisible by 16"):
        launch(k.divisible, (1,), (out, 40))


def test_programmatic_dependent_launch_is_no_operation() -> None:
    x, y = torch.randn(16), torch.zeros(16)
    launch(k.dependent, (2,), (x, y, 8))
    assert torch.equal(x, y)


def test_every_block_waits_for_the_launch_before_or_none() -> None:
    x, y = torch.randn(16), torch.zeros(16)
    for kernel, more in (
        (k.waits_in_one_block, (0,)),
        (k.waits_in_one_block, (1,)),
        (k.lets_the_next_begin, ()),
    ):
        with pytest.raises(EmulationError, match="some block ends without grid_dependency_control_wait"):
            launch(kernel, (2,), (x, y, 8, *more))


def test_device_functions_are_refused_outside_of_a_launch() -> None:
    """Also after a launch that failed: the dispatch mode is restored."""
    with pytest.raises(EmulationError):
        launch(k.raises, (1,), (torch.zeros(8),))
    with pytest.raises(RuntimeError, match="device code"):
        ct.bid(0)


def test_gradients_are_not_recorded() -> None:
    x, y = torch.randn(8, requires_grad=True), torch.zeros(8)
    launch(copy, (1,), (x, y, 8))
    assert not y.requires_grad


def test_the_number_of_threads_is_restored() -> None:
    before = torch.get_num_threads()
    launch(copy, (1,), (torch.zeros(8), torch.zeros(8), 8))
    assert torch.get_num_threads() == before


def test_another_version_of_cuda_tile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ct, "__version__", "1.8.0")
    with pytest.raises(ImportError, match=r"cuda-tile 1\.7, and 1\.8\.0 is installed"):
        importlib.reload(dtypes)
