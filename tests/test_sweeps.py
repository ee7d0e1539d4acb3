"""The table of sweeps: what it leaves out has the marker, and what it names exists."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import sweeps


def items(*nodeids: str) -> list[Any]:
    found = []
    for nodeid in nodeids:
        marks: list[pytest.MarkDecorator] = []
        found.append(SimpleNamespace(nodeid=nodeid, marks=marks, add_marker=marks.append))
    return found


def marked(found: list[Any]) -> list[str]:
    return [each.nodeid for each in found if each.marks]


def test_cases_that_are_not_kept_are_marked_and_unknown_ones_are_told(monkeypatch) -> None:
    monkeypatch.setattr(
        sweeps, "KEPT", {"a.py::test_many": ("1", "gone"), "a.py::test_gone": ("1",)}
    )
    monkeypatch.setattr(sweeps, "ELSEWHERE", {"a.py::test_whole": "a.py::test_many"})
    cases = "a.py::test_many[1]", "a.py::test_many[2]", "a.py::test_whole", "b.py::test_other"
    found = items(*(f"tests/{case}" for case in cases))
    told = sweeps.mark_sweeps(found)
    assert marked(found) == ["tests/a.py::test_many[2]", "tests/a.py::test_whole"]
    assert told == ["a.py::test_gone", "a.py::test_many[gone]"]


def test_files_that_were_not_collected_are_not_missed() -> None:
    assert sweeps.mark_sweeps(items("tests/b.py::test_other")) == []


def test_each_sweep_keeps_a_case_and_each_test_that_moved_has_one_that_stays() -> None:
    assert all(sweeps.KEPT.values())
    assert not set(sweeps.ELSEWHERE.values()) & sweeps.ELSEWHERE.keys()
    assert not sweeps.KEPT.keys() & sweeps.ELSEWHERE.keys()
