"""Parameters and their optimizer states from DeepSpeed's flat groups, or from a universal checkpoint.

    stages 1, 2    the parameters of a group, one after the other, are cut into one range for each rank
    stage 3        each parameter is cut into one equal range for each rank, the last ones padded; a rank
                   has its ranges of the parameters of a subgroup one after the other
    universal      zero/<param>/fp32.pt and a file for each state, whole

Groups and subgroups are listed with their parameters in `param_shapes`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchloom.engine.checkpoints.deepspeed_files import DeepSpeedFiles, read_file
from torchloom.errors import CheckpointError

Pieces = list[Tensor]
"""Flat, in order, together the whole tensor."""


@dataclass
class ImportedParam:
    """One parameter."""

    shape: tuple[int, ...]
    weight: Pieces
    group: int | None = None
    """Of the optimizer; None: it is not trained."""
    states: dict[str, Pieces | Any] = field(default_factory=dict)
    """Pieces, or one value such as the number of steps."""


def optimizer_of(files: DeepSpeedFiles, rank: int = 0) -> dict[str, Any]:
    """Return the state dict of a rank's inner optimizer: `state` and `param_groups`."""
    optim = files.optims[rank]
    for key in ("optimizer_state_dict", "base_optimizer_state"):
        if key in optim:
            return optim[key]
    return {"state": {}, **optim}  # of a universal checkpoint: each state is in a file of its own


def is_stage3(files: DeepSpeedFiles) -> bool:
    """Say whether weights are sharded."""
    return "fp32_flat_groups" in files.optims[0]


def trained_params(files: DeepSpeedFiles) -> dict[str, ImportedParam]:
    """Return the parameters that the optimizer steps.

    Raises:
        CheckpointError: elements are missing, or some are left.
    """
    groups = optimizer_of(files)["param_groups"]
    group_of = {index: g for g, group in enumerate(groups) for index in group["params"]}
    found: dict[str, ImportedParam] = {}
    for index, shapes in enumerate(files.models[0]["param_shapes"]):
        shapes = {name: tuple(shape) for name, shape in shapes.items()}
        read = (
            _universal(files, index, shapes) if files.is_universal else _flat(files, index, shapes)
        )
        for name, weight, states in read:
            step = states.get("step", groups[group_of[index]].get("step"))
            if states and step is not None:  # torch's optimizers count in a tensor
                states["step"] = torch.tensor(float(step))
            found[name] = ImportedParam(shapes[name], weight, group_of[index], states)
    return found


def other_params(files: DeepSpeedFiles, trained: Mapping[str, Any]) -> dict[str, ImportedParam]:
    """Return the parameters that the optimizer does not step.

    Args:
        files: the checkpoint.
        trained: names of the others.
    """
    model = files.models[0]
    if is_stage3(files):
        shapes = model.get("frozen_param_shapes") or {}
        return {
            name: ImportedParam(
                tuple(shape),
                _cut_each(
                    [each["frozen_param_fragments"][name] for each in files.models], 0, shape
                ),
            )
            for name, shape in shapes.items()
        }
    known = {*trained, *model["buffer_names"], *(model["shared_params"] or {})}
    return {
        name: ImportedParam(tuple(value.shape), [value.reshape(-1)])
        for name, value in model["module"].items()
        if isinstance(value, Tensor) and name not in known and not name.endswith("_extra_state")
    }


_Read = Iterator[tuple[str, Pieces, dict[str, Any]]]
"""Name, weight and states of each parameter of a group."""


def _flat(files: DeepSpeedFiles, index: int, shapes: Mapping[str, tuple[int, ...]]) -> _Read:
    ranks = len(files.optims)
    in_shards = is_stage3(files)
    key = "fp32_flat_groups" if in_shards else "single_partition_of_fp32_groups"
    cut = _cut_each if in_shards else _cut_joined
    flats: Pieces = [optim[key][index] for optim in files.optims]
    states = [optimizer_of(files, rank)["state"].get(index, {}) for rank in range(ranks)]
    divided = {
        # Padding at the end of a group is left out of the weights alone.
        name: [state[name][: flat.numel()] for state, flat in zip(states, flats, strict=True)]
        for name, value in states[0].items()
        if isinstance(value, Tensor) and value.dim() > 0
    }
    rest = {name: value for name, value in states[0].items() if name not in divided}
    at = 0
    for name, shape in shapes.items():
        yield (
            name,
            cut(flats, at, shape),
            {**{state: cut(flat, at, shape) for state, flat in divided.items()}, **rest},
        )
        at += math.ceil(math.prod(shape) / (ranks if in_shards else 1))
    left = sum(flat.numel() for flat in flats) - at * (ranks if in_shards else 1)
    if left >= (1 if in_shards else 2 * ranks):  # groups of older versions end with padding
        raise CheckpointError(
            f"group {index} holds {left} elements more than its parameters have: import a checkpoint "
            "whose ranks all share one ZeRO group"
        )


def _universal(files: DeepSpeedFiles, index: int, shapes: Mapping[str, tuple[int, ...]]) -> _Read:
    common = optimizer_of(files)["state"].get(index, {})
    for name, shape in shapes.items():
        folder = files.path / "zero" / name
        states: dict[str, Any] = {"step": common["step"]} if "step" in common else {}
        for file in sorted({folder / "fp32.pt", *folder.glob("*.pt")}):
            value = read_file(file)
            value = value["param"] if isinstance(value, dict) else value
            is_whole = isinstance(value, Tensor) and value.dim() > 0
            states[file.stem] = _cut_joined([value.reshape(-1)], 0, shape) if is_whole else value
        yield name, states.pop("fp32"), states


def _cut_joined(flats: Pieces, at: int, shape: Sequence[int]) -> Pieces:
    """Return a range of what all flats hold one after the other."""
    end, begin, found = at + math.prod(shape), 0, []
    for flat in flats:
        first, last = max(at - begin, 0), min(end - begin, flat.numel())
        if first < last:
            found.append(flat[first:last])
        begin += flat.numel()
    return _checked(found, shape)


def _cut_each(flats: Pieces, at: int, shape: Sequence[int]) -> Pieces:
    """Return the ranges that the flats hold of a tensor in the same place, without the padding."""
    numel = math.prod(shape)
    own = math.ceil(numel / len(flats))
    valid = [max(0, min(own, numel - rank * own)) for rank in range(len(flats))]
    cut = [flat[at : at + num] for flat, num in zip(flats, valid, strict=True) if num]
    return _checked(cut, shape)


def _checked(pieces: Pieces, shape: Sequence[int]) -> Pieces:
    if sum(piece.numel() for piece in pieces) != math.prod(shape):
        raise CheckpointError(
            f"elements of a parameter of shape {list(shape)} are missing: import another checkpoint"
        )
    if len({piece.dtype for piece in pieces}) > 1:
        raise CheckpointError(
            f"ranks hold a parameter of shape {list(shape)} in different dtypes: import another one"
        )
    return pieces or [torch.empty(tuple(shape))]
