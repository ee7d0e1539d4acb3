"""Models that cannot be sharded are refused by name; unusual ones that can train to the same weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.utils import parametrizations

import torchloom
from support.pool import run_ranks
from torchloom.errors import ShardError, TorchloomError
from torchloom.loop.shard_model import check_devices
from torchloom.shard import plan_layout
from torchloom.shard.admit import check_model

STAGES = (0, 1, 2, 3)


def pair() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))


def with_weight(make: Callable[[nn.Sequential], nn.Parameter]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = pair()
        model[1].weight = make(model)
        return model

    return build


def halves(model: nn.Sequential) -> nn.Parameter:
    both = torch.arange(72.0).view(6, 12)
    model[0].weight = nn.Parameter(both[:, :6])
    return nn.Parameter(both[:, 6:])


def with_buffer(make: Callable[[nn.Sequential], torch.Tensor]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = pair()
        model[1].register_buffer("seen", make(model))
        return model

    return build


def frozen(data: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(data, requires_grad=False)


class Packed(nn.Parameter):
    """What libraries of quantized weights use."""


class Watched(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


def lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.LazyLinear(6))


def computed() -> nn.Module:
    model = pair()
    model[0].twice = 2 * model[0].weight
    return model


def sparse_embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(6, 6, sparse=True))


def quantized() -> nn.Parameter:
    return frozen(torch.quantize_per_tensor(torch.ones(6, 6), 0.1, 0, torch.qint8))


REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "float8": (
        with_weight(lambda m: nn.Parameter(torch.ones(6, 6).to(torch.float8_e4m3fn))),
        ("'1.weight'", "float8_e4m3fn"),
    ),
    "complex": (
        with_weight(lambda m: nn.Parameter(torch.ones(6, 6, dtype=torch.complex64))),
        ("'1.weight'", "complex64", "view_as_real"),
    ),
    "quantized": (with_weight(lambda m: quantized()), ("'1.weight'", "quantized")),
    "packed": (
        with_weight(lambda m: Packed(torch.ones(6, 6, dtype=torch.uint8), requires_grad=False)),
        ("'1.weight'", "quantized"),
    ),
    "sparse": (
        with_weight(lambda m: nn.Parameter(torch.eye(6).to_sparse())),
        ("'1.weight'", "sparse", "to_dense()"),
    ),
    "subclass": (with_weight(lambda m: Watched(torch.ones(6, 6))), ("'1.weight'", "Watched")),
    "same data": (
        with_weight(lambda m: nn.Parameter(m[0].weight.data)),
        ("'0.weight'", "'1.weight'", "share memory", ".clone()"),
    ),
    "other columns": (
        with_weight(halves),
        ("'0.weight'", "'1.weight'", "lie in turns", ".clone()"),
    ),
    "a column": (
        with_weight(lambda m: nn.Parameter(m[0].weight.data[:, 2])),
        ("'0.weight'", "'1.weight'", "share memory"),
    ),
    "expanded": (
        with_weight(lambda m: nn.Parameter(torch.ones(6, 1).expand(6, 6))),
        ("'1.weight'", "expanded", ".clone()"),
    ),
    "lazy": (lazy, ("'1.weight'", "no shape yet", "sample batch")),
    "sparse buffer": (with_buffer(lambda m: torch.eye(6).to_sparse()), ("'1.seen'", "sparse")),
    "computed": (computed, ("'twice'", "'0'", "compute it in forward")),
    "sparse gradients": (sparse_embedding, ("'0'", "sparse=False")),
    "buffer": (
        with_buffer(lambda m: m[0].weight.data),
        ("'1.seen'", "'0.weight'", "shares memory", "clone()"),
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_at_every_stage(name: str) -> None:
    build, words = REFUSED[name]
    for stage in STAGES:
        with pytest.raises(ShardError) as caught:
            plan_layout(build(), stage=stage, world_size=2, rank=0, handle="t")
        assert "\n" not in str(caught.value)
        for word in words:
            assert word in str(caught.value), caught.value


@pytest.mark.parametrize("door", ["initialize", "shard_model"])
def test_refused_at_both_doors(door: str) -> None:
    def fn(rank):
        model = REFUSED["same data"][0]()
        try:
            if door == "shard_model":
                torchloom.shard_model(model)
            else:
                torchloom.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1})
        except TorchloomError as error:
            return type(error).__name__, str(error)
        return "none", ""

    for kind, text in run_ranks(2, fn):
        assert kind == "ShardError"
        assert "'0.weight'" in text


def test_distributed_tensors_are_refused() -> None:
    def fn(rank):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        model = pair()
        mesh = init_device_mesh("cpu", (2,))
        model[1].weight = nn.Parameter(distribute_tensor(torch.ones(6, 6), mesh, [Shard(0)]))
        with pytest.raises(ShardError, match="DTensor"):
            torchloom.shard_model(model)

    run_ranks(2, fn)


def test_parts_of_one_memory_that_follow_each_other_are_apart() -> None:
    model = pair()
    flat = torch.arange(72.0)
    model[0].weight = nn.Parameter(flat[:36].view(6, 6))
    model[1].weight = nn.Parameter(flat[36:].view(6, 6).t())
    check_model(model)


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList([torch.randn(6, 6) for _ in range(2)])
        self.named = nn.ParameterDict({"a": torch.randn(6), "b": torch.randn(6, 6)})

    def forward(self, x):
        for weight in self.many:
            x = x @ weight
        return x @ self.named["b"] + self.named["a"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.b.weight = self.a.weight
        self.again = self.a

    def forward(self, x):
        return self.again(self.b(self.a(x)))


class Buffered(nn.Module):
    """Buffers of every kind that models keep."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        for name, dtype in (
            ("bools", torch.bool), ("turns", torch.complex64), ("counts", torch.int64),
            ("low", torch.bfloat16), ("small", torch.float8_e4m3fn), ("bytes", torch.uint8),
        ):  # fmt: skip
            self.register_buffer(name, torch.ones(6).to(dtype))
        for name, dtype in (("flags", torch.bool), ("shorts", torch.int16)):
            self.register_parameter(name, frozen(torch.ones(6).to(dtype)))
        self.register_buffer("columns", torch.arange(36.0).view(6, 6).t())

    def forward(self, x):
        x = self.linear(x) * self.bools + self.turns.real + self.counts + self.low.float()
        return x + self.small.float() + self.bytes + self.columns[0] * self.flags + self.shorts


def strided() -> nn.Module:
    model = pair()
    model[1].weight = nn.Parameter(torch.randn(6, 6).t())
    model[0].weight = nn.Parameter(torch.randn(6, 12)[:, ::2])
    return model


def normed(apply: Callable[[nn.Linear], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = pair()
        apply(model[0])
        return model

    return build


RIGHT: dict[str, Callable[[], nn.Module]] = {
    "lists and dicts": Listed,
    "tied": Tied,
    "strided": strided,
    "buffers": Buffered,
    "old weight norm": normed(torch.nn.utils.weight_norm),
    "spectral norm": normed(parametrizations.spectral_norm),
}


def built(name: str) -> nn.Module:
    torch.manual_seed(3)
    return RIGHT[name]()


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, generator=generator)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", RIGHT)
def test_unusual_models_train_as_with_ddp(name: str) -> None:
    def fn(rank):
        errors = []
        for stage in STAGES:
            peer = nn.parallel.DistributedDataParallel(
                built(name), broadcast_buffers=False, init_sync=False
            )
            peer_optimizer = torch.optim.AdamW(peer.parameters(), 1e-2, fused=False)
            model = built(name)
            engine, *_ = torchloom.initialize(
                model=model,
                config={
                    "train_micro_batch_size_per_gpu": 4,
                    "optimizer": {
                        "type": "AdamW",
                        "params": {"lr": 1e-2, "weight_decay": 0.01, "fused": False},
                    },
                    "zero_optimization": {
                        "stage": stage,
                        "stage3_param_persistence_threshold": 0,
                    },
                },
            )
            for step in range(3):
                engine.backward(engine(batch(step, rank)).square().mean())
                engine.step()
                peer(batch(step, rank)).square().mean().backward()
                peer_optimizer.step()
                peer_optimizer.zero_grad()
            ours, theirs = model.state_dict(), peer.module.state_dict()
            assert ours.keys() == theirs.keys()
            for key, value in theirs.items():
                if value.dtype in (torch.float8_e4m3fn, torch.bool, torch.complex64):
                    continue
                differs = (ours[key].double() - value.double()).abs().max().item()
                if differs > 2e-6:
                    errors.append((stage, key, differs))
        return errors

    for errors in run_ranks(2, fn):
        assert not errors


def test_a_parameter_assigned_anew_in_forward() -> None:
    class Fresh(nn.Linear):
        def forward(self, x):
            self.weight = nn.Parameter(torch.ones(6, 6))
            return super().forward(x)

    def fn(rank, stage):
        engine, *_ = torchloom.initialize(
            model=nn.Sequential(Fresh(6, 6)),
            config={
                "train_micro_batch_size_per_gpu": 4,
                "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            },
        )
        try:
            engine.backward(engine(batch(0, rank)).sum())
            engine.step()
        except ShardError as error:
            return str(error)
        return "none"

    for stage in STAGES:
        for text in run_ranks(2, fn, stage):
            assert "'0.weight'" in text, (stage, text)
            assert "assigned anew" in text


def test_devices_of_own_loops() -> None:
    check_devices(pair(), "gloo")
    check_devices(pair(), "cpu:gloo,cuda:nccl")
    check_devices(pair().to("meta"), "nccl")
    with pytest.raises(ShardError, match=r"'0.weight' is on cpu.*model.cuda\(\)"):
        check_devices(pair(), "nccl")
    mixed = pair()
    with FakeTensorMode():
        mixed[1].bias = nn.Parameter(torch.ones(6, device="cuda:1"))
    with pytest.raises(ShardError, match=r"'0\.weight' is on cpu and '1\.bias' on cuda:1"):
        check_devices(mixed, "cpu:gloo,cuda:nccl")
