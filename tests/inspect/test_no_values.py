"""Records hold no values of the program: no secret, no tensor, no object's text."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

import torchloom
from support.hostile import HOSTILE
from torchloom.records import to_json
from torchloom.report.page import write_page

SECRET = "hunter2-7f3a"
WEIGHTS = torch.tensor([-31.40625, 2.71828])
"""Printed or stored, the first one holds "-31.4062"; no time or size of a record is negative."""
LOOKUP = {"token": SECRET, "data": WEIGHTS}


def nested(x):
    y = x + 1

    def inner(z):
        return z * y

    return inner, y


def returns_a_global(x):
    return x + 1, SECRET, LOOKUP["token"]


def returns_an_object(x):
    return x + 1, HOSTILE


def guards_on_a_global(x):
    return x + 1 if SECRET.startswith("hunter") else x - 1


def guards_on_values_of_a_dict(x, given=LOOKUP):
    return x + 1 if given["token"] == "nothing" else x - 1


def breaks_with_values(x):
    x = x + 1
    print(SECRET)
    return x * 2, SECRET


PROGRAMS = [
    nested,
    returns_a_global,
    returns_an_object,
    guards_on_a_global,
    guards_on_values_of_a_dict,
    breaks_with_values,
]


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda fn: fn.__name__)
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_no_value_of_the_program_is_in_record_or_page(fn, tmp_path) -> None:
    path = tmp_path / "record.json"
    with torchloom.watch(path) as w:
        torch.compile(fn, backend="eager")(torch.full((2,), -62.8125))
    assert list(w.record.entries()), w.record.orphans
    page = write_page(w.record, tmp_path / "page.html").read_text()
    for text in (path.read_text(), page, w.summary(), json.dumps(to_json(w.record))):
        body = text.replace('SECRET = \\"', "")
        assert SECRET not in body
        assert "-31.4062" not in body
        assert "-62.8125" not in body
    for entry in w.record.entries():
        assert entry.bytecode
        assert "not readable" not in entry.pseudo_source


def test_guards_on_words_are_shown_and_other_strings_hidden() -> None:
    def fn(x, mode, key):
        return x + len(mode) + len(key)

    compiled = torch.compile(fn, backend="eager")
    with torchloom.watch() as w:
        compiled(torch.ones(2), "mean", SECRET), compiled(torch.ones(2), "mean", SECRET * 2)
    text = json.dumps(to_json(w.record)) + str(
        torchloom.explain_call(compiled, torch.ones(2), "a", "b")
    )
    assert SECRET not in text
    assert "argument mode == 'mean'" in text
    assert "argument key == <str>" in text


class Keyed:
    """A backend without a name: torch calls it by its printed form."""

    def __init__(self, key: str) -> None:
        self.key = key

    def __call__(self, gm, example_inputs):
        return gm.forward

    def __repr__(self) -> str:
        return f"Keyed({self.key})"


def keyed(gm, example_inputs, key):
    return gm.forward


@pytest.mark.parametrize(
    ("make", "name"), [(Keyed, "Keyed"), (lambda key: partial(keyed, key=key), "keyed")]
)
def test_backends_are_called_by_name_not_by_what_they_print(make, name: str) -> None:
    def fn(x):
        return x + 1

    told = ""
    with torchloom.watch() as w:
        for key in ("a", SECRET):
            compiled = torch.compile(fn, backend=make(key))
            told += str(torchloom.explain_call(compiled, torch.ones(2)))
            compiled(torch.ones(2))
    assert SECRET not in json.dumps(to_json(w.record)) + w.summary() + told
    assert [entry.backend for entry in w.record.entries()] == [name, name]
    (reason,) = next(reversed(list(w.record.entries()))).recompiles
    assert reason.expected == "the same backend object"


def test_what_the_source_says_is_still_shown() -> None:
    def fn(inputs):
        return inputs["left"] + 3, "label", lambda z: z

    with torchloom.watch() as w:
        torch.compile(fn, backend="eager")({"left": torch.ones(2)})
    (entry,) = w.record.entries()
    assert "inputs['left']" in entry.pseudo_source
    assert "'label'" in entry.pseudo_source
    assert "<dict>" in entry.pseudo_source  # the globals of the lambda
