"""What one rank does alone, and all ranks have to: stopped at that call, which is named, before training mixes with it."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import torchloom
from support.ranks import run_ranks
from torchloom.errors import AgreementError
from torchloom.last_words import last_words
from torchloom.shard import full_state_dict


class Mlp(nn.Sequential):
    """Its forward is a frame of the program's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.ones(2, 8))


def weigh(model: nn.Module) -> None:
    model[0].weight.norm()  # type: ignore[index]


def save(model: nn.Module) -> None:
    model.state_dict()


def gather(model: nn.Module) -> None:
    full_state_dict(model)


CASES = [
    (evaluate, 3, None, "without gradients"),
    (evaluate, 2, None, "without gradients"),
    (evaluate, 3, "aot_eager", "without gradients"),
    (weigh, 3, None, "outside of a forward"),
    (save, 2, None, "for whole weights"),
    (gather, 3, None, "for whole weights"),
]


@pytest.mark.parametrize(("act", "stage", "backend", "purpose"), CASES)
def test_a_call_of_rank_0_alone_is_where_it_stops(act, stage, backend, purpose) -> None:
    def fn(rank: int) -> str:
        model = torchloom.shard_model(
            Mlp(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), stage=stage, persistence_threshold=0
        )
        if backend:
            torchloom.compile(model, backend=backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(AgreementError) as told:
            for step in range(3):
                model(torch.ones(2, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 0 and rank == 0:
                    act(model)
        return last_words(told.value, told.tb)

    for rank, words in enumerate(run_ranks(2, fn)):
        sentence, _, places = words.partition("\n  at ")
        assert f"Rank 0 gathers {purpose}, rank 1 does not. Look for a call" in sentence
        assert (f" in {act.__name__}, called at" in places) == (rank == 0), places
        assert sys.prefix not in places
