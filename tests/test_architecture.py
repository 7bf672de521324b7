"""What DESIGN says of the rooms: who may import whom, which library lives where, and that no recurrence is special."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ssdgen"
SUPPORT = PACKAGE / "emit" / "support"
"""Files that are copied beside emitted modules: of ssdgen only in that they lie there."""

SOURCES = sorted(p for p in PACKAGE.rglob("*.py") if p.parent != SUPPORT)

ROOMS = (
    "resources",
    "diagnostics",
    "files",
    "ir",
    "spec",
    "derive",
    "plan",
    "emit",
    "build",
    "run",
    "compat",
    "pipeline",
    "nn",
    "models",
    "cli",
)
"""Lowest first: a room imports from those before it."""

LIBRARIES = {
    "sympy": {"derive"},
    "jinja2": {"emit"},
    "lark": {"spec"},
    "torch": {"build", "run", "compat", "nn", "models"},
    "cuda": {"build", "run"},
    "matplotlib": {"run"},
    "safetensors": {"models"},
    "tokenizers": {"models"},
    "transformers": {"run", "models"},
    "typer": {"cli"},
    "rich": {"cli", "build"},
    "jax": {"run", "models"},
}
NAMELESS = ("templates", "ssdgen/ir", "ssdgen/spec", "ssdgen/derive", "ssdgen/plan", "ssdgen/emit")
LONGEST_FILE = 450


def room(path: Path) -> str:
    """`ssdgen/plan/config.py` is in plan, `ssdgen/pipeline.py` in pipeline."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in it, `from ssdgen import x` as ssdgen.x."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level == 1 and path.parent == SUPPORT:
                continue  # a neighbour, which is copied too
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute, so that rooms can be read off them"
            assert node.module is not None
            yield node.module
            if node.module == "ssdgen":
                yield from (f"ssdgen.{alias.name}" for alias in node.names)


def named(paths: list[Path]) -> list[object]:
    return [pytest.param(p, id=str(p.relative_to(ROOT))) for p in paths]


@pytest.mark.parametrize("path", named([p for p in SOURCES if p.parent != PACKAGE or room(p) in ROOMS]))
def test_imports_flow_downward(path: Path) -> None:
    own = ROOMS.index(room(path))
    for module in imports(path):
        parts = module.split(".")
        if parts[0] == "ssdgen" and len(parts) > 1 and parts[1] in ROOMS:
            assert ROOMS.index(parts[1]) <= own, f"{room(path)} imports {module}"


@pytest.mark.parametrize("path", named(SOURCES))
def test_libraries_stay_in_their_rooms(path: Path) -> None:
    for module in imports(path):
        library = module.split(".")[0]
        assert room(path) in LIBRARIES.get(library, {room(path)}), f"{room(path)} imports {library}"


@pytest.mark.parametrize("path", named(sorted(SUPPORT.glob("*.py"))))
def test_copied_files_import_nothing_of_ours(path: Path) -> None:
    """A folder of emitted modules works where ssdgen is not installed."""
    libraries = {module.split(".")[0] for module in imports(path)}
    own = {"jax", "numpy"} if path.name == "_xla.py" else {"torch", "cuda"}
    assert libraries <= {*sys.stdlib_module_names, *own}


def test_every_room_is_ranked() -> None:
    """A new room has to say where it stands."""
    rooms = {room(p) for p in SOURCES} - {"__init__", "__main__"}
    assert rooms == set(ROOMS)


@pytest.mark.parametrize("folder", NAMELESS)
def test_no_recurrence_is_named(folder: str) -> None:
    """What a kernel does follows from the derived form: no template and no stage knows a spec by its name."""
    names = [spec.stem for spec in (ROOT / "specs").glob("*.ssd")]
    assert names
    pattern = re.compile(rf"(?<![A-Za-z0-9])({'|'.join(names)})(?![A-Za-z0-9])", re.IGNORECASE)
    found = []
    for path in sorted((ROOT / folder).rglob("*")):
        if path.is_file() and path.suffix in (".py", ".j2", ".lark"):
            lines = path.read_text(encoding="utf-8").splitlines()
            found += [
                f"{path.relative_to(ROOT)}:{i}: {line}" for i, line in enumerate(lines, 1) if pattern.search(line)
            ]
    assert not found, "\n".join(found)


def test_no_file_outgrows_a_page_or_two() -> None:
    folders = ("ssdgen", "templates", "tests")  # what is emitted is measured in tests/emit
    files = [p for f in folders for p in (ROOT / f).rglob("*") if p.suffix in (".py", ".j2", ".lark")]
    assert len(files) > 50
    lengths = {str(p.relative_to(ROOT)): len(p.read_text(encoding="utf-8").splitlines()) for p in files}
    assert {name: n for name, n in lengths.items() if n > LONGEST_FILE} == {}


def test_templates_hold_no_mathematics() -> None:
    """Templates place text: what is computed is printed from the plan, so none of them spells a function of a recurrence."""
    words = re.compile(r"\b(exp2?|softplus|sigmoid|logsigmoid|silu|tanh)\b")
    templates = sorted((ROOT / "templates").glob("*.j2"))
    assert templates
    for path in templates:
        found = [line for line in path.read_text(encoding="utf-8").splitlines() if words.search(line)]
        assert not found, f"{path.name}: {found}"
