"""What texts hash to and the order of sets are each process's own: programs that rely on them are not another's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from serve.models import rows
from torchloom.serve import build
from torchloom.serve.builder.trace.set_order import depends_on_order
from torchloom.serve.builder.trace.unguarded import why_unstorable

TABLE = {"a": 1.0, "b": 2.0}
NAMES = {"a", "b"}


def goes_through_a_constant():
    return [name for name in {"a", "b", "c"}]  # noqa: C416 - the code is what is tested


def goes_through_a_set():
    found = set(TABLE)
    return [TABLE[name] for name in found]


def lists_a_difference():
    return list(TABLE.keys() - {"a"})


def takes_the_first():
    return next(iter({name for name in TABLE}))  # noqa: C416


def hands_it_on():
    return str(frozenset(TABLE))


def sorts_by_a_key():
    return sorted({*TABLE}, key=len)


def puts_it_away(self):
    self.names = {*TABLE}


def unpacks():
    return [*{*TABLE}]


def picks_either(flag):
    chosen = {*TABLE} if flag else frozenset()
    return max(chosen, key=len)


def joins_views():
    keys = TABLE.keys()
    return list(keys | TABLE.items())


def looks_in_a_constant(name):
    return name in {"a", "b", "c"}


def looks_in_a_comprehension(name):
    names = {each for each in TABLE}  # noqa: C416
    return name in names


def changes_and_compares(name):
    names = set()
    names.add(name)
    names |= {"b"}
    if names == {"a", "b"} or not names:
        return len(names)
    return names.isdisjoint(TABLE)


def sorts():
    return sorted({*TABLE})


def asks_all():
    return all(name in TABLE for name in frozenset(TABLE) - {"a"})


def has_numbers():
    return [number for number in {1, 2, 3}]  # noqa: C416


def fills_and_lists(of):
    filled = {}
    for name in {*TABLE}:
        filled[name] = of(name)
    return list(filled)


def fills_by_what_came_before(of):
    filled, given = {}, iter(TABLE)
    for name in {*TABLE}:
        filled[name] = next(given)
    return filled["a"]


def fills_by_another_name(of):
    filled = {"a": 1}
    other = {}
    for name in {*TABLE}:
        filled[name] = of(name)
        other[name] = filled["a"]
    return other["b"]


def fills_what_it_is_given(filled, of):
    for name in {*TABLE}:
        filled[name] = of(name)


def keeps_the_last(of):
    filled = {}
    for name in {*TABLE}:
        filled[name] = of(name)
    return filled["a"], name


def adds_up(of):
    filled = {"sum": 0}
    for name in {*TABLE}:
        filled["sum"] += of(name)
    return filled["sum"]


def returns_a_comprehension(of):
    return {name: of(name) for name in {*TABLE}}


GO_THROUGH = [
    *(goes_through_a_constant, goes_through_a_set, lists_a_difference, takes_the_first),
    *(hands_it_on, sorts_by_a_key, puts_it_away, unpacks, picks_either, joins_views),
    *(fills_and_lists, fills_by_what_came_before, fills_by_another_name, fills_what_it_is_given),
    *(keeps_the_last, adds_up, returns_a_comprehension),
]


def fills_and_looks_up(of):
    filled = {}
    scales = {}
    for name in {*TABLE}:
        if name == "a":
            filled[name] = None
        else:
            filled[name] = of(TABLE, name)
        scales[name] = 2 * filled[name] + 1
    for name in {*TABLE}:
        scales[name] = TABLE[name]
    made = {name: of[name]() for name in {*TABLE}}
    return made["a"], scales["a"], [filled[each] for each in ("a", "b")]


ASK = [
    *(looks_in_a_constant, looks_in_a_comprehension, changes_and_compares, sorts, asks_all),
    *(has_numbers, fills_and_looks_up),
]


@pytest.mark.parametrize("function", GO_THROUGH)
def test_code_that_goes_through_a_set_depends_on_its_order(function):
    assert depends_on_order(function.__code__)


@pytest.mark.parametrize("function", ASK)
def test_code_that_only_asks_a_set_does_not(function):
    assert not depends_on_order(function.__code__)


def test_code_without_a_source_of_its_own_may_do_anything_with_a_set():
    exec("def f(name):\n    names = {*'ab'}\n    return name in names\n", scope := {})
    assert depends_on_order(scope["f"].__code__)


@pytest.mark.parametrize(
    ("text", "depends"),
    [
        ("[name for name in NAMES]", True),
        ("next(iter(self.NAMES))", True),
        ("'a' in NAMES", False),
        ("any(name == 'a' for name in config['NAMES'])", False),
        ("[*config['NAMES']]", True),
        ("[name for name in self]", False),
    ],
)
def test_sets_from_elsewhere_are_followed_by_name(text, depends, tmp_path):
    path = tmp_path / "code.py"
    path.write_text(f"def f(self, config):\n    return {text}\n")
    exec(compile(path.read_text(), str(path), "exec", dont_inherit=True), scope := {})
    assert depends_on_order(scope["f"].__code__, ("NAMES", ".NAMES", ".self")) is depends


MODELS = """
import json, sys, torch
from torch import nn
from torchloom.serve import Contract, Dim, Store, build
from torchloom.serve.store.misses import why_miss
from torchloom.serve.model.target import Target

SCALE = {"a": 1.0, "b": 2.0, "c": 3.0, "dd": 4.0, "ee": 5.0}
NAMES = frozenset(SCALE)

def model(value, init="pass"):
    exec(compile(f"def forward(self, x): return {value}\\ndef __init__(self):\\n    nn.Module.__init__(self); {init}",
                 f"{sys.argv[1]}/{len(MODELS)}.py", "exec"), globals(), names := {})
    return type("Model", (nn.Module,), {**names, "__module__": "__main__"})

def scaled(names, x):
    for name in names:
        x = x * SCALE[name] + 1
    return x

MODELS = {}
for name, given in json.loads(sys.argv[2]).items():
    text = f"def forward(self, x): return {given[0]}"
    open(f"{sys.argv[1]}/{len(MODELS)}.py", "w").write(text)
    MODELS[name] = model(*given)
found = {}
with torch.no_grad():
    for name, kind in MODELS.items():
        served, x = kind().eval(), torch.ones(2, 4)
        store, contract = Store(f"{sys.argv[1]}/{name}"), Contract({"x": (Dim("b", 1, 8), 4)})
        reasons = why_miss(store, Target(served), contract)
        # Dynamo goes through sets that it makes in an order of its own, so what was built is not compared.
        program = build(served, contract, backend="eager", store=store, check="off")
        if program.origin == "loaded" and sys.argv[3] == "2":
            torch.testing.assert_close(program(x), served(x))
        found[name] = [program.origin, program.variants[0].why_not_stored, reasons]
print(json.dumps(found))
"""
OWN = {
    "attribute": ["scaled(self.names, x)", "self.names = {'a', 'b', 'c', 'dd', 'ee'}"],
    "constant": ["scaled([n for n in {'a', 'b', 'c', 'dd', 'ee'}], x)"],
    "difference": ["scaled(SCALE.keys() - {'a'}, x)"],
    "listed": ["scaled(list(NAMES), x)"],
}
if torch.__version__ >= "2.13":  # an older Dynamo does not trace `hash`
    OWN["hashed text"] = ["x * (hash(self.name) % 9973)", "self.name = 'abc'"]
    OWN["hashed tuple"] = ["x * (hash(('a', 2)) % 9973)"]
ANYBODYS = {
    "member": ["x * (2 if 'a' in self.names else 3)", "self.names = {'a', 'b', 'c'}"],
    "member of a constant": ["x * (2 if 'a' in {'a', 'b', 'c'} else 3)"],
    "member of a global": ["x * (2 if 'a' in NAMES else 3)"],
    "set that nobody reads": ["x * 2", "self.names = {'a', 'b', 'c'}"],
    "sorted": ["scaled(sorted(self.names), x)", "self.names = {'a', 'b', 'c'}"],
}


def test_a_process_that_hashes_otherwise_takes_programs_that_do_not_rely_on_it(tmp_path):
    def run(seed: str) -> dict[str, list]:
        done = subprocess.run(
            [sys.executable, "-c", MODELS, str(tmp_path), json.dumps(OWN | ANYBODYS), seed],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    assert {name: each[0] for name, each in run("1").items()} == dict.fromkeys(
        OWN | ANYBODYS, "built"
    )
    second, again = run("2"), run("1")
    for name in OWN:
        assert second[name][:2] == ["built", ""], name
        assert "PYTHONHASHSEED" in " ".join(second[name][2]), name
        assert again[name][0] == "loaded", name
    for name in ANYBODYS:
        assert second[name] == again[name] == ["loaded", "", []], name


class InOrder(nn.Module):
    def forward(self, x):
        for name in set(TABLE):
            x = x * TABLE[name] + 1
        return x


def test_the_build_says_that_a_program_is_of_one_process(tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    build(InOrder().eval(), rows(), backend="eager", store=tmp_path, check="off")
    assert "is stored for this process alone" in caplog.text


class Addressed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.names = [1]

    def forward(self, x):
        return x * (2 if id(self.names) % 2 else 3)


def test_what_asks_for_an_address_runs_and_is_not_stored(tmp_path):
    program = build(Addressed().eval(), rows(), backend="eager", store=tmp_path)
    assert "`id`" in program.variants[0].why_not_stored
    with torch.no_grad():
        assert program(torch.ones(3, 16)).shape == (3, 16)
    assert why_unstorable([Addressed.forward.__code__])
