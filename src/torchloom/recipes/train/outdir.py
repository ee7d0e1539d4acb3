"""The folder of a run.

OUT/config.json  metrics.jsonl  summary.json  tensorboard/  checkpoints/
loss.svg  step_time.svg  throughput.svg  memory.svg
with --report: record.json  record-rank1.json ...  report.html
"""

from __future__ import annotations

import time
from pathlib import Path

from torchloom.errors import CheckpointError, ConfigError
from torchloom.files import write_whole
from torchloom.recipes.train.options import TrainOptions

RUNS = Path("runs")


def checkpoint_dir(out: Path) -> Path:
    """Return where the checkpoints of a run are."""
    return out / "checkpoints"


def choose_out(options: TrainOptions) -> Path:
    """Return the run's folder: the one asked for, the newest to resume, or a fresh name.

    Raises:
        ConfigError: the folder holds a run already, or cannot be a folder.
        CheckpointError: there is nothing to resume.
    """
    if options.resume:
        return _to_resume(options.out)
    if options.out is None:
        return _fresh(RUNS / f"{Path(options.model).name}-{time.strftime('%Y%m%d-%H%M%S')}")
    out = Path(options.out).expanduser()
    if _has_checkpoint(out):
        raise ConfigError(
            f"{str(out)!r} already holds a run: add --resume to continue it, or name another --out"
        )
    return out


def make_out(out: Path) -> None:
    """Create the folder.

    Raises:
        ConfigError: it cannot be created or written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / ".writable", "").unlink()
    except OSError as err:
        raise ConfigError(
            f"cannot write to {str(out)!r} ({err.strerror}: {err.filename2 or err.filename}): name another --out"
        ) from None


def _to_resume(asked: str | None) -> Path:
    if asked is not None:
        out = Path(asked).expanduser()
        if not _has_checkpoint(out):
            raise CheckpointError(
                f"{str(out)!r} holds no checkpoint to resume: "
                "correct --out, or start afresh without --resume"
            )
        return out
    found = [path for path in RUNS.glob("*") if _has_checkpoint(path)]
    if not found:
        raise CheckpointError(
            f"no run under {str(RUNS)!r} has a checkpoint to resume: name its folder with --out"
        )
    return max(found, key=lambda path: checkpoint_dir(path).stat().st_mtime)


def _has_checkpoint(out: Path) -> bool:
    folder = checkpoint_dir(out)
    marks = ("engine.json", "manifest.json")  # what older and newer checkpoints hold
    return folder.is_dir() and any(
        (path / mark).is_file() for path in folder.iterdir() for mark in marks
    )


def _fresh(wanted: Path) -> Path:
    candidate, number = wanted, 2
    while candidate.exists():
        candidate = wanted.with_name(f"{wanted.name}-{number}")
        number += 1
    return candidate
