"""Exports of models of transformers hold the config that `from_pretrained` asks for."""

from __future__ import annotations

import json

import pytest
import torch

import torchloom
from support.frameworks import rows, skip_without, tiny_llama
from support.pool import run_ranks
from support.runs import settings
from torchloom.cli import checkpoint as command
from torchloom.errors import ConfigError

skip_without("transformers")


def test_from_pretrained_takes_each_export_and_gives_the_same_loss(tmp_path) -> None:
    batch = {name: torch.stack([row[name] for row in rows(3)]) for name in ("input_ids", "labels")}

    def fn(rank: int) -> float:
        config = settings(compile={"enabled": False})
        engine, *_ = torchloom.initialize(model=tiny_llama(tied=True), config=config)
        engine.backward(engine(**batch).loss)
        engine.step()
        engine.save_checkpoint(tmp_path / "runs")
        torchloom.save_model(engine.module, tmp_path / "saved")
        torchloom.save_model(engine.module, tmp_path / "low", dtype=torch.bfloat16)
        with torch.no_grad():
            return engine(**batch).loss.item()

    loss = run_ranks(2, fn)[0]
    from transformers import AutoModelForCausalLM

    command.export(tmp_path / "runs", tmp_path / "exported")
    named = tmp_path / "saved" / "config.json"
    command.export(tmp_path / "runs", tmp_path / "named", hf_config=named)
    for name in ("saved", "exported", "named", "low"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert model.config.architectures == ["LlamaForCausalLM"]
        if name == "low":
            assert model.dtype == torch.bfloat16
        else:
            assert model(**batch).loss.item() == pytest.approx(loss, rel=1e-6), name
    for content in ("[]", "{"):
        named.write_text(content)
        with pytest.raises(ConfigError, match="--hf-config"):
            command.export(tmp_path / "runs", tmp_path / "none", hf_config=named)
    facts = json.loads((tmp_path / "runs" / "global_step1" / "engine.json").read_text())
    assert facts["model_config"]["model_type"] == "llama"
