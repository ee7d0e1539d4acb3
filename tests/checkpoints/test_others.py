"""Checkpoints of the engine as others see them: names and shapes of `model.state_dict()`, read and written by DCP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from support import ranks
from support.models import tricky
from support.pool import run_ranks
from support.runs import assert_equal, make_engine, train, weights
from torchloom._torch.dcp import StoredChunk, StoredTensor
from torchloom.checkpoints.contents import Contents
from torchloom.errors import CheckpointError


def saved(root: Any, stage: int, **rest: Any) -> Any:
    """Train, save and return whole weights and AdamW's averages; called on each rank."""
    engine, model = make_engine(stage, **rest)
    train(engine, dist.get_rank(), 2)
    path = engine.save_checkpoint(root)
    return path, weights(model)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process reads
@pytest.mark.parametrize(("stage", "num_ranks"), [(3, 2), (3, 3), (1, 2), (0, 2)])
def test_plain_torch_reads_it_by_the_names_of_state_dict(tmp_path, stage, num_ranks) -> None:
    path, whole = ranks.run_ranks(num_ranks, lambda rank: saved(tmp_path, stage))[0]
    model = tricky(seed=7)
    read = model.state_dict()
    assert "head.weight" in read  # tied
    dcp.load(read, checkpoint_id=path, no_dist=True)  # strictly: each name, with its shape
    assert_equal(read, whole)
    dcp_to_torch_save(path, tmp_path / "one.pt")
    found = torch.load(tmp_path / "one.pt", weights_only=True)
    assert_equal({name: found[name] for name in whole}, whole)
    averages = found["optim"]["state"]
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert trained <= averages.keys()
    for name in trained:
        assert averages[name]["exp_avg"].shape == whole[name].shape
        assert averages[name]["step"].item() == 2


def test_fsdp2_reads_weights_and_states(tmp_path) -> None:
    def run(rank: int) -> Any:
        engine, model = make_engine(3)
        train(engine, rank, 2)
        path = engine.save_checkpoint(tmp_path)
        peer = tricky(seed=7)
        fully_shard(peer, mesh=init_device_mesh("cpu", (2,)))
        params = [param for param in peer.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(params, lr=1e-2, fused=False)
        state = {**peer.state_dict(), "optim": get_optimizer_state_dict(peer, optimizer)}
        # Groups, such as learning rates, are not in it: those of this optimizer stay.
        dcp.load(state, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=True))
        peer.load_state_dict({name: state[name] for name in peer.state_dict()})
        set_optimizer_state_dict(peer, optimizer, state["optim"], options=StateDictOptions())
        whole = {
            name: value.full_tensor()
            for name, value in peer.state_dict().items()
            if hasattr(value, "full_tensor")
        }
        averages = {
            name: optimizer.state[param]["exp_avg_sq"].full_tensor()
            for name, param in peer.named_parameters()
            if optimizer.state.get(param)
        }
        ours = {
            each.spec.name: engine.optimizer.state[each.param]["exp_avg_sq"]
            for each in engine.local
            if each.param in engine.optimizer.state
        }
        return weights(model), whole, averages, ours

    (expected, whole, averages, first), (*_, second) = run_ranks(2, run)
    assert len(whole) >= 5
    for name, value in whole.items():
        assert torch.equal(value, expected[name]), name
    assert averages.keys() == first.keys()
    for name, value in averages.items():
        held = first[name].flatten()
        if held.numel() < value.numel():  # a shard: the ranks hold it one after the other
            held = torch.cat([held, second[name].flatten()])[: value.numel()]
        assert value.numel() == 0 or value.abs().max() > 0
        assert torch.equal(value.flatten(), held), name


@pytest.mark.parametrize(
    ("offsets", "sizes"),
    [
        ((0, 1), (2, 2)),  # a block inside of rows
        ((0,), (3, 4)),
        ((0, 0, 0), (3, 4)),
        ((2, 0), (3, 4)),  # beyond the last row
        ((-1, 0), (1, 4)),
        ((0, 2), (1, 3)),
    ],
)
def test_parts_that_are_no_range_of_the_tensor_are_refused(tmp_path, offsets, sizes) -> None:
    chunk = StoredChunk(offsets, sizes, "__0_0.distcp", 0, 10)
    contents = Contents(tmp_path, {"model/w": StoredTensor(torch.float32, (3, 4), (chunk,))})
    for read in (
        lambda: list(contents.in_order("model/w")),
        lambda: contents.part("model/w", 0, 12),
    ):
        with pytest.raises(CheckpointError, match="cut in a way that torchloom does not"):
            read()
