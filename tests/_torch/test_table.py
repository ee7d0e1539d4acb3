"""The table of private torch: each row is found in this torch, and each use has its row."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import types
from importlib import import_module
from pathlib import Path

import pytest
import torch

import torchloom
from support.private_names import is_private, paths_in, private_attributes, trees_of, words_in
from torchloom._torch.resolve import why_missing
from torchloom._torch.table import FACTS, NAMES, PATCHES
from torchloom._torch.table.patches import PrivateName

HOUSE = Path(torchloom.__path__[0])
ROWS = {row.name: row for row in NAMES}
LAST = {word for name in ROWS for word in re.split(r"[.:]", name)[-1].split("|")}
PATHS = {
    re.sub(r"\w+\|.*", word, name)
    for name in ROWS
    for word in re.split(r"[.:]", name)[-1].split("|")
}


def test_this_torch_has_what_the_table_says() -> None:
    missing = [
        f"{name}: {why_missing(name)}"
        for name, row in ROWS.items()
        if row.holds_on(torch.__version__) and why_missing(name) is not None
    ]
    assert missing == [], (
        f"torch {torch.__version__} lacks these: end their rows, mend what uses them"
    )


def test_this_torch_has_nothing_that_the_table_denies() -> None:
    found = [
        f"{name}, {row.versions}"
        for name, row in ROWS.items()
        if not row.holds_on(torch.__version__) and why_missing(name) is None
    ]
    assert found == [], f"torch {torch.__version__} has these: widen their rows"


def test_each_use_has_a_row() -> None:
    trees = trees_of(HOUSE / "_torch")
    uses = {path for tree in trees for path in paths_in(tree) if is_private(path)}
    assert {path for path in uses if not is_known(path)} == set(), "give each a row"
    on_the_way = {part for path in uses for part in path.split(".")}
    assert private_attributes(trees) - LAST - on_the_way == set(), "give each a row"


def is_known(path: str) -> bool:
    """Whether a path is a row, something of a row's, or a module on the way to one."""
    modules = {re.sub(":.*", ".", name) for name in PATHS}
    return any(
        path == name.replace(":", ".")
        or path.startswith(f"{name}.")
        or name.startswith((f"{path}.", f"{path}:"))
        for name in [*PATHS, *modules]
    )


def test_each_row_is_used() -> None:
    words: set[str] = set()
    for room in ("_torch", "pieces"):
        for tree in trees_of(HOUSE / room):
            words |= words_in(tree)
    assert LAST - words == set(), "drop them"


ELSEWHERE = (
    "torch._foreach_",  # documented under these names
    "torch.nn.Module._call_impl",  # what a call of a module runs, with its hooks
    "torch.nn.Module._save_to_state_dict",  # documented for overriding
    "torch._subclasses.fake_tensor",  # the name of a logger: see the patch of it
    "torch._dynamo.mark_dynamic",  # documented for users; advice names it
    "torch._dynamo.exc",  # the name of a module that errors come from
)


def test_private_torch_is_named_behind_the_door_alone() -> None:
    found = {
        f"{file.relative_to(HOUSE)}: {path}"
        for file in HOUSE.rglob("*.py")
        if "_torch" not in file.parts
        for path in paths_in(ast.parse(file.read_text()))
        if is_private(path) and not path.startswith(ELSEWHERE)
    }
    assert found == set()


def test_no_row_is_a_module() -> None:
    """It would stand for all that is in the module."""
    for name, row in ROWS.items():
        if row.holds_on(torch.__version__) and ":" not in name and "|" not in name:
            module, _, last = name.rpartition(".")
            owner = sys.modules.get(module)
            assert not isinstance(getattr(owner, last, None), types.ModuleType), name


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_patches_name_their_reason(patch) -> None:
    module, _, function = patch.where.rpartition(".")
    assert callable(getattr(import_module(module), function))
    assert patch.because and patch.without
    if patch.issue:
        assert re.fullmatch(r"pytorch/pytorch#\d+", patch.issue)
    assert bool(patch.issue) != bool(patch.reproduction)


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.name.rpartition(".")[2])
def test_facts_hold(fact) -> None:
    module, _, function = fact.name.rpartition(".")
    assert getattr(import_module(module), function)() is fact.holds_on(torch.__version__)


def test_the_table_opens_without_torch() -> None:
    code = "import sys, torchloom._torch.table; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("since", "until", "version", "holds"),
    [
        ("2.13", "", "2.12.1+cu130", False),
        ("2.13", "", "2.13.0a0+git123", True),
        ("", "2.13", "2.13.5", True),
        ("", "2.13", "2.14.0.dev20260101+cpu", False),
    ],
)
def test_ranges(since, until, version, holds) -> None:
    row = PrivateName(name="torch.x", without="y", since=since, until=until)
    assert row.holds_on(version) is holds


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("torch._dynamo.config.recompile_limit", None),
        ("torch._dynamo.eval_frame:_orig_mod", None),
        (
            "torch._dynamo.eval_frame:_orig",
            "_orig is not in the source of torch._dynamo.eval_frame",
        ),
        ("torch._dynamo.eval_frame.gone.name", "torch._dynamo.eval_frame has no gone"),
        ("torch._gone.name", "torch has no _gone"),
        ("torch._dynamo.gone|reset", None),
        ("torch._dynamo.eval_frame:_gone|_orig_mod", None),
    ],
)
def test_why_a_name_is_missing(name, reason) -> None:
    assert why_missing(name) == reason
