"""Expressions of a trace are evaluated elsewhere, with no names but a few; what leads nowhere keeps a program from the store."""

from __future__ import annotations

import collections
import sys

import pytest
import torch
from torch import nn

from serve.models import BATCH
from torchloom._torch.full_capture import GuardOn
from torchloom.serve import Contract, build
from torchloom.serve.model.expressions import portable
from torchloom.serve.model.facts import Asker, facts_of

TABLE = {"b": 1, 7: 2, "a": 3}
SCOPE = {
    "L": {"table": TABLE, "iterator": iter((4, 5, 6)), "ordered": collections.OrderedDict(x=5)},
    "G": {"math": sys.modules["math"]},
}


@pytest.mark.parametrize(
    ("source", "expression", "value"),
    [
        ("L['table'][list(dict.keys(L['table']))[2]]", "L['table']['a']", 3),
        ("L['table'][list(dict.keys(L['table']))[1]]", None, 2),  # no text: the place stays
        ("G['__import_a_dot_b'].pi", "module('math').pi", 3.141592653589793),
        ("G['__builtins_dict___6']['len']", "module('builtins').__dict__['len']", len),
        ("___tuple_iterator_getitem(L['iterator'], 1)", None, 5),
        ("___odict_getitem(L['ordered'], 'x')", None, 5),
        ("__import__('math').pi", "module('math').pi", 3.141592653589793),
        ("torch.float32", "module('torch').float32", torch.float32),
        ("G['json'].tool", "G['json'].tool", None),
    ],
)
def test_what_one_process_names_is_found_by_another(source, expression, value):
    import json

    asker = Asker({**SCOPE, "G": {"json": json}})
    found = portable(source, {"__import_a_dot_b": "math"}, asker.value)
    assert expression in (None, found)
    assert asker.value(found) == (value or sys.modules["json.tool"])  # imported by the question


@pytest.mark.parametrize(
    "source", ["L['open']('x')", "L['self'].inner(y)", "G['os'].system('true')", "(lambda: L)()[0]"]
)
def test_what_needs_another_name_is_not_written_down(source):
    found, unwritten = facts_of([GuardOn("EQUALS_MATCH", source)], Asker(SCOPE), ["L['x']"])
    assert found == {}
    assert len(unwritten) == 1


@pytest.mark.parametrize("source", ["random_value_0", "x +", "", "SYNTHETIC['a']"])
def test_what_only_the_trace_had_is_nowhere(source):
    assert portable(source, {}, Asker(SCOPE).value) is None


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
