"""Writes checkpoints as DeepSpeed lays them out, of whole weights and states that a test knows."""

from __future__ import annotations

import contextlib
import math
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

Groups = list[list[str]]


@dataclass
class Whole:
    """What a run has, whole, and how its optimizer groups the parameters."""

    model: nn.Module
    groups: Groups
    states: dict[str, dict[str, Tensor]]
    settings: list[dict[str, Any]]
    """Of each group."""
    step: float
    extra: dict[str, Any] = field(default_factory=dict)
    """More keys of the files of the model."""


class LossScaler:
    """Pickled as DeepSpeed's."""

    def __init__(self) -> None:
        self.cur_scale = 1.0
        self.dtype = torch.float32


_MODULE = "deepspeed.runtime.fp16.loss_scaler"
_PACKAGES = ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.fp16", _MODULE)


@contextlib.contextmanager
def _classes_of_deepspeed() -> Iterator[None]:
    """Let objects be pickled as of a package that is not installed."""
    modules = {name: types.ModuleType(name) for name in _PACKAGES}
    vars(modules[_MODULE])["LossScaler"] = LossScaler
    with (
        mock.patch.dict(sys.modules, modules),
        mock.patch.object(LossScaler, "__module__", _MODULE),
    ):
        yield


@_classes_of_deepspeed()
def write_deepspeed(
    root: Path, whole: Whole, kind: str, *, ranks: int = 2, per_subgroup: int = 2
) -> Path:
    """Write a checkpoint; return its folder.

    Args:
        root: gets the folder `global_step<n>` and the file `latest`.
        whole: what is saved.
        kind: "1", "2" or "3" for ZeRO's stage, "universal" or "universal 3" for a converted one.
        ranks: of the run that saved.
        per_subgroup: parameters in a subgroup of stage 3.
    """
    path = root / f"global_step{int(whole.step)}"
    path.mkdir(parents=True)
    (root / "latest").write_text(path.name)
    stage = int(kind[-1]) if kind[-1].isdigit() else 1
    params = dict(whole.model.named_parameters())
    groups = whole.groups
    of_group = list(range(len(groups)))
    if stage == 3:
        cuts = [
            (g, names[i : i + per_subgroup])
            for g, names in enumerate(groups)
            for i in range(0, len(names), per_subgroup)
        ]
        groups, of_group = [names for _, names in cuts], [g for g, _ in cuts]
    param_groups = [
        {**setting, "params": [i for i, g in enumerate(of_group) if g == index]}
        for index, setting in enumerate(whole.settings)
    ]

    def flats(key: str, *, padded: bool) -> list[list[Tensor]]:
        def whole_of(name: str) -> Tensor:
            return params[name].detach() if key == "fp32" else whole.states[name][key]

        cut = _each if stage == 3 else _joined
        return [cut([whole_of(name) for name in names], ranks, padded) for names in groups]

    states = {key: flats(key, padded=True) for key in ("exp_avg", "exp_avg_sq")}
    fp32 = flats("fp32", padded=False)
    for rank in range(ranks):
        inner = {
            "state": {
                i: {"step": torch.tensor(whole.step), **{k: s[i][rank] for k, s in states.items()}}
                for i in range(len(groups))
            },
            "param_groups": param_groups,
        }
        optim = {
            "loss_scaler": LossScaler(),
            "overflow": False,
            "partition_count": ranks if stage == 3 else [ranks] * len(groups),
            "zero_stage": stage,
        }
        mine = [flat[rank] for flat in fp32]
        if stage == 3:
            optim |= {"optimizer_state_dict": inner, "fp32_flat_groups": mine}
        else:
            optim |= {"base_optimizer_state": inner, "single_partition_of_fp32_groups": mine}
        if kind.startswith("universal"):
            if rank == 0:
                _write_universal(path / "zero", whole, groups, optim, stage)
        else:
            torch.save(
                {"optimizer_state_dict": optim, "ds_version": "0.19.6"},
                path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            )
        if stage == 3 or rank == 0:
            name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
            state = _model_state(whole, groups, stage, rank, ranks)
            torch.save(state, path / f"{name}_model_states.pt")
    return path


def _model_state(whole: Whole, groups: Groups, stage: int, rank: int, ranks: int) -> dict[str, Any]:
    model = whole.model
    params = dict(model.named_parameters())
    names = {id(param): name for name, param in params.items()}
    buffers = [name for name, _ in model.named_buffers()]
    frozen = {name: param.detach() for name, param in params.items() if not param.requires_grad}
    module = {
        name: torch.empty(0)
        if stage == 3 and name not in buffers
        else value.detach().half().float()
        for name, value in model.state_dict().items()
    }
    module |= {
        name: value for name, value in model.state_dict().items() if name in (*buffers, *frozen)
    }
    return {
        "module": module,
        "buffer_names": buffers,
        "optimizer": None,
        "param_shapes": [OrderedDict((n, params[n].shape) for n in names_) for names_ in groups],
        "frozen_param_shapes": {n: p.shape for n, p in frozen.items()} if stage > 1 else None,
        "frozen_param_fragments": {
            n: _each([p], ranks, False)[rank] if stage == 3 else p for n, p in frozen.items()
        }
        if stage > 1
        else None,
        "shared_params": {
            name: names[id(param)]
            for name, param in model.named_parameters(remove_duplicate=False)
            if names[id(param)] != name
        },
        "lr_scheduler": {"last_batch_iteration": int(whole.step) - 1},
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": set(),
        "skipped_steps": 0,
        "global_steps": int(whole.step),
        "global_samples": 6 * int(whole.step),
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "ds_config": {
            "optimizer": {"type": "AdamW"},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        },
        "ds_version": "0.19.6",
        **whole.extra,
    }


def _joined(tensors: list[Tensor], ranks: int, padded: bool) -> list[Tensor]:
    flat = torch.cat([each.reshape(-1) for each in tensors])
    own = 2 * math.ceil(flat.numel() / (2 * ranks))  # each rank's part is aligned
    parts = [flat[rank * own : (rank + 1) * own].clone() for rank in range(ranks)]
    if padded:
        parts = [torch.cat([p, torch.full((own - p.numel(),), 7.0)]) for p in parts]
    return parts


def _each(tensors: list[Tensor], ranks: int, padded: bool) -> list[Tensor]:
    rows = []
    for each in tensors:
        own = math.ceil(each.numel() / ranks)
        padding = torch.full((own * ranks - each.numel(),), 7.0)
        rows.append(torch.cat([each.reshape(-1), padding]).view(ranks, own))
    return [torch.cat([row[rank] for row in rows]) for rank in range(ranks)]


def _write_universal(
    path: Path, whole: Whole, groups: Groups, optim: dict[str, Any], stage: int
) -> None:
    params = dict(whole.model.named_parameters())
    for name in (name for names in groups for name in names):
        (path / name).mkdir(parents=True)
        for key, value in {"fp32": params[name].detach(), **whole.states[name]}.items():
            content = value.reshape(-1).clone() if stage == 3 else {"param": value}
            torch.save(content, path / name / f"{key}.pt")
        if stage != 3:
            torch.save(torch.tensor(whole.step), path / name / "step.pt")
    if stage != 3:
        optim = {**optim, "param_groups": optim["base_optimizer_state"]["param_groups"]}
        del optim["base_optimizer_state"], optim["single_partition_of_fp32_groups"]
    torch.save(optim, path / "optimizer_state.pt")
