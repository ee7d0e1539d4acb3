"""Ranks whose programs differ where nothing is communicated: an error on all of them, not other weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torchloom
from support.pool import run_ranks
from support.runs import settings
from torchloom.errors import AgreementError, EngineError, ShardError
from torchloom.shard import gathered

WIDTH = 16


class Net(nn.Module):
    def __init__(self, num_layers=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


def batch(rank, step):
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def told(action) -> str:
    """Return what an action raised, or "done"."""
    try:
        action()
    except (AgreementError, EngineError, ShardError) as error:
        return str(error)
    return "done"


@pytest.mark.parametrize("stage", [2, 3])  # at 0 and 1 it is refused at once
@pytest.mark.parametrize("who", [None, 0, 1])
def test_an_extra_step_of_an_engines_optimizer(stage, who) -> None:
    def fn(rank):
        engine = torchloom.initialize(model=net(), config=settings(stage))[0]

        def run():
            for step in range(4):
                engine.backward(engine(batch(rank, step)))
                if rank == who and step == 2:
                    engine.optimizer.step()
                engine.step()
            engine(batch(rank, 5))
            engine.module.state_dict()

        return told(run)

    for text in run_ranks(2, fn):
        if who is None:
            assert text == "done"
        else:
            assert f"have stepped {3 if who == 0 else 2} times on rank 0" in text


def _loop(rank, skips, beside_engine):
    model = torchloom.shard_model(net(), stage=3, persistence_threshold=0)
    # A parameter of nobody's comes first, as temperatures and logit scales do.
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(())), *model.parameters()], lr=0.1)
    engine = None
    if beside_engine:
        engine = torchloom.initialize(model=net(1), config=settings(3))[0]
    for step in range(4):
        if engine is not None:
            engine.backward(engine(batch(rank, step)))
            engine.step()
        model(batch(rank, step)).backward()
        if not (skips and rank == 1 and step == 1):
            optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("beside_engine", [False, True])
@pytest.mark.parametrize("skips", [False, True])
def test_a_step_left_out_in_a_loop_of_ones_own(skips, beside_engine) -> None:
    def fn(rank):
        return told(lambda: _loop(rank, skips, beside_engine))

    for text in run_ranks(2, fn):
        if not skips:
            assert text == "done"
        elif beside_engine:
            assert "Their optimizers have stepped 4 times on rank 0, 3 times on rank 1" in text
        else:
            assert "in step 2; rank 1 waits" in text


def test_what_a_program_notes_in_groups_is_its_own_business() -> None:
    def fn(rank):
        engine = torchloom.initialize(model=net(), config=settings(3))[0]
        for step in range(3):
            loss = engine(batch(rank, step))
            engine.backward(loss)
            engine.optimizer.param_groups[0]["last_loss"] = loss.item()
            engine.step()
        return "trained"

    assert run_ranks(2, fn) == ["trained"] * 2


@pytest.mark.parametrize("own_loop", [False, True])
@pytest.mark.parametrize("parts", [(None, "layers.2"), (None, ""), ("", "")])
def test_models_on_meta_in_different_parts(parts, own_loop) -> None:
    """Weights are made equal one by one: of rank 0 if the order is the same, else not at all."""

    def fn(rank):
        model = net(seed=rank)
        part = parts[rank]
        if part is not None:
            model.get_submodule(part).to("meta")

        def shard():
            if own_loop:
                torchloom.shard_model(model, stage=3, persistence_threshold=0)
            else:
                torchloom.initialize(model=model, config=settings(3))

        text = told(shard)
        return text, {} if text != "done" else model.state_dict()

    found = run_ranks(2, fn)
    expected = net(seed=0).state_dict()
    for text, weights in found:
        if parts[1]:
            assert "those on meta first" in text
            assert 'ranks [1]: "layers.2.weight"' in text
            continue
        assert text == "done"
        for name, value in weights.items():
            assert torch.equal(value, found[0][1][name])
            assert parts[0] is not None or torch.equal(value, expected[name])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("backend", ["", "aot_eager"])
def test_unfreezing(stage, backend) -> None:
    """Frozen after the model was sharded and unfrozen later: exact. Before: refused, nothing is lost."""

    def fn(rank, is_late):
        model = net()
        first = list(model.layers[0].parameters())
        for param in first:
            param.requires_grad_(is_late)
        config = {**settings(stage), "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        engine = torchloom.initialize(model=model, config=config)[0]
        if backend:
            engine.compile(backend=backend)
        texts = []
        for step in range(4):
            for param in first:
                param.requires_grad_(step >= 2)
            engine.backward(engine(batch(rank, step)))
            texts.append(told(engine.step))
        return texts, model.state_dict()

    for texts, _ in run_ranks(2, fn, False):
        assert texts[:2] == ["done", "done"]
        assert "'layers.0.weight' was frozen when the model was sharded" in texts[2]
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        for param in model.layers[0].parameters():
            param.requires_grad_(step >= 2)
        optimizer.zero_grad()
        ((model(batch(0, step)) + model(batch(1, step))) / 2).backward()
        optimizer.step()
    for texts, weights in run_ranks(2, fn, True):
        assert set(texts) == {"done"}
        for name, value in model.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6)


def test_a_shape_that_gathered_refuses_leaves_the_model_as_it_was() -> None:
    def fn(rank):
        model = torchloom.shard_model(net(), stage=3, persistence_threshold=0)
        before = model.state_dict()

        def change():
            with gathered(model, modifier_rank=0):
                model.layers[1].weight.data = torch.zeros(4, 4)

        text = told(change)
        model(batch(rank, 0)).backward()
        return text, all(torch.equal(before[k], v) for k, v in model.state_dict().items())

    for text, stayed in run_ranks(2, fn):
        assert "'layers.1.weight' left gathered() with shape (4, 4)" in text
        assert stayed


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("how", ["a micro-step", "a second backward", "the boundary"])
def test_backward_passes_that_one_rank_alone_takes(stage, how) -> None:
    """At stages 0 and 1 nothing travels before the boundary, where the means would be of unlike sums."""

    def fn(rank):
        accumulates = 2 if how == "the boundary" else 1
        config = {**settings(stage), "gradient_accumulation_steps": accumulates}
        engine = torchloom.initialize(model=net(), config=config)[0]

        def run():
            for step in range(6):
                if rank == 1 and step == 2:
                    if how == "a micro-step":
                        engine.backward(engine(batch(rank, 9)))
                    if how == "the boundary":
                        engine.set_gradient_accumulation_boundary(True)
                loss = engine(batch(rank, step))
                if rank == 1 and step == 2 and how == "a second backward":
                    engine.backward(loss, retain_graph=True)
                engine.backward(loss)
                engine.step()
                if how == "the boundary":
                    engine._boundary.forced = None

        return told(run)

    for text in run_ranks(2, fn):
        assert "rank 0 " in text
        assert "rank 1 " in text
        if stage < 2:
            assert how == "the boundary" or "3 on rank 0, 4 on rank 1" in text or "waits" in text


@pytest.mark.parametrize("stage", [0, 2])
def test_a_copy_that_one_rank_keeps_may_load(stage) -> None:
    """The best weights so far, on rank 0."""

    def fn(rank):
        engine = torchloom.initialize(model=net(), config=settings(stage))[0]
        for step in range(3):
            engine.backward(engine(batch(rank, step)))
            engine.step()
            if rank == 0:
                best = copy.deepcopy(engine.module)
                best.load_state_dict(net(seed=5).state_dict())
        return "trained"

    assert run_ranks(2, fn) == ["trained"] * 2


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_one_rank_loads_weights_whose_changes_all_ranks_keep(stage) -> None:
    """As under DeepSpeed's GatheredParameters; what the block does not give to all ranks is refused."""

    def fn(rank):
        model = net()
        engine = torchloom.initialize(model=model, config=settings(stage))[0]
        wanted = net(seed=5).state_dict()
        with gathered(engine.parameters(), modifier_rank=0):
            if rank == 0:
                engine.load_state_dict(wanted)
        assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
        engine.backward(engine(batch(rank, 0)))
        engine.step()
        model.register_buffer("steps", torch.zeros(1))

        def alone():
            with gathered(engine.parameters(), modifier_rank=0):
                if rank == 0:
                    model.load_state_dict({**wanted, "steps": torch.ones(1)})

        return told(alone)

    for text in run_ranks(2, fn):
        assert "Rank 0 has loaded weights that rank 1 has not" in text


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("alone", [False, True])
def test_weights_that_one_rank_alone_loads(stage, alone) -> None:
    def fn(rank):
        model = net()
        engine = torchloom.initialize(model=model, config=settings(stage))[0]

        def run():
            if rank == 0 or not alone:
                model.load_state_dict(net(seed=5).state_dict())
            for step in range(2):
                engine.backward(engine(batch(rank, step)))
                engine.step()

        return told(run)

    for text in run_ranks(2, fn):
        assert (
            text == "done" if not alone else "Rank 0 has loaded weights that rank 1 has not" in text
        )
