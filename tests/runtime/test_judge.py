"""Whether a run can go on, from what its ranks report."""

from __future__ import annotations

import pytest

from torchloom.config.model import TimeoutsConfig
from torchloom.runtime.lines.judge import judge
from torchloom.runtime.lines.report import Report, Waiting, silent_report

A, B = "2x1#0 shard 0-1:1", "2x1#0 shard 0-1:2"


def waits(rank: int, event: str, what: str, for_s: float = 2.0, ranks=(0, 1), **rest) -> Report:
    waiting = Waiting(
        event=event,
        what=what,
        ranks=list(ranks),
        for_s=for_s,
        is_agreement=event.startswith("agreement"),
    )
    rest.setdefault("begun", {A: event == A, B: event == B})
    return Report(rank=rank, waiting=waiting, **rest)


def of(*reports: Report) -> dict[int, Report]:
    return {each.rank: each for each in reports}


def test_ranks_that_wait_for_each_other_differ() -> None:
    found = judge(of(waits(0, A, "gather of a"), waits(1, B, "gather of b")), {})
    assert found is not None
    assert found.kind == "differ"
    assert "rank 0 waits for gather of a; rank 1 waits for gather of b" in found.text


def test_ranks_that_wait_for_the_same_go_on() -> None:
    assert judge(of(waits(0, A, "gather of a"), waits(1, A, "gather of a")), {}) is None


@pytest.mark.parametrize("phase", ["", "compiling graph1"])
def test_a_rank_that_may_still_come_is_waited_for(phase: str) -> None:
    late = Report(rank=1, phase=phase, begun={A: False})
    assert judge(of(waits(0, A, "gather of a", for_s=500), late), {}) is None


def test_limits_are_those_of_what_the_late_rank_does() -> None:
    compiling = Report(rank=1, phase="compiling graph1", begun={A: False})
    idle = Report(rank=1, begun={A: False}, last="gather of z")
    late = waits(0, A, "gather of a", for_s=700)
    assert judge(of(late, compiling), {}) is None
    found = judge(of(late, idle), {})
    assert found is not None
    assert found.kind == "late"
    assert "timeouts.step_s" in found.text
    assert "the last that it began was gather of z" in found.text
    agreeing = waits(0, "agreement 0:7", "agreement on x", for_s=130, begun={})
    found = judge(of(agreeing, Report(rank=1, begun={"agreement 0:7": False})), {})
    assert found is not None
    assert "timeouts.agree_s" in found.text
    short = waits(0, A, "gather of a", for_s=7, limits=TimeoutsConfig(compile_s=5))
    found = judge(of(short, compiling), {})
    assert found is not None
    assert "timeouts.compile_s" in found.text


def test_a_rank_that_has_ended_is_named_with_its_cause() -> None:
    found = judge(of(waits(0, A, "gather of a")), {1: "has failed with ValueError: x, in step 3"})
    assert found is not None
    assert found.kind == "lost"
    assert found.text.startswith("rank 1 has failed with ValueError: x, in step 3; rank 0 waits")


def test_a_circle_of_three() -> None:
    keys = ["g 0-1-2:1", "g 0-1-2:2", "g 0-1-2:3"]

    def each(rank: int) -> Report:
        # Each has begun its own and what the rank before it waits for.
        begun = {key: i in (rank, (rank - 1) % 3) for i, key in enumerate(keys)}
        return waits(rank, keys[rank], f"gather {rank}", ranks=(0, 1, 2), begun=begun)

    found = judge(of(*map(each, range(3))), {})
    assert found is not None
    assert all(f"rank {rank} waits for gather {rank}" in found.text for rank in range(3))


def test_all_ranks_in_collectives_of_which_one_is_not_ours() -> None:
    other = Report(rank=1, begun={A: False}, blocked_in="torch.distributed.barrier (train.py:3)")
    found = judge(of(waits(0, A, "gather of a"), other), {})
    assert found is not None
    assert "torch.distributed.barrier (train.py:3)" in found.text
    free = Report(rank=2, begun={A: True})
    assert judge(of(waits(0, A, "gather of a"), other, free), {}) is None


def test_a_rank_that_does_not_answer_is_late_but_never_at_odds() -> None:
    waiting = waits(0, A, "gather of a")
    assert judge(of(waiting, silent_report(1, [waiting])), {}) is None
    waiting = waits(0, A, "gather of a", for_s=1000)
    found = judge(of(waiting, silent_report(1, [waiting])), {})
    assert found is not None
    assert found.kind == "late"
    assert "does not answer" in found.text


def test_groups_without_names_are_compared_one_by_one() -> None:
    def each(rank: int, *rows) -> Report:
        return Report(rank=rank, order={"g": list(rows)})

    one = each(0, (4, 11, "gather of a"), (5, 12, "gather of b"))
    behind = each(1, (3, 10, "gather of z"), (4, 11, "gather of a"))
    assert judge(of(one, behind), {}) is None
    other = each(1, (4, 11, "gather of a"), (5, 99, "reduction of c"))
    found = judge(of(one, other), {})
    assert found is not None
    assert "rank 0 began gather of b, where rank 1 began reduction of c" in found.text
