"""`loss.backward()` of the caller's trains to the same weights as `engine.backward(loss)`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchloom
from support.pool import run_ranks
from support.runs import settings
from torchloom.engine import Engine
from torchloom.errors import EngineError

WIDTH = 6
ALIKE = {
    "one loss": lambda engine, a, b: (a + b).backward(),
    "several": lambda engine, a, b: torch.autograd.backward([a, b]),
    "parts": lambda engine, a, b: (a.backward(retain_graph=True), b.backward()),
    "scaled": lambda engine, a, b: engine.scale(a + b).backward(),
    "scaled parts": lambda engine, a, b: (engine.scale(a) + engine.scale(b)).backward(),
}


class Two(nn.Module):
    """A model with two outputs in a dict, one of them through a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = checkpoint(self.first, x, use_reentrant=not torch.compiler.is_compiling())
        return {"hidden": hidden, "out": self.second(torch.tanh(hidden))}


def engine_of(stage: int, backend: str | None = None, **more) -> Engine:
    torch.manual_seed(0)
    config = settings(stage, gradient_clipping=0.5, **more)
    engine = torchloom.initialize(model=Two(), config=config)[0]
    if backend is not None:
        engine.compile(backend=backend)
    return engine


def train(engine: Engine, rank: int, backward: Callable[..., object]) -> list[Tensor]:
    for step in range(2 * engine.gradient_accumulation_steps()):
        found = engine(batch(2 * step + rank))
        backward(engine, found["out"].float().square().mean(), found["hidden"].float().abs().mean())
        engine.step()
    assert engine.global_steps == 2
    return [each.clone() for each in engine.module.state_dict().values()]


def batch(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, WIDTH, generator=generator, requires_grad=True)


def own(engine: Engine, a: Tensor, b: Tensor) -> None:
    engine.backward(a + b)


def counts(engine: Engine) -> tuple[int, ...]:
    return engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_user_backward_is_the_engines(backend: str | None) -> None:
    def fn(rank):
        for stage in (0, 1, 3) if backend is None else (1, 3):
            wanted = engine_of(stage, backend, gradient_accumulation_steps=2)
            weights = train(wanted, rank, own)
            for name in ALIKE if backend is None and stage else ("parts", "scaled"):
                engine, backward = (
                    engine_of(stage, backend, gradient_accumulation_steps=2),
                    ALIKE[name],
                )
                for one, other in zip(train(engine, rank, backward), weights, strict=True):
                    torch.testing.assert_close(one, other, msg=f"stage {stage}, {name}")
                assert counts(engine) == counts(wanted), name
                assert engine.get_global_grad_norm() == pytest.approx(wanted.get_global_grad_norm())

    run_ranks(2, fn)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_in_16_bits_losses_are_scaled_once(precision: str) -> None:
    scale = {"initial_scale_power": 8} if precision == "fp16" else {}

    def fn(rank):
        more = {precision: {"enabled": True, **scale}, "gradient_accumulation_steps": 2}
        weights = train(engine_of(3, **more), rank, own)
        losses: list[float] = []
        for name in ("scaled", "scaled parts") if scale else ALIKE:
            engine = engine_of(3, **more)
            engine.log_to(lambda metrics, step: losses.append(metrics["loss"]), all_ranks=True)
            for one, other in zip(train(engine, rank, ALIKE[name]), weights, strict=True):
                torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3, msg=name)
        assert all(0 < each < 10 for each in losses)
        if not scale:
            return
        found = engine(batch(0))
        loss = found["out"].float().mean()
        with pytest.raises(EngineError, match=r"scaled by 1, .* is 256: call engine.scale"):
            (engine.scale(loss) + found["hidden"].mean()).backward()
        with pytest.raises(EngineError, match="already: call"):
            engine.backward(engine.scale(loss))
        assert all(each.grad is None for each in engine.parameters())

    run_ranks(2, fn)


def test_gradients_of_outputs_and_what_is_no_backward_pass_of_the_engine() -> None:
    def fn(rank):
        wanted, engine = engine_of(3), engine_of(3)
        x = batch(rank)
        grad = torch.linspace(0, 1, 3 * WIDTH).view(3, WIDTH)
        wanted.backward((wanted(x)["out"] * grad).sum())
        wanted.step()
        found = engine(x)["out"]
        (each,) = torch.autograd.grad(found.sum(), [found], retain_graph=True)
        assert torch.equal(each, torch.ones_like(found))
        with pytest.raises(EngineError, match="without backward"):
            engine.step()
        torch.ones(1, requires_grad=True).sum().backward()
        with pytest.raises(EngineError, match="without backward"):
            engine.step()
        found.backward(grad)
        engine.step()
        for one, other in zip(engine.parameters(), wanted.parameters(), strict=True):
            torch.testing.assert_close(one, other)

    run_ranks(2, fn)


def test_boundaries_and_factors_of_the_callers() -> None:
    """As DeepSpeed's Trainer and Accelerate call them: several backward passes, then one step."""

    def fn(rank):
        for stage in (0, 1, 3):
            wanted = engine_of(stage, gradient_accumulation_steps=2)
            weights = train(wanted, rank, own)
            for by_user in (False, True):
                engine = engine_of(stage, gradient_accumulation_steps=2)
                for step in range(4):
                    engine.set_gradient_accumulation_boundary(step % 2 == 1)
                    found = engine(batch(2 * step + rank))
                    loss = found["out"].square().mean() + found["hidden"].abs().mean()
                    if by_user:
                        loss.backward()
                    else:
                        half = engine.backward(loss / 2, scale_wrt_gas=False)
                        assert half == loss / 2
                    if step % 2:
                        engine.step()
                        assert engine.was_step_applied()
                for one, other in zip(engine.module.state_dict().values(), weights, strict=True):
                    torch.testing.assert_close(one, other)
                assert (engine.global_steps, engine.global_samples) == counts(wanted)[:2]

    run_ranks(2, fn)


def test_without_managed_accumulation_each_step_updates(tmp_path) -> None:
    """Some backward passes and one step are the managed micro-steps, also from `train_batch` and after a resume."""

    def fn(rank):
        def loss_of(engine, seed):
            return engine(batch(2 * seed + rank))["out"].square().mean()

        for stage in (0, 1, 3):
            free = engine_of(
                stage, gradient_accumulation_steps=3, managed_gradient_accumulation=False
            )
            counted = engine_of(stage, gradient_accumulation_steps=3)
            for seed in range(6):
                free.backward(loss_of(free, seed))
                counted.backward(loss_of(counted, seed))
                counted.step()
                if seed % 3 == 2:
                    assert free.is_gradient_accumulation_boundary()
                    free.step()
                    assert free.was_step_applied() and counts(free) == counts(counted)
            assert not free.managed_gradient_accumulation()
            for name, value in free.module.state_dict().items():
                assert torch.equal(value, counted.module.state_dict()[name])
            with pytest.raises(EngineError, match="each step"):
                free.set_gradient_accumulation_boundary(True)
        free.save_checkpoint(tmp_path)
        counted.load_checkpoint(tmp_path)
        for seed in range(3):
            counted.backward(loss_of(counted, seed))
            counted.step()
        assert counted.was_step_applied()

    run_ranks(2, fn)
