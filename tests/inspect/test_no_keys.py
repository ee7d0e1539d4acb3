"""Keys and attributes that no source says are hidden in all places of a record; those that it says, in none."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchloom
from torchloom.inspect.wording.hider import keys_in
from torchloom.records import to_json
from torchloom.report.page import write_page

X = torch.ones(2)
# Put together while running: no constant of a function that is traced.
SECRET = "-".join(["zq" + "x" + str(9), "kk77"])
WORD = "".join(["pass", "phrazz"])
HIDDEN = (SECRET, SECRET.replace("-", "_"), WORD)

TENSORS = {SECRET: torch.ones(2), WORD: torch.ones(2), "said": torch.ones(2)}
NUMBERS = {SECRET: 4, WORD: 3}


class Bag:
    pass


def bag() -> Bag:
    made = Bag()
    for name, value in TENSORS.items():
        setattr(made, name, value)
    return made


def global_dict(x):
    return x + TENSORS[SECRET] + TENSORS[WORD] + NUMBERS[SECRET] + NUMBERS[WORD]


def keys_of_a_global(x):
    for key in TENSORS:
        x = x + TENSORS[key]
    return x


def argument(x, given):
    return x + given[SECRET] + given[WORD]


def nested(x, given):
    return x + given["said"][WORD]["said"]


def contains(x, given):
    return x + 1 if SECRET in given and "zqx7-none" not in given else x - 1


def keywords(x, **given):
    return x + sum(given.values())


def attribute(x, made):
    return x + getattr(made, WORD) + getattr(made, SECRET)


def has_attribute(x, made):
    return x + 1 if hasattr(made, SECRET) and hasattr(made, WORD) else x


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "global dict": (global_dict, (X,), {}),
    "nested": (nested, (X, {"said": {WORD: {"said": torch.ones(2)}}}), {}),
    "contains": (contains, (X, dict(NUMBERS)), {}),
    "keywords": (keywords, (X,), dict(TENSORS)),
    "attribute": (attribute, (X, bag()), {}),
    "has attribute": (has_attribute, (X, bag()), {}),
}


def shown(record: Any) -> str:
    data = to_json(record)

    def without_source(part: Any) -> Any:
        if isinstance(part, list):
            return [without_source(each) for each in part]
        if isinstance(part, dict):
            return {key: without_source(each) for key, each in part.items() if key != "runnable"}
        return part

    return json.dumps(without_source(data))


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_key_that_was_made_while_running_is_shown(name: str, tmp_path) -> None:
    fn, args, keywords_ = PROGRAMS[name]
    with torchloom.watch(tmp_path / "record.json") as w:
        torch.compile(fn, backend="aot_eager")(*args, **keywords_)
    (function,) = w.record.functions
    assert function.entries[0].guards
    page = write_page(w.record, tmp_path / "page.html").read_text()
    for text in (shown(w.record), (tmp_path / "record.json").read_text(), page, w.summary()):
        assert not [each for each in HIDDEN if each in text.lower()]
    assert "<key 1>" in shown(w.record)


@pytest.mark.parametrize(
    ("fn", "calls"),
    [
        (argument, ({SECRET: X, WORD: X}, {SECRET: torch.ones(1), WORD: X}, {WORD: X, SECRET: 1})),
        (lambda x, d: x + len(d), ({SECRET: 1}, {WORD: 1}, {})),
        (contains, ({SECRET: 1}, {WORD: 2})),
        (lambda x, s: x + 1 if SECRET in s else x - 1, ({SECRET}, {1}, {SECRET, 2})),
    ],
    ids=["values", "keys", "contains", "elements"],
)
def test_reasons_of_recompiles_hide_them_too(fn, calls) -> None:
    with torchloom.watch() as w:
        compiled = torch.compile(fn, backend="eager")
        for given in calls:
            compiled(X, given)
    assert any(entry.recompiles for entry in w.record.entries())
    text = shown(w.record) + w.summary()
    assert not [each for each in HIDDEN if each in text.lower()]


def test_one_key_reads_the_same_everywhere_and_two_differ() -> None:
    with torchloom.watch() as w:
        torch.compile(keys_of_a_global, backend="eager")(X)
    (entry,) = w.record.entries()
    english = [guard.english for guard in entry.guards]
    for number in (0, 1):
        (equals,) = [each for each in english if each.startswith(f"global TENSORS key {number} ==")]
        key = equals.partition(" == ")[2]
        assert any(f"global TENSORS[{key}] is a float32 tensor" in each for each in english)
    assert "G_TENSORS_key_1_" in (entry.artifact("dynamo") or "")
    assert "G_TENSORS_key_2_" in (entry.artifact("dynamo") or "")


def test_keys_of_the_source_are_shown_everywhere() -> None:
    def fn(x, given):
        for key in given:
            x = x + given[key]
        return x + given["said-9-8-7-6"] + given["lengthy"]

    given = {"said-9-8-7-6": torch.ones(2), "lengthy": torch.ones(2)}
    with torchloom.watch() as w:
        torch.compile(fn, backend="eager")(X, given)
    (entry,) = w.record.entries()
    english = " ".join(guard.english for guard in entry.guards)
    assert "argument given key 0 == 'said-9-8-7-6'" in english
    assert "argument given['said-9-8-7-6'] is a float32 tensor" in english
    assert "argument given['lengthy']" in english
    assert "<key" not in shown(w.record)
    assert "L_given_said_9_8_7_6_" in (entry.artifact("dynamo") or "")


def test_names_of_modules_are_shown_everywhere() -> None:
    model = nn.ModuleDict({"layer_9_8_7": nn.Linear(2, 2), WORD: nn.Linear(2, 2)})

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x):
            for each in self.parts.values():
                x = each(x)
            return x

    with torchloom.watch() as w:
        torch.compile(Whole(), backend="eager")(X)
    text = shown(w.record)
    assert "<key" not in text
    assert "self.parts.layer_9_8_7.weight" in text
    assert f"self.parts.{WORD}.weight" in text


def test_messages_of_breaks() -> None:
    made, said = SECRET, "as the source says"

    def breaks_off(x):
        x = x + 1
        torch._dynamo.graph_break(msg=made)
        x = x * 2
        torch._dynamo.graph_break(msg="as the source says")
        return x * 3

    with torchloom.watch() as w:
        torch.compile(breaks_off, backend="eager")(X)
    explanations = [each.explanation for each in w.record.breaks()]
    assert "User-inserted graph break. Message: <str>" in explanations
    assert f"User-inserted graph break. Message: {said}" in explanations
    assert SECRET not in shown(w.record) + w.summary()


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("G['t'].nn", ["nn"]),
        ("L['self']._modules['a']._parameters['b']", []),
        ("check_no_aliasing(L['x'], L['d']['a.b'])", ["a.b"]),
        ("not ___dict_contains('a', G['m']._modules['f'].__dict__)", ["a", "__dict__"]),
        ("not set.__contains__(L['s'], 'a')", ["a", "__contains__"]),
        ("L['d'][('a', 'b')]", ["a", "b"]),
        ("L['d']['it\\'s']", ["it's"]),
    ],
)
def test_what_names_a_value(text: str, keys: list[str]) -> None:
    assert sorted(keys_in(text)) == sorted(keys)
