"""`torchloom backends`: each backend of torch.compile, its origin, and whether it works here."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from torchloom.backends import BackendInfo, describe_backends
from torchloom.cli.terminal import print_table

_HIDDEN_TAGS = {"debug", "experimental"}


def backends(
    show_all: Annotated[
        bool, typer.Option("--all", "-a", help="Also show debug and experimental backends.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """Show the backends of torch.compile, where they come from, and whether they work here."""
    rows = [row for row in describe_backends() if show_all or not _is_hidden(row)]
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
        return
    lines = []
    for row in rows:
        tags = "not loaded" if row.tags is None else ", ".join(row.tags)
        lines.append((row.name, str(row.origin), tags, row.why_not or "yes"))
        lines += [("", f"hides {loser}") for loser in row.hidden]
    print_table(lines, "backend", "from", "tags", "works here")
    if num_left_out := len(describe_backends()) - len(rows):
        typer.echo(f"{num_left_out} more for debugging and experiments: --all shows them")


def _is_hidden(row: BackendInfo) -> bool:
    return bool(_HIDDEN_TAGS & set(row.tags or ()))
