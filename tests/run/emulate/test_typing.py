"""The emulator types as cuTile's compiler does: each kernel is also put through the real front end."""

from __future__ import annotations

import io
import re
from typing import Any

import cuda.tile as ct
import pytest
import torch
from cuda.tile.compilation import (
    ArrayConstraint,
    CallingConvention,
    KernelSignature,
    ScalarConstraint,
    export_kernel,
)

from ssdgen.run.emulate import EmulationError, launch
from tests.run.emulate.accepted_kernels import ACCEPTED
from tests.run.emulate.refused_kernels import LOOSER, REFUSED, STRICTER


def name(kernel: Any) -> str:
    return str(getattr(kernel, "_pyfunc", None) and kernel._pyfunc.__name__)


def array(dtype: Any, rank: int) -> ArrayConstraint:
    return ArrayConstraint(
        dtype,
        rank,
        index_dtype=ct.int32,
        stride_lower_bound_incl=0,
        alias_groups=(),
        may_alias_internally=False,
        stride_constant=(None,) * (rank - 1) + (1,),
    )


PARAMETERS = [
    *(array(dtype, 2) for dtype in (ct.bfloat16, ct.float32, ct.int32, ct.float16)),
    array(ct.float32, 1),
    *(ScalarConstraint(dtype) for dtype in (ct.int32, ct.float32, ct.bool_)),
]


def compile_front_end(kernel: Any) -> None:
    """Run the compiler up to its bytecode, which needs no GPU and takes milliseconds."""
    signature = KernelSignature(PARAMETERS, CallingConvention.cutile_python_v2())
    export_kernel(kernel, [signature], io.BytesIO(), output_format="tileir_bytecode")


def emulate(kernel: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 32)
    launch(kernel, (1,), (x.bfloat16(), x, (4 * x).int(), x.half(), x[0].clone(), 3, 0.5, True))


@pytest.mark.parametrize("kernel", ACCEPTED, ids=name)
def test_both_accept(kernel: Any) -> None:
    compile_front_end(kernel)
    emulate(kernel)


@pytest.mark.parametrize(("kernel", "message"), REFUSED, ids=[name(kernel) for kernel, _ in REFUSED])
def test_both_refuse(kernel: Any, message: str) -> None:
    with pytest.raises(ct.TileError):
        compile_front_end(kernel)
    with pytest.raises(EmulationError, match="|".join(map(re.escape, message.split("|")))):
        emulate(kernel)


@pytest.mark.parametrize(("kernel", "message"), STRICTER, ids=[name(kernel) for kernel, _ in STRICTER])
def test_only_the_emulator_refuses(kernel: Any, message: str) -> None:
    compile_front_end(kernel)
    with pytest.raises(EmulationError, match=re.escape(message)):
        emulate(kernel)


@pytest.mark.parametrize("kernel", LOOSER, ids=name)
def test_only_the_compiler_refuses(kernel: Any) -> None:
    """Should the emulator learn to see one of these, move the kernel up."""
    emulate(kernel)
    with pytest.raises(ct.TileError):
        compile_front_end(kernel)
