"""The model and its loss: the built-in decoder or a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchloom.recipes.train.flops import flops_per_token
from torchloom.recipes.train.model import PRESETS, Llama
from torchloom.recipes.train.options import TrainOptions


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model with all that the loop must know about it."""

    name: str
    module: nn.Module
    loss: Callable[[Callable[..., Any], Tensor], Tensor]
    """Takes the engine and a batch of (samples, `seq_len` + 1) tokens."""
    encode: Callable[[bytes], Tensor]
    """Turns text into a vector of token ids."""
    unit: Literal["byte", "token"]
    """What one token of `encode` is."""
    num_params: int
    flops_per_token: float


def build_task(options: TrainOptions) -> Task:
    """Build the model that `--model` names, with weights that depend on the seed alone.

    Raises:
        ConfigError: the folder holds no model that can be used.
    """
    torch.manual_seed(options.seed)
    if options.model in PRESETS:
        return _built_in(options)
    from torchloom.recipes.train.hf import load_folder  # needs an optional package

    folder = load_folder(options.model, seq_len=options.seq_len)
    return Task(
        name=Path(options.model).resolve().name,
        module=folder.module,
        loss=_hf_loss,
        encode=folder.encode or encode_bytes,
        unit="token" if folder.encode else "byte",
        num_params=sum(p.numel() for p in folder.module.parameters()),
        flops_per_token=flops_per_token(
            num_matmul_params=_count_matmul_params(folder.module, is_tied=folder.is_tied),
            num_layers=folder.num_layers,
            width=folder.width,
            seq_len=options.seq_len,
        ),
    )


def encode_bytes(text: bytes) -> Tensor:
    """Return the bytes themselves as token ids."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _built_in(options: TrainOptions) -> Task:
    config = PRESETS[options.model](options.seq_len)
    module = Llama(config)
    return Task(
        name=options.model,
        module=module,
        loss=_next_token_loss,
        encode=encode_bytes,
        unit="byte",
        num_params=sum(p.numel() for p in module.parameters()),
        flops_per_token=flops_per_token(
            num_matmul_params=_count_matmul_params(module, is_tied=config.tie_embeddings),
            num_layers=config.num_layers,
            width=config.dim,
            seq_len=options.seq_len,
        ),
    )


def _count_matmul_params(module: nn.Module, *, is_tied: bool) -> int:
    """Count parameters less lookups; `parameters()` yields a tied embedding once."""
    lookups = (m for m in module.modules() if isinstance(m, nn.Embedding))
    num_lookup_params = 0 if is_tied else sum(m.weight.numel() for m in lookups)
    return sum(p.numel() for p in module.parameters()) - num_lookup_params


def _next_token_loss(engine: Callable[..., Any], tokens: Tensor) -> Tensor:
    return engine(tokens[:, :-1], labels=tokens[:, 1:])


def _hf_loss(engine: Callable[..., Any], tokens: Tensor) -> Tensor:
    """Hugging Face models shift the labels themselves."""
    inputs = tokens[:, :-1]
    return engine(input_ids=inputs, labels=inputs).loss
