"""The command `torchloom run`: start ranks of a user's script on this host, or become one."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from torchloom import envs
from torchloom.cli.processes import begin_worker, run_script
from torchloom.errors import ConfigError
from torchloom.last_words import show_last_words

_STOPPING = "stopping; once more to quit at once"


def run(
    script: Annotated[Path, typer.Argument(help="The Python file that each rank runs.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script: all that follows it.")
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Ranks to start on this host; not used under torchrun or Slurm.",
            show_default="one for each visible GPU, or 2",
        ),
    ] = None,
) -> None:
    """Run a script in several ranks on this host, as torchrun does.

    Options of the command stand before the script; what follows it is the script's.

    When ranks fail, the error of the first one is shown, without frames of
    libraries, and the command ends with its exit code. TORCHLOOM_TRACEBACK=1
    shows every error in full.
    """
    if not script.is_file():
        raise ConfigError(f"there is no file {str(script)!r}: name the script that each rank runs")
    if envs.is_launched():
        _become_rank(script, arguments or [])
        return
    from torchloom.cli.launcher import launch  # imports torch

    argv = ["run", str(script), *(arguments or [])]
    raise typer.Exit(launch(argv, nproc or _num_devices(), _STOPPING, on_hangup=None))


def _num_devices() -> int:
    import torch

    return torch.cuda.device_count() or 2


def _become_rank(script: Path, arguments: list[str]) -> None:
    begin_worker()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as Python has it for a script
    try:
        run_script(script, arguments)
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None
    except Exception as error:  # noqa: BLE001 - a user's code may raise anything
        _tell(error)
        raise typer.Exit(1) from None


def _tell(error: Exception) -> None:
    """Show an error as Python shows one that nobody caught, unless another rank has failed before."""
    from torchloom.cli.launcher import is_first_to_fail  # imports torch

    is_shown = is_first_to_fail(envs.launch().rank) or envs.is_on(envs.TRACEBACK)
    show_last_words()  # torch's own hook may be around it by now
    with contextlib.nullcontext() if is_shown else contextlib.redirect_stderr(io.StringIO()):
        sys.excepthook(type(error), error, error.__traceback__)
