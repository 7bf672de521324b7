"""Compiled kernels on disk, found without compiling: why the first call of a process is fast.

`cuda.tile` keeps compiled kernels too, but by their intermediate code, so a process that only looks one up has to run the
compiler's front end first: a twentieth to a tenth of a second a kernel. Here they are kept in a folder of that cache by what
the code is made from: the text of the emitted files, the class of every argument, the hints, the architecture and the
versions of the compiler. Neither the path nor the lines of a file matter, so the folder can be copied with the modules.

Copied verbatim beside the modules that ssdgen emits.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._tuned import compiler_version

FOLDER = "ssdgen"
"""In the folder of `CUDA_TILE_CACHE_DIR`."""
INTERFACE = "1.7."
"""The versions of cuda-tile whose way to compile is known here; with another one nothing is kept."""
COMPILER = ("nvidia-cuda-tileiras", "nvidia-cuda-nvcc", "nvidia-nvvm")
"""The packages that the compiler comes in; without them it is that of a CUDA toolkit."""
IMPORTED = time.time()


@dataclass(frozen=True)
class Image:
    """A compiled kernel: its symbol, its code, and which of the arguments that it was compiled for are constants."""

    symbol: str
    cubin: bytes
    constants: tuple[bool, ...]


_IMAGES: dict[tuple[Any, tuple[int, ...], str], Image] = {}
"""What this process compiled or found, by kernel, architecture and the classes of its arguments."""


@functools.cache
def kept(kernel: Any) -> Any:
    """`kernel`, which from now on is looked for on disk before it is compiled, and kept there afterwards."""
    if compiler_version().startswith(INTERFACE):
        compile_now = kernel._compile

        def compile_kept(signature: Any, context: Any, compute_capability: tuple[int, int] | None = None) -> Any:
            path = place(kernel, signature, context.config.cache_dir, compute_capability)
            found = None if path is None else read(path)
            if found is not None:
                symbol, cubin = found
                _note(kernel, signature, compute_capability, symbol, cubin)
                return cubin, symbol, None, ()
            cubin, symbol, host, libraries = compile_now(signature, context, compute_capability)
            if host is None and not libraries:
                _note(kernel, signature, compute_capability, symbol, cubin)
                if path is not None:
                    write(path, symbol, cubin)
            return cubin, symbol, host, libraries

        kernel._compile = compile_kept
    return kernel


def _note(kernel: Any, signature: Any, capability: tuple[int, int] | None, symbol: str, cubin: bytes) -> None:
    from cuda.tile.compilation import ConstantConstraint

    constants = tuple(isinstance(c, ConstantConstraint) for c in signature.parameters)
    key = kernel, tuple(capability or _capability()), repr(tuple(signature.parameters))
    _IMAGES[key] = Image(symbol, cubin, constants)


def image(kernel: Any, arguments: tuple[Any, ...], capability: tuple[int, int]) -> Image | None:
    """What `cuda.tile.launch` ran on these arguments before, which must be on a GPU; None if it needs more than its arguments
    to be launched, or the way to compile is not known here."""
    from cuda.tile._cext import get_parameter_constraints_from_pyargs
    from cuda.tile.compilation import CallingConvention

    if not compiler_version().startswith(INTERFACE):
        return None
    constraints = get_parameter_constraints_from_pyargs(kernel, arguments, CallingConvention.cutile_python_v2())
    return _IMAGES.get((kernel, tuple(capability), repr(tuple(constraints))))


def place(
    kernel: Any, signature: Any, cache: str | None, compute_capability: tuple[int, int] | None = None
) -> Path | None:
    """Where a kernel compiled for a signature is kept in the folder `cache`; None if it cannot be: the cache is off, the
    compiler is unknown, or a file was changed after it was imported, so that its text is not what runs."""
    text, compiler = _text_beside(kernel._pyfunc.__code__.co_filename), _compiler()
    if cache is None or text is None or compiler is None:
        return None
    capability = compute_capability or _capability()
    options = sorted((k, v) for k, v in os.environ.items() if "CUDA_TILE" in k and not k.endswith("_DIR"))
    made_from = (
        text, kernel._pyfunc.__module__.rpartition(".")[2], kernel._pyfunc.__qualname__, signature.parameters,
        signature.calling_convention, kernel._compiler_options, tuple(capability), compiler_version(), compiler, options,
    )  # fmt: skip
    return Path(cache) / FOLDER / hashlib.sha256(repr(made_from).encode()).hexdigest()


def read(path: Path) -> tuple[str, bytes] | None:
    """The symbol and the code in a file that `write` made; None if there is none, or it is broken."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, _, rest = data.partition(b"\n")
    symbol, _, cubin = rest.partition(b"\n")
    return (symbol.decode(), cubin) if hashlib.sha256(rest).hexdigest().encode() == digest else None


def write(path: Path, symbol: str, cubin: bytes) -> None:
    """Keep a kernel; one that cannot be written is compiled again another time. Safe with other writers."""
    rest = symbol.encode() + b"\n" + cubin
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest)
            os.replace(name, path)
        except OSError:
            os.unlink(name)


@functools.cache
def _text_beside(file: str) -> str | None:
    """A digest of an emitted file and of those that are copied beside it; None if one is younger than their import."""
    digest = hashlib.sha256()
    try:
        for path in sorted({Path(file), *Path(file).parent.glob("_*.py")}):
            if path.stat().st_mtime >= IMPORTED:
                return None
            digest.update(path.read_bytes() + b"\0")
    except OSError:
        return None
    return digest.hexdigest()


@functools.cache
def _compiler() -> str | None:
    """The version of the compiler that `cuda.tile` runs: that of the packages, or what the one in PATH says of itself."""
    versions = []
    for package in COMPILER:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(importlib.metadata.version(package))
    if len(versions) == len(COMPILER) and len({tuple(v.split(".")[:2]) for v in versions}) == 1:
        return " ".join(versions)
    found = shutil.which("tileiras")
    if found is None:
        return None
    try:
        return subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _capability() -> tuple[int, int]:
    """What `cuda.tile` compiles for if it is not told."""
    from cuda.tile._execution import get_compute_capability

    capability: tuple[int, int] = get_compute_capability()
    return capability
