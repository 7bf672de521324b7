"""The kernels of the built-in specs on one GPU: right and clean. Ten minutes at most. `ssdgen bench` has the times.

    python bench/verify_on_gpu.py --out DIR [--quick] [--seconds 570] [--spec NAME] [--only KIND]

Writes DIR/results.json and DIR/table.txt after every step. Each step is a process of its own, so that a kernel that ends
a CUDA context ends one step; what failed stands under "problems" with the end of its output. Steps:

  warm      every kernel of ours is compiled, in parallel processes, into the compiler's disk cache
  verify    every spec at every shape of SHAPES, bf16, all inputs present: against the chunked form in float64 on the GPU
            (all of it) and a float64 token loop (two heads of the last sequence, at most 4,096 tokens)
  memcheck  compute-sanitizer over one ragged shape a spec
  gates     what `ssdgen verify SPEC --device cuda` asks of the GPU: the hardware and peer checks, at small awkward sizes
  serving   the same of one-token steps; `gradients` of gradients, `convolution` of the causal convolution beside the modules
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from variants import VARIANTS

HERE = Path(__file__).resolve()
ROOT = HERE.parent.parent
SPECS = ("mamba2", "state_space_duality", "retnet", "linear_attention", "simple_gla", "mlstm")
SHAPES = (
    (4, 16384, 8, 1, 64, 128),
    (4, 4096, 8, 1, 64, 128),
    (4, 16384, 8, 1, 64, 64),
    (4, 16384, 8, 1, 64, 256),
    (8, 2048, 24, 1, 64, 128),
    (1, 8192, 80, 1, 64, 128),
    (1, 131072, 64, 8, 64, 128),
)
"""Batch, tokens, heads, groups, head channels, state channels."""
QUICK_SHAPES = ((2, 2048, 4, 1, 64, 64), (1, 2048, 16, 2, 64, 128))
KINDS = ("verify", "memcheck", "gates", "serving", "gradients", "convolution")
PARTS = 3
"""Processes that share the trials of one spec's gates."""
CACHES = Path(tempfile.gettempdir()) / "ssdgen-bench-caches"
SANITIZERS = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")


def main() -> int:
    """Run all steps, or the one that a child process is told to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for results.json and table.txt")
    parser.add_argument("--quick", action="store_true", help="two small shapes, few repetitions")
    parser.add_argument("--seconds", type=float, default=570.0, help="no step starts, and each is ended, after this")
    parser.add_argument("--spec", action="append", choices=SPECS, help="this spec only; several times for several")
    parser.add_argument("--only", action="append", choices=KINDS, help="these steps only; several times for several")
    parser.add_argument("--step", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.step:
        import verify_steps

        for row in verify_steps.STEPS[options.step[0]](*options.step[1:], quick=options.quick):
            print("ROW " + json.dumps(row), flush=True)
        return 0
    run = Run(options)
    shapes = QUICK_SHAPES if options.quick else SHAPES
    numbers = [",".join(map(str, shape)) for shape in shapes]
    run.record_machine()
    specs = options.spec or SPECS
    variants = [name for name, (spec, _) in VARIANTS.items() if spec in specs]
    kinds = options.only or KINDS
    if "verify" in kinds:
        run.together("warm", warm_steps(shapes, (*specs, *variants)), 14, until=0.4)
    checks: list[tuple[str, ...]] = [("verify", s, shape) for s in (*specs, *variants) for shape in reversed(numbers)]
    checks += [("memcheck", s) for s in (*specs, *variants)]
    checks += [("gates", spec, f"{part}/{PARTS}") for spec in specs for part in range(PARTS)]
    checks += [(kind, spec) for kind in ("serving", "gradients") for spec in specs] + [("convolution", "causal_conv")]
    run.together("checks", [step for step in checks if step[0] in kinds], 12, until=1.0)
    print((options.out / "table.txt").read_text())
    return 1 if run.results["problems"] else 0


def warm_steps(shapes: tuple[tuple[int, ...], ...], specs: tuple[str, ...]) -> list[tuple[str, ...]]:
    """What to compile: once a class of lengths, walks once a state size and class."""
    steps: dict[tuple[object, ...], tuple[str, ...]] = {}
    for shape in shapes:
        b, _, h, g, p, n = shape
        number = ",".join(map(str, shape))
        classes = tuple("1" if x == 1 else "16" if x % 16 == 0 else "any" for x in (b, h, g, p, n))
        for spec in specs:
            steps.setdefault((spec, n, classes), ("warm", spec, number))
    return list(steps.values())


def cache_of(step: tuple[str, ...]) -> str:
    """The compiler's cache that a step uses: many writers at once can make cuTile take its database for broken."""
    spec = step[1] if step[1] in SPECS else "mamba2"  # a variant of it
    return spec if step[0] in ("warm", "verify", "memcheck") else f"{step[0]}-{spec}"


class Run:
    """The results so far, and the time that is left."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.start = self.end = time.monotonic()
        self.results: dict[str, Any] = {"machine": {}, "seconds": {}}
        self.results |= {kind: [] for kind in (*KINDS, "problems")}

    def left(self) -> float:
        """Seconds that this step's kind may still take."""
        return self.end - time.monotonic()

    def record_machine(self) -> None:
        """The device, the driver and the versions."""
        query = "nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader"
        versions = "import torch, cuda.tile; print('torch', torch.__version__, 'cuda-tile', cuda.tile.__version__)"
        self.results["machine"] = {
            "gpu": output_of(query.split()),
            "versions": output_of([sys.executable, "-c", versions]),
            "date": time.strftime("%Y-%m-%d"),
            "command": shlex.join(["python", "bench/verify_on_gpu.py", *without_folder(sys.argv[1:])]),
        }
        self.save()

    def together(self, name: str, steps: list[tuple[str, ...]], workers: int, until: float) -> None:
        """Run `steps`, at most `workers` at a time and two fewer than there are cores, `until` a share of all the time."""
        self.end = self.start + until * float(self.options.seconds)
        begun = time.monotonic()
        with ThreadPoolExecutor(min(workers, max(1, (os.cpu_count() or 1) - 2))) as pool:
            list(pool.map(self.step, steps))
        seconds = self.results["seconds"]
        seconds[name] = round(seconds.get(name, 0) + time.monotonic() - begun, 1)
        print(f"{name}: {seconds[name]:.0f} s, {self.left():.0f} s left", flush=True)
        self.save()

    def step(self, step: tuple[str, ...]) -> None:
        """Run one step in a process; keep its rows, or why there are none."""
        if self.left() < 5:
            self.problem(step, "not started: the time is up")
            return
        command, environment = [sys.executable, str(HERE), "--out", str(self.options.out)], dict(os.environ)
        command += ["--quick"] if self.options.quick else []
        command += ["--step", *step]
        environment["CUDA_TILE_CACHE_DIR"] = str(CACHES / cache_of(step))
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(HERE.parent), environment.get("PYTHONPATH", "")])
        if step[0] == "memcheck":
            tool = next((t for t in map(shutil.which, SANITIZERS) if t), None)
            if tool is None:
                self.problem(step, "not run: no compute-sanitizer")
                return
            command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable]
            command += [str(HERE.with_name("ragged_once.py")), step[1]]
            environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        begun = time.monotonic()
        code, output = finished(command, environment, self.left())
        rows = [json.loads(line[4:]) for line in output.splitlines() if line.startswith("ROW ")]
        if step[0] == "memcheck":
            lines = [line for line in output.splitlines() if "error" in line.lower()]
            rows = [{"spec": step[1], "clean": code == 0, "output": lines[-6:]}]
        if step[0] in self.results:
            self.results[step[0]] += rows
        if code:
            what = "ended: its time was up" if code == LATE else f"exit {code}"
            self.problem(step, f"{what}: {output[-1500:]}")
        for row in rows:
            if row.get("passed") is False and not row.get("skipped"):
                self.problem(step, f"wrong: {row}")
        for line in output.splitlines():
            if line.startswith("FAILED "):
                self.problem(step, line)
        print(f"  {' '.join(step)}: {time.monotonic() - begun:.1f} s", flush=True)
        self.save()

    def problem(self, step: tuple[str, ...], what: str) -> None:
        """Note that a step failed, and go on."""
        self.results["problems"].append({"step": " ".join(step), "what": what})
        print(f"  PROBLEM {' '.join(step)}: {what}", flush=True)

    def save(self) -> None:
        """Write what there is."""
        (self.options.out / "results.json").write_text(json.dumps(self.results, indent=1))
        (self.options.out / "table.txt").write_text(table(self.results))


LATE = 124


def finished(command: list[str], environment: dict[str, str], seconds: float) -> tuple[int, str]:
    """The exit code and all output of `command`; LATE and what it printed until then if it takes longer."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the sanitizer has a child
        return LATE, process.communicate()[0]


def output_of(command: list[str]) -> str:
    """What `command` prints; empty if it is not there or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def without_folder(arguments: list[str]) -> list[str]:
    """The arguments of this script with DIR for the folder of results."""
    return ["DIR" if before == "--out" else word for before, word in zip(["", *arguments], arguments, strict=False)]


def table(results: dict[str, Any]) -> str:
    """The results for a person."""
    lines = [f"{key}: {value}" for key, value in results["machine"].items()]
    lines += ["", "Errors (relative norms, bf16 inputs) beside their bounds; batch, tokens, heads, groups, p, n"]
    for r in sorted(results["verify"], key=lambda r: (r["spec"], r["shape"], r["value"])):
        verdict = "ok  " if r["passed"] else "FAIL"
        against = f"{r['spec']:17}{r['shape']:24}{r['value']:4}{r['against']:18}"
        lines.append(f"{verdict}  {against}{r['error']:8.1e}  bound {r['bound']:7.1e}")
    lines += ["", "compute-sanitizer memcheck on one ragged shape"]
    lines += [
        f"{r['spec']:17}{'clean' if r['clean'] else 'NOT CLEAN'}  {r['output'][-1:]}" for r in results["memcheck"]
    ]
    lines += ["", "Hardware and peer checks of `ssdgen verify`: made, failed, skipped, the largest share of a bound"]
    checks = [row for kind in ("gates", "serving", "gradients", "convolution") for row in results[kind]]
    for spec in dict.fromkeys(r["spec"] for r in checks):
        made = [r for r in checks if r["spec"] == spec and not r["skipped"]]
        failed = sum(not r["passed"] for r in made)
        share = max((r["error"] / r["bound"] for r in made if r["bound"]), default=0.0)
        skipped = [f"{r['name']}: {r['note']}" for r in checks if r["spec"] == spec and r["skipped"]]
        lines.append(f"{spec:17}{len(made):4} made, {failed} failed, {len(skipped)} skipped {skipped}, {share:.2f}")
    lines += ["", f"{len(results['problems'])} problems"]
    lines += [f"{p['step']}: {p['what']}" for p in results["problems"]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
