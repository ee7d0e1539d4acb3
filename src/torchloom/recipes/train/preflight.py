"""Checks without torch and without a process group: bad options fail before any process starts."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

from torchloom.config import check_config
from torchloom.errors import ConfigError
from torchloom.recipes.train.corpus import load_corpus
from torchloom.recipes.train.options import PRESET_NAMES, TrainOptions
from torchloom.recipes.train.outdir import choose_out, make_out


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


def settle_out(options: TrainOptions) -> TrainOptions:
    """Choose and create the run's folder, and return options that name it for all workers.

    Raises:
        ConfigError: the folder is taken or cannot be written.
        CheckpointError: there is nothing to resume.
    """
    out = choose_out(options)
    make_out(out)
    return replace(options, out=str(out))


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
