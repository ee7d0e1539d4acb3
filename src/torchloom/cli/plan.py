"""`torchloom plan show PLAN` and `torchloom plan diff A B`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torchloom.cli.terminal import printable
from torchloom.plan import Plan
from torchloom.plan.text import diff_plans, show_plan

plan = typer.Typer(no_args_is_help=True, help="Show and compare memory plans.")

_FILE = "A plan.json, as `engine.plan().save()` writes it."


@plan.command()
def show(
    path: Annotated[Path, typer.Argument(metavar="PLAN", help=_FILE)],
    show_all: Annotated[bool, typer.Option("--all", "-a", help="List every value.")] = False,
) -> None:
    """Show the decisions of a plan, its predicted peak and its cost."""
    typer.echo(printable(show_plan(Plan.load(path), None if show_all else 20)))


@plan.command()
def diff(
    before: Annotated[Path, typer.Argument(help=_FILE)],
    after: Annotated[Path, typer.Argument(help="The plan to compare it with.")],
) -> None:
    """Compare two plans; the exit code is 1 if they differ."""
    found = diff_plans(Plan.load(before), Plan.load(after))
    typer.echo(printable(found or "the plans are equal"))
    if found:
        raise typer.Exit(1)
