"""Optimizer states in host memory: the same training to the bit, on less device memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import torchloom
from support.fuzzing import fuzzed
from support.models import Tricky, tokens
from support.optimizers import Base
from support.pool import run_ranks
from support.runs import assert_equal, make_engine, settings, train, weights
from torchloom.errors import EngineError, PlanError
from torchloom.graph import tensors_in
from torchloom.plan.text import show_plan
from torchloom.runtime.host import is_on_host

HARD: dict[str, Any] = {"gradient_accumulation_steps": 3, "gradient_clipping": 0.3}


def big_states(engine) -> list[torch.Tensor]:
    return [
        value
        for state in engine.optimizer.state.values()
        for value in state.values()
        if value.dim() and value.numel()
    ]


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bit_identical_with_accumulation_and_clipping(stage: int, name: str) -> None:
    rates = {"lr": 1e-2, "momentum": 0.9} if name == "SGD" else {"lr": 1e-2}
    optimizer = {"type": name, "params": {**rates, "weight_decay": 0.1}}

    def fn(rank, **compile):
        engine, model = make_engine(stage, optimizer=optimizer, compile=compile, **HARD)
        losses = train(engine, rank, 4)
        hosts = [is_on_host(value) for value in big_states(engine)]
        return losses, weights(model), hosts, engine.move_stats().host_bytes

    plain = run_ranks(2, fn)
    for double in (False, True):
        moved = run_ranks(2, lambda r, d=double: fn(r, offload_opt_states=True, double_buffer=d))
        for rank in range(2):
            assert moved[rank][0] == plain[rank][0]
            assert_equal(moved[rank][1], plain[rank][1])
            assert moved[rank][2]
            assert all(moved[rank][2])
            assert not any(plain[rank][2])
            assert moved[rank][3] > plain[rank][3] == 0


def test_many_chunks_with_random_delays_and_poison() -> None:
    def fn(rank, offload: bool):
        engine, model = make_engine(3, compile={"offload_opt_states": offload}, **HARD)
        if not offload:
            return train(engine, rank, 5), weights(model)
        stream = engine.offloads._stream
        stream.chunk_bytes = 300  # a few parameters each
        losses = []
        for step in range(5):
            stream.num_slots = 1 + step % 3
            with fuzzed(seed=step + 7 * rank, most_s=2e-3):
                losses += train(engine, rank, 1, first=step)
        return losses, weights(model)

    for plain, moved in zip(run_ranks(2, fn, False), run_ranks(2, fn, True), strict=True):
        assert moved[0] == plain[0]
        assert_equal(moved[1], plain[1])


def test_compiled_and_switched_by_name() -> None:
    names = ["zero3_compile", "bucket", "prefetch"]

    def fn(rank, asked):
        engine, model = make_engine(3, **HARD, compile={"backend": "aot_eager"})
        schedule = [(0, names), (2, [*names, "move_opt_states"]), (4, names)] if asked else None
        engine.compile(schedule=schedule)
        losses, where = [], []
        for step in range(6):
            losses += train(engine, rank, 1, first=step)
            where.append({is_on_host(value) for value in big_states(engine)})
        return losses, weights(model), where

    plain, moved = run_ranks(2, fn, False), run_ranks(2, fn, True)
    for rank in range(2):
        assert moved[rank][0] == plain[rank][0]
        assert_equal(moved[rank][1], plain[rank][1])
        off, on = {False}, {True}
        # The entry of step 2 is in force for the third step; at step 4 all come back.
        assert moved[rank][2] == [off, off, on, off, off, off]


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True), (True, True)])
def test_checkpoints_do_not_know_where_states_live(before: bool, after: bool, tmp_path) -> None:
    def make(offload, seed=0, stage=3):
        return make_engine(stage, seed, compile={"offload_opt_states": offload}, **HARD)

    def through(rank):
        engine, model = make(False)
        return train(engine, rank, 5), weights(model)

    def first(rank):
        engine, _ = make(before)
        losses = train(engine, rank, 2)
        engine.save_checkpoint(tmp_path)
        return losses

    def second(rank):
        engine, model = make(after, seed=5)
        engine.load_checkpoint(tmp_path)
        hosts = {is_on_host(value) for value in big_states(engine)}
        return train(engine, rank, 3, first=2), weights(model), hosts

    whole, start, end = run_ranks(2, through), run_ranks(2, first), run_ranks(2, second)
    for rank in range(2):
        assert whole[rank][0] == start[rank] + end[rank][0]
        assert_equal(whole[rank][1], end[rank][1])
        assert end[rank][2] == {after}


def test_the_budget_chooses_the_resident_part() -> None:
    def fn(rank, budget, offload=True):
        torch._dynamo.reset()
        options = {"offload_opt_states": offload, "backend": "aot_eager", "memory_budget": budget}
        torch.manual_seed(0)
        model = Tricky()
        engine, *_ = torchloom.initialize(model=model, config=settings(3, compile=options))
        engine.compile()
        losses = train(engine, rank, 4)
        states = big_states(engine)
        here = sum(value.nbytes for value in states if not is_on_host(value))
        plan = engine.plan()
        total = sum(value.nbytes for value in states)
        return losses, here, total, plan.base_bytes, plan.peak_bytes, plan.graphs[0].states_us

    roomy = run_ranks(2, fn, "1GB")
    resident = run_ranks(2, fn, "1GB", False)
    here, total, base, peak, states_us = roomy[0][1:]
    assert states_us == 0
    assert here == total  # all of them: nothing would be gained by moving any
    assert resident[0][3] - base == total
    between = run_ranks(2, fn, peak + total // 2)
    for rank in range(2):
        assert between[rank][0] == roomy[rank][0] == resident[rank][0]
        assert 0 < between[rank][1] <= total // 2
        assert between[rank][-1] > 0

    def refused(rank):
        with pytest.raises(PlanError, match="offload_opt_states"):
            fn(rank, base + 100, False)

    run_ranks(2, refused)


def test_room_is_made_for_states_where_links_are_slow(monkeypatch) -> None:
    costs_of = torchloom.step.build.costs_of

    def fn(rank, budget, bytes_per_s):
        def costs(device, network):
            table = costs_of(device, network)
            links = {"h2d_bytes_per_s": bytes_per_s, "d2h_bytes_per_s": bytes_per_s}
            return dataclasses.replace(table, device=dataclasses.replace(table.device, **links))

        monkeypatch.setattr("torchloom.step.build.costs_of", costs)
        torch._dynamo.reset()
        options = {"offload_opt_states": True, "backend": "aot_eager", "memory_budget": budget}
        torch.manual_seed(0)
        config = settings(3, compile={**options, "replan_step": 0})
        engine, *_ = torchloom.initialize(model=Tricky(), config=config)
        engine.compile()
        losses = train(engine, rank, 4)
        here = sum(value.nbytes for value in big_states(engine) if not is_on_host(value))
        return losses, here, engine.plan()

    roomy = run_ranks(2, fn, "1GB", 1e10)
    budget = roomy[0][2].peak_bytes + roomy[0][1] // 4
    fast, slow = run_ranks(2, fn, budget, 1e10), run_ranks(2, fn, budget, 1e5)
    for rank in range(2):
        assert fast[rank][0] == slow[rank][0] == roomy[rank][0]
        # Computing again is dearer than a quick copy; views, which torch 2.15 lists, cost nothing.
        dear = {d.value for d in fast[rank][2].graphs[0].decisions if d.cost_us > 0}
        assert not fast[rank][2].graphs[0].recompute & dear
        assert slow[rank][2].graphs[0].recompute
        assert fast[rank][1] < slow[rank][1]
        assert slow[rank][2].peak_bytes < fast[rank][2].peak_bytes
        assert fast[rank][2].graphs[0].states_us > 0
    assert "optimizer states that wait on the host add" in show_plan(fast[0][2])


class Nested(Base):
    """Keeps tensors in lists and dicts, steps all at once, and makes one of its states anew."""

    def update(self, param, group, state):
        kept = state.setdefault("kept", [torch.zeros_like(param), {"norms": param.new_zeros(1)}])
        kept[0].lerp_(param.grad, 0.2)
        kept[1]["norms"] = torch.cat([kept[1]["norms"], kept[0].norm().view(1)])[-3:]
        param.add_(kept[0] / (kept[1]["norms"].mean() + 1e-6), alpha=-group["lr"])


class Counting(Nested):
    """Declared to step by parts, although it counts its steps."""

    by_parts = True


def nested_states(engine: Any) -> list[torch.Tensor]:
    found = tensors_in(list(engine.optimizer.state.values()))
    return [each for each in found if each.dim() and each.numel()]


def of_owners(kind: str, stage: int, *, waits: bool, **compile: Any):
    config = settings(stage, **HARD, compile=compile)
    del config["optimizer"]
    zero = config["zero_optimization"]
    zero["stage3_param_persistence_threshold"] = 0
    if waits:
        zero["offload_optimizer"] = {"device": "cpu"}
    if kind == "Muon":
        config["optimizer"] = {"type": "Muon", "params": {"muon_lr": 2e-2, "adam_lr": 1e-2}}
    classes = {"Adafactor": torch.optim.Adafactor, "Nested": Nested, "Counting": Counting}
    torch.manual_seed(0)
    made = classes.get(kind)

    def optimizer(params):  # torch's Adafactor divides by the number of elements
        return made([param for param in params if param.numel()], lr=1e-2)

    return torchloom.initialize(model=Tricky(), config=config, optimizer=made and optimizer)[0]


def test_states_of_owners_wait_on_the_host(tmp_path) -> None:
    def fn(rank: int, kind: str, stage: int, **compile):
        plain, moved = (of_owners(kind, stage, waits=w, **(compile if w else {})) for w in (0, 1))
        assert moved.offloads._stream is not None
        moved.offloads._stream.chunk_bytes = 300  # a few parameters each
        for step in range(3):
            moved.offloads._stream.num_slots = 1 + (step + rank) % 2
            expected = train(plain, rank, 1, first=step)
            with fuzzed(seed=step + 7 * rank, most_s=2e-4):
                assert train(moved, rank, 1, first=step) == expected
        held = nested_states(moved)
        assert held and all(map(is_on_host, held))
        assert moved.move_stats().host_bytes >= sum(each.nbytes for each in held)
        # Files know nothing of where states live.
        moved.save_checkpoint(tmp_path, f"{kind}-{stage}")
        for engine in (plain, moved):
            engine.load_checkpoint(tmp_path, f"{kind}-{stage}")
        assert train(plain, rank, 1, first=4) == train(moved, rank, 1, first=4)
        assert_equal(weights(plain.module), weights(moved.module))
        moved.reload_states()
        return len(held)

    def all_of(rank: int):
        for kind, stage in (
            ("Muon", 1),
            ("Muon", 3),
            ("Adafactor", 1),
            ("Adafactor", 3),
            ("Nested", 2),
        ):
            fn(rank, kind, stage)
        fn(rank, "Muon", 3, offload_parameters=True)

    run_ranks(2, all_of)
    run_ranks(3, fn, "Muon", 3)


def test_a_budget_places_states_of_owners() -> None:
    def fn(rank: int, kind: str, budget: Any, waits: bool = True):
        torch._dynamo.reset()
        engine = of_owners(kind, 3, waits=waits, backend="aot_eager", memory_budget=budget)
        engine.compile()
        losses = train(engine, rank, 4)
        states, plan = nested_states(engine), engine.plan()
        here = sum(value.nbytes for value in states if not is_on_host(value))
        return losses, here, sum(each.nbytes for each in states), plan.base_bytes, plan.peak_bytes

    for kind in ("Muon", "Nested"):
        roomy = run_ranks(2, fn, kind, "1GB")
        total, base = max(each[2] for each in roomy), roomy[0][3]
        assert all(each[1] == each[2] for each in roomy)
        between = run_ranks(2, fn, kind, roomy[0][4] + total // 2)
        for rank in range(2):
            assert between[rank][0] == roomy[rank][0]
            assert between[rank][1] <= total // 2
    resident = run_ranks(2, fn, kind, "1GB", False)
    assert abs(resident[0][3] - base - total) <= 64  # counts of steps

    def refused(rank):
        with pytest.raises(PlanError, match="optimizer's step adds"):
            fn(rank, kind, base + 100)

    run_ranks(2, refused)


def test_what_cannot_stream_is_refused() -> None:
    def fn(rank):
        engine = of_owners("Counting", 3, waits=True)
        engine.offloads._stream.chunk_bytes = 300
        with pytest.raises(EngineError, match=r"Counting was declared to step by parts"):
            train(engine, rank, 1)
        engine, _ = make_engine(3, compile={"offload_opt_states": True})
        engine.optimizer.register_step_post_hook(lambda *_: None)
        engine.backward(engine(tokens(0, rank)))
        with pytest.raises(EngineError, match="step hooks"):
            engine.step()

    run_ranks(1, fn)
