"""One backward pass over a loss of two engines lets both step; padding never counts in norms."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchloom
from support.pool import run_ranks
from support.runs import settings
from torchloom.errors import EngineError
from torchloom.shard import layout_of, local_shard

WIDTH = 7


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def started(seed: int, stage: int, accumulation: int = 1, **more):
    config = settings(stage)
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    config |= {"gradient_accumulation_steps": accumulation, "gradient_clipping": 0.5, **more}
    return torchloom.initialize(model=model(seed), config=config)[0]


def weights(*engines) -> list[torch.Tensor]:
    return [each.clone() for engine in engines for each in engine.module.state_dict().values()]


def run(rank: int, stage: int, *, compiled: bool, accumulation: int) -> list[torch.Tensor]:
    torch._dynamo.reset()
    student, teacher = (started(seed, stage, accumulation) for seed in (0, 1))
    if compiled:
        student.compile(backend="aot_eager")
        teacher.compile(backend="aot_eager")
    for step in range(4):
        x = batch(rank, step)
        student.backward((student(x) - teacher(x)).square().mean())
        student.step()
        teacher.step()
    assert student.global_steps == teacher.global_steps == 4 // accumulation
    return weights(student, teacher)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_loss_of_two_engines_steps_both(stage: int) -> None:
    def fn(rank):
        eager = run(rank, stage, compiled=False, accumulation=2)
        return eager, run(rank, stage, compiled=True, accumulation=2)

    before = [*model(0).state_dict().values(), *model(1).state_dict().values()]
    for eager, compiled in run_ranks(2, fn):
        for one, other, first in zip(eager, compiled, before, strict=True):
            torch.testing.assert_close(one, other)
            assert not torch.equal(one, first)


def test_what_was_scaled_otherwise_is_refused_and_no_backward_is_still_an_error() -> None:
    def fn(rank):
        one, other = started(0, 1, accumulation=2), started(1, 1, accumulation=1)
        x = batch(rank, 0)
        one.backward((one(x) - other(x)).square().mean())
        one.step()
        with pytest.raises(EngineError, match="divided by 2 accumulation steps"):
            other.step()
        third = started(2, 1)
        with pytest.raises(EngineError, match="without backward"):
            third.step()
        third.module(
            x
        ).square().mean().backward()  # not by an engine: nothing says how it was scaled
        with pytest.raises(EngineError, match="without backward"):
            third.step()
        return True

    assert run_ranks(2, fn) == [True, True]


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("before", [False, True])
def test_what_was_scaled_otherwise_is_refused_beside_an_own_backward(
    stage: int, before: bool
) -> None:
    def fn(rank):
        one = started(0, stage, fp16={"enabled": True, "initial_scale_power": 10})
        other, x = started(1, stage), batch(rank, 0)
        if before:
            other.backward(other(x).square().mean())
        one.backward(one(other(x)).float().square().mean())
        if not before:
            other.backward(other(x).square().mean())
        with pytest.raises(EngineError, match="scaled by 1024; here it is 1 and 1"):
            other.step()
        return True

    assert run_ranks(2, fn) == [True, True]


@pytest.mark.parametrize("drop", ["engine", "module", "optimizer"])
def test_gradients_of_others_that_were_dropped_do_not_count(drop: str) -> None:
    """As a critic drops what the generator's loss left in it."""

    def fn(rank):
        critic, third = started(1, 1, accumulation=1), started(2, 1)
        generator, x = started(0, 1, accumulation=2), batch(rank, 0)
        generator.backward(critic(generator(x)).square().mean())
        {
            "engine": critic,
            "module": critic.module,
            "optimizer": critic.optimizer,
        }[drop].zero_grad()
        with pytest.raises(EngineError, match="without backward"):
            critic.step()
        critic.backward(critic(x).square().mean())
        third.backward((third(x) - critic(x)).square().mean())  # scaled alike
        generator.backward(generator(x).square().mean())  # goes through no other engine
        critic.step()
        third.step()
        return critic.global_steps, third.global_steps

    assert run_ranks(2, fn) == [(1, 1)] * 2


def reference(stage: int, world_size: int) -> list[torch.Tensor]:
    """Train both models in one process on the mean loss of all ranks."""
    one, other = model(0), model(1)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (one, other)]
    for step in range(3):
        for rank in range(world_size):
            x = batch(rank, step)
            ((one(x) - other(x)).square().mean() / world_size).backward()
        for each, optimizer in zip((one, other), optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return [value for each in (one, other) for value in each.state_dict().values()]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_both_train_to_the_weights_of_one_process(stage: int) -> None:
    def fn(rank):
        more = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 1e-2}}}
        one, other = started(0, stage, **more), started(1, stage, **more)
        for step in range(3):
            x = batch(rank, step)
            one.backward((one(x) - other(x)).square().mean())
            other.step()
            one.step()
        return weights(one, other)

    wanted = reference(stage, 2)
    for found in run_ranks(2, fn):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_what_is_written_into_the_padding_of_a_gradient_does_not_count() -> None:
    def run(rank, noisy):
        engine = started(0, 3, gradient_clipping=0.1)
        for step in range(2):
            engine.backward(engine(batch(rank, step)).square().mean())
            if noisy:
                for each in engine.local:
                    shard = local_shard(each.param.grad).view(-1)
                    shard[max(0, each.spec.numel - rank * shard.numel()) :] = 100.0
            engine.step()
        return weights(engine), engine.get_global_grad_norm()

    def fn(rank):
        return run(rank, False), run(rank, True)

    for clean, noisy in run_ranks(2, fn):
        assert float(clean[1]) == float(noisy[1])
        assert all(torch.equal(one, other) for one, other in zip(clean[0], noisy[0], strict=True))


def test_padding_does_not_count_in_an_own_loop() -> None:
    def fn(rank):
        found, written = [], 0
        for noisy in (False, True):
            net = torchloom.shard_model(model(0), stage=3, persistence_threshold=0)
            net(batch(rank, 0)).square().mean().backward()
            for name, each in net.named_parameters():
                numel = layout_of(net)[name].numel
                grad = local_shard(each.grad)
                tail = grad[max(0, numel - rank * grad.numel()) :]
                if noisy and tail.numel():
                    tail.fill_(100.0)
                    written += tail.numel()
            found.append(float(torchloom.clip_grad_norm_(net, 1.0)))
        return found, written

    results = run_ranks(2, fn)
    for (clean, noisy), _ in results:
        assert clean == noisy
    assert any(written for _, written in results)
