"""What people and programs see of a build."""

from __future__ import annotations

import json
from dataclasses import replace

from rich.console import Console

from ssdgen.build.table import resource_table, to_json
from ssdgen.ir.build import Build, CompiledKernel, CompileFailure, KernelResources
from tests.build.requests import request

WGMMA = KernelResources(255, 99_328, 0, 0, 0, (("HMMA", 2), ("wgmma", 24)), 0, 0, 7, 2)
TCGEN05 = KernelResources(255, 51_200, 96, 5, 4, (("tcgen05", 24),), 8, 12, 7, 2)
SCALAR = KernelResources(40, 0, 0, 0, 0, (), 0, 0, 0, 0)
BUILD = Build(
    (
        CompiledKernel(request("gram", "sm_90", label="bf16 [swap]"), WGMMA, bytes(2048), 1.23),
        CompiledKernel(request("gram", "sm_100", label="bf16 [swap]"), TCGEN05, bytes(4096), 0.5, cached=True),
        CompiledKernel(request("scale", "sm_90", label="f32"), SCALAR, bytes(1024), 0.1),
        CompileFailure(request("narrows", label="f32"), "no such cast", "small.py:30", "layer.ssd:21"),
    ),
    ("not cached",),
)


def rendered(width: int, build: Build = BUILD) -> list[str]:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(resource_table(build))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_row_for_each_request_in_order() -> None:
    """Brackets in a label are text, not markup."""
    header, *rows = rendered(140)[:5]
    assert header.split() == (
        ["kernel", "arch", "configuration", "MMA", "smem", "KB", "regs", "spill", "B", "TMA", "cubin", "KB", "s"]
    )
    assert [" ".join(row.split()) for row in rows] == [
        "gram sm_90 bf16 [swap] HMMA x2 + wgmma x24 97.0 255 0 7/2 2 1.2",
        "gram sm_100 bf16 [swap] tcgen05 x24 tmem 50.0 255 96 7/2 4 (0.5)",
        "scale sm_90 f32 - 0.0 40 0 - 1 0.1",
        "narrows sm_90 f32 failed",
    ]


def test_several_modules_are_named() -> None:
    """Kernels of two modules may have one name."""
    results = [
        replace(r, request=replace(r.request, module_path=f"/tmp/{m}.py"))
        for m, r in zip("ab", BUILD.results, strict=False)
    ]
    header, *rows = rendered(140, Build(tuple(results)))[:3]
    assert header.split()[:2] == ["module", "kernel"]
    assert [row.split()[:3] for row in rows] == [["a", "gram", "sm_90"], ["b", "gram", "sm_100"]]


def test_numbers_survive_a_narrow_terminal() -> None:
    text = "\n".join(rendered(80))
    for number in ("97.0", "50.0", "255", "96", "7/2", "(0.5)"):
        assert number in text
    assert "…" not in text


def test_json_holds_what_the_table_holds() -> None:
    value = json.loads(json.dumps(to_json(BUILD), allow_nan=False))
    first, second, _, failed = value["results"]
    assert first["resources"]["mma"] == {"HMMA": 2, "wgmma": 24}
    assert (first["kernel"], first["arch"], first["label"], first["ok"]) == ("gram", "sm_90", "bf16 [swap]", True)
    assert (first["cubin_bytes"], first["seconds"], first["cached"]) == (2048, 1.23, False)
    assert second["resources"]["tmem"] is True
    assert second["resources"]["spilled_bytes"] == 96
    assert (failed["ok"], failed["message"], failed["spec"]) == (False, "no such cast", "layer.ssd:21")
    assert value["notes"] == ["not cached"]
