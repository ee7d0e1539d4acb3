"""`torchloom report`, `diff` and `check-record`: a record as a page, beside another one, and against limits.

The exit code of `diff` is 1 if two records differ, that of `check-record` if a limit is exceeded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torchloom.cli.terminal import printable, writing
from torchloom.errors import RecordError
from torchloom.files import write_whole
from torchloom.records import Session, load_record
from torchloom.records.diff import diff as diff_records
from torchloom.records.model import eager_calls, given_up
from torchloom.report.page import ComparedRun, render_comparison, write_page, write_trace

RecordArgument = Annotated[Path, typer.Argument(help="A record.json, or a folder that holds one.")]


def report(
    source: RecordArgument,
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


def diff(
    before: RecordArgument,
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


def check_record(
    source: RecordArgument,
    max_recompiles: Annotated[
        int | None,
        typer.Option(
            min=0, help="Allowed recompiles: entries after the first one of each function."
        ),
    ] = None,
    max_breaks: Annotated[int | None, typer.Option(min=0, help="Allowed graph breaks.")] = None,
    max_entries: Annotated[
        int | None, typer.Option(min=0, help="Allowed entries in total.")
    ] = None,
    max_compile_s: Annotated[
        float | None, typer.Option(min=0, help="Allowed compile time in seconds.")
    ] = None,
    max_eager_calls: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Allowed calls that ran eagerly because no entry fitted, as after the recompile limit.",
            show_default="0 if recompiles are limited",
        ),
    ] = None,
) -> None:
    """Check a record against limits; print what exceeds them, and where in the code it comes from.

    The exit code is 1 if a limit is exceeded.
    """
    session = load_record(find_record(source))
    entries = list(session.entries())
    # Code that runs eagerly causes neither recompiles nor breaks, so limits on these imply limits on it.
    if max_eager_calls is None and max_recompiles is not None:
        max_eager_calls = 0
    max_given_up = None if max_recompiles is None and max_breaks is None else 0
    lost = given_up(session)
    failed = False
    for name, value, limit, details in (
        ("recompiles", session.num_recompiles, max_recompiles, _recompiles(session)),
        ("graph breaks", len(session.breaks()), max_breaks, _breaks(session)),
        ("eager calls", session.num_eager_calls, max_eager_calls, eager_calls(session)),
        ("functions given up", len(lost), max_given_up, lost),
        ("entries", len(entries), max_entries, []),
        ("compile seconds", round(sum(e.compile_s for e in entries), 1), max_compile_s, []),
    ):
        is_over = limit is not None and value > limit
        failed |= is_over
        bound = "no limit" if limit is None else f"at most {limit}"
        typer.echo(f"{'OVER' if is_over else 'ok':4}  {name}: {value} ({bound})")
        for line in details if is_over else ():
            typer.echo(printable(f"      {line}"))
    if failed:
        raise typer.Exit(1)


def _recompiles(session: Session) -> list[str]:
    return [
        f"{function.name} {entry.compile_id}: "
        + "; ".join(each.sentence for each in entry.recompiles)
        for function in session.all_functions()
        for entry in function.entries
        if entry.recompiles
    ]


def _breaks(session: Session) -> list[str]:
    return [f"{each.place}: {each.reason}" for each in session.breaks()]
