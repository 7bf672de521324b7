"""Shared-memory bank conflicts, read by Nsight Compute where it is here and may read them.

One process calls every module once at every shape under `ncu`; a kernel of torch between two calls tells them apart in
the list that comes back.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ssdgen.run.bench.shapes import Shape, read_shape

METRIC = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
MARK = "erfinv"
"""In the name of the kernel between two calls."""
PLACES = ("ncu", "/usr/local/cuda/bin/ncu")
START = "import sys; sys.path[:] = sys.argv[2:]; from ssdgen.run.bench.conflicts import calls; calls(sys.argv[1])"
Runner = Callable[[Sequence[str], float], tuple[int, str]]


@dataclass(frozen=True, slots=True)
class Conflicts:
    """Bank conflicts of a call by shape and module folder; a `note` if they were not read."""

    counts: Mapping[tuple[str, str], int] = field(default_factory=dict)
    note: str = ""

    def of(self, shape: str, folder: str) -> int | None:
        """Those of one call, if they were read."""
        return self.counts.get((shape, folder))


def run(command: Sequence[str], seconds: float) -> tuple[int, str]:
    """Exit code and output of a command; 124 if it takes longer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return 124, f"not done after {seconds:.0f} s"
    return done.returncode, done.stdout + done.stderr


def read_conflicts(
    shapes: Sequence[Shape],
    folders: Mapping[str, Sequence[str]],
    seconds: float = 40.0,
    runner: Runner = run,
    tool: str | None = None,
) -> Conflicts:
    """Conflicts of the modules in `folders` (by shape), or why they were not read."""
    tool = tool or next((found for found in map(shutil.which, PLACES) if found), None)
    if tool is None:
        return Conflicts(note="bank conflicts were not read: no ncu")
    order = [(str(shape), folder) for shape in shapes for folder in folders[str(shape)]]
    options = ["--clock-control", "none", "--profile-from-start", "off", "--csv", "--metrics", METRIC]
    command = [tool, *options, sys.executable, "-c", START, json.dumps(order), *sys.path]
    code, output = runner(command, seconds)
    counts = counted(output)
    if code or len(counts) != len(order):
        last = next((line for line in reversed(output.splitlines()) if line.startswith("==")), output[-200:])
        return Conflicts(note=f"bank conflicts were not read: {' '.join(last.split())[:200]}")
    return Conflicts(dict(zip(order, counts, strict=True)))


def counted(output: str) -> list[int]:
    """The sums of the metric between marks, in order, out of what ncu prints."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    sums: list[int] = []
    for row in csv.DictReader(io.StringIO("\n".join(lines))):
        if row.get("Metric Name") != METRIC:
            continue
        if MARK in row["Kernel Name"]:
            sums.append(0)
        elif sums:
            sums[-1] += round(float(row["Metric Value"].replace(",", "")))
    return sums


def calls(order: str) -> None:
    """What runs under ncu: each module once before, so that it is compiled, and once while the profiler looks."""
    import torch

    from ssdgen.run.bench.ours import call_of, load_module
    from ssdgen.run.bench.truth import case_of
    from ssdgen.run.inputs import draw
    from ssdgen.spec import load_source, read_layer

    layer = read_layer(load_source("mamba2"))
    for shape, folder in json.loads(order):
        inputs = draw(layer, case_of(layer, read_shape(shape), 0), "cuda", "cuda")
        call = call_of(load_module(Path(folder), layer.name), tuned=False)
        call(inputs)
        mark = torch.zeros(32, device="cuda")
        torch.cuda.synchronize()
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        mark.erfinv_()
        call(inputs)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
