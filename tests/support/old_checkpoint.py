"""Writes checkpoints as torchloom's first version did: no manifest, metadata pickled by torch."""

from __future__ import annotations

import json
import math
import random

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from torchloom.engine.checkpoints.trained import buffers_of
from torchloom.shard import layout_of, local_shard, owners_of
from torchloom.shard.shards import valid_numel


def save_old(engine, root, tag: str, client_state=None) -> None:
    """Write a checkpoint of version 1; all ranks call."""
    path = root / tag
    path.mkdir(parents=True, exist_ok=True)
    dcp.save(_tensors(engine), checkpoint_id=str(path))
    version, internal, gauss = random.getstate()
    state = {"torch": torch.get_rng_state(), "python": [version, list(internal), gauss]}
    torch.save(state, path / f"rng_rank{dist.get_rank()}.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        stored = dcp.FileSystemReader(str(path)).read_metadata().state_dict_metadata
        (path / "engine.json").write_text(json.dumps(_facts(engine, client_state or {}, stored)))
        (root / "latest").write_text(f"{tag}\n")
    dist.barrier()


def _tensors(engine):
    layout, params = layout_of(engine.module), owners_of(engine.module)
    mesh = DeviceMesh.from_group(engine.world.comm.shard_group(), "cpu")

    def piece(local, numel, shard_numel):
        valid = local[: valid_numel(numel, layout.rank, shard_numel)]
        return DTensor.from_local(
            valid, mesh, [Shard(0)], run_check=False, shape=torch.Size([numel]), stride=(1,)
        )

    found = {}
    for spec in layout:
        local = local_shard(params[spec.name])
        is_piece = spec.mode == "sharded"
        flat = piece(local, spec.numel, spec.shard_numel) if is_piece else local.reshape(-1)
        found[f"model/{spec.name}"] = flat
    for name, buffer in buffers_of(engine.module).items():
        found[f"buffer/{name}"] = buffer
    for each in engine.local:
        for key, value in engine.optimizer.state.get(each.param, {}).items():
            if value.numel() == math.prod(each.shard_shape) and value.dim() == len(
                each.shard_shape
            ):
                numel = math.prod(each.shard_shape)
                flat = (
                    piece(value, each.spec.numel, numel) if each.is_divided else value.reshape(-1)
                )
                value = flat
            found[f"optim/{each.spec.name}/{key}"] = value
    return found


def _facts(engine, client_state, stored):
    layout = layout_of(engine.module)
    names = {id(each.param): each.spec.name for each in engine.local}
    return {
        "format": 1,
        "stage": layout.stage,
        "world_size": dist.get_world_size(),
        "params": {spec.name: list(spec.shape) for spec in layout},
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "micro_steps": engine.micro_steps,
        "scaler": {"scale": 1.0, "num_skipped": 0, "good_steps": 0, "forgiveness": 1},
        "scheduler": None,
        "has_optimizer": bool(engine.optimizer.state),
        "groups": [
            {**group, "params": [names[id(p)] for p in group["params"]]}
            for group in engine.optimizer.param_groups
        ],
        "client_state": client_state,
        "stored": sorted(stored),
    }
