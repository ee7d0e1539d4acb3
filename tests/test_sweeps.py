"""The table of sweeps: what it leaves out has the marker, and what it names exists."""

from __future__ import annotations

import sweeps


def test_each_sweep_keeps_a_case_and_each_test_that_moved_has_one_that_stays() -> None:
    assert all(sweeps.KEPT.values())
    assert not set(sweeps.ELSEWHERE.values()) & sweeps.ELSEWHERE.keys()
    assert not sweeps.KEPT.keys() & sweeps.ELSEWHERE.keys()
