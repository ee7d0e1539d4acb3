"""Hugging Face decoders, random from config: one graph each, equal to DDP."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchloom
from support.pool import run_ranks
from support.transformers_sizes import DECODER

transformers = pytest.importorskip("transformers")

SMALL = {**DECODER, "use_cache": False}
CONFIGS = {
    "llama": ("LlamaConfig", SMALL),
    "qwen3": ("Qwen3Config", {**SMALL, "head_dim": 8}),
    "mixtral": ("MixtralConfig", {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma2": ("Gemma2Config", {**SMALL, "head_dim": 8, "sliding_window": 16}),
    "gpt2": (
        "GPT2Config",
        {
            "vocab_size": 64,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "use_cache": False,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
}


def make(name: str) -> nn.Module:
    kind, sizes = CONFIGS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**sizes)
    return transformers.AutoModelForCausalLM.from_config(config)


def settings(stage: int) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
        "compile": {"deepcompile": True, "strict": True},
        "steps_per_print": float("inf"),
    }


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 64, (2, 24), generator=generator)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_one_graph_equal_to_ddp(name: str) -> None:
    def fn(rank):
        model = make(name)
        peer = nn.parallel.DistributedDataParallel(make(name), find_unused_parameters=True)
        optimizer = torch.optim.AdamW(peer.parameters(), 1e-3, weight_decay=0.0)
        engine, *_ = torchloom.initialize(model=model, config=settings(3))
        engine.compile(backend="aot_eager")
        worst = 0.0
        for step in range(3):
            ids = batch(step, rank)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            expected = peer(input_ids=ids, labels=ids).loss
            expected.backward()
            optimizer.step()
            optimizer.zero_grad()
            worst = max(worst, ((loss - expected).abs() / expected).item())
        return worst, len(engine.compile_report().graphs), engine.compile_report().fallbacks

    for worst, num_graphs, fallbacks in run_ranks(2, fn, timeout_s=300):
        assert worst < 1e-5
        assert fallbacks == []
        assert num_graphs == 1
