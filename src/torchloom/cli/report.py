"""`torchloom report RECORD_OR_RUN_DIR -o report.html`: write a record as one offline page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torchloom.cli.failures import writing
from torchloom.errors import RecordError
from torchloom.records import load_record
from torchloom.report.page import write_page, write_trace


def report(
    source: Annotated[Path, typer.Argument(help="A record.json, or a folder that holds one.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="The page to write.", show_default="report.html beside the record"
        ),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Also write a Chrome/Perfetto trace.")
    ] = None,
) -> None:
    """Write the HTML report of a record: one file that opens without a network."""
    path = find_record(source)
    session = load_record(path)
    target = out or path.with_name("report.html")
    with writing(target):
        page = write_page(session, target, run=path.parent)
    typer.echo(f"report  {page} ({page.stat().st_size / 1e6:.2f} MB)")
    if trace is not None:
        with writing(trace):
            typer.echo(f"trace   {write_trace(session, trace)}")


def find_record(source: Path) -> Path:
    """Return the record that a path names: the file, or the one of rank 0 in a folder.

    Raises:
        RecordError: the folder holds none.
    """
    if not source.is_dir():
        return source
    found = [*sorted(source.glob("record.json")), *sorted(source.glob("record-rank*.json"))]
    if not found:
        raise RecordError(
            f"folder {str(source)!r} holds no record.json: train with --report, or write one with "
            "torchloom.watch(path)"
        )
    return found[0]
