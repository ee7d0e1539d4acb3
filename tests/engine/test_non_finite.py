"""A step whose gradients hold NaN or Inf never reaches the weights, on any rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torchloom
from support.models import tokens, tricky
from support.pool import run_ranks
from support.runs import assert_equal, make_engine, train, weights
from torchloom.config import load_config
from torchloom.engine import Engine
from torchloom.errors import ConfigError, EngineError, NonFiniteError
from torchloom.events import Recorder, StepSkipped
from torchloom.runtime.channel import CHANNELS
from torchloom.shard import local_shard

STAGES = (0, 1, 2, 3)
DTYPES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}},
}


def everything(engine: Engine) -> dict[str, torch.Tensor]:
    """Return copies of all weights and optimizer states of this rank."""
    found = weights(engine.module)
    for index, state in enumerate(engine.optimizer.state.values()):
        found.update({f"{index}.{key}": value.clone() for key, value in state.items()})
    return found


def parameter(model: nn.Module, name: str) -> nn.Parameter:
    return dict(model.named_parameters())[name]


def spoiled_step(engine: Engine, rank: int, where: str, value: float) -> None:
    """Take a step that has `value` in the loss or in one gradient of rank 1 alone."""
    num_micro = engine.gradient_accumulation_steps()
    for micro in range(num_micro):
        loss = engine(tokens(90 + micro, rank))
        is_bad = rank == 1 and micro == num_micro - 1
        engine.backward(loss * (value if is_bad and where == "loss" else 1.0))
        if is_bad and where == "gradient":
            grad = local_shard(parameter(engine.module, "up.weight").grad)
            grad.view(-1)[-9 if engine.config.zero.stage == 1 else 0] = value
        engine.step()


def cases() -> list[Any]:
    found = []
    for stage in STAGES:
        for index, (dtype, backend) in enumerate(
            [("fp32", None), ("bf16", None), ("fp16", None), ("fp32", "aot_eager")]
        ):
            case = (stage, dtype, backend, index % 2 == 0, 1 + (stage + index) % 2)
            is_one_of_many = stage not in (index, 3)
            marks = [pytest.mark.exhaustive] if is_one_of_many else []
            found.append(pytest.param(*case, marks=marks))
    return found


@pytest.mark.parametrize(("stage", "dtype", "backend", "clips", "accumulation"), cases())
def test_a_spoiled_step_is_skipped_on_all_ranks(
    stage: int, dtype: str, backend: str | None, clips: bool, accumulation: int
) -> None:
    def fn(rank):
        engine, _ = make_engine(
            stage,
            gradient_clipping=0.5 if clips else 0.0,
            gradient_accumulation_steps=accumulation,
            **DTYPES[dtype],
        )
        if backend is not None:
            engine.compile(backend=backend)
        train(engine, rank, 1)
        told = []
        for where in ("loss", "gradient"):
            for value in (float("nan"), float("inf"), float("-inf")):
                before = everything(engine)
                with Recorder() as recorder:
                    spoiled_step(engine, rank, where, value)
                told += [e for e in recorder.events if isinstance(e, StepSkipped)]
                assert not engine.was_step_applied()
                assert_equal(everything(engine), before)
        assert engine.skipped_steps == 6
        train(engine, rank, 1)
        assert engine.was_step_applied()
        assert all(bool(w.isfinite().all()) for w in weights(engine.module).values())
        return told

    first, second = run_ranks(2, fn)
    strip = [(e.param, e.rank, e.value, e.loss_rank, e.num_skipped) for e in first]
    assert strip == [(e.param, e.rank, e.value, e.loss_rank, e.num_skipped) for e in second]
    assert [e.loss_rank for e in first[:3]] == [1, 1, 1]
    assert [e.param for e in first[3:]] == ["up.weight"] * 3
    assert [e.value for e in first[3:]] == ["nan", "inf", "inf"]
    # Gradients that all ranks hold are averaged after the test has spoiled one rank's.
    averages_later = stage in (0, 1) and (accumulation > 1 or backend is None)
    if not (averages_later and stage == 0):
        assert {e.rank for e in first[3:]} == {1}


def test_a_spoiled_copy_in_hybrid_sharding() -> None:
    def fn(rank):
        engine, _ = make_engine(
            3, zero_optimization={"stage": 3, "shard_size": 2, "param_persistence_threshold": 20}
        )
        train(engine, rank, 1)
        before = everything(engine)
        for spoiler in range(4):
            engine.backward(engine(tokens(5, rank)))
            for name in ("up.weight", "up.bias") if rank == spoiler else ():
                local_shard(parameter(engine.module, name).grad)[0] = float("nan")
            with Recorder() as recorder:
                engine.step()
            (event,) = [e for e in recorder.events if isinstance(e, StepSkipped)]
            assert (event.rank, event.param) == (spoiler, "up.weight")
            assert_equal(everything(engine), before)
        return engine.skipped_steps

    assert run_ranks(4, fn) == [4] * 4


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.exhaustive), 1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_raise(stage: int, dtype: str) -> None:
    def fn(rank):
        engine, _ = make_engine(stage, non_finite="raise", **DTYPES[dtype])
        train(engine, rank, 1)
        before = everything(engine)
        with pytest.raises(NonFiniteError) as caught:
            spoiled_step(engine, rank, "loss", float("nan"))
        assert_equal(everything(engine), before)
        assert engine.global_steps == 1
        assert engine.skipped_steps == 0
        train(engine, rank, 1)  # nothing of the spoiled step is left
        assert engine.was_step_applied()
        return str(caught.value)

    for text in run_ranks(2, fn):
        assert "step 1:" in text
        assert "'embed.weight' (nan, rank 0)" in text
        assert "the loss of rank 1 was nan" in text
        assert "\n" not in text


@pytest.mark.parametrize("stage", STAGES)
def test_stop_ends_the_run_in_order(stage: int, tmp_path) -> None:
    def fn(rank):
        engine, _ = make_engine(stage, non_finite="stop")
        train(engine, rank, 1)
        assert not engine.should_stop
        assert engine.stop_reason is None
        before = everything(engine)
        spoiled_step(engine, rank, "loss", float("inf"))
        assert engine.should_stop
        assert engine.skipped_steps == 1
        assert_equal(everything(engine), before)
        engine.save_checkpoint(tmp_path)
        with pytest.raises(NonFiniteError, match="should_stop"):
            train(engine, rank, 1)
        again, _ = make_engine(stage, seed=1, non_finite="stop")
        again.load_checkpoint(tmp_path)
        assert not again.should_stop
        assert_equal(weights(again.module), weights(engine.module))
        return engine.stop_reason

    for reason in run_ranks(2, fn):
        assert "step 1 was dropped" in reason


def test_a_stopped_run_goes_on_from_a_checkpoint(tmp_path) -> None:
    def fn(rank):
        engine, _ = make_engine(3, non_finite="stop")
        train(engine, rank, 1)
        engine.save_checkpoint(tmp_path)
        through = train(engine, rank, 1, first=1)
        spoiled_step(engine, rank, "loss", float("inf"))
        engine.load_checkpoint(tmp_path, load_module_only=True)
        assert engine.should_stop  # the optimizer is not that of the checkpoint
        engine.load_checkpoint(tmp_path)
        assert not engine.should_stop
        assert engine.stop_reason is None
        assert train(engine, rank, 1, first=1) == through
        spoiled_step(engine, rank, "loss", float("inf"))
        assert engine.should_stop

    run_ranks(2, fn)


@pytest.mark.parametrize("place", ["top", "fp16"])
def test_skips_in_a_row_have_a_limit(place: str) -> None:
    limit = {"max_consecutive_skips": 2}
    rest = {"fp16": {"enabled": True, **limit}} if place == "fp16" else limit

    def fn(rank):
        engine, _ = make_engine(**rest)
        for _ in range(2):
            spoiled_step(engine, rank, "loss", float("nan"))
        train(engine, rank, 40 if place == "fp16" else 1)  # a good step; fp16 finds its scale
        skipped = engine.skipped_steps
        before = everything(engine)
        for _ in range(2):
            spoiled_step(engine, rank, "loss", float("nan"))
        with pytest.raises(EngineError, match="max_consecutive_skips = 2"):
            spoiled_step(engine, rank, "loss", float("nan"))
        assert_equal(everything(engine), before)
        return engine.skipped_steps - skipped

    if place == "fp16":
        rest["fp16"]["initial_scale_power"] = 0
    assert run_ranks(2, fn) == [3, 3]


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_large_finite_gradients_are_stepped(clip: float) -> None:
    """Their squares overflow float32: that is no reason to skip, nor to clip them to zero."""

    def fn(rank):
        engine, _ = make_engine(
            3,
            gradient_clipping=clip,
            optimizer={"type": "SGD", "params": {"lr": 1.0 if clip else 1e-26, "weight_decay": 0}},
        )
        before = everything(engine)
        engine.backward(engine(tokens(0, rank)) * 1e25)
        engine.step()
        norm = engine.get_global_grad_norm()
        changed = not torch.equal(before["up.weight"], engine.module.state_dict()["up.weight"])
        return engine.was_step_applied(), changed, norm

    for applied, changed, norm in run_ranks(2, fn):
        assert (applied, changed) == (True, True)
        assert 1e23 < norm < 1e27


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_own_loop(stage: int) -> None:
    def fn(rank):
        model = torchloom.shard_model(tricky(), stage, persistence_threshold=20)
        model(tokens(0, rank)).backward()
        norm = torchloom.clip_grad_norm_(model, 0.5, error_if_nonfinite=True)
        assert bool(norm.isfinite())
        if rank == 1:
            local_shard(parameter(model, "up.weight").grad).view(-1)[3] = float("inf")
        before = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        with pytest.raises(NonFiniteError, match=r"'up.weight' \(inf, rank 1\)"):
            torchloom.clip_grad_norm_(model, 0.5, error_if_nonfinite=True)
        after = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert_equal(after, before)
        return bool(torchloom.clip_grad_norm_(model, 0.5).isfinite())

    assert run_ranks(2, fn) == [False, False]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"non_finite": "ignore"}, "skip"),
        (
            {"non_finite": "raise", "bf16": {"enabled": True, "check_grad_overflow": False}},
            "bf16.check_grad_overflow",
        ),
    ],
)
def test_contradictions(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(config)


def test_no_further_collective_with_clipping() -> None:
    """The verdict is the norm: a step with clipping has one all-reduce of one number, as before."""

    def fn(rank):
        engine, _ = make_engine(3, gradient_clipping=1.0)
        train(engine, rank, 1)
        engine.backward(engine(tokens(1, rank)))
        channels = list(CHANNELS.values())
        before = sum(channel.num_begun for channel in channels)
        engine.step()
        return sum(channel.num_begun for channel in channels) - before

    assert run_ranks(2, fn) == [1, 1]
