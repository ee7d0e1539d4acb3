"""The command `torchloom`. It imports only the subcommand that was asked for.

Of the others it knows the name and one line of help, so `torchloom --help` answers at once.
"""

from __future__ import annotations

import atexit
import gc
import sys
import time
import traceback
from importlib import import_module
from typing import Annotated

import typer

import torchloom
from torchloom import envs
from torchloom.cli.terminal import drop_unread, printable, told
from torchloom.errors import ConfigError, own_error

_LAST_WORDS_S = 3.0
"""Seconds that a failed rank waits before it exits: launchers kill all ranks when the first one exits,
and the others need time to print their errors."""

_COMMANDS = {
    "train": ("torchloom.cli.train", "Train a decoder on text, on this host or many."),
    "run": ("torchloom.cli.run", "Run a script of your own in several ranks on this host."),
    "backends": ("torchloom.cli.doctor", "Show the backends that torch.compile can use here."),
    "explain": ("torchloom.cli.explain", "Run a script and show what torch.compile did."),
    "report": ("torchloom.cli.records", "Write the HTML report of a record or a run."),
    "diff": ("torchloom.cli.records", "Show what changed between two records."),
    "check-record": ("torchloom.cli.records", "Check a record against limits, for CI."),
    "plan": ("torchloom.cli.plan", "Simulate ranks; show and compare memory plans."),
    "serve": ("torchloom.cli.serve", "Compile models for serving, and inspect stores."),
    "checkpoint": ("torchloom.cli.checkpoint", "Verify, list, show and export checkpoints."),
    "doctor": ("torchloom.cli.doctor", "Show what works on this machine, and how to fix the rest."),
    "calibrate": ("torchloom.cli.calibrate", "Measure this machine: products, memory, links."),
    "check": (
        "torchloom.cli.check",
        "Show the effective values and all errors of a configuration.",
    ),
}


def main() -> None:
    """Run the command line; an error is one message, not a traceback."""
    asked = next((arg for arg in sys.argv[1:] if not arg.startswith("-")), None)
    # Runs last: the collection at the interpreter's end walks through all of torch's objects for half a second.
    atexit.register(gc.freeze)
    atexit.register(drop_unread)
    try:
        make_app(asked)()
    except Exception as error:  # noqa: BLE001 - any error of user code or torch becomes one message
        _tell(asked, error)
        sys.exit(1)


def _tell(asked: str | None, error: Exception) -> None:
    """Print the error that ended a command; with TORCHLOOM_TRACEBACK also Python's traceback."""
    try:
        launch = envs.launch() if envs.is_launched() else None
        with_traceback = envs.is_on(envs.TRACEBACK)
    except ConfigError:  # bad environment variables may be the error that is being printed
        launch, with_traceback = None, False
    rank = "" if launch is None else f"[rank {launch.rank}] "
    own = own_error(error)
    if with_traceback:
        traceback.print_exception(error)
    if own is not None:
        words = f"{type(own).__name__}: {own}"
    else:
        advice = f"Set {envs.TRACEBACK}=1 to see the whole traceback."
        words = told(f"torchloom {asked}", error, advice)
    print(f"{rank}{printable(words)}", file=sys.stderr, flush=True)
    if launch is not None and launch.world_size > 1:
        time.sleep(_LAST_WORDS_S)


def make_app(asked: str | None) -> typer.Typer:
    """Return the command line: the command `asked` in full, the others by name.

    Args:
        asked: the name of a command; for an unknown name or `None` nothing is imported.
    """
    app = typer.Typer(
        name="torchloom",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_torchloom)
    for name, (module, summary) in _COMMANDS.items():
        attr = name.replace("-", "_")
        function = getattr(import_module(module), attr) if name == asked else _unused
        if isinstance(function, typer.Typer):
            app.add_typer(function, name=name, short_help=summary)
        else:
            # What follows the script of `run` is the script's.
            settings = {"allow_interspersed_args": name != "run"}
            app.command(name, short_help=summary, context_settings=settings)(function)
    return app


def command_names() -> tuple[str, ...]:
    """Return the names of all commands, in the order of `torchloom --help`."""
    return tuple(_COMMANDS)


def _tell_version(asked: bool) -> None:
    if asked:
        typer.echo(f"torchloom {torchloom.__version__}")
        raise typer.Exit


def _torchloom(
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=_tell_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Weave sharding and communication into the graph that torch.compile captured."""


def _unused() -> None:
    """Placeholder for a command that was not asked for."""
