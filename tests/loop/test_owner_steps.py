"""Steps of owners by parts, and what a step may lack: gradients, parameters, values that are finite."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import torchloom
from loop.test_ownership import (
    KINDS,
    STEPS,
    Odd,
    assert_near,
    ids_of,
    in_one_process,
    loss_of,
    newton_schulz_in_fp32,
    train,
)
from support.optimizers import Lamb, Shampoo
from support.pool import run_ranks
from support.runs import sharded
from torchloom.errors import EngineError
from torchloom.loop import owner_exchanges
from torchloom.loop.owner_exchanges import Trip
from torchloom.runtime import Communicator, lookup
from torchloom.shard import layout_of


class Told(Shampoo):
    """Says when it steps, and that it may step by parts."""

    by_parts = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Keep no count for all parameters, as `Base` does."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, group, self.state[param])

    def update(self, param: Any, group: Any, state: Any) -> None:
        super().update(param, group, state)
        STORY.append(f"step {len(param.shape)}")


STORY: list[str] = []
"""What a step did, in order, on this rank."""


class Watched(Trip):
    """Tells its turns."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        STORY.append("go")

    def turn_back(self) -> None:
        super().turn_back()
        STORY.append("turn")

    def end(self) -> None:
        super().end()
        STORY.append("end")


def test_parts_step_as_at_once_while_others_travel() -> None:
    """Buckets of about one parameter each: exchanges run beside updates, and results are those of one process."""
    kinds: dict[str, Any] = {
        "Muon and AdamW": KINDS["Muon and AdamW"],
        "torch's Adafactor": KINDS["torch's Adafactor"],
        "Shampoo": lambda model: [Told(model.parameters(), lr=3e-2)],
        "LAMB": KINDS["LAMB"],
    }
    expected = {kind: in_one_process(kind)[0] for kind in kinds}

    def fn(rank: int) -> None:
        small = mock.patch.object(owner_exchanges, "BUCKET_BYTES", 300)
        with small, newton_schulz_in_fp32(), mock.patch("torchloom.loop.ownership.Trip", Watched):
            for kind, make in kinds.items():
                for stage in (1, 3) if kind == "Shampoo" else (3,):
                    model = torchloom.shard_model(Odd(), stage, persistence_threshold=0)
                    optimizers = make(model)
                    train(model, optimizers, rank, 2)
                    assert_near(model.state_dict(), expected[kind], (kind, stage))
                    if kind != "Shampoo":
                        continue
                    STORY.clear()
                    loss_of(model, 0, rank, 2).backward()
                    optimizers[0].step()
                    for at, each in enumerate(STORY):
                        turned, before = STORY[:at].count("turn"), STORY[:at]
                        if each.startswith(
                            "step"
                        ):  # the next bucket is on its way, if there is one
                            assert before.count("go") == min(STORY.count("go"), turned + 2)
                        if each == "turn":  # and so are the weights that were stepped before
                            assert before.count("end") == max(0, turned - 1)
                    # A user's hook is called once, when all that the rank owns is there.
                    optimizers[0].register_step_post_hook(lambda *_: STORY.append("hook"))
                    STORY.clear()
                    optimizers[0].step()
                    assert STORY.count("hook") == 1
                    assert "turn" not in STORY[: STORY.index("hook")]
                    assert sum(each.startswith("step") for each in STORY) > 2

    run_ranks(2, fn)


class Liar(Lamb):
    """Keeps a count in its groups, as all of `Base` do."""

    by_parts = True


def test_a_wrong_declaration_is_found_at_the_first_step() -> None:
    def fn(rank: int) -> None:
        model = torchloom.shard_model(Odd(), 3, persistence_threshold=0)
        optimizer = Liar(model.parameters())
        loss_of(model, 0, rank, 2).backward()
        with (
            mock.patch.object(owner_exchanges, "BUCKET_BYTES", 300),
            pytest.raises(EngineError, match="declared to step by parts"),
        ):
            optimizer.step()

    run_ranks(2, fn)


class Choice(nn.Module):
    """A layer that is frozen at first, one without a use, and one that some ranks alone use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.unused, self.some = (nn.Linear(5, 5) for _ in range(3))
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, uses: bool) -> Tensor:
        x = self.frozen(torch.tanh(self.first(x)))
        # A rank without a use takes part in the gathers, as DistributedDataParallel asks for it too.
        return x + self.some(x) * (1.0 if uses else 0.0)


def test_frozen_unused_and_added_parameters() -> None:
    def steps(model: nn.Module, ranks: list[int]) -> tuple[dict[str, Tensor], dict[int, Any]]:
        early = [*model.first.parameters(), *model.frozen.parameters(), *model.unused.parameters()]
        optimizer = Lamb(early)
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": list(model.some.parameters()), "lr": 3e-2})
                model.frozen.requires_grad_(True)
            for rank in ranks:
                x = torch.full((2, 5), 1.0 + rank + step)
                (model(x, rank == 1).square().mean() / len(ranks)).backward()
            optimizer.step()
            model.zero_grad()
        return dict(model.state_dict()), optimizer.state_dict()["state"]

    expected, states = steps(Choice(), [0, 1])

    def fn(rank: int) -> None:
        for stage in (1, 2, 3):
            model = torchloom.shard_model(Choice(), stage, persistence_threshold=0)
            found, held = steps(model, [rank])
            assert_near(found, expected, stage)
            assert held.keys() == states.keys()  # nothing of what had no gradient

    run_ranks(2, fn)


def test_what_cannot_own_and_what_need_not() -> None:
    def fn(rank: int) -> None:
        for stage in (1, 3):
            model = torchloom.shard_model(Odd(), stage, persistence_threshold=0)
            loss_of(model, 0, rank, 2).backward()
            with pytest.raises(EngineError, match="its step needs a closure"):
                torch.optim.LBFGS(model.parameters()).step(lambda: 0.0)
            comm = lookup(layout_of(model).handle)
            with mock.patch.object(Communicator, "begin_exchange", None):
                before = comm.stats()
                torch.optim.AdamW(model.parameters()).step()
                # At stage 1 ranks give each other the slices that they stepped, once.
                assert comm.stats().since(before).num_collectives == (1 if stage == 1 else 0)

    run_ranks(2, fn)


def test_a_step_that_is_skipped_and_a_loss_that_is_scaled() -> None:
    """In fp16: steps with gradients that are not finite leave weights and states, on owners as elsewhere."""

    def trained(rank: int, stage: int) -> dict[str, Tensor]:
        engine = sharded(
            Odd(),
            stage,
            batch=1,
            optimizer=lambda params: Lamb(params),
            gradient_accumulation_steps=3,
            gradient_clipping=0.5,
            fp16={"enabled": True, "initial_scale_power": 6},
        )
        for step in range(STEPS):
            for batch in range(3 * rank, 3 * rank + 3):
                loss = engine(ids_of(step, batch))
                engine.backward(loss * float("inf") if (step, batch) == (2, 4) else loss)
                engine.step()
        assert engine.skipped_steps == 1
        return {name: value.float() for name, value in engine.module.state_dict().items()}

    def fn(rank: int) -> None:
        expected = trained(rank, 0)  # each rank steps whole parameters
        for stage in (1, 2, 3):
            found = trained(rank, stage)
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=2e-3, atol=2e-3)

    run_ranks(2, fn)
