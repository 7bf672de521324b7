"""How long the command takes on this machine, beside what it may take. Five minutes at most; nothing else should run.

    python bench/command_times.py [--json] [--skip-build] [--arch sm_90] [--jobs 2] [--runs 9]

Each number is a process of its own, timed from start to end by the wall, after one run that is not counted; medians, but for
the build, which is one run. Measured:

  check     ssdgen check mamba2
  generate  ssdgen generate mamba2, into an empty folder, the proof included
  build     ssdgen build mamba2 from an empty cache: bf16 and f32, with and without z, aligned, the default configuration
  import    import generated.mamba2 in a process that has imported torch and cuda.tile
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from ssdgen.ir.build import DEFAULT_ARCHITECTURES

ROOT = Path(__file__).resolve().parent.parent
SPEC = "mamba2"
IMPORT = f"""
import time, torch, cuda.tile
begin = time.perf_counter()
import generated.{SPEC}
print(time.perf_counter() - begin)
"""


@dataclass(frozen=True)
class Measured:
    """Seconds of every run, their median, and the target that it should stay below."""

    name: str
    what: str
    median: float
    target: float
    runs: tuple[float, ...]


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--skip-build", action="store_true", help="leave out the build, which takes minutes")
    parser.add_argument("--arch", default=",".join(DEFAULT_ARCHITECTURES), help="architectures of the build, by commas")
    parser.add_argument("--jobs", type=int, default=2, help="compilers at a time")
    parser.add_argument("--runs", type=int, default=9, help="runs of which the median is taken")
    options = parser.parse_args()
    machine = {
        "machine": f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.2f} at the start",
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    results = [
        measured("check", f"ssdgen check {SPEC}", 1.0, options.runs, lambda folder: command("check", SPEC)),
        measured("generate", f"ssdgen generate {SPEC}", 3.0, options.runs, generate),
        measured("import", f"import generated.{SPEC}", 0.2, options.runs, lambda folder: float(python("-c", IMPORT))),
    ]
    if not options.skip_build:
        arguments = ("build", SPEC, "--arch", options.arch, "--dtype", "bf16,f32", "--jobs", str(options.jobs))
        what = f"ssdgen {' '.join(arguments)}"
        results.append(measured("build", what, 90.0, 1, lambda folder: command(*arguments, cache=folder)))
    if options.json:
        print(json.dumps({**machine, "results": [asdict(r) for r in results]}, indent=1))
    else:
        print("\n".join([*(f"{key}: {value}" for key, value in machine.items()), "", *map(line, results)]))


def measured(name: str, what: str, target: float, runs: int, seconds: Callable[[str], float]) -> Measured:
    """The median of `runs` calls of `seconds`, each given an empty folder; several are warmed up by one more."""
    times = []
    for _ in range(runs + 1 if runs > 1 else 1):
        with tempfile.TemporaryDirectory() as folder:
            times.append(seconds(folder))
    counted = times[-runs:]
    return Measured(name, what, statistics.median(counted), target, tuple(counted))


def generate(folder: str) -> float:
    """Seconds to write the package into an empty folder."""
    return command("generate", SPEC, "-o", str(Path(folder) / "generated"))


def command(*arguments: str, cache: str = "") -> float:
    """Seconds that `ssdgen` takes with `arguments`; its cache is in the folder `cache`. Ends the program if it fails."""
    begin = time.perf_counter()
    python("-m", "ssdgen", *arguments, cache=cache)
    return time.perf_counter() - begin


def python(*arguments: str, cache: str = "") -> str:
    """What a Python prints in a process of its own. Ends the program if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} | ({"SSDGEN_CACHE_DIR": cache} if cache else {})
    finished = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if finished.returncode:
        sys.exit(f"python {' '.join(arguments)}\n{finished.stdout}{finished.stderr}")
    return finished.stdout


def line(result: Measured) -> str:
    """A row of the table."""
    verdict = "ok  " if result.median < result.target else "OVER"
    spread = (
        f"{min(result.runs):.2f} to {max(result.runs):.2f} in {len(result.runs)}" if len(result.runs) > 1 else "one run"
    )
    return (
        f"{verdict}  {result.name:9} {result.median:7.2f} s  target {result.target:5.1f} s  {spread:22}  {result.what}"
    )


if __name__ == "__main__":
    main()
