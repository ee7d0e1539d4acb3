"""Parameters with fewer elements than ranks, odd ones and empty ones train as in one process."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

import torchloom
from support.pool import run_ranks
from torchloom.shard import layout_of

SIZES = ((), (0,), (1,), (2,), (3,), (5,), (7,), (2, 3), (0, 4), (3, 3), (11,), (1, 13))
STEPS, MICRO, CLIP = 2, 2, 0.05


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(size)) for size in SIZES])
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        total = self.frozen.sum() * 0.01
        for index, weight in enumerate(self.weights, start=1):
            total = total + (weight * x[:, :1].mean() + index).sin().sum() * x[:, 1].mean()
        return total


def batch(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randn(3, 2, generator=generator)


def alone(num_ranks: int) -> tuple[dict[str, Tensor], list[float]]:
    """Train in one process on the batches of all ranks."""
    model, norms = Tiny(), []
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-2, weight_decay=0.1, fused=False)
    for step in range(STEPS):
        for micro in range(MICRO):
            for rank in range(num_ranks):
                (model(batch(step, micro, rank)) / (MICRO * num_ranks)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(trained, CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), norms


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterable[None]:
    """Fill memory that nobody has written with NaN: padding that counts anywhere would show."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("num_ranks", "backend"),
    [
        pytest.param(2, None, marks=pytest.mark.exhaustive),
        (3, None),
        pytest.param(4, None, marks=pytest.mark.exhaustive),
        pytest.param(3, "aot_eager", marks=pytest.mark.exhaustive),
    ],
)
def test_engine(stage: int, num_ranks: int, backend: str | None) -> None:
    def fn(rank):
        model, norms = Tiny(), []
        engine, *_ = torchloom.initialize(
            model=model,
            config={
                "train_micro_batch_size_per_gpu": 3,
                "gradient_accumulation_steps": MICRO,
                "gradient_clipping": CLIP,
                "optimizer": {
                    "type": "AdamW",
                    "params": {"lr": 1e-2, "weight_decay": 0.1, "fused": False},
                },
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            },
        )
        if backend is not None:
            engine.compile(backend=backend)
        for step in range(STEPS):
            for micro in range(MICRO):
                engine.backward(engine(batch(step, micro, rank)))
                engine.step()
            norms.append(engine.get_global_grad_norm())
        return model.state_dict(), norms

    expected, norms = alone(num_ranks)
    for state, found in run_ranks(num_ranks, fn):
        assert found == pytest.approx(norms, rel=1e-5)
        for name, weight in expected.items():
            torch.testing.assert_close(state[name], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_own_loop(num_ranks: int) -> None:
    def fn(rank, stage):
        model, norms = torchloom.shard_model(Tiny(), stage, persistence_threshold=0), []
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, 1e-2, weight_decay=0.1, fused=False)
        for step in range(STEPS):
            for micro in range(MICRO):
                (model(batch(step, micro, rank)) / MICRO).backward()
            norms.append(float(torchloom.clip_grad_norm_(model, CLIP)))
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict(), norms, [s.name for s in layout_of(model).sharded]

    expected, norms = alone(num_ranks)
    for stage in (2, 3):
        for state, found, sharded in run_ranks(num_ranks, fn, stage):
            assert sharded
            assert found == pytest.approx(norms, rel=1e-5)
            for name, weight in expected.items():
                torch.testing.assert_close(state[name], weight, rtol=1e-5, atol=1e-6)
