"""The engine in the place of DeepSpeed's: it answers for its model, takes batches, and moves states away and back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torchloom
from support.pool import run_ranks
from support.runs import settings
from torchloom.engine import Engine
from torchloom.errors import ConfigError, EngineAttributeError, EngineError
from torchloom.shard import gathered

WIDTH = 6


class Regression(nn.Module):
    """A model that returns its loss."""

    scale = 3

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.zeros(1))
        self.mpu = "the model's"

    def predict(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))) + self.shift

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.predict(x) - y).square().mean()


def engine_of(stage: int = 3, **more) -> Engine:
    torch.manual_seed(0)
    data = more.pop("data", None)
    config = settings(stage, **more)
    return torchloom.initialize(model=Regression(), config=config, training_data=data)[0]


def batch(seed: int) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(seed))
    return x, y


def whole(engine: Engine) -> list[Tensor]:
    return [each.clone() for each in engine.module.state_dict().values()]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def test_it_answers_for_its_model() -> None:
    def fn(rank):
        engine = engine_of()
        model = engine.module
        assert (
            engine.scale(torch.ones((), requires_grad=True)) == 1
        )  # the engine's, not the model's
        assert engine.predict(batch(0)[0]).shape == (3, WIDTH)
        assert dict(engine.named_parameters()) == dict(model.named_parameters())
        assert [*engine.buffers()] == [model.shift]
        assert [*engine.modules()] == [*model.modules()]
        assert engine.eval() is engine
        assert engine.training is False
        assert engine.train().training is True
        assert engine.mpu == "the model's"
        assert engine.zero_param_persistence_threshold() == 20
        # Without the key, of the whole weights: the biases are more than a hundredth of this model.
        for stage in (1, 2, 3):
            default = engine_of(zero_optimization={"stage": stage})
            assert default.zero_param_persistence_threshold() == WIDTH
        for name in ("moe_layers", "aio_config", "set_train_batch_size"):
            assert not hasattr(engine, name)
            with pytest.raises(
                EngineAttributeError, match=f"'{name}' of DeepSpeed's engine is not here: "
            ):
                getattr(engine, name)
        with pytest.raises(
            EngineAttributeError, match="neither the engine nor its model Regression has"
        ):
            engine.stepp()
        weights = engine.module_state_dict()
        assert same([*engine.state_dict().values()], [*weights.values()])
        assert weights["first.weight"].shape == (WIDTH, WIDTH)
        model.second.weight  # noqa: B018  a module of its own
        for param in model.first.parameters():
            param.requires_grad_(False)
        few = engine.module_state_dict(prefix="a.", exclude_frozen_parameters=True)
        assert sorted(few) == ["a.second.bias", "a.second.weight", "a.shift"]
        doubled = {name: 2 * value for name, value in weights.items()}
        engine.load_module_state_dict({"module": doubled})
        assert same(whole(engine), [*doubled.values()])
        engine.load_module_state_dict(
            weights, custom_load_fn=lambda src, dst: dst.load_state_dict(src)
        )
        assert same(whole(engine), [*weights.values()])

    run_ranks(2, fn)


def test_batches_of_an_iterator_and_the_rates() -> None:
    def fn(rank):
        wanted, engine = (engine_of(1, gradient_accumulation_steps=2) for _ in range(2))
        losses = []
        for micro in range(2):
            loss = wanted(*batch(2 * micro + rank))
            losses.append(loss.detach())
            wanted.backward(loss)
            wanted.step()
        mean = torchloom.all_reduce(torch.stack(losses).mean(), name="test")
        before = engine.eval_batch(iter([batch(rank), batch(2 + rank)]))
        assert engine.training
        assert engine.global_samples == 0
        x, y = batch(rank)
        found = engine.train_batch(iter([{"x": x, "y": y}, batch(2 + rank)]))
        assert found == before == mean
        assert same(whole(engine), whole(wanted))
        assert engine.global_steps == 1
        with pytest.raises(EngineError, match="nothing to iterate over"):
            engine.train_batch()
        with pytest.raises(EngineError, match="a model that returns its loss, got str"):
            engine.module.forward = lambda x: "text"
            engine.eval_batch(iter([x]))
        data = TensorDataset(*torch.randn(2, 12, WIDTH))
        looped = engine_of(3, data=data)
        assert (
            len([looped.train_batch() for _ in range(5)]) == looped.global_steps == 5
        )  # 2 an epoch
        looped.set_lr(0.25)
        assert looped.get_lr() == [0.25]
        assert looped.get_mom() == [(0.9, 0.999)]
        assert (looped.global_rank, looped.dp_world_size, looped.mp_world_size) == (rank, 2, 1)

    run_ranks(2, fn)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_states_go_away_and_come_back(backend: str | None) -> None:
    def fn(rank):
        results = []
        for is_moved in (False, True):
            for stage in (1, 3):
                engine = engine_of(stage)
                if backend is not None:
                    engine.compile(backend=backend)
                for step in range(4):
                    if is_moved and step:
                        engine.offload_states(
                            **({"include": ["optim_states"]} if step == 2 else {})
                        )
                    if is_moved and step == 1:  # what TRL does: whole weights to generate with
                        with torch.no_grad(), gathered(engine.parameters()):
                            assert engine.predict(batch(0)[0]).isfinite().all()
                    if step != 3:
                        engine.reload_states()
                    assert bool(engine.offloads.names) is (is_moved and step == 3)
                    engine.backward(engine(*batch(2 * step + rank)))
                    engine.step()
                results.append(whole(engine))
                if is_moved:
                    with pytest.raises(ConfigError, match=r"offload_states\(device='nvme'\)"):
                        engine.offload_states(device="nvme")
        assert same([*results[0], *results[1]], [*results[2], *results[3]])

    run_ranks(2, fn)


@pytest.mark.parametrize("stage", [1, 3])
def test_one_reduction_of_several_backward_passes(stage: int) -> None:
    def fn(rank):
        plain, engine = engine_of(stage), engine_of(stage)
        for each in (0, 2):
            plain.backward(plain(*batch(each + rank)))
        plain.step()
        with engine.coalesce_grad_reduction():
            for each in (0, 2):
                engine.backward(engine(*batch(each + rank)))
            with pytest.raises(EngineError, match="coalesce_grad_reduction"):
                engine.step()
        engine.step()
        assert same(whole(engine), whole(plain))

    run_ranks(2, fn)


@pytest.mark.parametrize(
    ("backend", "cases"),
    [(None, [(0, 1), (1, 2), (2, 2), (3, 1)]), ("aot_eager", [(0, 1), (1, 1), (1, 2), (3, 1)])],
)
def test_whole_gradients_are_means_over_ranks(backend, cases) -> None:
    def fn(rank):
        alone = Regression()
        for stage, steps in cases:
            engine = engine_of(stage, gradient_accumulation_steps=steps)
            alone.load_state_dict(engine.module.state_dict())
            engine.module.second.bias.requires_grad_(False)
            if backend is not None:
                engine.compile(backend=backend)
            alone.zero_grad()
            for step in range(steps):
                for each in range(2):
                    (alone(*batch(10 * step + each)) / 2 / steps).backward()
                if step:
                    engine.step()
                engine.backward(engine(*batch(10 * step + rank)))
            before = [each.clone() for each in engine.local.present_gradients()]
            wanted = [each.grad for each in alone.parameters()]
            wanted[-1] = torch.zeros(WIDTH)  # frozen since
            for param, mean in zip(engine.parameters(), wanted, strict=True):
                torch.testing.assert_close(engine.full_gradient(param), mean)
            assert same(before, engine.local.present_gradients())
            assert engine.full_gradient(nn.Parameter(torch.ones(2))) is None
            engine.step()

    run_ranks(2, fn)
