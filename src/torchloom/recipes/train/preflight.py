"""Checks without torch and without a process group, so that bad options fail before any process starts.

The folder of a run:

    OUT/config.json  metrics.jsonl  summary.json  tensorboard/  checkpoints/
    loss.svg  step_time.svg  throughput.svg  memory.svg
    with --report: record.json  record-rank1.json ...  report.html
"""

from __future__ import annotations

import importlib.util
import itertools
import time
from pathlib import Path

from torchloom.config import check_config
from torchloom.errors import CheckpointError, ConfigError
from torchloom.files import write_whole
from torchloom.recipes.train.corpus import load_corpus
from torchloom.recipes.train.options import PRESET_NAMES, TrainOptions

RUNS = Path("runs")


def check_options(options: TrainOptions, world_size: int) -> None:
    """Check model, config, optional packages and data.

    Args:
        options: what to train.
        world_size: the number of ranks, for the batch sizes of the config.

    Raises:
        TorchloomError: a file, folder or package is missing, or the options contradict each other.
    """
    _check_model(options.model)
    if options.config is not None:
        _check_config(options.config, options.micro_batch, world_size)
    if options.tensorboard:
        _check_extra("tensorboard", "tensorboard", "--tensorboard")
    load_corpus(options.data, seq_len=options.seq_len)


def checkpoint_dir(out: Path) -> Path:
    """Return where the checkpoints of a run are."""
    return out / "checkpoints"


def choose_out(options: TrainOptions) -> Path:
    """Return the run's folder: the one asked for, the newest to resume, or a fresh name.

    Raises:
        ConfigError: the folder holds a run already.
        CheckpointError: there is nothing to resume.
    """
    if options.out is not None:
        out = Path(options.out).expanduser()
        if options.resume and not _has_checkpoint(out):
            raise CheckpointError(
                f"{str(out)!r} holds no checkpoint to resume: "
                "correct --out, or start afresh without --resume"
            )
        if not options.resume and _has_checkpoint(out):
            raise ConfigError(
                f"{str(out)!r} already holds a run: add --resume to continue it, or name another --out"
            )
        return out
    if options.resume:
        found = [path for path in RUNS.glob("*") if _has_checkpoint(path)]
        if not found:
            raise CheckpointError(
                f"no run under {str(RUNS)!r} has a checkpoint to resume: name its folder with --out"
            )
        return max(found, key=lambda path: checkpoint_dir(path).stat().st_mtime)
    wanted = RUNS / f"{Path(options.model).name}-{time.strftime('%Y%m%d-%H%M%S')}"
    others = (wanted.with_name(f"{wanted.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([wanted], others) if not path.exists())


def make_out(out: Path) -> Path:
    """Create the folder, and return it.

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
    return out


def _has_checkpoint(out: Path) -> bool:
    return any(checkpoint_dir(out).glob("*/manifest.json"))


def _check_model(name: str) -> None:
    if name in PRESET_NAMES:
        return
    folder = Path(name).expanduser()
    known = f"--model takes {', '.join(PRESET_NAMES)} or a local folder with a config.json"
    if not folder.is_dir():
        raise ConfigError(f"model {name!r} is neither a preset nor a folder: {known}")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model folder {name!r} holds no config.json: {known}")
    _check_extra("transformers", "hf", "--model with a folder")


def _check_config(path: str, micro_batch: int | None, world_size: int) -> None:
    """Refuse errors and also unknown keys, which are typos in a file written for this command."""
    if micro_batch is not None:
        raise ConfigError(
            "--micro-batch and --config contradict each other: "
            "set train_micro_batch_size_per_gpu in the file"
        )
    checked = check_config(Path(path), world_size=world_size)
    unknown = [note for note in checked.notes if note.message.startswith("unknown key")]
    problems = [str(found) for found in (*checked.errors, *unknown)]
    if problems:
        count = "1 error" if len(problems) == 1 else f"{len(problems)} errors"
        raise ConfigError(f"{count} in {checked.name}:" + "".join(f"\n  {p}" for p in problems))


def _check_extra(package: str, extra: str, asked: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{asked} needs the package {package}: pip install 'torchloom[{extra}]'")
