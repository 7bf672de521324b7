"""Files that are no specs are refused in a sentence, and text in every usual form is read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ssdgen.diagnostics import Source, SpecError
from ssdgen.resources import resource_dir
from ssdgen.spec import builtin_specs, load_source, read_layer

MAMBA2 = (resource_dir("specs") / "mamba2.ssd").read_text(encoding="utf-8")


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(SpecError) as error:
        call()
    return str(error.value)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"\xff\xfel\0a\0",
            "bad.ssd: error[E004]: this file is not UTF-8: byte 0xff on line 1\n  hint: save it as UTF-8",
        ),
        (
            b'language 1\nlayer x "\xe9t\xe9"\n',
            "bad.ssd: error[E004]: this file is not UTF-8: byte 0xe9 on line 2\n  hint: save it as UTF-8",
        ),
        (b"language 1\n\0\0", "bad.ssd: error[E005]: this is not a text file: a NUL byte on line 2"),
        (
            b"#" * 1_000_001,
            "bad.ssd: error[E003]: this file is larger than 1 MB\n  hint: a spec is a page long; is this the right file?",
        ),
    ],
)
def test_unreadable_content(here: Path, content: bytes, message: str) -> None:
    (here / "bad.ssd").write_bytes(content)
    assert refusal(lambda: load_source("bad.ssd")) == message


def test_exactly_one_megabyte_is_read(here: Path) -> None:
    (here / "big.ssd").write_bytes(MAMBA2.encode().ljust(1_000_000, b"\n"))
    assert read_layer(load_source("big.ssd")).name == "mamba2"


def test_missing_file(here: Path) -> None:
    (here / "mine.ssd").write_text(MAMBA2)
    assert refusal(lambda: load_source("mime.ssd")) == (
        "mime.ssd: error[E001]: there is no such file\n  hint: did you mean `mine.ssd`?"
    )
    assert refusal(lambda: load_source("no/such.ssd")) == "no/such.ssd: error[E001]: there is no such file"


def test_directory(here: Path) -> None:
    (here / "folder.ssd").mkdir()
    message = "error[E002]: this is a directory\n  hint: give the path of a spec in it"
    assert refusal(lambda: load_source("folder.ssd")) == f"folder.ssd: {message}"
    assert refusal(lambda: load_source(".")) == f".: {message}"


def test_unknown_built_in_spec(here: Path) -> None:
    assert refusal(lambda: load_source("mamba-2")) == (
        "mamba-2: error[E006]: no built-in spec is called `mamba-2`, and no file\n  hint: did you mean `mamba2`?"
    )
    assert "the built-in specs are gla, linear_attention, mamba2" in refusal(lambda: load_source("transformer"))


@pytest.mark.parametrize("name", ["", "\0", "a\0b.ssd", "x" * 5000, "x" * 5000 + ".ssd"])
def test_names_no_file_can_have(here: Path, name: str) -> None:
    assert "error[E00" in refusal(lambda: load_source(name))


def test_a_file_is_found_by_its_path_and_shown_as_given(here: Path) -> None:
    (here / "mine").write_text(MAMBA2)
    (here / "sub").mkdir()
    (here / "sub" / "mine.ssd").write_text(MAMBA2)
    assert load_source("mine") == Source("mine", MAMBA2)
    assert load_source("sub/mine.ssd") == Source("sub/mine.ssd", MAMBA2)


def test_built_in_specs_are_found_from_anywhere(here: Path) -> None:
    names = ("gla", "linear_attention", "mamba2", "mamba3", "mlstm", "retnet", "simple_gla", "state_space_duality")
    assert builtin_specs() == names
    assert load_source("mamba2") == Source("mamba2.ssd", MAMBA2)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: "\ufeff" + text,
        lambda text: "\ufeff" + text.replace("\n", "\r\n"),
        lambda text: text.rstrip("\n"),
        lambda text: text + "\n\n   \n# the end",
        lambda text: text.replace(" : ", "\t:\t"),
        lambda text: text.replace("# batch", "# bätch ∑ 批"),
    ],
    ids=["crlf", "bom", "bom and crlf", "no last newline", "trailing blanks", "tabs between words", "unicode comment"],
)
def test_text_in_every_usual_form(here: Path, change: Callable[[str], str]) -> None:
    (here / "other.ssd").write_bytes(change(MAMBA2).encode())
    assert read_layer(load_source("other.ssd")) == read_layer(Source("mamba2.ssd", MAMBA2))


def test_crlf_does_not_shift_places(here: Path) -> None:
    bad = MAMBA2.replace("exp(A * step)", "exp(A * stop)")
    assert refusal(lambda: read_layer(Source("s", bad.replace("\n", "\r\n")))) == refusal(
        lambda: read_layer(Source("s", bad))
    )


def test_a_megabyte_of_errors_is_reported_quickly_and_cut_short() -> None:
    text = MAMBA2 + "".join(f"let u{i} = oops{i}\n" for i in range(4000))
    lines = refusal(lambda: read_layer(Source("big.ssd", text))).splitlines()
    assert sum("error[" in line for line in lines) == 41
    assert any("more errors from here on are not shown" in line for line in lines)


def test_ten_thousand_parentheses_are_no_recursion_error() -> None:
    for open_, close in (("(", ")"), ("exp(", ")"), ("(", ""), ("", ")"), ("-", ""), ("a + ", "")):
        text = MAMBA2.replace("y = S[t] . C", f"y = {open_ * 10_000}x{close * 10_000}")
        assert "error[E0" in refusal(lambda text=text: read_layer(Source("deep.ssd", text)))  # type: ignore[misc]


def test_check_loads_no_heavy_library() -> None:
    """`ssdgen check` answers in under a second only as long as the front end imports nothing that takes one."""
    code = "import sys; from ssdgen.spec import *; read_layer(load_source('mamba2')); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert set(loaded.stdout.split()) & {"torch", "sympy", "cuda", "numpy", "jinja2", "typer", "rich"} == set()
