"""`torchloom check CONFIG`: effective values and errors of a configuration, before a run starts.

    effective values    as the engine will see them; with --all those of keys at their defaults, too
    hints               path: what was asked and what is used (why)
    warnings, notes     what was ignored, translated or assumed
    filled in           keys that are "auto" and get their value from the caller, such as a Trainer
    errors              path: what is wrong; what to do

The exit code is 0 when the configuration can be used, if need be with values from the caller, and 1 when it cannot,
or has warnings and `--strict` is given.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from torchloom.cli.terminal import print_table
from torchloom.config import Checked, Config, Problem, check_config, load_config, thaw
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
    is_whole: Annotated[
        bool, typer.Option("--all", help="Show values at their defaults, too.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Treat warnings as errors.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the effective values of a configuration, and all errors in it.

    The exit code is 1 if there are errors, with --strict also if there are warnings.
    """
    try:
        checked = check_config(config, world_size=world_size, auto=_values(auto or []))
    except ConfigError as error:
        if not as_json:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None
        problem = Problem(path="", what=str(error), fix="")
        checked = Checked(name=config, config=None, errors=(problem,), notes=(), hints=())
    wrong = _wrong(checked, strict)
    if as_json:
        typer.echo(json.dumps(_record(checked, ok=not wrong), indent=2, allow_nan=False))
    else:
        if checked.config is not None:
            _print_values(checked, checked.config, is_whole=is_whole)
        _print_findings(checked, wrong)
    if wrong:
        raise typer.Exit(1)


def _wrong(checked: Checked, strict: bool) -> str:
    """Return how many errors there are, or warnings that count as errors; "" if none."""
    num_warnings = sum(note.level == "warning" for note in checked.notes)
    if checked.errors:
        return _count(len(checked.errors), "error")
    return _count(num_warnings, "warning") if strict and num_warnings else ""


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


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


def _record(checked: Checked, *, ok: bool) -> object:
    effective = None if checked.config is None else checked.config.to_dict()
    record = json.dumps(
        {
            "config": checked.name,
            "ok": ok,
            "effective": effective,
            "hints": [dataclasses.asdict(hint) for hint in checked.hints],
            "notes": [dataclasses.asdict(note) for note in checked.notes],
            "filled_by_caller": list(checked.open),
            "errors": [dataclasses.asdict(error) for error in checked.errors],
        },
        default=lambda value: dict(value) if isinstance(value, Mapping) else str(value),
    )
    return json.loads(record, parse_constant=str)  # strict JSON has no word for infinity


def _print_values(checked: Checked, config: Config, *, is_whole: bool) -> None:
    rows = dict(_rows(config.to_dict(), ""))
    rows |= {key: "filled in by the caller" for key in checked.open if key in rows}
    usual = {} if is_whole else dict(_rows(load_config({}, world_size=1).to_dict(), ""))
    changed = [(key, value) for key, value in rows.items() if usual.get(key) != value]
    print_table(changed, "key", "value", title=f"effective values of {checked.name}")
    if left_out := len(rows) - len(changed):
        _print_line("defaults", "dim", f"{left_out} more values: --all shows them")


def _print_findings(checked: Checked, wrong: str) -> None:
    for hint in checked.hints:
        _print_line("hint", "cyan", str(hint))
    for note in checked.notes:
        is_warning = note.level == "warning"
        style = "yellow" if is_warning else "dim"
        _print_line("warning" if is_warning else "note", style, str(note))
    for path in checked.open:
        _print_line("filled in", "yellow", f'{path}: "auto", filled in by the caller')
    for error in checked.errors:
        _print_line("error", "bold red", str(error))
    _print_line(*_verdict(checked, wrong))


def _verdict(checked: Checked, wrong: str) -> tuple[str, str, str]:
    if wrong:
        return "failed", "bold red", f"{wrong} in {checked.name}"
    if checked.open:
        what = f"{checked.name} can be used by a caller that fills in {_count(len(checked.open), 'value')}"
        return "ok", "green", f"{what}: a Trainer, or initialize(auto={{path: value}})"
    return "ok", "green", f"{checked.name} can be used"


def _print_line(label: str, style: str, message: str) -> None:
    line = Text.assemble((label, style), " ", message)
    Console(highlight=False).print(line, soft_wrap=True)


def _rows(values: object, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(values, Mapping) and values:
        for key, value in values.items():
            yield from _rows(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, show(thaw(values))
