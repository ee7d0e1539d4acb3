"""`torchloom check-record RECORD`: limits on a record, for CI; the exit code is 1 if one is exceeded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torchloom.cli.report import find_record
from torchloom.cli.terminal import printable
from torchloom.records import Session, load_record
from torchloom.records.eager import eager_calls, given_up


def check_record(
    source: Annotated[Path, typer.Argument(help="A record.json, or a folder that holds one.")],
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
        + "; ".join(f"{r.source}: expected {r.expected}, got {r.actual}" for r in entry.recompiles)
        for function in session.all_functions()
        for entry in function.entries
        if entry.recompiles
    ]


def _breaks(session: Session) -> list[str]:
    return [f"{each.place}: {each.reason}" for each in session.breaks()]
