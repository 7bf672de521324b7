"""Tables on disk: two writers lose nothing, a reader never sees half a table, and a foreign file is not overwritten."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ssdgen.diagnostics import UserError
from ssdgen.emit.support import _tuned
from ssdgen.emit.support._tuned import Entry, Key, parse
from ssdgen.run.tune.table import add, user_table

KEY = Key("digest", "plan=a", (), "GPU", "1.7", ("bfloat16",), "walks=1")

WRITER = """
import sys; sys.path[:] = sys.argv[3:]
from pathlib import Path
from dataclasses import replace
from tests.run.tune.test_table import KEY
from ssdgen.emit.support._tuned import Entry
from ssdgen.run.tune.table import add
for i in range(40):
    add(Path(sys.argv[1]), [Entry(replace(KEY, shape=f"{sys.argv[2]} {i}"), {"chunk": i})])
"""


def test_two_writers_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "tuned_layer.json"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), name, *sys.path]) for name in "ab"]
    while any(w.poll() is None for w in writers):
        if path.exists():
            parse(path.read_text())  # whole, at any time
    assert [w.returncode for w in writers] == [0, 0]
    assert {e.key.shape for e in parse(path.read_text())} == {f"{name} {i}" for name in "ab" for i in range(40)}
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix == ".json") == ["tuned_layer.json"]


def test_the_same_key_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "tuned_layer.json"
    add(path, [Entry(KEY, {"chunk": 64}), Entry(replace(KEY, gpu="B"), {"chunk": 32})])
    kept = add(path, [Entry(KEY, {"chunk": 128})])
    assert {e.key.gpu: e.config["chunk"] for e in kept} == {"GPU": 128, "B": 32}


def test_modules_of_this_process_see_it_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSDGEN_CACHE_DIR", str(tmp_path))
    _tuned.forget()
    assert KEY not in _tuned._tables()
    add(user_table("layer"), [Entry(KEY, {"chunk": 64})])
    assert KEY in _tuned._tables()
    monkeypatch.undo()
    _tuned.forget()


def test_a_users_broken_table_is_a_cache_and_another_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSDGEN_CACHE_DIR", str(tmp_path))
    user_table("layer").write_text("broken")
    assert len(add(user_table("layer"), [Entry(KEY, {})])) == 1
    other = tmp_path / "elsewhere" / "tuned_layer.json"
    other.parent.mkdir()
    other.write_text('{"format": 99}')
    with pytest.raises(UserError, match="is no tuning table: it has format 99"):
        add(other, [Entry(KEY, {})])
    assert other.read_text() == '{"format": 99}'


def test_a_name_that_no_module_reads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no module would read"):
        add(tmp_path / "mine.json", [Entry(KEY, {})])
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write"):
        add(tmp_path / "file" / "tuned_layer.json", [Entry(KEY, {})])
