"""Stochastic rounding of bf16 weights: by a hash of parameter, element and step, and without a bias."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import torchloom
from support.pool import run_ranks
from torchloom.config import load_config
from torchloom.errors import ConfigError
from torchloom.loop import owner_exchanges, rounding
from torchloom.loop.elementwise import step_without_hooks
from torchloom.loop.owner_memory import owned_memory
from torchloom.loop.ownership import Ownership
from torchloom.loop.rounding import Wide, random_bits, stochastic_bf16
from torchloom.memory import WorkspaceTable, measure_peak
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


def muon_and_adamw(params: Any) -> list[torch.optim.Optimizer]:
    params = list(params)
    muon = torch.optim.Muon([p for p in params if p.dim() == 2], lr=2e-3)
    return [muon, torch.optim.AdamW([p for p in params if p.dim() != 2], lr=1e-3)]


OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "fused": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9, fused=True),
    "own": Counts,
    "muon": muon_and_adamw,
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
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


def in_engine(stage: int, kind: str, **more: Any) -> tuple[Any, dict[str, Tensor]]:
    model = build()
    engine, optimizer, *_ = torchloom.initialize(
        model=model, optimizer=OPTIMIZERS[kind](model.parameters()), config=settings(stage, **more)
    )
    train(engine, range(5))
    states = [v for state in optimizer.state.values() for v in state.values() if v.dim()]
    assert all(value.dtype == torch.bfloat16 for value in states)
    assert getattr(optimizer, "num_steps", 5) == 5
    return engine, full_state_dict(engine.module)


class Loop:
    """A loop of one's own, with what of an engine this file calls."""

    def __init__(self, stage: int, kind: str) -> None:
        self.module = torchloom.shard_model(build(), config=settings(stage))
        made = OPTIMIZERS[kind](self.module.parameters())
        self.optimizers = made if isinstance(made, list) else [made]

    def __call__(self, *given: Tensor) -> Tensor:
        return self.module(*given)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        for each in self.optimizers:
            each.step()
            each.zero_grad()


def in_loop(stage: int, kind: str, resumed_at: int | None = None) -> dict[str, Tensor]:
    """Train five steps; or three, and two by another loop, which loads what torch saves of this one."""
    loop = Loop(stage, kind)
    if resumed_at is None:
        train(loop, range(5))
        return full_state_dict(loop.module)
    train(loop, range(3))
    weights = full_state_dict(loop.module)
    states = copy.deepcopy(
        [torchloom.shard.whole_states(each).state_dict() for each in loop.optimizers]
    )
    again = Loop(resumed_at, kind)
    again.module.load_state_dict(weights)
    for optimizer, state in zip(again.optimizers, states, strict=True):
        torchloom.shard.whole_states(optimizer).load_state_dict(state)
    train(again, range(3, 5))
    return full_state_dict(again.module)


def on_ranks(rank: int, folder: str) -> list[tuple[str, dict[str, Tensor]]]:
    found = [
        (kind, in_engine(stage, kind)[1])
        for kind in OPTIMIZERS
        for stage in {"adamw": (0, 1, 3), "muon": (0, 1, 3)}.get(kind, (2,))
    ]
    found += [("muon", in_loop(stage, "muon")) for stage in (0, 1, 2)]
    found += [(kind, in_loop(1, kind, resumed_at=3)) for kind in ("adamw", "muon", "adafactor")]
    zero = {
        "stage": 2,
        "stage3_param_persistence_threshold": 8,
        "offload_optimizer": {"device": "cpu"},
    }
    with (  # a chunk, and an exchange, for each matrix
        mock.patch.object(rounding, "CHUNK_BYTES", 3000),
        mock.patch.object(owner_exchanges, "BUCKET_BYTES", 300),
    ):
        for kind in ("adamw", "muon"):
            found.append((kind, in_engine(2, kind, zero_optimization=zero)[1]))
            found.append((kind, in_loop(3, kind)))
    engine, _ = in_engine(2, "muon")
    engine.save_checkpoint(folder, tag="five")
    train(engine, range(5, 8))
    model = build()
    again, *_ = torchloom.initialize(
        model=model, optimizer=OPTIMIZERS["muon"](model.parameters()), config=settings(0)
    )
    again.load_checkpoint(folder, tag="five")
    train(again, range(5, 8))
    return [*found, *(("later", full_state_dict(each.module)) for each in (engine, again))]


def test_equal_bits_on_any_number_of_ranks_at_any_stage_and_after_a_resume(tmp_path) -> None:
    """In engines and own loops, by shards, owners and whole parameters."""
    found = [
        (world_size, index, kind, weights)
        for world_size in (1, 2, 3)
        for rank in run_ranks(world_size, on_ranks, str(tmp_path / str(world_size)))
        for index, (kind, weights) in enumerate(rank)
    ]
    references = {kind: weights for *_, kind, weights in reversed(found)}
    for world_size, index, kind, weights in found:
        for name, each in references[kind].items():
            assert torch.equal(weights[name], each), (world_size, index, kind, name)
    for kind in references:
        others = [each["first.weight"] for other, each in references.items() if other != kind]
        assert not any(torch.equal(references[kind]["first.weight"], each) for each in others)


def let_round(params: list[nn.Parameter]) -> None:
    """Let parameters of no model be rounded."""
    for param in params:
        rounding._PLACES[param] = rounding._Place(0, "", param.numel(), 0)


def distance(stochastic: bool, dtype: torch.dtype = torch.bfloat16) -> float:
    """Return how far weights are from their aim after 400 steps that are too small for bf16."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.ones(2000, dtype=dtype))
    aim = torch.linspace(0.8, 1.2, 2000)
    optimizer = torch.optim.SGD([weight], lr=5e-3)
    let_round([weight] * stochastic)
    for step in range(400):
        weight.grad = (weight.detach().float() - aim).to(dtype)
        wide = Wide(optimizer, [weight], step)
        optimizer.step()
        wide.end()
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
    let_round(params)
    known = owned_memory(optimizer)
    assert known is not None

    def step() -> None:
        ownership = Ownership(optimizer)
        ownership.begin()
        step_without_hooks(optimizer)
        ownership.bring_back()

    with mock.patch.object(rounding, "CHUNK_BYTES", 5300 * 16):
        for param in params:
            param.grad = torch.ones_like(param)
        step()
        peak = known(WorkspaceTable()).peak_bytes
        measured = measure_peak(step).peak_bytes
    at_once = known(WorkspaceTable()).peak_bytes
    assert measured == pytest.approx(peak, abs=64)
    # The copies of the largest parameter, not of all; beside them what rounds a tensor takes 12 bytes an element.
    assert 16 * 20011 < peak < 28 * 20011 + 64 and at_once > 16 * 32311


def test_a_step_that_raises_changes_nothing() -> None:
    def fn(rank: int) -> None:
        for stage, kind in ((3, "adamw"), (1, "adamw"), (3, "muon"), (0, "muon")):
            loop = Loop(stage, kind)
            train(loop, range(1))
            optimizer = loop.optimizers[0]
            states = {key: dict(state) for key, state in optimizer.state.items()}
            before = full_state_dict(loop.module)

            def interrupt(*_: Any) -> None:
                raise KeyboardInterrupt

            handle = optimizer.register_step_post_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                train(loop, range(1, 2))
            handle.remove()
            loop(*[torch.ones(shape) for shape in SHAPES])  # the next batch
            for name, each in full_state_dict(loop.module).items():
                assert torch.equal(each, before[name]), (stage, kind, name)
            assert {key: dict(state) for key, state in optimizer.state.items()} == states
            train(loop, range(1, 2))

    run_ranks(2, fn)


def test_what_it_needs() -> None:
    with pytest.raises(ConfigError, match="weights are kept in fp32"):
        load_config(settings(2, bf16={"enabled": True, "stochastic_rounding": True}), world_size=2)

    def fn(rank: int) -> list[str]:
        told = []
        for stage, kind in ((2, torch.optim.NAdam), (0, torch.optim.LBFGS)):
            model = torchloom.shard_model(build(), config=settings(stage))
            optimizer = kind(model.parameters())
            model(*[torch.ones(shape) for shape in SHAPES]).backward()
            with pytest.raises(ConfigError) as refused:
                optimizer.step(*[lambda: 1.0] * (stage == 0))
            told.append(str(refused.value))
        return told

    for kept, closure in run_ranks(2, fn):
        assert "NAdam keeps 'mu_product' in fp32" in kept and "evaluates the loss anew" in closure
