"""`ssdgen generate`: a package that is whole, stays fresh, and is never half written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ssdgen.emit.module import SUPPORT
from tests.cli.conftest import Command

SHARED = ["__init__.py", *SUPPORT]
RETNET = ["retnet.py", "retnet_gradients.py"]


def test_writes_a_package_and_says_what(ssdgen: Command) -> None:
    result = ssdgen("generate", "retnet", "-o", "out")
    assert result.code == 0
    assert result.out.splitlines() == [f"wrote  out/{name}" for name in [*SHARED, "py.typed", *RETNET]]
    assert sorted(os.listdir("out")) == sorted([*SHARED, "py.typed", *RETNET])


def test_a_second_spec_joins_the_first(ssdgen: Command) -> None:
    """The shared files do not depend on which modules stand beside them."""
    ssdgen("generate", "retnet", "-o", "out")
    result = ssdgen("generate", "linear_attention", "-o", "out")
    written = [f"wrote  out/linear_attention{what}.py" for what in ("", "_gradients")]
    assert [line for line in result.out.splitlines() if line.startswith("wrote")] == written
    assert ssdgen("generate", "retnet", "linear_attention", "-o", "out", "--check").code == 0


def test_generates_the_same_bytes_twice(ssdgen: Command) -> None:
    ssdgen("generate", "mamba2", "-o", "one")
    ssdgen("generate", "mamba2", "-o", "two")
    for name in os.listdir("one"):
        assert Path("one", name).read_bytes() == Path("two", name).read_bytes(), name


def test_check_names_what_is_stale_and_writes_nothing(ssdgen: Command) -> None:
    ssdgen("generate", "retnet", "-o", "out")
    assert ssdgen("generate", "retnet", "-o", "out", "--check").out == f"out: {len(SHARED) + 3} files are up to date\n"
    Path("out/retnet.py").write_text("# edited\n")
    Path("out/_tiles.py").unlink()
    result = ssdgen("generate", "retnet", "-o", "out", "--check")
    assert (result.code, result.out) == (1, "")
    assert result.err.splitlines()[1:] == [
        "  out/_tiles.py",
        "  out/retnet.py",
        "  hint: ssdgen generate retnet -o out",
    ]
    assert Path("out/retnet.py").read_text() == "# edited\n"
    assert not Path("out/_tiles.py").exists()
    data = json.loads(ssdgen("generate", "retnet", "-o", "out", "--check", "--json").out)
    assert data == {"folder": "out", "stale": ["_tiles.py", "retnet.py"], "extra": [], "errors": []}


def test_check_names_a_module_that_no_spec_emits(ssdgen: Command) -> None:
    """Only when all built-in specs are asked for: then a folder should hold nothing else."""
    ssdgen("generate", "-o", "out")
    assert ssdgen("generate", "-o", "out", "--check").code == 0
    Path("out/forgotten.py").write_text("")
    assert ssdgen("generate", "retnet", "-o", "out", "--check").code == 0
    result = ssdgen("generate", "-o", "out", "--check")
    assert result.code == 1
    assert result.err == "ssdgen: out/forgotten.py: no spec emits it\n  hint: remove it\n"
    assert json.loads(ssdgen("generate", "-o", "out", "--check", "--json").out)["extra"] == ["forgotten.py"]


def test_one_bad_spec_leaves_the_folder_alone(ssdgen: Command) -> None:
    Path("bad.ssd").write_text("language 1\nlayer bad\n")
    assert ssdgen("generate", "retnet", "bad.ssd", "-o", "out").code == 1
    assert not Path("out").exists()


@pytest.mark.parametrize("name", ["gla", "mamba3"])
def test_a_spec_without_kernels_is_refused_with_the_reason(ssdgen: Command, name: str) -> None:
    result = ssdgen("generate", name, "-o", "out")
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith(f"ssdgen: {name} has no kernels yet: ")
    assert result.err.endswith(f"  hint: ssdgen verify {name} checks its portable form\n")
    assert not Path("out").exists()


def test_a_module_for_xla_stands_alone(ssdgen: Command) -> None:
    """`--target jax` needs no kernels, and its folder none of the files beside them."""
    result = ssdgen("generate", "gla", "--target", "jax", "-o", "out")
    assert result.code == 0
    assert sorted(os.listdir("out")) == ["__init__.py", "_xla.py", "gla_jax.py", "py.typed"]
    assert ssdgen("generate", "gla", "--target", "jax", "-o", "out", "--check").code == 0
    Path("out/gla_jax.py").write_text("# edited\n")
    result = ssdgen("generate", "gla", "--target", "jax", "-o", "out", "--check")
    assert (result.code, result.err.splitlines()[-1]) == (1, "  hint: ssdgen generate gla --target jax -o out")


def test_of_two_targets_the_one_that_can_be_is_written(ssdgen: Command) -> None:
    """What has no kernels is said, with the reason, and does not keep the other target from its module."""
    result = ssdgen("generate", "gla", "retnet", "--target", "cutile,jax", "-o", "out")
    assert result.code == 1
    assert result.err == (
        "ssdgen: gla has no kernels yet: a decay over key channels\n  hint: ssdgen verify gla checks its portable form\n"
    )
    modules = {"gla_jax.py", "retnet_jax.py", "_xla.py", *RETNET}
    assert set(os.listdir("out")) == {*SHARED, "py.typed", *modules}
    result = ssdgen("generate", "retnet", "--target", "tpu", "-o", "out")
    assert (result.code, result.err) == (
        1,
        "ssdgen: --target knows no `tpu`\n  hint: some of cutile, jax, separated by commas\n",
    )


def test_two_specs_of_one_name_are_refused(ssdgen: Command) -> None:
    """Their modules would overwrite each other."""
    ssdgen("new", "retnet")
    result = ssdgen("generate", "retnet", "./retnet.ssd", "-o", "out")
    assert (result.code, result.err.splitlines()[0]) == (1, "ssdgen: two of the specs describe a layer called retnet")


def test_folders_that_cannot_be_written(ssdgen: Command) -> None:
    Path("file").write_text("")
    assert "it is a file, not a folder" in ssdgen("generate", "retnet", "-o", "file").err
    assert "there is no a/b\n  hint: mkdir -p a/b" in ssdgen("generate", "retnet", "-o", "a/b/c").err
    assert "cannot make the folder /proc/x: /proc takes no folders" in ssdgen("generate", "retnet", "-o", "/proc/x").err


@pytest.mark.parametrize("command", ["generate", "build"])
def test_an_empty_folder_name_is_not_the_current_folder(ssdgen: Command, command: str) -> None:
    result = ssdgen(command, "retnet", "-o", "")
    assert result.code == 1
    assert result.err == "ssdgen: -o is empty\n  hint: name a folder; `-o .` is the current one\n"
    assert os.listdir() == []


@pytest.mark.parametrize("name", [*SHARED, "py.typed", "retnet.py"])
def test_what_somebody_else_wrote_is_not_overwritten(ssdgen: Command, name: str) -> None:
    Path("out").mkdir()
    Path("out", name).write_text("# mine\n")
    result = ssdgen("generate", "retnet", "-o", "out")
    assert (result.code, result.out) == (1, "")
    assert result.err.splitlines() == [
        f"ssdgen: ssdgen did not write out/{name} and would overwrite it",
        "  hint: name another folder with -o, or overwrite it with --force",
    ]
    assert os.listdir("out") == [name]
    assert Path("out", name).read_text() == "# mine\n"
    assert ssdgen("generate", "retnet", "-o", "out", "--force").code == 0
    assert ssdgen("generate", "retnet", "-o", "out", "--check").code == 0


def test_what_ssdgen_wrote_once_is_overwritten(ssdgen: Command) -> None:
    """Files of another version or configuration, and empty ones, such as a user's `touch __init__.py`."""
    ssdgen("generate", "retnet", "-o", "out")
    for path in Path("out").glob("*.py"):
        path.write_text(path.read_text().replace("\n\n", "\n# of another version\n\n", 1))
    assert len(json.loads(ssdgen("generate", "retnet", "-o", "out", "--check", "--json").out)["stale"]) == (
        len(SHARED) + 1
    )  # but __init__.py, which has no empty line, and with two for retnet
    Path("out/__init__.py").write_text("")
    assert ssdgen("generate", "retnet", "-o", "out").code == 0
    assert ssdgen("generate", "retnet", "-o", "out", "--check").code == 0


@pytest.mark.parametrize(("folder", "other"), [("class", "class_package"), ("my-pkg", "my_pkg"), ("2", "generated")])
def test_a_folder_that_cannot_be_imported_is_warned_of(ssdgen: Command, folder: str, other: str) -> None:
    result = ssdgen("generate", "retnet", "-o", folder)
    assert result.code == 0
    assert result.err.splitlines() == [
        f"ssdgen: warning: no import statement can name the folder {folder}",
        f"  hint: -o {other}",
    ]


def test_a_configuration_changes_the_module(ssdgen: Command) -> None:
    ssdgen("generate", "retnet", "-o", "one")
    result = ssdgen("generate", "retnet", "-o", "two", "--config", "chunk=128", "--config", "scores=tf32x3")
    assert result.code == 0
    assert Path("one/retnet.py").read_text() != Path("two/retnet.py").read_text()
    assert "chunk: int = 128" in Path("two/retnet.py").read_text()
    assert 'scores: str = "tf32x3"' in Path("two/retnet.py").read_text()
