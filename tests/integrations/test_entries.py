"""Entries of a framework after each other, beside its DDP run: values, whole weights on each rank, and files.

Lightning's are in `test_lightning.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from support.frameworks import (
    accelerate_alone,
    arguments,
    curve,
    loom,
    rows,
    skip_without,
)
from support.pool import run_ranks

STAGES = {"trainer": (1, 3), "accelerate": range(4), "fabric": range(4)}
"""A Trainer's walk is the dearest."""


def config(stage: int) -> dict[str, Any]:
    """Return one that compiles at stage 3 alone: entries of the others are eager, and cheap."""
    return {**loom(stage), "compile": {"enabled": stage == 3, "backend": "aot_eager"}}


def mlp(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 16))


class Next(nn.Module):
    """Predicts the next token from the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(64, 16), nn.LayerNorm(16), nn.Linear(16, 64)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.norm(self.embed(input_ids)))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


class Seen:
    """What a walk saw, in its order."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def note(self, model: nn.Module, *values: Any) -> None:
        """Keep values, and the whole weights that this rank sees now."""
        weights = getattr(model, "module", model).state_dict()
        self.rows.append((values, {key: value.clone() for key, value in weights.items()}))


def same_at_stages(
    stages: Iterable[int], walk: Callable[[int | None, Path], list[Any]], folder: Path
) -> None:
    """Take a walk with DDP and at each stage; on both ranks all that it saw is equal."""

    def run(rank: int) -> Any:
        return [walk(stage, folder / f"{stage}") for stage in (None, *stages)]

    for expected, *found in run_ranks(2, run):
        for stage, seen in zip(stages, found, strict=True):
            torch.testing.assert_close(
                seen, expected, rtol=2e-6, atol=1e-6, msg=lambda said, at=stage: f"{at}: {said}"
            )


def walk_trainer(stage: int | None, folder: Path) -> list[Any]:
    from safetensors.torch import load_file
    from transformers import Trainer, TrainingArguments

    from torchloom.integrations.transformers import TorchloomArguments, TorchloomTrainer

    seen = Seen()

    def trainer(seed: int, **changes: Any) -> Any:
        common: dict[str, Any] = {
            "optim": "sgd",
            "learning_rate": 0.5,
            "lr_scheduler_type": "constant",
            "save_strategy": "steps",
            "save_steps": 2,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "max_steps": 4,
        }
        given = arguments(folder, **{**common, **changes})
        torch.manual_seed(seed)
        model = Next()
        data = {"train_dataset": rows(), "eval_dataset": rows(10)}
        if stage is None:
            return Trainer(model=model, args=TrainingArguments(**given), **data)
        args = TorchloomArguments(torchloom=config(stage), **given)
        return TorchloomTrainer(model=model, args=args, **data)

    def evaluated(made: Any) -> tuple[Any, ...]:
        return made.evaluate()["eval_loss"], torch.tensor(made.predict(rows(10)).predictions)

    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    with accelerate_alone():
        made = trainer(0, **best, greater_is_better=True)  # the first of two
        seen.note(made.model, evaluated(made))
        if (
            stage is None
        ):  # the Trainer takes what it evaluated first for prepared, and averages nothing
            made.model._is_accelerate_prepared = False
        made.train()
        seen.note(made.model, curve(made, "loss"), curve(made, "grad_norm"), evaluated(made))
        made.args.max_steps = 3
        made.train()
        made.save_model(str(folder / "final"))
        seen.note(made.model, curve(made, "loss"))
        made.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        seen.note(made.model, curve(made, "loss"))
    with accelerate_alone():
        other = trainer(7)
        other.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        seen.note(other.model, curve(other, "loss"), evaluated(other))
        torch.distributed.barrier()
    return [*seen.rows, load_file(folder / "final/model.safetensors")]


def walk_accelerate(stage: int | None, folder: Path) -> list[Any]:
    from accelerate import Accelerator
    from safetensors.torch import load_file

    from torchloom.integrations.accelerate import TorchloomAccelerator

    seen = Seen()
    with accelerate_alone():
        accel = (
            Accelerator(cpu=True)
            if stage is None
            else TorchloomAccelerator(torchloom=config(stage), cpu=True)
        )

        def prepared(seed: int) -> Any:
            model = mlp(seed)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
            inputs = torch.randn(27, 16, generator=torch.Generator().manual_seed(1))
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
            return accel.prepare(model, optimizer, DataLoader(inputs, 4), schedule)

        def train(model: Any, optimizer: Any, data: Any, schedule: Any) -> list[Any]:
            found = []
            for x in data:
                loss = (model.train()(x) - x).square().mean()
                accel.backward(loss)
                norm = accel.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                found += [accel.reduce(loss.detach(), "mean"), norm]
            return found

        def evaluated(model: Any, data: Any) -> list[Any]:
            with torch.no_grad():
                each = [(model.eval()(x) - x).square().mean(1) for x in data]
                return [accel.gather_for_metrics(loss) for loss in each]

        parts = prepared(0)
        model, _, data, _ = parts
        seen.note(model, evaluated(model, data), train(*parts), evaluated(model, data))
        accel.save_state(str(folder / "state"))
        accel.wait_for_everyone()
        seen.note(model, train(*parts))
        accel.load_state(str(folder / "state"))
        seen.note(model, evaluated(model, data), train(*parts))
        inner = accel.unwrap_model(model)
        seen.note(inner, evaluated(inner, data))
        accel.save_model(model, str(folder / "weights"))
        weights = accel.get_state_dict(model)
        if accel.is_main_process:
            seen.rows.append({key: value.clone() for key, value in weights.items()})
        other = prepared(5)
        seen.note(other[0], train(*parts), train(*other))
        accel.save_state(str(folder / "both"))
        accel.wait_for_everyone()
        seen.note(model)
        accel.free_memory(*parts, *other)
        again = prepared(8)
        seen.note(again[0], train(*again))
        accel.load_state(str(folder / "state"))
        seen.note(again[0], evaluated(again[0], again[2]), train(*again))
    names = ("state/model", "both/model", "both/model_1", "weights/model")
    return [*seen.rows, *(load_file(folder / f"{name}.safetensors") for name in names)]


def walk_fabric(stage: int | None, folder: Path) -> list[Any]:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import LightningEnvironment

    from torchloom.integrations.lightning import TorchloomFabricStrategy

    seen = Seen()
    strategy: Any = "ddp" if stage is None else TorchloomFabricStrategy(config(stage))
    plugins: list[Any] = [LightningEnvironment()]
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=plugins)
    fabric.launch()
    inputs = torch.randn(48, 16, generator=torch.Generator().manual_seed(1))
    data = fabric.setup_dataloaders(DataLoader(inputs, 4))

    def train(model: Any, optimizer: Any) -> list[Any]:
        found = []
        for index, x in enumerate(data):
            with fabric.no_backward_sync(model, enabled=index % 2 == 0):
                loss = (model.train()(x) - x).square().mean() / 2
                fabric.backward(loss)
            if index % 2:
                norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
                if index == 3:
                    fabric.clip_gradients(model, optimizer, clip_val=1e-2)
                optimizer.step()
                optimizer.zero_grad()
                found += [fabric.all_reduce(loss.detach(), reduce_op="mean"), norm]
        return found

    def evaluated(model: Any) -> list[Any]:
        with torch.no_grad():
            return [fabric.all_gather((model.eval()(x) - x).square().mean(1).clone()) for x in data]

    def prepared(seed: int) -> Any:
        made = mlp(seed)
        return fabric.setup(made, torch.optim.SGD(made.parameters(), lr=0.5, momentum=0.5))

    with _silence():
        model, optimizer = prepared(0)
        seen.note(model, evaluated(model), train(model, optimizer), evaluated(model))
        fabric.save(folder / "state.ckpt", {"model": model, "optimizer": optimizer, "n": 3})
        seen.note(model, train(model, optimizer))
        rest = fabric.load(folder / "state.ckpt", {"model": model, "optimizer": optimizer})
        seen.note(model, rest, train(model, optimizer), evaluated(model))
        fabric.save(folder / "weights.ckpt", model.state_dict())
        kept = {"model": lambda key, _: key.startswith("0.")}
        fabric.save(folder / "part.ckpt", {"model": model}, filter=kept)
        model, optimizer = prepared(7)
        fabric.load_raw(folder / "weights.ckpt", model)
        seen.note(model, evaluated(model), train(model, optimizer))
        alone = fabric.setup_module(mlp(9))
        apart = fabric.setup_optimizers(torch.optim.SGD(alone.parameters(), lr=0.5))
        seen.note(alone, train(alone, apart))
        read = fabric.load(folder / "state.ckpt")
        files = [torch.load(folder / f"{name}.ckpt") for name in ("weights", "part")]
    return [*seen.rows, read["model"], *files]


@contextlib.contextmanager
def _silence() -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("framework", ["trainer", "accelerate", "fabric"])
def test_each_entry_after_each_other_equals_ddp(tmp_path, framework) -> None:
    skip_without({"trainer": "transformers", "fabric": "lightning"}.get(framework, framework))
    walks = {"trainer": walk_trainer, "accelerate": walk_accelerate, "fabric": walk_fabric}
    same_at_stages(STAGES[framework], walks[framework], tmp_path)
