"""The tables of docs/migrating/fsdp2.md: complete for the installed torch, and all names on our side exist."""

from __future__ import annotations

import inspect
from dataclasses import fields
from importlib import import_module

import pytest
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)

from docs_pages.fsdp import FSDP1, FULLY_SHARD, METHODS, POLICY, TABLES
from torchloom.config.keys import known_paths

OURS = sorted({name for rows in TABLES.values() for row in rows for name in row.ours})


@pytest.mark.parametrize("name", OURS)
def test_names_on_our_side_exist(name) -> None:
    path, _, argument = name.partition(":")
    if path == "config":
        assert argument in known_paths()
        return
    module, _, attribute = path.rpartition(".")
    found = getattr(import_module(module), attribute)
    if argument:
        assert argument in inspect.signature(found).parameters


def test_all_of_theirs_is_told() -> None:
    def public(of: type) -> set[str]:
        return {name for name in vars(of) if not name.startswith("_")}

    assert set(inspect.signature(fully_shard).parameters) <= {row.theirs for row in FULLY_SHARD}
    assert {each.name for each in fields(MixedPrecisionPolicy)} <= {row.theirs for row in POLICY}
    assert public(FSDPModule) <= {row.theirs for row in METHODS}
    arguments = set(inspect.signature(FullyShardedDataParallel.__init__).parameters)
    assert arguments - {"self", "module"} <= {row.theirs for row in FSDP1}
    for row in FSDP1:  # FSDP1 is finished upstream: each row is of it
        assert row.theirs in arguments or hasattr(FullyShardedDataParallel, row.theirs)


def test_each_row_says_how() -> None:
    for rows in TABLES.values():
        assert all(row.how for row in rows)
        assert len({row.theirs for row in rows}) == len(rows)
