"""Reads the files of a checkpoint of DeepSpeed's as tensors and plain values, found by their names.

Nothing of them is executed. Objects of DeepSpeed's classes come out as `Inert`; other classes are refused.

Parameters and their optimizer states lie in flat groups, or in the files of a universal checkpoint:

    stages 1, 2    the parameters of a group, one after the other, are cut into one range for each rank
    stage 3        each parameter is cut into one equal range for each rank, the last ones padded; a rank
                   has its ranges of the parameters of a subgroup one after the other
    universal      zero/<param>/fp32.pt and a file for each state, whole

Groups and subgroups are listed with their parameters in `param_shapes`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from torchloom.checkpoints.folder import check_tag
from torchloom.checkpoints.manifest import reading
from torchloom.errors import CheckpointError

_STATES = re.compile(
    r"(?:bf16_|fp16_)?(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_00_(?P<kind>model|optim)_states\.pt"
)
Pieces = list[Tensor]
"""Flat, in order, together the whole tensor."""


class Inert:
    """Stands for an object of DeepSpeed's: it has the attributes that were saved, and does nothing."""

    def __init__(self, *args: object) -> None:
        self.args = args


@dataclass
class ImportedParam:
    """One parameter."""

    shape: tuple[int, ...]
    weight: Pieces
    group: int | None = None
    """Of the optimizer; None: it is not trained."""
    states: dict[str, Pieces | Any] = field(default_factory=dict)
    """Pieces, or one value such as the number of steps."""


@dataclass
class DeepSpeedFiles:
    """The files of one checkpoint; tensors stay in them until they are used."""

    path: Path
    models: list[dict[str, Any]]
    """What `*_model_states.pt` hold: one, or at stage 3 one of each rank."""
    optims: list[dict[str, Any]]
    """What optimizers keep, of each rank; of a universal checkpoint what they have in common."""
    is_universal: bool

    @property
    def is_stage3(self) -> bool:
        """Whether weights are sharded."""
        return "fp32_flat_groups" in self.optims[0]

    def optimizer(self, rank: int = 0) -> dict[str, Any]:
        """Return the state dict of a rank's inner optimizer: `state` and `param_groups`."""
        optim = self.optims[rank]
        for key in ("optimizer_state_dict", "base_optimizer_state"):
            if key in optim:
                return optim[key]
        return {
            "state": {},
            **optim,
        }  # of a universal checkpoint: each state is in a file of its own


def read_files(folder: Path, tag: str | None) -> DeepSpeedFiles:
    """Read a checkpoint of DeepSpeed's.

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
    models, optims = ([_read(each[i], dict) for i in range(len(each))] for each in found.values())
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


def _chosen(folder: Path, tag: str | None) -> Path:
    if tag is None and any(folder.glob("*_states.pt")):
        return folder.resolve()
    for pointer in (folder / "latest", folder / "latest_universal"):
        if tag is None and pointer.is_file():
            with reading(pointer):
                tag = pointer.read_text().strip()
    path = folder if tag is None else folder / check_tag(tag)
    if tag is None or not path.is_dir():
        raise CheckpointError(
            f"no checkpoint of DeepSpeed's in {str(path)!r}: name a folder that holds one and the "
            "file 'latest', or the folder of the checkpoint itself"
        )
    return path.resolve()


def _read(path: Path, kind: type = object) -> Any:
    """Read what `torch.save` wrote, as tensors and plain values.

    Raises:
        CheckpointError: it is missing or damaged, or holds objects of other classes.
    """
    with reading(path):
        names = get_unsafe_globals_in_checkpoint(str(path))
        foreign = sorted(name for name in names if not name.startswith("deepspeed."))
        if foreign:
            raise CheckpointError(
                f"{path} holds {', '.join(foreign[:3])}, which is not read because it could run code: "
                "save again in DeepSpeed with a client_state of plain values and tensors"
            )
        with safe_globals([(Inert, name) for name in names]):
            found = torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(found, kind):
        raise CheckpointError(
            f"{path} holds a {type(found).__name__}, DeepSpeed writes a {kind.__name__}: import another "
            "checkpoint"
        )
    return found


def trained_params(files: DeepSpeedFiles) -> dict[str, ImportedParam]:
    """Return the parameters that the optimizer steps.

    Raises:
        CheckpointError: elements are missing, or some are left.
    """
    groups = files.optimizer()["param_groups"]
    group_of = {index: g for g, group in enumerate(groups) for index in group["params"]}
    found: dict[str, ImportedParam] = {}
    for index, shapes in enumerate(files.models[0]["param_shapes"]):
        read = _universal if files.is_universal else _flat
        for name, states in read(files, index, shapes):
            weight = states.pop("fp32")
            step = states.get("step", groups[group_of[index]].get("step"))
            if states and step is not None:  # torch's optimizers count in a tensor
                states["step"] = torch.tensor(float(step))
            found[name] = ImportedParam(tuple(shapes[name]), weight, group_of[index], states)
    return found


def other_params(files: DeepSpeedFiles, trained: Mapping[str, Any]) -> dict[str, ImportedParam]:
    """Return the parameters that the optimizer does not step.

    Args:
        files: the checkpoint.
        trained: names of the others.
    """
    model = files.models[0]
    if files.is_stage3:
        return {
            name: ImportedParam(
                tuple(shape),
                _cut_each(
                    [each["frozen_param_fragments"][name] for each in files.models], 0, shape
                ),
            )
            for name, shape in (model.get("frozen_param_shapes") or {}).items()
        }
    known = {*trained, *model["buffer_names"], *(model["shared_params"] or {})}
    return {
        name: ImportedParam(tuple(value.shape), [value.reshape(-1)])
        for name, value in model["module"].items()
        if isinstance(value, Tensor) and name not in known and not name.endswith("_extra_state")
    }


_Read = Iterator[tuple[str, dict[str, Any]]]
"""Name and states of each parameter of a group; the weight is the state "fp32"."""


def _flat(files: DeepSpeedFiles, index: int, shapes: Mapping[str, Sequence[int]]) -> _Read:
    ranks = len(files.optims)
    key = "fp32_flat_groups" if files.is_stage3 else "single_partition_of_fp32_groups"
    cut, parts = (_cut_each, ranks) if files.is_stage3 else (_cut_joined, 1)
    flats: Pieces = [optim[key][index] for optim in files.optims]
    states = [files.optimizer(rank)["state"].get(index, {}) for rank in range(ranks)]
    divided, rest = {"fp32": flats}, {}
    for name, value in states[0].items():
        if isinstance(value, Tensor) and value.dim() > 0:
            # Padding at the end of a group is left out of the weights alone.
            each = zip(states, flats, strict=True)
            divided[name] = [state[name][: flat.numel()] for state, flat in each]
        else:
            rest[name] = value
    at = 0
    for name, shape in shapes.items():
        yield name, {**{state: cut(flat, at, shape) for state, flat in divided.items()}, **rest}
        at += math.ceil(math.prod(shape) / parts)
    left = sum(flat.numel() for flat in flats) - at * parts
    if left >= (1 if files.is_stage3 else 2 * ranks):  # groups of older versions end with padding
        raise CheckpointError(
            f"group {index} holds {left} elements more than its parameters have: import a checkpoint "
            "whose ranks all share one ZeRO group"
        )


def _universal(files: DeepSpeedFiles, index: int, shapes: Mapping[str, Sequence[int]]) -> _Read:
    common = files.optimizer()["state"].get(index, {})
    for name, shape in shapes.items():
        folder = files.path / "zero" / name
        states: dict[str, Any] = {"step": common["step"]} if "step" in common else {}
        for file in {folder / "fp32.pt", *folder.glob("*.pt")}:
            value = _read(file)
            value = value["param"] if isinstance(value, dict) else value
            is_whole = isinstance(value, Tensor) and value.dim() > 0
            states[file.stem] = _cut_joined([value.reshape(-1)], 0, shape) if is_whole else value
        yield name, states


def _cut_joined(flats: Pieces, at: int, shape: Sequence[int]) -> Pieces:
    """Return a range of what all flats hold one after the other."""
    left, found = math.prod(shape), []
    for flat in flats:
        piece = flat[at : at + left]
        if piece.numel():
            found.append(piece)
        at, left = max(0, at - flat.numel()), left - piece.numel()
    return _checked(found, shape)


def _cut_each(flats: Pieces, at: int, shape: Sequence[int]) -> Pieces:
    """Return the ranges that the flats hold of a tensor in the same place, without the padding."""
    numel = math.prod(shape)
    own = math.ceil(numel / len(flats))
    valid = [max(0, min(own, numel - rank * own)) for rank in range(len(flats))]
    return _checked(
        [flat[at : at + num] for flat, num in zip(flats, valid, strict=True) if num], shape
    )


def _checked(pieces: Pieces, shape: Sequence[int]) -> Pieces:
    numel = sum(piece.numel() for piece in pieces)
    if numel != math.prod(shape) or len({piece.dtype for piece in pieces}) > 1:
        raise CheckpointError(
            f"elements of a parameter of shape {list(shape)} are missing, or of several dtypes: import "
            "another checkpoint"
        )
    return pieces or [torch.empty(tuple(shape))]
