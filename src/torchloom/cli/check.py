"""`torchloom check CONFIG`: effective values and errors of a configuration, before a run starts.

    effective values    as the engine will see them
    hints               path: asked / used (why); "-" is nothing
    warnings, notes     what was ignored, translated or assumed
    filled in           keys that are "auto" and get their value from the caller, such as a Trainer
    errors              path: what is wrong; what to do

The exit code is 0 when the configuration can be used, if need be with values from the caller, and 1 when it cannot.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchloom.config import Checked, Problem, check_config, thaw
from torchloom.config.kinds import show
from torchloom.errors import ConfigError


def check(
    config: Annotated[
        str, typer.Argument(help="A JSON file in DeepSpeed's format, or base64 of its text.")
    ],
    world_size: Annotated[
        int | None,
        typer.Option(
            "--world-size", "-n", min=1, help="Number of data-parallel ranks.", show_default="1"
        ),
    ] = None,
    auto: Annotated[
        list[str] | None,
        typer.Option(
            "--auto",
            metavar="PATH=VALUE",
            help='A value for a key that is "auto"; may be repeated.',
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the effective values of a configuration, and all errors in it.

    The exit code is 1 if there are errors.
    """
    try:
        checked = check_config(config, world_size=world_size, auto=_values(auto or []))
    except ConfigError as error:
        _tell_unreadable(config, error, as_json)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(_record(checked), indent=2, allow_nan=False))
    else:
        _print(checked, Console(highlight=False))
    if checked.errors:
        raise typer.Exit(1)


def _values(options: list[str]) -> dict[str, object]:
    """Read PATH=VALUE options; a value that is not JSON is a string."""
    found: dict[str, object] = {}
    for option in options:
        path, equals, value = option.partition("=")
        if not equals or not path:
            raise ConfigError(f"--auto {option}: write PATH=VALUE, as optimizer.params.lr=1e-4")
        try:
            found[path] = json.loads(value)
        except json.JSONDecodeError:
            found[path] = value
    return found


def _tell_unreadable(config: str, error: ConfigError, as_json: bool) -> None:
    if not as_json:
        typer.echo(f"error: {error}", err=True)
        return
    problem = Problem(path="", what=str(error), fix="")
    unread = Checked(name=config, config=None, errors=(problem,), notes=(), hints=())
    typer.echo(json.dumps(_record(unread), indent=2))


def _record(checked: Checked) -> object:
    effective = None if checked.config is None else checked.config.to_dict()
    return _finite(
        {
            "config": checked.name,
            "ok": not checked.errors,
            "effective": effective,
            "hints": [dataclasses.asdict(hint) for hint in checked.hints],
            "notes": [dataclasses.asdict(note) for note in checked.notes],
            "filled_by_caller": list(checked.open),
            "errors": [dataclasses.asdict(error) for error in checked.errors],
        }
    )


def _finite(value: object) -> object:
    """Write infinity as a string, since strict JSON has no word for it."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "Infinity" if value > 0 else str(value)
    if isinstance(value, str | int | float | bool | None):
        return value
    return str(value)


def _print(checked: Checked, console: Console) -> None:
    if checked.config is not None:
        table = Table("key", "value", title=f"effective values of {checked.name}", box=None)
        for key, value in _rows(checked.config.to_dict(), ""):
            is_open = key in checked.open
            table.add_row(Text(key), Text("filled in by the caller" if is_open else value))
        console.print(table)
    for hint in checked.hints:
        used = "-" if hint.used is None else show(hint.used)
        _line(console, "hint", "cyan", f"{hint.path}: {show(hint.asked)} / {used} ({hint.why})")
    for note in checked.notes:
        style = "yellow" if note.level == "warning" else "dim"
        label = "warning" if note.level == "warning" else "note"
        _line(console, label, style, str(note))
    for path in checked.open:
        _line(console, "filled in", "yellow", f'{path}: "auto", filled in by the caller')
    for error in checked.errors:
        _line(console, "error", "bold red", str(error))
    _line(console, *_verdict(checked))


def _verdict(checked: Checked) -> tuple[str, str, str]:
    if not checked.errors and checked.open:
        values = "a value" if len(checked.open) == 1 else f"{len(checked.open)} values"
        what = f"{checked.name} can be used by a caller that fills in {values}"
        return "ok", "green", f"{what}: a Trainer, or initialize(auto={{path: value}})"
    if not checked.errors:
        return "ok", "green", f"{checked.name} can be used"
    num_errors = len(checked.errors)
    errors = "1 error" if num_errors == 1 else f"{num_errors} errors"
    return "failed", "bold red", f"{errors} in {checked.name}"


def _line(console: Console, label: str, style: str, message: str) -> None:
    console.print(Text.assemble((label, style), " ", message), soft_wrap=True)


def _rows(values: object, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(values, Mapping) and values:
        for key, value in values.items():
            yield from _rows(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, show(thaw(values))
