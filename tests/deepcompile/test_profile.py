"""What passes read about memory is what a step allocates, and what they keep gathered keeps the budget."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchloom
from support.pool import run_ranks
from support.runs import settings
from torchloom.errors import PassError
from torchloom.loop.plan_check import standing_bytes
from torchloom.memory import distinct_bytes, measure_peak

WIDTH = 192


class Net(nn.Module):
    """Views, a value that forward returns, and one that backward computes again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).view(-1, 4, WIDTH // 4).transpose(1, 2).tanh().reshape(x.shape)
        return x, x.square().mean()


def engine_of(passes, keep=None, model=None, rounds=1, **compile_section):
    torch.manual_seed(0)
    config = settings(3, compile=compile_section, gradient_accumulation_steps=rounds)
    engine, *_ = torchloom.initialize(model=model or Net(), config=config)
    if keep is not None:
        engine.register_compile_pass("keep", keep)
    engine.compile(backend="aot_eager", passes=passes)
    return engine


def step(engine, x) -> None:
    engine.backward(engine(x)[1])
    engine.step()


def test_the_profile_is_what_a_step_allocates() -> None:
    def fn(rank):
        profiles = {}

        def look(graph_id, profiling_results, bwd):
            profiles[bwd] = profiling_results[graph_id]

        engine = engine_of(["zero3_compile", look, "bucket"])
        x = torch.randn(64, WIDTH)
        for _ in range(2):
            step(engine, x)
        kept = []
        forward = measure_peak(lambda: kept.append(engine(x)))
        backward = measure_peak(lambda: engine.backward(kept[0][1]))
        (profile,) = set(profiles.values())
        found = [
            max(most for *_, most in profile.fwd_mem),
            profile.fwd_mem[-1][1],
            max(most for *_, most in profile.bwd_mem),
        ]
        left = forward.end_bytes
        measured = [forward.peak_bytes, left, left + backward.peak_bytes]
        inner = profile.fwd_mem + profile.bwd_mem
        assert all(most >= max(after, after - delta) for _, after, delta, most in inner)
        return [each - profile.fwd_mem[0][1] for each in found], measured

    for found, measured in run_ranks(2, fn):
        assert found[:2] == measured[:2]
        assert abs(found[2] - measured[2]) < 64  # the engine's own scalars


class Halves(nn.Module):
    """Two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Net(), Net()

    def forward(self, x):
        x, loss = self.first(x)
        torch._dynamo.graph_break()
        return loss + self.second(x)[1]


@pytest.mark.parametrize("rounds", [1, 2])
def test_other_graphs_of_a_step_count(rounds) -> None:
    """Gradients of the second while backward of the first runs, what the first kept while the second runs."""

    def fn(rank):
        profiles = {}

        def look(graph_id, profiling_results, bwd):
            profiles.update(profiling_results)

        engine = engine_of(["zero3_compile", look], model=Halves(), rounds=rounds)
        x = torch.randn(64, WIDTH)
        for _ in range(3 * rounds - 1):
            engine.backward(engine(x))
            engine.step()
        kept = []
        before = standing_bytes(engine.module, engine.optimizer, engine.world.comm)
        forward = measure_peak(lambda: kept.append(engine(x)))
        backward = measure_peak(lambda: engine.backward(kept[0]))
        most = max(forward.peak_bytes, forward.end_bytes + backward.peak_bytes)
        told = max(each.peak_bytes for each in profiles.values())
        return told - (before + distinct_bytes([x]) + most), len(profiles)

    for spare, num_graphs in run_ranks(2, fn):
        assert num_graphs == 2
        assert (
            0 <= spare <= 16384 + 4 * 64 * WIDTH
        )  # the planner's reserve, and what both graphs have as an input


def keep_what_fits(graph_id, profiling_results, mem_budget, param_manager, bwd, nz3):
    """As DeepSpeed's selective_gather chooses."""
    if not bwd:
        return
    profile = profiling_results[graph_id]
    left = mem_budget - max(most for *_, most in profile.fwd_mem + profile.bwd_mem)
    for each in param_manager[graph_id].params.values():
        left -= each.numel * each.dtype.itemsize
        if left < 0:
            break
        nz3.set_persistent(each.param.ds_id)


def keep_all(graph_id, param_manager, bwd, nz3):
    if bwd:
        for ds_id in param_manager[graph_id].ds_ids.values():
            nz3.set_persistent(ds_id)


@pytest.mark.parametrize("num_weights", [0, 2])
def test_a_pass_that_keeps_what_fits_keeps_the_budget(num_weights) -> None:
    weight_bytes = 4 * WIDTH * WIDTH

    def fn(rank):
        x = torch.randn(64, WIDTH)
        peaks = []

        def look(graph_id, profiling_results, bwd):
            peaks.append(profiling_results[graph_id].peak_bytes)

        step(engine_of(["zero3_compile", look]), x)
        budget = max(peaks) + num_weights * weight_bytes + 8192
        engine = engine_of(["zero3_compile", ("keep", budget)], keep=keep_what_fits, strict=True)
        for _ in range(3):
            step(engine, x)
        kept, residents = [], engine.world.comm.residents.num_bytes
        before = standing_bytes(engine.module, engine.optimizer, engine.world.comm)
        forward = measure_peak(lambda: kept.append(engine(x)))
        backward = measure_peak(lambda: engine.backward(kept[0][1]))
        most = max(forward.peak_bytes, forward.end_bytes + backward.peak_bytes)
        return before + distinct_bytes([x]) + most, budget, residents

    for measured, budget, held in run_ranks(2, fn):
        assert budget - 3 * 8192 <= measured <= budget
        assert 0 <= held - num_weights * weight_bytes <= 8192  # biases as well


def test_what_a_pass_keeps_beyond_the_budget_is_refused_by_name() -> None:
    def fn(rank):
        engine = engine_of(
            ["zero3_compile", ("keep", 1 << 20), "bucket"], keep=keep_all, strict=True
        )
        with pytest.raises(
            PassError, match=r"'keep'.*set_persistent keeps .*layers\.0\.weight.*mem_budget"
        ) as error:
            step(engine, torch.randn(64, WIDTH))
        return str(error.value)

    assert len(set(run_ranks(2, fn))) == 1
