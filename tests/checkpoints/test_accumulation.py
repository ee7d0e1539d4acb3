"""Saved in the middle of an accumulation: its gradients are part of the state."""

from __future__ import annotations

import contextlib
from itertools import product

import pytest
import torch

from support.checkpoints import outcome, state_of
from support.models import tokens
from support.pool import run_ranks
from support.runs import assert_equal, make_engine, micro_step, weights

ACCUMULATE = {"gradient_accumulation_steps": 3}


def micro(engine, rank, first, last):
    return [micro_step(engine, tokens(step, rank)) for step in range(first, last)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_in_the_middle_of_an_accumulation(stage, tmp_path) -> None:
    def fn(rank):
        for middle in (1, 2, 4):
            engine, model = make_engine(stage, **ACCUMULATE)
            micro(engine, rank, 0, middle)
            engine.save_checkpoint(tmp_path)
            losses = micro(engine, rank, middle, 7)
            through, state = weights(model), state_of(engine)
            engine, model = make_engine(stage, seed=4, **ACCUMULATE)
            micro(engine, rank, 20, 22)  # gradients of its own, which a load drops
            engine.load_checkpoint(tmp_path)
            assert micro(engine, rank, middle, 7) == losses
            assert_equal(weights(model), through)
            assert state_of(engine) == state

    run_ranks(2, fn)


@pytest.mark.parametrize(
    ("before", "after"), [((0, 2), (3, 1)), ((3, 2), (0, 2)), ((1, 4), (1, 2)), ((2, 1), (0, 3))]
)
def test_accumulated_gradients_on_other_ranks_and_stages(before, after, tmp_path) -> None:
    """The next step is what the ranks that saved would have done, up to rounding."""

    def save(rank):
        engine, model = make_engine(before[0], **ACCUMULATE)
        micro(engine, rank, 0, 5)
        engine.save_checkpoint(tmp_path)
        finish(engine)
        return weights(model)

    def load(rank):
        engine, model = make_engine(after[0], seed=4, **ACCUMULATE)
        engine.load_checkpoint(tmp_path)
        finish(engine)
        return weights(model)

    def finish(engine):
        loss = engine(tokens(77, 0))  # the same on all ranks, so the mean is, too
        engine.backward(loss)
        engine.step()
        assert engine.was_step_applied()

    saved, loaded = run_ranks(before[1], save)[0], run_ranks(after[1], load)[0]
    for name, value in saved.items():
        torch.testing.assert_close(loaded[name], value, rtol=0, atol=2e-4, msg=name)


def test_save_between_backward_and_step(tmp_path) -> None:
    def fn(rank):
        engine, model = make_engine(3)
        engine.backward(engine(tokens(0, rank)))
        engine.save_checkpoint(tmp_path)
        engine.step()
        through = weights(model)
        engine, model = make_engine(3, seed=4)
        engine.load_checkpoint(tmp_path)
        engine.step()
        return through, weights(model)

    for through, resumed in run_ranks(2, fn):
        assert_equal(through, resumed)


def test_another_number_of_micro(tmp_path) -> None:
    def fn(rank):
        engine, _ = make_engine(3, gradient_accumulation_steps=2)
        micro(engine, rank, 0, 2)
        engine.save_checkpoint(tmp_path, tag="boundary")
        micro(engine, rank, 2, 3)
        engine.save_checkpoint(tmp_path, tag="middle")
        engine, _ = make_engine(3, seed=4, gradient_accumulation_steps=4)
        before = state_of(engine)
        text = outcome(lambda: engine.load_checkpoint(tmp_path, "middle"))
        assert state_of(engine) == before
        engine.load_checkpoint(tmp_path, "boundary")
        micro(engine, rank, 4, 7)
        assert engine.global_steps == 1
        micro(engine, rank, 7, 8)
        assert engine.global_steps == 2
        return text

    for text in run_ranks(2, fn):
        assert "middle of an accumulation of 2 micro-steps, this run accumulates 4" in text


def test_hybrid_sharding_in_the_middle_of_an_accumulation(tmp_path) -> None:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 20, "shard_size": 2}

    def fn(rank):
        engine, _ = make_engine(zero_optimization=zero, **ACCUMULATE)
        micro(engine, rank, 0, 4)
        engine.save_checkpoint(tmp_path)
        micro(engine, rank, 4, 7)
        through = state_of(engine)
        engine, _ = make_engine(seed=4, zero_optimization=zero, **ACCUMULATE)
        engine.load_checkpoint(tmp_path)
        micro(engine, rank, 4, 7)
        return through, state_of(engine)

    for through, resumed in run_ranks(4, fn):
        assert through == resumed


def test_saved_and_loaded_inside_no_sync(tmp_path) -> None:
    """It refuses steps for its own time alone; what the caller said of the boundary is kept."""

    def go_on(engine, rank):
        for step in (1, 2):
            loss = engine(tokens(step, rank))
            engine.backward(loss)
            engine.step()
        return engine.global_steps, weights(engine.module)

    def fn(rank):
        for forced, inside in product((None, True), (False, True)):
            engine, _ = make_engine(1)
            with engine.no_sync():
                engine.backward(engine(tokens(0, rank)))
                if forced is not None:
                    engine.set_gradient_accumulation_boundary(forced)
                engine.save_checkpoint(tmp_path)
            assert engine.global_steps == 0
            through = go_on(engine, rank)
            engine, _ = make_engine(1, seed=2)
            with engine.no_sync() if inside else contextlib.nullcontext():
                engine.load_checkpoint(tmp_path)
                assert engine.is_gradient_accumulation_boundary()
            resumed = go_on(engine, rank)
            assert through[0] == resumed[0] == 2
            assert_equal(through[1], resumed[1])

    run_ranks(2, fn)
