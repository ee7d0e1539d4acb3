"""Places say what Dynamo's expressions say, and nothing else."""

from __future__ import annotations

import collections
import dataclasses
import math
import weakref
from typing import NamedTuple

import pytest
import torch
from torch import nn

from serve.models import BATCH
from torchloom._torch.full_capture import GuardOn
from torchloom.pieces.places import NoPlaceError, place_of, value_at
from torchloom.serve import Contract, build
from torchloom.serve.model.facts import Asker, facts_of


class Pair(NamedTuple):
    one: int
    two: int


@dataclasses.dataclass
class Data:
    field: int = 3


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 3)
        self.table = {"a": 1, 2: "b", (1, 2): "c", "k": 2}
        self.items = [1, 2, 3]
        self.pair, self.data = Pair(1, 2), Data()
        self.ordered = collections.OrderedDict(x=5)
        setattr(self, "not a name", 7)

    def forward(self, x):
        return x


HOLDER = Holder()
REFERENT = nn.Linear(1, 1)
SCOPE = {
    "L": {"self": HOLDER, "iterator": iter((4, 5, 6))},
    "G": {"math": math, "reference": weakref.ref(REFERENT), "calls": lambda: 1 / 0},
}


@pytest.mark.parametrize(
    "expression",
    [
        "L['self'].forward()",
        "L['self'].inner(L['x'])",
        "G['os'].system('true')",
        "L['self'].items[G['f']()] + 1",
        "(lambda: L['self'])()",
        "__import__(L['self'].name)",
    ],
)
def test_what_calls_something_is_no_place(expression):
    with pytest.raises(NoPlaceError):
        place_of(expression, {})
    found, unwritten = facts_of([GuardOn("EQUALS_MATCH", expression)], Asker(SCOPE), SCOPE, [])
    assert found == {}
    assert len(unwritten) == 1


@pytest.mark.parametrize("expression", ["random_value_0", "x +", "", "SYNTHETIC['a']"])
def test_what_only_the_trace_had_is_nowhere(expression):
    assert place_of(expression, {}) is None


@pytest.mark.parametrize(
    "place",
    [
        [["eval", "1"]],
        [["argument", "self"], ["call", "forward"]],
        [["argument", "self"], ["applied", "eval"]],
        [["argument", "self"], ["submodule", "inner"]],
        "L['self']",
        [],
        [["global", "calls"], ["applied", "referent"]],
    ],
)
def test_other_steps_are_refused(place):
    with pytest.raises((ValueError, TypeError)):
        value_at(place, SCOPE)


def test_a_program_that_relies_on_what_has_no_place_runs_and_is_not_stored(tmp_path, monkeypatch):
    def unwritable(*args, **kwargs):
        found, _ = facts_of(*args, **kwargs)
        return found, ["self.table[b'x']"]

    monkeypatch.setattr("torchloom.serve.builder.trace.facts_of", unwritable)
    program = build(
        nn.Linear(16, 4).eval(), Contract({"input": (BATCH, 16)}), backend="eager", store=tmp_path
    )
    with torch.no_grad():
        assert program(torch.ones(3, 16)).shape == (3, 4)
    assert "self.table[b'x']" in program.variants[0].why_not_stored
    assert not list(tmp_path.glob("entries/*"))
