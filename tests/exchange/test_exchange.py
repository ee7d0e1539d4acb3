"""What ranks tell each other: over a store, alone, and as several ranks of one process."""

from __future__ import annotations

import threading

import pytest

from support.world import SimulatedWorld
from torchloom.costs import DEVICES, CostTable, shared_table
from torchloom.errors import AgreementError
from torchloom.exchange import Agreement, Alone, differ


def told(exchange) -> list[str]:
    """Return what one rank learns in one call."""
    return exchange.texts("names", f"rank {exchange.rank}\0 with any character")


def test_all_ranks_learn_the_same_over_a_store_and_in_a_world(run_ranks) -> None:
    def fn(rank: int):
        from torchloom.runtime.exchanges import new_agreement

        return told(new_agreement(rank, 3, timeout_s=30.0).exchange)

    expected = [[f"rank {rank}\0 with any character" for rank in range(3)]] * 3
    assert run_ranks(3, fn) == SimulatedWorld(3).run(told) == expected
    assert Alone().texts("names", "mine") == ["mine"]
    Agreement(Alone()).check_facts("the config", {"stage": 3})


def refused(call) -> list[str]:
    """Return what each of three ranks is told where they do not agree."""

    def fn(exchange) -> str:
        with pytest.raises(AgreementError) as caught:
            call(Agreement(exchange), exchange.rank)
        return str(caught.value)

    return SimulatedWorld(3).run(fn)


def test_ranks_that_differ_are_named_with_what_they_hold() -> None:
    first, _, third = refused(lambda all_, rank: all_.least("sizes" if rank == 2 else "names", 5))
    sides = "ranks [0, 1]: names = 5; ranks [2]: sizes = 5"
    assert first.startswith(f"the ranks do not agree on names: {sides}. Give every rank the same")
    assert third.startswith(f"the ranks do not agree on sizes: {sides}.")

    texts = refused(
        lambda all_, rank: all_.check_facts(
            "the config", {"stage": 3, "lr": 0.1 if rank else 0.2, "only": rank}
        )
    )
    assert len(set(texts)) == 1
    assert "on the config: lr (and on 1 more): ranks [0]: 0.2; ranks [1, 2]: 0.1." in texts[0]

    sides = "ranks [0, 2]: the plan = a; ranks [1]: the plan = b"
    texts = refused(lambda all_, rank: all_.check("the plan", "ab"[rank % 2]))
    assert all(f"do not agree on the plan: {sides}. " in text for text in texts)


def test_least_most_and_tables_over_many_ranks() -> None:
    def fn(exchange) -> tuple[int, int, float, float]:
        agreement = Agreement(exchange)
        own = CostTable(device=DEVICES["cpu"], ops={"mm": 1.0 + exchange.rank})
        first, slowest = (shared_table(own, how, exchange=exchange) for how in ("rank0", "max"))
        least, most = agreement.least("memory", exchange.rank), agreement.most("x", exchange.rank)
        return least, most, first.ops["mm"], slowest.ops["mm"]

    assert SimulatedWorld(16).run(fn) == [(0, 15, 1.0, 16.0)] * 16


def test_a_rank_that_has_ended_is_named_at_once() -> None:
    def fn(exchange) -> str:
        if exchange.rank == 1:
            return ""
        with pytest.raises(AgreementError) as caught:
            exchange.texts("the plan", "a")
        return str(caught.value)

    assert "ranks [1] did not reach 'the plan'" in SimulatedWorld(3).run(fn)[2]


def test_a_rank_that_fails_fails_the_world() -> None:
    def fn(exchange) -> list[str]:
        if exchange.rank == 1:
            raise KeyError("first")
        return exchange.texts("the plan", "a")

    with pytest.raises(KeyError, match="first"):
        SimulatedWorld(3).run(fn)
    assert not [thread for thread in threading.enumerate() if thread.name == "rank 1"]


def test_long_values_do_not_hide_the_sentence() -> None:
    text = str(differ("the table", ["a" * 10_000, "b"]))
    assert len(text) < 800
    assert "(10000 characters)" in text
    assert "ranks [1]: b. Give every rank" in text
