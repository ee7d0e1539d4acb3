"""The literal tables of optimizers and schedules against the torch that is installed."""

from __future__ import annotations

import inspect

import pytest

from torchloom.config import load_config
from torchloom.config.optimizer import DEEPSPEED_ONLY, TABLES
from torchloom.config.scheduler import TORCH

torch = pytest.importorskip("torch")

CLASSES = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
NOT_JSON = {"optimizer", "params", "last_epoch", "scale_fn", "decoupled_weight_decay"}


@pytest.mark.parametrize("name", CLASSES)
def test_optimizer_parameters_are_torchs(name):
    theirs = set(inspect.signature(CLASSES[name]).parameters) - NOT_JSON

    assert set(TABLES[name]) - set(DEEPSPEED_ONLY) == theirs


@pytest.mark.parametrize("name", TORCH)
def test_scheduler_parameters_are_torchs(name):
    signature = inspect.signature(getattr(torch.optim.lr_scheduler, name)).parameters
    ours = set(TORCH[name].table)

    assert ours <= set(signature)
    if name != "OneCycleLR":  # total_steps stands for epochs and steps_per_epoch
        assert ours == set(signature) - NOT_JSON
        needed = {key for key, value in signature.items() if value.default is value.empty}
        assert set(TORCH[name].required) == needed - NOT_JSON


@pytest.mark.parametrize("name", CLASSES)
def test_the_parameters_build_an_optimizer(name):
    params = {"lr": 1e-3, "weight_decay": 0.1}
    section = {"type": name, "params": params | ({"momentum": 0.9} if name == "sgd" else {})}
    config = load_config({"optimizer": section})

    weight = torch.nn.Parameter(torch.ones(3))
    built = CLASSES[config.optimizer.name]([weight], **config.optimizer.params)
    weight.sum().backward()
    built.step()

    assert built.defaults["fused"]
