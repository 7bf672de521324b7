"""What a user installs: a wheel that works far from the repository, and a package that works without ssdgen."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from ssdgen import __version__
from ssdgen.emit.module import SUPPORT

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("pyproject.toml", "README.md", "LICENSE", "ssdgen", "specs", "templates", "generated")


def run(arguments: list[str], folder: Path) -> str:
    """Standard output of a command in `folder`, in an environment that does not know the repository."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    result = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{arguments}\n{result.stdout}{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy so that the checkout stays clean."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    run([*pip, "--wheel-dir", str(folder), str(source)], folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """The bin folder of an environment with nothing but the wheel and, on the path, the libraries of this one."""
    environment = wheel.parent / "environment"
    venv.create(environment)
    python = environment / "bin" / "python"
    site = Path(
        run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], wheel.parent).strip()
    )
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    run([*pip, "--force-reinstall", str(wheel)], wheel.parent)
    return environment / "bin"


def test_the_wheel_holds_what_it_needs_and_no_more(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for needed in (
        *(f"ssdgen/specs/{p.name}" for p in (ROOT / "specs").glob("*.ssd")),
        *(f"ssdgen/templates/{p.name}" for p in (ROOT / "templates").glob("*.j2")),
        *(f"ssdgen/generated/{p.name}" for p in (ROOT / "generated").glob("*.py")),
        *(str(p.relative_to(ROOT)) for p in (ROOT / "ssdgen").rglob("*.py")),
        "ssdgen/spec/grammar.lark",
        "ssdgen/cli/start.ssd",
        "ssdgen/specs/README.md",
        "ssdgen/py.typed",
        "ssdgen/generated/py.typed",
        f"ssdgen-{__version__}.dist-info/licenses/LICENSE",
    ):
        assert needed in names
    assert {name.split("/")[0] for name in names} == {"ssdgen", f"ssdgen-{__version__}.dist-info"}


def test_every_package_is_declared() -> None:
    """setuptools finds only what it is told of: a new room has to be in the list."""
    listed = re.search(r"(?s)^packages = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert listed is not None
    declared = set(re.findall(r'"([\w.]+)"', listed[1]))
    folders = {p.parent for p in (ROOT / "ssdgen").rglob("__init__.py")}
    data = {"ssdgen.generated", "ssdgen.specs", "ssdgen.templates"}
    assert declared == {".".join(p.relative_to(ROOT).parts) for p in folders} | data


@pytest.mark.slow
def test_generates_outside_the_repository(installed: Path, tmp_path: Path) -> None:
    printed = run([str(installed / "ssdgen"), "generate", "mamba2", "-o", "out"], tmp_path)
    emitted = sorted(p.name for p in (tmp_path / "out").iterdir() if p.suffix == ".py")
    modules = ("mamba2.py", "mamba2_gradients.py")
    assert emitted == sorted(["__init__.py", *SUPPORT, *modules])
    assert printed.count("wrote  out/") == len(list((tmp_path / "out").iterdir()))
    for name in (*SUPPORT, *modules):
        assert (tmp_path / "out" / name).read_text() == (ROOT / "generated" / name).read_text(), name


@pytest.mark.slow
def test_the_emitted_package_needs_no_ssdgen(installed: Path, tmp_path: Path) -> None:
    run([str(installed / "ssdgen"), "generate", "mamba2", "-o", "out"], tmp_path)
    program = """
import sys
sys.modules["ssdgen"] = None  # importing it is an error
import torch
from out import mamba2
x, dt, A = torch.randn(1, 70, 2, 8), torch.randn(1, 70, 2), -torch.rand(2)
B, C = torch.randn(1, 70, 1, 4), torch.randn(1, 70, 1, 4)
y, S = mamba2.forward(x, dt, A, B, C)
assert y.shape == x.shape and S.shape == (1, 2, 8, 4) and bool(y.isfinite().all())
"""
    run([str(installed / "python"), "-c", program], tmp_path)


@pytest.mark.slow
def test_the_emitted_modules_are_installed_too(installed: Path, tmp_path: Path) -> None:
    program = "from ssdgen.generated import mamba2; print(mamba2.init_state(1, 2).shape[:2])"
    assert run([str(installed / "python"), "-c", program], tmp_path) == "torch.Size([1, 2])\n"
