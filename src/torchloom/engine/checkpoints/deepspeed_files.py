"""Files of a checkpoint of DeepSpeed's: found by their names, read as tensors and plain values.

Nothing of them is executed. Objects of DeepSpeed's classes come out as `Inert`; other classes are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from torchloom.engine.checkpoints.folder import check_tag
from torchloom.engine.checkpoints.payload import first_line
from torchloom.errors import CheckpointError

_STATES = re.compile(
    r"(?:bf16_|fp16_)?(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_00_(?P<kind>model|optim)_states\.pt"
)
_POINTERS = ("latest", "latest_universal")


class Inert:
    """Stands for an object of DeepSpeed's: it has the attributes that were saved, and does nothing."""

    def __init__(self, *args: object) -> None:
        self.args = args


@dataclass
class DeepSpeedFiles:
    """The files of one checkpoint."""

    path: Path
    models: list[dict[str, Any]]
    """What `*_model_states.pt` hold: one, or at stage 3 one of each rank."""
    optims: list[dict[str, Any]]
    """What optimizers keep, of each rank; of a universal checkpoint what they have in common."""
    is_universal: bool


def read_files(folder: Path, tag: str | None) -> DeepSpeedFiles:
    """Read a checkpoint of DeepSpeed's; tensors stay in their files until they are used.

    Args:
        folder: of checkpoints, or one checkpoint.
        tag: name of a checkpoint in the folder; default: the one that the file `latest` names.

    Raises:
        CheckpointError: it is none, is damaged, or is of a kind that cannot be imported.
    """
    path = _chosen(folder, tag)
    found: dict[str, dict[int, Path]] = {"model": {}, "optim": {}}
    for file in sorted(path.glob("*_states.pt")):
        match = _STATES.fullmatch(file.name)
        if match is None:
            raise CheckpointError(
                f"{file} is of tensor, pipeline or expert parallelism, which is not imported: write "
                "whole weights with DeepSpeed, and load them into the model before torchloom.initialize"
            )
        found[match["kind"]][int(match["rank"] or 0)] = file
    common = path / "zero" / "optimizer_state.pt"
    is_universal = common.is_file()
    if is_universal:
        found["optim"] = {0: common}
    for kind, files in found.items():
        if sorted(files) != list(range(len(files))) or not files:
            raise CheckpointError(
                f"{path} lacks files *_{kind}_states.pt of some ranks: import a whole checkpoint of "
                "DeepSpeed's ZeRO stages 1 to 3, or a universal one"
            )
    models, optims = ([read_dict(each[i]) for i in range(len(each))] for each in found.values())
    if not is_universal:
        optims = [each.get("optimizer_state_dict", {}) for each in optims]
        ranks = optims[0].get("partition_count")
        ranks = max(ranks) if isinstance(ranks, list) else ranks
        if ranks != len(optims):
            raise CheckpointError(
                f"{path} was saved by {ranks} ranks and has the files of {len(optims)}: import a whole "
                "checkpoint"
            )
    return DeepSpeedFiles(path, models, optims, is_universal)


def read_file(path: Path) -> Any:
    """Read what `torch.save` wrote, as tensors and plain values.

    Raises:
        CheckpointError: it is missing or damaged, or holds objects of other classes.
    """
    try:
        names = get_unsafe_globals_in_checkpoint(str(path))
        foreign = sorted(name for name in names if not name.startswith("deepspeed."))
        if foreign:
            raise CheckpointError(
                f"{path} holds {', '.join(foreign[:3])}, which is not read because it could run code: "
                "save again in DeepSpeed with a client_state of plain values and tensors"
            )
        with safe_globals([(Inert, name) for name in names]):
            return torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: import a whole checkpoint") from None
    except CheckpointError:
        raise
    except Exception as error:  # torch's reader over damaged bytes raises anything
        raise CheckpointError(
            f"{path} is damaged ({first_line(error)}): import another checkpoint"
        ) from error


def read_dict(path: Path) -> dict[str, Any]:
    """Read a file that holds a dict; see `read_file`."""
    found = read_file(path)
    if not isinstance(found, dict):
        raise CheckpointError(
            f"{path} holds a {type(found).__name__}, DeepSpeed writes a dict: import another checkpoint"
        )
    return found


def _chosen(folder: Path, tag: str | None) -> Path:
    if tag is None and any(folder.glob("*_states.pt")):
        return folder.resolve()
    pointers = [folder / name for name in _POINTERS if (folder / name).is_file()]
    try:
        named = pointers[0].read_text().strip() if tag is None and pointers else tag
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{pointers[0]} cannot be read ({error}): pass --tag") from None
    path = folder if named is None else folder / check_tag(named)
    if named is None or not path.is_dir():
        raise CheckpointError(
            f"no checkpoint of DeepSpeed's in {str(path)!r}: name a folder that holds one and the "
            "file 'latest', or the folder of the checkpoint itself"
        )
    return path.resolve()
