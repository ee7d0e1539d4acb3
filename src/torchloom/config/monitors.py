"""Where a configuration sends the numbers of each step, and whether the packages for that are installed."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from torchloom.config.fields import Section, record_of, used
from torchloom.config.kinds import any_text, flag
from torchloom.errors import ConfigError

JOB_NAME = "DeepSpeedJobName"


class TensorBoardSection(Section):
    """Numbers of each step, written by rank 0 for TensorBoard; needs the package `tensorboard`."""

    enabled = used(flag, False, "write event files; see [metrics.md](metrics.md)")
    output_path = used(
        any_text,
        "",
        "folder above the run's own; the default is the folder that the program runs in",
    )
    job_name = used(any_text, JOB_NAME, "name of the run's folder")


class WandbSection(Section):
    """Numbers of each step, logged by rank 0 to Weights & Biases; needs the package `wandb`."""

    enabled = used(flag, False, "log to the run that is open, or start one")
    project = used(any_text, "deepspeed", "project of a run that is started")
    team = used(
        any_text,
        None,
        "entity of a run that is started; the default is the account's",
        aliases=("entity",),
    )
    group = used(any_text, None, "group of a run that is started")


class CsvSection(TensorBoardSection):
    """Numbers of each step, written by rank 0 to one CSV file for each number."""

    enabled = used(flag, False, "write CSV files; see [metrics.md](metrics.md)")


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderConfig:
    """A folder of files with the numbers of each step."""

    output_path: str = ""
    """The folder above; "" is the one that the program runs in."""
    job_name: str = JOB_NAME
    """The folder in it."""

    @property
    def folder(self) -> Path:
        """Where the files go."""
        return Path(self.output_path) / self.job_name


@dataclass(frozen=True, kw_only=True, slots=True)
class WandbConfig:
    """The run of Weights & Biases that is started if none is open."""

    project: str = "deepspeed"
    team: str | None = None
    """The entity; None is the account's own."""
    group: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorsConfig:
    """Where rank 0 sends the numbers of each step; None: not there."""

    tensorboard: FolderConfig | None = None
    wandb: WandbConfig | None = None
    csv: FolderConfig | None = None

    @property
    def sections(self) -> tuple[str, ...]:
        """The sections of the configuration that are enabled."""
        enabled = {
            "tensorboard": self.tensorboard,
            "wandb": self.wandb,
            "csv_monitor": self.csv,
        }
        return tuple(name for name, value in enabled.items() if value is not None)


def resolve_monitors(
    tensorboard: TensorBoardSection, wandb: WandbSection, csv: CsvSection
) -> MonitorsConfig:
    """Return what the enabled sections ask for."""
    return MonitorsConfig(
        tensorboard=record_of(FolderConfig, tensorboard) if tensorboard.enabled else None,
        wandb=record_of(WandbConfig, wandb) if wandb.enabled else None,
        csv=record_of(FolderConfig, csv) if csv.enabled else None,
    )


def require_packages(monitors: MonitorsConfig) -> None:
    """Refuse sections whose package is not installed.

    Raises:
        ConfigError: it is not.
    """
    for name in monitors.sections:
        if name != "csv_monitor" and not _is_installed(name):
            raise ConfigError(
                f"{name}.enabled: the package {name} is not installed; pip install {name}, or set "
                f"{name}.enabled to false"
            )


def _is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # a folder ./wandb of runs has no origin
