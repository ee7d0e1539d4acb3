"""Promises about compiling, in tests."""

from __future__ import annotations

import pytest
import torch

import torchloom
from torchloom.errors import ExpectationError


def fn(x):
    return x * 2


def broken_up(x):
    x = x + 1
    torch._dynamo.graph_break()
    return x * 2


def test_what_holds_passes() -> None:
    compiled = torch.compile(fn, backend="eager")
    with torchloom.expect(recompiles=0, graph_breaks=0, entries=1):
        compiled(torch.ones(2))
    with torchloom.expect(recompiles=0, compiles=0):
        compiled(torch.ones(2))


def test_a_recompile_within_and_across_blocks() -> None:
    compiled = torch.compile(fn, backend="eager")
    with (
        pytest.raises(ExpectationError, match=r"1 recompiles.*\n.*expected size\(0\) == 2, got 3"),
        torchloom.expect(recompiles=0),
    ):
        compiled(torch.ones(2))
        compiled(torch.ones(3))
    with (
        pytest.raises(ExpectationError, match=r"fn .*argument x: expected dtype"),
        torchloom.expect(recompiles=0),
    ):
        compiled(torch.ones(2, dtype=torch.float64))


def test_breaks_entries_and_compiles() -> None:
    compiled = torch.compile(broken_up, backend="eager")
    with (
        pytest.raises(ExpectationError, match=r"1 graph breaks.*\n.*test_expect.py:\d+"),
        torchloom.expect(graph_breaks=0),
    ):
        compiled(torch.ones(2))
    with (
        pytest.raises(ExpectationError, match="compiles, expected at most 0"),
        torchloom.expect(compiles=0),
    ):
        torch.compile(fn, backend="eager")(torch.ones(7))


def test_an_error_in_the_block_comes_first() -> None:
    with pytest.raises(KeyError), torchloom.expect(compiles=0):
        torch.compile(fn, backend="eager")(torch.ones(2))
        raise KeyError


def test_explain_counts_and_wipes_nothing() -> None:
    compiled = torch.compile(broken_up, backend="eager")
    compiled(torch.ones(2))
    before = [e.compile_id for e in torchloom.entries(compiled, resume=True)]
    found = torchloom.explain(compiled, torch.ones(2))
    assert (found.num_graphs, found.num_breaks) == (2, 1)
    assert found.num_guards > 4
    assert "graph break" in str(found)
    assert [e.compile_id for e in torchloom.entries(compiled, resume=True)] == before
    none = torchloom.explain(lambda x: x, torch.ones(2))
    assert (none.num_graphs, none.num_breaks) == (0, 0)


def test_calls_over_the_limit_are_no_way_around_a_promise() -> None:
    compiled = torch.compile(lambda x, n: x + len(n), backend="eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        compiled(torch.ones(2), "a")
        with (
            pytest.raises(ExpectationError, match="the recompile limit of 1 is reached: 1 call"),
            torchloom.expect(recompiles=0),
        ):
            compiled(torch.ones(2), "bb")
