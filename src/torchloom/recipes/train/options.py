"""Hold the options of a training run, and check them without torch, before any process starts.

The folder of a run:

    OUT/config.json  metrics.jsonl  summary.json  tensorboard/  checkpoints/
    loss.svg  step_time.svg  throughput.svg  memory.svg
    with --report: record.json  record-rank1.json ...  report.html
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchloom.config import check_config
from torchloom.errors import CheckpointError, ConfigError
from torchloom.files import write_whole
from torchloom.recipes.train.corpus import load_corpus

PRESET_NAMES = ("llama-tiny", "llama-34m")
"""The built-in models; `--model` also accepts a folder."""


def _option(default: Any, said: str, **more: object) -> Any:
    """Return a field of a default and what the command line says of it: text, bounds, how the default is shown."""
    return field(default=default, metadata={"help": said, **more})


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """The options of one run; `None` means "as the config or the default says"."""

    model: str = _option("llama-tiny", "llama-tiny, llama-34m, or a local Hugging Face folder.")
    """A built-in preset or a local folder in Hugging Face format."""
    config: str | None = _option(
        None, "JSON file in DeepSpeed's format.", show_default="ZeRO-3, AdamW"
    )
    """A DeepSpeed-shaped JSON file."""
    data: str | None = _option(
        None,
        "File or folder to train on; any bytes are accepted.",
        show_default="Python's standard library",
    )
    """A text file or a folder of them; the standard library's sources by default."""
    out: str | None = _option(
        None, "Folder for metrics, charts and checkpoints.", show_default="runs/..."
    )
    """Where metrics, charts and checkpoints go; a fresh folder under `runs/` by default."""
    nproc: int = _option(
        2, "Workers to start on this host; not used under torchrun or Slurm.", min=1
    )
    """Workers started on this host; ignored when a launcher started this process."""
    steps: int = _option(120, "Optimizer steps of the whole run.", min=1)
    """Optimizer steps of the whole run, those before a resume included."""
    resume: bool = _option(False, "Continue from the newest checkpoint in --out.")
    """Continue from the newest checkpoint in `out`."""
    compile: bool = _option(True, "Weave and compile the step.")
    """Weave and compile the step; without it the engine runs eagerly sharded."""
    seed: int = _option(0, "Seed of weights, order of samples and dropout.", min=0, max=2**20)
    """Decides initial weights, order of samples and dropout."""
    seq_len: int = _option(256, "Tokens per sample.", min=2)
    """Tokens per sample."""
    micro_batch: int | None = _option(
        None, "Samples per rank and micro-step.", min=1, show_default="4"
    )
    """Samples per rank and micro-step."""
    eval_every: int = _option(20, "Steps between evaluations on held-out text.", min=1)
    """Steps between two evaluations of the held-out text."""
    save_every: int | None = _option(
        None, "Steps between checkpoints.", min=1, show_default="at the end"
    )
    """Steps between two checkpoints; by default the end is saved, and one on the way by the clock."""
    save_minutes: float = _option(
        10.0, "Minutes until the checkpoint on the way is saved anew, without --save-every.", min=0
    )
    """Minutes after which the one checkpoint on the way is replaced, without `save_every`; 0 saves none."""
    keep_last: int | None = _option(
        None, "Number of newest checkpoints to keep.", min=1, show_default="all"
    )
    """How many checkpoints stay; all by default."""
    log_every: int = _option(10, "Steps between printed lines if there is no terminal.", min=1)
    """Steps between two printed lines where there is no terminal for a progress bar."""
    tensorboard: bool = _option(False, "Also write TensorBoard events.")
    """Also write TensorBoard events to `out/tensorboard`."""
    report: bool = _option(
        False, "Write report.html: graphs, guards and a timeline of the first steps."
    )
    """Also watch the compile and the first steps, and leave `report.html` in `out`."""


def default_config(options: TrainOptions) -> dict[str, Any]:
    """Return ZeRO-3 with AdamW in fp32; 10 % of the steps warm up, then the rate follows a cosine.

    The learning rate suits the small presets; use a config for a large model.
    """
    return {
        "train_micro_batch_size_per_gpu": options.micro_batch or 4,
        # With the usual threshold of 100 000 elements, a small model would not be sharded at all.
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 10_000},
        "gradient_clipping": 1.0,
        "steps_per_print": math.inf,  # the command shows its own progress
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
        },
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {
                "total_num_steps": options.steps,
                "warmup_num_steps": max(1, options.steps // 10),
                "warmup_min_ratio": 0.0,
                "cos_min_ratio": 0.1,
            },
        },
    }


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
