"""What traces read of a model is compared by each call: a model that was changed while it lives is noticed, unfrozen."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch
from torch import nn

from serve.models import BATCH, rows
from torchloom.errors import ArtifactError, ContractError
from torchloom.serve import Contract, build, load

X = torch.randn(3, 16)
SETTINGS = {"shift": 1.0}


@dataclasses.dataclass
class Config:
    scale: float = 2.0
    names: list[str] = dataclasses.field(default_factory=lambda: ["a", "b"])


class Adapted(nn.Module):
    """Picks one of several layers by name, as libraries of adapters do."""

    limit = 3

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"one": nn.Linear(16, 16), "other": nn.Linear(16, 16)})
        self.parts = nn.ModuleList([nn.ReLU(), nn.Tanh()])
        self.head = nn.Linear(16, 16)
        self.drop = nn.Dropout(0.5)
        self.active = "one"
        self.scaling = {"one": 0.5, "other": 2.0}
        self.order = [1, 2]
        self.config = Config()
        self.space = types.SimpleNamespace(deep=Config())
        self.extra: nn.Module | None = None
        self.register_buffer("shift", None)

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        x = self.layers[self.active](x) * self.scaling[self.active] + SETTINGS["shift"]
        x = self.drop(self.head(x)) * self.config.scale + self.space.deep.scale
        x = x + sum(self.order) + len(self.config.names) + self.limit + self.bonus()
        if self.extra is not None:
            x = self.extra(x)
        if hasattr(self, "debug"):
            x = x * 2
        return x if self.shift is None else x + self.shift

    def bonus(self):
        return 1


def model():
    torch.manual_seed(0)
    return Adapted().eval()


EDITS = {
    "a text": lambda m: setattr(m, "active", "other"),
    "an attribute of a config": lambda m: setattr(m.config, "scale", 3.0),
    "a part where none was": lambda m: setattr(m, "extra", nn.ReLU().eval()),
    "a part more": lambda m: m.parts.append(nn.ReLU()),
    "a part that is gone": lambda m: m.layers.pop("one"),
    "a buffer where none was": lambda m: m.register_buffer("shift", torch.ones(16)),
    "forward itself": lambda m: setattr(m, "forward", lambda x: x * 2),
    "an attribute that was not there": lambda m: setattr(m, "debug", True),
    "a method, overridden": lambda m: setattr(m, "bonus", lambda: 2),
    "a hook of a part": lambda m: m.head.register_forward_hook(lambda *_: _[-1] * 2),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_a_call_after_a_change_is_refused(edit, tmp_path_factory):
    store = tmp_path_factory.getbasetemp() / "read-values"  # one program for all edits
    first, second = model(), model()
    with torch.no_grad():
        built = build(first, rows(), backend="eager", store=store)
        for program, its in ((built, first), (load(store, second, rows()), second)):
            torch.testing.assert_close(program(X), its(X))
            edit(its)
            for _ in range(2):
                with pytest.raises(ContractError, match="the model has changed since") as error:
                    program(X)
            assert "\n" not in str(error.value)
        with pytest.raises(ArtifactError):
            load(store, second, rows())


def test_a_global_that_was_read_is_noticed(monkeypatch):
    with torch.no_grad():
        program = build(model(), rows(), backend="eager")
        monkeypatch.setitem(SETTINGS, "shift", 2.0)
        with pytest.raises(ContractError, match="SETTINGS"):
            program(X)


def test_what_the_trace_did_not_read_or_what_reads_the_same_does_no_harm():
    its = model()
    with torch.no_grad():
        program = build(its, rows(), backend="eager")
        its.note, its.scaling["third"], its.config.comment = "x", 1.0, "y"
        its.head = nn.Linear(16, 16).eval()
        its.config, its.scaling, its.order = Config(), dict(its.scaling), list(its.order)
        torch.testing.assert_close(program(X), its(X))
        its.scaling["one"] = 0.125  # of the new dict
        with pytest.raises(ContractError, match="scaling"):
            program(X)
        its.scaling["one"] = 0.5
        torch.testing.assert_close(program(X), its(X))
        assert program.live.holds()  # so the short way is taken again


class Lazy(nn.Module):
    """Puts constants in attributes and containers at its first call, and reads another."""

    def __init__(self) -> None:
        super().__init__()
        self.cos, self.table, self.scale = None, {}, 2.0

    def forward(self, x):
        if self.cos is None:
            self.cos = torch.arange(16.0).cos()
        if 16 not in self.table:
            self.table[16] = torch.arange(16.0).sin()
        return x * self.cos * self.scale + self.table[16]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_what_a_program_writes_itself_is_no_change(backend):
    its, twin = Lazy().eval(), Lazy().eval()
    with torch.no_grad():
        program = build(its, rows(), backend=backend)
        assert its.cos is None
        assert not its.table
        for n in (1, 3, 64, 2):
            x = torch.randn(n, 16)
            torch.testing.assert_close(program(x), twin(x))
        its.scale = 3.0
        with pytest.raises(ContractError, match=r"scale was 2\.0, is 3\.0") as error:
            program(X)
        assert "cos" not in str(error.value)
        its.scale = float("2")
        torch.testing.assert_close(program(X), twin(X))


def test_gradients_follow_weights_that_are_frozen_or_not():
    its = nn.Linear(16, 4).eval()
    program = build(its, Contract({"input": (BATCH, 16)}, grad="grad"), backend="eager")
    for is_wanted in (False, True):
        its.weight.requires_grad_(is_wanted)
        its.weight.grad = None
        try:
            program(X).sum().backward()
        except ContractError:
            continue
        assert (its.weight.grad is not None) is is_wanted
