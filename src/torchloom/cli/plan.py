"""`torchloom plan show PLAN`, `plan diff A B`, and `plan simulate` of ranks that are not there."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from torchloom.cli.processes import load_function
from torchloom.cli.terminal import printable
from torchloom.config.findings import Findings
from torchloom.config.source import read
from torchloom.errors import ConfigError, PlanError
from torchloom.files import write_whole
from torchloom.plan import Plan
from torchloom.plan.text import diff_plans, show_plan

plan = typer.Typer(no_args_is_help=True, help="Show, compare and simulate memory plans.")

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


_SEVERAL = "Several, by commas, are simulated one after the other."


@plan.command()
def simulate(  # noqa: PLR0913  each is an option of the command
    model: Annotated[
        str,
        typer.Option(
            help="A name such as llama-8b, a folder with a config.json, or file.py:function."
        ),
    ],
    world_size: Annotated[str, typer.Option(help=f"Number of ranks. {_SEVERAL}")],
    device: Annotated[str, typer.Option(help="Such as h100-80gb or a100-80gb.")] = "h100-80gb",
    network: Annotated[
        str, typer.Option(help="Such as nvlink, or nvlink+ib400 for several hosts of eight.")
    ] = "nvlink+ib400",
    costs: Annotated[
        Path | None,
        typer.Option(help="Measured figures instead, as `torchloom calibrate --out` writes them."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Of the training run; the options below win over it.")
    ] = None,
    stage: Annotated[str, typer.Option(help=f"ZeRO stage. {_SEVERAL}")] = "",
    shard_size: Annotated[
        str,
        typer.Option(help=f"Ranks that share one copy of the weights; default: all. {_SEVERAL}"),
    ] = "",
    batch: Annotated[str, typer.Option(help=f"Samples of a micro batch. {_SEVERAL}")] = "",
    accumulation: Annotated[
        str, typer.Option(help=f"Micro batches of an optimizer step. {_SEVERAL}")
    ] = "",
    budget: Annotated[
        str, typer.Option(help=f"Device memory to keep, as 70GB or 0.9. {_SEVERAL}")
    ] = "",
    checkpointing: Annotated[
        str,
        typer.Option(help=f"What layers recompute: none, full, layers or selective. {_SEVERAL}"),
    ] = "",
    eager: Annotated[
        bool, typer.Option("--eager", help="Count elementwise operators one by one, not fused.")
    ] = False,
    lower: Annotated[
        bool,
        typer.Option(
            "--lower",
            help="Also compile Inductor's code for the device: needs a CUDA build of torch, no GPU.",
        ),
    ] = False,
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens of a sample.")] = 4096,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the plan, which `compile.plan` follows."),
    ] = None,
    chart: Annotated[
        Path | None, typer.Option(help="Draw memory against time of the combinations, as SVG.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print plain data.")] = False,
) -> None:
    """Predict peak memory and step time of N ranks on hardware that is not there.

    Nothing is allocated and nothing runs but the compiler. A list in an option makes a table of all combinations,
    the fastest that fits first.
    """
    from torchloom.costs import load_table
    from torchloom.simulation.choices import choices_of, frontier_chart, simulate_choice, table

    if lower:
        from torchloom.simulation.lower import run_prepared

        code = run_prepared(device)
        if code is not None:
            raise typer.Exit(code)
    base, source = _config_of(config), _model_of(model)
    measured = None if costs is None else load_table(path=costs)
    choices = choices_of(
        base,
        world_size,
        budget=budget,
        checkpointing=checkpointing,
        stage=stage,
        shard_size=shard_size,
        batch=batch,
        accumulation=accumulation,
    )
    found, refused = [], []
    for number, choice in enumerate(choices):
        if len(choices) > 1:
            typer.echo(f"{number + 1} of {len(choices)}: {choice.text()}", err=True)
        try:
            one = simulate_choice(
                choice,
                source,
                seq_len,
                device=device,
                network=network,
                costs=measured,
                eager=eager,
                lowers=lower,
            )
            found.append((choice, one))
        except PlanError as error:
            if len(choices) == 1:
                raise
            refused.append((choice, error))
    if as_json:
        typer.echo(json.dumps([each.to_dict() for _, each in found], indent=2, default=sorted))
    elif len(choices) == 1:
        typer.echo(printable(found[0][1].text()))
    else:
        typer.echo(printable(table(found, refused)))
    if output is not None:
        _write_plan(output, found)
    if chart is not None and found:
        write_whole(chart, frontier_chart(found))
    if lower:  # threads of autograd would wait for a device at exit
        sys.stdout.flush()
        os._exit(0 if all(not each.lowered.refused for _, each in found) else 1)


def _model_of(text: str) -> str | Callable[..., Any]:
    """Return the function that `file.py:function` names; other texts as they are."""
    return load_function(text) if ".py:" in text or text.endswith(".py") else text


def _config_of(path: Path | None) -> dict[str, Any]:
    """Return the settings of a training run; without a file those of `torchloom train`: bf16, stage 3."""
    if path is None:
        return {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    return read(path, Findings()).tree


def _write_plan(path: Path, found: list[Any]) -> None:
    plans = [each.plan for _, each in found if each.plan is not None]
    if len(plans) != 1:
        raise ConfigError(
            f"--output {path}: there are {len(plans)} plans: give one --budget, and one value of each option"
        )
    plans[0].save(path)
