"""The compiling process: takes requests from the build, one at a time, and answers with a cubin or what went wrong.

A process of its own, because the compiler holds a lock (one compile at a time in a process), because a crash must
cost one kernel and not the build, and because `cuda.tile` and the emitted modules' imports stay out of the command's
own process.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import io
import os
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from ssdgen.emit.support import _kept
from ssdgen.ir.build import ITEMSIZE, Argument, ArrayArg, CompileRequest, ConstantArg, ScalarArg

CACHE_VARIABLE = "CUDA_TILE_CACHE_DIR"


@dataclass(frozen=True, slots=True)
class Compiled:
    """A cubin, and the seconds it took from the request."""

    cubin: bytes
    seconds: float


@dataclass(frozen=True, slots=True)
class Rejected:
    """The compiler's message, and the emitted lines it is about as (file, line), innermost call first; none if
    unknown."""

    message: str
    frames: tuple[tuple[str, int], ...] = ()


Answer = Compiled | Rejected


class RequestError(Exception):
    """The request does not fit the emitted module."""


def serve(connection: Connection) -> None:
    """Answer requests until the other end closes."""
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        connection.send(answer(request))


def answer(request: CompileRequest) -> Answer:
    """Compile `request`."""
    from cuda.tile import TileError

    start = time.perf_counter()
    try:
        cubin = _compile(request)
    except TileError as error:
        return Rejected(str(error.message), _frames(error.loc))
    except SyntaxError as error:
        place = ((error.filename, error.lineno),) if error.filename and error.lineno else ()
        return Rejected(f"the emitted module is not Python: {error.msg}", place)
    except RequestError as error:
        return Rejected(str(error))
    except Exception as error:  # whatever an emitted module raises when imported: this process answers for it
        return Rejected(f"{type(error).__name__}: {error}")
    return Compiled(cubin, time.perf_counter() - start)


def _compile(request: CompileRequest) -> bytes:
    import cuda.tile as ct
    from cuda.tile.compilation import CallingConvention, KernelSignature, export_kernel

    kernel = getattr(_load(request.module_path), request.kernel, None)
    if not isinstance(kernel, ct.kernel):
        raise RequestError(f"{Path(request.module_path).name} has no kernel called {request.kernel}")
    declared = list(inspect.signature(kernel._pyfunc).parameters)
    given = [argument.name for argument in request.signature]
    if declared != given:
        raise RequestError(f"the kernel's parameters are ({', '.join(declared)}), the request's ({', '.join(given)})")
    if request.hints:
        kernel = kernel.replace_hints(**dict(request.hints))
    signature = KernelSignature([_constraint(a) for a in request.signature], CallingConvention.cutile_python_v2())
    file = io.BytesIO()
    export_kernel(kernel, [signature], file, gpu_code=request.arch, output_format="cubin")
    keep(kernel, signature, request.arch, file.getvalue())
    return file.getvalue()


def cuda_tile_cache() -> Path | None:
    """The folder of `cuda.tile`'s disk cache for processes started from here, as `cuda.tile` 1.7 finds it; None if off."""
    base = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    chosen = os.environ.get(CACHE_VARIABLE, str(Path(base) / "cutile-python"))
    return None if chosen.strip().lower() in ("0", "off", "none", "") else Path(chosen)


def keep(kernel: Any, signature: Any, arch: str, cubin: bytes) -> None:
    """Put a compiled kernel where launches of its module look first, unless the cache of `cuda.tile` is off."""
    number = arch.removeprefix("sm_")
    capability = int(number[:-1]), int(number[-1])
    cache = cuda_tile_cache()
    path = _kept.place(kernel, signature, None if cache is None else str(cache), capability)
    if path is not None:
        _kept.write(path, signature.with_mangled_symbol(kernel._pyfunc.__name__).symbol, cubin)


def _constraint(argument: Argument) -> Any:
    """The argument in cuda.tile's words, as `KernelSignature.from_kernel_args` would put it."""
    import cuda.tile as ct
    from cuda.tile.compilation import ArrayConstraint, ConstantConstraint, ScalarConstraint

    dtypes = {"bf16": ct.bfloat16, "f16": ct.float16, "f32": ct.float32, "i32": ct.int32, "i64": ct.int64}
    match argument:
        case ConstantArg(value=value):
            return ConstantConstraint(value)
        case ScalarArg(dtype=dtype):
            return ScalarConstraint(dtypes[dtype])
        case ArrayArg(dtype=dtype, lengths=lengths, strides=strides):
            return ArrayConstraint(
                dtypes[dtype],
                len(lengths),
                index_dtype=ct.int64 if argument.wide else ct.int32,
                stride_lower_bound_incl=0,
                alias_groups=(),
                may_alias_internally=argument.overlaps,
                stride_constant=[1 if s == "1" else None for s in strides],
                shape_constant=[1 if n == "1" else None for n in lengths],
                stride_divisible_by=[16 // ITEMSIZE[dtype] if s == "16" else 1 for s in strides],
                shape_divisible_by=[16 if n == "16" else 1 for n in lengths],
                base_addr_divisible_by=16 if argument.aligned else 1,
            )


@functools.cache
def _load(path: str) -> ModuleType:
    """The emitted module at `path`, in a package of its folder that does not run the folder's own `__init__`."""
    folder, name = os.path.split(os.path.abspath(path))
    package = f"_ssdgen_{hashlib.sha256(folder.encode()).hexdigest()[:16]}"
    if package not in sys.modules:
        parent = ModuleType(package)
        parent.__path__ = [folder]
        sys.modules[package] = parent
    return importlib.import_module(f"{package}.{Path(name).stem}")


def _frames(loc: Any) -> tuple[tuple[str, int], ...]:
    frames = []
    while loc is not None:
        if loc.filename is not None:
            frames.append((loc.filename, loc.line))
        loc = loc.call_site
    return tuple(frames)


def main() -> None:
    """Serve on the socket given as standard input; what emitted code prints goes to standard error."""
    connection = Connection(os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    serve(connection)
