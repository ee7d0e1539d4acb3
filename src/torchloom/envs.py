"""The only place that reads the process environment.

Launchers (torchrun, Slurm, Open MPI) say who this process is; `TORCHLOOM_*` variables switch
torchloom's own behaviour. A value that does not parse is an error, never a silent default.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from torchloom.errors import ConfigError

LAUNCHER_PID = "TORCHLOOM_LAUNCHER_PID"
"""Set by `torchloom train` for its workers, which end with it."""
TRACEBACK = "TORCHLOOM_TRACEBACK"
"""Switch: show Python's traceback as well as the one sentence that commands end with."""

_RANK_NAMES = {
    "rank": ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"),
    "local_rank": ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "world_size": ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"),
}


class Launch(NamedTuple):
    """Who this process is among its peers, as the launcher said."""

    rank: int
    local_rank: int
    """Its place among the ranks that see the same devices; 0 where it sees its own alone."""
    world_size: int


def launch() -> Launch:
    """Read rank, local rank and world size from torchrun, Slurm or Open MPI, in this order.

    Returns:
        `Launch(0, 0, 1)` when no launcher started this process.

    Raises:
        ConfigError: a variable is set but is not a number, or the numbers contradict each other.
    """
    found = {key: _first_int(_names(key)) for key in _RANK_NAMES}
    for key, value in found.items():
        if value is not None and value < (least := 1 if key == "world_size" else 0):
            name = _first_set(_names(key))
            raise ConfigError(
                f"environment variable {name}={value} is out of range: it starts at {least}"
            )
    world_size = 1 if found["world_size"] is None else found["world_size"]
    if found["rank"] is None and world_size > 1:
        name = _first_set(_names("world_size"))
        raise ConfigError(
            f"{name} says that there are {world_size} ranks, but RANK is not set: start the "
            f"processes with torchrun, or set RANK to 0 ... {world_size - 1}, another one for each"
        )
    rank = found["rank"] or 0
    if rank >= world_size:
        told = _first_set(_names("world_size")) or "WORLD_SIZE (not set)"
        raise ConfigError(
            f"environment variable {_first_set(_names('rank'))}={rank} is out of range for "
            f"{told}={world_size}: ranks are 0 ... {world_size - 1}"
        )
    local_rank = 0 if _has_own_devices() else found["local_rank"] or 0
    return Launch(rank=rank, local_rank=local_rank, world_size=world_size)


class Meeting(NamedTuple):
    """Where the ranks of a run meet."""

    host: str
    port: int
    is_hosted: bool
    """Whether the launcher hosts the store; otherwise rank 0 does."""
    attempt: int
    """How often the launcher has restarted these ranks."""


def meeting(default_port: int) -> Meeting | None:
    """Read where the ranks meet: MASTER_ADDR and MASTER_PORT; None without an address.

    Args:
        default_port: used if MASTER_PORT is not set.

    Raises:
        ConfigError: MASTER_PORT is not a port number, or a task of Slurm has no address.
    """
    host = get_str("MASTER_ADDR", "").strip()
    if not host:
        _refuse_slurm_without_address()
        return None
    named = _first_int(("MASTER_PORT",))
    port = default_port if named is None else named
    if not 1 <= port < 1 << 16:
        raise ConfigError(
            f"the ranks cannot meet at port {port} (MASTER_PORT): ports are 1 ... 65535"
        )
    attempt = _first_int(("TORCHELASTIC_RESTART_COUNT",)) or 0
    return Meeting(host, port, launcher_has_store(), attempt)


def launcher_has_store() -> bool:
    """Return whether the launcher serves the store at MASTER_ADDR and MASTER_PORT, and not rank 0."""
    return get_str("TORCHELASTIC_USE_AGENT_STORE", "") == "True"


def _refuse_slurm_without_address() -> None:
    """Say what a batch script has to set: srun tells each task its number, and none where they meet."""
    if _is_slurm_task():
        place = launch()
        raise ConfigError(
            f"this is task {place.rank} of {place.world_size} of a Slurm job, but MASTER_ADDR is not set: write "
            'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) into the batch '
            "script before srun"
        )


def _is_slurm_task() -> bool:
    """Return whether Slurm says who this process is, and no other launcher does."""
    return _first_set(_RANK_NAMES["rank"]) == "SLURM_PROCID"


def _has_own_devices() -> bool:
    """Return whether Slurm gave this task devices that no other task of the host sees.

    With `--gpus-per-task` Slurm binds devices to tasks, where the cluster is set up for it: then as many are
    visible as a task has, and SLURM_LOCALID is no index among them.
    """
    per_task, visible = get_str("SLURM_GPUS_PER_TASK", ""), get_str("CUDA_VISIBLE_DEVICES", "")
    if not (_is_slurm_task() and per_task and visible):
        return False
    return per_task.rpartition(":")[2] == str(len(visible.split(",")))


def launcher_pid() -> int | None:
    """Return the id of the process that launched this one, None if unknown: a worker ends with its launcher.

    It is set for workers of `torchloom train`. Workers of torchrun are its children.
    """
    found = _first_int((LAUNCHER_PID,))
    if found is None and get_str("TORCHELASTIC_RUN_ID", ""):
        return os.getppid()
    return found


def is_launched() -> bool:
    """Return whether a launcher set the ranks of this process."""
    return _first_set(_names("world_size")) is not None


def is_one_host() -> bool:
    """Return whether the launcher says that it started all ranks on this host."""
    local = _first_int(("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"))
    return local is not None and local == launch().world_size


def get_str(name: str, default: str) -> str:
    """Return the variable `name`, or `default` when it is unset or empty."""
    return os.environ.get(name) or default


def key_file() -> Path:
    """Return the path of the user's signing key: `TORCHLOOM_KEY_FILE`, or a file in the home folder.

    The home is that of the account, where there is one, not HOME: a process with another HOME still finds the
    key that signed earlier files.
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


@contextmanager
def default_within(name: str, value: str) -> Iterator[None]:
    """Set `name` for a `with` block, unless the user has set it."""
    is_ours = name not in os.environ
    os.environ.setdefault(name, value)
    try:
        yield
    finally:
        if is_ours:
            os.environ.pop(name, None)


@contextmanager
def value_within(name: str, value: str) -> Iterator[None]:
    """Set `name` for a `with` block, whatever it was."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        drop(name)
        if before is not None:
            os.environ[name] = before


def drop(name: str) -> None:
    """Unset `name` for this process and its children, if it is set."""
    os.environ.pop(name, None)


def set_value(name: str, value: str) -> None:
    """Set `name` for this process and its children."""
    os.environ[name] = value


def _names(key: str) -> tuple[str, ...]:
    """Return the variables that may hold this value; SLURM_NTASKS counts only inside a Slurm task.

    `salloc` sets SLURM_NTASKS also in its own shell, which is no task.
    """
    names = _RANK_NAMES[key]
    if _first_set(_RANK_NAMES["rank"]) is None:
        return tuple(name for name in names if name != "SLURM_NTASKS")
    return names


def _first_set(names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in os.environ), None)


def _first_int(names: tuple[str, ...]) -> int | None:
    name = _first_set(names)
    if name is None:
        return None
    try:
        return int(os.environ[name])
    except ValueError:
        raise ConfigError(
            f"environment variable {name}={os.environ[name]!r} is not a number: the launcher that "
            "started this process set it; start it again, correct it or unset it"
        ) from None


def is_on(name: str) -> bool:
    """Return whether a switch is on.

    Raises:
        ConfigError: it is set to something else than 0, 1, true or false.
    """
    text = get_str(name, "0").strip().lower()
    if text in ("0", "false"):
        return False
    if text in ("1", "true"):
        return True
    raise ConfigError(f"environment variable {name}={text!r} is no switch: use 1 or 0")


def environment() -> Mapping[str, str]:
    """Return the environment of this process, as code that asks for variables has it."""
    return os.environ
