"""What users write under `tensorboard`, `wandb` and `csv_monitor`: DeepSpeed's names and defaults."""

from __future__ import annotations

from torchloom.config.fields import Section, used
from torchloom.config.schema_types import AnyText, Flag, MaybeAnyText

_FOLDER = "folder above the run's own; the default is the folder that the program runs in"
_JOB = "name of the run's folder"
JOB_NAME = "DeepSpeedJobName"


class TensorBoardSection(Section):
    """Numbers of each step, written by rank 0 for TensorBoard; needs the package `tensorboard`."""

    enabled: Flag = used(False, "write event files; see [metrics.md](metrics.md)")
    output_path: AnyText = used("", _FOLDER)
    job_name: AnyText = used(JOB_NAME, _JOB)


class WandbSection(Section):
    """Numbers of each step, logged by rank 0 to Weights & Biases; needs the package `wandb`."""

    enabled: Flag = used(False, "log to the run that is open, or start one")
    project: AnyText = used("deepspeed", "project of a run that is started")
    team: MaybeAnyText = used(
        None, "entity of a run that is started; the default is the account's", aliases=("entity",)
    )
    group: MaybeAnyText = used(None, "group of a run that is started")


class CsvSection(Section):
    """Numbers of each step, written by rank 0 to one CSV file for each number."""

    enabled: Flag = used(False, "write CSV files; see [metrics.md](metrics.md)")
    output_path: AnyText = used("", _FOLDER)
    job_name: AnyText = used(JOB_NAME, _JOB)
