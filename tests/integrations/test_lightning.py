"""Lightning and Fabric on torchloom: the losses, norms, files and resumes of their own DDP runs."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from loop.test_ownership import newton_schulz_in_fp32
from support.frameworks import LOOM, assert_same_run, loom, rows, skip_without, tiny_llama
from support.pool import run_ranks
from torchloom.errors import ConfigError, ShardError

skip_without("lightning")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Leave out what Lightning says about loggers, workers and devices."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        warnings.filterwarnings("ignore", category=UserWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield


def module(*, seed: int = 0, optimizer: Any = torch.optim.AdamW) -> Any:
    """Return a LightningModule around a decoder, which keeps its losses and the norms that clipping saw."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = tiny_llama(seed=seed)
            self.heads = nn.ModuleList([nn.Linear(64, 8), nn.Linear(8, 3)])
            self.losses: list[float] = []
            self.norms: list[float] = []
            self.evaluated: list[float] = []

        def training_step(self, batch: Any, index: int) -> Any:
            out = self.model(**batch)
            extra = self.heads[1](torch.tanh(self.heads[0](out.logits.float()))).square().mean()
            loss = out.loss + 0.1 * extra
            self.log("loss", loss)
            seen = loss.detach().clone()
            torch.distributed.all_reduce(seen)
            self.losses.append(seen.item() / 2)
            return loss

        def validation_step(self, batch: Any, index: int) -> Any:
            self.evaluated.append(self.model(**batch).loss.item())

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            grads = [p.grad for p in params if p.grad is not None]
            self.norms.append(torch.nn.utils.get_total_norm(grads).item())

        def configure_optimizers(self) -> Any:
            return optimizer(self.parameters(), lr=1e-2)

    torch.manual_seed(5)
    return Module()


def loader(number: int = 48) -> DataLoader:
    return DataLoader(rows(number), batch_size=2)


def fit(strategy: Any, folder: Path, *, resume: str | None = None, **changes: Any) -> Any:
    """Train a module; return what it saw, and the strategy."""
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.environments import LightningEnvironment

    with quiet():
        common: dict[str, Any] = {
            "max_steps": 12,
            "accelerator": "cpu",
            "devices": 2,
            "gradient_clip_val": 0.5,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(folder),
            "plugins": [LightningEnvironment()],
        }
        made = changes.pop("module", None) or module()
        save_at = changes.pop("save", None)
        data = changes.pop("data", None) or loader()
        evaluate = changes.pop("evaluate", None)
        trainer = pl.Trainer(strategy=strategy, **{**common, **changes})
        trainer.fit(made, data, evaluate, ckpt_path=resume)
        if save_at is not None:
            trainer.save_checkpoint(save_at)
        return {"loss": made.losses, "grad_norm": made.norms, "eval": made.evaluated}, trainer


def graphs(strategy: Any) -> dict[str, list[Any]]:
    return {
        name: [graph.fallback for graph in session.report.graphs]
        for name, session in strategy.sessions().items()
    }


def test_a_run_equals_ddp_and_goes_on_from_its_file(tmp_path) -> None:
    def run(rank: int) -> Any:
        import torchloom.integrations.lightning as ours

        # An epoch takes six steps. Where max_steps ends it, Lightning takes one batch more of it before it goes on.
        own: dict[str, Any] = {
            "data": DataLoader(rows(24)[rank::2], batch_size=2),
            "use_distributed_sampler": False,
            "max_steps": -1,
        }
        whole: dict[str, Any] = {**own, "max_epochs": 2, "evaluate": loader(8)}
        expected, _ = fit("ddp", tmp_path, save=tmp_path / "ddp.ckpt", **whole)
        by_name, trainer = fit("torchloom", tmp_path, **{**own, "max_steps": 2})
        assert isinstance(trainer.strategy, ours.TorchloomStrategy)
        strategy = ours.TorchloomStrategy(LOOM)
        found, _ = fit(strategy, tmp_path, save=tmp_path / "loom.ckpt", **whole)
        torch.testing.assert_close(by_name["loss"], found["loss"][:2], rtol=1e-6, atol=0)
        half = ours.TorchloomStrategy(LOOM)
        fit(half, tmp_path, max_epochs=1, save=tmp_path / "half.ckpt", **own)
        again, halfway = module(seed=9), str(tmp_path / "half.ckpt")
        resumed, _ = fit(
            ours.TorchloomStrategy(LOOM), tmp_path, module=again, resume=halfway, **whole
        )
        return expected, found, resumed, graphs(half)

    expected, found, resumed, graphs_of = run_ranks(2, run, timeout_s=500)[0]
    assert_same_run(found, expected)
    torch.testing.assert_close(found["eval"], expected["eval"], rtol=1e-5, atol=0)
    assert resumed["loss"] == found["loss"][6:]  # exactly
    assert resumed["grad_norm"] == found["grad_norm"][6:]
    assert graphs_of == {"model": [None], "heads.0": [None], "heads.1": [None]}
    of_ddp, own = (
        torch.load(tmp_path / f"{name}.ckpt", weights_only=False) for name in ("ddp", "loom")
    )
    assert own["state_dict"].keys() == of_ddp["state_dict"].keys()
    for key, value in of_ddp["state_dict"].items():
        torch.testing.assert_close(
            own["state_dict"][key], value, rtol=0, atol=1e-5
        )  # twelve steps of 1e-2
    states = [each["optimizer_states"][0]["state"] for each in (of_ddp, own)]
    for index, state in states[0].items():
        for key, value in state.items():
            torch.testing.assert_close(states[1][index][key], value, rtol=1e-3, atol=1e-6)
    module().load_state_dict(own["state_dict"])


def walk(strategy: Any, folder: Path, name: str) -> Any:
    """Enter a run in each way, one after the other; return what was measured and the weights in between."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary
    from lightning.pytorch.plugins.environments import LightningEnvironment

    class Walked(pl.LightningModule):
        def __init__(self, seed: int = 0) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 16))

        def _loss(self, batch: Any) -> Any:
            return (self.net(batch) - batch).square().mean()

        def training_step(self, batch: Any, index: int) -> Any:
            return self._loss(batch)

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val", self._loss(batch), sync_dist=True)

        def test_step(self, batch: Any, index: int) -> None:
            self.log("test", self._loss(batch), sync_dist=True)

        def predict_step(self, batch: Any, index: int) -> Any:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.5)

    def data() -> DataLoader:
        return DataLoader(torch.randn(32, 16, generator=torch.Generator().manual_seed(1)), 4)

    def trainer(strategy: Any, **changes: Any) -> Any:
        best = ModelCheckpoint(folder / name, monitor="val", save_last=True)
        return pl.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=2,
            logger=False,
            enable_progress_bar=False,
            callbacks=[best, ModelSummary(max_depth=-1)],
            plugins=[LightningEnvironment()],
            **changes,
        )

    seen: list[Any] = []

    def note(made: Any, *metrics: Any) -> None:
        weights = made.lightning_module.state_dict()
        seen.append((metrics, {key: value.clone() for key, value in weights.items()}))

    with quiet():
        made, first = Walked(), trainer(strategy(), max_epochs=2)
        note(first, first.validate(made, data(), verbose=False))
        first.fit(made, data(), data())
        note(first, first.validate(made, data(), verbose=False))
        note(first, first.test(made, data(), verbose=False, ckpt_path="best", weights_only=False))
        note(first, first.predict(made, data()))
        first.fit_loop.max_epochs = 3
        first.fit(made, data(), data())
        note(first, first.test(verbose=False, dataloaders=data()))
        last = str(folder / name / "last.ckpt")
        made, second = Walked(seed=7), trainer(strategy(), max_epochs=5)
        second.fit(made, data(), data(), ckpt_path=last, weights_only=False)
        note(second, second.predict(made, data(), ckpt_path=last, weights_only=False))
        third = trainer(strategy(), max_epochs=1)
        note(third, third.validate(made, data(), verbose=False))
        third.fit(made, data(), data())
        note(third, third.validate(made, data(), verbose=False))
        third.save_checkpoint(folder / f"{name}.ckpt")
    return seen, torch.load(folder / f"{name}.ckpt", weights_only=False)["state_dict"]


@pytest.mark.parametrize("stage", [1, 3])
def test_each_entry_after_each_other_equals_ddp(tmp_path, stage) -> None:
    def run(rank: int) -> Any:
        from torchloom.integrations.lightning import TorchloomStrategy

        return walk(lambda: "ddp", tmp_path, "ddp"), walk(
            lambda: TorchloomStrategy(loom(stage)), tmp_path, "loom"
        )

    for expected, found in run_ranks(2, run):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def two_optimizers() -> Any:
    """Return a module that steps Muon and AdamW itself."""
    made = module()
    kind = type(made)

    class Two(kind):
        automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> None:
            self.manual_backward(kind.training_step(self, batch, index))
            for each in self.optimizers():
                each.step()
                each.zero_grad()

        def configure_optimizers(self) -> Any:
            params = list(self.parameters())
            return [
                torch.optim.Muon([p for p in params if p.dim() == 2], lr=1e-2),
                torch.optim.AdamW([p for p in params if p.dim() != 2], lr=1e-2),
            ]

    made.__class__ = Two
    return made


def test_two_optimizers_equal_ddp(tmp_path) -> None:
    def run(rank: int) -> Any:
        from torchloom.integrations.lightning import TorchloomStrategy

        given = {"max_steps": 8, "gradient_clip_val": None}
        with newton_schulz_in_fp32():
            expected, _ = fit("ddp", tmp_path, module=two_optimizers(), **given)
            strategy = TorchloomStrategy(LOOM)
            found, _ = fit(strategy, tmp_path, module=two_optimizers(), **given)
        owners = next(iter(strategy.sessions().values())).report.owners
        return found, expected, [each.optimizer for each in owners]

    for found, expected, owners in run_ranks(2, run):
        assert len(found["loss"]) == 4  # each step of an optimizer counts
        assert_same_run(found, expected)
        assert owners[0] == "Muon"


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "accumulation": (LOOM, {"accumulate_grad_batches": 2}),
    "stage 2": (loom(2), {}),
    "stage 0, no clipping": (loom(0), {"gradient_clip_val": None}),
    "clipping by value": (LOOM, {"gradient_clip_algorithm": "value", "gradient_clip_val": 1e-3}),
    "autocast": (LOOM, {"precision": "bf16-mixed"}),
    "not compiled": ({**LOOM, "compile": {"enabled": False}}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_other_runs_equal_ddp(tmp_path, case) -> None:
    config, changes = CASES[case]

    def run(rank: int) -> Any:
        from torchloom.integrations.lightning import TorchloomStrategy

        expected, _ = fit("ddp", tmp_path, **{"max_steps": 4, **changes})
        found, _ = fit(TorchloomStrategy(config), tmp_path, **{"max_steps": 4, **changes})
        return found, expected

    found, expected = run_ranks(2, run)[0]
    assert len(found["loss"]) >= 4
    assert_same_run(found, expected, rtol=1e-3 if case == "autocast" else 1e-6)


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    (
        "",
        {"accumulate_grad_batches": 2},
        {"gradient_accumulation_steps": 4},
        "is 4, and accumulate",
    ),
    ("", {}, {"gradient_clipping": 1.0}, "gradient_clipping is 1.0, and gradient_clip_val is 0.5"),
    ("", {"precision": "bf16-mixed"}, {"bf16": {"enabled": True}}, "precision='bf16-mixed'"),
    ("", {}, {"fp16": {"enabled": True}}, "fp16.enabled is True"),
    ("StochasticWeightAveraging", {}, {}, "StochasticWeightAveraging keeps a copy"),
    ("EMAWeightAveraging", {}, {}, "EMAWeightAveraging keeps a copy"),
    ("parameter", {}, {}, "'temperature'"),
]


def test_what_cannot_be_right_is_refused_by_name(tmp_path) -> None:
    def run(rank: int) -> list[str]:
        import lightning.pytorch.callbacks as callbacks

        from torchloom.integrations.lightning import TorchloomStrategy

        found = []
        for kind, changes, config, _ in REFUSED:
            made, changes = module(), dict(changes)
            if kind == "parameter":
                made.temperature = nn.Parameter(torch.ones(()))
            elif kind.endswith("Averaging"):
                given = {"swa_lrs": 1e-3} if kind.startswith("Stoch") else {}
                changes["callbacks"] = [getattr(callbacks, kind)(**given)]
            with pytest.raises((ConfigError, ShardError)) as told:
                fit(TorchloomStrategy({**LOOM, **config}), tmp_path, module=made, **changes)
            found.append(str(told.value))
        with pytest.raises(ConfigError, match=r"/nowhere.json: no such file"):
            TorchloomStrategy("/nowhere.json")
        with pytest.raises(ConfigError, match="find_unused_parameters"):
            TorchloomStrategy(find_unused_parameters=True)
        return found

    for told, (*_, words) in zip(run_ranks(2, run)[0], REFUSED, strict=True):
        assert words in told
