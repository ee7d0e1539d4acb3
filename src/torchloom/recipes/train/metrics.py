"""The metrics of a run, and the files that hold them.

`metrics.jsonl` holds one JSON object per line, written by rank 0. Lines of kind `step`:

    step                      optimizer steps done, counted from 1
    loss                      mean over ranks and micro-steps, nats per byte (or token)
    lr, grad_norm             grad_norm is over the whole model, before clipping
    tokens                    tokens seen since the run began, all ranks together
    step_time_s, data_time_s  wall clock of the step, and its part spent waiting for data
    tokens_per_s              all ranks together
    tflops_per_s              per rank, useful work only (see `flops`)
    mfu                       tflops_per_s / dense bf16 peak; null where no peak is known
    memory_gib, peak_memory_gib   of rank 0: device memory in use, or resident memory on CPU
    collectives, collective_bytes   issued by rank 0 in this step

Lines of kind `eval` hold `step` and `heldout_loss`. A value that is not known is null.
TensorBoard gets the same numbers under the names of `TENSORBOARD_TAGS`.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from torchloom.files import open_to_append, read_json_lines, write_whole

TENSORBOARD_TAGS = {
    "loss": "loss_metrics/global_avg_loss",
    "heldout_loss": "loss_metrics/heldout_loss",
    "grad_norm": "grad_norm",
    "lr": "lr",
    "tokens_per_s": "throughput(tps)",
    "tflops_per_s": "tflops",
    "mfu": "mfu",
    "step_time_s": "time_metrics/end_to_end(s)",
    "data_time_s": "time_metrics/data_loading(s)",
    "memory_gib": "memory/active(GiB)",
    "peak_memory_gib": "memory/max_active(GiB)",
    "collectives": "comm/collectives",
    "collective_bytes": "comm/bytes",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRow:
    """The metrics of one optimizer step; names and units as in the module's table."""

    kind: Literal["step"] = "step"
    step: int
    loss: float
    lr: float
    grad_norm: float | None
    tokens: int
    step_time_s: float
    data_time_s: float
    tokens_per_s: float
    tflops_per_s: float
    mfu: float | None
    memory_gib: float
    peak_memory_gib: float
    collectives: int
    collective_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalRow:
    """The held-out loss after `step` steps."""

    kind: Literal["eval"] = "eval"
    step: int
    heldout_loss: float


class Sink(Protocol):
    """A destination of rows."""

    def log(self, row: StepRow | EvalRow) -> None:
        """Take one row."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...


class JsonlSink:
    """Append rows to a file, each line flushed, so that a killed run keeps what it wrote.

    Args:
        path: the file.
        after_step: keep only rows up to this step; a resumed run writes the later ones anew.
    """

    def __init__(self, path: Path, *, after_step: int = 0) -> None:
        kept = (
            [row for row in read_json_lines(path) if row["step"] <= after_step]
            if after_step
            else []
        )
        write_whole(path, "".join(f"{json.dumps(row)}\n" for row in kept))
        self._file = open_to_append(path)

    def log(self, row: StepRow | EvalRow) -> None:
        """Write one line."""
        self._write(asdict(row))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()


class TensorBoardSink:
    """Write rows as TensorBoard scalars; needs the package tensorboard."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # an optional package

        self._writer = SummaryWriter(str(folder))

    def log(self, row: StepRow | EvalRow) -> None:
        """Write each known number of a row."""
        for key, value in asdict(row).items():
            if key in TENSORBOARD_TAGS and value is not None:
                self._writer.add_scalar(TENSORBOARD_TAGS[key], value, row.step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


def memory_gib(device: torch.device) -> tuple[float, float]:
    """Return memory in use and its peak so far: of the device, or of this process on CPU."""
    if device.type == "cuda":
        in_use = torch.cuda.memory_allocated(device)
        peak = torch.cuda.max_memory_allocated(device)
    else:
        in_use, peak = _resident_bytes()
    return in_use / 2**30, peak / 2**30


def _resident_bytes() -> tuple[int, int]:
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    statm = Path("/proc/self/statm")
    if not statm.is_file():
        return peak, peak
    in_use = int(statm.read_text().split()[1]) * resource.getpagesize()
    return in_use, max(in_use, peak)  # the kernel updates the two at different times
