"""Writing is all or nothing, and a folder that cannot be written to is named."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ssdgen.diagnostics import UserError
from ssdgen.files import differing, make_folder, write, write_all


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "module.py"
    write(path, "old")

    def interrupted(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["module.py"]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "module.py"
    write(path, "old")

    def full(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UserError, match=r"cannot write .*module\.py: no space left on device"):
        write(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["module.py"]


def test_a_file_that_is_right_already_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    assert write(path, "text")
    os.utime(path, (0, 0))
    assert not write(path, "text")
    assert path.stat().st_mtime == 0


def test_mode_and_link_are_kept(tmp_path: Path) -> None:
    real, link = tmp_path / "real.py", tmp_path / "link.py"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    write(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    assert real.stat().st_mode & 0o777 == 0o640


def test_what_is_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=r"cannot write into .*file: it is a file, not a folder"):
        make_folder(tmp_path / "file")
    with pytest.raises(UserError, match=r"cannot write .*folder: a folder of that name is in the way"):
        write(tmp_path / "folder", "text")
    with pytest.raises(
        UserError, match=r"cannot make the folder .*deep: there is no .*missing\n  hint: mkdir -p .*missing"
    ):
        make_folder(tmp_path / "missing" / "deep")
    with pytest.raises(UserError, match=r"cannot make the folder .*: not a directory"):
        make_folder(tmp_path / "file" / "deep")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(UserError, match="permission denied"):
        write(tmp_path / "module.py", "text")


def test_differing_names_what_is_stale_or_missing(tmp_path: Path) -> None:
    files = {"a.py": "1", "b.py": "2"}
    assert differing(tmp_path / "none", files) == ("a.py", "b.py")
    assert write_all(tmp_path, files) == ("a.py", "b.py")
    assert differing(tmp_path, files) == ()
    (tmp_path / "b.py").write_text("edited")
    assert differing(tmp_path, files) == ("b.py",)
    assert write_all(tmp_path, files) == ("b.py",)
