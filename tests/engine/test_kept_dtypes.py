"""In which dtypes parameters are kept: trained ones wide, frozen ones and float64 as the model had them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchloom
from support.pool import run_ranks
from support.runs import settings
from torchloom.errors import ShardError
from torchloom.shard import Precision, full_state_dict, owners_of

STAGES = (0, 1, 2, 3)


class Adapted(nn.Module):
    """A frozen bf16 base with a norm in fp32 beside, and adapters of both dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(9, 21, dtype=torch.bfloat16).requires_grad_(False)
        self.norm = nn.LayerNorm(21).requires_grad_(False)
        self.batch = nn.BatchNorm1d(21, dtype=torch.bfloat16)
        self.down, self.up = nn.Linear(21, 3), nn.Linear(3, 5, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        low = self.batch(self.base(x.to(self.base.weight.dtype)).to(self.batch.weight.dtype))
        return self.up(self.down(self.norm(low.to(self.norm.weight.dtype))).to(self.up.weight))


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: param.dtype for name, param in owners_of(model).items()}


def step(engine: Any, model: nn.Module, x: Tensor) -> None:
    loss = (engine or model)(x).float().square().mean()
    if engine is None:
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    else:
        engine.backward(loss)
        engine.step()


def test_frozen_parameters_stay_as_they_are(tmp_path) -> None:
    def fn(rank: int):
        own = [(stage, None) for stage in STAGES]
        for stage, lower in (*own, (1, False), (2, True), (3, False)):
            model, engine = Adapted(), None
            if lower is None:
                torchloom.shard_model(model, stage, persistence_threshold=0)
            else:
                config = settings(stage, bf16={"enabled": lower})
                engine, *_ = torchloom.initialize(model=model, config=config)
            if engine is not None and stage == 3:
                engine.compile(backend="aot_eager")
            found = dtypes(model)
            low = {name for name, dtype in found.items() if dtype == torch.bfloat16}
            assert low == {"base.weight", "base.bias"}
            step(engine, model, torch.ones(4, 9) + rank)
            whole = full_state_dict(model)
            assert all(whole[name].dtype == dtype for name, dtype in found.items())
            assert torch.equal(whole["base.weight"], Adapted().base.weight)
            if engine is not None and stage == 3:
                engine.save_checkpoint(tmp_path)
                step(engine, model, torch.ones(4, 9))
                engine.load_checkpoint(tmp_path)
                again = full_state_dict(model)
                assert all(torch.equal(again[name], whole[name]) for name in whole)
                assert dtypes(model) == found
        kept = Precision(master=None), Precision(master=torch.float32), Precision()
        models = [nn.Linear(4, 4, dtype=torch.float64) for _ in kept]
        for model, precision in zip(models, kept, strict=True):
            torchloom.shard_model(model, 3, persistence_threshold=0, precision=precision)
        return [model._parameters["weight"].dtype for model in models]

    assert run_ranks(2, fn) == [[torch.float64, torch.float32, torch.float64]] * 2


@pytest.mark.parametrize("how", ["own", "compiled", "engine"])
def test_float64_stays(how: str) -> None:
    def fn(rank: int) -> float:
        most = 0.0
        torch.manual_seed(0)
        start = nn.Sequential(nn.Linear(9, 21), nn.BatchNorm1d(21), nn.Tanh(), nn.Linear(21, 5))
        start.double()
        for stage in (3,) if how == "compiled" else STAGES:
            whole, model, engine = copy.deepcopy(start), copy.deepcopy(start), None
            if how == "engine":
                sgd = {"type": "SGD", "params": {"lr": 0.1}}
                config = settings(stage, optimizer=sgd, gradient_clipping=0.1)
                engine, *_ = torchloom.initialize(model=model, config=config)
            else:
                torchloom.shard_model(
                    model, stage, persistence_threshold=20, broadcast_buffers=False
                )
                if how == "compiled":
                    torchloom.compile(model, backend="aot_eager")
            reference = torch.optim.SGD(whole.parameters(), lr=0.1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for seed in range(3):
                generator = torch.Generator().manual_seed(2 * seed + rank)
                x = torch.randn(8, 9, dtype=torch.float64, generator=generator)
                whole(x).square().mean().backward()
                for param in whole.parameters():
                    dist.all_reduce(param.grad)
                    param.grad /= 2
                nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
                reference.step()
                reference.zero_grad()
                loss = (engine or model)(x).square().mean()
                if engine is None:
                    loss.backward()
                    torchloom.clip_grad_norm_(model, 0.1)
                    optimizer.step()
                    optimizer.zero_grad()
                else:
                    engine.backward(loss)
                    engine.step()
            found = full_state_dict(model)
            for name, value in whole.state_dict().items():
                assert found[name].dtype == value.dtype, name
                most = max(most, float((found[name] - value).abs().max()))
        return most

    assert max(run_ranks(2, fn)) < 1e-12


def test_conversions_after_sharding_are_refused() -> None:
    def fn(rank: int):
        found = []
        for stage, with_engine in [(s, e) for s in STAGES for e in (False, True)]:
            model = nn.Sequential(nn.Linear(9, 21), nn.Tanh(), nn.Linear(21, 5))
            engine = None
            if with_engine:
                engine, *_ = torchloom.initialize(model=model, config=settings(stage))
            else:
                torchloom.shard_model(model, stage, persistence_threshold=20)
            before = full_state_dict(model)
            is_late = with_engine and stage < 2  # its modules have classes of their own
            for convert in (nn.Module.bfloat16, nn.Module.double, lambda m: m.to("meta")):
                if not is_late:
                    with pytest.raises(ShardError, match=r"after the model was sharded.*convert"):
                        convert(model)
            assert all(torch.equal(v, before[n]) for n, v in full_state_dict(model).items())
            model.float().to("cpu").to(torch.float32)
            step(engine, model, torch.ones(4, 9))
            if is_late:
                model.bfloat16()
                with pytest.raises(ShardError, match="after the model was sharded"):
                    step(engine, model, torch.ones(4, 9, dtype=torch.bfloat16))
            found.append(stage)
        return found

    assert run_ranks(2, fn) == [[0, 0, 1, 1, 2, 2, 3, 3]] * 2
