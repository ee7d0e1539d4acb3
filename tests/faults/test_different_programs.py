"""Ranks that run different programs: an error on all of them, in words, and never a wrong number.

Everything here has tensors of equal sizes, so that nothing but the names tells the messages apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchloom
from faults.matrix.case import SMALL, Setup
from faults.matrix.programs.differing import (
    another_layer,
    another_order,
    calls_alone,
    evaluates_at_another_step,
    leaves_a_step_out,
    one_micro_step_more,
    two_engines_in_another_order,
)
from faults.matrix.programs.rank import Branches, Rank
from support.pool import run_ranks
from torchloom.errors import AgreementError, PeerLostError
from torchloom.position import POSITION


class Here(Rank):
    """A rank of this test, to which nobody listens from outside."""

    def __init__(self, rank: int, *, what: str = "", **setup: Any) -> None:
        super().__init__(asdict(Setup(**setup)), {"what": what, "last": False})
        self.rank, self.folder = rank, Path("/nonexistent/folder")

    def mark(self, what: str = "fault") -> None:
        """Tell nobody."""

    def finish(self, note: str = "") -> None:
        """Wait for a peer that fails, which takes its time to say so."""
        deadline = time.monotonic() + 60
        while POSITION.verdict is None and time.monotonic() < deadline:
            time.sleep(0.1)


def branches() -> nn.Module:
    torch.manual_seed(0)
    return Branches(SMALL)


def batch(rank: int) -> torch.Tensor:
    return torch.randn(2, SMALL, generator=torch.Generator().manual_seed(rank))


PROGRAMS = {
    "evaluates_at_another_step": evaluates_at_another_step,
    "gathers_alone": calls_alone,
    "saves_alone": calls_alone,
    "another_order": another_order,
    "another_layer": another_layer,
    "one_micro_step_more": one_micro_step_more,
    "leaves_a_step_out": leaves_a_step_out,
}
WHAT = {"gathers_alone": "gathered", "saves_alone": "save"}


def run(world_size: int, program: Callable[[Rank], None], **setup: Any) -> list[str]:
    def fn(rank: int) -> str:
        try:
            program(Here(rank, **setup))
        except (AgreementError, PeerLostError) as error:
            return str(error)
        return "" if POSITION.verdict is None else POSITION.verdict.text

    return run_ranks(world_size, fn)


def check(results: list, words: tuple[str, ...] = ("rank 0", "rank 1", "in step")) -> None:
    for text in results:
        assert all(word in text for word in words), results


@pytest.mark.parametrize("name", PROGRAMS)
def test_eager(name: str) -> None:
    check(run(2, PROGRAMS[name], what=WHAT.get(name, "")))


@pytest.mark.parametrize("name", ["gathers_alone", "leaves_a_step_out"])
def test_shared_memory(name: str) -> None:
    check(run(2, PROGRAMS[name], what=WHAT.get(name, ""), shared=True))


@pytest.mark.parametrize("shared", [False, True], ids=["gloo", "shm"])
@pytest.mark.parametrize(
    "name",
    [
        "another_layer",
        pytest.param("another_order", marks=pytest.mark.exhaustive),
        pytest.param("evaluates_at_another_step", marks=pytest.mark.exhaustive),
    ],
)
def test_compiled(name: str, shared: bool) -> None:
    check(run(2, PROGRAMS[name], backend="aot_eager", shared=shared))


@pytest.mark.parametrize(
    "stage", [1, *(pytest.param(stage, marks=pytest.mark.exhaustive) for stage in (0, 2))]
)
def test_stages(stage: int) -> None:
    check(run(2, another_layer, stage=stage, backend="aot_eager"))


def test_a_pass_that_fails_on_one_rank_alone() -> None:
    def fails_there(gm, ctx) -> int:
        if dist.get_rank() == 1:
            raise ValueError("no pass today")
        return 0

    def program(rank: Rank) -> None:
        engine = rank.start()
        engine.register_compile_pass("mine", fails_there)
        passes = ["dedupe_gathers", "elide_copies", "zero3", "mine", "place", "prefetch"]
        engine.compile(backend="aot_eager", passes=passes)
        for _ in range(600):
            rank.step()
            time.sleep(0.1)

    words = ("rank 1 runs graph0 eagerly", "no pass today", "rank 0 runs graph0 woven")
    check(run(2, program), words)


def test_a_pass_that_fails_on_all_ranks_leaves_them_eager() -> None:
    def fn(rank):
        def fails(gm, ctx) -> int:
            raise ValueError("no pass today")

        here = Here(rank)
        engine = here.start()
        engine.register_compile_pass("mine", fails)
        passes = ["dedupe_gathers", "elide_copies", "zero3", "mine", "place"]
        engine.compile(backend="aot_eager", passes=passes)
        for _ in range(3):
            here.step()
            time.sleep(0.3)
        return len(engine.compile_report().fallbacks), POSITION.verdict

    assert run_ranks(2, fn) == [(1, None)] * 2


def test_an_optimizer_step_that_one_rank_leaves_out_in_a_loop_of_its_own() -> None:
    def fn(rank):
        model = torchloom.shard_model(branches(), persistence_threshold=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        probe = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        try:
            for index in range(4):
                if rank == 0:
                    probe.step()  # of an optimizer that is nobody else's business
                model(batch(rank)).backward()
                if index != 2 or rank == 0:
                    optimizer.step()
                optimizer.zero_grad()
        except (AgreementError, PeerLostError) as error:
            return str(error)
        return ""

    check(run_ranks(2, fn), ("in step 2", "in step 3"))


def test_three_ranks_of_which_one_differs() -> None:
    check(run(3, another_layer))


def test_two_engines_of_equal_names_in_another_order() -> None:
    check(run(2, two_engines_in_another_order), ("rank 0", "rank 1", "of engine 2"))


@pytest.mark.parametrize(("stage", "is_compiled"), [(2, False), (3, True)])
def test_two_models_of_own_loops_and_equal_names_in_another_order(
    stage: int, is_compiled: bool
) -> None:
    def fn(rank):
        models = [
            torchloom.shard_model(branches(), stage=stage, persistence_threshold=0)
            for _ in range(2)
        ]
        if is_compiled:
            for model in models:
                torchloom.compile(model, backend="eager")
        try:
            for index in range(3):
                losses = [model(batch(rank)) for model in models]
                for loss in reversed(losses) if (rank, index) == (1, 2) else losses:
                    loss.backward()
        except (AgreementError, PeerLostError) as error:
            return str(error)
        return ""

    check(run_ranks(2, fn), ("rank 0", "rank 1", "of model 2"))


def own_loop(rank, change):
    model = torchloom.shard_model(branches(), stage=3, persistence_threshold=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    try:
        for index in range(4):
            model(batch(rank)).backward()
            if index == 1:
                change(optimizer, rank)
            optimizer.step()
            optimizer.zero_grad()
    except (AgreementError, PeerLostError) as error:
        return str(error)
    return ""


def engine_loop(rank, change):
    here = Here(rank)
    engine = here.start()
    try:
        for index in range(4):
            if index == 1:
                change(engine.optimizer, rank)
            here.step()
    except (AgreementError, PeerLostError) as error:
        return str(error)
    return ""


def plateau(optimizer, rank):
    """What ReduceLROnPlateau does where each rank looks at its own loss."""
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for loss in (1.0, 2.0 if rank else 0.5):
        schedule.step(loss)


def weight_decay(optimizer, rank):
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.01 + 0.1 * rank


@pytest.mark.parametrize(
    ("loop", "change", "words"),
    [
        (own_loop, plateau, ("lr=0.01", "lr=0.005")),
        (engine_loop, weight_decay, ("weight_decay=0.11",)),
    ],
)
def test_optimizers_that_step_with_other_numbers(loop, change, words) -> None:
    check(run_ranks(2, loop, change), ("rank 0", "rank 1", "step with different numbers", *words))


def alike(optimizer, rank):
    for group in optimizer.param_groups:
        group["lr"] *= 0.5 * (1.0 + rank * 1e-12)  # another library's last bits


@pytest.mark.parametrize("loop", [own_loop, engine_loop])
def test_optimizers_that_differ_in_the_last_bits_go_on(loop) -> None:
    assert run_ranks(2, loop, alike) == [""] * 2
