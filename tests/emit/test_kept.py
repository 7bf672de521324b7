"""Compiled kernels are found on disk by what they are compiled from, and only by that."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import cuda.tile._compile
import pytest
from cuda.tile.compilation import CallingConvention, KernelSignature

from ssdgen.build.worker import Compiled, _constraint, answer
from ssdgen.emit.support import _kept
from ssdgen.ir.build import CompileRequest
from ssdgen.resources import resource_dir
from ssdgen.run.recorded import Call, record

SM_90 = (9, 0)
KERNEL = "chunk_cumsum"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A copy of the emitted modules, older than its import, in a package of its own."""
    folder = tmp_path / "emitted_for_kept"
    shutil.copytree(resource_dir("generated"), folder)
    for file in folder.iterdir():
        os.utime(file, (1e9, 1e9))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("emitted_for_kept.mamba2")
    for name in [n for n in sys.modules if n.startswith("emitted_for_kept")]:
        del sys.modules[name]


@pytest.fixture
def request_of_kernel(module: ModuleType) -> CompileRequest:
    sizes = {"b": 2, "t": 128, "h": 2, "g": 1, "p": 64, "n": 64}
    launches = record(module, Call(sizes, "bf16"), None)
    found = next(launch.request for launch in launches if launch.request.kernel == KERNEL)
    return replace(found, arch="sm_90")


def signature_of(request: CompileRequest) -> KernelSignature:
    return KernelSignature([_constraint(a) for a in request.signature], CallingConvention.cutile_python_v2())


def fresh(module: ModuleType, **hints: int) -> Any:
    """The kernel as another process has it: never compiled."""
    kept: ModuleType = importlib.import_module("._kept", module.__package__)
    return kept.kept.__wrapped__(getattr(module, KERNEL).replace_hints(**hints))


def context(folder: Path | None) -> Any:
    config = cuda.tile._compile.default_tile_context.config
    return SimpleNamespace(config=replace(config, cache_dir=None if folder is None else str(folder)))


def no_compiler(*args: object, **named: object) -> None:
    raise AssertionError("compiled")


def test_found_without_the_compiler(
    module: ModuleType, request_of_kernel: CompileRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, signature = context(tmp_path / "cache"), signature_of(request_of_kernel)
    first = fresh(module)._compile(signature, here, SM_90)
    monkeypatch.setattr(cuda.tile._compile, "compile_tile", no_compiler)
    assert fresh(module)._compile(signature, here, SM_90) == first
    with pytest.raises(AssertionError, match="compiled"):
        fresh(module, occupancy=2)._compile(signature, here, SM_90)
    with pytest.raises(AssertionError, match="compiled"):
        fresh(module)._compile(signature, here, (10, 0))
    with pytest.raises(AssertionError, match="compiled"):
        fresh(module)._compile(signature, context(None), SM_90)
    *others, last = request_of_kernel.signature
    other = replace(request_of_kernel, signature=(*others, replace(last, value=True)))
    with pytest.raises(AssertionError, match="compiled"):
        fresh(module)._compile(signature_of(other), here, SM_90)


def test_where_the_files_lie_does_not_matter(
    module: ModuleType, request_of_kernel: CompileRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the folder in another place finds the same kernels; one of another text does not."""
    folder = Path(str(module.__file__)).parent
    places = []
    for name in ("copied_for_kept", "changed_for_kept"):
        shutil.copytree(folder, tmp_path / name)
        if name.startswith("changed"):
            (tmp_path / name / "_tiles.py").write_text((folder / "_tiles.py").read_text() + "\n")
            os.utime(tmp_path / name / "_tiles.py", (1e9, 1e9))
        copy = importlib.import_module(f"{name}.mamba2")
        monkeypatch.setitem(sys.modules, f"{name}.mamba2", copy)
        places.append(_kept.place(getattr(copy, KERNEL), signature_of(request_of_kernel), str(tmp_path), SM_90))
    here = _kept.place(getattr(module, KERNEL), signature_of(request_of_kernel), str(tmp_path), SM_90)
    assert here is not None
    assert places[0] == here
    assert places[1] not in (None, here)


def test_a_broken_file_is_compiled_again(module: ModuleType, request_of_kernel: CompileRequest, tmp_path: Path) -> None:
    here, signature = context(tmp_path / "cache"), signature_of(request_of_kernel)
    first = fresh(module)._compile(signature, here, SM_90)
    (kept,) = (tmp_path / "cache" / _kept.FOLDER).iterdir()
    whole = kept.read_bytes()
    for broken in (whole[:-1], b"", whole.replace(b"\x00", b"\x01", 1)):
        kept.write_bytes(broken)
        assert _kept.read(kept) is None
        assert fresh(module)._compile(signature, here, SM_90) == first
        assert kept.read_bytes() == whole


def test_a_text_that_does_not_run_keeps_nothing(
    module: ModuleType, request_of_kernel: CompileRequest, tmp_path: Path
) -> None:
    """An edited file is not what this process imported: a kernel of the old text must not be found by the new one's."""
    edited = Path(str(module.__file__)).with_name("_tiles.py")
    edited.write_text(edited.read_text() + "\n")
    kernel, signature = fresh(module), signature_of(request_of_kernel)
    kernel._compile(signature, context(tmp_path / "cache"), SM_90)
    assert not (tmp_path / "cache" / _kept.FOLDER).exists()


def test_what_is_compiled_ahead_is_found(
    module: ModuleType, request_of_kernel: CompileRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ssdgen warm` compiles in processes of its own, from the same files at any path."""
    monkeypatch.setenv("CUDA_TILE_CACHE_DIR", str(tmp_path / "cache"))
    compiled = answer(request_of_kernel)
    assert isinstance(compiled, Compiled)
    monkeypatch.setattr(cuda.tile._compile, "compile_tile", no_compiler)
    cubin, symbol, _, _ = fresh(module)._compile(signature_of(request_of_kernel), context(tmp_path / "cache"), SM_90)
    assert cubin == compiled.cubin
    assert symbol.encode() in cubin


def test_nothing_is_lost_where_the_folder_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    _kept.write(tmp_path / "file" / "kernel", "symbol", b"cubin")
    assert _kept.read(tmp_path / "file" / "kernel") is None
