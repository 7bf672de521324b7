"""`ssdgen plan --shape`: what a plan moves and multiplies at shapes, and the least time that takes."""

from __future__ import annotations

from collections.abc import Iterable

from rich.text import Text

from ssdgen.cli.options import shape_text
from ssdgen.cli.output import plain_table, show, show_json, show_table
from ssdgen.ir.plan import Plan
from ssdgen.plan.roofline import Rates, Roofline, Work


def show_floors(floors: Iterable[Roofline], plan: Plan, rates: Rates, json: bool) -> None:
    """Print the rooflines of `plan` at `rates`."""
    if json:
        show_json([_data(floor, plan, rates) for floor in floors])
        return
    for floor in floors:
        pieces = f", {floor.segments} segments" if floor.segments > 1 else ""
        show(f"{shape_text(floor.sizes)} in {floor.dtype}: {plan.config.plan}{pieces}")
        table = plain_table("kernel", "MB", "TFLOP", "memory us", "products us", "floor us")
        rows: list[tuple[str, Work | Roofline]] = [(work.kernel, work) for work in floor.kernels]
        for name, work in (*rows, ("all", floor)):
            products = f"{work.operations / 1e12:.4f}", f"{1e6 * work.bf16_operations / rates.products:.1f}"
            table.add_row(*_row(name, work.bytes, products, work.seconds(rates), rates))
        least = floor.compulsory / rates.bandwidth
        table.add_row(*_row("compulsory", floor.compulsory, ("", ""), least, rates))
        show_table(table)
        show(f"The plan's floor is {floor.seconds(rates) / least:.2f} times that of the compulsory traffic.\n")
    show(
        f"Floors are at {rates.bandwidth / 1e12:g} TB/s and {rates.products / 1e12:g} TFLOP/s in bf16, half that in TF32: "
        "the longer of memory and products, kernel by kernel.\nCompulsory: every input read once, every output and final "
        "state written once."
    )


def _row(name: str, size: int, products: tuple[str, str], seconds: float, rates: Rates) -> list[Text]:
    memory = f"{1e6 * size / rates.bandwidth:.1f}"
    cells = (name, f"{size / 1e6:.1f}", products[0], memory, products[1], f"{1e6 * seconds:.1f}")
    return [Text(cell) for cell in cells]


def _data(floor: Roofline, plan: Plan, rates: Rates) -> dict[str, object]:
    kernels = [{"kernel": w.kernel, "arrays": dict(w.arrays), **_totals(w, rates)} for w in floor.kernels]
    head = {"sizes": dict(floor.sizes), "dtype": floor.dtype, "plan": plan.config.plan, "segments": floor.segments}
    least = {"compulsory_bytes": floor.compulsory, "compulsory_us": 1e6 * floor.compulsory / rates.bandwidth}
    return {**head, "rates": rates, **least, **_totals(floor, rates), "kernels": kernels}


def _totals(work: Work | Roofline, rates: Rates) -> dict[str, object]:
    return {
        "bytes": work.bytes,
        "operations": work.operations,
        "bf16_operations": work.bf16_operations,
        "floor_us": 1e6 * work.seconds(rates),
    }
