"""The command `torchloom train`: check the options, then start workers or become one."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from typing import Annotated, TextIO, cast

import typer

from torchloom import envs, log
from torchloom.cli.launch.parent import begin_worker
from torchloom.cli.launch.terminal import LastingOutput
from torchloom.recipes.train import TrainOptions, run

_DEFAULT = TrainOptions()


def train(  # noqa: PLR0913 - one parameter per option of the command
    model: Annotated[
        str, typer.Option(help="llama-tiny, llama-34m, or a local Hugging Face folder.")
    ] = _DEFAULT.model,
    config: Annotated[
        str | None,
        typer.Option(help="JSON file in DeepSpeed's format.", show_default="ZeRO-3, AdamW"),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="File or folder to train on; any bytes are accepted.",
            show_default="Python's standard library",
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(help="Folder for metrics, charts and checkpoints.", show_default="runs/..."),
    ] = None,
    nproc: Annotated[
        int,
        typer.Option(
            min=1, help="Workers to start on this host; not used under torchrun or Slurm."
        ),
    ] = _DEFAULT.nproc,
    steps: Annotated[
        int, typer.Option(min=1, help="Optimizer steps of the whole run.")
    ] = _DEFAULT.steps,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest checkpoint in --out.")
    ] = False,
    compile_: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Weave and compile the step.")
    ] = True,
    seed: Annotated[
        int, typer.Option(min=0, max=2**20, help="Seed of weights, order of samples and dropout.")
    ] = _DEFAULT.seed,
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens per sample.")] = _DEFAULT.seq_len,
    micro_batch: Annotated[
        int | None,
        typer.Option(min=1, help="Samples per rank and micro-step.", show_default="4"),
    ] = None,
    eval_every: Annotated[
        int, typer.Option(min=1, help="Steps between evaluations on held-out text.")
    ] = _DEFAULT.eval_every,
    save_every: Annotated[
        int | None,
        typer.Option(min=1, help="Steps between checkpoints.", show_default="at the end"),
    ] = None,
    save_minutes: Annotated[
        float,
        typer.Option(
            min=0,
            help="Minutes until the checkpoint on the way is saved anew, without --save-every.",
        ),
    ] = _DEFAULT.save_minutes,
    keep_last: Annotated[
        int | None,
        typer.Option(min=1, help="Number of newest checkpoints to keep.", show_default="all"),
    ] = None,
    log_every: Annotated[
        int, typer.Option(min=1, help="Steps between printed lines if there is no terminal.")
    ] = _DEFAULT.log_every,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write TensorBoard events.")
    ] = False,
    report: Annotated[
        bool,
        typer.Option(
            "--report", help="Write report.html: graphs, guards and a timeline of the first steps."
        ),
    ] = False,
) -> None:
    """Train a decoder on text, with workers on this host or as one worker of torchrun or Slurm.

    Ctrl-C saves a checkpoint and exits with 0; --resume continues from it. SIGHUP saves and continues;
    if the terminal was closed, it saves and stops.
    """
    options = TrainOptions(
        model=model,
        config=config,
        data=data,
        out=out,
        nproc=nproc,
        steps=steps,
        resume=resume,
        compile=compile_,
        seed=seed,
        seq_len=seq_len,
        micro_batch=micro_batch,
        eval_every=eval_every,
        save_every=save_every,
        save_minutes=save_minutes,
        keep_last=keep_last,
        log_every=log_every,
        report=report,
        tensorboard=tensorboard,
    )
    if envs.is_launched():
        _become_worker(options)
    else:
        raise typer.Exit(_start_workers(options))


def _become_worker(options: TrainOptions) -> None:
    """Run this rank. Until the loop handles signals, a signal ends the process without a traceback."""
    begin_worker()
    from torchloom.recipes.train.preflight import check_options

    launch = envs.launch()
    check_options(options, launch.world_size)
    log.setup(launch.rank)
    run(options, rank=launch.rank, output=cast("TextIO", LastingOutput(sys.stdout)))


def _start_workers(options: TrainOptions) -> int:
    """Check the options in this process, so that an error is printed once; then start the workers."""
    from torchloom.recipes.train.preflight import check_options, choose_out, make_out

    check_options(options, options.nproc)
    settled = replace(options, out=str(make_out(choose_out(options))))
    from torchloom.cli.launch.launcher import launch  # imports torch

    return launch(["train", *to_argv(settled)], options.nproc)


def to_argv(options: TrainOptions) -> list[str]:
    """Return the command line that parses to `options`, for a worker process."""
    argv = []
    for field in fields(options):
        value = getattr(options, field.name)
        flag = "--" + field.name.replace("_", "-")
        if value == field.default:
            continue
        if isinstance(value, bool):
            argv.append(flag if value else f"--no-{flag[2:]}")
        else:
            argv += [flag, str(value)]
    return argv
