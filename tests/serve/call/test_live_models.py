"""Models go on living after they were compiled: what changes in them is noticed by the next call, or does no harm."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from serve.models import BATCH, rows
from torchloom.errors import ContractError
from torchloom.serve import Contract, build, load

X = torch.randn(3, 16)


def layered() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


def served(model):
    return build(model, Contract({"input": (BATCH, 16)}), backend="eager")


@pytest.mark.parametrize(
    ("place", "kind"), [("", "register_forward_hook"), ("1", "register_forward_pre_hook")]
)
def test_hooks_that_come_later_are_noticed(place, kind):
    model = layered()
    with torch.no_grad():
        program, wanted = served(model), model(X)
        handle = getattr(model.get_submodule(place), kind)(
            (lambda module, args: (args[0] * 2,))
            if "pre" in kind
            else (lambda module, args, found: found * 2)
        )
        for _ in range(2):
            with pytest.raises(ContractError, match="other hooks than when it was compiled"):
                program(X)
        handle.remove()
        torch.testing.assert_close(program(X), wanted)


def test_a_hook_on_all_modules_is_noticed():
    model = layered()
    with torch.no_grad():
        program = served(model)
        handle = nn.modules.module.register_module_forward_hook(lambda m, args, found: found * 2)
        try:
            with pytest.raises(ContractError, match="other hooks"):
                program(X)
        finally:
            handle.remove()
        torch.testing.assert_close(program(X), model(X))


class Sum(nn.Module):
    def forward(self, x, y=None, *, scale=1.0):
        return (x if y is None else x + y) * scale


@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("names", [("x",), ("x", "y")])
def test_a_model_with_hooks_is_called_either_way(keyword, names, tmp_path):
    def model():
        made = Sum().eval()
        made.register_forward_hook(lambda module, args, found: found * len(args))
        made.register_forward_pre_hook(lambda module, args: (args[0] + 1, *args[1:]))
        return made

    contract = Contract(dict.fromkeys(names, (BATCH, 16)), fixed={"scale": 3.0})
    given, hooked = dict.fromkeys(names, X), model()
    with torch.no_grad():
        program = build(hooked, contract, backend="eager", store=tmp_path)
        for each in (program, load(tmp_path, model(), contract)):
            found = each(**given) if keyword else each(*given.values())
            torch.testing.assert_close(found, hooked(*given.values(), scale=3.0))


class Adds(nn.Module):
    def forward(self, x, y):
        x.add_(1)
        return x + y


def test_arguments_that_share_memory_are_refused_where_they_are_written():
    model, base = Adds().eval(), torch.randn(8, 16)
    contract = Contract({"x": (BATCH, 16), "y": (BATCH, 16)})
    with torch.no_grad():
        program = build(model, contract, backend="inductor")
        for x, y in ((base[:3], base[2:5]), (base[:3], base[:3]), (base[2:5], base[:3])):
            with pytest.raises(ContractError, match="'x' and 'y' share memory"):
                program(x, y)
        x, y = base[:3], base[3:6]  # parts of one tensor that do not touch
        wanted = model(x.clone(), y)
        torch.testing.assert_close(program(x, y), wanted)


def test_views_that_change_what_is_read_are_refused():
    with torch.no_grad():
        program = served(layered())
        with pytest.raises(ContractError, match=r"call \.resolve_neg\(\) on it first"):
            program(torch._neg_view(X))


def test_another_default_dtype_is_noticed():
    class Makes(nn.Module):
        def forward(self, x):
            return x * torch.ones(16)

    with torch.no_grad():
        program = build(Makes().eval(), rows(), backend="inductor")
        torch.set_default_dtype(torch.float64)
        try:
            with pytest.raises(ContractError, match=r"default dtype is torch\.float64"):
                program(X)
        finally:
            torch.set_default_dtype(torch.float32)
        torch.testing.assert_close(program(X), X)


class Weighs(nn.Module):
    def forward(self, x, weights=(1, 2), scale=2.5, names=None):
        return x * sum(weights) * scale


def test_equal_values_of_fixed_arguments_and_defaults_are_the_same():
    model = Weighs().eval()
    fixed = [1, [2, 3]]
    with torch.no_grad():
        program = build(model, Contract({"x": (BATCH, 16)}), backend="eager")
        for more in ({}, {"weights": (1, 2)}, {"scale": float("2.5")}, {"names": None}):
            torch.testing.assert_close(program(X, **more), model(X))
        for more in (
            {"weights": (1, 3)},
            {"weights": [1, 2]},
            {"weights": (1.0, 2)},
            {"scale": 3.0},
        ):
            with pytest.raises(ContractError):
                program(X, **more)
        other = build(model, Contract({"x": (BATCH, 16)}, fixed={"names": fixed}), backend="eager")
        torch.testing.assert_close(other(X, names=[1, [2, 3]]), model(X))
        fixed[1].append(4)  # what the caller does with his own list later does not count
        with pytest.raises(ContractError):
            other(X, names=fixed)


def test_a_copy_of_a_program_owns_its_weights():
    with torch.no_grad():
        model = layered()
        program, wanted = served(model), model(X)
        twin = copy.deepcopy(program)
        model[0].weight.zero_()
        torch.testing.assert_close(twin(X), wanted)
        torch.testing.assert_close(program(X), model(X))
        twin.target.module[2].weight.zero_()
        assert not torch.equal(twin(X), program(X))
