"""Ranks that start, and cannot meet or do not agree."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import torchloom
from faults.matrix.programs.rank import Branches, Rank


def meets(rank: Rank) -> None:
    """Initialize, from the environment and the config as the case has them."""
    rank.mark()
    rank.start()
    rank.step()
    rank.finish()


def has_another_model(rank: Rank) -> None:
    rank.mark()
    model = Branches(rank.setup["width"], num_layers=5 if rank.rank else 4)
    torchloom.initialize(model=model, config=rank.config())


def brings_another_optimizer(rank: Rank) -> None:
    """The caller's own optimizer has another rate, kind or grouping on rank 1."""
    rank.mark()
    model, what = rank.make_model(), rank.arguments["what"] if rank.rank else ""
    params = list(model.parameters())
    groups = [{"params": params[:2]}, {"params": params[2:]}] if what == "groups" else params
    kind = torch.optim.SGD if what == "kind" else torch.optim.AdamW
    optimizer = kind(groups, lr=2e-2 if what == "rate" else 1e-2)
    torchloom.initialize(model=model, optimizer=optimizer, config=rank.config())


def brings_a_mesh(rank: Rank) -> None:
    shape = tuple(rank.arguments["shape"])
    rank.mark()
    if len(shape) == 3:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b", "c"))
    else:
        mesh = DeviceMesh("cpu", list(range(shape[0])))
    torchloom.initialize(model=rank.make_model(), config=rank.config(), mesh=mesh)
