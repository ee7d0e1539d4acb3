"""Muon by the config, for matrices, and AdamW for the rest: as one process trains, and from files of any stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchloom
from loop.test_ownership import (
    BATCHES,
    Odd,
    assert_near,
    ids_of,
    loss_of,
    newton_schulz_in_fp32,
)
from support.optimizers import Shampoo
from support.pool import run_ranks
from torchloom.config import load_config
from torchloom.errors import ConfigError, EngineError

RATES = {"muon_lr": 2e-2, "adam_lr": 1e-2, "weight_decay": 0.1}


def config(stage: int, size: int, **rest: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": BATCHES // size,
        "gradient_clipping": 0.7,
        "optimizer": {"type": "Muon", "params": RATES},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **rest,
    }


def train(engine: Any, rank: int, size: int, first: int, last: int) -> None:
    share = BATCHES // size
    for step in range(first, last):
        for batch in range(rank * share, (rank + 1) * share):
            engine.backward(engine(ids_of(step, batch)))
            engine.step()


def in_one_process(num_steps: int) -> dict[str, Tensor]:
    model = Odd()
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if p.dim() == 2 and "embed" not in name]
    rest = [p for p in named.values() if all(p is not each for each in matrices)]
    optimizers = [
        torch.optim.Muon(matrices, lr=2e-2, weight_decay=0.1),
        torch.optim.AdamW(rest, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-10),
    ]
    with newton_schulz_in_fp32():
        for step in range(num_steps):
            loss_of(model, step, 0, 1).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.7)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in named.items()}


@pytest.mark.parametrize("compiles", [False, True])
def test_by_config_and_from_files_of_other_ranks_and_stages(tmp_path, compiles: bool) -> None:
    middle, end = in_one_process(2), in_one_process(4)

    def fn(rank: int, size: int, stage: int, come_from: str):
        engine, *_ = torchloom.initialize(model=Odd(), config=config(stage, size))
        if compiles:
            engine.compile(backend="aot_eager")
        with newton_schulz_in_fp32():
            if not come_from:
                train(engine, rank, size, 0, 2)
                assert_near(engine.module.state_dict(), middle, (size, stage))
                engine.save_checkpoint(tmp_path, f"{size}-{stage}")
            else:
                engine.load_checkpoint(tmp_path, come_from)
            train(engine, rank, size, 2, 4)
        assert_near(engine.module.state_dict(), end, (size, stage, come_from))
        assert [each["use_muon"] for each in engine.optimizer.param_groups] == [True, False]
        held = engine.optimizer.state
        named = dict(engine.module.named_parameters())
        matrix = named["stack"], named["up.weight"]
        return [any(value.dim() for value in held.get(each, {}).values()) for each in matrix]

    runs = [(2, 3, ""), (2, 1, "2-3")]
    if not compiles:
        runs += [(3, 2, "2-3"), (2, 1, ""), (3, 3, "2-1"), (2, 0, "2-3"), (2, 0, ""), (2, 3, "2-0")]
    for size, stage, come_from in runs:
        found = run_ranks(size, fn, size, stage, come_from)
        stacks, ups = zip(*found, strict=True)
        assert all(stacks)
        assert sum(ups) == (1 if stage else size)


def test_states_of_many_shapes_in_files(tmp_path) -> None:
    """Shampoo's statistics have the shapes of no parameter."""

    def fn(rank: int, size: int, come_from: str):
        settings = config(3, size)
        del settings["optimizer"]
        engine, *_ = torchloom.initialize(
            model=Odd(), config=settings, optimizer=lambda params: Shampoo(params, lr=3e-2)
        )
        if come_from:
            engine.load_checkpoint(tmp_path, come_from)
        else:
            train(engine, rank, size, 0, 3)
            engine.save_checkpoint(tmp_path, str(size))
        train(engine, rank, size, 3, 6)
        return engine.module.state_dict()

    expected, *_ = run_ranks(2, fn, 2, "")
    for size in (2, 3):
        for found in run_ranks(size, fn, size, "2"):
            assert_near(found, expected, size)


def test_several_optimizers_step_together() -> None:
    def fn(rank: int):
        settings = config(3, 2)
        del settings["optimizer"]
        model = Odd()
        named = dict(model.named_parameters())
        matrices = [p for name, p in named.items() if p.dim() == 2 and "embed" not in name]
        rest = [p for name, p in named.items() if p.dim() != 2 or "embed" in name]
        given = [
            torch.optim.Muon(matrices, lr=2e-2, weight_decay=0.1),
            torch.optim.AdamW(rest, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-10),
        ]
        engine, *_ = torchloom.initialize(model=model, config=settings, optimizer=given)
        with newton_schulz_in_fp32():
            train(engine, rank, 2, 0, 5)
        with pytest.raises(EngineError, match="a group cannot be added"):
            engine.optimizer.add_param_group({"params": []})
        return engine.module.state_dict()

    for found in run_ranks(2, fn):
        assert_near(found, in_one_process(5), "list")


def test_arguments_of_the_config() -> None:
    found = load_config(config(3, 2), world_size=2).optimizer
    assert found is not None
    assert (found.name, found.params["muon_lr"], found.params["lr"]) == ("muon", 2e-2, 1e-3)
    given = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.0, "muon_lr": 2e-3, "ns_method": "gram"}
    told = load_config(
        {**config(3, 2), "optimizer": {"type": "Muon", "params": given}}, world_size=2
    )
    assert told.optimizer is not None and "ns_method" not in told.optimizer.params
    assert (told.optimizer.params["betas"], told.optimizer.params["eps"]) == ((0.9, 0.95), 1e-10)
    assert any("ns_method" in note.path and "rounding" in note.message for note in told.notes)


def test_use_muon_of_a_parameter_takes_the_place_of_the_rule_by_names() -> None:
    def fn(rank: int):
        model = Odd()
        model.embed.weight.use_muon, model.up.weight.use_muon = True, False
        engine, *_ = torchloom.initialize(model=model, config=config(3, 2))
        muon, _ = engine.optimizer.optimizers
        held = {id(param) for group in muon.param_groups for param in group["params"]}
        named = dict(engine.module.named_parameters())
        chosen = [id(named[name]) in held for name in ("embed.weight", "up.weight", "down.weight")]
        model = Odd()
        model.stack.use_muon = True
        with pytest.raises(ConfigError, match="'stack' has use_muon = True and the shape"):
            torchloom.initialize(model=model, config=config(3, 2))
        return chosen

    assert run_ranks(2, fn) == [[True, False, True]] * 2
