"""The table of DeepSpeedEngine's names: each name is there, refused, or told to differ, as the engine does."""

from __future__ import annotations

from torch import nn

import torchloom
from docs_pages.deepspeed_engine import DIFFERS, WORKS
from support.pool import run_ranks
from support.runs import settings
from torchloom.engine.module_access import REFUSED

NUM_NAMES = 280
"""Methods and attributes without an underscore in `deepspeed/runtime/engine.py` of 0.19.6."""


def test_each_name_is_in_one_row() -> None:
    names = [*WORKS, *DIFFERS, *REFUSED]
    assert len(set(names)) == len(names) == NUM_NAMES


def test_the_engine_does_what_the_table_says() -> None:
    def fn(rank: int) -> tuple[list[str], list[str]]:
        engine, *_ = torchloom.initialize(model=nn.Linear(4, 4), config=settings(3))
        missing = [name for name in (*WORKS, *DIFFERS) if not hasattr(engine, name)]
        return missing, [name for name in REFUSED if hasattr(engine, name)]

    assert run_ranks(1, fn) == [([], [])]
