"""Stochastic rounding of bf16 weights: by a hash of parameter, element and step, and without a bias."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import torchloom
from support.pool import run_ranks
from torchloom.config import load_config
from torchloom.errors import ConfigError
from torchloom.loop import rounding
from torchloom.loop.rounding import Rounding, random_bits, stochastic_bf16
from torchloom.memory import measure_peak, step_memory
from torchloom.shard import full_state_dict

KEY = 3, 7, "head.weight", "exp_avg"
BF16 = {
    "enabled": True,
    "bf16_master_weights_and_grads": True,
    "bf16_optimizer_states": True,
    "stochastic_rounding": True,
}


def test_bits_are_those_of_the_hash() -> None:
    """Written down with whole numbers of Python, which have no sign bit to shift."""

    def mixed(x: int) -> int:
        for shift, by in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            x = (x ^ x >> shift) * by % 2**32
        return x ^ x >> 16

    with mock.patch.object(rounding.hashlib, "blake2b") as digest:
        digest.return_value.digest.return_value = bytes([9, 8, 7, 255, 5, 4, 3, 130])
        found = random_bits(KEY, 2**22 - 40, torch.empty(40)).tolist()
    words = 9 + (8 << 8) + (7 << 16) + (255 << 24), 5 + (4 << 8) + (3 << 16) + (130 << 24)
    assert found == [
        mixed(mixed(place ^ words[0]) ^ words[1]) % 2**16 for place in range(2**22 - 40, 2**22)
    ]


def test_an_element_is_rounded_alike_in_any_part_of_the_whole() -> None:
    whole = torch.randn(1000)
    with mock.patch.object(rounding, "_BLOCK", 128):
        expected = stochastic_bf16(whole, KEY)
        for size in (1, 100, 333, 999):
            parts = [stochastic_bf16(p, KEY, i * size) for i, p in enumerate(whole.split(size))]
            assert torch.equal(torch.cat(parts), expected)
        for other in ((4, *KEY[1:]), (3, 8, *KEY[2:]), (*KEY[:2], "x", ""), (*KEY[:3], "")):
            assert not torch.equal(stochastic_bf16(whole, other), expected)


def test_values_round_to_a_neighbour_and_special_ones_stay() -> None:
    special = torch.tensor([0.0, -0.0, 1.5, float("inf"), -float("inf"), float("nan"), 1e-40])
    special = torch.cat([special, torch.tensor([0x7F800001, -1]).int().view(torch.float32)])
    for step in range(50):
        found = stochastic_bf16(special, (step,))
        assert torch.equal(found[:5].float(), special[:5]) and found[[5, 7, 8]].isnan().all()
        assert found[6] in (special[6].bfloat16(), 0.0, special[6].bfloat16() * 2)
        values = torch.randn(500) * 10.0 ** torch.randint(-30, 30, (500,))
        low = (values.view(torch.int32) & -(1 << 16)).view(torch.float32)
        high = ((values.view(torch.int32) & -(1 << 16)) + (1 << 16)).view(torch.float32)
        found = stochastic_bf16(values, (step,)).float()
        assert ((found == low) | (found == high)).all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_rounding_has_no_bias_and_no_memory(sign: float) -> None:
    """Over n draws a mean of numbers of variance 1 exceeds 5 / sqrt(n) in one of 1.7 million tests; the bits are fixed."""
    num, steps = 1 << 14, 64
    for part in (0.01, 0.5, 0.9):  # of the distance to the next number away from zero
        values = torch.full((num,), sign * (1.0 + part / 128))
        ups = torch.stack([stochastic_bf16(values, (1, step)) for step in range(steps)]).abs() > 1
        noise = (ups.double() - part) / (part * (1 - part)) ** 0.5
        bound = 5 / (num * steps) ** 0.5
        assert noise.mean().abs() < bound
        assert (noise[1:] * noise[:-1]).mean().abs() < bound * 1.01  # from step to step
        assert (noise[:, 1:] * noise[:, :-1]).mean().abs() < bound * 1.01  # between neighbours
        # None of the elements is favoured: their means vary as much as those of independent draws.
        assert (steps * noise.mean(0).square().mean() - 1).abs() < 0.1
        assert noise.mean(1).abs().max() < 5 / num**0.5


class Counts(torch.optim.Optimizer):
    """Somebody's elementwise optimizer: it counts its own steps, and keeps a state beside torch's kinds."""

    elementwise = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        for param in (p for group in self.param_groups for p in group["params"]):
            if param.grad is None:
                continue
            state = self.state[param]
            fast = state.setdefault("fast", torch.zeros_like(param))
            fast.lerp_(param.grad.sign(), 1 / (self.num_steps + 1))
            param.add_(fast, alpha=-self.param_groups[0]["lr"])


OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "fused": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9, fused=True),
    "own": Counts,
}


def settings(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 3,
        "bf16": BF16,
        "communication_data_type": "fp32",
        "seed": 5,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 8},
        "steps_per_print": float("inf"),
        **more,
    }


class Dots(nn.Module):
    """Its gradients are what it is given: whole numbers whose mean over up to three equal ones is exact in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(13, 31), nn.Linear(31, 7), nn.LayerNorm(7)

    def weights(self) -> list[Tensor]:
        layers = self.first, self.second, self.norm
        return [each for layer in layers for each in (layer.weight, layer.bias)]

    def forward(self, *given: Tensor) -> Tensor:
        return sum((w * g).sum() for w, g in zip(self.weights(), given, strict=True))  # type: ignore[return-value]


def build() -> nn.Module:
    torch.manual_seed(3)
    return Dots()


SHAPES = [tuple(each.shape) for each in Dots().weights()]


def train(engine: Any, steps: range) -> None:
    for step in steps:
        rng = torch.Generator().manual_seed(step)
        given = [torch.randint(-80, 81, shape, generator=rng).float() for shape in SHAPES]
        engine.backward(engine(*given))
        engine.step()


def run(rank: int, stage: int, kind: str, **more: Any) -> tuple[Any, dict[str, Tensor]]:
    engine, optimizer, *_ = torchloom.initialize(
        model=build(), optimizer=OPTIMIZERS[kind], config=settings(stage, **more)
    )
    train(engine, range(5))
    states = [v for state in optimizer.state.values() for v in state.values() if v.dim()]
    assert states and all(value.dtype == torch.bfloat16 for value in states)
    assert getattr(optimizer, "num_steps", 5) == 5
    return engine, full_state_dict(engine.module)


def on_ranks(rank: int, folder: str) -> list[dict[str, Tensor]]:
    found = [
        run(rank, stage, kind)[1] for kind in OPTIMIZERS for stage in (1, 2, 3)
    ]  # in order of kinds
    offload = {"offload_optimizer": {"device": "cpu"}}
    zero = {"stage": 2, "stage3_param_persistence_threshold": 8, **offload}
    with mock.patch.object(rounding, "CHUNK_BYTES", 3000):  # a chunk for each matrix
        found[:0] = [run(rank, 3, "adamw")[1], run(rank, 2, "adamw", zero_optimization=zero)[1]]
    engine, _ = run(rank, 2, "adamw")
    engine.save_checkpoint(folder, tag="five")
    train(engine, range(5, 8))
    again, *_ = torchloom.initialize(
        model=build(), optimizer=OPTIMIZERS["adamw"], config=settings(3)
    )
    again.load_checkpoint(folder, tag="five")
    train(again, range(5, 8))
    return [*found, full_state_dict(engine.module), full_state_dict(again.module)]


def test_equal_bits_on_any_number_of_ranks_at_any_stage_and_after_a_resume(tmp_path) -> None:
    first, *others = [
        rank
        for world_size in (1, 2, 3)
        for rank in run_ranks(world_size, on_ranks, str(tmp_path / str(world_size)))
    ]
    kinds = [0, 0, *[0] * 3, *[1] * 3, *[2] * 3, 3, 3]
    references = {kind: first[kinds.index(kind)] for kind in kinds}
    for found in (first, *others):
        for kind, weights in zip(kinds, found, strict=True):
            for name, each in references[kind].items():
                assert torch.equal(weights[name], each), (kind, name)
    for kind, other in ((0, 1), (0, 3)):
        assert not torch.equal(references[kind]["first.weight"], references[other]["first.weight"])


def distance(stochastic: bool, dtype: torch.dtype = torch.bfloat16) -> float:
    """Return how far weights are from their aim after 400 steps that are too small for bf16."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.ones(2000, dtype=dtype))
    aim = torch.linspace(0.8, 1.2, 2000)
    optimizer = torch.optim.SGD([weight], lr=5e-3)
    steps = Rounding(0, {})
    for steps.step in range(400):
        weight.grad = (weight.detach().float() - aim).to(dtype)
        if stochastic:
            steps.update(optimizer)
        else:
            optimizer.step()
    gap = weight.detach().float() - aim
    return float(gap.mean().abs() + gap.abs().mean())


def test_training_goes_on_where_rounding_to_nearest_stalls() -> None:
    nearest, by_chance, fp32 = distance(False), distance(True), distance(False, torch.float32)
    # The farthest weights are 0.2 from their aim, so a step is 1e-3 at most, and half of a distance in bf16 2e-3 to 4e-3.
    assert nearest == pytest.approx(0.1, rel=0.01)
    # exp(-400 x 0.005) of the way is left; the noise of a weight is within 2 distances.
    assert fp32 < 0.02 and by_chance < fp32 + 0.015


@pytest.mark.parametrize("kind", ["loop", "foreach", "fused"])
def test_the_plan_counts_the_copies(kind: str) -> None:
    params = [nn.Parameter(torch.randn(n).bfloat16()) for n in (5000, 20011, 300, 7000)]
    how = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
    optimizer = torch.optim.AdamW(params, **how[kind])
    steps = Rounding(0, {})

    def by_rounding(twin: Any) -> Any:
        return lambda: steps.update(twin[0])

    with mock.patch.object(rounding, "CHUNK_BYTES", 5300 * 16):

        def step() -> None:
            for param in params:
                param.grad = torch.ones_like(param)
            steps.update(optimizer)

        step()
        peak = step_memory(optimizer, step_of=by_rounding).peak_bytes
        for param in params:
            param.grad = torch.ones_like(param)
        measured = measure_peak(lambda: steps.update(optimizer)).peak_bytes
    at_once = step_memory(optimizer, step_of=by_rounding).peak_bytes
    assert measured == pytest.approx(peak, abs=64)
    # The copies of the largest parameter, not of all; beside them what rounds a tensor takes 12 bytes an element.
    assert 16 * 20011 < peak < 28 * 20011 + 64 and at_once > 16 * 32311


def test_a_step_that_raises_changes_nothing() -> None:
    param = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([param])
    param.grad = torch.ones_like(param)
    Rounding(0, {}).update(optimizer)
    before, data, states = param.detach().clone(), param.data_ptr(), dict(optimizer.state[param])
    param.grad = torch.ones_like(param)
    with (
        mock.patch.object(optimizer, "step", side_effect=lambda: param.data.add_(1) / "no"),
        pytest.raises(TypeError),
    ):
        Rounding(0, {}).update(optimizer)
    assert param.data_ptr() == data and torch.equal(param, before)
    assert optimizer.state[param] == states and states["exp_avg"].dtype == torch.bfloat16


def test_what_it_needs() -> None:
    with pytest.raises(ConfigError, match="weights are kept in fp32"):
        load_config(settings(2, bf16={"enabled": True, "stochastic_rounding": True}), world_size=2)

    def fn(rank: int) -> list[str]:
        muon = {"type": "Muon", "params": {"lr": 1e-3}}
        with pytest.raises(ConfigError) as owned:
            torchloom.initialize(model=build(), config=settings(2, optimizer=muon))
        with pytest.raises(ConfigError) as loop:
            torchloom.shard_model(build(), config=settings(2))
        return [str(owned.value), str(loop.value)]

    for owned, loop in run_ranks(2, fn):
        assert "sees parameters whole" in owned and "steps its optimizer itself" in loop
