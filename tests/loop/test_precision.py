"""Lower precision in own loops: inputs that are cast, and a loss scale that all ranks share."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import torchloom
from support.pool import run_ranks
from torchloom.errors import ShardError
from torchloom.shard import Precision, layout_of, plan_layout, unshard


class Regression(nn.Module):
    """Takes a dict of floats and a list beside, and returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(9, 21), nn.Linear(21, 5)

    def forward(self, batch: dict[str, torch.Tensor], *, rest: list) -> torch.Tensor:
        assert rest[1].dtype == torch.int64
        self.seen = batch["x"].dtype
        return (
            (self.down(self.up(batch["x"]).relu() * rest[0]) - batch["y"]).float().square().mean()
        )


def batch(rank: int, step: int = 0) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    draw = [torch.randn(size, generator=generator) for size in ((4, 9), (4, 5), (21,))]
    return {"x": draw[0], "y": draw[1]}, [draw[2], torch.arange(3)]


@pytest.mark.parametrize("is_compiled", [False, True])
def test_inputs_are_cast(is_compiled) -> None:
    def fn(rank: int):
        model = torchloom.shard_model(
            Regression(),
            persistence_threshold=20,
            precision=Precision(compute=torch.bfloat16),
            cast_inputs=True,
        )
        session = torchloom.compile(model, backend="aot_eager") if is_compiled else None
        given, rest = batch(rank)
        loss = model(given, rest=rest)
        loss.backward()
        grads = {name: p.grad.dtype for name, p in model.named_parameters()}
        untouched = given["x"].dtype == torch.float32
        if session is not None:
            return loss.item(), None, untouched, grads, len(session.report.graphs), None
        seen = model.seen
        unshard(model)
        model(given, rest=rest)
        return loss.item(), seen, untouched, grads, 1, model.seen

    reference = Regression()
    for rank, (loss, seen, untouched, grads, num_graphs, after) in enumerate(run_ranks(2, fn)):
        given, rest = batch(rank)
        assert loss == pytest.approx(reference(given, rest=rest).item(), rel=2e-2)
        assert (seen, after) == ((None, None) if is_compiled else (torch.bfloat16, torch.float32))
        assert untouched
        assert set(grads.values()) == {torch.float32}
        assert num_graphs == 1


def test_a_dtype_to_cast_to_is_needed() -> None:
    for precision in (None, Precision(master=torch.bfloat16)):
        with pytest.raises(ShardError, match="cast_inputs=True needs the dtype"):
            torchloom.shard_model(nn.Linear(3, 3), precision=precision, cast_inputs=True)
    model, words = nn.Linear(3, 3), r"pass torchloom.shard.Precision\(compute=torch.bfloat16\)"
    for precision in (torch.bfloat16, {model: torch.bfloat16}):
        with pytest.raises(ShardError, match=words):
            torchloom.shard_model(model, precision=precision, cast_inputs=True)


class Routed(nn.Module):
    """Experts in bf16 that are mixed by a router in fp32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Sequential(nn.Linear(9, 16), nn.Tanh(), nn.Linear(16, 3))
        self.experts = nn.ModuleList(nn.Linear(9, 5, dtype=torch.bfloat16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x)
        mixed = (
            torch.stack([expert(x) for expert in self.experts], -1) @ weights.softmax(-1)[..., None]
        )
        self.seen = (weights.dtype, mixed.dtype)
        return mixed.float().square().mean()


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_module_has_a_precision_of_its_own(is_compiled) -> None:
    def fn(rank: int):
        model = Routed()
        precision = {
            model: Precision(compute=torch.bfloat16),
            model.router: Precision(compute=torch.float32, output=torch.bfloat16),
        }
        torchloom.shard_model(
            model, persistence_threshold=20, precision=precision, cast_inputs=True
        )
        if is_compiled:
            torchloom.compile(model, backend="aot_eager")
        loss = model(batch(0)[0]["x"])
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        weights = {name: weight.clone() for name, weight in model.state_dict().items()}
        dtypes = {spec.compute_dtype for spec in layout_of(model).params if "router" in spec.name}
        return loss.item(), weights, dtypes, None if is_compiled else model.seen

    reference = Routed()
    router = reference.router.forward
    reference.router.forward = lambda x: router(x.float()).bfloat16()
    expected = reference(batch(0)[0]["x"].bfloat16())
    expected.backward()
    for loss, weights, dtypes, seen in run_ranks(2, fn):
        assert loss == expected.item()
        assert dtypes == {torch.float32}
        assert seen in (None, (torch.bfloat16, torch.bfloat16))
        for name, param in reference.named_parameters():
            stepped = param.detach().float() - param.grad.float()
            torch.testing.assert_close(weights[name], stepped, rtol=1e-2, atol=1e-3)


def test_precisions_of_modules_are_of_the_model_and_of_one_mind() -> None:
    model = nn.ModuleDict({"one": nn.Linear(4, 4), "two": nn.Linear(4, 4)})
    model["two"].weight = model["one"].weight
    low = Precision(compute=torch.bfloat16)
    for asked, words in (
        ({nn.Linear(4, 4): low}, "a Linear that is no module of the model"),
        (
            {model["one"]: low},
            "one.weight and two.weight are one tied parameter with two precisions",
        ),
    ):
        with pytest.raises(ShardError, match=words):
            plan_layout(model, stage=3, world_size=2, rank=0, handle="x", precision=asked)


def test_ranks_skip_together_with_a_sharded_scaler() -> None:
    def fn(rank: int):
        model = torchloom.shard_model(
            Regression(),
            persistence_threshold=20,
            precision=Precision(compute=torch.float16, reduce=torch.float32),
            cast_inputs=True,
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = ShardedGradScaler("cpu", init_scale=2.0**40, growth_interval=2)
        scales, losses = [], []
        for step in range(24):
            given, rest = batch(rank, step % 2)
            loss = model(given, rest=rest)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            losses.append(loss.item())
        return scales, losses, norm.item(), model.state_dict()

    first, second = run_ranks(2, fn)
    assert first[0] == second[0]
    assert first[0][0] < 2.0**40  # the first steps overflow
    assert first[2] == second[2]
    assert all(torch.equal(value, second[3][name]) for name, value in first[3].items())
    assert first[1][-1] < 0.8 * first[1][0]
