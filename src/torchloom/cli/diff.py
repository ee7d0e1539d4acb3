"""`torchloom diff A B`: compare two records; the exit code is 1 if they differ."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torchloom.cli.report import find_record
from torchloom.cli.terminal import printable
from torchloom.records import load_record
from torchloom.records.diff import diff as diff_records


def diff(
    before: Annotated[Path, typer.Argument(help="A record.json, or a folder that holds one.")],
    after: Annotated[Path, typer.Argument(help="The record to compare it with.")],
) -> None:
    """Compare two records: functions, entries, graph breaks, guards, graphs, kernels and times.

    The exit code is 1 if they differ.
    """
    found = diff_records(load_record(find_record(before)), load_record(find_record(after)))
    typer.echo(printable(str(found)))
    if found:
        raise typer.Exit(1)
