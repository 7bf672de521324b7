"""cuda.tile's compile cache on disk, filled by several processes at once.

It is one SQLite file, which cuda.tile takes for broken and deletes when it is locked for too long. So each process gets a
copy of its own, and what they compiled is put together afterwards.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Iterable
from pathlib import Path

VARIABLE = "CUDA_TILE_CACHE_DIR"
FILE = "cache.db"
COLUMNS = "key, blob, blob_size, atime, metadata"


def cache_dir() -> Path | None:
    """The folder of cuda.tile's cache; None if it has none, or is not here."""
    try:
        from cutile_cache._env import get_cache_dir_from_env
    except ImportError:
        return None
    folder = get_cache_dir_from_env()
    return None if folder is None else Path(folder)


def copies(folder: Path, into: Path, count: int) -> list[Path]:
    """`count` folders within `into`, each with a copy of the cache in `folder`."""
    out = []
    for i in range(count):
        copy = into / str(i)
        copy.mkdir(parents=True)
        if (folder / FILE).exists():
            shutil.copy(folder / FILE, copy / FILE)
        out.append(copy)
    return out


def merge(folders: Iterable[Path], into: Path) -> None:
    """Put what is in the caches of `folders` into that of `into`; a broken one is left out."""
    into.mkdir(parents=True, exist_ok=True)
    for folder in folders:
        source = folder / FILE
        if not source.exists():
            continue
        if not (into / FILE).exists():
            shutil.copy(source, into / FILE)
            continue
        with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(into / FILE)) as target:
            target.execute("ATTACH ? AS other", (str(source),))
            target.execute(f"INSERT OR IGNORE INTO cache ({COLUMNS}) SELECT {COLUMNS} FROM other.cache")
            target.commit()
