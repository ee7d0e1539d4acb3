"""The command `torchloom train`: check the options, then start workers or become one."""

from __future__ import annotations

import sys
from dataclasses import Field, fields, replace
from inspect import Parameter, Signature
from typing import Annotated, Any, TextIO, cast, get_type_hints

import typer

from torchloom import envs, log
from torchloom.cli.processes import begin_worker
from torchloom.cli.terminal import LastingOutput
from torchloom.recipes.train import TrainOptions, run


def train(**values: Any) -> None:
    """Train a decoder on text, with workers on this host or as one worker of torchrun or Slurm.

    Ctrl-C saves a checkpoint and exits with 0; --resume continues from it. SIGHUP saves and continues;
    if the terminal was closed, it saves and stops.
    """
    options = TrainOptions(**values)
    if envs.is_launched():
        _become_worker(options)
    else:
        raise typer.Exit(_start_workers(options))


def _parameter(field: Field[Any], kind: Any) -> Parameter:
    """Return the option of the command line that stands for a field of `TrainOptions`."""
    flag = _flag(field)
    switch = f"{flag}/--no-{flag[2:]}" if field.default is True else flag
    given = [switch] if kind is bool else []
    hint = Annotated[kind, typer.Option(*given, **field.metadata)]
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=hint)


def _flag(field: Field[Any]) -> str:
    return "--" + field.name.replace("_", "-")


_HINTS = get_type_hints(TrainOptions)
_PARAMETERS = [_parameter(field, _HINTS[field.name]) for field in fields(TrainOptions)]
train.__signature__ = Signature(_PARAMETERS)  # type: ignore[attr-defined]  # typer reads it
train.__annotations__ = {each.name: each.annotation for each in _PARAMETERS}


def _become_worker(options: TrainOptions) -> None:
    """Run this rank. Until the loop handles signals, a signal ends the process without a traceback."""
    begin_worker()
    from torchloom.recipes.train.options import check_options

    launch = envs.launch()
    check_options(options, launch.world_size)
    log.setup(launch.rank)
    run(options, rank=launch.rank, output=cast("TextIO", LastingOutput(sys.stdout)))


def _start_workers(options: TrainOptions) -> int:
    """Check the options in this process, so that an error is printed once; then start the workers."""
    from torchloom.recipes.train.options import check_options, choose_out, make_out

    check_options(options, options.nproc)
    settled = replace(options, out=str(make_out(choose_out(options))))
    from torchloom.cli.launcher import launch  # imports torch

    return launch(["train", *to_argv(settled)], options.nproc)


def to_argv(options: TrainOptions) -> list[str]:
    """Return the command line that parses to `options`, for a worker process."""
    argv = []
    for field in fields(options):
        value, flag = getattr(options, field.name), _flag(field)
        if isinstance(value, bool) and value != field.default:
            argv.append(flag if value else f"--no-{flag[2:]}")
        elif value != field.default:
            argv += [flag, str(value)]
    return argv
