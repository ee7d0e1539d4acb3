"""Architectures of transformers, random from config: stage 3 on two ranks against eager steps of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchloom
from support.pool import run_ranks
from support.transformers_sizes import DECODER, ENCODER, GPT2
from torchloom.pipeline import PRESETS

transformers = pytest.importorskip("transformers")

TEXT = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEADS = {"head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2}
ENCODER_DECODER = {
    **TEXT,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": 2,
    "dropout": 0.0,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def of(
    family: str, head: str = "ForCausalLM", config: str = "Config", **sizes: Any
) -> tuple[str, str, dict[str, Any]]:
    return f"{family}{head}", f"{family}{config}", sizes


ZOO: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": of("Llama", **DECODER),
    "llama, tied": of("Llama", **DECODER, tie_word_embeddings=True),
    "mistral": of("Mistral", **DECODER, sliding_window=16),
    "qwen2": of("Qwen2", **DECODER),
    "qwen3": of("Qwen3", **DECODER, **HEADS),
    "gemma2": of("Gemma2", **DECODER, **HEADS, sliding_window=16),
    "gemma3": of("Gemma3", config="TextConfig", **DECODER, **HEADS, sliding_window=16),
    "phi3": of("Phi3", **DECODER, pad_token_id=0),
    "mixtral": of("Mixtral", **DECODER, **EXPERTS, num_local_experts=4),
    "qwen3 moe": of(
        "Qwen3Moe", **DECODER, **HEADS, **EXPERTS, num_experts=4, moe_intermediate_size=32
    ),
    "gpt2": of("GPT2", "LMHeadModel", **GPT2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "gpt neox": of("GPTNeoX", **ENCODER),
    "opt": of(
        "OPT",
        **TEXT,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
        dropout=0.0,
    ),
    "bert": of("Bert", "ForMaskedLM", **ENCODER, **NO_DROPOUT),
    "bart": of(
        "Bart",
        "ForConditionalGeneration",
        **ENCODER_DECODER,
        max_position_embeddings=64,
    ),
    "t5": of(
        "T5",
        "ForConditionalGeneration",
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    ),
    "whisper": of(
        "Whisper",
        "ForConditionalGeneration",
        **ENCODER_DECODER,
        num_mel_bins=8,
        max_source_positions=24,
        max_target_positions=64,
    ),
    "vit": of(
        "ViT",
        "ForImageClassification",
        **NO_DROPOUT,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
        num_labels=5,
        problem_type="single_label_classification",  # else its first step writes it, and the second recompiles
    ),
}
STEPS = 4
WHY_ALL_LOGITS = {
    "vit": "they fit, as they are 40 bytes",
    "opt": "the model returns them in another shape",
    "bart": "add makes them, not a linear layer",
}
"""Models whose loss makes all logits, and how the report ends."""


def make(which: tuple[str, str, dict[str, Any]]) -> nn.Module:
    kind, config, sizes = which
    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, config)(**sizes))


def settings(**compiling: Any) -> dict[str, Any]:
    """Return the config of a run at stage 3."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
        "compile": {"strict": True, **compiling},
        "steps_per_print": float("inf"),
    }


def batch(name: str, step: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(3, 64, (2, 24), generator=generator)
    if name == "vit":
        pixels = torch.randn(2, 3, 16, 16, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(0, 5, (2,), generator=generator)}
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 48, generator=generator), "labels": tokens}
    return {"input_ids": tokens, "labels": tokens}


def alone(name: str, ranks: int) -> list[float]:
    """Take the steps in one process, eagerly, over the batches of all ranks."""
    model = make(ZOO[name])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        total = sum(model(**batch(name, step, rank)).loss for rank in range(ranks)) / ranks
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses


def trained(engine: Any, name: str, rank: int) -> list[float]:
    """Take the steps of one rank; return its losses."""
    losses = []
    for step in range(STEPS):
        loss = engine(**batch(name, step, rank)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", ZOO)
def test_losses_are_those_of_eager_steps_in_one_graph(name: str) -> None:
    def run(rank: int) -> Any:
        engine, *_ = torchloom.initialize(model=make(ZOO[name]), config=settings(deepcompile=True))
        first, *rest = PRESETS[3]
        engine.compile(backend="aot_eager", passes=[(first, {"chunk_bytes": 4096}), *rest])
        losses = trained(engine, name, rank)
        report = engine.compile_report()
        notes = [note for graph in report.graphs for each in graph.passes for note in each.notes]
        return losses, len(report.graphs), report.fallbacks, notes

    results = run_ranks(2, run, timeout_s=300)
    mean = [sum(each) / 2 for each in zip(*(losses for losses, *_ in results), strict=True)]
    expected = alone(name, 2)
    assert expected[0] > 1.0
    torch.testing.assert_close(mean, expected, rtol=1e-5, atol=0)
    for _, num_graphs, fallbacks, notes in results:
        assert fallbacks == []
        assert num_graphs == 1
        (note,) = notes
        assert note.endswith(WHY_ALL_LOGITS.get(name, "computes logits of 48 rows in parts"))
