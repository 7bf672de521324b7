"""Cubins on disk: the cache, addressed by everything a cubin depends on, and the folder a user asks for.

A cache entry is one file: a line of JSON (the checksum of the rest, the seconds the compile took), then the
compressed cubin. Files appear by renaming a finished one, so two builds can share a cache and an interrupted one
leaves nothing half written; an entry that does not match its checksum counts as absent.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import secrets
import shutil
import subprocess
import zlib
from pathlib import Path

from ssdgen.build.worker import Compiled
from ssdgen.diagnostics import UserError
from ssdgen.files import make_folder, write
from ssdgen.ir.build import Build, CompileRequest

ENTRY_FORMAT = 1
CACHE_LIMIT_BYTES = 1 << 30
COMPILER_PACKAGES = ("cuda-tile", "nvidia-cuda-tileiras", "nvidia-cuda-nvcc", "nvidia-nvvm")


def cache_folder() -> Path:
    """Where cubins are kept: `SSDGEN_CACHE_DIR`, else `ssdgen` in the user's cache folder."""
    if chosen := os.environ.get("SSDGEN_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ssdgen"


def folder_in_cache(name: str) -> Path:
    """A folder of that name in the cache, made unless it is there. UserError if it cannot be."""
    folder = cache_folder() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        hint = "set SSDGEN_CACHE_DIR to a folder you may write to"
        raise UserError(f"cannot make {folder}: {(error.strerror or str(error)).lower()}", hint) from error
    return folder


@functools.cache
def compiler_versions() -> tuple[tuple[str, str], ...]:
    """The packages that turn a kernel into a cubin, with their versions; or `cuda-tile` alone with what the `tileiras`
    says that it finds on the path. Raises UserError if there is neither."""
    try:
        return tuple((package, importlib.metadata.version(package)) for package in COMPILER_PACKAGES)
    except importlib.metadata.PackageNotFoundError as error:
        path = shutil.which("tileiras")
        if path is not None and error.name != COMPILER_PACKAGES[0]:
            said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
            return (
                (COMPILER_PACKAGES[0], importlib.metadata.version(COMPILER_PACKAGES[0])),
                ("tileiras", said.strip()),
            )
        raise UserError(
            f"kernels cannot be compiled here: the package {error.name} is not installed",
            "pip install 'cuda-tile[tileiras]' (on Linux)",
        ) from error


def request_key(request: CompileRequest, sources: str) -> str:
    """A digest of everything the cubin of `request` depends on, `sources` being the digest of its module's text.

    The label is for people and left out.
    """
    parts = (ENTRY_FORMAT, compiler_versions(), sources, request.kernel, request.signature, request.hints, request.arch)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def sources_digest(module: str) -> str:
    """A digest of the emitted file `module` and of every neighbour that it imports, directly or not. Raises OSError."""
    path = Path(module)
    found: dict[str, bytes] = {}
    todo = [path]
    while todo:
        file = todo.pop()
        if file.name not in found:
            found[file.name] = file.read_bytes()
            todo += [p for name in _neighbours(found[file.name]) if (p := path.with_name(f"{name}.py")).is_file()]
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


def _neighbours(text: bytes) -> list[str]:
    """The modules that `text` imports from its own package; none if it is not Python, which the compile will report."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level == 1]
    return [name for n in imports for name in ([n.module] if n.module else [alias.name for alias in n.names])]


class Store:
    """The cache in `folder`; a None folder keeps nothing. `problem` is why writing stopped, empty if it did not."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.problem = ""

    def get(self, key: str) -> Compiled | None:
        """What is kept at `key`, None if that is nothing, or damaged."""
        if self.folder is None:
            return None
        path = self._path(self.folder, key)
        try:
            head, _, packed = path.read_bytes().partition(b"\n")
        except OSError:
            return None
        with contextlib.suppress(OSError):  # a cache that is only read
            os.utime(path)
        try:
            fields = json.loads(head)
            if fields["sha256"] != hashlib.sha256(packed).hexdigest():
                return None
            return Compiled(zlib.decompress(packed), float(fields["seconds"]))
        except (ValueError, KeyError, TypeError, zlib.error):
            return None

    def put(self, key: str, kernel: Compiled) -> None:
        """Keep `kernel` at `key`. A folder that cannot be written is noted in `problem` and costs only the cache."""
        if self.folder is None or self.problem:
            return
        path = self._path(self.folder, key)
        unfinished = path.with_name(f".{key}.{secrets.token_hex(8)}.unfinished")
        packed = zlib.compress(kernel.cubin)
        head = json.dumps({"sha256": hashlib.sha256(packed).hexdigest(), "seconds": round(kernel.seconds, 3)})
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                unfinished.write_bytes(head.encode() + b"\n" + packed)
                unfinished.replace(path)
            finally:
                unfinished.unlink(missing_ok=True)
        except OSError as error:
            self.problem = f"compiled kernels are not cached: {error}"

    def prune(self, limit: int = CACHE_LIMIT_BYTES) -> None:
        """Delete the entries used longest ago until the rest takes at most `limit` bytes."""
        if self.folder is None or self.problem:
            return
        entries = []
        for path in self.folder.glob("*/*.cubin"):
            try:
                entries.append((path.stat().st_mtime, path.stat().st_size, path))
            except FileNotFoundError:  # another build pruned it
                continue
        total = 0
        for _, size, path in sorted(entries, reverse=True):
            total += size
            if total > limit:
                path.unlink(missing_ok=True)

    @staticmethod
    def _path(folder: Path, key: str) -> Path:
        return folder / key[:2] / f"{key}.cubin"


def write_cubins(build: Build, folder: Path) -> tuple[Path, ...]:
    """Write every cubin of `build` into `folder` as MODULE.KERNEL.ARCH.LABEL.cubin, and say where.

    The folder that `folder` stands in must exist. Raises UserError if a file cannot be written.
    """
    make_folder(folder)
    paths: list[Path] = []
    for kernel in build.kernels:
        r = kernel.request
        label = re.sub(r"[^\w.=-]+", "-", r.label)[:100].strip("-")
        stem = ".".join(part for part in (Path(r.module_path).stem, r.kernel, r.arch, label) if part)
        path, number = folder / f"{stem}.cubin", 2
        while path in paths:
            path, number = folder / f"{stem}.{number}.cubin", number + 1
        write(path, kernel.cubin)
        paths.append(path)
    return tuple(paths)
