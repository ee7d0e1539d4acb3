"""Pseudo-source of what Dynamo writes: run again, without addresses, without variables read too early."""

from __future__ import annotations

import collections
import copy
import json
import math
import re

import pytest
import torch
from torch._dynamo.convert_frame import register_bytecode_hook

import torchloom
from torchloom.inspect.pseudo import bytecode_listing, pseudo_source
from torchloom.inspect.pseudo.names import without_ids
from torchloom.inspect.wording.scrub import without_addresses
from torchloom.records import to_json

ADDRESS = re.compile(r"\d{12,}|0x[0-9a-f]{6,}")


def codes_of(fn, *args) -> list:
    """Return what Dynamo makes of a function and what follows its graph breaks, each with its source."""
    seen = []
    handle = register_bytecode_hook(lambda old, new: seen.append((old, new)))
    try:
        torch.compile(fn, backend="eager")(*args)
    finally:
        handle.remove()
    return seen


def run_text(fn, *args):
    """Compile a function, then call what its pseudo-source says, in the globals of the function."""
    (old, new), *_ = codes_of(fn, *copy.deepcopy(args))
    text = pseudo_source(new, "f", original=old)
    short = {re.sub(r"(__compiled_fn_\d+)_.*", r"\1", name): name for name in fn.__globals__}
    names = {each: fn.__globals__[short[each]] for each in short}
    names.update(zip(without_ids(new.co_names), map(names.get, new.co_names), strict=True))
    names = {key: value for key, value in names.items() if value is not None}
    found: dict = {}
    exec(compile(text, "x", "exec", dont_inherit=True), names, found)
    return found["f"](*args), text


def behind_a_break(x):
    a = x + 1
    torch._dynamo.graph_break()
    b = [1, 2]
    b = [*b, a]
    return [b[0] + i + a for i in b], [(lambda: b)]


def changed_containers(x, d, e):
    d.append(x + 1)
    e["k"] = [x * 2, d]
    e["same"] = e["k"]
    queue = collections.deque([x, x * 2], maxlen=3)
    return d, queue, range(3), e, {"d": d}


def constants(x):
    return (
        x + 1,
        math.inf,
        -math.inf,
        -1,
        -2.5,
        (1, (-math.inf,)),
        1j,
        torch.float32,
        x.device,
        ...,
        "word",
    )


def breaks_inside_with(x):
    with torch.no_grad():
        z = x * 2
        torch._dynamo.graph_break()
        y = z + 1
    return y, z, y.requires_grad


def one_list_in_two_places(x):
    inner = [x + 1]
    outer = {"a": inner, "b": (inner, [inner])}
    return outer, inner


def branches(x, flag=True):
    y = x * 2
    if y.sum() > 0:
        y = y - 1 if flag else y
    return y, x[..., 1::2]


PROGRAMS = [
    (changed_containers, ([], {"z": 1})),
    (constants, ()),
    (breaks_inside_with, ()),
    (one_list_in_two_places, ()),
    (branches, (True,)),
]


@pytest.mark.parametrize(("fn", "rest"), PROGRAMS, ids=lambda each: getattr(each, "__name__", ""))
def test_the_text_of_what_dynamo_writes_does_the_same(fn, rest) -> None:
    args = (torch.arange(1.0, 5.0), *rest)
    found, text = run_text(fn, *copy.deepcopy(args))
    assert repr(found) == repr(fn(*copy.deepcopy(args))), text
    assert not ADDRESS.search(text)


def test_lists_stay_one_in_what_dynamo_writes() -> None:
    (outer, inner), text = run_text(one_list_in_two_places, torch.ones(2))
    assert outer["a"] is outer["b"][0] is outer["b"][1][0] is inner, text


def test_a_cell_is_not_read_before_its_variable_has_a_value() -> None:
    def fn(x):
        y = x + 1

        def inner(v):
            return v * y

        return inner, y

    ((old, new),) = codes_of(fn, torch.ones(2))
    text = pseudo_source(new, "f", original=old)
    assert "(y,)" not in text
    assert re.findall(r"(?<!lambda: )\by\b", text.partition("y = graph_out_0[0]")[0]) == []


def test_variables_that_are_handed_to_what_follows_a_break_are_cells() -> None:
    args = (torch.ones(2),)
    (first, *_), text = run_text(behind_a_break, *args)
    assert "if False: b = None" in text
    assert repr(first) == repr(behind_a_break(*args)[0])
    *_, (old, new) = codes_of(behind_a_break, torch.ones(3))
    behind = pseudo_source(new, original=old)
    assert "nonlocal b" in behind
    assert "(b,)" not in behind


def test_no_addresses_in_records_and_sources() -> None:
    compiled = torch.compile(changed_containers, backend="eager")
    with torchloom.watch() as w:
        compiled(torch.ones(2), collections.deque(), {})
    entry = next(iter(w.record.entries()))
    for text in (entry.pseudo_source, entry.bytecode):
        assert "___module_deque_" in text
    body = json.dumps(to_json(w.record))
    assert not re.search(r"___module_\w*\d{12}", body)
    for live in torchloom.entries(compiled):
        assert not ADDRESS.search(live.source)
        assert not ADDRESS.search(live.bytecode)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("___module_deque_140586701475392_c1(x)", "___module_deque_<id>_c1(x)"),
        ("L['x'] is 140586701475392", "L['x'] is <id>"),
        ("__obj_140586701475392", "__obj_<id>"),
        ("a140586701475392b", "a140586701475392b"),
        ("x == 1405867", "x == 1405867"),
        ("__compiled_fn_1_01ff8736_ff4f_4757_94c3_154291234634(x)", "__compiled_fn_1(x)"),
    ],
)
def test_addresses_in_names(text: str, shown: str) -> None:
    assert without_addresses(text) == shown


def test_names_with_different_addresses_stay_different() -> None:
    names = [
        "a_140586701475392_c1",
        "a_140586701475393_c1",
        "a_id3_c1",
        "a_140586701475394_c1",
        "x",
    ]
    shown = without_ids(names)
    assert len(set(shown)) == len(names)
    assert not any(ADDRESS.search(each) for each in shown)
    assert shown[-1] == "x"
    graph = "__compiled_fn_1_01ff8736_ff4f_4757_94c3_154291234634"
    assert without_ids([graph]) == (graph,)  # the end of a uuid, which is taken out as a whole


def test_nested_code_has_no_address_in_a_listing() -> None:
    def fn():
        return lambda: 1

    assert not ADDRESS.search(bytecode_listing(fn.__code__))
