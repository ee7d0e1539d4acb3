"""While a plan is made, the garbage collector leaves older objects alone, and has all of them back behind it."""

from __future__ import annotations

import gc
import weakref

import pytest

from torchloom.pipeline.planning import _older_objects_left_alone


class Ring:
    def __init__(self) -> None:
        self.itself = self


def test_cycles_that_a_block_makes_are_collected_in_it() -> None:
    with _older_objects_left_alone():
        assert gc.get_freeze_count() > 0
        gone = weakref.ref(Ring())
        gc.collect()
        assert gone() is None
    assert gc.get_freeze_count() == 0


def test_cycles_from_before_are_collected_behind_it() -> None:
    gone = weakref.ref(Ring())
    with pytest.raises(ValueError, match="in the block"), _older_objects_left_alone():
        raise ValueError("in the block")
    gc.collect()
    assert gone() is None
