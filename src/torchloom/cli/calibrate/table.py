"""A cost table for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from torchloom.costs import CostTable, machine_facts
from torchloom.costs.store import table_to_json


def print_table(table: CostTable, where: Path | None, as_json: bool) -> None:
    """Print a table and the path of its file.

    Args:
        table: the measured figures.
        where: its file; None if it was not saved.
        as_json: print JSON instead.
    """
    if as_json:
        typer.echo(table_to_json(table, machine_facts()).rstrip())
        return
    console = Console(highlight=False)
    rates = Table(box=None, show_header=False, pad_edge=False)
    for about, what in _rows(table):
        rates.add_row(about, what)
    console.print(rates)
    if table.collectives:
        console.print(_collectives(table))
    console.print(f"{len(table.ops)} operators and products measured one by one")
    kept = "not kept: --quick is for trying the command" if where is None else str(where)
    console.print(kept, soft_wrap=True)


def _rows(table: CostTable) -> Iterator[tuple[str, str]]:
    row = table.device
    yield "device", row.name
    for dtype, rate in sorted(row.gemm_flops.items()):
        yield f"products, {dtype}", f"{rate / 1e9:,.0f} GFLOP/s"
    yield "attention", f"{100 * row.attention_fraction:.0f} % of the rate of products"
    yield "memory", f"{row.memory_bytes_per_s / 1e9:,.1f} GB/s read and written"
    yield "launch", f"{row.launch_us:.1f} us"
    yield "fused AdamW", f"{row.adamw_params_per_s / 1e9:.2f} G parameters/s"
    yield "host to device", f"{row.h2d_bytes_per_s / 1e9:.1f} GB/s"
    both = ", both at once at full rate" if row.full_duplex else ""
    yield "device to host", f"{row.d2h_bytes_per_s / 1e9:.1f} GB/s{both}"
    for name, value in sorted(table.figures.items()):
        yield name, f"{value:,.4g}"


def _collectives(table: CostTable) -> Table:
    """Return microseconds by size, one column for each kind and number of ranks."""
    kinds = sorted(table.collectives)
    # Line breaks in the header keep the columns narrow.
    headers = [kind.replace("_", "_\n", 1).replace("/", "\nranks: ") for kind in kinds]
    shown = Table("bytes", *headers, title="collectives, us", box=None, pad_edge=False)
    sizes = sorted({size for points in table.collectives.values() for size, _ in points})
    for size in sizes:
        found = [dict(table.collectives[kind]).get(size) for kind in kinds]
        shown.add_row(f"{size:,}", *("-" if us is None else f"{us:,.0f}" for us in found))
    return shown
