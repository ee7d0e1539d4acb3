"""What the loggers and trackers of frameworks get beside what a program gives them."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader

from integrations.test_lightning import quiet
from support.frameworks import accelerate_alone, loom, skip_without
from support.pool import run_ranks

skip_without("accelerate", "lightning")


def assert_told(logged: dict[str, float]) -> None:
    """Hold what was logged to a plan's prediction and to what was counted."""
    assert 0 < logged["torchloom/predicted_peak_bytes"] <= 64 << 20
    assert (
        0
        < logged["torchloom/measured_peak_bytes"]
        <= logged["torchloom/predicted_peak_bytes"] * 1.1
    )
    assert logged["torchloom/collectives"] > 0
    assert logged["torchloom/recompiles"] == 0
    assert "torchloom/peak_bytes" not in logged  # that of the whole process


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))


def test_trackers_of_accelerate() -> None:
    def run(rank: int) -> list[dict[str, float]]:
        from accelerate.tracking import GeneralTracker

        from torchloom.integrations.accelerate import TorchloomAccelerator

        logged: list[dict[str, float]] = []

        class Tracker(GeneralTracker):
            name, requires_logging_directory, tracker = "ours", False, None

            def store_init_configuration(self, values):
                pass

            def log(self, values, step=None, **_):
                logged.append(values)

        with accelerate_alone():
            config = loom(memory_budget="64MB")
            accel = TorchloomAccelerator(torchloom=config, cpu=True, log_with=Tracker())
            accel.init_trackers("runs")
            model = net()
            model, optimizer = accel.prepare(model, torch.optim.AdamW(model.parameters()))
            accel.log(values={"step": -1})  # nothing is known yet
            for step in range(5):
                accel.backward(model(torch.randn(4, 16)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                accel.log({"step": step}, step, log_kwargs={})
        return logged

    first, second = run_ranks(2, run)
    assert [each["step"] for each in first] == [-1, 0, 1, 2, 3, 4]
    assert first[0] == {"step": -1}
    assert_told(first[-1])
    assert second == []


def test_loggers_of_lightning_with_two_optimizers(tmp_path) -> None:
    def run(rank: int) -> dict[int, dict[str, float]]:
        import lightning.pytorch as pl
        from lightning.pytorch.loggers import CSVLogger
        from lightning.pytorch.plugins.environments import LightningEnvironment

        from torchloom.integrations.lightning import TorchloomStrategy

        logged: dict[int, dict[str, float]] = {}

        class Logger(CSVLogger):
            def log_metrics(self, metrics, step=None):
                logged.setdefault(step, {}).update(metrics)

        class Two(pl.LightningModule):
            automatic_optimization = False

            def __init__(self) -> None:
                super().__init__()
                self.nets = nn.ModuleList([net(), net()])

            def training_step(self, batch, index):
                for model, optimizer in zip(self.nets, self.optimizers(), strict=True):
                    optimizer.zero_grad()
                    self.manual_backward(model(batch).square().mean())
                    optimizer.step()

            def configure_optimizers(self):
                return [torch.optim.SGD(each.parameters(), lr=0.1) for each in self.nets]

        with quiet():
            trainer = pl.Trainer(
                strategy=TorchloomStrategy(loom(memory_budget="64MB")), accelerator="cpu", devices=2,
                max_steps=12, logger=Logger(str(tmp_path)), log_every_n_steps=2, enable_checkpointing=False,
                enable_progress_bar=False, enable_model_summary=False, plugins=[LightningEnvironment()],
            )  # fmt: skip
            trainer.fit(Two(), DataLoader(torch.randn(32, 16), batch_size=2))
        return logged

    first, second = run_ranks(2, run)
    found = {step: each for step, each in first.items() if "torchloom/collectives" in each}
    assert sorted(found) == [2, 4, 6, 8, 10]
    assert_told(found[10])
    assert second == {}
