"""Documented modules that moved can still be imported, with a warning."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize(("name", "attribute"), [("costs", "node_us"), ("races", "find_races")])
def test_former_names_lead_to_the_new_rooms(name: str, attribute: str) -> None:
    sys.modules.pop(f"torchloom.plan.{name}", None)
    with pytest.warns(DeprecationWarning, match=f"is torchloom.{name} now"):
        former = importlib.import_module(f"torchloom.plan.{name}")
    now = importlib.import_module(f"torchloom.{name}")
    assert getattr(former, attribute) is getattr(now, attribute)
