"""A build for people and for programs: the table of resources, and JSON."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from ssdgen.build.compile import Result
from ssdgen.ir.build import Build, CompiledKernel, CompileFailure, KernelResources

COLUMNS = ("kernel", "arch", "configuration", "MMA", "smem KB", "regs", "spill B", "TMA", "cubin KB", "s")
CAPTION = (
    "MMA and TMA (loads/stores): instructions in the text; tmem: accumulators in tensor memory; smem: shared memory of a "
    "block; regs and spill: of a thread; (s): compile seconds of a kernel that the cache had"
)


def resource_table(build: Build) -> Table:
    """One row for each kernel, architecture and label, in the order of the requests; failed ones say so.

    The modules that the kernels are of are named if they are several.
    """
    table = Table(box=None, pad_edge=False, caption=CAPTION, caption_justify="left", caption_style="dim")
    modules = [Path(result.request.module_path).stem for result in build.results]
    named = len(set(modules)) > 1
    for name in ("module", *COLUMNS) if named else COLUMNS:
        words = name in ("module", "kernel", "configuration", "MMA")
        table.add_column(
            name, justify="left" if words or name == "arch" else "right", no_wrap=not words, overflow="fold"
        )
    for module, result in zip(modules, build.results, strict=True):
        request = result.request
        cells = _cells(result) if isinstance(result, CompiledKernel) else (Text("failed", "red"),)
        first = (Text(module),) if named else ()
        table.add_row(*first, Text(request.kernel), Text(request.arch), Text(request.label), *cells)
    return table


def _cells(kernel: CompiledKernel) -> tuple[Text, ...]:
    used = kernel.resources
    return (
        Text(mma_text(used)),
        Text(f"{used.shared_bytes / 1024:.1f}"),
        Text(str(used.registers)),
        Text(str(used.spilled_bytes), "yellow" if used.spilled_bytes else ""),
        Text(f"{used.tma_loads}/{used.tma_stores}" if used.tma_loads or used.tma_stores else "-"),
        Text(f"{len(kernel.cubin) / 1024:.0f}"),
        Text(f"({kernel.seconds:.1f})" if kernel.cached else f"{kernel.seconds:.1f}"),
    )


def mma_text(used: KernelResources) -> str:
    """The tensor core instructions of a kernel: `wgmma x24`, `tcgen05 x24 tmem`, `-` for none."""
    text = " + ".join(f"{kind} x{count}" for kind, count in used.mma)
    return f"{text} tmem" if used.tmem else text or "-"


def to_json(build: Build) -> dict[str, Any]:
    """The build as JSON values, one object a request in `results`; cubins are not included, their sizes are.

    An object has `kernel`, `arch`, `label`, `module`, `hints` and `ok`; if that is true `resources`, `cubin_bytes`,
    `seconds` and `cached`, else `message`, `emitted` and `spec`.
    """
    return {"results": [_result_json(r) for r in build.results], "notes": list(build.notes)}


def _result_json(result: Result) -> dict[str, Any]:
    request = result.request
    head = {
        "kernel": request.kernel,
        "arch": request.arch,
        "label": request.label,
        "module": request.module_path,
        "hints": dict(request.hints),
        "ok": isinstance(result, CompiledKernel),
    }
    if isinstance(result, CompileFailure):
        return head | {"message": result.message, "emitted": result.emitted, "spec": result.spec}
    resources = asdict(result.resources) | {"mma": dict(result.resources.mma), "tmem": result.resources.tmem}
    return head | {
        "resources": resources,
        "cubin_bytes": len(result.cubin),
        "seconds": round(result.seconds, 3),
        "cached": result.cached,
    }
