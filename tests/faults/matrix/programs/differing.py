"""Programs that differ between ranks. Tensors have equal sizes, so only names tell messages apart."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import torchloom
from faults.matrix.programs.rank import Rank

_STEP = 3
"""The step in which a rank does something else."""


def evaluates_at_another_step(rank: Rank) -> None:
    engine = rank.start()
    for index in range(10):
        if index == _STEP + 2 * rank.rank:
            rank.mark()
            with torch.no_grad():
                engine(rank.batch())
        rank.step(index)
    rank.finish()


def evaluates_alone(rank: Rank) -> None:
    engine = rank.start()
    for index in range(8):
        if index == _STEP and rank.rank == 1:
            rank.mark()
            with torch.no_grad():
                engine(rank.batch())
        rank.step(index)
    rank.finish()


def calls_alone(rank: Rank) -> None:
    """Rank 0 alone calls what all ranks have to call, in the middle or as the last thing."""
    engine = rank.start()
    is_last = rank.arguments["last"]
    for index in range(_STEP + 1):
        if index == _STEP and rank.rank == 0:
            rank.mark()
            if not is_last:
                _call(rank.arguments["what"], rank, engine)
        rank.step(index)
    if is_last and rank.rank == 0:
        _call(rank.arguments["what"], rank, engine)
    if not is_last:
        rank.finish()


def _call(what: str, rank: Rank, engine: Any) -> None:
    if what == "state_dict":
        rank.model.state_dict()
    elif what == "gathered":
        with torchloom.shard.gathered(rank.model, ["layers.1.weight"]):
            pass
    elif what == "save":
        engine.save_checkpoint(rank.folder)
    elif what == "load":
        engine.load_checkpoint(rank.folder)
    else:
        torchloom.clip_grad_norm_(rank.model, 1.0)


def loads_alone(rank: Rank) -> None:
    """As `calls_alone`, with a checkpoint that is there."""
    engine = rank.start()
    rank.step()
    engine.save_checkpoint(rank.folder)
    rank.mark()
    if rank.rank == 0:
        engine.load_checkpoint(rank.folder)
    rank.step(1)
    rank.finish()


def another_order(rank: Rank) -> None:
    rank.start()
    for index in range(6):
        differs = index == _STEP and rank.rank == 1
        if differs:
            rank.mark()
        rank.step(index, (1, 0, 2, 3) if differs else (0, 1, 2, 3))
    rank.finish()


def another_layer(rank: Rank) -> None:
    """A branch that is picked by the data of a rank."""
    rank.start()
    for index in range(6):
        differs = index == _STEP and rank.rank == 1
        if differs:
            rank.mark()
        rank.step(index, (0, 1, 3) if differs else (0, 1, 2))
    rank.finish()


def one_optimizer_step_more(rank: Rank) -> None:
    engine = rank.start()
    for index in range(_STEP + 2):
        if index == _STEP and rank.rank == 1:
            rank.mark()
            engine.optimizer.step()
        rank.step(index)
    rank.finish()


def loads_weights_alone(rank: Rank) -> None:
    """Rank 0 alone takes other weights, as many programs that were written for one process do."""
    engine = rank.start()
    weights = {name: value + 1 for name, value in rank.make_model().state_dict().items()}
    rank.step()
    rank.mark()
    if rank.rank == 0:
        engine.module.load_state_dict(weights)
    rank.step(1)
    rank.finish()


def one_micro_step_more(rank: Rank) -> None:
    engine = rank.start()
    for index in range(6):
        if index == _STEP and rank.rank == 0:
            rank.mark()
            engine.backward(engine(rank.batch()))
        rank.step(index)
    rank.finish()


def leaves_a_step_out(rank: Rank) -> None:
    engine = rank.start()
    for index in range(6):
        engine.backward(engine(rank.batch(index)))
        if index == _STEP and rank.rank == 0:
            rank.mark()
            engine.zero_grad()
            continue
        engine.step()
    rank.finish()


def own_loop_leaves_a_step_out(rank: Rank) -> None:
    model = rank.model = torchloom.shard_model(rank.make_model(), stage=rank.setup["stage"],
                                               persistence_threshold=0)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in range(6):
        model(rank.batch(index)).backward()
        torchloom.clip_grad_norm_(model, 1.0)
        if index == _STEP and rank.rank == 0:
            rank.mark()
        else:
            optimizer.step()
        optimizer.zero_grad()
    rank.finish()


def own_loop_clips_alone(rank: Rank) -> None:
    model = rank.model = torchloom.shard_model(rank.make_model(), persistence_threshold=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in range(6):
        model(rank.batch(index)).backward()
        if index == _STEP and rank.rank == 0:
            rank.mark()
            torchloom.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    rank.finish()


def recompile_limit_of_one_rank(rank: Rank) -> None:
    """Sizes change on all ranks alike; rank 1 may compile one graph only, and runs eagerly then."""
    if rank.rank == 1:
        torch._dynamo.config.recompile_limit = 1
    rank.start(compile_kwargs={"dynamic": False})
    for index in range(6):
        if index == _STEP - 1:
            rank.mark()
        rank.step(index, rows=2 + index // 2)
    rank.finish()


class _Two(nn.Module):
    """Holds two models, so that a rank tells the weights of both."""

    def __init__(self, *models: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(models)


def two_engines_in_another_order(rank: Rank) -> None:
    """Two models with equal names in one process, as in a GAN; rank 1 trains them the other way round."""
    one = rank.start()
    model = rank.model
    other = rank.start()
    rank.model = _Two(model, rank.model)
    for index in range(6):
        engines = [one, other]
        if index == _STEP and rank.rank == 1:
            rank.mark()
            engines.reverse()
        for engine in engines:
            engine.backward(engine(rank.batch(index)))
            engine.step()
    rank.finish()


def user_collective_alone(rank: Rank) -> None:
    rank.start()
    for index in range(6):
        if index == _STEP and rank.rank == 1:
            rank.mark()
            if rank.arguments["what"] == "barrier":
                dist.barrier()
            else:
                dist.all_reduce(torch.ones(16))
        rank.step(index)
    rank.finish()


def one_rank_of_a_half_differs(rank: Rank) -> None:
    """Hybrid sharding over 4 ranks; rank 3 takes another layer, or evaluates alone."""
    engine = rank.start()
    for index in range(6):
        differs = index == _STEP and rank.rank == 3
        if differs:
            rank.mark()
            if rank.arguments["what"] == "evaluates":
                with torch.no_grad():
                    engine(rank.batch(index))
                differs = False
        rank.step(index, (0, 1, 3) if differs else (0, 1, 2))
    rank.finish()


def user_collective_as_the_last_thing(rank: Rank) -> None:
    rank.start()
    rank.step()
    rank.mark()
    if rank.rank == rank.arguments["who"]:
        dist.barrier()
