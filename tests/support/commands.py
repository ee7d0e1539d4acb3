"""Commands of torchloom: in this process, and in processes of their own outside of any launcher."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import typer
from click.testing import Result
from typer.testing import CliRunner

from torchloom import envs

NOT_LAUNCHED = dict.fromkeys(("RANK", "WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"))
"""For typer's runner, which takes None as "not set"."""


def invoke(command: Callable[..., Any], *arguments: object) -> Result:
    """Run one command in this process; what it raises is raised."""
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)


def environment() -> dict[str, str]:
    """Return the variables of a process that no launcher has started."""
    found = envs.child_environment({"OMP_NUM_THREADS": "1"})
    return {name: value for name, value in found.items() if name not in NOT_LAUNCHED}


def python(*argv: object) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments; return how it ended and what it printed."""
    command = [sys.executable, *map(str, argv)]
    return subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
