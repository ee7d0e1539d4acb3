"""Muon for matrices and AdamW for the rest, stepped by each framework: as its own DDP runs, also from files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from integrations.test_accelerate import loop as accelerate_loop
from integrations.test_lightning import fit, module
from integrations.test_trainer import ddp as hf_ddp
from integrations.test_trainer import sharded as hf_sharded
from loop.test_ownership import newton_schulz_in_fp32
from support.frameworks import assert_same_run, loom, rows, skip_without, tiny_llama
from support.pool import run_ranks

skip_without("lightning", "accelerate", "transformers")


class MuonWithAuxAdam(Optimizer):
    """One optimizer that does the work of two, as KellerJordan/Muon has it: groups say by `use_muon` which."""

    def __init__(self, params: Any, lr: float) -> None:
        params = [
            p for group in params for p in (group["params"] if isinstance(group, dict) else [group])
        ]
        groups = [
            {"params": [p for p in params if (p.dim() == 2) == is_muon], "use_muon": is_muon, "elementwise": not is_muon}
            for is_muon in (True, False)
        ]  # fmt: skip
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        from torch.optim import _muon

        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                first = state.setdefault("first", torch.zeros_like(param))
                first.lerp_(param.grad, 0.05)
                if group["use_muon"]:
                    update = _muon._zeropower_via_newtonschulz(first, (3.4, -4.8, 2.0), 5, 1e-7)
                else:
                    second = state.setdefault("second", torch.zeros_like(param))
                    second.lerp_(param.grad.square(), 0.05)
                    update = first / (second.sqrt() + 1e-8)
                param.add_(update, alpha=-group["lr"])
        return loss


def two(params: Any) -> list[Optimizer]:
    params = list(params)
    muon = torch.optim.Muon([p for p in params if p.dim() == 2], lr=1e-2)
    return [muon, torch.optim.AdamW([p for p in params if p.dim() != 2], lr=1e-2)]


def slower(optimizer: Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def manual() -> Any:
    """Return a module that accumulates, clips and steps two optimizers and their schedules itself."""
    made = module()
    kind = type(made)

    class Two(kind):
        automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> None:
            self.manual_backward(kind.training_step(self, batch, index) / 2)
            if index % 2:
                for each, rates in zip(self.optimizers(), self.lr_schedulers(), strict=True):
                    self.clip_gradients(each, gradient_clip_val=0.3)
                    each.step()
                    each.zero_grad()
                    rates.step()

        def configure_optimizers(self) -> Any:
            made = two(self.parameters())
            return made, [slower(each) for each in made]

    made.__class__ = Two
    return made


def automatic() -> Any:
    made = module(optimizer=MuonWithAuxAdam)
    kind = type(made)

    class Scheduled(kind):
        def configure_optimizers(self) -> Any:
            made = MuonWithAuxAdam(self.parameters(), lr=1e-2)
            return [made], [{"scheduler": slower(made), "interval": "step"}]

    made.__class__ = Scheduled
    return made


def lightning(make: Callable[[], Any], changes: dict[str, Any], config: Any, folder: Path) -> Any:
    from torchloom.integrations.lightning import TorchloomStrategy

    def run(name: str, steps: int, **more: Any) -> Any:
        strategy = "ddp" if config is None else TorchloomStrategy(config)
        given = {**changes, "limit_train_batches": 20, **more}
        found, trainer = fit(strategy, folder, module=make(), max_steps=steps, **given)
        return found, {
            k: v.clone() for k, v in trainer.strategy.lightning_module_state_dict().items()
        }

    counted = 2 if "gradient_clip_val" in changes else 1  # each step of an optimizer counts
    found, weights = run("whole", 10 * counted)
    run("half", 5 * counted, save=folder / f"{config is None}.ckpt")
    resumed, _ = run("rest", 10 * counted, resume=folder / f"{config is None}.ckpt")
    return {name: [*found[name], *resumed[name]] for name in found}, weights


def fabric(config: Any, folder: Path) -> Any:
    import lightning
    from lightning.fabric.plugins.environments import LightningEnvironment

    from torchloom.integrations.lightning import TorchloomFabricStrategy

    def run(steps: range, *, seed: int = 0, load: bool = False, save: bool = False) -> Any:
        strategy = "ddp" if config is None else TorchloomFabricStrategy(config)
        fab = lightning.Fabric(
            accelerator="cpu", devices=2, strategy=strategy, plugins=[LightningEnvironment()]
        )
        fab.launch()
        model = tiny_llama(seed=seed)
        model, *stepped = fab.setup(model, *two(model.parameters()))
        rates = [slower(each.optimizer) for each in stepped]
        state = {
            "model": model,
            **{f"o{i}": each for i, each in enumerate(stepped)},
            **{f"s{i}": each for i, each in enumerate(rates)},
        }
        if load:
            fab.load(folder / "fabric.ckpt", state)
        loader = fab.setup_dataloaders(DataLoader(rows(), batch_size=2))
        found = {"loss": [], "grad_norm": []}
        batches = list(loader)
        for step in steps:
            for micro in range(2):
                with fab.no_backward_sync(model, enabled=micro == 0):
                    loss = model(**batches[(2 * step + micro) % len(batches)]).loss / 2
                    fab.backward(loss)
            found["loss"].append(fab.all_reduce(loss.detach()).item())
            norm = 0.0
            for each, rate in zip(stepped, rates, strict=True):
                norm += fab.clip_gradients(model, each, max_norm=0.3).item()
                each.step()
                each.zero_grad()
                rate.step()
            found["grad_norm"].append(norm)
        if save:
            fab.save(folder / "fabric.ckpt", state)
        weights = fab.strategy.get_module_state_dict(
            model.module if config is None else model._forward_module
        )
        return found, {k.removeprefix("module."): v.clone() for k, v in weights.items()}

    found = run(range(10))
    if config is not None:
        run(range(5), save=True)
        resumed, _ = run(range(5, 10), seed=9, load=True)
        assert resumed["loss"] == found[0]["loss"][5:]
        assert resumed["grad_norm"] == found[0]["grad_norm"][5:]
    return found


def accelerate(config: Any, folder: Path) -> Any:
    more = {"make": two, "gradient_accumulation_steps": 2}
    found = accelerate_loop(config, steps=range(20), **more)
    if config is not None:
        accelerate_loop(config, steps=range(10), save=folder / "half", **more)
        resumed = accelerate_loop(config, steps=range(10, 20), seed=9, load=folder / "half", **more)
        assert resumed["loss"] == found["loss"][10:]
    return found, found["weights"]


def trainer(config: Any, folder: Path) -> Any:
    more = {
        "max_steps": 10,
        "gradient_accumulation_steps": 2,
        "lr_scheduler_type": "cosine",
        "max_grad_norm": 0.3,
    }
    own = {"optimizer_cls_and_kwargs": (MuonWithAuxAdam, {"lr": 1e-2})}
    model = tiny_llama()
    if config is None:
        found = hf_ddp(model, folder / "ddp", own=own, **more)
        return found, {}
    found = hf_sharded(
        model, folder / "loom", config, own=own, save_strategy="steps", save_steps=5, **more
    )
    resumed = hf_sharded(
        tiny_llama(seed=9),
        folder / "again",
        config,
        resume=str(folder / "loom/checkpoint-5"),
        own=own,
        **more,
    )
    assert resumed["loss"][-5:] == found["loss"][-5:]
    return found, {}


WAYS: dict[str, tuple[Callable[[Any, Path], Any], int]] = {
    "accelerate": (accelerate, 1),
    "lightning manual": (
        lambda config, folder: lightning(manual, {"gradient_clip_val": None}, config, folder),
        2,
    ),
    "lightning automatic": (
        lambda config, folder: lightning(automatic, {"accumulate_grad_batches": 2}, config, folder),
        1,
    ),
    "fabric": (fabric, 2),
    "trainer": (trainer, 1),
}
"""Each with a stage; other files of this folder have stage 3."""


@pytest.mark.parametrize("way", WAYS)
def test_ten_steps_and_a_resume_equal_ddp(tmp_path: Path, way: str) -> None:
    """With accumulation, clipping and schedules of each optimizer."""
    train, stage = WAYS[way]
    config = {**loom(stage), "compile": {"enabled": False}}

    def run(rank: int) -> Any:
        with newton_schulz_in_fp32():
            return train(None, tmp_path), train(config, tmp_path)

    (expected, weights), (found, own) = run_ranks(2, run)[0]
    assert_same_run(found, expected, rtol=2e-6)
    for name, value in weights.items():
        torch.testing.assert_close(own[name.removeprefix("module.")], value, rtol=0, atol=1e-5)
