"""Own loops over a mesh (replicate, shard): norms, states, checkpoints and exports as of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import torchloom
from support.models import tokens, tricky
from support.pool import run_ranks
from torchloom.shard import full_state_dict, sharded_state_dict


def train(model: nn.Module, rows: range) -> tuple[torch.optim.Optimizer, list[float]]:
    """Take three steps on the batches of these ranks; return the norms before clipping."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    norms = []
    for step in range(3):
        torch.stack([model(tokens(step, row)) for row in rows]).mean().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return optimizer, norms


def test_replicas_of_shards_are_as_one_process(tmp_path) -> None:
    reference = tricky()
    optimizer, norms = train(reference, range(4))
    states = optimizer.state_dict()["state"]

    def fn(rank: int):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = torchloom.shard_model(tricky(), mesh=mesh, persistence_threshold=20)
        own, found = train(model, range(rank, rank + 1))
        dcp.save({"model": sharded_state_dict(model)}, checkpoint_id=tmp_path / "dcp")
        torchloom.save_model(model, tmp_path / "export", max_shard_size=1500)
        plain = tricky(seed=3).state_dict()
        dcp.load({"model": plain}, checkpoint_id=tmp_path / "dcp")
        return found, own.state_dict()["state"], full_state_dict(model), plain

    for found, own, whole, read in run_ranks(4, fn):
        assert found == pytest.approx(norms, rel=1e-5)
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(whole[name], value, rtol=1e-5, atol=1e-6)
            assert torch.equal(read[name], whole[name])
        for index, state in states.items():
            torch.testing.assert_close(own[index], state, rtol=1e-4, atol=1e-7)
