"""The cache: what its key covers, and that two builds, a crash or a damaged file never yield a wrong cubin."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from ssdgen.build.store import Store, cache_folder, compiler_versions, request_key, sources_digest
from ssdgen.build.worker import Compiled
from ssdgen.ir.build import ConstantArg
from tests.build.requests import request

KEY = "ab" * 32


def test_what_is_kept_is_found(tmp_path: Path) -> None:
    Store(tmp_path).put(KEY, Compiled(b"cubin\n" * 100, 1.25))
    assert Store(tmp_path).get(KEY) == Compiled(b"cubin\n" * 100, 1.25)
    assert Store(tmp_path).get("cd" * 32) is None
    assert Store(None).get(KEY) is None


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "no head", "head of another"])
def test_a_damaged_entry_is_no_entry(tmp_path: Path, damage: str) -> None:
    Store(tmp_path).put(KEY, Compiled(b"cubin" * 1000, 1.0))
    path = next(tmp_path.rglob("*.cubin"))
    data = path.read_bytes()
    path.write_bytes(
        {
            "empty": b"",
            "cut": data[:-1],
            "flipped": data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
            "no head": data.partition(b"\n")[2],
            "head of another": b"[]\n" + data.partition(b"\n")[2],
        }[damage]
    )
    assert Store(tmp_path).get(KEY) is None


def test_writers_and_readers_at_once_see_whole_entries(tmp_path: Path) -> None:
    """Two builds of the same kernels: each reader finds nothing or one writer's whole entry, and nothing is left over."""
    entries = [Compiled(bytes([i]) * 200_000 + os.urandom(50_000), float(i)) for i in range(2)]

    def write(entry: Compiled) -> str:
        store = Store(tmp_path)
        for _ in range(20):
            store.put(KEY, entry)
        return store.problem

    def read(_: int) -> list[Compiled | None]:
        return [Store(tmp_path).get(KEY) for _ in range(50)]

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(read, range(2)))
        problems = list(threads.map(write, entries))
        found += list(threads.map(read, range(2)))
    assert problems == ["", ""]
    assert all(f is None or f in entries for one in found for f in one)
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == [f"{KEY}.cubin"]


def test_the_oldest_entries_go_when_the_cache_is_full(tmp_path: Path) -> None:
    store = Store(tmp_path)
    keys = [f"{i:064x}" for i in range(4)]
    for age, key in enumerate(keys):
        store.put(key, Compiled(os.urandom(1000), 0.0))
        os.utime(tmp_path / key[:2] / f"{key}.cubin", (1000 - age, 1000 - age))
    store.get(keys[3])  # the oldest, but used now
    store.prune(limit=2500)
    assert [key for key in keys if store.get(key)] == [keys[0], keys[3]]


def test_the_cache_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SSDGEN_CACHE_DIR", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("SSDGEN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "ssdgen"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "ssdgen"


@pytest.fixture
def module(tmp_path: Path) -> Path:
    """An emitted module with a neighbour that imports another, and one it does not import."""
    texts = {
        "layer.py": "from ._tiles import dot\n",
        "_tiles.py": "from . import _deeper\n",
        "_deeper.py": "x = 1\n",
        "stranger.py": "y = 1\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return tmp_path / "layer.py"


@pytest.mark.parametrize(
    ("changed", "matters"),
    [("layer.py", True), ("_tiles.py", True), ("_deeper.py", True), ("stranger.py", False)],
)
def test_the_key_covers_the_text_of_what_is_imported(module: Path, changed: str, matters: bool) -> None:
    before = sources_digest(str(module))
    with module.with_name(changed).open("a") as file:
        file.write("# a change\n")
    assert (sources_digest(str(module)) != before) == matters


def test_a_module_that_is_no_python_still_has_a_key(module: Path) -> None:
    """The compile reports it, with the line."""
    module.write_text("def (:\n")
    assert sources_digest(str(module))


def test_the_key_covers_everything_but_the_label(monkeypatch: pytest.MonkeyPatch) -> None:
    base = request("gram")
    key = request_key(base, "text")
    assert request_key(replace(base, label="for people"), "text") == key
    arrays, length = base.signature[:2], base.signature[2]
    assert length == ConstantArg("L", 64)
    others = [
        replace(base, kernel="scale"),
        replace(base, arch="sm_80"),
        replace(base, hints=(("occupancy", 1),)),
        replace(base, signature=(*arrays, ConstantArg("L", 64.0))),
        replace(base, signature=(*arrays, ConstantArg("L", 128))),
        replace(base, signature=(*arrays[::-1], length)),
    ]
    keys = {request_key(other, "text") for other in others} | {request_key(base, "another text"), key}
    assert len(keys) == len(others) + 2
    monkeypatch.setattr("ssdgen.build.store.compiler_versions", lambda: (("cuda-tile", "0"),))
    assert request_key(base, "text") != key


def test_the_compiler_is_part_of_the_key() -> None:
    assert {"cuda-tile", "nvidia-cuda-tileiras"} <= dict(compiler_versions()).keys()
