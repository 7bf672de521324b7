"""Where the folders that are data live: beside the code once installed, at the top of the repository in a checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Folder = Literal["specs", "templates", "generated"]


def resource_dir(name: Folder) -> Path:
    """The folder `name` of this installation; FileNotFoundError if the installation has lost it."""
    package = Path(__file__).resolve().parent
    for parent in (package, package.parent):
        folder = parent / name
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"ssdgen's folder {name} is neither in {package} nor beside it; install ssdgen again")
