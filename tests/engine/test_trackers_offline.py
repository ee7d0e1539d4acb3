"""The trackers themselves, where they are installed, writing to folders: `log_to` fits their functions."""

from __future__ import annotations

import os

import pytest

from support.pool import run_ranks
from support.runs import make_engine, train


def test_wandb_log_and_mlflow_log_metrics_are_passed_as_they_are(tmp_path) -> None:
    pytest.importorskip("wandb")
    pytest.importorskip("mlflow")

    def fn(rank):
        os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_DIR=str(tmp_path))
        os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
        engine, _ = make_engine(3)
        told = []
        engine.log_to(lambda metrics, step: told.append((step, metrics["loss"])), all_ranks=True)
        if rank != 0:
            train(engine, rank, 3)
            return told, None, None
        import mlflow
        import wandb

        wandb.init(project="p")
        mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
        run = mlflow.start_run()
        engine.log_to(wandb.log)
        engine.log_to(mlflow.log_metrics)
        train(engine, rank, 3)
        summary = dict(wandb.run.summary)
        wandb.finish()
        history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
        mlflow.end_run()
        return told, summary, [(each.step, each.value) for each in history]

    (told, summary, history), (same, *_) = run_ranks(2, fn)
    assert history == told == same
    assert summary["loss"] in [loss for _, loss in told]
