"""What bf16 and fp16 cast: weights and inputs, and neither running statistics nor what stands beside them."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from support.pool import run_ranks
from support.runs import sharded
from torchloom.loop.precision import cast_inputs

LOWER = torch.bfloat16


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv1d(3, 6, 3)
        self.batch = nn.BatchNorm1d(6)
        self.second = nn.Conv1d(6, 4, 3)
        self.instance = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
        self.plain = nn.InstanceNorm1d(4, affine=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.batch(self.first(x)))
        return self.plain(self.instance(self.second(x)))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 3, 12, generator=torch.Generator().manual_seed(2 * step + rank))


def run(rank: int, stage: int, backend: str | None, **precision: Any) -> list[torch.Tensor]:
    torch._dynamo.reset()
    model = Normed()
    sgd = {"type": "SGD", "params": {"lr": 0.01}}
    engine = sharded(model, stage, optimizer=sgd, backend=backend, **precision)
    for step in range(3):
        out = engine(batch(step, rank))
        engine.backward(out.float().square().mean() + out.float()[:, 0].mean())
        engine.step()
    assert model.batch.running_mean.dtype == torch.float32
    model.eval()
    out = engine(batch(4, rank))
    values = [value.clone() for value in model.state_dict().values()]
    return [out.float().detach(), *values]


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize(("stage", "backend"), [(0, None), (1, None), (3, None), (3, "aot_eager")])
def test_norms_with_running_statistics(stage: int, backend: str | None, kind: str) -> None:
    section: dict[str, Any] = {"enabled": True}
    if kind == "fp16":
        section["loss_scale"] = 1

    def fn(rank):
        return run(rank, stage, backend, **{kind: section}), run(rank, stage, backend)

    for lower, wanted in run_ranks(2, fn):
        for one, other in zip(lower, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-2)


class Pair(NamedTuple):
    x: torch.Tensor
    n: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    inner: list[Any]
    name: str = "a"


class Output(collections.OrderedDict):
    """As the outputs of transformers: what is in it is an attribute, too."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.__dict__[key] = value


@dataclasses.dataclass
class FieldOutput(collections.OrderedDict):
    x: Any = None

    def __post_init__(self) -> None:
        self["x"] = self.x


def test_containers_are_cast_and_stay_what_they_are() -> None:
    x, n = torch.ones(2), torch.tensor(3)
    output = Output(x=x, n=n)
    output.extra = "kept"
    cast = cast_inputs(output, LOWER)
    assert type(cast) is Output
    assert (cast["x"].dtype, cast.x.dtype, cast.extra) == (LOWER, LOWER, "kept")
    assert output.x.dtype == torch.float32

    pair = cast_inputs(Pair(x, n), LOWER)
    assert type(pair) is Pair
    assert (pair.x.dtype, pair.n) == (LOWER, n)

    frozen = cast_inputs(Frozen(x, [x, {"n": n}]), LOWER)
    assert type(frozen) is Frozen
    assert (frozen.x.dtype, frozen.inner[0].dtype, frozen.name) == (LOWER, LOWER, "a")

    missing = cast_inputs(collections.defaultdict(list, x=x), LOWER)
    assert missing["x"].dtype == LOWER
    assert missing["y"] == []

    user = cast_inputs(collections.UserDict(x=x), LOWER)
    assert type(user) is collections.UserDict
    assert user["x"].dtype == LOWER

    packed = cast_inputs(pack_sequence([torch.ones(2, 1), torch.ones(1, 1)]), LOWER)
    assert packed.data.dtype == LOWER

    output = cast_inputs(FieldOutput(x), LOWER)
    assert type(output) is FieldOutput
    assert (output["x"].dtype, output.x.dtype) == (LOWER, LOWER)


def test_what_holds_nothing_to_cast_is_the_same_object() -> None:
    for value in (
        [],
        {},
        [torch.tensor(1)],
        Frozen,
        Pair(1, 2),
        Frozen(1, []),
        (1, [2]),
        {"a": {}},
    ):
        assert cast_inputs(value, LOWER) is value


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_outputs_of_transformers_keep_all_their_items_in_a_graph(backend) -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    def forward(x: torch.Tensor) -> Any:
        made = outputs.CausalLMOutputWithPast(loss=x.sum(), logits=2 * x, past_key_values=(x + 1,))
        return cast_inputs(made, LOWER)

    torch._dynamo.reset()
    x = torch.randn(3, 5)
    expected, found = forward(x), torch.compile(forward, backend=backend, fullgraph=True)(x)
    assert list(found.keys()) == ["loss", "logits", "past_key_values"]
    assert found.logits.dtype == found.past_key_values[0].dtype == LOWER
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(found["logits"], expected["logits"])
