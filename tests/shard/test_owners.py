"""The parameters of a model that changes between steps: looked up as if each step walked through all modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import torchloom
from support.ranks import run_ranks
from torchloom.errors import ShardError
from torchloom.shard import Owners, owners_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3), nn.LayerNorm(3)
        self.scale = nn.Parameter(torch.ones(3))


class Odd(Block):
    """Hides a parameter once it is told to."""

    hides = False

    def named_parameters(self, *args, **kwargs):
        for name, param in super().named_parameters(*args, **kwargs):
            if not (self.hides and name == "scale"):
                yield name, param


def make(kind: type[nn.Module] = Block) -> nn.Module:
    model = nn.Sequential(kind(), nn.Linear(3, 3)) if kind is Block else kind()
    torchloom.shard_model(model, stage=1)
    return model


def first(model: nn.Sequential) -> nn.Module:
    return model[0]


def renamed(model: nn.Sequential) -> None:
    block = model[0]
    block._parameters["factor"] = block._parameters.pop("scale")


def moved(model: nn.Sequential) -> None:
    model._modules = {"block": model[0], "1": model[1]}


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "nothing": lambda model: None,
    "assigned": lambda model: setattr(first(model), "scale", nn.Parameter(torch.zeros(3))),
    "added": lambda model: setattr(first(model), "more", nn.Parameter(torch.zeros(3))),
    "removed": lambda model: delattr(first(model), "scale"),
    "renamed": renamed,
    "a module replaced": lambda model: setattr(first(model), "norm", nn.LayerNorm(3)),
    "a module added": lambda model: model.append(nn.Linear(3, 3)),
    "a module without parameters added": lambda model: model.append(nn.Tanh()),
    "a module in a new one": lambda model: model.append(nn.Sequential(nn.Linear(3, 3))),
    "a module removed": lambda model: delattr(first(model), "norm"),
    "a module moved": moved,
    "tied": lambda model: setattr(model[1], "bias", model[0].linear.bias),
}


def told(look: Callable[[], dict[str, nn.Parameter]]) -> object:
    try:
        return {name: id(param) for name, param in look().items()}
    except ShardError as error:
        return str(error)


def see(rank: int) -> list[str]:
    """Return the changes after which the two ways of looking differ."""
    differ = []
    for name, change in CHANGES.items():
        model = make()
        owners = Owners(model)
        before = owners()
        assert told(owners) == told(partial(owners_of, model))
        assert owners() is before
        change(model)
        seen = [(told(owners), told(partial(owners_of, model))) for _ in range(2)]
        if any(found != wanted for found, wanted in seen):
            differ.append(name)
    return differ


def test_every_change_is_seen() -> None:
    assert run_ranks(1, see) == [[]]


def hide(rank: int) -> str:
    model = make(Odd)
    owners = Owners(model)
    assert "scale" in owners()
    model.hides = True
    with pytest.raises(ShardError) as error:
        owners()
    return str(error.value)


def test_a_class_with_a_walk_of_its_own_is_asked_each_time() -> None:
    (text,) = run_ranks(1, hide)
    assert "removed: scale" in text


def unshard(rank: int) -> tuple[str, bool]:
    model = make()
    owners = Owners(model)
    owners()
    torchloom.shard.unshard(model)
    text = told(owners)
    torchloom.shard_model(model, stage=0)
    return str(text), told(owners) == told(partial(owners_of, model))


def test_a_model_that_is_whole_again_has_no_owners() -> None:
    ((text, is_same),) = run_ranks(1, unshard)
    assert "is not sharded" in text
    assert is_same
