"""Weights that are put in the place of others: used, or refused by name before anything has run."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from serve.models import BATCH
from torchloom.errors import ContractError
from torchloom.serve import Contract, build, load

DEPTH = 12
X = torch.randn(3, 16)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}  # sums over 12 layers in another order


class Deep(nn.Module):
    """More weights than a call could look at one by one, and tensors that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(DEPTH))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(DEPTH))
        self.head = nn.Linear(16, 16, bias=False)
        self.head.weight = self.layers[0].weight
        self.register_buffer("scale", torch.randn(16))
        self.register_buffer("calls", torch.zeros(()))
        self.plain = torch.randn(16, 16)
        self.held = [torch.randn(16)]

    def forward(self, x):
        self.calls += 1
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + norm(torch.tanh(layer(x)))
        return self.head(x * self.scale + self.held[0]) @ self.plain


def deep() -> Deep:
    torch.manual_seed(0)
    return Deep().eval()


def turned(weight):
    return weight.detach().t().contiguous().t()


def assigned(model, change):
    model.load_state_dict({k: change(v) for k, v in model.state_dict().items()}, assign=True)


def put(module, name, change):
    weight = getattr(module, name)
    weight.data = change(weight.data)


REFUSED = {
    # Each of these was computed with the bits of another dtype, before.
    "one norm in float64": lambda m: m.norms[7].double(),
    "a buffer": lambda m: setattr(m, "scale", m.scale.double()),
    "a tensor in a list": lambda m: m.held.__setitem__(0, m.held[0].double()),
    "strides of one that is assigned": lambda m: setattr(
        m.layers[4], "weight", nn.Parameter(turned(m.layers[4].weight))
    ),
    "tied weights that are two now": lambda m: assigned(m, torch.clone),
    "another part": lambda m: m.layers.__setitem__(2, nn.Sequential(nn.Linear(16, 16), nn.Tanh())),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store that holds the program, so that it is compiled once."""
    folder = tmp_path_factory.mktemp("store")
    with torch.no_grad():
        build(deep(), Contract({"x": (BATCH, 16)}), store=folder)
    return folder


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_other_weights_are_refused_before_anything_ran(change, store):
    model = deep()
    with torch.no_grad():
        program = load(store, model, Contract({"x": (BATCH, 16)}))
        change(model)
        for _ in range(2):
            with pytest.raises(
                ContractError, match="the model has changed since it was compiled: "
            ):
                program(X)
    assert model.calls == 0


@pytest.mark.parametrize("name", ["a buffer", "another part"])
def test_eager_is_asked_for_other_weights(name, store):
    model, change = deep(), REFUSED[name]
    with torch.no_grad():
        program = load(store, model, Contract({"x": (BATCH, 16)}), out_of_range="eager")
        change(model)
        try:
            wanted = copy.deepcopy(model)(X)
        except RuntimeError:
            return  # dtypes that eager does not take either
        try:
            torch.testing.assert_close(program(X), wanted, **CLOSE)
        except ContractError as error:  # found out while the model was being read
            assert isinstance(error.__cause__, (KeyError, AttributeError, TypeError))


USED = {
    "data": lambda m: put(m.norms[3], "weight", torch.exp),
    "a place in another tensor": lambda m: put(
        m.layers[3], "weight", lambda v: torch.cat([v.new_zeros(1), v.flatten()])[1:].view(16, 16)
    ),
    "no gradients": lambda m: m.requires_grad_(False),
    "weights that are tied now": lambda m: setattr(m.layers[3], "weight", m.layers[4].weight),
}


@pytest.mark.parametrize("change", USED.values(), ids=USED)
def test_weights_that_look_alike_are_used(change, store):
    model = deep()
    with torch.no_grad():
        program = load(store, model, Contract({"x": (BATCH, 16)}))
        change(model)
        torch.testing.assert_close(program(X), model(X), **CLOSE)
        with torch.inference_mode():
            torch.testing.assert_close(program(X), model(X), **CLOSE)


class Ties(nn.Module):
    """One object under two names, each of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 16)
        self.outer.weight = self.inner.weight
        self.again = self.inner
        self.register_buffer("scale", torch.randn(16))
        self.register_buffer("scale_too", self.scale)
        self.plain = torch.randn(16)
        self.other = self.plain
        self.kept = [self.plain]

    def forward(self, x):
        x = self.outer(torch.relu(self.inner(x))) + self.again(x)
        x = x * self.scale + self.scale_too
        return x * self.plain + self.other * self.kept[0]


def one_more(part):
    made = copy.deepcopy(part)
    for weight in made.parameters():
        weight.data += 1
    return made


UNTIED = {
    "a part with a tied weight": lambda m: setattr(m, "outer", one_more(m.outer)),
    "a buffer": lambda m: setattr(m, "scale_too", torch.randn(16)),
}


@pytest.mark.parametrize("change", UNTIED.values(), ids=UNTIED)
def test_names_for_one_object_are_told_apart(change, tmp_path):
    torch.manual_seed(0)
    model = Ties().eval()
    with torch.no_grad():
        built = build(model, Contract({"x": (BATCH, 16)}), backend="eager", store=tmp_path)
        loaded = load(tmp_path, model)
        for program in (built, loaded):
            torch.testing.assert_close(program(X), model(X))
        change(model)
        for program in (built, loaded):
            with pytest.raises(
                ContractError, match="the model has changed since it was compiled: "
            ):
                program(X)
