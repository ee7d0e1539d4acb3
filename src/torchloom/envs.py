"""The only place that reads the process environment.

Launchers (torchrun, Slurm, Open MPI) say who this process is; `TORCHLOOM_*` variables switch
torchloom's own behaviour. A value that does not parse is an error, never a silent default.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from torchloom.errors import ConfigError

_RANK_NAMES = {
    "rank": ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"),
    "local_rank": ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "world_size": ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"),
}


class Launch(NamedTuple):
    """Who this process is among its peers, as the launcher said."""

    rank: int
    local_rank: int
    world_size: int


def launch() -> Launch:
    """Read rank, local rank and world size from torchrun, Slurm or Open MPI, in this order.

    Returns:
        `Launch(0, 0, 1)` when no launcher started this process.

    Raises:
        ConfigError: a variable is set but is not a number.
    """
    found = {key: _first_int(names) for key, names in _RANK_NAMES.items()}
    return Launch(
        rank=found["rank"] or 0,
        local_rank=found["local_rank"] or 0,
        world_size=found["world_size"] or 1,
    )


def is_launched() -> bool:
    """Say whether a launcher told this process its rank."""
    return any(name in os.environ for name in _RANK_NAMES["world_size"])


def is_one_host() -> bool:
    """Say whether the launcher started all ranks on this host, as far as it tells."""
    local = _first_int(("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"))
    return local is not None and local == launch().world_size


def get_str(name: str, default: str) -> str:
    """Return the variable `name`, or `default` when it is unset or empty."""
    return os.environ.get(name) or default


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of this process's environment for a child, with `extra` added."""
    return {**os.environ, **extra}


def set_default(name: str, value: str) -> None:
    """Set `name` unless the user has already chosen a value."""
    os.environ.setdefault(name, value)


def _first_int(names: tuple[str, ...]) -> int | None:
    for name in names:
        text = os.environ.get(name)
        if text is None:
            continue
        try:
            return int(text)
        except ValueError:
            raise ConfigError(
                f"environment variable {name}={text!r} is not a number: "
                "the launcher that started this process set it; start it again or unset it"
            ) from None
    return None


def is_on(name: str) -> bool:
    """Say whether a switch is on.

    Raises:
        ConfigError: it is set to something else than 0, 1, true or false.
    """
    text = get_str(name, "0").strip().lower()
    if text in ("0", "false"):
        return False
    if text in ("1", "true"):
        return True
    raise ConfigError(f"environment variable {name}={text!r} is no switch: use 1 or 0")
