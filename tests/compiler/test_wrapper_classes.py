"""Wrappers whose class is changed afterwards, as parametrizations of torch do."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from torchloom.compiler import CompileConfig
from torchloom.compiler.wrapper import CompiledModuleWrapper

CONFIG = CompileConfig(enabled=True, backend="eager")
X = torch.randn(3, 4)


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


def wrapped(module: nn.Module) -> nn.Module:
    return CompiledModuleWrapper(module, CONFIG)


def pair() -> tuple[nn.Linear, nn.Module]:
    torch.manual_seed(0)
    plain = nn.Linear(4, 2)
    return plain, wrapped(copy.deepcopy(plain))


@pytest.mark.parametrize("is_called_before", [False, True])
def test_weight_norm(is_called_before: bool) -> None:
    plain, model = pair()
    if is_called_before:
        assert torch.equal(model(X), plain(X))
    parametrizations.weight_norm(plain)
    parametrizations.weight_norm(model)
    assert torch.allclose(model(X), plain(X))
    for each in (plain, model):
        each.parametrizations.weight.original0.data.mul_(3)
    assert torch.allclose(model(X), plain(X))
    assert list(model.state_dict()) == list(plain.state_dict())
    for each in (plain, model):
        parametrize.remove_parametrizations(each, "weight")
    assert torch.allclose(model(X), plain(X))
    assert isinstance(model.weight, nn.Parameter)


def test_more_parametrizations_come_and_go() -> None:
    plain, model = pair()
    for each in (plain, model):
        parametrize.register_parametrization(each, "weight", Doubled())
    assert torch.allclose(model(X), plain(X))
    for each in (plain, model):
        parametrize.register_parametrization(each, "bias", Doubled())
    assert torch.allclose(model(X), plain(X))
    for each in (plain, model):
        parametrize.remove_parametrizations(each, "weight", leave_parametrized=False)
    assert torch.allclose(model(X), plain(X))


def test_copies_of_a_parametrized_wrapper() -> None:
    plain, model = pair()
    for each in (plain, model):
        parametrize.register_parametrization(each, "weight", Doubled())
    twin = copy.deepcopy(model)
    assert torch.allclose(twin(X), plain(X))
    twin.parametrizations.weight.original.data.zero_()
    assert torch.allclose(model(X), plain(X))
    with pytest.raises(RuntimeError, match="state_dict"):  # torch's own refusal
        pickle.dumps(model)


def test_the_class_of_the_module_itself_stays() -> None:
    _, model = pair()
    parametrizations.weight_norm(model)
    model(X)
    assert not isinstance(getattr(nn.Linear, "weight", None), property)
    assert nn.Linear(4, 2).weight.shape == (2, 4)


def test_a_module_that_is_not_compiled() -> None:
    plain = nn.Linear(4, 2)
    model = CompiledModuleWrapper(copy.deepcopy(plain), CompileConfig(enabled=False))
    parametrizations.weight_norm(model)
    assert torch.allclose(model(X), plain(X))


def test_a_parametrized_module_inside() -> None:
    plain, _ = pair()
    model = wrapped(nn.Sequential(copy.deepcopy(plain)))
    parametrizations.weight_norm(model[0])
    assert torch.allclose(model(X), plain(X))


def test_a_module_that_is_parametrized_itself_behind_its_wrapper() -> None:
    plain, _ = pair()
    module = copy.deepcopy(plain)
    model = wrapped(module)
    parametrize.register_parametrization(module, "weight", Doubled())
    parametrize.register_parametrization(plain, "weight", Doubled())
    assert torch.allclose(model(X), plain(X))
    assert torch.allclose(module(X), plain(X))
