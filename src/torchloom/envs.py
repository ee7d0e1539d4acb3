"""The only place that reads the process environment.

Launchers (torchrun, Slurm, Open MPI) say who this process is; `TORCHLOOM_*` variables switch
torchloom's own behaviour. A value that does not parse is an error, never a silent default.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from pathlib import Path
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


def is_agents_store() -> bool:
    """Say whether torch's elastic agent serves the store that ranks meet at."""
    return get_str("TORCHELASTIC_USE_AGENT_STORE", "") == str(True)


def get_int(name: str, default: int) -> int:
    """Return the variable `name` as a number, or `default` when it is unset.

    Raises:
        ConfigError: it is set but is not a number.
    """
    found = _first_int((name,))
    return default if found is None else found


def get_str(name: str, default: str) -> str:
    """Return the variable `name`, or `default` when it is unset or empty."""
    return os.environ.get(name) or default


def key_file() -> Path:
    """Return where the key is that this user signs with: `TORCHLOOM_KEY_FILE`, or a file of the user's home.

    The home is that of the account where there is one: a variable that somebody set for one process does
    not part it from what the user signed before.
    """
    chosen = get_str("TORCHLOOM_KEY_FILE", "")
    if chosen:
        return Path(chosen)
    try:
        home = Path(pwd.getpwuid(os.geteuid()).pw_dir)
    except KeyError:  # an id without an account, as in containers
        home = Path("/nonexistent")
    if not home.is_dir():
        home = Path(get_str("HOME", "/"))
    return home / ".config" / "torchloom" / "store.key"


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
