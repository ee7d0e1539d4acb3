"""`torchloom diff A B`: compare two records; the exit code is 1 if they differ."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torchloom.cli.failures import writing
from torchloom.cli.report import find_record
from torchloom.cli.terminal import printable
from torchloom.files import write_whole
from torchloom.records import load_record
from torchloom.records.diff import diff as diff_records
from torchloom.report.page import ComparedRun, render_comparison


def diff(
    before: Annotated[Path, typer.Argument(help="A record.json, or a folder that holds one.")],
    after: Annotated[Path, typer.Argument(help="The record to compare it with.")],
    html: Annotated[
        Path | None,
        typer.Option("--html", help="Also write a page: figures, curves and config side by side."),
    ] = None,
) -> None:
    """Compare two records: functions, entries, graph breaks, guards, graphs, kernels and times.

    The exit code is 1 if they differ.
    """
    paths = [find_record(each) for each in (before, after)]
    sessions = [load_record(path) for path in paths]
    found = diff_records(*sessions)
    typer.echo(printable(str(found)))
    if html is not None:
        names = [each.resolve().name for each in (before, after)]
        names = names if names[0] != names[1] else [str(before), str(after)]
        sides = [
            ComparedRun(name=name, session=session, folder=path.parent)
            for name, session, path in zip(names, sessions, paths, strict=True)
        ]
        with writing(html):
            typer.echo(f"page    {write_whole(html, render_comparison(*sides))}")
    if found:
        raise typer.Exit(1)
