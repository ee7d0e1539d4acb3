"""Wrappers and parametrizations, which change the class of a module."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from torchloom.compiler import CompileConfig
from torchloom.compiler.wrapper import CompiledModuleWrapper
from torchloom.errors import CompileError

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


def test_a_wrapper_that_is_parametrized_is_refused_and_one_of_a_parametrized_module_runs() -> None:
    plain, model = pair()
    parametrizations.weight_norm(model)
    for use in (lambda: model(X), lambda: copy.deepcopy(model), lambda: pickle.dumps(model)):
        with pytest.raises(CompileError, match="parametrize the module first, then wrap it"):
            use()
    parametrizations.weight_norm(plain)
    assert torch.equal(wrapped(plain)(X), plain(X))
    assert not isinstance(getattr(nn.Linear, "weight", None), property)


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
