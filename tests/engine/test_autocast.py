"""Under autocast weights travel in the dtype in which they are read, and nothing else changes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchloom
from support.models import VOCAB, tokens
from support.pool import run_ranks
from support.runs import sharded
from torchloom.errors import ConfigError
from torchloom.runtime.communicator import Communicator

DIM = 24


class Block(nn.Module):
    """Attention and a feed-forward, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(DIM), nn.RMSNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 50), nn.Linear(50, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).mT for t in self.qkv(self.before(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).mT.flatten(-2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Decoder(nn.Module):
    """Tied embeddings, two blocks, a frozen projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.frozen = nn.Linear(DIM, DIM)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x + self.frozen(x)))
        return F.cross_entropy(logits.float().flatten(0, 1), ids.roll(1, 1).flatten())


STAYS = {"embed.weight", "norm.weight", "norm.bias"} | {
    f"blocks.{i}.{name}"
    for i in (0, 1)
    for name in ("before.weight", "before.bias", "between.weight")
}


def train(
    rank: int, stage: int, backend: str | None, *, in_config: bool = False, **rest: Any
) -> dict[str, Any]:
    """Train under autocast; return losses, weights, and what was gathered: bytes by name and dtype."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    if in_config:
        rest["torch_autocast"] = {"enabled": True, **rest.get("torch_autocast", {})}
    model = Decoder()
    adamw = {"type": "AdamW", "params": {"lr": 1e-2, "fused": False}}
    engine = sharded(model, stage, optimizer=adamw, backend=backend, **rest)
    gathered: Counter[tuple[str, torch.dtype]] = Counter()
    begin = Communicator.begin_gather

    def begin_gather(self: Any, shards: Any, dtype: torch.dtype, params: Any) -> Any:
        for shard, name in zip(shards, params, strict=True):
            gathered[name, dtype] += shard.numel() * dtype.itemsize
        return begin(self, shards, dtype, params)

    Communicator.begin_gather = begin_gather  # type: ignore[method-assign]
    losses, before = [], engine.comm_stats().num_bytes
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=not in_config):
            loss = engine(tokens(step, rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    Communicator.begin_gather = begin  # type: ignore[method-assign]
    sent = engine.comm_stats().num_bytes - before
    return {"losses": losses, "gathered": gathered, "sent": sent, "weights": model.state_dict()}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["losses"] == other["losses"]
    for name, weight in one["weights"].items():
        assert torch.equal(weight, other["weights"][name]), name


OFF = {"compile": {"disable_passes": ["cast_gathers"], "strict": True}}
ON = {"compile": {"strict": True}}


@pytest.mark.parametrize(
    ("stage", "backend", "world_size"),
    [
        (2, "aot_eager", 2),
        (3, "aot_eager", 3),
        (3, "inductor", 2),
        pytest.param(2, "aot_eager", 3, marks=pytest.mark.exhaustive),
        pytest.param(3, "aot_eager", 2, marks=pytest.mark.exhaustive),
        pytest.param(2, "inductor", 2, marks=pytest.mark.exhaustive),
        pytest.param(2, "inductor", 3, marks=pytest.mark.exhaustive),
        pytest.param(3, "inductor", 3, marks=pytest.mark.exhaustive),
    ],
)
def test_half_the_bytes_and_the_same_losses(stage: int, backend: str, world_size: int) -> None:
    def fn(rank: int) -> Any:
        return train(rank, stage, backend, **OFF), train(rank, stage, backend, **ON)

    for off, on in run_ranks(world_size, fn):
        assert_same(off, on)
        assert {dtype for _, dtype in off["gathered"]} == {torch.float32}
        for name, dtype in on["gathered"]:
            assert dtype == (torch.float32 if name in STAYS else torch.bfloat16), name
        names = {name for name, _ in on["gathered"]}
        assert names >= STAYS
        for name in names - STAYS:
            assert 2 * on["gathered"][name, torch.bfloat16] == off["gathered"][name, torch.float32]
        saved = sum(off["gathered"].values()) - sum(on["gathered"].values())
        assert off["sent"] - on["sent"] == saved * world_size


def test_compiled_trains_as_eager_code_does() -> None:
    def fn(rank: int) -> Any:
        return train(rank, 3, None), train(rank, 3, "aot_eager")

    for eager, compiled in run_ranks(2, fn):
        assert compiled["losses"] == pytest.approx(eager["losses"], rel=1e-3)
        assert {dtype for _, dtype in eager["gathered"]} == {torch.float32}


SAFE = ["torch.nn.Linear"]


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_the_section_of_the_config_is_autocast_around_forward(backend: str | None) -> None:
    def fn(rank: int) -> Any:
        own = train(rank, 3, backend, **ON)
        section = {"dtype": "bfloat16", "lower_precision_safe_modules": SAFE}
        return own, train(rank, 3, backend, in_config=True, torch_autocast=section, **ON)

    for own, configured in run_ranks(2, fn):
        assert_same(own, configured)
        assert own["gathered"] == configured["gathered"]


def test_modules_that_are_not_named_keep_their_gathers() -> None:
    class Chosen(nn.Linear):
        """A linear layer of another class."""

    def fn(rank: int) -> Any:
        globals()["Chosen"] = Chosen
        Chosen.__module__, Chosen.__qualname__ = __name__, "Chosen"
        plain = Block.__init__

        def init(self: Block) -> None:
            plain(self)
            self.up = Chosen(DIM, 50)

        Block.__init__ = init  # type: ignore[method-assign]
        section = {"lower_precision_safe_modules": [f"{__name__}.Chosen", "torch.nn.Conv2d"]}
        return train(rank, 3, "aot_eager", in_config=True, torch_autocast=section, **ON)

    for found in run_ranks(2, fn):
        cast = {name for name, dtype in found["gathered"] if dtype == torch.bfloat16}
        assert cast == {f"blocks.{i}.up.{what}" for i in (0, 1) for what in ("weight", "bias")}


def test_fp16_scales_the_loss() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "torch_autocast": {"enabled": True, "dtype": "float16"},
        "fp16": {"loss_scale": 128},
    }

    def fn(rank: int) -> Any:
        engine = torchloom.initialize(model=nn.Linear(4, 4), config=config)[0]
        result = engine(torch.ones(3, 4))
        engine.backward(result.float().mean())
        return result.dtype, engine.loss_scale

    assert run_ranks(1, fn) == [(torch.float16, 128.0)]


@pytest.mark.parametrize(
    ("name", "words"), [("torch.nn.Lnear", "torch.nn.Lnear"), ("Linear", "package.Class")]
)
def test_an_unknown_module_is_refused(name: str, words: str) -> None:
    section = {"enabled": True, "lower_precision_safe_modules": [name]}

    def fn(rank: int) -> Any:
        with pytest.raises(ConfigError, match=words):
            torchloom.initialize(model=nn.Linear(4, 4), config={"torch_autocast": section})

    run_ranks(1, fn)
