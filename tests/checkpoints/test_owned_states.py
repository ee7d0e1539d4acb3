"""States of optimizers that no shard could hold come back as they were: classes of tensors, keys, strides, values beside them."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.optimizers import Base
from support.pool import run_ranks
from support.runs import assert_equal, sharded
from torchloom._torch.subclasses import wrapper
from torchloom.checkpoints.values import decode, encode, wrappers_of
from torchloom.errors import CheckpointError
from torchloom.shard import full_optimizer_state_dict, full_state_dict


class Codes(Tensor):
    """An average in eight bits, as torchao's states are: codes and a scale, and plain data beside them."""

    def __tensor_flatten__(self):
        return ["codes", "scale"], [self.levels, self.dtype]

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size=None, stride=None):
        return coded(inner["codes"], inner["scale"], *context)

    def value(self):
        return self.codes * (self.scale / self.levels)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return coded(args[0].codes, args[0].scale, args[0].levels, args[0].dtype)
        raise NotImplementedError(func)


def coded(codes: Tensor, scale: Tensor, levels: int, dtype: torch.dtype) -> Codes:
    made = wrapper(Codes, scale, codes.shape)
    made.codes, made.scale, made.levels = codes, scale, levels
    return made


class Odd(Base):
    """Turns gradients into an eigenbasis, keeps their average in bits, and counts in an attribute that its state dict has."""

    num_seen = 0

    def __init__(self, params: Any, lr: float = 1e-2, schedule: str = "flat") -> None:
        super().__init__(params, lr)
        self.schedule = schedule
        self.register_state_dict_post_hook(Odd._add)
        self.register_load_state_dict_pre_hook(Odd._take)

    def _add(self, found):
        found["odd"] = {"schedule": pickle.dumps(self.schedule), "seen": self.num_seen}

    def _take(self, given):
        if "odd" in given:
            self.schedule, self.num_seen = (
                pickle.loads(given["odd"]["schedule"]),
                given["odd"]["seen"],
            )

    def state_dict(self):
        found = super().state_dict()
        for group in found["param_groups"]:
            group.pop("_now", None)
        return found

    def step(self, closure=None):
        self.num_seen += 1
        super().step()

    def update(self, param, group, state):
        group["_now"] = object()
        own = state.setdefault(0, {"is_ready": {"average"}, "seen": (1, None)})
        grad = param.grad
        if param.dim() == 2:
            own.setdefault("left", torch.eye(len(grad))).lerp_(grad @ grad.T, 0.1)
            basis = own["basis"] = [torch.linalg.eigh(own["left"])[1]]
            grad = basis[0] @ (basis[0].T @ grad)
            own["turned"] = (param.grad.T @ basis[0]).T
        if "average" in state:
            grad = grad.lerp(state["average"].value(), 0.9)
        scale = grad.abs().max().clamp(min=1e-12)
        state["average"] = coded((grad / scale * 127).round().char(), scale, 127, grad.dtype)
        param.sub_(state["average"].value(), alpha=group["lr"] * (1 + 0.1 * self.num_seen))


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 5), nn.GELU(), nn.Linear(5, 3))


def start(stage: int, seed: int = 0, **options: Any) -> Any:
    return sharded(model_of(seed), stage, batch=6, optimizer=lambda params: Odd(params, **options))


def train(engine: Any, rank: int, world_size: int, steps: range) -> None:
    for step in steps:
        rows = torch.randn(6, 6, generator=torch.Generator().manual_seed(step))
        share = 6 // world_size
        engine.backward(engine(rows[rank * share : (rank + 1) * share]).square().mean())
        engine.step()


def plain(value: Any) -> Any:
    """Return a value with its tensors as lists, with their classes and strides."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(plain, value)]
    if isinstance(value, Codes):
        return ["Codes", value.levels, plain(value.codes), plain(value.scale)]
    return [value.tolist(), value.stride(), value.dtype] if isinstance(value, Tensor) else value


def found_in(engine: Any) -> tuple[dict[str, Tensor], Any]:
    states = plain(full_optimizer_state_dict(engine.optimizer)["state"])
    return full_state_dict(engine.module), states


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_resumed_run_is_the_uninterrupted_one(stage: int, tmp_path) -> None:
    def through(rank: int, folder: str) -> Any:
        engine = start(stage)
        train(engine, rank, 2, range(3))
        engine.save_checkpoint(folder, tag="three", async_save=stage == 1)
        states = found_in(engine)[1]
        train(engine, rank, 2, range(3, 6))
        return states, *found_in(engine)

    def resumed(rank: int, folder: str, stage: int, world_size: int) -> Any:
        engine = start(stage, seed=7)
        engine.load_checkpoint(folder, tag="three")
        states, seen = found_in(engine)[1], engine.optimizer.num_seen
        train(engine, rank, world_size, range(3, 6))
        return states, *found_in(engine), seen

    saved, weights, states = run_ranks(2, through, str(tmp_path))[0]
    assert any(
        strides == (1, 9) for strides in (saved[0][0]["basis"][1][1], saved[0][0]["turned"][1])
    )
    for rank in run_ranks(2, resumed, str(tmp_path), stage, 2):
        assert rank[0] == saved
        assert_equal(rank[1], weights)
        assert rank[2] == states
        assert rank[3] == 3
    other = 1 if stage == 3 else 3
    for rank in run_ranks(3, resumed, str(tmp_path), other, 3):
        assert rank[0] == saved
        for name, each in weights.items():
            torch.testing.assert_close(rank[1][name], each, atol=1e-4, rtol=0)  # a code of 127


def test_bytes_of_another_run_are_not_handed_over(tmp_path) -> None:
    def fn(rank: int, folder: str) -> None:
        engine = start(2)
        train(engine, rank, 2, range(1))
        engine.save_checkpoint(folder, tag="one")
        other = start(2, schedule="steep")
        with pytest.raises(
            CheckpointError, match=r"Odd keeps bytes beside its states.*could run code"
        ):
            other.load_checkpoint(folder, tag="one")
        assert other.optimizer.schedule == "steep"

    run_ranks(2, fn, str(tmp_path))


def test_what_a_file_may_name() -> None:
    kept: list[Tensor] = []
    value = coded(torch.ones(3, dtype=torch.int8), torch.ones(()), 127, torch.float32)
    known = wrappers_of(Odd([torch.ones(1)]))
    assert known[f"{__name__}.Codes"] is Codes
    tree = encode(value, lambda each: str(kept.append(each) or len(kept) - 1), "a state", known)
    assert plain(decode(tree, lambda key: kept[int(key)], known)) == plain(value)
    with pytest.raises(
        CheckpointError, match="Codes, which the modules of this run's optimizer do not name"
    ):
        decode(tree, lambda key: kept[int(key)], {})
    with pytest.raises(CheckpointError, match=r"Codes.*a checkpoint cannot keep"):
        encode(value, str, "a state")
    for strides in ([1, 1 << 40], [0, 1], [3, 2]):
        with pytest.raises(CheckpointError, match="has strides"):
            decode({"$tensor": "0", "strides": strides}, lambda _: torch.ones(2, 3))
