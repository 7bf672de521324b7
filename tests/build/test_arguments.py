"""The classes of arguments: an ahead-of-time compile is of use only if a launch falls into the same class.

The expected values were read off `KernelSignature.from_kernel_args` of cuda.tile 1.7, which needs a GPU's driver.
"""

from __future__ import annotations

import sys

import pytest

from ssdgen.build.worker import _constraint
from ssdgen.ir.build import Argument, ConstantArg, Element, ScalarArg, array_arg, contiguous


@pytest.mark.parametrize(
    ("dtype", "shape", "strides", "lengths", "classes", "overlaps"),
    [
        ("f16", (2, 1024, 8, 64), None, "any 16 any 16", "16 16 16 1", False),
        ("f32", (2, 1000, 8, 64), None, "any any any 16", "16 16 16 1", False),
        ("f32", (8,), None, "any", "1", False),
        ("f32", (2, 1024, 1, 64), None, "any 16 1 16", "16 16 16 1", False),
        ("f32", (1, 1000, 3), None, "1 any any", "16 any 1", False),
        ("f32", (16, 1, 1), None, "16 1 1", "1 1 1", False),
        ("f32", (0, 16), None, "16 16", "16 1", False),
        ("f32", (8, 64), (1, 0), "any 16", "1 16", True),  # D[h] expanded to D[h p]
        ("f32", (8,), (0,), "any", "16", True),
        ("f16", (4, 60), (64, 1), "any any", "16 1", False),  # a slice
        ("f32", (2, 1024, 8), (8192, 1, 1024), "any 16 any", "16 1 16", False),  # transposed
        ("f32", (32, 8, 100, 64), (512, 64, 0, 1), "16 any any 16", "16 16 16 1", True),
        ("f32", (1, 17, 64, 3), (100, 1, 1, 1), "1 any 16 any", "16 1 1 1", True),
        ("f32", (2, 1), (64, 100), "any 1", "16 16", True),
        ("f16", (100, 3), (4, 4096), "any any", "any 16", False),
    ],
)
def test_an_array_falls_into_the_class_a_launch_puts_it_in(
    dtype: Element, shape: tuple[int, ...], strides: tuple[int, ...] | None, lengths: str, classes: str, overlaps: bool
) -> None:
    arg = array_arg("x", dtype, shape, strides)
    assert (" ".join(arg.lengths), " ".join(arg.strides), arg.overlaps) == (lengths, classes, overlaps)


def test_contiguous_strides_are_those_of_torch() -> None:
    assert contiguous((2, 3, 4)) == (12, 4, 1)
    assert contiguous((2, 0, 4)) == (4, 4, 1)
    assert contiguous(()) == ()


def test_strides_of_another_rank_are_refused() -> None:
    with pytest.raises(ValueError, match="x: 1 strides for an array of 2 dimensions"):
        array_arg("x", "f32", (2, 3), (1,))


@pytest.mark.skipif(sys.platform != "linux", reason="cuda-tile is for Linux")
def test_the_compiler_is_told_the_class_a_launch_tells_it() -> None:
    """Symbol names are made from the constraints, so equal names are equal compiles."""
    from cuda.tile.compilation import CallingConvention, KernelSignature

    arguments: list[Argument] = [
        array_arg("x", "f16", (2, 1024, 8, 64)),
        array_arg("y", "f32", (1, 1000, 3)),
        array_arg("d", "f32", (8, 64), (1, 0)),
        ScalarArg("s", "f32"),
        ScalarArg("n", "i32"),
        ConstantArg("L", 64),
    ]
    convention = CallingConvention.cutile_python_v2()
    signature = KernelSignature([_constraint(a) for a in arguments], convention).with_mangled_symbol("k")
    assert signature.symbol == SYMBOL


SYMBOL = "k_Kt2_A4f16_7v8l0_8t1_ai16_p16_A3f32_1s1v4_3l0_4t1_p16_A2f32_1t1_2i16v4l0_p16i_Sf32_Si32_I64"
"""Of a launch with these arrays."""
