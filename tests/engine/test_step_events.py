"""`StepEnded` and `Engine.log_to`: the numbers of each step, equal on all ranks, for anyone who asks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import torchloom
from support.models import tokens
from support.pool import run_ranks
from support.runs import assert_equal, hears, make_engine, settings, train, weights
from torchloom.errors import ConfigError
from torchloom.events import Recorder, StepEnded


def ended(recorder: Recorder) -> list[StepEnded]:
    return [event for event in recorder.events if isinstance(event, StepEnded)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_tells_its_numbers_and_ranks_tell_the_same(stage: int, accumulation: int) -> None:
    def fn(rank):
        engine, _ = make_engine(
            stage, gradient_accumulation_steps=accumulation, gradient_clipping=0.1
        )
        with Recorder() as recorder:
            losses = train(engine, rank, 3)
        told = ended(recorder)
        norm = engine.get_global_grad_norm()
        return told, losses, norm, engine.comm_stats()

    (first, losses_0, norm, stats), (second, losses_1, *_) = run_ranks(2, fn)
    assert [each.step for each in first] == [1, 2, 3]
    same = ("step", "loss", "grad_norm", "lr", "tokens", "samples", "skipped", "collectives")
    for one, other in zip(first, second, strict=True):
        assert [getattr(one, name) for name in same] == [getattr(other, name) for name in same]
    assert [each.rank for each in (first[0], second[0])] == [0, 1]
    for step, each in enumerate(first):
        mine = losses_0[step * accumulation : (step + 1) * accumulation]
        theirs = losses_1[step * accumulation : (step + 1) * accumulation]
        assert each.rank_loss == pytest.approx(sum(mine) / accumulation, rel=1e-6)
        both = sum(mine + theirs) / (2 * accumulation)
        assert each.loss == pytest.approx(both, rel=1e-6)
        assert each.loss != pytest.approx(each.rank_loss, rel=1e-6)
        assert each.tokens == 2 * accumulation * 3 * 7
        assert each.rank_tokens == accumulation * 3 * 7
        assert each.samples == (step + 1) * 2 * accumulation * 3
        assert each.lr == 1e-2 and each.loss_scale is None and not each.skipped
        assert 0 <= each.wait_seconds < each.seconds
        assert each.tokens_per_second == pytest.approx(each.tokens / each.seconds)
        assert each.peak_bytes is not None and each.peak_bytes > 1 << 20
        assert each.mfu is None  # nobody rates this processor
        assert (each.graphs, each.recompiles) == (0, 0)
    assert first[-1].grad_norm == norm and norm > 0.1
    assert sum(each.collectives for each in first) == stats.num_collectives > 0
    assert sum(each.collective_bytes for each in first) == stats.num_bytes > 0


def test_a_function_gets_floats_on_rank_0_alone() -> None:
    def fn(rank):
        engine, _ = make_engine(3)
        own, everywhere, seldom = [], [], []
        engine.log_to(lambda metrics, step: own.append((step, metrics)))
        engine.log_to(lambda *got: everywhere.append(got), all_ranks=True, prefix="train/")
        engine.log_to(lambda metrics, step: seldom.append(step), every=2, all_ranks=True)
        train(engine, rank, 4)
        return own, everywhere, seldom

    (own, all_0, seldom), (none, all_1, _) = run_ranks(2, fn)
    assert [step for step, _ in own] == [1, 2, 3, 4] and none == []
    assert seldom == [2, 4]
    names = set(own[0][1])
    assert {"loss", "rank_loss", "grad_norm", "lr", "tokens", "tokens_per_second"} < names
    assert {"seconds", "peak_bytes", "collectives", "recompiles", "skipped", "samples"} < names
    assert not {"step", "rank", "at_s", "mfu", "loss_scale"} & names
    for _, metrics in own:
        assert all(type(value) is float for value in metrics.values())
    assert [m["train/loss"] for m, _ in all_0] == [m["train/loss"] for m, _ in all_1]
    assert [m["train/loss"] for m, _ in all_0] == [m["loss"] for _, m in own]


def test_a_function_that_fails_costs_one_warning_and_no_weight_depends_on_who_listens() -> None:
    def full(metrics, step):
        raise OSError(28, "No space left on device")

    def run(rank, listens):
        engine, model = make_engine(3, gradient_clipping=0.5)
        heard = []
        if listens:
            engine.log_to(full)
            engine.log_to(lambda metrics, step: heard.append(step))
        train(engine, rank, 3)
        return heard, weights(model)

    def fn(rank):
        warned = hears()
        (heard, spoiled), (_, alone) = run(rank, True), run(rank, False)
        assert_equal(spoiled, alone)
        return heard, [text for text in warned if "failed" in text]

    (heard, (warned,)), (_, none) = run_ranks(2, fn)
    assert heard == [1, 2, 3] and none == []
    assert "No space left on device" in warned and "full of log_to" in warned


@pytest.mark.parametrize("stage", [0, 3])
def test_a_skipped_fp16_step_is_told_as_such(stage: int) -> None:
    def fn(rank):
        engine, _ = make_engine(
            stage,
            fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1},
            scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_type": "linear"}},
        )  # fmt: skip
        with Recorder() as recorder:
            train(engine, rank, 2)
            loss = engine(tokens(9, rank))
            engine.backward(loss * (float("inf") if rank == 1 else 1.0))
            engine.step()
            train(engine, rank, 1, first=3)
        return ended(recorder)

    first, second = run_ranks(2, fn)
    for told in (first, second):
        assert [each.skipped for each in told] == [False, False, True, False]
        assert [each.num_skipped for each in told] == [0, 0, 1, 1]
        assert [each.loss_scale for each in told] == [256.0, 256.0, 256.0, 128.0]
        assert [each.grad_norm is None for each in told] == [False, False, True, False]
        # The rates that the steps were taken with; a skipped step does not move the schedule.
        rates = [each.lr for each in told]
        assert rates[0] == rates[1] < rates[2] == rates[3]
        assert told[2].loss == math.inf
    assert math.isfinite(first[2].rank_loss) and second[2].rank_loss == math.inf
    assert [each.metrics()["skipped"] for each in first] == [0.0, 0.0, 1.0, 0.0]


def test_without_a_norm_a_rank_tells_its_own_loss_alone() -> None:
    def fn(rank):
        engine, _ = make_engine(2, bf16={"enabled": True, "check_grad_overflow": False})
        with Recorder() as recorder:
            losses = train(engine, rank, 1)
        return ended(recorder)[0], losses

    for told, losses in run_ranks(2, fn):
        assert told.grad_norm is None and told.loss is None and told.tokens is None
        assert told.rank_loss == losses[0] and told.rank_tokens == 21
        assert "loss" not in told.metrics() and told.metrics()["rank_loss"] == losses[0]


def test_evaluation_is_no_part_of_a_step() -> None:
    def fn(rank):
        engine, _ = make_engine(0)
        with Recorder() as recorder:
            for step in range(2):
                with torch.no_grad():
                    engine(tokens(50 + step, rank, batch=9))
                train(engine, rank, 1, first=step)
        return [each.rank_tokens for each in ended(recorder)]

    assert run_ranks(1, fn) == [[21, 21]]


def test_batches_without_token_ids_have_no_tokens() -> None:
    def fn(rank):
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        engine, *_ = torchloom.initialize(model=model, config=settings())
        engine.work.peak_tflops = 100.0
        with Recorder() as recorder:
            for _ in range(2):
                engine.backward(engine(torch.ones(2, 16)).sum())
                engine.step()
                engine.work.tokens_of = lambda batch: 2 * len(batch)
        return ended(recorder)

    (unknown, given), _ = run_ranks(2, fn)
    assert unknown.tokens is None and unknown.tokens_per_second is None and unknown.mfu is None
    assert unknown.loss is not None
    assert given.tokens == 8 and given.mfu > 0


def test_ranks_with_other_batches_are_added_up() -> None:
    def fn(rank):
        engine, _ = make_engine(3, gradient_accumulation_steps=2)
        with Recorder() as recorder:
            for step in range(2):
                if step == 1 and rank == 1:
                    engine.work.tokens_of = lambda ids: None
                for micro in range(2):
                    engine.backward(engine(tokens(micro, rank, batch=2 + rank, length=4 + micro)))
                    engine.step()
        return ended(recorder)

    first, second = run_ranks(2, fn)
    assert [each.tokens for each in first] == [each.tokens for each in second] == [45, None]
    assert [each.rank_tokens for each in first] == [18, 18]
    assert [each.rank_tokens for each in second] == [27, None]
    assert first[1].loss == second[1].loss > 1  # what is not known on one rank spoils no other sum


def test_mfu_is_the_formula_over_the_peak() -> None:
    def fn(rank):
        engine, _ = make_engine(3)
        engine.work.peak_tflops = 0.5
        with Recorder() as recorder:
            train(engine, rank, 1)
        # The embedding is the output head, too, so it counts; of the frozen matrix no gradient is computed.
        flops = 6 * (31 * 12 + 12 * 17 + 17 * 12) + 4 * 12 * 12
        return ended(recorder)[0], engine.work.flops_per_token, flops

    for told, found, flops in run_ranks(2, fn):
        assert found == flops
        assert told.mfu == pytest.approx(told.tokens_per_second / 2 * flops / 0.5e12)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        return self.experts[0](x.float()).sum()


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(10, 4), nn.Linear(4, 6)

    def forward(self, ids):
        return self.out(self.embed(ids)).sum()


@pytest.mark.parametrize(("model", "flops"), [(Experts, None), (Lookup, 6 * 24.0)])
def test_where_the_formula_does_not_hold_there_are_no_flops(model, flops) -> None:
    def fn(rank):
        engine, *_ = torchloom.initialize(model=model(), config=settings())
        return engine.work.flops_per_token

    assert run_ranks(1, fn) == [flops]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_recompiles_are_counted(backend: str) -> None:
    def fn(rank):
        engine, _ = make_engine(3)
        engine.compile(backend=backend)
        with Recorder() as recorder:
            train(engine, rank, 2)
            engine.backward(engine(tokens(5, rank, batch=5)))
            engine.step()
            train(engine, rank, 1, first=6)
        return [(each.graphs, each.recompiles) for each in ended(recorder)], len(
            engine.compile_report().graphs
        )

    for told, num_graphs in run_ranks(2, fn):
        before = told[0][0]
        assert before >= 1 and told[0][1] == 0 and told[1] == (before, 0)
        assert told[2][0] > before and told[2][1] == told[2][0] - before
        assert told[3] == (num_graphs, 0)


def test_a_resumed_run_goes_on_counting(tmp_path) -> None:
    def fn(rank):
        engine, _ = make_engine(3)
        train(engine, rank, 3)
        engine.save_checkpoint(tmp_path)
        resumed, _ = make_engine(3, seed=1)
        resumed.load_checkpoint(tmp_path)
        with Recorder() as recorder:
            train(resumed, rank, 1, first=3)
        return ended(recorder)[0]

    for told in run_ranks(2, fn):
        assert (told.step, told.samples) == (4, 4 * 6)
        assert told.wait_seconds == 0  # timed from its forward on
        assert told.seconds > 0


def test_hybrid_sharding_counts_every_rank() -> None:
    def fn(rank):
        zero = {"stage": 3, "shard_size": 2, "param_persistence_threshold": 20}
        engine, _ = make_engine(3, zero_optimization=zero)
        with Recorder() as recorder:
            losses = train(engine, rank, 1)
        return ended(recorder)[0], losses[0]

    found = run_ranks(4, fn)
    mean = sum(loss for _, loss in found) / 4
    for told, _ in found:
        assert told.loss == pytest.approx(mean, rel=1e-6)
        assert told.tokens == 4 * 21


def test_what_cannot_be_called_is_refused() -> None:
    def fn(rank):
        engine, _ = make_engine(0)
        with pytest.raises(ConfigError, match="log_to was given a dict"):
            engine.log_to({})
        with pytest.raises(ConfigError, match=r"every=0.*at least 1"):
            engine.log_to(print, every=0)
        return True

    assert run_ranks(1, fn) == [True]


def test_nobody_reads_the_loss_when_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(rank):
        read = []
        before = torch.Tensor.__float__
        engine, _ = make_engine(0, gradient_clipping=1.0)
        loss = engine(tokens(0, rank))
        engine.backward(loss)
        torch.Tensor.__float__ = lambda self: read.append(1) or before(self)
        engine.step()
        quiet = len(read)
        engine.log_to(lambda metrics, step: None)
        engine.backward(engine(tokens(1, rank)))
        engine.step()
        torch.Tensor.__float__ = before
        return quiet, len(read)

    quiet, loud = run_ranks(1, fn)[0]
    assert quiet == 0 and loud > 0
