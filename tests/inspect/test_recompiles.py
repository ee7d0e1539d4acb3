"""Reasons of recompiles: what was expected, what came, and a fix that fits the value."""

from __future__ import annotations

import pytest

from torchloom.inspect.record.recompiles import parse_reason, parse_reasons


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        ("3", "dynamic=True"),
        ("-0.5", "as a tensor"),
        ("1e-05", "as a tensor"),
        ("'mean'", "entry of its own"),
        ("True", "entry of its own"),
        ("None", "entry of its own"),
    ],
)
def test_only_numbers_are_told_to_become_dynamic(value: str, fix: str) -> None:
    reason = parse_reason(f"2/1: L['mode'] == {value}  # if mode:  # demo.py:3 in f")
    assert (reason.entry, reason.source) == ("2/1", "argument mode")
    assert reason.expected == f"== {value}"
    assert fix in reason.fix
    assert ("dynamic" in reason.fix) == value.lstrip("-").isdigit()


def test_a_list_of_reasons_is_one_for_each_older_entry() -> None:
    texts = "[\"0/1: tensor 'x' rank mismatch. expected 2, actual 3\", \"0/0: L['n'] == 4\"]"
    ranks, constant = parse_reasons(texts)
    assert (ranks.entry, ranks.expected, ranks.actual) == ("0/1", "rank 2", "3")
    assert (constant.entry, constant.expected) == ("0/0", "== 4")
