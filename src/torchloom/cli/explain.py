"""`torchloom explain FILE.py[:function]`: run it and print a summary of what was compiled.

A script runs as with `python FILE.py ARGS`. A function is called without arguments; if it is not
compiled yet, it is compiled for the call. After an error, the summary of what was compiled until then
is printed, then one message; the record keeps the whole traceback.
"""

from __future__ import annotations

import inspect
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Annotated, NamedTuple

import typer

from torchloom.cli.processes import load_file, run_script
from torchloom.cli.terminal import told, writing
from torchloom.errors import InspectError
from torchloom.inspect import Watch
from torchloom.inspect import explain as explain_function
from torchloom.records import Session, save_record
from torchloom.records.summary import summary


def explain(
    target: Annotated[str, typer.Argument(help="FILE.py, or FILE.py:function.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script, after --.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option("--record", help="Also write the record, as JSON.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", "-o", help="Also write the HTML report.")
    ] = None,
) -> None:
    """Run a script or a function and show what torch.compile did with it."""
    path, _, name = target.rpartition(":") if _names_function(target) else (target, "", "")
    file = Path(path)
    if not file.is_file():
        raise InspectError(f"there is no file {path!r}: write FILE.py or FILE.py:function")
    seen = _call(file, name) if name else _watched(lambda: run_script(file, arguments or []))
    typer.echo(summary(seen.session))
    if seen.error is not None:
        seen.session.orphans.append("".join(traceback.format_exception(seen.error)))
    if record is not None:
        with writing(record):
            typer.echo(f"record  {save_record(seen.session, record)}")
    if report is not None:
        from torchloom.report.page import write_page

        with writing(report):
            typer.echo(f"report  {write_page(seen.session, report)}")
    if seen.error is not None:
        advice = "Add --record FILE to keep the whole traceback."
        if kept_in := record or report:
            advice = f"The whole traceback is in {kept_in}."
        raise InspectError(told(target, seen.error, advice)) from None
    if seen.exit_code:
        if seen.exit_code != _INTERRUPTED:
            typer.echo(f"the script ended with exit code {seen.exit_code}", err=True)
        raise typer.Exit(seen.exit_code)


_INTERRUPTED = 128 + signal.SIGINT
"""The exit code that shells report for a program that Ctrl-C ended."""


class _Seen(NamedTuple):
    """What was recorded, and how the script or function ended."""

    session: Session
    error: Exception | None = None
    exit_code: int = 0
    num_lookups: int = 0
    """How often Dynamo looked up an entry, including code that was compiled before."""

    @property
    def has_ended(self) -> bool:
        """Whether an error or an exit ended the run."""
        return self.error is not None or self.exit_code != 0


def _names_function(target: str) -> bool:
    return target.rpartition(":")[2].isidentifier() and ".py:" in target


def _watched(call: Callable[[], object]) -> _Seen:
    watch = Watch()
    error, code = None, 0
    try:
        with watch:
            call()
    except KeyboardInterrupt:  # show what was compiled until then
        typer.echo("interrupted: what was compiled until then", err=True)
        code = _INTERRUPTED
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            typer.echo(end.code, err=True)
    except Exception as raised:  # noqa: BLE001 - a user's code may raise anything
        error = raised
    return _Seen(watch.record, error, code, watch.num_lookups)


def _call(file: Path, name: str) -> _Seen:
    """Call a function of a file; what the import compiles is recorded too."""
    whole, loaded = Watch(), []
    with whole:
        seen = _watched(lambda: loaded.append(load_file(file)))
        if not seen.has_ended:
            fn = _named(loaded[0], file, name)
            seen = _watched(fn)
    if seen.has_ended:
        return seen._replace(session=whole.record)
    # A function that was compiled before, such as by the import, gets no new entry by the call.
    if seen.num_lookups or any(True for _ in seen.session.entries()):
        return seen._replace(session=whole.record)
    return _watched(lambda: explain_function(fn))


def _named(module: ModuleType, file: Path, name: str) -> Callable[..., object]:
    fn = getattr(module, name, None)
    if not callable(fn):
        known = ", ".join(n for n, v in vars(module).items() if callable(v) and n[0] != "_")
        raise InspectError(f"{file} has no function {name!r}; it has {known or 'none'}")
    _check_takes_nothing(fn, f"{file}:{name}")
    return fn


def _check_takes_nothing(fn: Callable[..., object], name: str) -> None:
    try:
        signature = inspect.signature(fn)
    except ValueError:
        return  # a function in C without a signature: the call itself will tell
    try:
        signature.bind()
    except TypeError as error:
        raise InspectError(
            f"{name} cannot be called without arguments ({error}): explain calls it with none, "
            "so name a function that makes its own inputs, or run the whole script"
        ) from None
