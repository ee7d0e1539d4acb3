"""Places say what Dynamo's expressions say, and nothing else."""

from __future__ import annotations

import collections
import dataclasses
import importlib
import json
import math
import sys
import weakref
from typing import NamedTuple

import pytest
import torch
from torch import nn

from serve.models import BATCH
from torchloom._torch.full_capture import GuardOn
from torchloom.pieces.places import NoPlaceError, place_of, settled, value_at
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
HELPERS = {
    "torch": torch,
    "___odict_getitem": collections.OrderedDict.__getitem__,
    "___namedtuple_fields": lambda value: value._fields,
    "___dataclass_fields": dataclasses.fields,
}
EXPRESSIONS = [
    "L['self']",
    "L['self'].training",
    "L['self']._modules['inner'].out_features",
    "L['self'].inner._parameters['weight'].size()[1]",
    "L['self'].inner.weight.stride()[0]",
    "L['self'].inner.weight.storage_offset()",
    "L['self'].inner.weight.grad",
    "getattr(L['self'], 'not a name')",
    "object.__getattribute__(L['self'], 'items')",
    "L['self'].table['a']",
    "L['self'].table[2]",
    "L['self'].table[(1, 2)]",
    "L['self'].table[list(dict.keys(L['self'].table))[0]]",
    "dict.__getitem__(L['self'].table, 'a')",
    "dict.__getitem__(L['self'].table, list(dict.keys(L['self'].table))[1])",
    "list(dict.keys(L['self'].table))[3]",
    "list.__getitem__(L['self'].items, -1)",
    "L['self'].items[-2]",
    "L['self'].items[1:]",
    "L['self'].items[slice(0, 2, None)]",
    "L['self'].pair.two",
    "___namedtuple_fields(L['self'].pair)",
    "___dataclass_fields(L['self'].data)[0].name",
    "___odict_getitem(L['self'].ordered, 'x')",
    "type(L['self'])",
    "type(L['self']).__mro__[1]",
    "dict(type(L['self']).__dict__)['forward'].__code__",
    "L['self'].forward.__func__.__defaults__",
    "int(L['self'].items[0])",
    "G['math'].pi",
    "G['reference']().in_features",
    "torch.get_default_dtype()",
    "torch.float32",
    "__import__('torch').float16",
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_place_leads_where_the_expression_does(expression):
    place = json.loads(json.dumps(place_of(expression, {})))
    assert place is not None
    wanted = eval(expression, {**HELPERS, **SCOPE})
    assert repr(value_at(place, SCOPE)) == repr(wanted)


def test_an_iterator_is_not_taken_further():
    iterator = iter((4, 5, 6))
    next(iterator)
    place = place_of("___tuple_iterator_getitem(L['it'], 1)", {})
    assert value_at(place, {"L": {"it": iterator}, "G": {}}) == 6
    assert list(iterator) == [5, 6]


def test_a_module_that_the_trace_named_is_found_under_its_own_name():
    place = place_of("G['__import_math'].pi", {"__import_math": "math"})
    assert place == [["module", "math"], ["attribute", "pi"]]
    assert value_at(place, SCOPE) == math.pi


@pytest.mark.parametrize(
    "expression",
    [
        "L['self'].forward()",
        "L['self'].inner(L['x'])",
        "L['self'].items.append(1)",
        "G['os'].system('true')",
        "torch.zeros(3)",
        "L['self'].items[G['f']()] + 1",
        "(lambda: L['self'])()",
        "[L['self']]",
        "__import__(L['self'].name)",
        "dict(L['self'].table, a=1)",
        "L['self'].table[b'x']",
    ],
)
def test_what_calls_something_is_no_place(expression):
    with pytest.raises(NoPlaceError):
        place_of(expression, {})
    found, unwritten = facts_of([GuardOn("EQUALS_MATCH", expression)], Asker(SCOPE), SCOPE, [])
    assert found == {}
    assert len(unwritten) == 1


def test_a_part_of_a_package_is_imported_where_nobody_did_yet(tmp_path, monkeypatch):
    package = tmp_path / "places_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text("VALUE = 5\n")
    monkeypatch.syspath_prepend(tmp_path)
    place = place_of("G['__import_it'].part.VALUE", {"__import_it": "places_package"})
    importlib.import_module("places_package.part")
    found = settled(place, SCOPE)
    assert found == [["module", "places_package"], ["submodule", "part"], ["attribute", "VALUE"]]
    for name in ("places_package", "places_package.part"):
        monkeypatch.delitem(sys.modules, name)
    assert value_at(found, SCOPE) == 5
    with pytest.raises(ModuleNotFoundError):
        value_at([["module", "places_package"], ["submodule", "other"]], SCOPE)


@pytest.mark.parametrize("expression", ["random_value_0", "x +", "", "SYNTHETIC['a']"])
def test_what_only_the_trace_had_is_nowhere(expression):
    assert place_of(expression, {}) is None


@pytest.mark.parametrize(
    "place",
    [
        [["eval", "1"]],
        [["state", "torch.manual_seed(0)"]],
        [["argument", "self"], ["call", "forward"]],
        [["argument", "self"], ["applied", "eval"]],
        [["argument", "self"], ["attribute", 3]],
        [["argument", "self"], "attribute"],
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
