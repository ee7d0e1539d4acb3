"""What ranks tell each other: over a store, alone, and as several ranks of one process."""

from __future__ import annotations

import threading
import time

import pytest

from support.world import SimulatedWorld
from torchloom.costs import DEVICES, CostTable, shared_table
from torchloom.errors import AgreementError
from torchloom.exchange import Agreement, Alone, text_from
from torchloom.exchange.base import differ


def told(exchange) -> tuple[list[str], str]:
    """Return what one rank learns by each kind of call."""
    texts = exchange.texts("names", f"rank {exchange.rank}\0 with any character")
    return texts, text_from(exchange, 1, "words", lambda: f"of rank {exchange.rank}")


EXPECTED = ([f"rank {rank}\0 with any character" for rank in range(3)], "of rank 1")


def test_all_ranks_learn_the_same() -> None:
    assert SimulatedWorld(3).run(told) == [EXPECTED] * 3


def test_a_store_gives_what_a_world_gives(run_ranks) -> None:
    def fn(rank: int):
        from torchloom.runtime.exchanges import new_agreement

        return told(new_agreement(rank, 3, timeout_s=30.0).exchange)

    assert run_ranks(3, fn) == SimulatedWorld(3).run(told)


def test_one_rank_alone_tells_itself() -> None:
    assert Alone().texts("names", "mine") == ["mine"]
    assert text_from(Alone(), 0, "words", lambda: "mine") == "mine"
    Agreement(Alone()).check_facts("the config", {"stage": 3})


def test_ranks_that_call_in_other_orders_are_told() -> None:
    def fn(exchange) -> str:
        what = "sizes" if exchange.rank == 2 else "names"
        with pytest.raises(AgreementError) as caught:
            Agreement(exchange).least(what, 5)
        return str(caught.value)

    first, _, third = SimulatedWorld(3).run(fn)
    sides = "ranks [0, 1]: names = 5; ranks [2]: sizes = 5"
    assert first.startswith(f"the ranks do not agree on names: {sides}. Give every rank the same")
    assert third.startswith(f"the ranks do not agree on sizes: {sides}.")


def test_one_who_hears_something_else_is_told() -> None:
    def fn(exchange) -> str:
        if exchange.rank == 0:
            return text_from(exchange, 0, "the plan", lambda: "p")
        with pytest.raises(AgreementError, match="the plan = "):
            text_from(exchange, 0, "the table", lambda: "t")
        return "told"

    assert SimulatedWorld(2).run(fn) == ["p", "told"]


def test_facts_that_differ_are_named() -> None:
    def fn(exchange) -> str:
        facts = {"stage": 3, "lr": 0.1 if exchange.rank else 0.2, "only": exchange.rank}
        with pytest.raises(AgreementError) as caught:
            Agreement(exchange).check_facts("the config", facts)
        return str(caught.value)

    texts = SimulatedWorld(3).run(fn)
    assert len(set(texts)) == 1
    assert "on the config: lr (and on 1 more): ranks [0]: 0.2; ranks [1, 2]: 0.1." in texts[0]


def test_checks_name_every_side() -> None:
    def fn(exchange) -> str:
        with pytest.raises(AgreementError) as caught:
            Agreement(exchange).check("the plan", "ab"[exchange.rank % 2])
        return str(caught.value)

    sides = "ranks [0, 2]: the plan = a; ranks [1]: the plan = b"
    assert all(f"do not agree on the plan: {sides}. " in text for text in SimulatedWorld(3).run(fn))


def test_least_and_most_over_many_ranks() -> None:
    def fn(exchange) -> tuple[int, int]:
        agreement = Agreement(exchange)
        return agreement.least("memory", exchange.rank), agreement.most("bytes", exchange.rank)

    assert SimulatedWorld(64).run(fn) == [(0, 63)] * 64


def test_the_slowest_table_of_a_world() -> None:
    def fn(exchange) -> tuple[float, str]:
        own = CostTable(device=DEVICES["cpu"], ops={"mm": 1.0 + exchange.rank})
        slowest = shared_table(own, "max", exchange=exchange)
        return slowest.ops["mm"], text_from(exchange, 0, "words", lambda: "first")

    assert SimulatedWorld(8).run(fn) == [(8.0, "first")] * 8


def test_a_failure_of_the_source_reaches_all() -> None:
    def make() -> str:
        raise OSError("no space")

    def fn(exchange) -> str:
        kind = OSError if exchange.rank == 0 else AgreementError
        with pytest.raises(kind, match="no space") as caught:
            text_from(exchange, 0, "the table", make)
        return f"{type(caught.value).__name__}, {exchange.texts('more', 'fine')[0]}"

    assert SimulatedWorld(2).run(fn) == ["OSError, fine", "AgreementError, fine"]


def test_a_rank_that_has_ended_is_named_at_once() -> None:
    def fn(exchange) -> str:
        if exchange.rank == 1:
            return ""
        with pytest.raises(AgreementError) as caught:
            exchange.texts("the plan", "a")
        return str(caught.value)

    started = time.monotonic()
    assert "ranks [1] did not reach 'the plan'" in SimulatedWorld(3).run(fn)[2]
    assert time.monotonic() - started < 10


def test_a_rank_that_fails_fails_the_world() -> None:
    def fn(exchange) -> list[str]:
        if exchange.rank == 1:
            raise KeyError("first")
        return exchange.texts("the plan", "a")

    with pytest.raises(KeyError, match="first"):
        SimulatedWorld(3).run(fn)
    assert not [thread for thread in threading.enumerate() if thread.name == "rank 1"]


def test_long_values_do_not_hide_the_sentence() -> None:
    text = str(differ("the table", {"a" * 10_000: [0], "b": [1]}))
    assert len(text) < 800
    assert "(10000 characters)" in text
    assert "ranks [1]: b. Give every rank" in text
