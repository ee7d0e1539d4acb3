"""Ranks that run different programs: an error on all of them, in words, and never a wrong number.

Everything here has tensors of equal sizes, so that nothing but the names tells the messages apart.
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchloom
from support.pool import run_ranks
from torchloom.errors import AgreementError, PeerLostError
from torchloom.position import POSITION

WIDTH = 16


class Branches(nn.Module):
    """Equal layers, of which the caller says which run, in which order."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))

    def forward(self, x: torch.Tensor, order: tuple[int, ...] = (0, 1, 2, 3)) -> torch.Tensor:
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return x.square().mean()


def make(stage: int, backend: str, shared: bool, **rest):
    torch.manual_seed(0)
    model = Branches()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "compile": {"symmetric_memory": shared},
        "steps_per_print": float("inf"),
        **rest,
    }
    engine, *_ = torchloom.initialize(model=model, config=config)
    if backend:
        engine.compile(backend=backend)
    return engine, model


def batch(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(2, WIDTH, generator=generator)


def step(engine, rank: int, order=(0, 1, 2, 3)) -> None:
    engine.backward(engine(batch(rank), order))
    engine.step()


def evaluates_at_another_step(engine, model, rank):
    for index in range(6):
        if index == 2 + 2 * rank:
            with torch.no_grad():
                engine(batch(rank))
        step(engine, rank)


def gathers_alone(engine, model, rank):
    step(engine, rank)
    if rank == 0:
        with torchloom.shard.gathered(model, ["layers.1.weight"]):
            pass
    step(engine, rank)


def saves_alone(engine, model, rank):
    step(engine, rank)
    if rank == 0:
        engine.save_checkpoint("/nonexistent/folder")
    step(engine, rank)


def another_order(engine, model, rank):
    for index in range(4):
        step(engine, rank, (1, 0, 2, 3) if rank and index == 2 else (0, 1, 2, 3))


def another_layer(engine, model, rank):
    for index in range(4):
        step(engine, rank, (0, 1, 2 + (rank if index == 2 else 0)))


def one_micro_step_more(engine, model, rank):
    for index in range(4):
        if index == 2 and rank == 0:
            engine.backward(engine(batch(rank)))
        step(engine, rank)


def leaves_a_step_out(engine, model, rank):
    for index in range(4):
        engine.backward(engine(batch(rank)))
        if index == 2 and rank == 0:
            engine.zero_grad()
            continue
        engine.step()


PROGRAMS = (
    evaluates_at_another_step,
    gathers_alone,
    saves_alone,
    another_order,
    another_layer,
    one_micro_step_more,
    leaves_a_step_out,
)


def run(world_size: int, program, stage: int, backend: str, shared: bool) -> list:
    def fn(rank):
        engine, model = make(stage, backend, shared)
        try:
            program(engine, model, rank)
            deadline = time.monotonic() + 60  # a peer that fails takes its time to say so
            while POSITION.verdict is None and time.monotonic() < deadline:
                time.sleep(0.1)
            text = "" if POSITION.verdict is None else POSITION.verdict.text
        except (AgreementError, PeerLostError) as error:
            text = str(error)
        return text

    return run_ranks(world_size, fn)


def check(results: list, words: tuple[str, ...] = ("rank 0", "rank 1", "in step")) -> None:
    for text in results:
        assert all(word in text for word in words), results


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_eager(program) -> None:
    check(run(2, program, 3, "", shared=False))


@pytest.mark.parametrize("program", [gathers_alone, leaves_a_step_out])
def test_shared_memory(program) -> None:
    check(run(2, program, 3, "", shared=True))


@pytest.mark.parametrize("shared", [False, True], ids=["gloo", "shm"])
@pytest.mark.parametrize(
    "program",
    [
        another_layer,
        *(
            pytest.param(each, marks=pytest.mark.exhaustive)
            for each in (another_order, evaluates_at_another_step)
        ),
    ],
)
def test_compiled(program, shared: bool) -> None:
    check(run(2, program, 3, "aot_eager", shared))


@pytest.mark.parametrize(
    "stage", [1, *(pytest.param(stage, marks=pytest.mark.exhaustive) for stage in (0, 2))]
)
def test_stages(stage: int) -> None:
    check(run(2, another_layer, stage, "aot_eager", shared=False))


def test_a_pass_that_fails_on_one_rank_alone() -> None:
    def fails_there(gm, ctx) -> int:
        if dist.get_rank() == 1:
            raise ValueError("no pass today")
        return 0

    def program(engine, model, rank):
        engine.register_compile_pass("mine", fails_there)
        passes = ["dedupe_gathers", "elide_copies", "zero3", "mine", "place", "prefetch"]
        engine.compile(backend="aot_eager", passes=passes)
        for _ in range(600):
            step(engine, rank)
            time.sleep(0.1)

    words = ("rank 1 runs graph0 eagerly", "no pass today", "rank 0 runs graph0 woven")
    check(run(2, program, 3, "", shared=False), words)


def test_a_pass_that_fails_on_all_ranks_leaves_them_eager() -> None:
    def fn(rank):
        def fails(gm, ctx) -> int:
            raise ValueError("no pass today")

        engine, _ = make(3, "", shared=False)
        engine.register_compile_pass("mine", fails)
        passes = ["dedupe_gathers", "elide_copies", "zero3", "mine", "place"]
        engine.compile(backend="aot_eager", passes=passes)
        for _ in range(3):
            step(engine, rank)
            time.sleep(0.3)
        return len(engine.compile_report().fallbacks), POSITION.verdict

    assert run_ranks(2, fn) == [(1, None)] * 2


def test_an_optimizer_step_that_one_rank_leaves_out_in_a_loop_of_its_own() -> None:
    def fn(rank):
        torch.manual_seed(0)
        model = torchloom.shard_model(Branches(), persistence_threshold=0)
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
    check(run(3, lambda e, m, rank: another_layer(e, m, int(rank == 1)), 3, "", shared=False))


def test_two_engines_of_equal_names_in_another_order() -> None:
    def fn(rank):
        engines = [make(3, "", shared=False)[0] for _ in range(2)]
        try:
            for index in range(4):
                for engine in reversed(engines) if (rank, index) == (1, 2) else engines:
                    step(engine, rank)
        except (AgreementError, PeerLostError) as error:
            return str(error)
        return ""

    check(run_ranks(2, fn), ("rank 0", "rank 1", "of engine 2"))


@pytest.mark.parametrize(("stage", "is_compiled"), [(2, False), (3, True)])
def test_two_models_of_own_loops_and_equal_names_in_another_order(
    stage: int, is_compiled: bool
) -> None:
    def fn(rank):
        torch.manual_seed(0)
        models = [
            torchloom.shard_model(Branches(), stage=stage, persistence_threshold=0)
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
    torch.manual_seed(0)
    model = torchloom.shard_model(Branches(), stage=3, persistence_threshold=0)
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
    engine, _ = make(3, "", shared=False)
    try:
        for index in range(4):
            if index == 1:
                change(engine.optimizer, rank)
            step(engine, rank)
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
