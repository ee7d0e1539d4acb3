"""Rank 0's end of the lines, with ranks that the test plays."""

from __future__ import annotations

import select
import socket
import threading
import time
from dataclasses import asdict

import pytest

from torchloom.position import Verdict
from torchloom.runtime.lines.hub import Hub
from torchloom.runtime.lines.line import Wire
from torchloom.runtime.lines.report import Report, Waiting

EVENT = "group:7"


class Player:
    """A rank that answers each question with its position of that moment."""

    def __init__(self, address, rank: int) -> None:
        self.rank = rank
        self.waits_for: list[int] = []
        self.verdicts: list[Verdict] = []
        self.is_mute = False
        self.num_asked = 0
        self.wire = Wire(socket.create_connection(address, timeout=5))
        self.wire.send(kind="hello", rank=rank, token="t")
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def report(self) -> dict:
        waiting = None
        if self.waits_for:
            waiting = Waiting(event=EVENT, what="gather of a", ranks=self.waits_for, for_s=2.0)
        return asdict(Report(rank=self.rank, waiting=waiting, begun={EVENT: bool(waiting)}))

    def stuck(self) -> None:
        self.wire.send(kind="stuck", report=self.report())

    def _run(self) -> None:
        while True:
            select.select([self.wire], [], [])
            messages = self.wire.receive()
            if messages is None:
                return
            for message in messages:
                if message["kind"] == "where":
                    self.num_asked += 1
                    if not self.is_mute:
                        self.wire.send(kind="report", report=self.report())
                elif message["kind"] == "verdict":
                    self.verdicts.append(Verdict(*message["verdict"]))


@pytest.fixture
def players():
    listener = socket.create_server(("127.0.0.1", 0))
    hub = Hub(listener, "t")
    made = [Player(listener.getsockname()[:2], rank) for rank in range(2)]
    yield made
    hub.close("has ended")
    for each in made:
        each.wire.close()


def wait_until(is_true, limit_s: float = 120.0) -> None:
    deadline = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_wait_that_is_over_is_not_held_against_a_rank_that_ends(players) -> None:
    first, second = players
    first.waits_for = [0, 1]
    first.stuck()
    wait_until(lambda: first.num_asked >= 3)  # the hub knows that it waits
    first.waits_for = []  # goes on, and tells nobody
    second.wire.send(kind="bye", how="has ended its program")
    time.sleep(2.5)
    assert first.verdicts == []


def test_a_rank_that_ends_is_told_to_who_waits_for_it(players) -> None:
    first, second = players
    first.waits_for = [0, 1]
    first.stuck()
    second.wire.send(kind="bye", how="has ended its program")
    wait_until(lambda: first.verdicts)
    assert first.verdicts[0].kind == "lost"
    assert (
        "rank 1 has ended its program; rank 0 waits for it at gather of a" in first.verdicts[0].text
    )


def test_positions_that_a_round_ago_were_a_circle_are_none(players) -> None:
    first, second = players
    first.waits_for = second.waits_for = []
    first.is_mute = second.is_mute = False
    first.waits_for = [0, 1]
    first.stuck()
    wait_until(lambda: first.num_asked >= 2)
    second.is_mute = True  # computes, and holds the interpreter
    time.sleep(1.0)
    assert first.verdicts == []
    second.is_mute = False
    first.waits_for = []
    second.stuck()
    asked = first.num_asked
    time.sleep(2.0)
    assert first.verdicts == []
    assert first.num_asked <= asked + 6, "nobody waits: nothing is asked any more"


def test_what_must_be_equal_is_compared_by_name(players) -> None:
    first, second = players
    for number, (kept, here, there) in enumerate(((7, 7, 7), (8, 8, 9))):
        first.wire.send(kind="digest", of=f"g, {number}", state=kept, words="came to a", step=4)
        first.wire.send(kind="digest", of=f"g, {number}", state=here, words="came to a", step=4)
        second.wire.send(kind="digest", of=f"g, {number}", state=there, words="came to b", step=4)
    second.wire.send(kind="graph", of="graph0", state="woven", words="runs it woven")
    second.wire.send(kind="graph", of="graph0", state="eager", words="runs it eagerly")
    wait_until(lambda: first.verdicts and second.verdicts)
    (found,) = first.verdicts
    assert second.verdicts == [found]
    assert found.kind == "differ"
    assert found.text.startswith(
        "ranks did not begin the same collectives up to step 4: rank 0 came to a; rank 1 came to b. Weights may"
    )
